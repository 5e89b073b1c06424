"""The keeper of llama-server's slots: what is saved, that nothing damaged reaches the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import slots, slots_files
from kvhost.onhost.slots_files import Store, Trouble
from tests.slots_tools import ENGINE, ONHOST, Site, made, program, where


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from made(tmp_path)


def test_a_changed_slot_is_saved_once_with_all_that_tells_what_it_is(site: Site) -> None:
    site.server.fill(0, b"prompt one")
    assert site.save() == ["slot-0"]
    note = site.note("slot-0")
    assert (note["bytes"], note["tokens"], note["engine"]) == (10, 10, ENGINE)
    assert note["server_build"] == "b11434-double" and note["why"] == "test"
    assert site.file("slot-0").read_bytes() == b"prompt one"
    assert site.file("slot-0").stat().st_mode & 0o777 == 0o600
    assert site.save() == [] and site.server.saves == 1
    site.server.fill(0, b"prompt two, longer")
    assert site.save() == ["slot-0"]
    assert site.files() == [site.note("slot-0")["file"]]  # the old one is gone


def test_a_slot_at_work_waits_for_the_next_round_but_not_at_a_stop(site: Site) -> None:
    site.server.fill(1, b"x")
    site.server.busy.add(1)
    assert site.keeper.save_changed("changed", 30, busy_too=False) == []
    assert site.save() == ["slot-1"]


def test_slots_are_restored_once_for_each_start(site: Site) -> None:
    site.server.fill(0, b"zero")
    site.server.fill(1, b"one")
    site.save()
    site.start()
    site.keeper.restore_all()
    assert site.server.contents == {0: b"zero", 1: b"one"}
    site.keeper.restore_all()  # as a keeper that starts anew would
    assert len(site.server.restored) == 2


def damage(change: Callable[[Path], object]) -> Callable[[Site], object]:
    return lambda site: change(site.file("slot-0"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def edit(name: str, **changes: Any) -> Callable[[Site], object]:
    def change(site: Site) -> None:
        note = {**site.note(name), **changes}
        (site.folder / f".{name}.json").write_text(json.dumps(note))

    return change


def to_a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "harm, said",
    [
        (damage(lambda p: os.truncate(p, 5)), "has 5 bytes, 10 were written"),
        (damage(lambda p: os.truncate(p, 0)), "has 0 bytes"),
        (damage(flip), "the checksum is another"),
        (damage(lambda p: p.unlink()), "its file is gone"),
        (damage(to_a_link), "cannot be read"),
        (lambda s: s.engine({**ENGINE, "model_digest": "n" * 64}), "model_digest differ"),
        (lambda s: s.engine({**ENGINE, "cache_type_k": "q8_0"}), "cache_type_k differ"),
        (lambda s: setattr(s.server, "build", "b2-other"), "and b2-other runs"),
        (edit("slot-0", sha256="0" * 64), "the checksum is another"),
        (edit("slot-0", bytes=None), "of another form"),
        (edit("slot-0", file="../../elsewhere.kv"), "of another form"),
        (edit("slot-0", schema=9), "of another form"),
        (lambda s: (s.folder / ".slot-0.json").write_text("{"), "note cannot be read"),
    ],
)
def test_what_does_not_verify_never_reaches_the_server_and_is_removed(
    harm: Callable[[Site], object],
    said: str,
    site: Site,
    capfd: pytest.CaptureFixture[str],
) -> None:
    site.server.fill(0, b"prompt one")
    site.save()
    harm(site)
    site.start()
    site.keeper.restore_all()
    assert site.server.restored == []
    assert not (site.folder / ".slot-0.json").exists()
    site.keeper.store.clear()
    assert site.files() == []
    told = capfd.readouterr().err
    assert said in told and "removed" in told


def without(name: str, key: str) -> Callable[[Site], object]:
    def change(site: Site) -> None:
        note = site.note(name)
        del note[key]
        (site.folder / f".{name}.json").write_text(json.dumps(note))

    return change


def in_place_of_note(make: Callable[[Path], object]) -> Callable[[Site], object]:
    def change(site: Site) -> None:
        path = site.folder / ".slot-0.json"
        path.unlink()
        make(path)

    return change


DEEP = "[" * 100_000


def old_folder(path: Path) -> None:
    path.mkdir()
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    "harm",
    [
        edit("slot-0", file=[]),
        edit("slot-0", saved_unix="x"),
        edit("slot-0", saved_unix=10**400),
        edit("slot-0", saved_unix=float("nan")),
        edit("slot-0", tokens=True),
        edit("slot-0", engine=[]),
        without("slot-0", "tokens"),
        in_place_of_note(lambda p: p.write_text(DEEP)),
        in_place_of_note(lambda p: p.write_text(f'{{"a": "{"x" * 300_000}"}}')),
        in_place_of_note(os.mkfifo),
        in_place_of_note(lambda p: p.symlink_to("/dev/zero")),
    ],
)
def test_one_odd_note_goes_with_its_file_and_keeps_nothing_else_from_being_restored(
    harm: Callable[[Site], object], site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.server.fill(0, b"zero")
    site.server.fill(1, b"one")
    site.save()
    old = site.file("slot-0")
    harm(site)
    site.start()
    site.keeper.restore_all()
    assert site.server.contents == {0: b"", 1: b"one"}
    assert not os.path.lexists(site.folder / ".slot-0.json") and not old.exists()
    assert "slot-0 is not restored and was removed" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name, harm",
    [
        (slots_files.STATE, lambda p: p.write_text(DEEP)),
        (slots_files.STATE, lambda p: p.mkdir()),
        (f"x.{'0' * 16}.kv", lambda p: p.mkdir()),
        (".x.json", lambda p: p.mkdir()),
        ("q.tmp", old_folder),
    ],
)
def test_what_cannot_be_read_or_removed_is_passed_over(
    name: str, harm: Callable[[Path], object], site: Site
) -> None:
    site.server.fill(0, b"zero")
    site.save()
    site.start()
    (site.folder / name).unlink(missing_ok=True)
    harm(site.folder / name)
    site.keeper.restore_all()
    assert site.server.contents[0] == b"zero"


def test_a_state_that_lacks_something_counts_as_none(site: Site) -> None:
    site.server.fill(0, b"zero")
    site.save()
    site.start()
    state: dict[str, Any] = {"server": site.keeper.server.identity(), "saved": {}}
    (site.folder / slots_files.STATE).write_text(json.dumps(state))
    site.keeper.restore_all()
    assert site.server.contents[0] == b"zero"


def test_a_file_of_another_length_is_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.server.fill(0, b"zero")
    site.save()
    os.truncate(site.file("slot-0"), 1 << 40)
    monkeypatch.setattr(slots_files, "digest_of", None)
    assert "bytes, 4 were written" in str(
        site.keeper.store.why_not("slot-0", site.note("slot-0"), None)
    )


def test_a_file_without_a_note_is_cleared_and_never_read(site: Site) -> None:
    lost = site.folder / f"slot-0.{'0' * 16}.kv"
    lost.write_bytes(b"left by a save that was cut off before its note")
    site.keeper.restore_all()
    assert site.server.restored == [] and not lost.exists()


def test_a_save_that_is_cut_off_leaves_the_one_before_it_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site.server.fill(0, b"the good one")
    site.save()
    good = site.note("slot-0")
    site.server.fill(0, b"the next one")
    site.server.short = 3  # a full drive: fewer bytes than the server told
    assert site.save() == []
    assert "has 9 bytes, the server wrote 12" in capfd.readouterr().err
    site.server.short = 0
    for place in ("replace", "fsync"):  # killed at any of these
        real = getattr(os, place)

        def die(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, place, die)
            with pytest.raises(KeyboardInterrupt):
                site.save()
        assert site.note("slot-0") == good
        assert site.keeper.store.why_not("slot-0", good, None) is None
    site.start()
    site.keeper.restore_all()
    assert site.server.contents[0] == b"the good one"


def test_what_finds_its_slot_taken_goes_where_there_is_room(site: Site) -> None:
    site.server.fill(0, b"zero")
    site.save()
    site.start()
    site.server.fill(0, b"somebody was quicker")
    site.keeper.restore_all()
    assert site.server.restored[0][0] == 1
    assert site.server.contents == {0: b"somebody was quicker", 1: b"zero"}


def test_named_ones_fill_what_is_left_the_newest_first(site: Site) -> None:
    site.server.fill(0, b"older")
    site.keeper.save(0, "older", "test", 10)
    time.sleep(0.01)
    site.server.fill(0, b"newer")
    site.keeper.save(0, "newer", "test", 10)
    site.server.fill(0, b"own")
    site.save()
    site.start()
    site.keeper.restore_all()
    assert site.server.contents == {0: b"own", 1: b"newer"}
    with pytest.raises(Trouble, match="nothing is saved as gone"):
        site.keeper.restore(0, "gone")


def test_the_pruner_takes_whole_files_and_the_note_follows(site: Site) -> None:
    (site.folder.parent / ".kvhost-tier").write_text("")
    site.server.fill(0, b"x" * 500_000)
    site.save()
    site.server.fill(1, b"y" * 500_000)
    site.save()
    old = site.file("slot-0")
    os.utime(old, (1, 1))
    argv = ("once", "--tier", str(site.folder.parent), "--limit-bytes", "800000")
    subprocess.run([sys.executable, ONHOST / "pruner.py", *argv, "--current", "ns-00"], check=False)
    assert not old.exists() and site.file("slot-1").exists()
    assert (site.folder / ".slot-0.json").exists()
    site.start()
    site.keeper.restore_all()
    assert [slot for slot, _ in site.server.restored] == [1]
    assert not (site.folder / ".slot-0.json").exists()


# the program


def test_by_hand_a_slot_is_saved_listed_compared_restored_and_forgotten(site: Site) -> None:
    site.server.fill(1, b"a system prompt")
    assert program(site, "save", "system", "--slot", "1").returncode == 0
    assert json.loads(program(site, "list").stdout)["system"]["tokens"] == 15
    assert program(site, "check").returncode == 0
    site.start()
    done = program(site, "restore", "system", "--slot", "0")
    assert json.loads(done.stdout)["slot"] == 0  # into which, not of which
    assert site.server.contents[0] == b"a system prompt"
    assert program(site, "save", "again", "--slot", "0").returncode == 0
    assert json.loads(program(site, "forget", "again").stdout) == {"forgotten": "again"}
    flip(site.file("system"))
    assert program(site, "check").returncode == 1
    done = program(site, "restore", "system")
    assert done.returncode == 1 and "not restored and was removed" in done.stderr
    gone = program(site, "forget", "system")
    assert gone.returncode == 1 and "nothing is saved as system" in gone.stderr
    empty = program(site, "save", "nothing", "--slot", "1")
    assert empty.returncode == 1 and "slot 1 is empty" in empty.stderr


@pytest.mark.parametrize("name", ["slot-3", "../x", ".hidden", "a b", "x" * 65])
def test_a_name_that_is_none_is_refused(name: str, site: Site) -> None:
    assert program(site, "save", name).returncode == 2


def test_a_wrong_key_is_said_and_never_shown(site: Site) -> None:
    site.server.key = "sk-right"
    done = program(site, "save", "--all", env={**os.environ, "LLAMA_API_KEY": "sk-wrong"})
    assert done.returncode == 1 and "HTTP 401" in done.stderr
    assert "sk-wrong" not in done.stdout + done.stderr


def test_the_keeper_restores_a_new_process_and_saves_what_changes(site: Site) -> None:
    site.server.fill(0, b"before")
    site.save()
    site.start()
    words = ("run", "--every", "0.2")
    keeper = subprocess.Popen([sys.executable, ONHOST / "slots.py", *where(site), *words])
    try:
        deadline = time.monotonic() + 15
        while site.server.contents[0] != b"before":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        site.server.fill(1, b"during")
        while not (site.folder / ".slot-1.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert site.note("slot-1")["why"] == "changed"
    finally:
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(10) == 0


@pytest.mark.parametrize("slot", ["2", "99", "-1"])
@pytest.mark.parametrize("words", [("save", "mine"), ("restore", "slot-0")])
def test_a_slot_that_the_server_does_not_have_is_refused(
    slot: str, words: tuple[str, ...], site: Site
) -> None:
    site.server.fill(0, b"zero")
    site.save()
    done = program(site, *words, "--slot", slot)
    assert done.returncode == 1 and f"there is no slot {slot}: it has 0, 1" in done.stderr
    assert site.server.saves == 1 and site.server.restored == []


def test_saving_all_fails_where_one_is_not_saved(site: Site) -> None:
    site.server.fill(0, b"zero")
    site.server.short = 3
    done = program(site, "save", "--all")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"saved": [], "failed": ["slot-0"]}
    site.server.short = 0
    assert program(site, "save", "--all").returncode == 0


def test_two_at_once_take_turns(site: Site) -> None:
    store = Store(str(site.folder))
    with (
        store.locked(),
        pytest.raises(Trouble, match="was held"),
        Store(str(site.folder)).locked(wait_s=0.2),
    ):
        pass


def test_a_directory_that_is_no_namespace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="no namespace of kvhost"):
        Store(str(tmp_path))
    assert slots.change_key({"id": 0}) is None
