"""Asks a host at once what the last run asked it: report and looks, in one command.

The host answers while this process loads its modules. An answer is used where the run comes to ask
that very thing, and nobody held the run lock meanwhile; whatever else happens, the run asks itself.
"""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gevent
from paramiko import SSHException
from pyinfra import logger
from pyinfra.api import StringCommand
from pyinfra.api.arguments import pop_global_arguments
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import make_unix_command_for_host

from deploys.common.sent import LOOKS, packed, report_scripts
from kvhost.records.journal import runs_dir
from kvhost.records.last_asked import LastAsked, keep, load

#: the only run whose looks are known before it has made its plan
DEPLOY = "deploy.py"
#: pyinfra's arguments with which a command is not run as it is here
OTHER_WAYS = (
    "_env", "_chdir", "_su_user", "_sudo_user", "_use_sudo_login", "_sudo_password",
    "_preserve_sudo_env", "_doas", "_dzdo",
)  # fmt: skip
#: first line of what the host says: the shell runs, as root if that was asked for
BEGUN = b"begun\n"
#: what was asked ahead and has not answered by then is ended: it does not outlive the run
LIMIT_S = 120


@dataclass
class Early:
    """What was asked of a host, and what it will have said: all of its output."""

    what: LastAsked
    said: Any  # a greenlet's; gevent has no types
    told: dict[str, Any] | None = None

    def answer(self) -> dict[str, Any]:
        """Waits for it; {} where there is none of use."""
        if self.told is None:
            try:
                told = json.loads(self.said.get().splitlines()[-1])
                self.told = told if len(told["answers"]) == 1 + len(self.what.looks) else {}
            except (OSError, SSHException, EOFError, ValueError, LookupError, TypeError) as error:
                logger.debug("of no use: what was asked ahead: %s", error)
                self.told = {}
        return self.told


_wanted = False
_early: dict[str, Early] = {}
_report: dict[str, tuple[str, ...]] = {}


def watch(options: Mapping[str, Any]) -> None:
    """Called before the hosts are connected to, with pyinfra's own options."""
    global _wanted
    _wanted = tuple(options.get("operations") or ()) == (DEPLOY,) and not options.get("dry")


def begin(host: Any) -> bool:
    """Asks, of a host that has just been connected to. Whether it lets us do so, as root if asked.

    False also where there is nothing to ask, or no way to: that says nothing of the host.
    """
    what = load(runs_dir(), host.name) if _wanted else None
    ways = ((SSHConnector, _by_ssh), (LocalConnector, _here))
    way = next((way for kind, way in ways if isinstance(host.connector, kind)), None)
    how, _ = pop_global_arguments(host.state, host, {})
    if what is None or way is None or any(how.get(name) for name in OTHER_WAYS):
        return False
    script = StringCommand(command(what))
    unix = make_unix_command_for_host(host.state, host, script, _sudo=bool(how.get("_sudo")))
    logger.debug("Running command on %s, ahead: %s", host.name, unix)
    try:
        rest = way(host.connector, unix.get_raw_value(), packed(scripts(what)))
    except (OSError, SSHException, EOFError) as error:
        logger.debug("could not be asked ahead: %s", error)
        return False
    if rest is None:
        return False
    _early[host.name] = Early(what, gevent.spawn(rest))
    return True


def scripts(what: LastAsked) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*LOOKS, *report_scripts(what.report))))


def command(what: LastAsked) -> str:
    """Takes the packed scripts on its stdin; the request, which is short, comes along."""
    looks = [["sent", "report.py", *what.report], *what.looks]
    # a drive that is looked at is in use for who looks at it at the same time (O_EXCL)
    apart = "--drives" in what.report
    request = json.dumps({"asks": looks, "lock": what.lock, "take": None, "apart": apart})
    text = base64.encodebytes(gzip.compress(request.encode(), mtime=0)).decode()
    return "\n".join(
        (
            f"printf {BEGUN.decode().strip()}'\\n'",
            "d=$(mktemp -d) || exit 1",
            f"base64 -d > \"$d/request.gz\" <<'KVHOST-END'\n{text}KVHOST-END",
            'tar xzo -C "$d"',
            f'timeout -k 5 {LIMIT_S} python3 "$d/looks.py" "$d/request.gz" 2>&1; rm -rf "$d"',
        )
    )


def _by_ssh(connector: Any, line: str, stdin: bytes) -> Callable[[], bytes] | None:
    """What reads the rest of its output; None if it did not begin. Raises as paramiko does."""
    channel = connector.client.get_transport().open_session()
    channel.exec_command(line)
    channel.sendall(stdin)
    channel.shutdown_write()
    return _rest(channel.recv)


def _here(connector: Any, line: str, stdin: bytes) -> Callable[[], bytes] | None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        line, shell=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as way:
        way.write(stdin)
    read = _rest(process.stdout.read)
    if read is None:
        process.wait()
        return None

    def rest() -> bytes:
        said = read()
        process.wait()
        return said

    return rest


def _rest(receive: Callable[[int], bytes]) -> Callable[[], bytes] | None:
    first = b""
    while len(first) < len(BEGUN) and (block := receive(1 << 16)):
        first += block
    if not first.startswith(BEGUN):
        return None

    def rest() -> bytes:
        blocks = [first]
        while block := receive(1 << 16):
            blocks.append(block)
        return b"".join(blocks)

    return rest


def report(host: str, words: tuple[str, ...]) -> str | None:
    """What report.py said to just these arguments, once; None if that was not asked ahead."""
    _report[host] = words
    early = _early.get(host)
    if early is None or early.what.report != words or not early.answer():
        _early.pop(host, None)  # what is looked at counts only beside its report
        return None
    text = early.answer()["answers"][0]["out"]
    early.what = LastAsked((), early.what.looks, early.what.lock)
    return str(text)


def looks(
    host: str, lock: str, asks: tuple[tuple[str, ...], ...]
) -> tuple[dict[tuple[str, ...], Any], dict[str, Any]] | None:
    """Answers to these and state of the lock, once; None if that was not asked, or all may have
    changed between: another run was there."""
    early = _early.pop(host, None)
    if early is None or early.what.lock != lock or not set(asks) <= set(early.what.looks):
        return None
    told = early.answer()
    if told["before"] != told["lock"]:
        return None
    return dict(zip(early.what.looks, told["answers"][1:], strict=True)), told["lock"]


def remember(host: str, lock: str, asks: tuple[tuple[str, ...], ...]) -> None:
    """For the next run. One that cannot be written makes that one slower, and is no fault."""
    words = _report.get(host)
    if words is None or not _wanted:  # another deploy asks other things
        return
    try:
        keep(runs_dir(), host, LastAsked(words, tuple(dict.fromkeys(asks)), lock))
    except OSError as error:
        logger.debug("what was asked of %s is not kept: %s", host, error)
