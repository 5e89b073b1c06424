"""What services do for the tier: wait for it, heal and sweep it before its writer, prune it."""

from __future__ import annotations

from kvhost.paths import HostPaths
from kvhost.services.served import model_dir
from kvhost.services.service import Service, plain_env, script
from kvhost.settings import Settings

#: Files that the services share with the host scripts
TIER_MARKER = ".kvhost-tier"
NAMESPACE_FILE = ".kvhost-namespace.json"
MARKER_TEXT = "This directory is kvhost's: its pruner deletes files here.\n"


def drive_of(settings: Settings) -> str | None:
    return settings.resolved_drive_mount if settings.claims_a_drive else None


def model_drive(settings: Settings) -> str | None:
    """The drive's mount point, where the model lies on the drive."""
    mount = drive_of(settings)
    on_it = mount is not None and model_dir(settings, settings.paths).startswith(f"{mount}/")
    return mount if on_it else None


def tier_marks(settings: Settings, namespace_dir: str) -> tuple[str, ...]:
    """Files without which the tier is not the tier, but the directory below an absent mount."""
    return (f"{settings.paths.tier_dir}/{TIER_MARKER}", f"{namespace_dir}/{NAMESPACE_FILE}")


def tier_hooks(
    settings: Settings, paths: HostPaths, namespace_dir: str, writer: str
) -> tuple[tuple[str, ...], ...]:
    """Commands before the service starts that writes the tier: no other writes to it then."""
    sweep = (
        *(*script(paths, "pruner"), "sweep"),
        *("--tier", settings.paths.tier_dir),
        *("--current", namespace_dir.rpartition("/")[2]),
        *("--record", f"{paths.run}/{writer}.json"),
        *("--status", pruner_status(paths)),
        "{unclean}",
    )
    # files that a test which is dead had moved aside; before the sweep, which judges what is there
    heal = (*script(paths, "evidence_aside"), "heal", "--tier", settings.paths.tier_dir)
    return heal, sweep


def pruner_status(paths: HostPaths) -> str:
    """File that the pruner writes its status to, at every look."""
    return f"{paths.log}/pruner-status.json"


def pruner_service(settings: Settings, paths: HostPaths, namespace_dir: str) -> Service:
    gib, limit = 1 << 30, settings.limit_gib
    return Service(
        name="pruner",
        title="pruner of the tier",
        argv=(
            *(*script(paths, "pruner"), "run"),
            *("--tier", settings.paths.tier_dir),
            *("--limit-bytes", "all" if limit is None else str(int(limit * gib))),
            *("--high", str(settings.cache_high_watermark)),
            *("--low", str(settings.cache_low_watermark)),
            *("--free-floor-bytes", str(int(settings.free_floor_gib * gib))),
            *("--interval", str(settings.pruner_interval_s)),
            *("--current", namespace_dir.rpartition("/")[2]),
            *("--status", pruner_status(paths)),
        ),
        env=plain_env(paths),
        watch=(f"{paths.bin}/pruner.py", f"{paths.bin}/pruner_tier.py"),
        needs_mount=drive_of(settings),
        require=tier_marks(settings, namespace_dir),
        writes=(settings.paths.tier_dir,),
        priority=30,
    )
