"""Uninstall: what the receipt lists goes and nothing else, and a run that is killed is completed.

A directory as a deploy leaves it, small processes in the place of the services; the whole way with
the real engine is in the full tier.
"""

from __future__ import annotations

import json
import os
import pty
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvhost import working_copy
from kvhost.reports.since import last_removal
from tests.e2e_tools import Site
from tests.report_cases import PASSING, keep

REPO = Path(__file__).parent.parent
ONHOST = REPO / "kvhost" / "onhost"
SERVICES = """
import pathlib, sys
base = pathlib.Path(sys.argv[sys.argv.index("--base") + 1])
with (base / "calls").open("a") as calls:
    calls.write(sys.argv[-1] + str((base / "etc").exists()) + "\\n")
if (base / "old").exists() and sys.argv[-1] == "uninstall":
    sys.exit(2)  # argparse
sys.exit((base / "no-stop").exists())
"""
USER = pwd.getpwuid(os.geteuid()).pw_name  # an account that is not kvhost's: it stays
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="makes a user and mounts")


class Base:
    """What a deploy leaves, and files of others beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "kv"
        self.tier = self.root / "tier"
        self.unit = root / "units" / "kvhost-runner.service"
        for name in ("bin", "lib", "etc", "secrets", "state/good", "envs/a/bin", "tools/t", "run",
                     "uv-cache", "wheels", "locks", "home/.cache", "log", "models/builtin-1",
                     "tier/ns-ab", "tier/others"):  # fmt: skip
            (self.root / name).mkdir(parents=True)
        self.unit.parent.mkdir()
        scripts = {f"bin/{p.name}": p.read_text() for p in ONHOST.glob("[a-z]*.py")}
        scripts["bin/services.py"] = SERVICES
        files = {"etc/vllm.yaml": "a: 1", "etc/cache.json": "{}"}
        for name, text in {**scripts, **files, "lib/kvhost_guard.py": "x"}.items():
            (self.root / name).write_text(text)
        self.unit.write_text("[Unit]")
        more = (
            *("secrets/api-key", "envs/a/bin/python", "state/verified.json", "run/cache.json"),
            *("models/builtin-1/w", "tier/ns-ab/k.data", "tier/.kvhost-tier", "tier/others/x"),
            *("state/run.lock", "state/run.lock.guard", "log/cache.log"),
        )
        for name in more:
            (self.root / name).write_text("x")
        (self.root / "current").symlink_to(self.root / "envs/a")
        receipt = {
            "files": {**{str(self.root / n): "d" for n in files}, str(self.unit): "d"},
            "scripts": {str(self.root / n): "d" for n in (*scripts, "lib/kvhost_guard.py")},
        }
        (self.root / "state/receipt.json").write_text(json.dumps(receipt))
        (self.root / "state/packages").write_text("libnuma1\nlibnuma1 ca-certificates\n")

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = (ONHOST / "uninstall.py").read_text()
        argv = [sys.executable, "-", "--base", str(self.root), "--tier", str(self.tier)]
        return subprocess.run(
            [*argv, "--user", USER, *words], input=script, env={**os.environ, **env},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def call(self, *words: str, rc: int = 0) -> Any:
        done = self.run(*words)
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if rc == 0 else done.stderr

    def left(self) -> set[str]:
        """Files that are left, relative to base_dir."""
        return {
            str(p.relative_to(self.root))
            for p in self.root.rglob("*")
            if not p.is_dir() or p.is_symlink()
        } - {"calls"}


def in_use(user: str) -> bool:
    return subprocess.run(["pgrep", "-u", user], capture_output=True, check=False).returncode == 0


CACHE = {"tier/ns-ab/k.data", "tier/.kvhost-tier"}
MODELS = {"models/builtin-1/w"}
GUARD = {"state/run.lock", "state/run.lock.guard"}


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


@pytest.mark.parametrize(
    "words, kept",
    [
        ((), CACHE | MODELS),
        (("--caches",), MODELS),
        (("--models",), CACHE),
        (("--caches", "--models"), set()),
    ],
)
def test_what_is_kvhosts_goes_and_cache_and_models_only_when_asked(
    base: Base, words: tuple[str, ...], kept: set[str]
) -> None:
    base.call(*words)
    assert base.left() == kept | {"tier/others/x"} | GUARD
    assert not base.unit.exists()
    assert (base.root / "calls").read_text() == "uninstallTrue\n"  # before anything went


def test_what_is_not_kvhosts_stays_and_is_named(base: Base) -> None:
    mine = {"mine.txt", "etc/mine.conf", "bin/mine.sh", "secrets/mine", "lib/mine.py"}
    for name in mine:
        (base.root / name).write_text("mine")
    stays = " ".join(base.call("--check")["stays"])
    assert all(str(base.root / name) in stays for name in mine)
    base.call("--caches", "--models")
    assert base.left() == mine | {"tier/others/x"} | GUARD


def test_check_changes_nothing_and_tells_the_sizes_and_the_packages(base: Base) -> None:
    (base.root / "envs/a/bin/python").write_bytes(bytes(1 << 16))
    os.link(base.root / "envs/a/bin/python", base.root / "uv-cache/same")
    before = base.left()
    found = base.call("--check")
    assert base.left() == before
    assert not (base.root / "calls").exists()
    rows = {row["path"]: row["bytes"] for row in found["remove"]}
    assert rows[str(base.root / "envs")] > 0
    # a link's target and a file with two names are counted once
    assert rows[str(base.root / "uv-cache")] == 0
    assert rows[str(base.root / "current")] < rows[str(base.root / "envs")]
    assert str(base.root / "models") not in rows
    stays = " ".join(found["stays"])
    whose = f"user {USER}: not made for {base.root}"
    for word in ("ca-certificates, libnuma1", "remove_cache", "remove_models", whose):
        assert word in stays
    assert found["user"] is False  # it is not kvhost's own


def test_a_program_that_came_after_the_receipt_goes_too(base: Base) -> None:
    for name in ("newer.py", "own.py"):
        (base.root / "bin" / name).write_text("x")
    stays = base.call("--check", "--scripts", "abi_check.py,newer.py")["stays"]
    assert [row for row in stays if "bin/" in row] == [
        f"{base.root}/bin/own.py, not known to kvhost"
    ]


def test_the_second_time_nothing_is_there_to_do(base: Base) -> None:
    base.call()
    before = base.left()
    assert base.call("--check")["remove"] == []
    base.call()
    assert base.left() == before


def test_without_anything_of_others_the_directory_itself_goes(base: Base) -> None:
    (base.root / "tier/others/x").unlink()
    (base.root / "tier/others").rmdir()
    (base.root / "tier/ns-ab/.hidden").write_text("x")
    (base.root / "calls").write_text("")
    (base.root / "bin/services.py").write_text("")
    (base.root / "calls").unlink()
    base.call("--caches", "--models")
    assert not base.root.exists()


@pytest.mark.parametrize(
    "step", ["current", "envs", "log", "secrets", "etc", "bin", "ns-ab", "good", "verified.json"]
)
def test_killed_at_a_step_the_next_run_completes_it(base: Base, step: str) -> None:
    done = base.run("--caches", KVHOST_TEST_DIE_AFTER=f"uninstall:{step}")
    assert done.returncode == -9
    assert (base.root / "state/receipt.json").exists()
    base.call("--caches")
    assert base.left() == MODELS | {"tier/others/x"} | GUARD


def test_a_claimed_drive_keeps_what_its_release_needs(base: Base) -> None:
    drive = {"state/drive.json", "state/drive-apply.json"}
    for name in (*drive, "state/driver.json", "state/driver-initramfs"):
        (base.root / name).write_text("{}")
    (base.root / "state/driver-before").mkdir()
    (base.root / "state/driver-before/a.deb").write_text("x")
    (base.root / "tier/others/x").unlink()
    (base.root / "tier/others").rmdir()
    (base.root / "calls").unlink(missing_ok=True)
    assert "release.py" in " ".join(base.call("--check")["stays"])
    base.call("--caches", "--models")
    assert base.left() == drive | GUARD  # nothing of the GPU's driver


def test_services_of_a_version_that_knows_no_uninstall_are_shut_down(base: Base) -> None:
    (base.root / "old").touch()
    base.call()
    assert "shutdownTrue" in (base.root / "calls").read_text()


def test_services_that_do_not_stop_keep_everything(base: Base) -> None:
    (base.root / "no-stop").touch()
    before = base.left()
    assert "nothing was removed" in base.call(rc=1)
    assert base.left() == before


def test_a_process_that_runs_from_there_keeps_everything(base: Base) -> None:
    (base.root / "envs/a/bin/sleep").symlink_to("/bin/sleep")
    process = subprocess.Popen([str(base.root / "envs/a/bin/sleep"), "60"])
    try:
        assert "still runs from" in base.call(rc=1)
        assert (base.root / "envs").exists()
    finally:
        process.kill()
        process.wait()


@root_only
def test_a_process_of_a_container_with_that_path_keeps_nothing(base: Base, tmp_path: Path) -> None:
    path = base.root / "envs/a/bin/serve"
    path.write_text(f"import os, time; os.chroot({str(tmp_path)!r}); time.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(path)])
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/{process.pid}/root").readlink() == Path("/"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        base.call()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_links_are_not_followed(base: Base, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "precious").write_text("x")
    (base.root / "home/out").symlink_to(away)
    (base.root / "log/out").symlink_to(away / "precious")
    base.call("--caches", "--models")
    assert (away / "precious").read_text() == "x"


@root_only
@pytest.mark.parametrize("busy", [False, True])
def test_the_user_that_kvhost_made_goes_unless_it_is_used(base: Base, busy: bool) -> None:
    name = f"kvh-{os.getpid()}"
    home = str(base.root / "home")
    shell = "/usr/sbin/nologin"
    subprocess.run(["useradd", "-r", "-M", "-d", home, "-s", shell, name], check=True)
    sleeper = subprocess.Popen(["setpriv", "--reuid", name, "sleep", "60"]) if busy else None
    try:
        time.sleep(0.3)
        kept = base.run("--user", name)  # the cache stays, and its owner with it
        assert json.loads(kept.stdout)["user"] is False
        assert f"the user {name}: it owns the cache and the models here" in kept.stdout
        gone = base.run("--user", name, "--caches", "--models")
        assert gone.returncode == 0, gone.stderr
        there = subprocess.run(["id", name], capture_output=True, check=False).returncode == 0
        assert there is busy
    finally:
        if sleeper:
            sleeper.kill()
            sleeper.wait()
        subprocess.run(["userdel", name], capture_output=True, check=False)


@root_only
def test_a_mount_stays_with_what_is_on_it(base: Base) -> None:
    place = base.root / "home/mnt"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        (place / "data").write_text("x")
        assert f"the mount {place}" in base.call("--check")["stays"]
        base.call()
        assert (place / "data").read_text() == "x"
    finally:
        subprocess.run(["umount", str(place)], check=True)
    base.call()
    assert not (base.root / "home").exists()


def remove(base: Base, copy: Path, *words: str, answers: bytes | None = None) -> tuple[int, str]:
    """`kvhost remove` of this machine; with ``answers`` on a terminal, where they are typed."""
    return kvhost(base, copy, "remove", *words, answers=answers)


def kvhost(base: Base, copy: Path, *words: str, answers: bytes | None = None) -> tuple[int, str]:
    command, *words_of_it = words
    argv = [sys.executable, "-m", "kvhost.cli", command, "--inventory", "inventory.py"]
    argv += ["--data", f"base_dir={base.root}", "--data", "service_user=kvhost-gone", *words_of_it]
    keep = {k: v for k, v in os.environ.items() if not k.startswith("KVHOST_")}
    outer, inner = pty.openpty()
    try:
        if answers:
            os.write(outer, answers)
        done = subprocess.run(
            argv, cwd=copy, text=True, timeout=120, check=False,
            env={**keep, "PYTHONPATH": f"{copy}:{REPO}", "COLUMNS": "200"},
            stdin=inner if answers else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    finally:
        os.close(outer)
        os.close(inner)
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@root_only
def test_the_command_shows_and_asks_and_needs_yes_without_a_terminal(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvhost-remove-", dir="/var/lib") as folder:
        shows_and_asks(Base(Path(folder)), tmp_path)  # settings take no base_dir in /tmp


def shows_and_asks(base: Base, copy: Path) -> None:
    working_copy.make(copy)
    (base.root / "state/run.lock").unlink()
    before = base.left()
    for words, answers, code, said in (
        ((), None, 1, "nothing was removed: no terminal to ask on; add -y"),
        ((), b"n\n", 1, "nothing was removed"),
        (("-y", "--dry"), None, 0, "what is removed"),
    ):
        got, text = remove(base, copy, *words, answers=answers)
        assert (got, said in text) == (code, True), text
        assert base.left() - GUARD == before - GUARD
        assert last_removal(copy / "reports", "@local") == (None, None)
    code, text = remove(base, copy, answers=b"y\n")
    assert code == 0, text
    assert "Take kvhost away from @local?" in text
    assert str(base.root / "envs") in text
    assert base.left() - GUARD == CACHE | MODELS | {"tier/others/x"}
    removed, again = last_removal(copy / "reports", "@local")
    assert removed is not None and again is None
    code, text = kvhost(base, copy, "drift")
    assert (code, f"removed at {removed}" in " ".join(text.split())) == (2, True), text
    code, text = remove(base, copy)  # nothing is left to ask about
    assert code == 0, text
    assert "Take kvhost away" not in text
    assert f"stays: the cache in {base.root}/tier (--data remove_cache=true removes it)" in text
    assert "nothing of kvhost" not in text
    code, text = kvhost(base, copy, "purge")
    told = " ".join(text.split())
    assert code == 1
    assert f"the cache in {base.root}/tier; models in {base.root}/models" in told, text
    assert "kvhost remove --data remove_cache=true --data remove_models=true removes it" in told
    assert "kvhost up uses it again" in told, "the copy has no bin/"
    for more in ("--dry", "", "-y"):  # the link was lost before it was noted
        shutil.rmtree(copy / "reports")
        keep(copy / "reports", PASSING, "@local")
        code, text = remove(base, copy, *more.split())
        noted = last_removal(copy / "reports", "@local")[0] is not None
        assert (code, noted) == (0, more != "--dry"), text


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.full
def test_a_provisioned_host_loses_all_of_it_and_can_be_provisioned_again(site: Site) -> None:
    if not (site.base / "current").exists():  # run by itself
        assert site.up(verify="never").code == 0
    argv = (".venv/bin/pyinfra", "inventory.py", "remove.py", "-y", *site.arguments())
    made = pwd.getpwnam("kvhost").pw_dir == str(site.base / "home")  # else of another test run
    planned = site.run(*argv, "--dry")
    assert str(site.base / "envs") in " ".join(planned.text.split())
    assert site.base.joinpath("current").exists()
    done = site.run(*argv)
    assert done.code == 0, done.text[-3000:]
    assert "remove_cache" in done.text
    left = {p.name for p in site.base.iterdir()}
    assert left <= {"tier", "models", "state"}
    assert [p.name for p in (site.base / "state").iterdir()] == ["run.lock.guard"]
    assert not [p for p in Path("/dev/shm").iterdir() if site.base.name in p.name]
    again = site.run(*argv)
    assert again.code == 0
    assert again.changed() == []
    done = site.run(*argv, "--data", "remove_cache=true", "--data", "remove_models=true")
    assert done.code == 0, done.text[-3000:]
    assert not site.base.exists()
    there = subprocess.run(["id", "kvhost"], capture_output=True, check=False).returncode == 0
    assert not (made and there and not in_use("kvhost"))
    assert site.run(*argv).code == 0
