"""The environment of Ollama's server: as a drop-in beside its unit, or for launch.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost.paths import HostPaths
from kvhost.settings import Settings

UNIT = "ollama.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/kvhost.conf"


def variables(settings: Settings) -> dict[str, str]:
    """Of the server's environment, only those that the settings ask for; none is a secret."""
    address = settings.api_host
    found = {
        "OLLAMA_HOST": f"{f'[{address}]' if ':' in address else address}:{settings.api_port}",
        "OLLAMA_KV_CACHE_TYPE": settings.ollama_kv_cache_type,
    }
    quantised = settings.ollama_kv_cache_type != "f16"
    flash = settings.ollama_flash_attention
    if flash != "auto" or quantised:
        found["OLLAMA_FLASH_ATTENTION"] = "0" if flash == "off" else "1"
    if settings.ollama_num_parallel is not None:
        found["OLLAMA_NUM_PARALLEL"] = str(settings.ollama_num_parallel)
    if settings.ollama_keep_alive is not None:
        found["OLLAMA_KEEP_ALIVE"] = settings.ollama_keep_alive
    if "max_model_len" in settings.model_fields_set:
        found["OLLAMA_CONTEXT_LENGTH"] = str(settings.max_model_len)
    if settings.ollama_archive is not None or settings.model_dir or settings.claims_a_drive:
        found["OLLAMA_MODELS"] = f"{settings.resolved_model_dir}/ollama"
    return dict(sorted(found.items()))


def dropin_text(settings: Settings, paths: HostPaths) -> str:
    """A path of a setting has no character that systemd would read otherwise, except none at all:
    kvhost/schema/values.py lets no % and no quote through."""
    lines = [
        # by this line ollama_unit.py tells its own from others'
        f"# Written by kvhost for {paths.base_dir}. Changes here are undone by the next run:",
        "# put yours into another file here. The unit itself is not kvhost's.",
        "[Service]",
        *(f'Environment="{name}={value}"' for name, value in variables(settings).items()),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Clash:
    """Another place that sets a variable of ours. ``wins``: theirs counts, not ours."""

    variable: str
    ours: str
    theirs: str | None
    place: str
    wins: bool


def clashes(look: Mapping[str, Any], wanted: Mapping[str, str]) -> list[Clash]:
    """What of ollama_unit.py's look() sets our variables to another value than ours.

    systemd takes the unit, then all drop-ins in the order of their file names whatever directory
    they are in, then the environment files; what comes last counts (systemd.exec(5)).
    """
    found: list[Clash] = []
    for name, ours in wanted.items():
        rows = [row for row in look["sets"] if row["variable"] == name and row["file"] != DROP_IN]
        later = [row for row in rows if comes_later(row, look["fragment"])]
        if later:
            found += _clash(name, ours, later[-1], wins=True)
        elif rows:
            found += _clash(name, ours, rows[-1], wins=False)
    return found


def _clash(name: str, ours: str, row: Mapping[str, Any], *, wins: bool) -> Sequence[Clash]:
    theirs = row["value"]
    if theirs == ours:
        return ()
    return (Clash(name, ours, theirs, f"{row['file']}:{row['line']}", wins),)


def comes_later(row: Mapping[str, Any], fragment: str) -> bool:
    """Whether what a row says counts more than our drop-in."""
    path = str(row["file"])
    if path == fragment:
        return bool(row["last"])
    if not path.endswith(".conf") or (".service.d/" not in path and "/service.d/" not in path):
        return True  # an environment file
    return bool(row["last"]) or path.rpartition("/")[2] > DROP_IN.rpartition("/")[2]
