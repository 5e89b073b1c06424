"""`kvhost init` and `kvhost inventory`: a working copy of one's own, and the hosts in it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text
from ruamel.yaml.comments import CommentedMap

from kvhost.basics import counted, printable
from kvhost.commands.care import ask
from kvhost.commands.options import DONE_HERE
from kvhost.commands.run import FLEET_INVENTORY, copy_root, fleet_hosts, pyinfra
from kvhost.fleet import known_hosts, look
from kvhost.fleet.known_hosts import KNOWN_HOSTS
from kvhost.fleet.model import host_name
from kvhost.fleet.read import FLEET_VARIABLE, key_path, load_fleet
from kvhost.fleet.ssh_line import LineError, Target, parse
from kvhost.fleet.yaml import FleetError, read_yaml, yaml
from kvhost.schema.problems import Refusal, short
from kvhost.working_copy import CopyError, make

CANDIDATE = ".kvhost/candidate.yaml"


@click.command(epilog=DONE_HERE)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Make a working copy in DIR, or bring one up to date.

    Deploys, inventories, locks, templates and a fleet.yaml, to be kept in a repository of your
    own. Nothing is replaced: in a copy that is there, files that you changed are left.
    """
    try:
        made = make(folder)
    except (CopyError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for name in made.beside:
        click.echo(f"{name}: changed by you and by this version; the new one is {name}.new")
    for name in made.removed:
        click.echo(f"{name}: no longer part of kvhost, removed")
    try:
        step = "kvhost plan" if fleet_hosts(folder) else 'kvhost inventory add "ssh root@…"'
    except FleetError as error:
        raise click.ClickException(str(error)) from None
    done = f"{counted(len(made.written), 'file')} written" if made.written else "up to date"
    there = "" if folder.resolve() == Path.cwd().resolve() else f"cd {folder}; "
    click.echo(f"{folder}: {done}. Next: {there}{step}")


@click.group("inventory")
def inventory_group() -> None:
    """The hosts of fleet.yaml."""


@inventory_group.command("add")
@click.argument("line", metavar='"ssh root@203.0.113.7 -p 40022 -i key"')
@click.option("--name", help="What the host is called; without it, its address.")
@click.option("--group", "groups", multiple=True, help="A group of fleet.yaml; repeatable.")
@click.option("--volume", help="A rented container's volume, as /workspace.")
@click.option("--sudo-password-env", metavar="NAME", help="Variable that holds sudo's password.")
@click.option("--host-key", type=click.Choice(["once", "known", "any"]), help="docs/fleets.md.")
@click.option("--new-key", is_flag=True, help="The address is known to be another machine now.")
@click.option("--no-look", is_flag=True, help="Write it without looking at the host.")
def inventory_add(line: str, new_key: bool, no_look: bool, **given: Any) -> None:
    """Look at a host, and write it into fleet.yaml.

    Takes the line that a provider shows. A host that is there already, by --name or by address and
    port, gets what is new; the rest of it, comments and order stay. Nothing on the host changes.
    Exit: 0 written; 1 not reached, or not usable, and nothing written; 2 wrong usage.
    """
    top = copy_root()
    path = top / "fleet.yaml"
    click.get_current_context().with_resource(_alone(top))
    try:
        target = parse(line)
        there = os.path.lexists(path)  # of a link to nowhere read_yaml says so
        root = read_yaml(path) if there else CommentedMap()
        if there:
            load_fleet(path, folder=top, keys=False)  # its own faults, before any of what is added
        path = path.resolve()  # a link stays one
        name, entry = _entry(root, target, given)
        _usable(entry, top)
        _save(root, top / CANDIDATE)
        load_fleet(top / CANDIDATE, folder=top, env=None if no_look else os.environ)
    except (LineError, Refusal) as error:
        said = f"{error.what}; write {error.write}" if isinstance(error, Refusal) else str(error)
        raise click.ClickException(said) from None
    except FleetError as error:
        raise click.ClickException(str(error)) from None
    console = Console(stderr=True)
    for note in target.notes:  # before the look, which one of them may explain
        console.print(Text(f"note: {printable(note)}"), soft_wrap=True)
    if new_key:
        place = (str(entry["address"]), int(entry.get("port", 22)))
        _forget(top, known_hosts.entry_name(*place))
    if not no_look:
        os.environ[FLEET_VARIABLE] = CANDIDATE
        code, answers = ask(pyinfra, FLEET_INVENTORY, "deploys/look.py", ("--limit", name), {})
        if code or not answers:
            raise click.ClickException(f"{name}: not written, it could not be looked at (above)")
        seen = look.Seen.model_validate({k: v for k, v in answers[0].items() if k != "host"})
        look.complete(entry, seen)
        for row in look.lines(name, seen):
            console.print(Text(printable(row)), soft_wrap=True)
        for row in look.problems(entry, seen):
            raise click.ClickException(f"{name}: not written: {row}")
    try:
        _save(root, top / CANDIDATE)
        load_fleet(top / CANDIDATE, folder=top)
    except FleetError as error:
        raise click.ClickException(str(error)) from None
    _save(root, path)
    (top / CANDIDATE).unlink()
    click.echo(f"{name} is in {path}. Next: kvhost plan --limit {name}")


@contextmanager
def _alone(top: Path) -> Iterator[None]:
    """One command at a time writes the fleet, or a host of two that are added would be lost."""
    path = top / f"{CANDIDATE}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            click.echo("another kvhost inventory add is at work here, and is waited for", err=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@inventory_group.command("new-key", epilog=DONE_HERE)
@click.argument("name", metavar="HOST|ADDRESS[:PORT]")
def inventory_new_key(name: str) -> None:
    """Forget a host key.

    That of a HOST of fleet.yaml, or of an ADDRESS, as a jump host's, which is known to be another
    machine now.
    The next connection keeps the key that it is shown. What was known stays as a comment.
    """
    top = copy_root()
    try:
        fleet = load_fleet(top / "fleet.yaml", keys=False)
    except FleetError as error:
        raise click.ClickException(str(error)) from None
    entry = fleet.file.hosts.get(name)
    if entry is not None:
        return _forget(top, known_hosts.entry_name(entry.address, entry.port))
    found = known_hosts.entries(top / KNOWN_HOSTS, name)
    if not found:
        what = f"{short(name)}: no such host in {fleet.path}, and no such address in {KNOWN_HOSTS}"
        raise click.ClickException(what)
    for one in found:
        _forget(top, one)
    return None


def _forget(top: Path, entry: str) -> None:
    gone = known_hosts.forget(top / KNOWN_HOSTS, entry)
    said = ", ".join(gone) or "no key of it"
    click.echo(f"{entry}: {said} taken out of {KNOWN_HOSTS}")


def _entry(root: CommentedMap, target: Target, given: dict[str, Any]) -> tuple[str, CommentedMap]:
    """The host's place in the file, with what the line and the options say. Raises Refusal."""
    if not isinstance(root.get("hosts"), CommentedMap) or not root["hosts"]:
        root["hosts"] = CommentedMap()  # {} would stay on one line
    hosts = root["hosts"]
    said = target.entry()
    name = given["name"] or _same_place(hosts, said) or _free_name(hosts, target)
    try:
        host_name(name)
    except Refusal as error:
        raise Refusal(f"the name {short(name)} {error.what}", "--name gpu-1") from None
    if not isinstance(hosts.get(name), CommentedMap):
        hosts[name] = CommentedMap()
    entry: CommentedMap = hosts[name]
    # the line is the whole way to the host
    if "port" not in said and entry.get("port", 22) != 22:
        said["port"] = 22
    if "jump" not in said and entry.pop("jump", None) is not None:
        target.notes.append(f"the jump host of {name} is left out: the line has none (-J)")
    for key, value in said.items():
        entry[key] = value
    if target.key is not None:
        entry["key"] = _key(target.key)
    if given["volume"]:
        entry["role"], entry["volume"] = "pod", given["volume"]
    if given["sudo_password_env"]:
        entry["sudo"], entry["sudo_password"] = True, {"env": given["sudo_password_env"]}
    if given["host_key"]:
        entry["host_key"] = given["host_key"]
    if given["groups"] and root.get("groups") is None:
        root["groups"] = CommentedMap()
    for group in given["groups"]:
        if group not in root["groups"]:
            root["groups"][group] = CommentedMap({"settings": CommentedMap()})
        if group not in entry.setdefault("groups", []):
            entry["groups"].append(group)
    for one in (name, *given["groups"]):
        if one in hosts and one in (root.get("groups") or ()):
            what = f"{short(one)} would be a host and a group, and --limit would take the group"
            raise Refusal(what, f"--name {one}-1" if one == name else "another --group")
    return name, entry


def _key(given: str) -> str:
    """A relative path begins where the command was started; in the file it begins beside it."""
    path = Path(given).expanduser()
    if path.is_absolute() or Path.cwd() == copy_root() or not path.exists():
        return given  # what is not there is told with its line, by fleet.py
    return str(path.absolute())


def _usable(entry: CommentedMap, top: Path) -> None:
    """Its key is one; a passphrase is asked for when it is used. Raises click.ClickException."""
    if not isinstance(entry.get("key"), str):
        return
    from kvhost.fleet import ssh_key  # paramiko is slow to load

    try:
        ssh_key.check(key_path(top, entry["key"]))
    except ssh_key.Encrypted:
        return
    except ssh_key.KeyFault as error:
        raise click.ClickException(str(error)) from None


def _same_place(hosts: CommentedMap, said: dict[str, object]) -> str | None:
    for name, entry in hosts.items():
        if isinstance(entry, CommentedMap):
            place = (entry.get("address"), entry.get("port", 22), entry.get("jump"))
            if place == (said["address"], said.get("port", 22), said.get("jump")):
                return str(name)
    return None


def _free_name(hosts: CommentedMap, target: Target) -> str:
    plain = re.sub(r"[^A-Za-z0-9.-]", "-", target.address).strip("-.")[:50] or "host"
    if plain.isdecimal():  # --canary 1 is the first host
        plain = f"host-{plain}"
    return plain if plain not in hosts else f"{plain}-{target.port or 22}"


def _save(root: CommentedMap, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as handle:
        yaml().dump(root, handle)
    if path.exists():
        shutil.copymode(path, new)
    new.replace(path)
