"""docs/settings.md is the schema's own words, all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvhost.schema import docs_gen
from kvhost.settings import Settings, SettingsError, field_notes, validate_hosts


def test_the_page_is_the_one_that_the_schema_makes() -> None:
    found = docs_gen.PAGE.read_text(encoding="utf-8")
    assert found == docs_gen.page(), "run: python -m kvhost.schema.docs_gen"


@pytest.mark.parametrize("key", Settings.model_fields)
def test_every_setting_has_its_row(key: str) -> None:
    field, notes = Settings.model_fields[key], field_notes(key)
    rows = [line for line in docs_gen.page().splitlines() if line.startswith(f"| `{key}` |")]
    assert len(rows) == 1
    cells = re.split(r"(?<!\\)\|", rows[0])
    assert len(cells) == 9, "seven cells"
    assert cells[3].strip() == (notes["unit"] or "-")
    assert (repr(field.default) if field.default is not None else "unset") in cells[4]
    assert repr(notes["example"]) in cells[7]


#: title of a runner on the page -> the least that it is given
RUNNERS: dict[str, dict[str, object]] = {
    "vLLM": {},
    "llama-server": {"runner": "llama_server"},
    "Ollama": {"runner": "ollama", "model_source": "llama3.2:3b"},
}


@pytest.mark.parametrize("title", RUNNERS)
@pytest.mark.parametrize("key", sorted({*Settings.model_fields} - {"runner", "model_source"}))
def test_a_runner_that_a_row_does_not_name_refuses_the_setting(key: str, title: str) -> None:
    (row,) = [line for line in docs_gen.page().splitlines() if line.startswith(f"| `{key}` |")]
    told = re.split(r"(?<!\\)\|", row)[6].strip()
    data = {**RUNNERS[title], key: field_notes(key)["example"]}
    problems = ""
    try:
        validate_hosts({"h": data}, frozenset())
    except SettingsError as error:
        problems = str(error)
    lines = [line for line in problems.splitlines() if re.search(rf"\b{key}\b", line)]
    nothing = [line for line in lines if re.search("means nothing|is a setting of", line)]
    assert bool(nothing) is (told != "all" and title not in told.split(", ")), problems


@pytest.mark.parametrize("key", Settings.model_fields)
def test_every_setting_is_said_in_one_sentence(key: str) -> None:
    description = Settings.model_fields[key].description
    assert description is not None
    assert re.fullmatch(r"[A-Z][^\n]+\.", description)
    assert not re.search(r"\. [A-Z]", description), "one sentence"
    # `e.g. MAX` would be a unit in the prose; a number with a dimension names its unit.
    if key.endswith(("_gib", "_s", "_tokens", "_len", "_size", "_watermark")):
        assert field_notes(key)["unit"]


def test_the_page_says_bounds_and_choices() -> None:
    page = docs_gen.page()
    assert "(at least 128, at most 65,536)." in page
    assert "`auto` or `cpu` or `cuda`" in page


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    target = tmp_path / "settings.md"
    code = (
        "import pathlib, kvhost.schema.docs_gen as d;"
        f"d.PAGE = pathlib.Path({str(target)!r}); raise SystemExit(d.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert target.read_text(encoding="utf-8") == docs_gen.page()
    assert str(target) in done.stderr
