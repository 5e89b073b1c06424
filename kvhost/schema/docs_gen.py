"""Makes docs/settings.md from the schema: `python -m kvhost.schema.docs_gen`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kvhost.schema.runner_kinds import runners_with
from kvhost.schema.runners import MoreRunner
from kvhost.schema.settings import Settings
from kvhost.settings import field_notes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_FIRST = "Where it lies"  # the drive's own, which most readers do not need, come after it

_HEAD = """\
# Settings

Made from kvhost/schema/settings.py by `python -m kvhost.schema.docs_gen`: change it there.

Write overrides into `group_data/all.py` (or the file of a group, or the data of a host in the
inventory) as `key = value`; for one run, `--data key=value`. Data of a host counts before that of
its group, that before `all`, and `--data` before everything. Keys are flat, every value is checked
for all hosts before anything is touched, and an unknown key is an error.

- Types are strict: `True` and `False` for a yes or no (`--data disrupt=true`), a list in brackets
  (`--data 'runner_extra_args=["--max-num-seqs", "4"]'`). On the command line, text that looks like
  a number needs quotes inside: `--data 'served_model_name="70"'`.
- Paths on a host are absolute, without `..`, and made of letters, digits and `/ . _ + -` alone.
- Secrets are never data: `api_key_file`, `hf_token_file` and `shared_tier_password_file` name
  files on the controller (mode 0600), or `KVHOST_API_KEY`, `HF_TOKEN` and `KVHOST_SHARED_PASSWORD`
  are set in its environment. A file counts before the environment.
- *runners* are those that the setting means something with (`runner`); given with another one, and
  as something else than its default, it is refused with the reason.
- *Unset* as a default means that the setting may be left out; the sentence says what then happens.
"""


def page() -> str:
    """The whole page, in groups, with a newline at its end."""
    groups: dict[str, list[str]] = {}
    fields = Settings.model_fields
    first = [key for key in fields if field_notes(key)["group"] == _FIRST]
    for key in dict.fromkeys([*first, *fields]):
        field, notes = fields[key], field_notes(key)
        cells = [
            f"`{key}`",
            _type(field),
            notes["unit"] or "-",
            "unset" if field.default is None else _code(field.default),
            f"{(field.description or '').removesuffix('.')}{_bounds(field)}.",
            ", ".join(runners_with(key)) or "all",
            f"`{key} = {notes['example']!r}`",
        ]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        groups.setdefault(notes["group"], []).append(f"| {row} |")
    parts = [_HEAD]
    for group, rows in groups.items():
        head = "| key | type | unit | default | meaning | runners | example |\n"
        head += "|---|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {group}", "", head, *rows, ""]))
    return "\n".join(parts)


def _code(value: object) -> str:
    return f"`{value!r}`"


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if type(None) in get_args(kind):
        return _type_name(Union[tuple(a for a in get_args(kind) if a is not type(None))])  # noqa: UP007
    if hasattr(kind, "__metadata__"):
        return _type_name(get_args(kind)[0])
    if kind is MoreRunner:
        return "runner"
    names = {str: "text", int: "whole number", float: "number", bool: "yes or no"}
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}s"
    return names[kind]


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [
        f"{word} {getattr(item, name):,}"
        for name, word in words.items()
        for item in field.metadata
        if getattr(item, name, None) is not None
    ]
    return f" ({', '.join(limits)})" if limits else ""


def main() -> int:
    """Write the page where it belongs and say so."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
