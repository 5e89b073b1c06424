"""Who sets Ollama's variables, as systemd reads unit, drop-ins and environment files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import ollama_log, ollama_sets, ollama_unit

pytestmark = pytest.mark.runners
HEAD = "[Unit]\nDescription=x\n[Service]\n"
#: text of [Service] -> the rows (variable, value) of it
CASES: dict[str, tuple[str, list[tuple[str, str | None]]]] = {
    "plain": ("Environment=OLLAMA_HOST=0.0.0.0", [("OLLAMA_HOST", "0.0.0.0")]),
    "quoted": ('Environment="OLLAMA_MODELS=/a b"', [("OLLAMA_MODELS", "/a b")]),
    "two, one of others": (
        "Environment=SECRET=x 'OLLAMA_KV_CACHE_TYPE=q4_0'",
        [("OLLAMA_KV_CACHE_TYPE", "q4_0")],
    ),
    "continued": (
        "Environment=A=1 \\\n# a comment in between\n  OLLAMA_HOST=h:1",
        [("OLLAMA_HOST", "h:1")],
    ),
    "spaces around": ("Environment = OLLAMA_HOST=h:1", [("OLLAMA_HOST", "h:1")]),
    "comment": ("#Environment=OLLAMA_HOST=h:1\n;Environment=OLLAMA_HOST=h:1", []),
    "percent": ("Environment=OLLAMA_MODELS=/a%%b", [("OLLAMA_MODELS", "/a%b")]),
    "open quote": ('Environment="OLLAMA_HOST=h:1', []),
    "another section": ("[Install]\nEnvironment=OLLAMA_HOST=h:1", []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_unit_sets(case: str) -> None:
    text, wanted = CASES[case]
    rows, files = ollama_sets.sets_of("/u", HEAD + text)
    assert [(row["variable"], row["value"]) for row in rows] == wanted
    assert not files
    assert all(row["line"] == 4 for row in rows)


def test_an_empty_line_takes_all_of_them_away() -> None:
    rows, _ = ollama_sets.sets_of("/u", HEAD + "Environment=")
    assert {row["variable"] for row in rows} == set(ollama_log.KEPT)
    assert {row["value"] for row in rows} == {None}


def test_what_is_unset_counts_after_all_else() -> None:
    (row,), _ = ollama_sets.sets_of("/u", HEAD + "UnsetEnvironment=SECRET OLLAMA_HOST")
    assert (row["variable"], row["value"], row["last"]) == ("OLLAMA_HOST", None, True)


def test_environment_files_are_named_and_read(tmp_path: Path) -> None:
    file = tmp_path / "ollama"
    file.write_text("# comment\nOLLAMA_HOST='0.0.0.0'\nSECRET=never told\n OLLAMA_MODELS=/m\n")
    _, files = ollama_sets.sets_of("/u", HEAD + f"EnvironmentFile=-{file}")
    assert files == [str(file)]
    rows: list[dict[str, Any]] = ollama_sets.sets_of_file(str(file))
    assert [(r["variable"], r["value"], r["line"]) for r in rows] == [
        ("OLLAMA_HOST", "0.0.0.0", 2),
        ("OLLAMA_MODELS", "/m", 4),
    ]
    _, none = ollama_sets.sets_of("/u", HEAD + f"EnvironmentFile={file}\nEnvironmentFile=")
    assert none == []


def look(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, drop_in: str = ""
) -> dict[str, Any]:
    """What is found of a unit with this text of [Service], by the real script."""
    unit = folder / "ollama.service"
    unit.write_bytes(HEAD.encode() + text)
    shown = {"LoadState": "loaded", "FragmentPath": str(unit), "DropInPaths": drop_in}
    monkeypatch.setattr(ollama_unit, "booted", lambda: True)
    monkeypatch.setattr(ollama_unit, "shown_by_systemd", lambda _: shown)
    monkeypatch.setattr(ollama_unit, "PLACE", str(folder))
    return ollama_unit.look()


def test_environment_files_by_wildcards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.env").write_text("OLLAMA_KV_CACHE_TYPE=q4_0\n")
    (tmp_path / "a.env").write_text("OLLAMA_KV_CACHE_TYPE=q8_0\n")
    found = look(tmp_path, monkeypatch, f"EnvironmentFile=-{tmp_path}/*.env\n".encode())
    assert [one["value"] for one in found["sets"]] == ["q8_0", "q4_0"]
    quoted = f'EnvironmentFile="{tmp_path}/a.env"\n'  # no absolute path: systemd ignores it
    found = look(tmp_path, monkeypatch, quoted.encode())
    assert (found["sets"], found["unreadable"]) == ([], [])
    found = look(tmp_path, monkeypatch, b"EnvironmentFile=/etc/default/%N\n")
    assert "specifier" in found["unreadable"][0]


@pytest.mark.parametrize(("value", "left"), [("f16", [None]), ("q8_0", ["q8_0"])])
def test_one_value_may_be_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, left: list[str | None]
) -> None:
    unset = "UnsetEnvironment=OLLAMA_KV_CACHE_TYPE=f16\n"
    text = f"{unset}Environment=OLLAMA_KV_CACHE_TYPE={value}\n"
    found = look(tmp_path, monkeypatch, text.encode())
    assert [one["value"] for one in found["sets"]][-1:] == left


def test_odd_names_and_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in = tmp_path / "it's.conf"
    drop_in.write_text("[Service]\nEnvironment=OLLAMA_HOST=h:1\n")
    for shown in (str(drop_in), f'"{drop_in}"'):
        found = look(tmp_path, monkeypatch, b"Environment=A=\xff\xfe\n", shown)
        assert [one["value"] for one in found["sets"]] == ["h:1"]
    found = look(tmp_path, monkeypatch, b"", f"{tmp_path}/gone.conf")
    assert "gone.conf: it is not there" in found["unreadable"][0]
