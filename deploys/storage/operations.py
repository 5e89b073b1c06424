"""Operations of the stage storage. What is destroyed is decided on the host, by the script that
does it, never by a condition here; a refusal there fails this host and no other."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from typing import Any

from pyinfra.api import FunctionCommand, operation
from pyinfra.operations import files

from deploys.common.context import Run
from deploys.common.looks import ask_json
from deploys.common.operations import Commands, converges, refuse, shown
from deploys.common.since import note, release_unnoted


def order_path(run: Run) -> str:
    return f"{run.paths.state}/drive-order.json"


def check_command(run: Run) -> tuple[str, ...]:
    script = ("python3", run.script("drive_apply"))
    return (*script, "check", "--state", run.paths.state, "--order-text", order_text(run))


def order_text(run: Run) -> str:
    return json.dumps(run.drive_order, indent=1, sort_keys=True) + "\n"


@operation()
@converges
def drive(run: Run) -> Commands:
    """The claimed drive is formatted if it is blank, mounted, and as the settings want it.

    + run: the run of this host, with an order
    """
    text, script = order_text(run), ("python3", run.script("drive_apply"))
    answer = ask_json(check_command(run))
    if answer["status"] == "ok" and answer["data"].get("ok"):
        return
    yield from files.put._inner(
        src=StringIO(text), dest=order_path(run), user="root", group="root", mode="600",
        create_remote_dir=False,
    )  # fmt: skip
    # the progress of a long reading is shown as it comes; the answer, in JSON, stays on the host
    told = f"{run.paths.state}/drive-answer.json"
    yield shown(f"{shlex.join((*script, 'apply', '--order', order_path(run)))} > {told}")


@operation()
def nothing_here() -> Commands:
    """No change: kvhost has no drive on this host."""
    yield from ()


@operation()
@converges
def release_drive(run: Run) -> Commands:
    """Stops the services, unmounts the drive and takes its line out of fstab; the data stay.

    + run: the run of this host
    """
    there = f"[ -e {shlex.quote(run.paths.drive)} ] && echo true || echo false"
    answer = ask_json(("sh", "-c", there))
    if answer["status"] == "ok" and answer["data"] is False:
        if release_unnoted(run.host):
            yield FunctionCommand(released, (), {})
        return
    base = ("--base", run.paths.base_dir, "--user", run.user)
    stop = ("python3", run.script("services"), *base, "shutdown")
    release = ("python3", run.script("drive_release"), "release", "--state", run.paths.state)
    yield shown(f"{shlex.join(stop)} && {shlex.join(release)} > /dev/null")
    yield FunctionCommand(released, (), {})


def released(state: Any, host: Any) -> bool:
    """Nothing serves there any more: it is kept where the host's verdicts are."""
    return note(host, "released")


@operation()
@converges
def wipe_drive(run: Run) -> Commands:
    """Takes table and signatures off the released drive, with the token that fits it alone.

    + run: the run of this host
    """
    if run.drive_order is None:
        yield refuse("no drive to wipe: the claim does not lead to one (kvhost drives)")
        return
    if run.drive_order["action"] == "format":  # nothing of kvhost's is on it any more
        return
    order = {**run.drive_order, "token": run.settings.drive_erase}
    yield from files.put._inner(
        src=StringIO(json.dumps(order, indent=1) + "\n"), dest=order_path(run),
        user="root", group="root", mode="600", create_remote_dir=False,
    )  # fmt: skip
    words = ("wipe", "--state", run.paths.state, "--order", order_path(run))
    yield shown(shlex.join(("python3", run.script("drive_release"), *words)) + " > /dev/null")


@operation()
@converges
def grow_drive(run: Run) -> Commands:
    """Partition and filesystem use all of a disk that became larger.

    + run: the run of this host
    """
    argv = ("python3", run.script("drive_grow"), "--state", run.paths.state)
    answer = ask_json((*argv, "--check"))
    if answer["status"] == "ok" and answer["data"]["ok"]:
        return
    yield shown(f"{shlex.join(argv)} > /dev/null")
