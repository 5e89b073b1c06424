"""What lies in the way of the keeper of llama-server's slots: it gives way, or is said once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhost.onhost import evidence_llama, slots_files
from kvhost.onhost.slots_files import Store, Trouble
from tests.slots_tools import ONHOST, Site, made, program, where

Make = Callable[[Path], object]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from made(tmp_path)


def listening(path: Path) -> None:
    """A socket; its path is longer than one may be."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def link_outside(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_text("somebody's own")
    path.symlink_to(path.parent.parent / "elsewhere")


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_text("somebody's own")


ODD: dict[str, Make] = {
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": listening,
    "link": link_outside,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "itself": lambda path: path.symlink_to(path.name),
}
#: every name that is written; of .kv files and drafts below
WRITTEN = (
    slots_files.LOCK,
    slots_files.STATE,
    f"{slots_files.STATE}.new",
    ".slot-0.json",
    ".slot-0.json.new",
)


def in_place(site: Site, name: str, make: Make) -> Path:
    path = site.folder / name
    path.unlink(missing_ok=True)
    make(path)
    return path


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_nobodys_data_gives_way_and_is_said(name: str, kind: str, site: Site) -> None:
    path = in_place(site, name, ODD[kind])
    site.server.fill(0, b"zero")
    done = program(site, "save", "--all", timeout=30)
    assert done.returncode == 0, done.stderr
    assert f"removed {path}, which was no file" in done.stderr
    assert site.file("slot-0").read_bytes() == b"zero"
    elsewhere = site.folder.parent / "elsewhere"
    assert kind != "link" or elsewhere.read_text() == "somebody's own"
    assert program(site, "save", "--all").stderr == ""  # remembered, and said no more


@pytest.mark.parametrize("name", WRITTEN)
def test_a_directory_that_holds_something_stays_and_is_named(name: str, site: Site) -> None:
    path = in_place(site, name, full_folder)
    site.server.fill(0, b"zero")
    site.server.fill(1, b"one")
    done = program(site, "save", "--all")
    assert (path / "kept").read_text() == "somebody's own"
    line = f"in the way: {path} is a directory that holds something: move it away"
    assert done.stderr.count(line) == 1 and "Traceback" not in done.stderr
    if name == slots_files.LOCK:
        assert done.returncode == 1 and site.server.saves == 0
    elif slots_files.STATE in name:
        assert json.loads(done.stdout) == {"saved": ["slot-0", "slot-1"], "failed": []}
    else:
        # the other slot is saved all the same, and of this one nothing was written for nothing
        assert done.returncode == 1 and site.server.saves == 1
        assert json.loads(done.stdout) == {"saved": ["slot-1"], "failed": ["slot-0"]}
    path.rename(site.folder.parent / "moved")
    assert program(site, "save", "--all").returncode == 0
    assert (site.folder / ".slot-0.json").is_file()


@pytest.mark.parametrize("kind", ODD)
def test_the_server_never_writes_into_what_lies_at_its_drafts_name(kind: str, site: Site) -> None:
    site.server.fill(0, b"zero")
    name = f"slot-0.{os.getpid()}.tmp"
    in_place(site, name, ODD[kind])
    assert site.save() == ["slot-0"]
    assert site.file("slot-0").read_bytes() == b"zero"
    elsewhere = site.folder.parent / "elsewhere"
    assert kind != "link" or elsewhere.read_text() == "somebody's own"
    in_place(site, name, full_folder)
    site.server.fill(0, b"another")
    saves = site.server.saves
    assert site.save() == [] and site.server.saves == saves
    assert (site.folder / name / "kept").exists()


def test_a_directory_of_the_saved_files_own_name_gives_way(site: Site) -> None:
    site.server.fill(0, b"zero")
    site.save()
    path = site.file("slot-0")
    site.keeper.store.forget("slot-0")
    path.mkdir()
    site.start()
    site.server.fill(0, b"zero")
    assert site.save() == ["slot-0"] and path.read_bytes() == b"zero"


@pytest.mark.parametrize("kind", ODD)
def test_without_its_namespaces_file_it_ends_with_what_to_do(kind: str, site: Site) -> None:
    in_place(site, slots_files.NAMESPACE, ODD[kind])
    done = program(site, "save", "--all", timeout=30)
    assert done.returncode == 1 and "kvhost up makes its file anew" in done.stderr
    assert slots_files.NAMESPACE in done.stderr and len(done.stderr.splitlines()) == 1


def test_forgetting_one_that_cannot_go_says_what_is_in_the_way(site: Site) -> None:
    path = in_place(site, ".x.json", full_folder)
    done = program(site, "forget", "x")
    assert done.returncode == 1 and f"{path} is a directory that holds something" in done.stderr
    empty = in_place(site, ".y.json", ODD["directory"])
    assert program(site, "forget", "y").returncode == 0 and not empty.exists()
    lost = in_place(site, f"z.{'0' * 16}.kv", lambda p: p.write_text("without a note"))
    assert program(site, "forget", "z").returncode == 0 and not lost.exists()


@pytest.mark.parametrize(
    "name, said",
    [
        (slots_files.LOCK, "in the way"),
        (".slot-0.json", "slot-0 is not saved: in the way"),
    ],
)
def test_the_keeper_says_once_what_keeps_it_from_its_work_and_goes_on_by_itself(
    name: str, said: str, site: Site, tmp_path: Path
) -> None:
    path = in_place(site, name, full_folder)
    site.server.fill(0, b"zero")
    log = tmp_path / "log"
    words = ("run", "--every", "0.1")
    with log.open("w") as out:
        keeper = subprocess.Popen(
            [sys.executable, ONHOST / "slots.py", *where(site), *words], stderr=out
        )
    try:
        deadline = time.monotonic() + 30
        while said not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        time.sleep(1)  # ten more rounds of the keeper
        told = log.read_text()
        path.rename(tmp_path / "moved")
        deadline = time.monotonic() + 15
        while not (site.folder / ".slot-0.json").is_file():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(10) == 0
    assert told.count(said) == 1 and "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    "words, slot",
    [
        (("restore", "slot-1"), 1),
        (("restore", "slot-1", "--slot", "0"), 0),
        (("restore", "mine"), 0),
        (("restore", "mine", "--slot", "1"), 1),
    ],
)
def test_the_answer_tells_the_slot_that_was_restored_into(
    words: tuple[str, ...], slot: int, site: Site
) -> None:
    site.server.fill(1, b"one")
    site.save()
    program(site, "save", "mine", "--slot", "1")
    site.start()
    done = program(site, *words)
    assert json.loads(done.stdout)["slot"] == slot == site.server.restored[0][0]


@pytest.mark.parametrize("name", ["gone", "slot-7"])
def test_what_is_not_saved_is_neither_forgotten_nor_restored(name: str, site: Site) -> None:
    for words in (("forget", name), ("restore", name, "--slot", "0")):
        done = program(site, *words)
        assert done.returncode == 1 and f"nothing is saved as {name}" in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("name", ["kvhost-namespace", "slots-state"])
def test_a_name_whose_note_is_a_file_of_kvhosts_own_is_refused(name: str, site: Site) -> None:
    site.server.fill(0, b"zero")
    site.save()
    before = {path.name: path.read_bytes() for path in site.folder.iterdir()}
    for command in ("save", "restore", "forget"):
        done = program(site, command, name)
        assert done.returncode == 2 and f".{name}.json is a file of kvhost's own" in done.stderr
    # nor by what calls the store itself, and not beside a data file of that name
    with pytest.raises(Trouble, match="take another name"):
        site.keeper.save(0, name, "test", 30)
    (site.folder / f"{name}.{'ab' * 8}.kv").write_bytes(b"x")
    assert site.keeper.store.forget(name)
    assert {path.name: path.read_bytes() for path in site.folder.iterdir()} == before


def test_all_and_one_slot_together_are_a_slip(site: Site) -> None:
    assert program(site, "save", "--all", "--slot", "1").returncode == 2


def test_a_description_of_the_keeper_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc" / "slots.json")
    argv = [sys.executable, str(ONHOST / "slots.py"), "--base", str(tmp_path), "list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2 and "is not a regular file" in done.stderr


def test_a_lock_that_cannot_be_made_is_named(site: Site) -> None:
    full_folder(site.folder / slots_files.LOCK)
    with (
        pytest.raises(Trouble, match=r"\.slots\.lock is a directory that holds something"),
        Store(str(site.folder)).locked(),
    ):
        pass


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_the_restart_test_waits_for_no_pipe_and_reads_through_no_link(
    kind: str, site: Site
) -> None:
    test = object.__new__(evidence_llama.Test)
    test.config = {"namespace_dir": str(site.folder), "own_tokens": str(site.folder / "own")}
    test.config["services"] = {"slots": {"record": str(site.folder / "record")}}
    test.slot, test.limits, test.evidence = 0, {"restored_s": 1}, {}
    for name in (".slot-0.json", slots_files.STATE, "own", "record"):
        in_place(site, name, ODD[kind])
    (site.folder.parent / "elsewhere").write_text('{"server": "None:None:None", "restored": true}')
    with pytest.raises(OSError):
        test.note()
    assert test.own_tokens({}) == 0.0
    assert test.identity("slots") == {"record": None, "proc": None, "listens": None}
    test.config["services"]["runner"] = {"record": str(site.folder / "record")}
    with pytest.raises(ValueError, match="has restored nothing in time"):
        test.wait_restored()
