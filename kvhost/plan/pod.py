"""A rented container: what is not on its volume is gone when it is stopped. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from kvhost.plan.types import PlanInputs, Refusal
from kvhost.report import HostReport
from kvhost.settings import Settings

#: filesystems of the container's own disk
OWN_DISK = ("overlay", "tmpfs", "ramfs", "aufs")


def pod_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """With volume_dir: paths off the volume, and a volume that is not there."""
    volume = settings.volume_dir
    if volume is None:
        return
    kept = [("base_dir", settings.base_dir), ("tier_dir", settings.resolved_tier_dir)]
    if settings.model_source.startswith("/"):
        kept.append(("model_source", settings.model_source))
    for key, path in kept:
        if not _below(path, volume):
            name = "models" if key == "model_source" else "tier" if key == "tier_dir" else ""
            instead = PurePosixPath(volume, "kvhost", name)
            yield Refusal(
                "storage",
                "off_the_volume",
                f"{key} {path} is lost when the container is stopped",
                f"a path below volume_dir {volume}",
                "one on the container's own disk",
                f"{key} = {str(instead)!r}",
            )
    if settings.claims_a_drive:
        yield Refusal(
            "storage",
            "off_the_volume",
            "a drive is claimed in a rented container",
            f"everything on the volume at {volume}",
            "settings drive_… that claim a drive",
            "leave them out, or leave volume_dir out on a machine that has drives of its own",
        )
    disk = report.disk(settings.base_dir).data
    if disk is None or not _below(settings.base_dir, volume):
        return  # said already
    near = _below(disk.mount_point, volume) or _below(volume, disk.mount_point)
    if disk.mount_point == "/" or not near or disk.fs in OWN_DISK:
        yield Refusal(
            "storage",
            "no_volume",
            f"nothing is mounted at volume_dir {volume}",
            "a volume that outlives the container",
            f"{disk.fs} at {disk.mount_point}",
            "attach the volume (the provider says where it is mounted), or correct volume_dir",
        )


def pod_notes(settings: Settings) -> list[str]:
    """How what is lost at a stop comes back."""
    if settings.volume_dir is None:
        return []
    base = settings.base_dir
    return [
        f"When the container is stopped, all but {settings.volume_dir} is lost. After it is "
        f"started: kvhost up again, or as its start command: python3 {base}/bin/pod_start.py "
        f"--base {base}"
    ]


def _below(path: str, top: str) -> bool:
    return PurePosixPath(path).is_relative_to(top)
