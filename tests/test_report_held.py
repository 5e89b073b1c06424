"""What a host holds already: services, caches, environments, what could be adopted."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import masking, report
from kvhost.onhost import report_held as held
from kvhost.report import parse_report
from tests.report_tools import CANARY, beside, ok, open_dir, put, root, run_script

__all__ = ["open_dir", "root"]  # fixtures
parts, proc, own = beside("report_parts"), beside("report_processes"), beside("report_kvhost")


def test_units_of_kvhosts_names_are_told_from_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    base = Path("/var/lib/kvhost")
    for top in ("etc", "usr/lib"):
        (tmp_path / top / "systemd/system").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    place = tmp_path / "etc/systemd/system"
    (place / "kvhost-cache.service").write_text(f"# Written by kvhost for {base}. Changes\n")
    (place / "kvhost-runner.service").write_text("# Written by kvhost for /srv/other. Changes\n")
    (place / "kvhost-pruner.service").symlink_to("/dev/null")
    (place / "kvhost-runner-b.service").write_text(f"# Written by kvhost for {base}. Changes\n")
    (place / "kvhost-runner-.service").write_text("")  # nobody's name
    vendor = tmp_path / "usr/lib/systemd/system/kvhost-cache.service"
    vendor.write_text(f"# Written by kvhost for {base}. Changes\n")
    found = {row["path"]: row["ours"] for row in own.own_units(base)}
    assert found == {
        str(place / "kvhost-cache.service"): True,
        str(place / "kvhost-runner.service"): False,
        str(place / "kvhost-runner-b.service"): True,
        str(place / "kvhost-pruner.service"): False,
        str(vendor): False,  # it would be shadowed
    }
    others = {row["path"]: row["installation"] for row in own.own_units(base)}
    assert others == dict.fromkeys(found) | {str(place / "kvhost-runner.service"): "/srv/other"}


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--api-key", CANARY],
        ["vllm", "serve", "m", "--api-key", CANARY, CANARY, "--port", "1"],
        ["vllm", "serve", "m", "--api-key", "-" + CANARY],
        ["vllm", "serve", "m", f"--api-key={CANARY}"],
        ["x", "--hf_token", CANARY],
        ["x", f"HF_TOKEN={CANARY}"],
        ["x", f"key={CANARY}"],
        ["x", "--password", CANARY],
        ["x", f"redis://user:{CANARY}@host:6379/0"],
        ["x", f"https://host/?api_key={CANARY}&x=1"],
        ["x", json.dumps({"type": "s3", "secret_key": CANARY, "n": 1})],
        ["x", json.dumps({"auth": CANARY})],
        ["sh", "-c", f"exec vllm serve m --api-key {CANARY} --port 1"],
        ["x", "-H", f"Authorization: Bearer {CANARY}"],
        ["x", "hf_" + CANARY],
        ["x", f"redis://user:pa@{CANARY}@host:6379/0"],
        ["x", f"redis://user:pa/{CANARY}@host:6379/0"],
        ["sh", "-c", f"x --password 'two {CANARY}'; PASSWORD='two {CANARY}' y"],
        ["x", f"run ['--api-key', '{CANARY}']"],
    ],
)
def test_secrets_are_masked(argv: list[str]) -> None:
    got = masking.masked(argv)
    assert CANARY not in " ".join(got)
    assert "***" in " ".join(got)
    assert got[0] == argv[0]


@pytest.mark.parametrize(
    "argv, kept",
    [
        (
            ["x", "--api-key", "a", "b", "--port", "8"],
            ["x", "--api-key", "***", "***", "--port", "8"],
        ),
        (["x", "--api-key=a", "b"], ["x", "--api-key=***", "b"]),
        (["x", "API_KEY=a", "b"], ["x", "API_KEY=***", "b"]),
        (["x", "key", "b"], ["x", "key", "b"]),
        (["x", "y" * 400], ["x", "y" * 300]),
    ],
)
def test_only_the_secret_is_masked(argv: list[str], kept: list[str]) -> None:
    assert masking.masked(argv) == kept


@pytest.mark.parametrize(
    "argv, names",
    [
        (["/opt/bin/ollama", "serve"], ["ollama"]),
        (["/usr/bin/python3.11", "-u", "/x/bin/vllm", "serve"], ["python3.11", "vllm"]),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "x"], ["python3", "vllm"]),
        (["vim", "vllm"], ["vim"]),
        (["python3"], ["python3"]),
        ([""], [""]),
    ],
)
def test_what_a_command_line_runs(argv: list[str], names: list[str]) -> None:
    assert held.programs(argv) == names


def test_what_is_no_secret_is_kept() -> None:
    argv = ["vllm", "serve", "/m", "--max-num-batched-tokens", "8192", "--tokenizer", "/t",
            "--port", "8000", '{"kv_connector":"LMCacheMPConnector"}']  # fmt: skip
    assert masking.masked(argv) == argv


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a Python that sleeps, from a script of that path, and ends it afterwards."""
    running: list[subprocess.Popen[bytes]] = []

    def go(script: Path, *more: str) -> subprocess.Popen[bytes]:
        put(script, "import sys, time; print(1, flush=True); time.sleep(60)")
        process = subprocess.Popen(
            [sys.executable, str(script), *more], stdout=subprocess.PIPE, env={"HF_TOKEN": CANARY}
        )
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        return process

    yield go
    for process in running:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_engines_that_are_not_kvhosts_are_adoptable(
    open_dir: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    base = open_dir / "base"
    foreign = start(open_dir / "vllm", "serve", "m", "--api-key", CANARY)
    ours = start(base / "bin/vllm", "serve", "m")
    other = start(open_dir / "grep", "vllm")
    recorded = start(open_dir / "elsewhere/vllm", "serve", "m")
    record(base, recorded)
    text = run_script(base)
    assert CANARY not in text
    rows = {p.pid: p for p in ok(parse_report(text).adoptable).processes}
    assert rows[foreign.pid].argv[-4:] == ["serve", "m", "--api-key", "***"]
    assert rows[foreign.pid].uid == os.geteuid()
    assert ours.pid not in rows
    assert recorded.pid not in rows
    assert other.pid not in rows


def test_another_installation_of_kvhost_is_told_by_its_command_lines(
    open_dir: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    there = open_dir / "there"
    put(there / "state/run.lock.guard", "")
    served = start(there / "envs/0123456789abcdef/bin/vllm", "serve")
    conda = start(open_dir / "conda/envs/mine/bin/vllm", "serve")  # looks alike, and is none
    rows = {p.pid: p for p in ok(parse_report(run_script(open_dir / "base")).adoptable).processes}
    assert rows[served.pid].installation == str(there)
    assert rows[conda.pid].installation is None
    every = proc.processes()
    # of a container: its processes are seen here, its directories are not
    gone = f"{open_dir}/gone/envs/0123456789abcdef/bin/vllm"
    every[10**8] = {"argv": [gone, "serve"], "ppid": 1}
    assert held.installation(10**8, every) is None
    every[10**8] = {"argv": ["VLLM::EngineCore"], "ppid": served.pid}
    assert held.installation(10**8, every) == str(there)  # its own line says nothing
    assert held.installation(os.getpid(), every) is None


def test_foreign_units_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "etc/systemd/system/ollama.service", "")
    put(root / "usr/lib/systemd/system/ssh.service", "")
    monkeypatch.setattr(held, "processes", dict)
    assert held.adoptable(root / "base", "no-such")["units"] == ["ollama.service"]


def account(name: str, uid: int, home: object, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", str(home), shell))


def test_whose_hugging_face_caches_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"root": 0, "kvh": 990, "me": 1000, "other": 1001}
    rows = [account(name, uid, tmp_path / name[0]) for name, uid in named.items()]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwall", lambda: rows)
    monkeypatch.setattr(held, "processes", dict)
    for name in "rkmo":
        put(tmp_path / name / ".cache/huggingface/hub/models--a--b/blobs/1", "x")
    found = held.adoptable(tmp_path / "base", "kvh")["hf_caches"]
    assert [row["user"] for row in found] == ["kvh", "me", "root"]
    assert found[0]["path"] == f"{tmp_path}/k/.cache/huggingface/hub"
    assert found[0]["models"]["data"] == [{"name": "a/b", "bytes": 1}]


def test_users_that_can_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [account("root", 0, "/"), account("me", 1000, "/"), account("kvh", 990, "/"),
            account("ann", 1001, "/"), account("www", 33, "/", "/usr/sbin/nologin"),
            account("boss", 1002, "/")]  # fmt: skip
    monkeypatch.setattr(pwd, "getpwall", lambda: rows)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("SUDO_USER", "boss")
    assert held.users("kvh")["login_users"] == ["ann"]


def fake_program(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, first in PATH."""
    put(path, f"#!/bin/sh\n{text}\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("code, works", [(0, True), (1, False)])
def test_sudo_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, works: bool
) -> None:
    fake_program(tmp_path / "sudo", f'[ "$*" = "-n true" ] && exit {code}; exit 9', monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert held.users("kvh")["sudo"] is works
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert held.users("kvh")["sudo"] is None


def test_packages_of_which_dpkg_is_not_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "echo a config-files; echo b installed; echo b not-installed; exit 1"
    fake_program(tmp_path / "dpkg-query", said, monkeypatch)
    assert held.packages(["a", "b", "c"]) == {"a": "config-files", "b": "installed", "c": "absent"}
    fake_program(tmp_path / "dpkg-query", "echo cannot open >&2; exit 2", monkeypatch)
    with pytest.raises(OSError, match="dpkg-query exits 2: cannot open"):
        held.packages(["a"])
    monkeypatch.setenv("PATH", "/no")
    with pytest.raises(parts.Absent, match="no dpkg-query"):
        held.packages(["a"])


def test_listeners_of_a_host_without_ipv6(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "processes", dict)
    line = "   0: 0100007F:1F40 00000000:0000 {} 0:0 0:0 0 33 0 99 1 0 100 0 0 10 0\n"
    put(root / "proc/net/tcp", "  sl local\n" + line.format("0A") + line.format("01"))
    row = {"address": "127.0.0.1", "port": 8000, "uid": 33, "pid": None, "comm": None}
    assert held.ports([1]) == {"wanted": [1], "listening": [row]}
    (root / "proc/net/tcp").unlink()
    with pytest.raises(FileNotFoundError):
        held.ports([])


def test_a_listener_is_found_though_it_closes_another_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections come and go while its files are read."""
    monkeypatch.setattr(held, "processes", lambda: {7: {"comm": "vllm"}})
    put(root / "proc/net/tcp", "head\n   0: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 33 0 99 1 0\n")
    files = root / "proc/7/fd"
    for name in "13":
        put(files / name, "no link, as one that is gone")
    (files / "2").symlink_to("socket:[99]")
    [row] = held.ports([])["listening"]
    assert (row["pid"], row["comm"]) == (7, "vllm")


def test_hugging_face_models_with_their_bytes(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    blob = put(tmp_path / "models--org--name/blobs/1", "x" * 1000)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)  # counted once
    put(tmp_path / "version.txt", "1")
    put(tmp_path / "datasets--org--d/blobs/1", "1")
    put(tmp_path / "models--file", "1")
    assert held.hf_models(tmp_path) == [{"name": "org/name", "bytes": 1000}]


def record(base: Path, process: subprocess.Popen[bytes], ticks: int = 0, boot: str = "") -> None:
    real_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    row = {"service": "runner", "pid": process.pid, "boot_id": boot or real_boot,
           "start_ticks": proc.proc_stat(process.pid)[2] + ticks}  # fmt: skip
    put(base / "run/runner.json", json.dumps(row))


def test_a_service_is_alive_only_as_the_process_that_was_recorded(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    def alive() -> bool:
        proc.processes.cache_clear()
        (row,) = own.services(tmp_path)
        assert (row["pids"] != []) == row["alive"]
        assert (row["anon_bytes"] > 0) == row["alive"]
        return bool(row["alive"])

    process = start(tmp_path / "any")
    record(tmp_path, process)
    assert alive()
    record(tmp_path, process, ticks=1)  # the pid was given to another process
    assert not alive()
    record(tmp_path, process, boot="of another boot")
    assert not alive()
    record(tmp_path, process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not alive()
    process.wait()
    assert not alive()
    proc.processes.cache_clear()


def test_a_service_has_its_descendants(tmp_path: Path) -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    child = int(shell.stdout.readline())
    try:
        proc.processes.cache_clear()
        assert proc.family(shell.pid) == [shell.pid, child]
    finally:
        os.kill(child, 9)
        shell.communicate()
        proc.processes.cache_clear()


def kvhost(base: Path) -> dict[str, Any]:
    got = own.kvhost(base, base / "tier")
    return {name: (p["status"], p["data"] if p["status"] == "ok" else p["why"])
            for name, p in got.items()}  # fmt: skip


def test_nothing_of_kvhost_is_absent(tmp_path: Path) -> None:
    got = kvhost(tmp_path / "base")
    assert got.pop("files") == ("ok", {})
    assert got.pop("units") == ("ok", [])
    assert {status for status, _ in got.values()} == {"absent"}


@pytest.mark.parametrize(
    "files, owner",
    [
        ([], "nobody"),
        (["lost+found/x"], "nobody"),
        (["photos/cat.jpg"], "foreign"),
        (["state/other"], "foreign"),
        (["state/receipt.json", "photos/cat.jpg"], "kvhost"),
        (["state/run.lock"], "kvhost"),
        (["state/run.lock.guard"], "kvhost"),
        (["photos/state/run.lock"], "foreign"),
    ],
)
def test_whose_base_dir_is(tmp_path: Path, files: list[str], owner: str) -> None:
    for name in files:
        put(tmp_path / name, "")
    assert kvhost(tmp_path)["base"][1]["owner"] == owner


def test_a_base_dir_with_an_empty_state_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    assert kvhost(tmp_path)["base"][1]["owner"] == "nobody"
    (tmp_path / "state").rmdir()
    put(tmp_path / "state", "")  # a file of another
    assert kvhost(tmp_path)["base"][1]["owner"] == "foreign"
    (tmp_path / "more").mkdir()
    assert kvhost(tmp_path)["base"][1] == {"owner": "foreign", "entries": ["more", "state"]}


@pytest.mark.parametrize("text", ["", "{", "\x00\xff"])
def test_a_torn_receipt_is_unreadable_and_named(tmp_path: Path, text: str) -> None:
    put(tmp_path / "state/receipt.json", text)
    put(tmp_path / "state/run.lock", text)
    got = kvhost(tmp_path)
    for name, file in (("receipt", "receipt.json"), ("run_lock", "run.lock")):
        status, why = got[name]
        assert status == "unreadable"
        assert f"{tmp_path}/state/{file} is not JSON" in why


def test_a_receipt_that_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / "state/receipt.json")
    (tmp_path / "state/run.lock").symlink_to("/etc/hostname")
    got = kvhost(tmp_path)
    assert "not a regular file" in got["receipt"][1]
    assert "not a regular file" in got["run_lock"][1]


def test_the_run_lock_ages_by_the_hosts_clock(tmp_path: Path) -> None:
    lock = put(tmp_path / "state/run.lock", '{"run_id": "r1"}')
    os.utime(lock, (1, time.time() - 100))
    content = kvhost(tmp_path)["run_lock"][1]
    assert content["content"] == {"run_id": "r1"}
    assert 100 <= content["age_s"] < 110


def test_environments_are_finished_by_their_marker(tmp_path: Path) -> None:
    put(tmp_path / "envs/aa/.kvhost-complete.json", '{"lock": "aa"}')
    put(tmp_path / "envs/bb/bin/python", "")
    put(tmp_path / "envs/cc/.kvhost-complete.json", "{")
    put(tmp_path / "envs/file", "")
    (tmp_path / "envs/link").symlink_to("aa")
    rows = kvhost(tmp_path)["envs"][1]
    assert [(r["name"], r["complete"]) for r in rows] == [
        ("aa", True),
        ("bb", False),
        ("cc", False),
    ]
    assert rows[0]["marker"] == {"lock": "aa"}
    assert "does not exist" in rows[1]["why"]
    assert "is not JSON" in rows[2]["why"]


def test_where_current_points(tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.symlink_to("envs/aa")
    assert kvhost(tmp_path)["current"][1] == {"target": "envs/aa", "resolves": False}
    (tmp_path / "envs/aa").mkdir(parents=True)
    assert kvhost(tmp_path)["current"][1] == {"target": "envs/aa", "resolves": True}
    current.unlink()
    current.symlink_to("current")
    assert kvhost(tmp_path)["current"][1] == {"target": "current", "resolves": False}
    current.unlink()
    current.mkdir()
    assert "is not a symlink" in kvhost(tmp_path)["current"][1]


def test_namespaces_are_counted_inside_the_tier_only(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    put(tier / "ns-aa/one", "x" * 10)
    put(tier / "ns-aa/deep/two", "x" * 20)
    os.utime(tier / "ns-aa/one", (1, 5_000_000_000))
    (tier / "ns-aa/out").symlink_to("/")
    (tier / "ns-aa/loop").symlink_to(tier)
    put(tier / "ns-bb/.kvhost-namespace.json", '{"chunk_size": 256}')
    (tier / "ns-link").symlink_to("/usr")
    put(tier / "photo.jpg", "x")
    put(tier / ".kvhost-tier", "")
    (tier / "lost+found").mkdir()
    got = kvhost(tmp_path)["tier"][1]
    one, two = got["namespaces"]
    assert (one["name"], one["files"], one["bytes"]) == ("ns-aa", 2, 30)
    assert one["newest_mtime"] == 5_000_000_000
    assert one["metadata"]["status"] == "absent"
    assert two["metadata"]["data"] == {"chunk_size": 256}
    assert got["foreign"] == ["ns-link", "photo.jpg"]


def test_files_are_told_by_digest_and_secrets_are_not(tmp_path: Path) -> None:
    put(tmp_path / "etc/runner.json", "a").chmod(0o644)
    (tmp_path / "etc/link").symlink_to("runner.json")
    put(tmp_path / "secrets/api-key", "b").chmod(0o640)
    got = kvhost(tmp_path)["files"][1]
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of "a"
    uid = os.geteuid()
    assert got == {
        f"{tmp_path}/etc/runner.json": {"uid": uid, "mode": "0644", "sha256": digest},
        f"{tmp_path}/secrets/api-key": {"uid": uid, "mode": "0640", "sha256": None},
    }


@pytest.mark.parametrize(
    "mode, uid, gid, what, may",
    [
        (0o400, 7, 70, 4, True),
        (0o077, 7, 70, 4, False),  # the owner's bits alone count for the owner
        (0o040, 8, 70, 4, True),
        (0o707, 8, 70, 4, False),
        (0o004, 8, 80, 4, True),
        (0o770, 8, 80, 4, False),
        (0o111, 7, 70, 4, False),
        (0o444, 7, 70, 1, False),
        (0o001, 8, 80, 1, True),
    ],
)
def test_whom_a_mode_lets_in(mode: int, uid: int, gid: int, what: int, may: bool) -> None:
    found = os.stat_result((mode, 0, 0, 1, 7, 70, 0, 0, 0, 0))
    assert report.allows(found, uid, [gid], what) is may


def test_a_model_that_the_user_cannot_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    put(tmp_path / "config.json", '{"num_hidden_layers": 8}').chmod(0o644)
    put(tmp_path / "model.safetensors", "x" * 50).chmod(0o600)
    got = report.model(str(tmp_path), 65534, [65534])
    assert got["closed"] == ["model.safetensors"]
    assert got["config"]["data"] == {"num_hidden_layers": 8}
    assert {"name": "model.safetensors", "bytes": 50} in got["files"]
    assert report.model(str(tmp_path), os.geteuid() or 0, [0])["closed"] == []
    with pytest.raises(parts.Absent, match="not a directory"):
        report.model(str(tmp_path / "none"), 65534, [])
