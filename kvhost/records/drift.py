"""Whether a host is still what its settings, its lock and its receipt say. Pure.

The host is compared, never the receipt that it holds: files, environment, services, mounts as
onhost/drift_look.py and onhost/report.py saw them. What could not be read is never "the same".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhost.records import receipts

NOTHING = "nothing"
SECRETS = ("the one that is set", "another")


@dataclass(frozen=True)
class Drift:
    """One thing that is not as it should be. Holds no secret: digests, owners, versions, states."""

    part: str
    what: str
    wanted: str
    found: str


@dataclass(frozen=True)
class File:
    """What should lie at a path. ``sha256`` None: its content is not compared. ``secret``: it is,
    and its digest is told to nobody."""

    sha256: str | None
    mode: str
    user: str = "root"
    secret: bool = False


@dataclass(frozen=True)
class Check:
    """A command by whose JSON a run decides whether something is to be done."""

    part: str
    argv: tuple[str, ...]
    good: Callable[[Any], bool]
    wanted: str


@dataclass(frozen=True)
class Wanted:
    """What settings and lock would render now, and the receipt that the controller keeps."""

    files: Mapping[str, File]
    directories: Mapping[str, tuple[str, str]]
    env: str
    current: str
    pins: Mapping[str, str]
    settings: str
    lock: str
    system: Mapping[str, Any]
    kept: Mapping[str, Any]
    #: paths whose mounts are compared with the kept receipt's
    tier_dir: str = ""
    #: what is compared; a runner that adopts somebody else's program has fewer
    parts: tuple[str, ...] = (
        *("files", "directories", "absent", "checks", "model", "env", "services", "mounts"),
        *("collector", "answers"),
    )
    #: what writes the figures for Prometheus, where it is wanted
    collector: str | None = None
    #: of these files and directories the group does not matter to a run
    any_group: frozenset[str] = frozenset()
    #: path -> the text that a file begins with which a run removes, "" where all are removed
    absent: Mapping[str, str] = field(default_factory=dict)
    #: what it is -> how a run asks for it
    checks: Mapping[str, Check] = field(default_factory=dict)
    #: path of the model, and its digest by the kept receipt
    model: tuple[str, str] = ("", "")


@dataclass
class Found:
    """``unreadable``: what keeps a host from being called the same."""

    rows: list[Drift] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "unreadable" if self.unreadable else "drift" if self.rows else "same"


def compare(wanted: Wanted, seen: Mapping[str, Any], held: Any, drive: Sequence[str]) -> Found:
    """``seen``: what drift_look.py printed. ``held``: the receipt on the host, None without one.
    ``drive``: what `drive_apply.py check` found wrong."""
    found = Found()
    for name in wanted.parts:
        part = seen.get(name) or {"status": "unreadable", "why": "it was not told"}
        if part["status"] == "unreadable":
            found.unreadable.append(f"{name}: {part['why']}")
        elif part["status"] == "absent":
            found.rows.append(Drift(name, str(part["why"]), "there", NOTHING))
        else:
            _COMPARERS[name](found.rows, wanted, part["data"])
    found.rows += [Drift("drive", what, "as claimed", "not so") for what in drive]
    _receipts(found.rows, wanted, held)
    return found


def _files(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    for path, file in sorted(wanted.files.items()):
        there = seen.get(path)
        if there is None or there["kind"] != "file":
            rows.append(Drift("file", path, "a file", there["kind"] if there else NOTHING))
            continue
        if file.sha256 is not None and there["sha256"] != file.sha256:
            given, found = file.sha256, str(there["sha256"])
            told = [f"sha256 {digest[:12]}" for digest in (given, found)]
            rows.append(Drift("file", path, *(SECRETS if file.secret else told)))
        _owner(rows, wanted, path, (file.user, file.mode), there)
    if "env" not in wanted.parts:
        return
    link = seen.get(wanted.current)
    target = link.get("target") if link and link["kind"] == "link" else None
    if target != wanted.env:
        rows.append(Drift("engine", wanted.current, wanted.env, target or NOTHING))


def _owner(
    rows: list[Drift], wanted: Wanted, path: str, own: tuple[str, str], there: Mapping[str, Any]
) -> None:
    """Its group is its owner's own."""
    user, group, mode = there["user"], there["group"], there["mode"]
    same_group = path in wanted.any_group or group == own[0]
    if (user, mode) != own or not same_group:
        who = user if same_group else f"{user}:{group}"
        rows.append(Drift("file", path, " ".join(own), f"{who} {mode}"))


def _directories(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    for path, own in sorted(wanted.directories.items()):
        there = seen.get(path)
        if there is None or there["kind"] != "directory":
            rows.append(Drift("file", path, "a directory", there["kind"] if there else NOTHING))
        else:
            _owner(rows, wanted, path, own, there)


def _absent(rows: list[Drift], wanted: Wanted, seen: Mapping[str, bool]) -> None:
    rows += [Drift("file", path, NOTHING, "left over") for path in wanted.absent if seen.get(path)]


def _checks(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    for what, check in wanted.checks.items():
        said = seen.get(what) or {"why": "it was not told", "data": None}
        if said["why"] is not None:
            rows.append(Drift(check.part, what, check.wanted, str(said["why"])))
        elif not check.good(said["data"]):
            rows.append(Drift(check.part, what, check.wanted, "not so"))


def _model(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    """Of weights only size, inode and times are looked at, as every run does."""
    path, digest = wanted.model
    if any((row.part, row.what) == ("model", path) for row in rows):
        return  # one reason is enough
    if seen["changed"]:
        names = ", ".join(seen["changed"][:3])
        rows.append(Drift("model", path, "as it was when its digest was taken", f"other: {names}"))
    elif seen["digest"] != digest:
        rows.append(Drift("model", path, digest[:12], str(seen["digest"])[:12]))


def _env(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    before = len(rows)
    packages = seen["packages"]
    for name, version in sorted(wanted.pins.items()):
        if packages.get(name) != version and (version or name not in packages):
            there = packages.get(name, NOTHING)
            rows.append(Drift("engine", f"package {name}", version, there))
    for name in sorted(set(packages) - set(wanted.pins)):
        rows.append(Drift("engine", f"package {name}", NOTHING, packages[name]))
    if not seen["whole"]["complete"] and len(rows) == before:
        rows.append(Drift("engine", wanted.env, "as it was built", str(seen["whole"]["why"])))
    elif not seen["whole"].get("proven", True):
        rows.append(Drift("engine", wanted.env, "proven with this driver", "with another"))


def _services(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    for name, row in seen["services"].items():
        if row["state"] != "RUNNING" or not row["alive"]:
            state = f"{row['state']} ({row['detail']})"
            rows.append(Drift("service", name, "RUNNING", state))
        elif not row["current"]:
            rows.append(
                Drift("service", name, "with its present configuration", "with an older one")
            )
    if not seen["supervisor_fresh"]:
        what = seen["manager"]
        rows.append(Drift("service", what, "has read and enabled the present files", "has not"))


def _collector(rows: list[Drift], wanted: Wanted, seen: Any) -> None:
    if wanted.collector is not None and seen != "RUNNING":
        rows.append(Drift("service", wanted.collector, "RUNNING", str(seen)))


def _answers(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    """Processes that are there and do not answer: hanging, or still loading a model."""
    if not any(row.part == "service" for row in rows):  # else that is why
        rows += [
            Drift("service", service, "answers", f"it does not: {missing}")
            for service, missing in seen.items()
            if missing is not None
        ]


def _mounts(rows: list[Drift], wanted: Wanted, seen: Mapping[str, Any]) -> None:
    before = wanted.kept.get("system", {}).get("tier")
    there = seen.get(wanted.tier_dir)
    if before is None or there is None:
        return  # of a claimed drive drive_apply.py knows more
    now = {key: there[key] for key in ("mount_point", "fs")}
    if now != before:
        rows.append(Drift("mount", wanted.tier_dir, _mount(before), _mount(now)))


def _mount(row: Mapping[str, Any]) -> str:
    return f"{row.get('fs')} at {row.get('mount_point')}"


#: in the order of Wanted.parts, which ends with the one that looks at the rows before it
_COMPARERS = {
    "files": _files, "directories": _directories, "absent": _absent, "checks": _checks,
    "model": _model, "env": _env, "services": _services, "mounts": _mounts,
    "collector": _collector, "answers": _answers,
}  # fmt: skip


def _receipts(rows: list[Drift], wanted: Wanted, held: Any) -> None:
    kept = wanted.kept
    if kept.get("settings") != wanted.settings:
        was = str(kept.get("settings"))[:12]
        rows.append(Drift("settings", "digest of the settings", wanted.settings[:12], was))
    engine = kept.get("engine") or {}
    if engine.get("digest") != wanted.lock:
        was = f"{engine.get('lock')} {str(engine.get('digest'))[:12]}"
        rows.append(Drift("lock", "the engine's lock", wanted.lock[:12], was))
    for key, value in sorted(wanted.system.items()):
        before = kept.get("system", {}).get(key)
        if key != "tier" and before != value:
            rows.append(Drift("system", key, _plain(before), _plain(value)))
    if not isinstance(held, dict):
        rows.append(Drift("receipt", "on the host", "the one that this controller keeps", NOTHING))
        return
    for key, old, new in _outside(receipts.differences(dict(kept), held)):
        rows.append(Drift("receipt", key, _plain(old), _plain(new)))


def _outside(rows: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Many files that differ are one row: the files themselves are compared above."""
    kept: dict[str, tuple[str, Any, Any]] = {}
    for key, old, new in rows:
        top = re.match(r"(files|scripts)\.", key)
        if top:
            kept[top[1]] = (top[1], "as kept here", "others: another run was here")
        else:
            kept[key] = (key, old, new)
    return list(kept.values())


def _plain(value: Any) -> str:
    if value is None:
        return NOTHING
    text = str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text[:120]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def pins_of(lock: str) -> dict[str, str]:
    """Name -> version of what a lock pins, "" where it names a file; as `drift_look.packages`."""
    pins = {}
    for name, _, version in re.findall(r"(?m)^([A-Za-z0-9._-]+)( @ \S+|==([^\s;\\]+))", lock):
        pins[re.sub(r"[._-]+", "-", name).lower()] = version
    return pins
