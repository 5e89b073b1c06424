"""Operations that several stages use. Each says "no change" when the host is as wanted."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import shlex
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any, ParamSpec

from pyinfra import context, host
from pyinfra.api import FileUploadCommand, FunctionCommand, StringCommand, operation

from deploys.common.looks import Ask, NotLooked, ask_file, ask_json, looks
from deploys.common.reasons import failed
from kvhost.secrets import Secret

Commands = Generator[Any, None, None]
P = ParamSpec("P")


@functools.lru_cache(maxsize=1024)
def sha256(text: str) -> str:
    """Of a file's text; most of them are the same for all hosts."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Directory:
    path: str
    user: str
    mode: str


@dataclass(frozen=True)
class TextFile:
    """A file of root's."""

    path: str
    text: str
    mode: str = "644"


def executing() -> bool:
    """Whether the run is past preparing: only then may anything be changed."""
    return bool(context.state.is_executing)


def connector_arguments() -> Any:
    """sudo and the like, as the operation that runs now was given them, for commands of our own."""
    this = context.ctx_host.get()
    data = context.state.get_op_data_for_host(this, this.executing_op_hash)
    given: dict[str, Any] = dict(data.global_arguments)
    keys = ("_sudo", "_sudo_user", "_su_user", "_use_sudo_login", "_shell_executable")
    return {key: given[key] for key in keys if given.get(key)}


def converges(func: Callable[P, Commands]) -> Callable[P, Commands]:
    """For the body of an operation: its first command takes the run lock, if this run has not yet.

    What it looked at without the lock, it looks at again; whoever was here meanwhile is noticed.
    """

    @functools.wraps(func)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Commands:
        known = looks()
        if known is None or not context.state.is_executing:
            yield from func(*args, **kwargs)
            return
        known.since = None
        commands = func(*args, **kwargs)
        command = next(commands, None)
        if command is not None and not known.locked:
            try:
                known.take_lock()
            except NotLooked as why:
                yield not_locked(str(why))
                return
            commands = func(*args, **kwargs)
            command = next(commands, None)
        while command is not None:
            known.fresh = False
            yield command
            command = next(commands, None)

    return guarded


@operation()
@converges
def directories(wanted: Iterable[Directory]) -> Commands:
    """Directories with exactly this owner and mode; all that differ are made in one command.

    + wanted: the directories, parents first
    """
    yield from make_directories(wanted)


def make_directories(wanted: Iterable[Directory]) -> Commands:
    """The command that makes directories as wanted; none when they are."""
    words = []
    for item in wanted:
        there = ask_file(item.path)
        if there is not None and there["kind"] != "directory":
            yield refuse(f"{item.path} is a {there['kind']}, not a directory: move it away")
            return
        if there is None or [there[key] for key in ("owner", "group", "mode")] != [
            item.user,
            item.user,
            item.mode,
        ]:
            path = shlex.quote(item.path)
            # neither a file nor a link that came since the look is taken for it
            words.append(
                f"mkdir -p {path} && [ ! -L {path} ] && chown {item.user}:{item.user} {path} "
                f"&& chmod {item.mode} {path}"
            )
    if words:
        yield StringCommand(" && ".join(words))


def directory_asks(wanted: Iterable[Directory]) -> Iterator[Ask]:
    return (("file", item.path) for item in wanted)


def file_asks(wanted: Iterable[TextFile]) -> Iterator[Ask]:
    return (("file", item.path) for item in wanted)


#: bytes that go along with a command; one argument may have 128 KiB (Linux, MAX_ARG_STRLEN)
INLINE = 90_000


def write_files(wanted: Iterable[TextFile], passing: str) -> Commands:
    """Commands that make root's files as wanted: one look at all, and one command for those that
    differ. File by file a slow or distant host takes minutes for many.

    ``passing``: file in a directory of root's, which what is too long for a command passes through.
    """
    differing = []
    for item in wanted:
        there = ask_file(item.path) or {}
        digest = sha256(item.text)
        found = [there.get(key) for key in ("kind", "sha256", "owner", "group", "mode")]
        if found != ["file", digest, "root", "root", item.mode]:
            differing.append(item)
    if not differing:
        return
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for item in differing:
            member = tarfile.TarInfo(item.path.lstrip("/"))
            content = item.text.encode()
            member.size, member.mode = len(content), int(item.mode, 8)
            archive.addfile(member, io.BytesIO(content))
    unpack = "tar --extract --gzip --directory / --no-same-owner --preserve-permissions --touch"
    text = base64.encodebytes(packed.getvalue()).decode()
    if len(text) <= INLINE:
        yield StringCommand(f"base64 -d <<'KVHOST-END' | {unpack} --file -\n{text}KVHOST-END")
        return
    packed.seek(0)
    yield FileUploadCommand(packed, passing)
    quoted = shlex.quote(passing)
    yield StringCommand(f"exec 3< {quoted} && rm {quoted} && {unpack} --file - <&3")


@operation()
@converges
def root_files(wanted: Iterable[TextFile], passing: str) -> Commands:
    """Root's files with exactly this content and mode.

    + wanted: the files; their directories exist
    + passing: file in a directory of root's that a long upload passes through, and that is removed
    """
    yield from write_files(wanted, passing)


@operation()
@converges
def no_file(path: str) -> Commands:
    """No file at this path.

    + path: a file, or a link
    """
    if ask_file(path) is not None:
        yield StringCommand(f"rm -f {shlex.quote(path)}")


@operation()
@converges
def secret_file(path: str, secret: Secret, user: str) -> Commands:
    """A file with a secret, 0600 from its first byte on, and never in a diff or a process list.

    + path: where; its directory is root's
    + secret: what it holds
    + user: its owner
    """
    content = secret.get_secret_value() + "\n"
    digest = hashlib.sha256(content.encode()).hexdigest()
    there = ask_file(path) or {}
    same = there.get("sha256") == digest
    right = [there.get(key) for key in ("owner", "group", "mode")] == [user, user, "600"]
    if same and right:
        return
    quoted = shlex.quote(path)
    if not same:
        # pyinfra's own upload is chmodded only afterwards: make the file first, closed, and let
        # the upload pass through a directory that only the connecting user can enter
        yield StringCommand(f"rm -f {quoted}.new && install -m 600 /dev/null {quoted}.new")
        passing = "/nowhere"
        if executing():
            ok, output = host.run_shell_command(StringCommand("mktemp -d"), _sudo=False)
            passing = output.stdout.strip()
            if not ok or not passing.startswith("/"):
                yield refuse(f"no directory for the secret's way: {output.stderr}")
                return
        yield FileUploadCommand(
            StringIO(content), f"{path}.new", remote_temp_filename=f"{passing}/secret"
        )
        yield StringCommand(f"rm -rf {shlex.quote(passing)}; mv {quoted}.new {quoted}")
    yield StringCommand(f"chmod 600 {quoted} && chown {user}:{user} {quoted}")


@operation()
@converges
def run_unless(
    check: tuple[str, ...], command: tuple[str, ...] | str, when_ok: Callable[[Any], bool]
) -> Commands:
    """Runs a command unless a check, which prints JSON, says that nothing is to be done.

    + check: command whose last line is JSON
    + command: what to run; a text is run by the shell
    + when_ok: given the JSON, whether the host is as wanted; a check that fails is "no"
    """
    answer = ask_json(check)
    if answer["status"] == "ok" and when_ok(answer["data"]):
        return
    yield shown(command)


def shown(command: tuple[str, ...] | str) -> FunctionCommand:
    """A long command whose lines are shown as they come, each with the host's name."""
    text = command if isinstance(command, str) else shlex.join(command)

    def run(state: Any, host: Any) -> bool:
        ok, _ = host.run_shell_command(
            StringCommand(text), print_output=True, **connector_arguments()
        )
        return bool(ok)

    return FunctionCommand(run, (), {})


def as_service(user: str, env: dict[str, str], argv: tuple[str, ...]) -> tuple[str, ...]:
    """argv run with the service's identity and environment. Holds no secret: it is seen by ps."""
    ids = ("--reuid", user, "--regid", user, "--init-groups", "--inh-caps=-all")
    return ("setpriv", *ids, "env", "-i", *(f"{k}={v}" for k, v in env.items()), *argv)


def unknown_yet() -> StringCommand:
    """Stands for a change that can only be told once the steps before it have run."""
    return StringCommand(":")


def not_locked(why: str) -> FunctionCommand:
    return refuse(
        "another run is in progress on this host, or its lock cannot be taken:\n"
        f"  {why}\nWait for it and run again, or if it is gone: --data break_lock=RUN_ID"
    )


def refuse(message: str) -> FunctionCommand:
    """Fails this host, and no other, with a message instead of a traceback."""

    def tell(state: Any, host: Any) -> bool:
        return failed(host, message)

    return FunctionCommand(tell, (), {})
