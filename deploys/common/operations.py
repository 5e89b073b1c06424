"""Operations that several stages use. Each says "no change" when the host is as wanted."""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from io import StringIO
from typing import Any

from pyinfra import context, host, logger
from pyinfra.api import FileUploadCommand, FunctionCommand, StringCommand, operation
from pyinfra.facts.files import File, Sha256File
from pyinfra.operations import files

from deploys.common.facts import CommandJson
from kvhost.secrets import Secret

Commands = Generator[Any, None, None]


@dataclass(frozen=True)
class Directory:
    path: str
    user: str
    mode: str


@dataclass(frozen=True)
class TextFile:
    path: str
    text: str
    mode: str = "644"
    user: str = "root"


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


@operation()
def directories(wanted: Iterable[Directory]) -> Commands:
    """Directories with exactly this owner and mode.

    + wanted: the directories, parents first
    """
    for item in wanted:
        yield from files.directory._inner(
            path=item.path, user=item.user, group=item.user, mode=item.mode
        )


@operation()
def text_files(wanted: Iterable[TextFile]) -> Commands:
    """Files with exactly this content, owner and mode.

    + wanted: the files; their directories exist
    """
    for item in wanted:
        yield from files.put._inner(
            src=StringIO(item.text),
            dest=item.path,
            user=item.user,
            group=item.user,
            mode=item.mode,
            create_remote_dir=False,
        )


#: {path: [sha256, owner, group, mode]} of those of its arguments that are plain files
_LOOK = """
import grp, hashlib, json, os, pwd, stat, sys
found = {}
for path in sys.argv[1:]:
    try:
        st = os.lstat(path)
        if stat.S_ISREG(st.st_mode):
            with open(path, "rb") as handle:
                digest = hashlib.sha256(handle.read()).hexdigest()
            owner, group = pwd.getpwuid(st.st_uid).pw_name, grp.getgrgid(st.st_gid).gr_name
            found[path] = [digest, owner, group, oct(stat.S_IMODE(st.st_mode))[2:]]
    except (OSError, KeyError):
        pass  # it is not as wanted
print(json.dumps(found))
"""


@operation()
def many_root_files(wanted: Iterable[TextFile], passing: str) -> Commands:
    """As text_files, for many of root's: one look at all, and one upload of those that differ.
    File by file a slow or distant host takes minutes for them.

    + wanted: the files, all root's; their directories exist
    + passing: file in a directory of root's that the upload passes through, and that is removed
    """
    items = list(wanted)
    answer = host.get_fact(
        CommandJson, argv=("python3", "-I", "-c", _LOOK, *(item.path for item in items))
    )
    there = answer["data"] if answer["status"] == "ok" else {}
    differing = [
        item for item in items
        if there.get(item.path)
        != [hashlib.sha256(item.text.encode()).hexdigest(), "root", "root", item.mode]
    ]  # fmt: skip
    if not differing:
        return
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for item in differing:
            member = tarfile.TarInfo(item.path.lstrip("/"))
            content = item.text.encode()
            member.size, member.mode = len(content), int(item.mode, 8)
            archive.addfile(member, io.BytesIO(content))
    packed.seek(0)
    yield FileUploadCommand(packed, passing)
    quoted = shlex.quote(passing)
    unpack = "tar --extract --directory / --no-same-owner --preserve-permissions --touch"
    yield StringCommand(f"exec 3< {quoted} && rm {quoted} && {unpack} --file - <&3")


@operation()
def secret_file(path: str, secret: Secret, user: str) -> Commands:
    """A file with a secret, 0600 from its first byte on, and never in a diff or a process list.

    + path: where; its directory is root's
    + secret: what it holds
    + user: its owner
    """
    content = secret.get_secret_value() + "\n"
    digest = hashlib.sha256(content.encode()).hexdigest()
    there = host.get_fact(File, path=path)
    same = there and host.get_fact(Sha256File, path=path) == digest
    right = there and there["user"] == user and int(there["mode"]) == 600
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
def run_unless(
    check: tuple[str, ...], command: tuple[str, ...] | str, when_ok: Callable[[Any], bool]
) -> Commands:
    """Runs a command unless a check, which prints JSON, says that nothing is to be done.

    + check: command whose last line is JSON
    + command: what to run; a text is run by the shell
    + when_ok: given the JSON, whether the host is as wanted; a check that fails is "no"
    """
    answer = host.get_fact(CommandJson, argv=check)
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


def refuse(message: str) -> FunctionCommand:
    """Fails this host, and no other, with a message instead of a traceback."""

    def tell(state: Any, host: Any) -> bool:
        host.log_styled(message, fg="red", log_func=logger.error)
        return False

    return FunctionCommand(tell, (), {})
