"""A rented container: what is not on its volume is gone when it is stopped. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from kvhost.plan.types import PlanInputs, Refusal
from kvhost.report import HostReport
from kvhost.settings import Settings

#: filesystems of the container's own disk
OWN_DISK = ("overlay", "tmpfs", "ramfs", "aufs")
#: settings with a path on the host whose loss at a stop is no harm, and why
HARMLESS = {
    "python": "it belongs to the image, as all programs of the system do",
    "engine_wheel": "only read while it is installed; the environment lies on the volume",
    "engine_bundle": "only read while it is installed; the environment lies on the volume",
    "llama_binary": "copied into the environment, which lies on the volume",
    "ollama_archive": "only read while it is unpacked; what it held lies on the volume",
    "monitoring_textfile_dir": "its one file is written anew, for a node_exporter of the image",
}


def pod_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """With volume_dir: paths off the volume, and a volume that is not there."""
    volume = settings.volume_dir
    if volume is None:
        return
    for key, path in _kept(settings):
        if not _below(path, volume):
            instead = PurePosixPath(volume, "kvhost", _NAMES.get(key, ""))
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


#: what a setting's directory is called below base_dir
_NAMES = {"tier_dir": "tier", "model_dir": "models", "model_source": "models"}


def _kept(settings: Settings) -> Iterator[tuple[str, str]]:
    """The settings whose paths must outlive a stop. Those of a drive are refused as a whole."""
    yield "base_dir", settings.base_dir
    yield "tier_dir", settings.resolved_tier_dir
    if settings.model_dir is not None:  # else in base_dir
        yield "model_dir", settings.model_dir
    if settings.model_source.startswith("/"):
        yield "model_source", settings.model_source


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
