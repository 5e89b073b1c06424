"""A bundle's way to a host, and its proof there, before anything is installed from it."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, StringCommand, operation

from deploys.common.context import Run
from deploys.common.facts import CommandJson
from deploys.common.operations import Commands, connector_arguments, shown
from kvhost.bundle import files_to_send, find_bundle
from kvhost.onhost.bundle_check import MANIFEST

#: {path below its argument: [bytes, sha256]} of the plain files there
_LOOK = """
import hashlib, json, os, sys
found = {}
for root, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(root, name)
        if os.path.islink(path):
            continue
        digest = hashlib.sha256()
        with open(path, "rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                digest.update(block)
        found[os.path.relpath(path, sys.argv[1])] = [os.path.getsize(path), digest.hexdigest()]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Place:
    """Where a bundle lies: on the host, and on the controller if it has to be sent from there."""

    on_host: str
    source: Path | None = None


def bundle_place(run: Run) -> Place | None:
    """None where no bundle is set. Raises OSError: it was there when the plan was made."""
    setting = run.settings.engine_bundle
    if setting is None:
        return None
    if setting.startswith("host:"):
        return Place(setting.removeprefix("host:"))
    source = find_bundle(Path(setting).expanduser(), run.lock).resolve()
    if run.host.startswith("@local"):
        return Place(str(source))  # this machine's own: read where it lies
    try:
        digest = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        digest = "gone"  # no matter where everything is installed
    return Place(f"{run.paths.bundle}/{digest[:16]}", source)


@operation()
def bundle_on_host(
    place: Place,
    around: str,
    installed: tuple[tuple[str, ...], ...],
    prove: tuple[str, ...],
) -> Commands:
    """Sends what the host lacks of a bundle and has all of it verified there, unless everything
    is installed.

    + place: where it lies
    + around: directory of root's on the host for the copy
    + installed: commands that print true, or {"complete": true}
    + prove: command that fails when the bundle is not whole
    """
    answers = [host.get_fact(CommandJson, argv=argv) for argv in installed]
    data = [answer["data"] for answer in answers if answer["status"] == "ok"]
    done = [one for one in data if one is True or (isinstance(one, dict) and one["complete"])]
    if len(done) == len(installed):
        return
    if place.source is not None:
        yield FunctionCommand(_send, (place.source, place.on_host, around), {})
    yield shown(prove)


def _send(state: Any, host: Any, source: Path, dest: str, around: str) -> bool:
    """SFTP, file by file; what is there already with the right digest is not sent again."""

    def fail(why: str) -> bool:
        host.log_styled(
            f"the bundle could not be sent: {why}\nWhat is there stays; the next run goes on.",
            fg="red",
            log_func=logger.error,
        )
        return False

    def as_root(command: str) -> tuple[bool, str]:
        ok, output = host.run_shell_command(StringCommand(command), **connector_arguments())
        return bool(ok), str(output.stdout if ok else output.stderr)

    try:
        files = files_to_send(source)
    except (OSError, ValueError) as error:
        return fail(str(error))
    # big files pass through a directory of the connecting user's on the same disk, not through /tmp
    ok, who = host.run_shell_command(StringCommand("id -u"), _sudo=False, _su_user=None)
    if not ok:
        return fail(str(who.stderr))
    passing, quoted = f"{around}/.passing", shlex.quote(dest)
    ok, said = as_root(
        f"install -d -m 755 {shlex.quote(around)} {quoted} {quoted}/wheels {quoted}/tools && "
        f"rm -rf {shlex.quote(passing)} && "
        f"install -d -m 700 -o {int(who.stdout)} {shlex.quote(passing)} && "
        f"python3 -I -c {shlex.quote(_LOOK)} {quoted}"
    )
    if not ok:
        return fail(said)
    there: dict[str, list[Any]] = json.loads(said.strip().splitlines()[-1])
    lacking = [
        (path, name, row) for path, name, row in files
        if there.get(name) != [row["bytes"], row["sha256"]]
    ]  # fmt: skip
    total, sent, told = sum(row["bytes"] for _, _, row in lacking), 0, 0
    for path, name, row in lacking:
        try:
            ok = host.put_file(
                str(path),
                f"{dest}/{name}",
                remote_temp_filename=f"{passing}/file",
                **connector_arguments(),
            )
        except OSError as error:
            return fail(f"{name}: {error}")
        if not ok:
            return fail(name)
        sent += row["bytes"]
        if sent - told >= max(total // 10, 1) or sent == total:
            told = sent
            host.log(f"  bundle: {sent >> 20} of {total >> 20} MB sent")
    ok, said = as_root(
        f"rm -rf {shlex.quote(passing)} && chown -R root:root {quoted} && "
        f"chmod -R u=rwX,go=rX {quoted}"
    )
    return ok or fail(said)
