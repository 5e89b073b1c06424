"""What lies on a host, or came to it, and is not what it should be: locks, requests, bundles."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.onhost import looks, runlock

pytestmark = pytest.mark.fleet

LOCK, LOOKS = Path(runlock.__file__), Path(looks.__file__)
Ran = subprocess.CompletedProcess[str]


def script(path: Path, *words: str) -> Ran:
    argv = [sys.executable, str(path), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return done


def take(path: Path, run_id: str = "a") -> int:
    owner = json.dumps({"run_id": run_id})
    return script(LOCK, "take", "--file", str(path), "--owner", owner).returncode


def test_a_lock_that_is_something_else(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    os.mkfifo(lock)
    assert take(lock) == 2, "a pipe would be waited for"
    lock.unlink()
    lock.symlink_to("nowhere")
    assert take(lock) == 0  # nobody holds it, and the link goes
    assert not lock.is_symlink()
    lock.unlink()
    guard = tmp_path / "run.lock.guard"
    guard.unlink()
    guard.symlink_to(tmp_path / "victim")
    assert take(lock) == 2
    assert not (tmp_path / "victim").exists()


TIMES: list[Any] = [None, "x", True, [], 10**400, float("nan"), -(10**400)]


def test_times_of_no_sense_are_held_and_not_a_traceback(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    for value in TIMES:
        held = {"run_id": "b", "refreshed_unix": value, "refreshed_boottime": value}
        for boot in (runlock.boot_id(), "another", None, 5):
            lock.write_text(json.dumps({**held, "boot_id": boot}))
            assert take(lock) == 1
    lock.write_text("[" * 100_000)
    assert take(lock) == 1


def test_a_clock_that_was_in_the_future_does_not_keep_a_lock_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before NTP: a run wrote 2099, and the host's restart ended it."""
    held: dict[str, Any] = {"run_id": "b", "refreshed_unix": time.time() + 1e9}
    held |= {"boot_id": "another", "refreshed_boottime": 5.0}
    monkeypatch.setattr(runlock, "boottime", lambda: 7200.0)
    assert runlock.age_s(held) == 7200.0
    near = {**held, "refreshed_unix": time.time() + 60}  # another machine, its clock a bit ahead
    assert runlock.age_s(near) < 0


REQUESTS = [b"", b"x", gzip.compress(b"{"), gzip.compress(b"[]"), gzip.compress(b"5"),
            gzip.compress(b'{"asks": []}'), gzip.compress(b"x" * 999)[:40],
            gzip.compress(b"{}" * 99)[:12] + b"\xff" * 40]  # fmt: skip


@pytest.mark.parametrize("request_bytes", REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_that_is_none(request_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(request_bytes)
    done = script(LOOKS, str(tmp_path / "request"))
    assert (done.returncode, done.stdout) == (2, "")


def ask(folder: Path, asks: list[Any], *, lock: Path, take: list[str] | None = None) -> Ran:
    request = {"asks": asks, "lock": str(lock), "take": take}
    (folder / "request").write_bytes(gzip.compress(json.dumps(request).encode()))
    return script(LOOKS, str(folder / "request"))


def test_a_command_that_cannot_be_started_is_answered_once(tmp_path: Path) -> None:
    """A child that goes on as its parent would answer a second time."""
    odd: list[Any] = [
        ["argv"],
        ["argv", "a\0b"],
        ["argv", 5],
        ["argv", ""],
        ["argv", str(tmp_path)],
    ]
    done = ask(tmp_path, [*odd, ["argv", "echo", "well"]], lock=tmp_path / "run.lock")
    told = json.loads(done.stdout)["answers"]
    assert [one["exit"] for one in told] == [127] * 5 + [0]
    assert told[5]["out"] == "well\n"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    asks = [
        ["text", str(tmp_path / "pipe")],
        ["text", "/dev/zero"],
        ["file", str(tmp_path / "pipe")],
    ]
    told = json.loads(ask(tmp_path, asks, lock=tmp_path / "pipe").stdout)
    assert [one.get("status", one.get("kind")) for one in told["answers"]] == [
        "unreadable", "unreadable", "other",
    ]  # fmt: skip
    assert told["lock"]["held"] == "not a regular file"


def test_a_place_that_cannot_hold_a_lock_is_not_held_by_another(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    done = ask(tmp_path, [], lock=tmp_path / "state/run.lock", take=["--file", "x"])
    assert done.returncode == 2
    assert "cannot be used" in done.stderr


Break = Callable[[Path, dict[str, Any]], Any]


def named(path: str) -> Break:
    def change(bundle: Path, manifest: dict[str, Any]) -> None:
        manifest["files"][path] = {"bytes": 0, "sha256": "0" * 64}

    return change


def linked(bundle: Path, manifest: dict[str, Any]) -> None:
    wheel = bundle / "wheels/a-1-py3-none-any.whl"
    wheel.symlink_to(wheel.rename(bundle.parent / "away"))


def linked_folder(bundle: Path, manifest: dict[str, Any]) -> None:
    (bundle / "wheels").symlink_to((bundle / "wheels").rename(bundle.parent / "folder"))


def piped(bundle: Path, manifest: dict[str, Any]) -> None:
    (bundle / "lock.txt").unlink()
    os.mkfifo(bundle / "lock.txt")


def lying(bundle: Path, manifest: dict[str, Any]) -> None:
    """A wheel of another, and a manifest that agrees with it."""
    (bundle / "wheels/a-1-py3-none-any.whl").write_bytes(b"bad")
    row = {"bytes": 3, "sha256": hashlib.sha256(b"bad").hexdigest()}
    manifest["files"]["wheels/a-1-py3-none-any.whl"] = row


#: what is done to a bundle -> what is said of it
BUNDLES: dict[str, tuple[Break, str]] = {
    "up": (named("../x"), "no place in a bundle"),
    "root": (named("/etc/passwd"), "no place in a bundle"),
    "up from a folder": (named("wheels/../../x"), "no place in a bundle"),
    "itself": (named("manifest.json"), "manifest.json: missing"),
    "a link": (linked, "not a regular file"),
    "a folder that is a link": (linked_folder, "wheels: additional"),
    "a pipe": (piped, "lock.txt: not a regular file"),
    "a manifest that lies": (lying, "not a file of the lock"),
    "a name that steers a terminal": (
        lambda bundle, _: (bundle / "x\x1b[31m\ny").touch(), "x\ufffd[31m\ufffdy: additional"),
    "a lock's name that does": (
        lambda _, manifest: manifest.update(lock="x\x1b[2J"), "lacks one of lock"),
}  # fmt: skip


def bundle_in(folder: Path) -> tuple[Path, dict[str, Any]]:
    bundle = folder / "bundle"
    content = {"wheels/a-1-py3-none-any.whl": b"aaa", "tools/uv-1-py3-none-any.whl": b"uuu"}
    for name, word, wheel in (("lock.txt", "a", b"aaa"), ("tools.txt", "uv", b"uuu")):
        line = f"{word}==1 --hash=sha256:{hashlib.sha256(wheel).hexdigest()}\n"
        content[name] = line.encode()
    files = {}
    for name, data in content.items():
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return bundle, {"schema": 1, "lock": "l", "python": "3.11", "machine": "m", "files": files}


def check(bundle: Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["bundle", "--check", str(bundle)], color=True)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert all(c.isprintable() or c == "\n" for c in result.output)
    return result.exit_code, result.output


@pytest.mark.parametrize("case", BUNDLES)
def test_bundles(case: str, tmp_path: Path) -> None:
    bundle, manifest = bundle_in(tmp_path)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert check(bundle)[0] == 0
    change, words = BUNDLES[case]
    change(bundle, manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    code, said = check(bundle)
    assert code == 1
    assert words in said


def test_manifests_that_are_none(tmp_path: Path) -> None:
    bundle, _ = bundle_in(tmp_path)
    path = bundle / "manifest.json"
    for text in ("", "[]", "{", "[" * 100_000, '{"schema": ' + "9" * 6000 + "}", "\0"):
        path.write_text(text)
        assert check(bundle)[0] == 1
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in check(bundle)[1]
