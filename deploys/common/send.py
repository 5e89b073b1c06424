"""Many or large files from the controller to a host, by SFTP, file by file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyinfra.api import FunctionCommand, StringCommand

from deploys.common.operations import connector_arguments
from deploys.common.reasons import failed


@dataclass(frozen=True)
class Sent:
    """A file here, its path below the destination, its size and sha256 in hex."""

    source: Path
    name: str
    bytes: int
    sha256: str


#: {"files": {path below its argument: [bytes, sha256]}, "free": bytes} of the plain files there
_LOOK = """
import hashlib, json, os, shutil, sys
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
free = shutil.disk_usage(sys.argv[1]).free
print(json.dumps({"files": found, "free": free}))
"""


def send(what: str, files: Callable[[], Iterable[Sent]], dest: str, around: str) -> FunctionCommand:
    """A command that sends what is not at ``dest`` yet with the right digest; root's, 0755 and
    0644. ``files`` is asked when it runs, and may raise OSError or ValueError.

    ``around``: directory above ``dest``, of root's; files pass through a directory in it that is
    the connecting user's, for /tmp may be small.
    """
    return FunctionCommand(_send, (what, files, dest, around), {})


def _send(
    state: Any, host: Any, what: str, files: Callable[[], Iterable[Sent]], dest: str, around: str
) -> bool:
    def fail(why: str) -> bool:
        said = f"{what} could not be sent: {why}\nWhat is there stays; the next run goes on."
        return failed(host, said)

    def as_root(command: str) -> tuple[bool, str]:
        ok, output = host.run_shell_command(StringCommand(command), **connector_arguments())
        return bool(ok), str(output.stdout if ok else output.stderr)

    try:
        wanted = list(files())
    except (OSError, ValueError) as error:
        return fail(str(error))
    ok, who = host.run_shell_command(StringCommand("id -u"), _sudo=False, _su_user=None)
    if not ok:
        return fail(str(who.stderr))
    passing, quoted = f"{around}/.passing", shlex.quote(dest)
    folders = {str(Path(dest, item.name).parent) for item in wanted} | {around, dest}
    ok, said = as_root(
        f"install -d -m 755 {shlex.join(sorted(folders))} && rm -rf {shlex.quote(passing)} && "
        f"install -d -m 700 -o {int(who.stdout)} {shlex.quote(passing)} && "
        f"python3 -I -c {shlex.quote(_LOOK)} {quoted}"
    )
    if not ok:
        return fail(said)
    look: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    there = look["files"]
    lacking = [item for item in wanted if there.get(item.name) != [item.bytes, item.sha256]]
    total, sent, told = sum(item.bytes for item in lacking), 0, 0
    over = sum(there[item.name][0] for item in lacking if item.name in there)
    # with sudo a file lies there twice while it passes
    twice = max((item.bytes for item in lacking), default=0)
    if total - over + twice > look["free"]:
        return fail(f"{total >> 20} MB are to be sent, {look['free'] >> 20} MB are free at {dest}")
    for item in lacking:
        try:
            ok = host.put_file(
                str(item.source),
                f"{dest}/{item.name}",
                remote_temp_filename=f"{passing}/file",
                **connector_arguments(),
            )
        except OSError as error:
            return fail(f"{item.name}: {error}")
        if not ok:
            return fail(item.name)
        sent += item.bytes
        if sent - told >= max(total // 10, 1) or sent == total:
            told = sent
            host.log(f"  {what}: {sent >> 20} of {total >> 20} MB sent")
    ok, said = as_root(
        f"rm -rf {shlex.quote(passing)} && chown -R root:root {quoted} && "
        f"chmod -R u=rwX,go=rX {quoted}"
    )
    return ok or fail(said)
