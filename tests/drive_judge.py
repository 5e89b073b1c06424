"""What kvhost does with a drive in a state: by a whole run, and by an order that allows too much.

One Row for each state; docs/drive-states.md is made of them (`python -m tests.drive_judge`).
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhost.onhost import drive_mount, drive_probe
from tests.drive_runs import here, run
from tests.drive_states import PACKAGES, STATES, State, ready
from tests.lab.loop import Loop, Loops, digests
from tests.lab.recipe import install

APPLY = Path(__file__).parents[1] / "kvhost/onhost/drive_apply.py"
BASE = Path(os.environ.get("KVHOST_E2E_BASE", "/var/lib/kvhost-e2e"))
ORDERS = ("seen", "blank", "ours", "wrong-token")
#: how many drives are there at once: every report looks at all of them
BATCH = 8


@dataclass
class Row:
    """``kinds``: of the findings. ``refusals``: code -> what the plan of a whole run says; None
    where no such run was made. ``orders``: name of the forged order -> code of its refusal, or
    what happened instead. ``harmed``: after what the digest was another one."""

    state: State
    kinds: list[str] = field(default_factory=list)
    refusals: dict[str, str] | None = None
    orders: dict[str, str] = field(default_factory=dict)
    harmed: list[str] = field(default_factory=list)


def forged_orders(found: dict[str, Any], mount: Path) -> dict[str, dict[str, Any]]:
    """Orders as a plan would make them that overlooked what stands against it.

    seen: it knew of everything and said yes; blank: it took the drive for an empty one; ours: it
    took it for one that kvhost had formatted; wrong-token: it had a token of another drive.
    """
    base = {
        "schema": 1,
        "drive": found["device"],
        "findings": found["findings"],
        "action": "format",
        "filesystem": "ext4",
        "mount": str(mount),
        "owner": pwd.getpwuid(65534).pw_name,
        "token": None,
        "blank_check": "full",
    }
    other = {**found["device"], "serial": "another drive"}
    token = drive_probe.token(other, "0" * 32, found["findings"])
    return {
        "seen": base,
        "blank": {**base, "findings": []},
        "ours": {**base, "action": "mount"},
        "wrong-token": {**base, "token": token},
    }


def give(order: dict[str, Any], folder: Path) -> str:
    """The code of the refusal, or what happened instead, of drive_apply.py with this order."""
    folder.mkdir(parents=True)
    (folder / "fstab").write_text("# none\n")
    (folder / "order.json").write_text(json.dumps(order))
    done = subprocess.run(
        [sys.executable, APPLY, "apply", "--order", folder / "order.json", "--state", folder,
         "--fstab", folder / "fstab"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if drive_mount.mounted_at(order["mount"]):  # it must not be; the next test starts clean
        subprocess.run(["umount", order["mount"]], check=True)
        drive_mount.change_immutable(order["mount"], False)
    told = json.loads(done.stdout) if done.stdout.strip() else {}
    if done.returncode == 3 and (folder / "fstab").read_text() == "# none\n":
        return str(told["code"])
    return f"NOT REFUSED (exit {done.returncode}): {done.stdout[-300:]}{done.stderr[-300:]}"


def settings_for(loop: Loop) -> dict[str, Any]:
    """A claim on this drive, small enough for all of them."""
    return {
        "base_dir": str(BASE),
        "drive_transport": "loop",
        "drive_serial": str(loop.image),
        "drive_filesystem": "ext4",
        "cache_limit_gib": 0.01,
        "free_floor_gib": 0.001,
    }


def deploy(folder: Path, rows: Mapping[str, Row], drives: Mapping[str, Loop]) -> None:
    """One run of deploy.py over all drives of which a plan can see that they are not blank."""
    names = [name for name, row in rows.items() if row.state.in_plan]
    if not names:
        return
    (folder / "run").mkdir()
    ran = run(folder / "run", "deploy.py", {n: here(settings_for(drives[n])) for n in names})
    if ran.code == 0:
        raise AssertionError(f"deploy.py refused nothing: {ran.text[-3000:]}")
    for name in names:
        rows[name].refusals = ran.refusals(name)


def judge(
    states: Sequence[State], folder: Path, *, deploys: bool = True, orders: Sequence[str] = ORDERS
) -> list[Row]:
    """The rows of these states; their drives are there at the same time, for so long."""
    with Loops(folder / "images") as loops, ExitStack() as stack:
        drives: dict[str, Loop] = {}
        for state in states:
            drives[state.name] = stack.enter_context(ready(loops, state, folder / "work"))
        first = {state.name: state.compare for state in states if state.compare}
        before = digests(drives.values(), first)
        rows = {state.name: Row(state) for state in states}

        def compare(after: str) -> None:
            for name, digest in digests(drives.values(), first).items():
                if digest != before[name]:
                    rows[name].harmed.append(after)

        def order(name: str) -> None:
            found = drive_probe.probe(str(drives[name].node))
            rows[name].kinds = sorted({one["kind"] for one in found["findings"]})
            forged = forged_orders(found, folder / f"mount-{name}")
            for kind in orders:
                rows[name].orders[kind] = give(forged[kind], folder / f"{kind}-{name}")

        if deploys:
            deploy(folder, rows, drives)
            compare("deploy.py")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(order, drives))
        compare("a forged order")
        return list(rows.values())


def batches(states: Sequence[State]) -> Iterator[Sequence[State]]:
    for start in range(0, len(states), BATCH):
        yield states[start : start + BATCH]


def line(row: Row) -> str:
    """The row of docs/drive-states.md about one state."""
    plan = "not seen by it" if row.refusals is None else ", ".join(map(_code, sorted(row.refusals)))
    answers = " / ".join(_code(row.orders[kind]) for kind in ("seen", "blank"))
    kept = "yes" if not row.harmed else f"NO, after {', '.join(row.harmed)}"
    state = row.state
    return f"| {state.name} | {state.holds} | {state.source} | {plan} | {answers} | {kept} |"


def _code(word: str) -> str:
    return f"`{word}`"


PAGE = Path(__file__).parents[1] / "docs/drive-states.md"
HEAD = """\
# States of a drive that kvhost refused

Made by `python -m tests.drive_judge`; `tests/test_drive_states.py` compares each row with what
happens. Each state is on a real block device (a loop device), made by the tool named, or written to
the format's specification where Debian has no tool.

- plan: what `deploy.py` says that claims the drive. Where a plan cannot see it, the step that
  writes does.
- forged orders: what the step that writes answers when it is told to format although the plan saw
  everything, and although the plan took the drive for blank.
- kept: the sha256 of the whole device, taken outside of kvhost, is the same afterwards.

Layers that need a kernel of their own (active md, LVM, bcache, LUKS) are in
`tests/test_drive_vm_layers.py`.

| state | the drive holds | made by | plan | forged orders | kept |
|---|---|---|---|---|---|
"""


def main() -> None:
    install(PACKAGES)
    rows: list[Row] = []
    for batch in batches(STATES):
        with tempfile.TemporaryDirectory() as folder:
            rows += judge(batch, Path(folder), orders=("seen", "blank"))
        print(f"{len(rows)} of {len(STATES)}", file=sys.stderr, flush=True)
    harmed = sum(bool(row.harmed) for row in rows)
    tail = f"\n{len(rows)} states, {harmed} harmed.\n"
    PAGE.write_text(HEAD + "".join(f"{line(row)}\n" for row in rows) + tail)


if __name__ == "__main__":
    main()
