"""The line that a provider shows ("ssh root@203.0.113.7 -p 40022 -i key"), read as ssh reads it.

Pure. Options are those of ssh(1); what has no meaning for kvhost is left out and said.
"""

from __future__ import annotations

import getopt
import re
import shlex
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from kvhost.fleet.model import address_like, jump_parts, user_like
from kvhost.schema.problems import Refusal, short

#: ssh(1) of OpenSSH 9
_OPTIONS = "46AaB:b:Cc:D:E:e:F:fGgI:i:J:KkL:l:Mm:NnO:o:P:p:Q:qR:S:sTtVvW:w:XxYy"
_FORWARDS = {"-L", "-R", "-D", "-W", "-w"}
_QUIET = {"-4", "-6", "-A", "-a", "-C", "-f", "-g", "-k", "-K", "-M", "-N", "-n", "-q", "-s", "-T",
          "-t", "-v", "-X", "-x", "-Y", "-y", "-c", "-m", "-e", "-E", "-I", "-S", "-P", "-B",
          "-b"}  # fmt: skip


class LineError(ValueError):
    """Why a line cannot be taken, and what to write."""


@dataclass
class Target:
    """A host as a line names it. `key` and `jump` as given; `notes`: what was left out, and why."""

    address: str = ""
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    notes: list[str] = field(default_factory=list)

    def entry(self) -> dict[str, object]:
        """As it goes into fleet.yaml: what was said, and no more."""
        said = {"address": self.address, "user": self.user, "port": self.port, "key": self.key,
                "jump": self.jump}  # fmt: skip
        return {key: value for key, value in said.items() if value is not None}


def parse(line: str) -> Target:
    """Raises LineError."""
    text = line.strip().lstrip("$").strip().replace("\\\n", " ")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LineError(f"the quotes of the line do not close ({error})") from None
    if words and words[0].rpartition("/")[2] in ("ssh", "autossh"):
        words = words[1:]
    elif words and words[0] in ("scp", "sftp", "mosh", "sshpass", "rsync", "sudo"):
        raise LineError(f"{words[0]} is not ssh: take the line that begins with ssh")
    target = Target()
    rest = _options(words, target)
    if not rest:
        raise LineError('no host in the line; it looks like "ssh root@203.0.113.7 -p 40022 -i key"')
    place, *more = rest
    _place(place, target)
    # ssh takes options after the host too; the first other word begins a command
    command = _options(more, target)
    if command:
        target.notes.append(f"the command {short(shlex.join(command))} is not run")
    return target


def _options(words: list[str], target: Target) -> list[str]:
    try:
        found, rest = getopt.getopt(words, _OPTIONS)
    except getopt.GetoptError as error:
        raise LineError(f"ssh has no such option, or it lacks its value: {error}") from None
    for flag, value in found:
        if flag == "-p":
            _port(value, target)
        elif flag == "-l":
            _user(value, target)
        elif flag == "-i":
            _key(value, target)
        elif flag == "-J":
            _jump(value, target)
        elif flag == "-o":
            _option(value, target)
        elif flag == "-F":
            target.notes.append(f"-F {value} is not read: put what it says for this host here")
        elif flag in _FORWARDS:
            target.notes.append(f"{flag} {value} forwards a port, which kvhost does not need")
        elif flag not in _QUIET:
            raise LineError(f"{flag} makes no connection")
    return rest


def _option(text: str, target: Target) -> None:
    """-o Name=value or "Name value"; names in any case, as in ssh_config(5)."""
    found = re.fullmatch(r"\s*([A-Za-z0-9]+)\s*(?:=|\s)\s*(.*?)\s*", text)
    if not found:
        raise LineError(f"-o {short(text)} is not NAME=VALUE")
    name, value = found[1].lower(), found[2].strip('"')
    known = {"port": _port, "user": _user, "identityfile": _key, "proxyjump": _jump}
    if name in known:
        known[name](value, target)
    elif name == "hostname":
        target.address = _address(value)
    elif name == "proxycommand":
        jumped = re.fullmatch(r"ssh\s+(?:-q\s+)?-W\s+%h:%p\s+(\S+)", value)
        if not jumped:
            raise LineError(
                "-o ProxyCommand: kvhost takes jump hosts (-J USER@HOST), not other programs"
            )
        _jump(jumped[1], target)
    elif name in ("stricthostkeychecking", "userknownhostsfile", "globalknownhostsfile"):
        target.notes.append(
            f"-o {found[1]}={value} is left out: the key that is seen now is kept in known_hosts, "
            "and another one later is refused (host_key: any takes it)"
        )
    elif name not in ("identitiesonly", "loglevel", "serveraliveinterval", "batchmode",
                      "serveralivecountmax", "connecttimeout", "tcpkeepalive", "addkeystoagent",
                      "requesttty", "forwardagent", "compression", "addressfamily"):  # fmt: skip
        target.notes.append(f"-o {found[1]} is left out")


def _place(word: str, target: Target) -> None:
    """[USER@]HOST or ssh://[USER@]HOST[:PORT]."""
    if "://" in word:
        try:
            parts = urlsplit(word)
        except ValueError:
            raise LineError(f"{short(word)} is not ssh://USER@HOST:PORT") from None
        try:
            port = parts.port
        except ValueError:
            raise LineError(f"{short(word)} has no port that is a number") from None
        if parts.scheme != "ssh" or not parts.hostname or parts.path.strip("/"):
            raise LineError(f"{short(word)} is not ssh://USER@HOST:PORT")
        if parts.password is not None:
            raise LineError(
                "a password in the line is refused: password: {env: NAME} in fleet.yaml"
            )
        user, address = unquote(parts.username or ""), parts.hostname
        if port is not None:
            _port(str(port), target)
    else:
        user, at, address = word.rpartition("@")
        if at and not user:
            raise LineError(f"{short(word)} has no user before the @")
        found = re.fullmatch(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):([0-9]+)", address)
        if found:  # ssh would take it for a name; providers print it all the same
            address = found[1]
            _port(found[2], target)
        address = address.strip("[]")
    if user:
        _user(user, target)
    if not target.address:  # -o HostName counts before
        target.address = _address(address)


def _address(text: str) -> str:
    if not address_like(text) or text.startswith("-"):
        raise LineError(f"{short(text)} is no name or address of a host")
    return text


# Of a thing that is said twice, the first counts: ssh_config(5)


def _port(text: str, target: Target) -> None:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise LineError(f"{short(text)} is no port, 1 to 65535 (is it still a placeholder?)")
    target.port = target.port or int(text)


def _user(text: str, target: Target) -> None:
    if not user_like(text):
        raise LineError(f"{short(text)} is no login (is it still a placeholder?)")
    target.user = target.user or text


def _key(text: str, target: Target) -> None:
    if not text or any(c in text for c in "<>\n"):
        raise LineError(f"{short(text)} is no file (is it still a placeholder?)")
    target.key = target.key or text


def _jump(text: str, target: Target) -> None:
    if text.lower() == "none":
        return
    try:
        jump_parts(text)
    except Refusal as error:
        raise LineError(f"-J {short(text)} {error.what}: {error.write}") from None
    target.jump = target.jump or text
