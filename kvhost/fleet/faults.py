"""Errors of pydantic in a fleet.yaml, each in our words and with its line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ruamel.yaml.comments import CommentedMap

from kvhost.basics import printable
from kvhost.fleet.model import FleetFile, Group, HostEntry, SecretRef
from kvhost.fleet.yaml import Fault, line_of
from kvhost.schema.problems import Refusal, holds_a_secret, nearest

_KINDS = {
    "string_type": "text, in quotes if it looks like a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "list_type": "a list",
}


def named(loc: Sequence[Any]) -> str:
    """The place as hosts.NAME.KEY; nothing of it that looks like a secret."""
    words = [str(part) for part in loc if part != "[key]"]
    if holds_a_secret(words):
        return "(not shown)"
    return printable(".".join(words)).replace("\n", "\ufffd")[:200] or "the file"


def fault_of_form(root: CommentedMap, detail: dict[str, Any]) -> Fault:
    """One error of pydantic in our words."""
    loc, kind = detail["loc"], detail["type"]
    line, key = line_of(root, loc), named(loc)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        return Fault(line, key, cause.what, str(cause.write or "docs/fleets.md"))
    if kind == "extra_forbidden":
        return _unknown(root, loc, line)
    if kind == "missing":
        return Fault(line, key, "is missing", f"{loc[-1]}: 203.0.113.7")
    if kind == "literal_error":
        choices = str(detail["ctx"]["expected"]).replace("'", "")
        return Fault(line, key, f"must be {choices}", choices.split(",")[0].split(" or ")[0])
    if kind in ("greater_than_equal", "less_than_equal"):
        return Fault(line, key, "must be a port, 1 to 65535", "22")
    what = f"must be {_KINDS[kind]}" if kind in _KINDS else str(detail["msg"])
    return Fault(line, key, what, "docs/fleets.md has an example")


def _unknown(root: CommentedMap, loc: Sequence[Any], line: int) -> Fault:
    model: Any = FleetFile
    if len(loc) >= 3:
        model = HostEntry if loc[0] == "hosts" else Group
    if len(loc) == 4:
        model = SecretRef
    word = str(loc[-1])
    if holds_a_secret(word):
        return Fault(line, "(not shown)", "a secret never stands in this file", "{env: NAME}")
    meant = {
        "ssh_user": "user",
        "ssh_port": "port",
        "ssh_key": "key",
        "hostname": "address",
        "host": "address",
        "ip": "address",
        "_sudo": "sudo",
        "ssh_hostname": "address",
        "proxyjump": "jump",
        "identity_file": "key",
    }.get(word.lower())
    meant = meant or nearest(word, model.model_fields)
    if meant is None or meant == word:
        return Fault(
            line,
            named(loc),
            "is no key here",
            f"one of: {', '.join(model.model_fields)}; a setting goes below settings:",
        )
    return Fault(line, named(loc), f"is no key here; did you mean {meant}?", f"{meant}: …")
