"""The processes of a host, for report_held.py, which this lies beside; read once."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhost.onhost.report_parts import Data, host, read
else:  # it lies beside this file
    from report_parts import Data, host, read


def proc_stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time in ticks (field 22) of /proc/PID/stat, proc_pid_stat(5)."""
    words = read("proc", str(pid), "stat").rpartition(")")[2].split()
    return words[0], int(words[1]), int(words[19])


@functools.lru_cache(maxsize=1)
def processes() -> dict[int, Data]:
    """All processes. Raises OSError where the kernel would hide some of them, proc(5)."""
    hidden = re.findall(r" /proc .* - proc .*\bhidepid=(\w+)", read("proc/self/mountinfo"))
    if hidden and hidden[-1] not in ("0", "off") and os.geteuid():
        raise OSError(f"/proc is mounted with hidepid={hidden[-1]}: processes of others are hidden")
    rows: dict[int, Data] = {}
    for path in host("proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            state, parent, ticks = proc_stat(int(path.name))
            argv = (path / "cmdline").read_bytes().decode(errors="replace")
            rows[int(path.name)] = {
                "comm": (path / "comm").read_text(errors="replace").strip(), "ppid": parent,
                "ticks": ticks, "uid": path.stat().st_uid, "state": state,
                "argv": argv.rstrip("\0").split("\0"),
            }  # fmt: skip
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    if not rows:
        raise OSError("/proc lists no processes")
    return rows


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for one in pids:
        pids += [p for p, row in processes().items() if row["ppid"] == one and p not in pids]
    return pids
