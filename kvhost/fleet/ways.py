"""The jump hosts that lead to each host of fleet.yaml, one after the other. Pure.

kvhost logs in at each of them itself (deploys/common/way.py). A configuration of ssh would have one
place for all that is known of an address, and pyinfra follows no jump of a jump host there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap

from kvhost.fleet.faults import named
from kvhost.fleet.model import FleetFile, jump_parts
from kvhost.fleet.parts import Loc
from kvhost.fleet.yaml import Fault, line_of


@dataclass(frozen=True)
class Hop:
    """One login on the way. `host`: the name that it has in the fleet, for its key and its user."""

    user: str | None
    address: str
    port: int
    host: str | None = None


def way_to(file: FleetFile, name: str) -> list[Hop]:
    """All logins before that of host `name`; [] where nothing lies between."""
    return _hops(file, file.hosts[name].jump)


def _hops(file: FleetFile, jump: str | None) -> list[Hop]:
    if jump is None:
        return []
    hops = []
    for user, address, port in jump_parts(jump):
        there = [n for n, e in file.hosts.items() if (e.address, e.port) == (address, port)]
        name = there[0] if there else None
        hops.append(Hop(user or (file.hosts[name].user if name else None), address, port, name))
    first = hops[0]  # each of the others is reached from the one before it
    if first.host is not None:
        return [*_hops(file, file.hosts[first.host].jump), *hops]
    return [*_hops(file, _way_of(file, first.address)), *hops]


def _way_of(file: FleetFile, address: str) -> str | None:
    return next((e.jump for e in file.hosts.values() if e.jump and e.address == address), None)


def faults(root: CommentedMap, file: FleetFile) -> Iterator[Fault]:
    """There is one way to an address, which is followed from the first hop, and it has an end."""
    ways: dict[str, tuple[str, str]] = {}
    for name, entry in file.hosts.items():
        if entry.jump and entry.address:
            other, way = ways.setdefault(entry.address, (name, entry.jump))
            if way != entry.jump:
                what = f"is another way to {entry.address} than that of {other}"
                write = f"{way}, or another name for one of the addresses"
                yield _fault(root, name, what, write)
    for name, entry in file.hosts.items():
        seen: set[str] = set()
        left = [entry.jump] if entry.jump else []
        while left:
            for _, hop, _ in jump_parts(left.pop()):
                if hop in ways and hop not in seen:
                    seen.add(hop)
                    left.append(ways[hop][1])
        if entry.address in seen:
            write = "a host that is reached without it"
            yield _fault(root, name, "leads back to the host itself", write)


def _fault(root: CommentedMap, name: str, what: str, write: str) -> Fault:
    loc: Loc = ("hosts", name, "jump")
    return Fault(line_of(root, loc), named(loc), what, write)
