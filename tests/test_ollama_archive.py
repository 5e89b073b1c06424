"""An archive with Ollama: by its digest, unpacked inside its directory or not at all, proven."""

from __future__ import annotations

import functools
import getpass
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from kvhost.onhost import ollama_archive

pytestmark = pytest.mark.runners
REPO = Path(__file__).parents[1]
SCRIPT, DOUBLE = REPO / "kvhost/onhost/ollama_archive.py", REPO / "tests/doubles/ollama.py"
Member = tuple[str, bytes, bytes | None, str, int]  # name, type, content, link, mode


def member(name: str, content: bytes | None = None, *, kind: bytes = tarfile.REGTYPE,
           link: str = "", mode: int = 0o644) -> Member:  # fmt: skip
    return name, kind, content, link, mode


GOOD = [
    member("./", kind=tarfile.DIRTYPE, mode=0o755),
    member("./bin/ollama", DOUBLE.read_bytes(), mode=0o6755),
    member("lib/ollama/libggml.so.1.2", b"code", mode=0o777),
    member("lib/ollama/libggml.so", kind=tarfile.SYMTYPE, link="libggml.so.1.2"),
    member("lib/ollama/cuda", kind=tarfile.DIRTYPE, mode=0o700),
    member("lib/ollama/cuda/libggml.so", kind=tarfile.LNKTYPE, link="lib/ollama/libggml.so.1.2"),
]


def packed(folder: Path, members: list[Member], name: str = "ollama.tgz") -> tuple[Path, str]:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path, kind, content, link, mode in members:
            info = tarfile.TarInfo(path)
            info.type, info.linkname, info.mode, info.size = kind, link, mode, len(content or b"")
            info.uid = info.gid = 4242
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    tool = "zstd" if name.endswith(".zst") else "gzip"
    made = folder / name
    made.write_bytes(
        subprocess.run([tool, "-c"], input=raw.getvalue(), capture_output=True, check=True).stdout
    )
    return made, hashlib.sha256(made.read_bytes()).hexdigest()


def inside(folder: Path) -> list[str]:
    return [path.name for path in (folder / "envs").iterdir()]


def run(command: str, archive: object, sha256: str, env: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), command, "--archive", str(archive), "--sha256", sha256]
    argv += ["--env", str(env)] + (["--user", getpass.getuser()] if command == "install" else [])
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["ollama.tgz", "ollama.tar.zst"])
def test_a_good_archive_is_unpacked_proven_and_marked(tmp_path: Path, name: str) -> None:
    if name.endswith("zst") and shutil.which("zstd") is None:
        pytest.skip("no zstd here")
    archive, digest = packed(tmp_path, GOOD, name)
    env = tmp_path / "envs/one"
    done = run("install", archive, digest, env)
    assert done.returncode == 0, done.stderr
    program = env / "bin/ollama"
    assert (program.stat().st_mode & 0o7777, program.stat().st_uid) == (0o755, os.geteuid())
    assert (env / "lib/ollama/libggml.so").resolve().read_bytes() == b"code"
    assert (env / "lib/ollama/cuda/libggml.so").read_bytes() == b"code"
    marker = json.loads((env / ".kvhost-complete.json").read_text())
    assert marker["lock"] == digest
    assert "0.34.2-double" in marker["abi"][-1]["detail"]
    again = run("install", archive, digest, env)
    assert "complete already" in again.stderr
    assert inside(tmp_path) == ["one"]


BAD = {
    "absolute": [*GOOD, member("/etc/evil", b"x")],
    "upwards": [*GOOD, member("lib/../../evil", b"x")],
    "link outside": [*GOOD, member("lib/evil", kind=tarfile.SYMTYPE, link="../../../evil")],
    "absolute link": [*GOOD, member("lib/evil", kind=tarfile.SYMTYPE, link="/etc/passwd")],
    "behind a link": [
        *GOOD,
        member("deep/er/link", kind=tarfile.SYMTYPE, link="../.."),
        member("deep/er/link/evil", b"x"),
    ],
    "link by a link": [
        *GOOD,
        member("deep/er/link", kind=tarfile.SYMTYPE, link="../.."),
        member("p", kind=tarfile.SYMTYPE, link="deep/er/link/.."),
    ],
    "hard link outside": [*GOOD, member("lib/evil", kind=tarfile.LNKTYPE, link="../evil")],
    "device": [*GOOD, member("lib/null", kind=tarfile.CHRTYPE)],
    "twice": [*GOOD, member("bin/ollama", b"other", mode=0o755)],
    "no program": [member("README", b"x")],
    "not executable": [member("bin/ollama", DOUBLE.read_bytes(), mode=0o644)],
    "one that prints for ever": [member("bin/ollama", b"#!/bin/sh\nexec yes\n", mode=0o755)],
    "another program": [member("bin/ollama", b"#!/bin/sh\necho hello\n", mode=0o755)],
}


def test_a_program_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_archive, "LIMIT_S", 0.5)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ollama"
    program.write_text("#!/bin/sh\nsleep 77\n")
    program.chmod(0o755)
    with pytest.raises(Exception, match=r"ollama --version: it has not ended within 0\.5 s"):
        ollama_archive.prove(str(tmp_path), getpass.getuser())


def test_what_lies_behind_the_end_of_the_tar_is_not_held(tmp_path: Path) -> None:
    archive, _ = packed(tmp_path, GOOD)
    rest = subprocess.run(["gzip", "-c"], input=bytes(80 << 20), capture_output=True, check=True)
    archive.write_bytes(archive.read_bytes() + rest.stdout)  # gzip(1): members are joined
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    done = run("install", archive, digest, tmp_path / "envs/one")
    assert done.returncode == 1
    assert "more than 64 MiB behind the end of its tar" in done.stderr
    assert inside(tmp_path) == []


@pytest.mark.parametrize("case", BAD)
def test_a_bad_archive_leaves_nothing(tmp_path: Path, case: str) -> None:
    (tmp_path / "evil").write_text("mine")
    archive, digest = packed(tmp_path, BAD[case])
    done = run("install", archive, digest, tmp_path / "envs/one")
    assert done.returncode == 1, done.stderr
    assert "ollama_archive:" in done.stderr and "Traceback" not in done.stderr
    assert inside(tmp_path) == []
    assert (tmp_path / "evil").read_text() == "mine"


def test_another_digest_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    archive, _ = packed(tmp_path, GOOD)
    told = json.loads(run("check", archive, "0" * 64, tmp_path / "envs/one").stdout)
    assert "has the digest" in told["against"]
    done = run("install", archive, "0" * 64, tmp_path / "envs/one")
    assert done.returncode == 1
    assert "has the digest" in done.stderr
    assert inside(tmp_path) == []


@pytest.mark.parametrize("content", [b"no archive at all", b""])
def test_what_is_no_archive_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tgz").write_bytes(content)
    told = json.loads(run("check", tmp_path / "a.tgz", "0" * 64, tmp_path / "e").stdout)
    assert "neither gzip nor zstd" in told["against"]
    told = json.loads(run("check", tmp_path / "none.tgz", "0" * 64, tmp_path / "e").stdout)
    assert "is not there" in told["against"]


def test_an_archive_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    archive, _ = packed(tmp_path, GOOD)
    archive.write_bytes(archive.read_bytes()[:-40])
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    done = run("install", archive, digest, tmp_path / "envs/one")
    assert done.returncode == 1, done.stderr
    assert inside(tmp_path) == []


def test_zstd_that_is_not_there_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    argv = [sys.executable, str(SCRIPT), "check", "--archive", str(tmp_path / "a.tar.zst")]
    done = subprocess.run([*argv, "--sha256", "0" * 64, "--env", str(tmp_path / "e")],
                          env={"PATH": "/nowhere"}, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert "install the package zstd" in json.loads(done.stdout)["against"]


def test_a_url_is_fetched_and_checked(tmp_path: Path) -> None:
    archive, digest = packed(tmp_path, GOOD)
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = functools.partial(quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/{archive.name}"
        wrong = run("install", url, "0" * 64, tmp_path / "envs/one")
        missing = run("install", url + ".none", digest, tmp_path / "envs/one")
        done = run("install", url, digest, tmp_path / "envs/one")
        web.shutdown()
    assert "has the digest" in wrong.stderr
    assert "could not be fetched" in missing.stderr
    assert done.returncode == 0, done.stderr
    assert inside(tmp_path) == ["one"]
