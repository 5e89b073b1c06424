"""What passed is kept, what failed is gone back from, and only what nothing needs is removed.

Real environments in form (marker, tree, link), of a few bytes; a double stands in for services.py.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MARKER = ".kvhost-complete.json"
ONHOST = Path(__file__).parent.parent / "kvhost" / "onhost"
SERVICES = """
import json, pathlib, sys
base = pathlib.Path(sys.argv[sys.argv.index("--base") + 1])
with (base / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit((base / "services-fail").exists())
"""
BACK = ("--user", "u", "--why", "it failed", "--lock", "L2", "--settings", "S2")


def manifest(env: Path) -> dict[str, Any]:
    """As engine.py makes it, which lies beside its siblings and is not imported here."""
    code = "import engine_whole as e, json, sys; print(json.dumps(e.tree_manifest(sys.argv[1])))"
    argv = [sys.executable, "-c", code, str(env)]
    done = subprocess.run(argv, cwd=ONHOST, capture_output=True, check=True)
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


class Base:
    """A host with one environment that passed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bin", "etc", "state", "envs", "tools/t1", "tools/t0", "locks", "uv-cache"):
            (root / name).mkdir(parents=True)
        (root / "tools/current").symlink_to(root / "tools/t1")
        for script in ONHOST.glob("[a-z]*.py"):
            (root / "bin" / script.name).write_text(script.read_text())
        (root / "bin/services.py").write_text(SERVICES)
        self.deploy("1")
        self.verdict()

    def deploy(self, name: str) -> None:
        """What a deploy of lock ``name`` leaves: environment, link, rendered files, receipt."""
        digest = name * 64
        env = self.root / "envs" / digest[:16]
        (env / "bin").mkdir(parents=True, exist_ok=True)
        (env / "bin/python").write_text(f"python of {name}")
        if not (env / MARKER).exists():
            marker = {"lock": digest, **manifest(env)}
            (env / MARKER).write_text(json.dumps(marker))
        link = self.root / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(env)
        (self.root / "locks" / f"cpu-{digest[:16]}.txt").write_text("lock")
        self.resolved = self.root / "state" / f"resolved-{name * 24}.json"
        self.resolved.write_text("{}")
        self.files = {f"etc/{n}": f"{n} of {name}\n" for n in ("vllm.yaml", "supervisord.conf")}
        self.files["etc/runner.json"] = json.dumps({"service": "runner", "lock": name})
        for path, text in self.files.items():
            (self.root / path).write_text(text)
        receipt = {
            "engine": {"digest": digest, "versions": {"vllm": name}},
            "files": {
                str(self.root / path): hashlib.sha256(text.encode()).hexdigest()
                for path, text in self.files.items()
            },
        }
        (self.root / "state/receipt.json").write_text(json.dumps(receipt))

    def verdict(self, persisted: str = "PASS") -> None:
        receipt = json.loads((self.root / "state/receipt.json").read_text())
        digest = hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()
        known = {"receipt": digest, "persisted": persisted, "time": "2026-01-01T000000Z"}
        (self.root / "state/verified.json").write_text(json.dumps(known))

    def call(self, command: str, *words: str, rc: int = 0) -> Any:
        script = str(self.root / "bin/generations.py")
        argv = [sys.executable, script, command, "--base", str(self.root), *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout.splitlines()[-1]) if rc == 0 else done.stderr

    def settle(self, *words: str, rc: int = 0) -> Any:
        return self.call("settle", "--resolved", str(self.resolved), *words, rc=rc)

    def envs(self) -> set[str]:
        return {path.name[0] for path in (self.root / "envs").iterdir()}

    def current(self) -> str:
        return (self.root / "current").readlink().name[0]

    def tree(self) -> dict[str, str]:
        return {
            str(p.relative_to(self.root)): p.read_text() if p.is_file() else ""
            for p in sorted(self.root.rglob("*"))
        }


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


def test_what_passed_is_recorded_once_and_the_second_time_nothing_is_done(base: Base) -> None:
    assert base.settle("--check")["settled"] is False
    base.settle()
    assert base.call("status")["good"]["env"].endswith("1" * 16)
    assert base.settle("--check") == {"settled": True, "record": False, "remove": []}
    before = base.tree()
    base.settle()
    assert base.tree() == before


@pytest.mark.parametrize("persisted", ["FAIL", "INCONCLUSIVE"])
def test_what_did_not_pass_is_not_recorded_and_nothing_is_removed(
    base: Base, persisted: str
) -> None:
    base.settle()
    base.deploy("2")
    base.verdict(persisted)
    answer = base.settle()
    assert (answer["record"], base.call("status")["good"]["env"][-1]) == (False, "1")
    assert base.envs() == {"1", "2"}


def test_before_anything_has_passed_nothing_is_removed(base: Base) -> None:
    base.verdict("FAIL")
    base.deploy("2")
    base.settle()
    assert base.envs() == {"1", "2"}
    assert (base.root / "tools/t0").exists()


def test_a_verdict_for_another_receipt_records_nothing(base: Base) -> None:
    base.deploy("2")  # verified.json is still that of 1
    assert base.settle()["record"] is False


def test_a_file_that_is_not_the_receipts_is_not_recorded(base: Base) -> None:
    (base.root / "etc/vllm.yaml").write_text("edited")
    assert "is not what the receipt says" in base.settle(rc=1)
    assert base.call("status")["good"] is None


def test_the_last_two_that_passed_are_kept_and_the_rest_is_cleared_away(base: Base) -> None:
    base.settle()
    assert not (base.root / "tools/t0").exists()
    for name in "23":
        base.deploy(name)
        base.verdict()
        gone = base.settle()["remove"]
    assert base.envs() == {"2", "3"}
    status = base.call("status")
    assert (status["good"]["env"][-1], status["previous"]["env"][-1]) == ("3", "2")
    names = {Path(path).name for path in gone}
    assert names == {"1" * 16, f"cpu-{'1' * 16}.txt", f"resolved-{'1' * 24}.json"}
    assert not (base.root / "uv-cache").exists()
    assert (base.root / "locks" / f"cpu-{'2' * 16}.txt").exists()


def test_record_only_removes_nothing(base: Base) -> None:
    for name in "123":
        base.deploy(name)
        base.verdict()
        base.settle("--record-only")
    assert base.envs() == {"1", "2", "3"}


def test_what_a_process_runs_from_stays(base: Base) -> None:
    old = base.root / "tools/t0/bin"
    old.mkdir()
    (old / "sleep").symlink_to("/bin/sleep")
    process = subprocess.Popen([str(old / "sleep"), "60"])
    try:
        base.settle()
        assert (base.root / "tools/t0").exists()
    finally:
        process.kill()
        process.wait()
    base.settle()
    assert not (base.root / "tools/t0").exists()


def test_back_to_environment_configuration_receipt_and_verdict(base: Base) -> None:
    base.settle()
    wanted = {path: (base.root / path).read_text() for path in base.files}
    receipt = (base.root / "state/receipt.json").read_text()
    base.deploy("2")
    base.verdict("FAIL")
    ready = base.root / "ready"
    answer = base.call("back", *BACK, "--", "touch", str(ready))
    assert answer["rolled_back"] is True
    assert base.current() == "1"
    assert {path: (base.root / path).read_text() for path in base.files} == wanted
    assert (base.root / "state/receipt.json").read_text() == receipt
    assert json.loads((base.root / "state/verified.json").read_text())["persisted"] == "PASS"
    assert "ensure" in (base.root / "calls").read_text()
    assert ready.exists()
    failed = base.call("status")["failed"]
    assert (failed["state"], failed["lock"], failed["settings"]) == ("rolled back", "L2", "S2")
    assert failed["why"] == "it failed"
    # the failed one is kept for a look, until another one has passed
    base.settle()
    assert base.envs() == {"1", "2"}
    base.deploy("3")
    base.verdict()
    base.settle()
    assert base.call("status")["failed"] is None
    assert base.envs() == {"1", "3"}


def test_without_a_switch_there_is_no_way_back(base: Base) -> None:
    base.settle()
    base.verdict("FAIL")
    assert base.call("back", *BACK)["rolled_back"] is False
    assert base.call("status")["failed"] is None


def test_without_one_that_passed_there_is_no_way_back(base: Base) -> None:
    assert base.call("back", *BACK)["rolled_back"] is False
    assert base.current() == "1"


def test_one_that_was_changed_since_is_not_gone_back_to(base: Base) -> None:
    base.settle()
    (base.root / "envs" / ("1" * 16) / "bin/python").write_text("edited")
    base.deploy("2")
    assert "changed since it was built" in base.call("back", *BACK, rc=1)
    assert base.current() == "2"


def test_a_key_that_is_gone_is_said_before_anything_is_touched(base: Base) -> None:
    base.files["etc/runner.json"] = json.dumps({"secret_env": {"VLLM_API_KEY": "/nowhere/key"}})
    (base.root / "etc/runner.json").write_text(base.files["etc/runner.json"])
    receipt = json.loads((base.root / "state/receipt.json").read_text())
    text = base.files["etc/runner.json"]
    digest = hashlib.sha256(text.encode()).hexdigest()
    receipt["files"][str(base.root / "etc/runner.json")] = digest
    (base.root / "state/receipt.json").write_text(json.dumps(receipt))
    base.verdict()
    base.settle()
    base.deploy("2")
    assert "/nowhere/key is needed to go back" in base.call("back", *BACK, rc=1)
    assert base.current() == "2"


def test_a_way_back_that_was_broken_off_is_told_and_completed(base: Base) -> None:
    base.settle()
    base.deploy("2")
    (base.root / "services-fail").touch()
    assert "its services did not come up" in base.call("back", *BACK, rc=1)
    assert base.call("status")["failed"]["state"] == "rolling back"
    (base.root / "services-fail").unlink()
    answer = base.call("back", "--user", "u", "--why", "x", "--lock", "L3", "--settings", "S3")
    assert answer["rolled_back"] is True
    failed = base.call("status")["failed"]
    assert (failed["state"], failed["why"], failed["lock"]) == ("rolled back", "it failed", "L2")
    assert failed["env"].endswith("2" * 16)
