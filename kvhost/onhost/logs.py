#!/usr/bin/env python3
"""Shows the services' logs, the last error first, without secrets: logs.py --base DIR

Read are log/NAME.log and its predecessors where supervisord runs the services, the journal of
kvhost-NAME.service where systemd does. Keys in secrets/ are replaced by ***, wherever they stand,
and so is what looks like one. With --json one object; otherwise text for people, on stdout.
Times are the host's; a line without one has that of the line before it. Exit: 0 shown, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import bounded
    from kvhost.onhost.masking import mask_text
    from kvhost.onhost.service_names import adopted
    from kvhost.onhost.service_names import names as service_names
    from kvhost.onhost.services_host import alive
else:  # it lies beside this file on a host, where there is no package kvhost
    import bounded
    from masking import mask_text
    from service_names import adopted
    from service_names import names as service_names
    from services_host import alive

SUPERVISOR = "supervisord"
#: a unit of somebody else's (docs/ollama.md)
OLLAMA = "ollama"
UNIT = "kvhost-{}.service"
#: bytes read from the end of each file
MOST_BYTES = 4 << 20
JOURNAL_S = 60
MOST_ERRORS, MOST_LINES = 3, 60
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_HIGHER = {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# vLLM: 11-29 19:51:02; LMCache, supervisord: 2026-11-29 19:50:55,987; ours: a T
_TIME = re.compile(r"\b(?:(\d{4})-)?(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")
_SPAN = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Line(NamedTuple):
    time: datetime.datetime | None
    level: str
    text: str


def services(base: str) -> tuple[str, ...]:
    """Those of this host, and what runs them; an adopted unit too."""
    return (*service_names(base), *((OLLAMA,) if adopted(base) else (SUPERVISOR,)))


def unit_of(name: str) -> str:
    return f"{OLLAMA}.service" if name == OLLAMA else UNIT.format(name)


def since(text: str, now: datetime.datetime) -> datetime.datetime:
    """ "2h" before now, or a local time "2026-11-29 19:00". Raises ValueError."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match:
        return now - datetime.timedelta(seconds=int(match.group(1)) * _SPAN[match.group(2)])
    try:
        given = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--since {text!r}: write 30m, 2h or 2026-11-29 19:00") from None
    return given.astimezone().replace(tzinfo=None) if given.tzinfo else given


def time_of(text: str, now: datetime.datetime) -> datetime.datetime | None:
    match = _TIME.search(text[:120])
    if not match:
        return None
    year, *rest = match.groups()
    try:
        found = datetime.datetime(int(year or now.year), *map(int, rest))  # type: ignore[arg-type]
    except ValueError:
        return None
    # vLLM leaves the year out: what would lie ahead is of the last
    return found.replace(year=now.year - 1) if not year and found > now else found


class Mask:
    """Takes secrets out of a text: those of this host by their value, others by their look."""

    def __init__(self, base: str) -> None:
        self.values: list[str] = []
        folder = os.path.join(base, "secrets")
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            names = []  # not root: what looks like a secret still goes
        for name in names:
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as handle:
                    value = handle.read().strip()
            except (OSError, UnicodeDecodeError):
                continue
            if len(value) >= 4:
                self.values.append(value)

    def __call__(self, text: str) -> str:
        for value in self.values:
            text = text.replace(value, "***")
        return mask_text(text)


def log_path(base: str, name: str) -> str:
    return os.path.join(base, "log", f"{name}.log")


def read_files(base: str, name: str) -> list[str]:
    """The last lines of log/NAME.log and what it was before; the directory is the service's."""
    texts: list[str] = []
    left = MOST_BYTES
    for suffix in ("", ".1", ".2", ".3"):
        path = log_path(base, name) + suffix
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        with os.fdopen(fd, "rb") as handle:
            handle.seek(max(os.fstat(fd).st_size - left, 0))
            content = handle.read(left)
        texts.insert(0, content.decode(errors="replace"))
        left -= len(content)
        if left <= 0:
            break
    return "".join(texts).splitlines()


def read_journal(name: str) -> list[str] | None:
    """None where systemd does not run this service."""
    unit = unit_of(name)
    if not os.path.isdir("/run/systemd/system") or shutil.which("journalctl") is None:
        return None
    known = subprocess.run(
        ["systemctl", "cat", "--no-pager", unit], capture_output=True, check=False
    )
    if known.returncode != 0:
        return None
    argv = ["journalctl", "--no-pager", "-q", "-u", unit, "-n", "20000", "-o", "short-iso"]
    done = bounded.run(argv, JOURNAL_S, MOST_BYTES, tail=True)
    if done.code != 0:
        raise OSError(f"journalctl: {done.err.strip()[-600:]}")
    # 2026-11-29T19:51:02+0000 HOST PROGRAM[PID]: text
    head = re.compile(r"^(\S+)T(\S+?)[+-]\d+ \S+ \S+: ")
    return [head.sub(r"\1 \2 ", line) for line in done.out.splitlines()]


def parsed(raw: list[str], now: datetime.datetime) -> list[Line]:
    lines: list[Line] = []
    time, level = None, "INFO"
    for text in (_COLOURS.sub("", line).rstrip() for line in raw):
        found, own = _LEVEL.search(text[:160]), time_of(text, now)
        time = own or time
        if found:
            level = _HIGHER.get(found.group(1), found.group(1))
        elif text.startswith("Traceback (most recent call last)"):
            level = "ERROR"
        elif own or not (text.startswith((" ", "\t")) or level == "ERROR"):
            level = "INFO"
        lines.append(Line(time, level, text))
    return lines


def blocks(lines: list[Line]) -> list[dict[str, Any]]:
    """Runs of error lines with the time of their first, the last run first."""
    found: list[dict[str, Any]] = []
    inside = False
    for line in lines:
        if line.level == "ERROR":
            if not inside:
                time = line.time.isoformat(" ") if line.time else None
                found.append({"time": time, "lines": []})
            found[-1]["lines"].append(line.text)
        inside = line.level == "ERROR"
    last = found[-MOST_ERRORS:]
    return [{**block, "lines": block["lines"][-MOST_LINES:]} for block in reversed(last)]


def newest_first(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(service, block) of all services; those without a time last."""
    every = [(name, block) for name, row in found.items() for block in row["errors"]]
    return sorted(every, key=lambda item: item[1]["time"] or "", reverse=True)


def service(base: str, name: str, args: argparse.Namespace, mask: Mask) -> dict[str, Any]:
    now = datetime.datetime.now()
    journal = read_journal(name)
    raw = read_files(base, name) if journal is None else journal
    # a log that was taken away, or a journal that was cut, is none that never began
    ever = (log_path(base, name), os.path.join(base, "run", name + ".json"))
    begun = bool(raw) or any(os.path.lexists(path) for path in ever)
    lines = [line._replace(text=mask(line.text)) for line in parsed(raw, now)]
    if args.since:
        start = since(args.since, now)
        # what comes before the first time is as old as that; all without a time is shown
        timed = any(line.time for line in lines)
        lines = [line for line in lines if (line.time >= start if line.time else not timed)]
    wanted = LEVELS[LEVELS.index(args.level) :]
    shown = [line.text for line in lines if line.level in wanted]
    return {
        "source": f"log/{name}.log" if journal is None else unit_of(name),
        "begun": begun,
        **failure(base, name, mask),
        "errors": blocks(lines),
        "lines": shown[-args.lines :] if args.lines else [],
    }


def failure(base: str, name: str, mask: Mask) -> dict[str, Any]:
    """Why launch.py says that the service last failed, when, and whether a process of it runs now;
    all None when all is well, and each that is not known."""
    found = read_small(os.path.join(base, "run", name + ".failed"))
    if found is None:
        return {"failed": None, "failed_time": None, "runs": None}
    time = None
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        stamp = datetime.datetime.fromtimestamp(found.get("failed_unix"))  # type: ignore[arg-type]
        time = stamp.isoformat(" ", "seconds")
    runs = None
    with contextlib.suppress(OSError):
        record = read_small(os.path.join(base, "run", name + ".json"))
        runs = None if record is None else alive(record.get("pid"), record.get("start_ticks"))
    return {"failed": mask(str(found.get("why"))), "failed_time": time, "runs": runs}


def read_small(path: str) -> dict[str, Any] | None:
    """A file of launch.py's in run/, which is the service user's; None where there is none."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as handle:
            loaded = json.loads(handle.read(1 << 20))
    except (FileNotFoundError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def failed_words(row: dict[str, Any]) -> str:
    """
    >>> failed_words({"failed": "it ended", "failed_time": "2026-11-29 10:00:00", "runs": True})
    'it ended (at 2026-11-29 10:00:00; it runs again now)'
    """
    more = [f"at {row['failed_time']}"] if row["failed_time"] else []
    if row["runs"] is not None:
        more.append("it runs again now" if row["runs"] else "it does not run now")
    return str(row["failed"]) + (f" ({'; '.join(more)})" if more else "")


def show(found: dict[str, Any]) -> None:
    for name, row in found.items():
        if row["failed"]:
            print(f"== {name}: failed: {failed_words(row)}")
    for name, block in newest_first(found):
        print(f"== {name}: error at {block['time'] or 'an unknown time'}")
        print("\n".join(block["lines"]))
    for name, row in found.items():
        if not row["begun"]:
            print(f"== {name}: not started yet, nothing is in {row['source']}")
            continue
        print(f"== {name}: {row['source']}, the last {len(row['lines'])} lines")
        print("\n".join(row["lines"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="kvhost's directory")
    parser.add_argument("--service", action="append", help="runner, for instance; repeatable")
    parser.add_argument("--since", help="30m, 2h, or a local time: 2026-11-29 19:00")
    parser.add_argument("--lines", type=int, default=20, help="of each service")
    parser.add_argument("--level", choices=LEVELS, default="INFO", help="the lowest that is shown")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        if args.since:
            since(args.since, datetime.datetime.now())
        mask, names = Mask(args.base), services(args.base)
        unknown = sorted({*(args.service or ())} - {*names})
        if unknown:
            raise ValueError(f"no service {', '.join(unknown)}; there are {', '.join(names)}")
        found = {name: service(args.base, name, args, mask) for name in args.service or names}
    except (OSError, ValueError) as error:
        print(f"logs: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
