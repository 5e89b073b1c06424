"""What can still be judged of a fleet.yaml in which something has no right form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvhost.fleet.model import FleetFile, Group, HostEntry

#: a place in the file, as pydantic names it: ("hosts", NAME, "groups", 0)
Loc = tuple[Any, ...]


class Broken:
    """The places of faults of form. What they touch is not judged a second time."""

    def __init__(self, places: Iterable[Loc] = ()) -> None:
        self.places = set(places)
        self._keys: dict[Any, set[Any]] = {}
        for loc in self.places:
            if loc[:1] == ("hosts",) and len(loc) > 2:
                self._keys.setdefault(loc[1], set()).add(loc[2])

    def __bool__(self) -> bool:
        return bool(self.places)

    def __contains__(self, loc: Loc) -> bool:
        return loc in self.places

    def keys_of(self, host: str) -> set[Any]:
        """The keys of a host that have a fault, or a fault in them."""
        return self._keys.get(host, set())


def usable(data: Any, broken: Broken) -> FleetFile:
    """``data`` without what is in ``broken``: names and settings of any kind, all else as it must
    be. A host whose address is not right has "" for it."""
    top = _mapping(data)
    groups = {
        name: Group.model_construct(settings=_texts(_mapping(raw).get("settings")))
        for name, raw in _texts(top.get("groups")).items()
    }
    hosts = {
        name: _entry(_mapping(raw), broken.keys_of(name))
        for name, raw in _texts(top.get("hosts")).items()
    }
    settings = _texts(top.get("settings"))
    return FleetFile.model_construct(settings=settings, groups=groups, hosts=hosts)


def _entry(raw: dict[Any, Any], bad: set[Any]) -> HostEntry:
    apart = {"address", "groups", "settings"}
    good = {k: raw[k] for k in HostEntry.model_fields if k in raw and k not in bad | apart}
    groups = raw.get("groups")
    rest = {
        "address": "" if "address" in bad or "address" not in raw else raw["address"],
        # one that is no text keeps its place, for the lines of the others
        "groups": [g if isinstance(g, str) else "" for g in groups]
        if isinstance(groups, list)
        else [],
        "settings": _texts(raw.get("settings")),
    }
    return HostEntry.model_validate({"address": "x", **good}).model_copy(update=rest)


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, Any]:
    return {key: one for key, one in _mapping(value).items() if isinstance(key, str)}
