"""Files in a service user's directories: made as wanted, and never through a link."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/own_files.py"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, SCRIPT, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def wanted(folder: Path) -> tuple[str | Path, ...]:
    return ("--dir", folder / "ns", "--file", folder / "ns/meta", "text\n")


def right(folder: Path) -> bool:
    done = run("--check", *wanted(folder))
    assert done.returncode == 0, done.stderr
    return bool(json.loads(done.stdout)["ok"])


def test_made_once_and_then_as_wanted(tmp_path: Path) -> None:
    assert not right(tmp_path)
    assert not (tmp_path / "ns").exists()  # --check changes nothing
    assert run(*wanted(tmp_path)).returncode == 0
    assert right(tmp_path)
    assert stat.S_IMODE((tmp_path / "ns").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "ns/meta").stat().st_mode) == 0o600


@pytest.mark.parametrize("how", ["file", "directory"])
def test_a_link_is_replaced_and_what_it_names_is_not_touched(tmp_path: Path, how: str) -> None:
    target = tmp_path / "precious"
    if how == "file":
        target.write_text("precious")
        (tmp_path / "ns").mkdir(0o700)
        (tmp_path / "ns/meta").symlink_to(target)
    else:
        target.mkdir()
        (tmp_path / "ns").symlink_to(target)
    before = target.stat().st_mode
    assert not right(tmp_path)
    assert run(*wanted(tmp_path)).returncode == 0
    assert right(tmp_path)
    assert target.stat().st_mode == before
    assert not (tmp_path / "ns").is_symlink()
    assert target.read_text() == "precious" if how == "file" else list(target.iterdir()) == []


@pytest.mark.parametrize("damage", ["content", "mode", "directory mode"])
def test_what_was_changed_is_seen_and_mended(tmp_path: Path, damage: str) -> None:
    run(*wanted(tmp_path))
    if damage == "content":
        (tmp_path / "ns/meta").write_text("other")
    elif damage == "mode":
        (tmp_path / "ns/meta").chmod(0o644)
    else:
        (tmp_path / "ns").chmod(0o755)
    assert not right(tmp_path)
    assert run(*wanted(tmp_path)).returncode == 0
    assert right(tmp_path)


def no_text(path: Path) -> None:
    """As llama-server writes one by a name that somebody with its key gave."""
    path.write_bytes(b"\xff\x00no text")
    path.chmod(0o600)


@pytest.mark.parametrize("name", ["meta", "meta.new"])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to(path.name),
        no_text,
        lambda path: path.symlink_to("/dev/zero"),
    ],
)
def test_what_is_nobodys_data_gives_way(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    run(*wanted(tmp_path))
    (tmp_path / "ns" / name).unlink(missing_ok=True)
    make(tmp_path / "ns" / name)
    assert right(tmp_path) is (name != "meta")
    if name == "meta.new":
        (tmp_path / "ns/meta").write_text("other")
    assert run(*wanted(tmp_path)).returncode == 0
    assert right(tmp_path)


def test_a_directory_that_holds_something_stays_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "ns/meta").mkdir(parents=True)
    (tmp_path / "ns/meta/kept").touch()
    done = run(*wanted(tmp_path))
    assert done.returncode == 1 and str(tmp_path / "ns/meta") in done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / "ns/meta/kept").exists()


def test_something_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "ns").write_text("a file")
    done = run(*wanted(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path / "ns") in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming a user needs root")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_another_user_is_named_with_what_gives_it_back(mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 65534, 65534)
        (folder / "ns").mkdir(mode)
        (folder / "ns").chmod(mode)
        as_user = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/python3",
        ]
        argv = [*as_user, "-", *wanted(folder)]
        for check in ((), ("--check",)):
            done = subprocess.run([*argv, *check], input=SCRIPT.read_text(), capture_output=True,
                                  text=True, check=False)  # fmt: skip
            assert "Traceback" not in done.stderr
            if check:
                assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, False)
            else:
                assert done.returncode == 1
                assert f"chown -hR 65534:65534 '{folder}/ns'" in done.stderr
