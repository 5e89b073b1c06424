"""fleet.yaml: read, checked as a whole, and turned into the hosts of pyinfra. No pyinfra in it.

Every problem of the file is told at once, with its line, and before any host is reached.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap

from kvhost.basics import printable
from kvhost.fleet import ways
from kvhost.fleet.faults import fault_of_form, named
from kvhost.fleet.known_hosts import KNOWN_HOSTS
from kvhost.fleet.model import LOCAL, FleetFile, HostEntry, SecretRef
from kvhost.fleet.parts import Broken, Loc, usable
from kvhost.fleet.yaml import Fault, FleetError, line_of, plain, read_yaml
from kvhost.schema.drives import HOST_DATA_ONLY
from kvhost.schema.problems import nearest, short
from kvhost.secrets import Secret, SecretError, read_secret
from kvhost.settings import Settings, SettingsError, validate_hosts

#: names another file in the place of fleet.yaml: one that is tried before it is written
FLEET_VARIABLE = "KVHOST_FLEET"


@dataclass(frozen=True)
class Fleet:
    """A checked file, and the folder that its relative paths begin at."""

    path: Path
    file: FleetFile
    folder: Path

    def settings_of(self, name: str) -> dict[str, Any]:
        """All of a host's settings: fleet, role, groups in their order, then its own."""
        return _merged(self.file, self.file.hosts[name])


def load_fleet(
    path: Path, folder: Path | None = None, env: Mapping[str, str] | None = None,
    *, keys: bool = True,
) -> Fleet:  # fmt: skip
    """``folder``: where relative paths begin, if not beside it. Raises FleetError, all faults at
    once: with ``env`` (os.environ) those of the secrets too, without ``keys`` none of files of
    keys. What hangs on something that has no right form is left out, and nothing else.
    """
    root = read_yaml(path)
    data = plain(root, path)
    faults: list[Fault] = []
    broken = Broken()
    try:
        file = FleetFile.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults += [fault_of_form(root, dict(detail)) for detail in details]
        broken = Broken(detail["loc"] for detail in details)
        file = usable(data, broken)
    faults += [*_names(root, file, broken), *_groups_known(root, file, broken)]
    faults += _together(root, file, broken)
    faults += [*_misplaced(root, file), *_settings(root, file, broken)]
    fleet = Fleet(path, file, folder or path.parent)
    if keys:
        faults += _keys(root, fleet)
    if env is not None:
        faults += _secrets(root, fleet, env)[1]
    if faults:  # one a place: the first says what to do about it
        first = {(fault.line, fault.key): fault for fault in reversed(faults)}
        raise FleetError(path, list(first.values()))
    return fleet


def groups_of(file: FleetFile) -> set[str]:
    """All groups that are named anywhere; pyinfra has those of the roles beside them."""
    return {*file.groups, *(group for entry in file.hosts.values() for group in entry.groups)}


def _names(root: CommentedMap, file: FleetFile, broken: Broken) -> Iterator[Fault]:
    """pyinfra looks for a group first: --limit HOST would act on all hosts of a group so named."""
    groups = groups_of(file)
    for name in file.hosts:
        loc: Loc = ("hosts", name)
        if name in groups and (*loc, "[key]") not in broken:
            what = "is the name of a group too, and --limit would take all hosts of the group"
            yield Fault(line_of(root, loc), named(loc), what, f"another name, as {name}-1")


def _groups_known(root: CommentedMap, file: FleetFile, broken: Broken) -> Iterator[Fault]:
    for name, entry in file.hosts.items():
        for number, group in enumerate(entry.groups):
            loc: Loc = ("hosts", name, "groups", number)
            if group not in file.groups and loc not in broken and ("groups",) not in broken:
                meant = nearest(group, file.groups)
                write = meant or f"groups: {{{group}: }} at the top of the file"
                yield Fault(
                    line_of(root, loc),
                    named(loc[:3]),
                    f"{short(group)} is not among the groups of this file",
                    write,
                )
    addresses: dict[tuple[str, int, str | None], str] = {}
    for name, entry in file.hosts.items():
        if not {"address", "port", "jump", "[key]"}.isdisjoint(broken.keys_of(name)):
            continue
        if not entry.address:
            continue
        if (name == LOCAL) != (entry.address == LOCAL):  # pyinfra takes it by this name alone
            loc2 = ("hosts", name, "address")
            what = "this machine is called @local, and nothing else is"
            write = '"@local": {address: "@local"}'
            yield Fault(line_of(root, loc2), named(loc2), what, write)
        place = (entry.address, entry.port, entry.jump)
        if place in addresses:
            loc2 = ("hosts", name, "address")
            yield Fault(
                line_of(root, loc2),
                named(loc2),
                f"is that of {addresses[place]} too: one machine, two names",
                "one of them",
            )
        addresses.setdefault(place, name)
    yield from ways.faults(root, file)


def _together(root: CommentedMap, file: FleetFile, broken: Broken) -> Iterator[Fault]:
    for name, entry in file.hosts.items():
        for key, keys, why in entry.together():
            if keys.isdisjoint(broken.keys_of(name)):
                loc = ("hosts", name, key)
                yield Fault(line_of(root, loc), named(loc), why.what, str(why.write))


def _misplaced(root: CommentedMap, file: FleetFile) -> Iterator[Fault]:
    """What is for one host alone (a token that erases) may not stand where several get it."""
    places: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [(("settings",), file.settings)]
    places += [
        (("groups", name, "settings"), group.settings)
        for name, group in file.groups.items()
        if group
    ]
    for loc, settings in places:
        for key in sorted(HOST_DATA_ONLY & set(settings)):
            yield Fault(
                line_of(root, (*loc, key)),
                named((*loc, key)),
                "could reach more than the one host that it is for",
                f"hosts: {{NAME: {{settings: {{{key}: …}}}}}}",
            )


def _merged(file: FleetFile, entry: HostEntry) -> dict[str, Any]:
    merged = {**file.settings, **entry.from_role()}
    for name in entry.groups:
        group = file.groups.get(name)
        merged |= group.settings if group else {}
    return merged | entry.settings


def _where(file: FleetFile, host: str, key: str) -> tuple[str, ...]:
    """The place whose value of a setting counts for a host."""
    entry = file.hosts[host]
    if key in entry.settings:
        return ("hosts", host, "settings", key)
    for name in reversed(entry.groups):
        group = file.groups.get(name)
        if group and key in group.settings:
            return ("groups", name, "settings", key)
    return ("settings", key) if key in file.settings else ("hosts", host)


def _settings(root: CommentedMap, file: FleetFile, broken: Broken) -> Iterator[Fault]:
    """Of values alone: what several mean together is checked with group_data/ by every run."""
    data = {name: _merged(file, entry) for name, entry in file.hosts.items()}
    hosts = dict(file.hosts)
    used = {group for entry in hosts.values() for group in entry.groups}
    for group in [None, *file.groups]:  # those that no host has yet are checked too
        if group not in used and (group or not hosts):
            entry = HostEntry.model_construct(address="x", groups=[group] if group else [])
            hosts[f"({group})"] = entry
            data[f"({group})"] = _merged(file, entry)
    file = file.model_copy(update={"hosts": hosts})
    try:
        validate_hosts(data, frozenset())
    except SettingsError as error:
        seen = set()
        for problem, problem_hosts in error.problems.items():
            if set(problem.key.split(", ")) <= Settings.model_fields.keys() and ", " in problem.key:
                continue
            for host in problem_hosts:
                absent = problem.key in Settings.model_fields and problem.key not in data[host]
                if broken and absent:  # it may stand in what cannot be read
                    continue
                loc: tuple[str, ...] = _where(file, host, problem.key)
                if loc not in seen:
                    seen.add(loc)
                    key = named(loc) if loc[-1] == problem.key else problem.key
                    yield Fault(
                        line_of(root, loc), key, problem.what, problem.write.replace(" = ", ": ", 1)
                    )


# What pyinfra is given


def key_path(folder: Path, key: str) -> Path:
    """A relative path begins beside the file; one of a user who is not there stays as it is."""
    return folder / os.path.expanduser(key)  # noqa: PTH111 - Path's raises for that user


def _key_fault(path: Path) -> tuple[str, str] | None:
    """What is wrong with a private key's file, and what to write; OpenSSH wants the same of it."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # not there, its name too long, its directory closed
        mode = 0
    if not stat.S_ISREG(mode):
        return f"no such file on the controller: {path}", "~/.ssh/id_ed25519"
    if path.suffix == ".pub":
        return f"{path} is a public key", str(path.with_suffix(""))
    if mode & 0o077:
        what = f"{path} has mode {stat.S_IMODE(mode):04o}, so that others than its owner can use it"
        return what, f"chmod 600 {path}"
    return None


def _keys(root: CommentedMap, fleet: Fleet) -> Iterator[Fault]:
    """Files of keys that cannot be used: pyinfra would stop the whole run at one."""
    for name, entry in fleet.file.hosts.items():
        fault = _key_fault(key_path(fleet.folder, entry.key)) if entry.key else None
        if fault:
            loc = ("hosts", name, "key")
            yield Fault(line_of(root, loc), named(loc), printable(fault[0]), printable(fault[1]))


def secrets_of(fleet: Fleet, env: Mapping[str, str]) -> dict[str, dict[str, Secret]]:
    """Host -> "password" | "sudo_password" -> value. Raises FleetError with all that is missing."""
    found, faults = _secrets(read_yaml(fleet.path), fleet, env)
    if faults:
        raise FleetError(fleet.path, faults)
    return found


def _secrets(
    root: CommentedMap, fleet: Fleet, env: Mapping[str, str]
) -> tuple[dict[str, dict[str, Secret]], list[Fault]]:
    faults: list[Fault] = []
    found: dict[str, dict[str, Secret]] = {}
    for name, entry in fleet.file.hosts.items():
        for key in ("password", "sudo_password"):
            ref: SecretRef | None = getattr(entry, key)
            if ref is None:
                continue
            loc = ("hosts", name, key)
            where = str(fleet.folder / ref.file) if ref.file else None
            try:
                secret = read_secret(named(loc), where, ref.env or "", env, word=False)
            except SecretError as error:
                what = str(error).removeprefix(f"{named(loc)}: ")
                faults.append(Fault(line_of(root, loc), named(loc), what, "a file, chmod 600"))
                continue
            if secret is None:
                faults.append(
                    Fault(
                        line_of(root, loc),
                        named(loc),
                        f"{ref.env} is not in the environment",
                        f"export {ref.env}=…",
                    )
                )
            else:
                found.setdefault(name, {})[key] = secret
    return found, faults


def pyinfra_hosts(fleet: Fleet, env: Mapping[str, str] | None = None) -> dict[str, list[Any]]:
    """Group -> hosts, as an inventory of pyinfra has them: "all" with data, the others by name.

    Of jump hosts pyinfra hears nothing: deploys/common/way.py opens the way. Raises FleetError.
    """
    secrets_of(fleet, os.environ if env is None else env)  # they are there; who connects reads them
    groups: dict[str, list[Any]] = {"all": []}
    for name, entry in fleet.file.hosts.items():
        data = connection_data(fleet, entry)
        groups["all"].append((name, data | fleet.settings_of(name)))
        for group in (entry.role, *entry.groups):
            groups.setdefault(group, []).append(name)
    return groups


def connection_data(fleet: Fleet, entry: HostEntry) -> dict[str, Any]:
    """pyinfra's own keys for one host. No secret: `pyinfra debug-inventory` shows them."""
    if entry.address == LOCAL:
        return {"_sudo": True} if entry.sudo else {}
    known = "/dev/null" if entry.host_key == "any" else str(fleet.folder / KNOWN_HOSTS)
    data: dict[str, Any] = {
        "ssh_hostname": entry.address,
        "ssh_port": entry.port,
        "ssh_known_hosts_file": known,
        "ssh_strict_host_key_checking": "yes" if entry.host_key == "known" else "accept-new",
        "ssh_file_transfer_protocol": entry.transfer,
    }
    if entry.user:
        data["ssh_user"] = entry.user
    if entry.key:
        data["ssh_key"] = str(key_path(fleet.folder, entry.key))
    if entry.jump:  # whoever has a way of his own in ~/.ssh/config does not mean this one
        data["ssh_config_file"] = os.devnull
    if entry.sudo:
        data["_sudo"] = True
    return data
