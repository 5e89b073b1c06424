"""Reasons not to start that lie in directories and disk space. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvhost.plan.host import installed
from kvhost.plan.types import GIB, PlanInputs, Refusal, size, unreadable
from kvhost.report import Disk, HostReport, Part
from kvhost.schema.values import is_sent
from kvhost.settings import Settings

# An engine environment has about 40,000 files; uv's cache holds links to the same ones.
ENV_INODES = 60_000
LOST_AT_REBOOT = ("tmpfs", "ramfs")


def places(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    base, tier = settings.base_dir, settings.resolved_tier_dir
    rows = [("base_dir", base), ("tier_dir", tier)]
    for key, path in rows[: 1 if waits_for_its_drive(settings, report) else 2]:
        part = report.disk(path)
        if part.data is None:
            yield unreadable("storage", f"{key} {path}", part.why)
            continue
        yield from _place(key, path, base, part.data)
    kvhost = report.kvhost.data
    for part_name in ("base", "tier"):
        state: Part[object] | None = getattr(kvhost, part_name) if kvhost else None
        disk = report.disk(base if part_name == "base" else tier).data
        if state and state.status == "unreadable" and disk and disk.directory:
            yield unreadable("storage", f"what lies in {part_name}_dir", state.why)
    if kvhost and kvhost.base.data and kvhost.base.data.owner == "foreign":
        yield Refusal(
            "storage",
            "path_taken",
            f"base_dir {base} holds something that is not kvhost's",
            "a directory that does not exist, is empty, or is kvhost's own",
            f"{len(kvhost.base.data.entries)} or more entries: "
            + ", ".join(kvhost.base.data.entries),
            "set base_dir to another directory, or move what is there",
        )
    there = kvhost.tier.data if kvhost else None
    if there and there.foreign and not there.namespaces:
        # the run would make it the service user's own, closed to all others
        yield Refusal(
            "storage",
            "path_taken",
            f"tier_dir {tier} holds something that is not kvhost's",
            "a directory that does not exist, is empty, or holds kvhost's namespaces",
            ", ".join(there.foreign),
            "set tier_dir to a directory of its own, for example one below that",
        )


def _place(key: str, path: str, base: str, disk: Disk) -> Iterator[Refusal]:
    where = f"{disk.fs} at {disk.mount_point}"

    def no(code: str, what: str, needed: str, found: str, fix: str) -> Refusal:
        return Refusal("storage", code, f"{key} {path} {what}", needed, found, fix)

    another = f"set {key} to a directory on a disk of this host"
    if disk.real_path != path:
        # what may be written is judged by this path, and a link can come to lead elsewhere
        needed, found = "a path without links", f"it leads to {disk.real_path}"
        yield no("through_a_link", "is, or lies behind, a link", needed, found,
                 f"{key} = {disk.real_path!r}, if that is what you mean")  # fmt: skip
    if not disk.directory:
        needed, found = "directories all the way", f"{disk.ancestor} is not a directory"
        yield no("not_a_directory", "cannot be made", needed, found, another)
    if disk.read_only:
        yield no(
            "read_only", "cannot be written", "a filesystem mounted rw", f"{where}, ro", another
        )
    if key == "base_dir" and disk.noexec:
        needed, fix = "a filesystem without noexec", f"{another}, or mount it with exec"
        yield no("noexec", "cannot hold programs", needed, f"{where}, noexec", fix)
    if disk.fs in LOST_AT_REBOOT:
        needed = "a filesystem that survives a reboot"
        yield no("lost_at_reboot", "is in memory", needed, f"{where}, {size(disk.total)}", another)
    blocked = disk.blocked_by
    if blocked and not f"{blocked}/".startswith(f"{base}/"):  # below base_dir the run mends it
        needed = "every directory above it open (x) to the service's user"
        fix = f"{another}, or let that user pass: chmod o+x {blocked}"
        yield no("not_passable", "is out of the service's reach", needed, f"{blocked} is not", fix)


def room(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """Disk space, summed for each filesystem that holds several of the things."""
    kvhost = report.kvhost.data
    base, tier = report.disk(settings.base_dir).data, report.disk(settings.resolved_tier_dir).data
    if kvhost is None or base is None or tier is None:
        return  # said already
    for name, part in (("engine environments", kvhost.envs), ("models", kvhost.models)):
        if part.status == "unreadable":
            yield unreadable("engine" if part is kvhost.envs else "model", name, part.why)
    install_env = not installed(kvhost.envs, facts.lock_digest)
    used = kvhost.tier.data.bytes if kvhost.tier.data else 0
    on_base: list[tuple[str, int]] = []
    if install_env:
        on_base.append(("the engine's environment", facts.env_disk_bytes))
        if (settings.engine_bundle or "host:").partition(":")[0] != "host":
            on_base.append(("the bundle's copy", facts.download_bytes))
    if model_bytes := model_to_store(settings, report, facts):
        on_base.append(("the model", model_bytes))
    limit = settings.limit_gib or 0.0  # None is what there is
    on_tier = [
        (f"cache_limit_gib {limit:g} GiB", int(limit * GIB)),
        (f"free_floor_gib {settings.free_floor_gib:g} GiB", int(settings.free_floor_gib * GIB)),
    ]
    if waits_for_its_drive(settings, report):
        on_tier = []
    if base.mount_point == tier.mount_point:
        rows = [(tier, on_base + on_tier, used)]
    else:
        rows = [(base, on_base, 0), (tier, on_tier, used)]
    for disk, parts, ours in rows:
        needed, have = sum(n for _, n in parts), disk.avail + ours
        if needed <= have:
            continue
        spare = (have - needed) / GIB + limit
        fits = disk is tier and spare >= 1
        lower = f"lower cache_limit_gib to {math.floor(spare)}, or " if fits else ""
        held = f", {size(ours)} of it the cache's own files" if ours else ""
        words = [what if "_gib" in what else f"{what} {size(n)}" for what, n in parts]
        yield Refusal(
            "storage",
            "disk_too_small",
            f"the filesystem at {disk.mount_point} is too small for what goes there",
            f"{size(needed)}: {', '.join(words)}",
            f"{size(have)} of {size(disk.total)}{held}",
            f"{lower}free some space, or set base_dir or tier_dir to a larger filesystem",
        )
    if install_env and base.inodes > 0 and base.inodes_free < ENV_INODES:
        yield Refusal(
            "storage",
            "too_few_inodes",
            f"the filesystem at {base.mount_point} has too few inodes left",
            f"{ENV_INODES} for the engine's environment",
            f"{base.inodes_free} free of {base.inodes}",
            "remove small files there, or set base_dir to another filesystem",
        )


def waits_for_its_drive(settings: Settings, report: HostReport) -> bool:
    """Whether the tier will lie on a drive that is not mounted yet: what lies below its path now
    is another filesystem, and says nothing. plan_drives judges the drive."""
    tier = report.disk(settings.resolved_tier_dir).data
    mounted = tier is not None and tier.mount_point == settings.resolved_drive_mount
    return settings.claims_a_drive and not mounted


def model_to_store(settings: Settings, report: HostReport, facts: PlanInputs) -> int:
    """Bytes of a model that this run would write below base_dir; 0 when none."""
    kvhost = report.kvhost.data
    source = settings.model_source
    if source.startswith("/") or is_sent(source) or kvhost is None:
        return 0  # of what is sent, the sender asks for the room
    if settings.model_source == "builtin":
        return 0 if installed(kvhost.models, facts.builtin_digest) else facts.builtin_bytes
    if settings.model_revision and installed(kvhost.models, settings.model_revision):
        return 0
    return facts.model.weights_bytes if facts.model else 0
