"""`kvhost drift`, `kvhost rebuild` on a host that the real deploy made, with an engine's double."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import pytest

from bench.fleet_hosts import BASE
from bench.fleet_speed import EDITS
from kvhost import working_copy
from kvhost.commands import drift as cli_drift
from kvhost.records import receipts
from kvhost.records.drift import Check, File, Wanted, compare, pins_of, sha256
from tests.copy_tools import Copy
from tests.e2e_tools import free_ports
from tests.fleet_tools import KEY, REPO, Fleet, plant
from tests.report_tools import beside
from tests.test_model_digest import make_model

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="provisions this machine, which needs root"),
]
#: of the config.json of a model of 8 B parameters: 128 KiB of KV a token
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
TOP = Path(os.environ.get("KVHOST_FLEET_BASE", "/var/lib/kvhost-fleet")) / "drift"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shutil.rmtree(TOP, ignore_errors=True)
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        made.add_here("a", TOP)
        ran = made.run("up")
        assert ran.code == 0, ran.text[-4000:]
        assert re.search(r"^API on a: http://127\.0\.0\.1:\d+/v1 \(model .+\)$", ran.text, re.M)
        yield made
    finally:
        subprocess.run(["umount", TOP / "a/tier"], capture_output=True, check=False)
        made.remove()
        shutil.rmtree(TOP, ignore_errors=True)


#: what a run leaves below base_dir and drift does not compare, and why
NOT_COMPARED = {
    "log/*": "what the services write",
    "run/*": "of the services at work: services.py is asked",
    "home/*": "caches, but for the directories that a run makes",
    "state/run.lock.guard": "who was here last",
    "state/own-requests.json": "a count of kvhost's own requests",
    "state/model-digests.json": "what is remembered of files, by which the model is compared",
    "state/draft.yaml": "what the engine was asked last",
    "state/resolve.log": "the log of its answer",
}

ASKS = """
import json, sys
from deploys.common import drift
real = drift.ask_of
def told(*given):
    asked = real(*given)
    sys.stderr.write("ASKED " + json.dumps(asked) + chr(10))
    return asked
drift.ask_of = told
drift.find_drift()
"""


def tree(base: Path) -> dict[str, tuple[int, int, int]]:
    """What a change to the host would show in: of the services' own directories only the names."""
    own = ("log", "run", "home")
    rows = {}
    for path in sorted(base.rglob("*")):
        st = path.lstat()
        name = str(path.relative_to(base))
        moving = name.split("/")[0] in own
        rows[name] = (0, 0, 0) if moving else (st.st_mtime_ns, st.st_mode, st.st_size)
    return rows


def drift(fleet: Fleet, *words: str) -> tuple[int, dict[str, Any], str]:
    process = fleet.start("drift", "--json", *words, stderr_apart=True)
    out, said = process.communicate(timeout=120)
    return process.returncode, json.loads(out), out + said


def found(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["part"], row["what"]) for row in told["a"]["rows"]]


def test_a_host_that_was_just_made_has_none_and_is_not_touched(fleet: Fleet) -> None:
    before = tree(fleet.bases["a"])
    code, told, text = drift(fleet)
    assert (code, told["a"]["status"]) == (0, "same"), told
    assert tree(fleet.bases["a"]) == before
    assert KEY not in text
    kept = receipts.path_of(fleet.folder / "receipts", "a")
    assert kept.stat().st_mode & 0o777 == 0o600
    on_host = json.loads((fleet.bases["a"] / "state/receipt.json").read_text())
    assert json.loads(kept.read_text())["receipt"] == on_host
    assert on_host["system"]["kernel"] == os.uname().release


def asked_of(fleet: Fleet, folder: Path) -> dict[str, Any]:
    """What drift asks of a host."""
    (folder / "asks.py").write_text(ASKS)
    argv = [sys.executable, "-m", "pyinfra", "-y", str(fleet.inventory), str(folder / "asks.py")]
    done = subprocess.run(argv, cwd=REPO, env={**fleet.env, "PYTHONPATH": str(REPO)}, text=True,
                          capture_output=True, check=False, timeout=120)  # fmt: skip
    assert "ASKED " in done.stderr, done.stderr[-4000:]
    asked: dict[str, Any] = json.loads(done.stderr.partition("ASKED ")[2].partition("\n")[0])
    return asked


def test_all_that_a_run_leaves_on_a_host_is_compared(fleet: Fleet, tmp_path: Path) -> None:
    base, asked = fleet.bases["a"], asked_of(fleet, tmp_path)
    by_path = {*asked["files"], *asked["directories"], *asked["checks"]}
    whole = [asked["env"], asked["model"], str((base / "tools/current").readlink())]
    names = {str(path.relative_to(base)) for path in base.rglob("*")}
    left = {
        name
        for name in names
        if f"{base}/{name}" not in by_path
        and not any(f"{base}/{name}/".startswith(f"{top}/") for top in whole)
        # an environment of another Python, which plant() made and no run would
        and not name.startswith("envs/")
    }
    odd = [name for name in left if not any(fnmatch(name, one) for one in NOT_COMPARED)]
    assert not odd


def test_what_a_run_mends_is_drift_and_is_mended(fleet: Fleet) -> None:
    base = fleet.bases["a"]
    receipt = json.loads((base / "state/receipt.json").read_text())
    [space] = (base / "tier").glob("ns-*")
    [wheel], [resolved] = (base / "wheels").iterdir(), (base / "state").glob("resolved-*.json")
    [weights] = (base / "models").glob("builtin-*/model.safetensors")
    [lock] = (base / "locks").glob("*-py*.txt")

    def append(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"\n")

    edits: dict[tuple[str, str], Callable[[], object]] = {
        ("file", f"{base}/locks"): lambda: shutil.chown(base / "locks", "daemon"),
        ("file", f"{base}/lib"): lambda: shutil.chown(base / "lib", None, "daemon"),
        ("file", f"{base}/home/.cache/numba"): lambda: (base / "home/.cache/numba").rmdir(),
        ("file", str(lock)): lambda: append(lock),
        ("file", f"{base}/locks/tools.txt"): lambda: append(base / "locks/tools.txt"),
        ("file", f"{base}/etc/service-env.json"): (base / "etc/service-env.json").unlink,
        ("file", f"{base}/etc/vllm-old.yaml"): (base / "etc/vllm-old.yaml").touch,
        ("file", str(wheel)): lambda: append(wheel),
        ("file", str(resolved)): resolved.unlink,
        ("file", f"{base}/state/receipt.json"): lambda: append(base / "state/receipt.json"),
        ("file", f"{base}/tier/.kvhost-tier"): (base / "tier/.kvhost-tier").unlink,
        ("file", f"{space}/.kvhost-namespace.json"): lambda: append(
            space / ".kvhost-namespace.json"
        ),
        ("file", f"{base}/secrets/api-key"): lambda: append(base / "secrets/api-key"),
        ("model", str(weights.parent)): lambda: append(weights),
    }
    try:
        for edit in edits.values():
            edit()
        code, told, text = drift(fleet)
        assert code == 2, text
        # and nothing else, but that with another key the runner does not answer
        assert Counter(found(told)) == dict.fromkeys([*edits, ("service", "runner")], 1)
    finally:
        ran = fleet.run("up")
    assert ran.code == 0, ran.text[-4000:]
    code, told, text = drift(fleet)
    assert code == 0, told
    assert json.loads((base / "state/receipt.json").read_text()) == receipt
    # tools are fetched from the network where they are not whole: put back by hand
    link = base / "tools/current"
    there = link.readlink()
    link.unlink()
    link.symlink_to("/nonexistent")
    try:
        code, told, _ = drift(fleet)
    finally:
        link.unlink()
        link.symlink_to(there)
    assert (code, ("engine", str(link)) in found(told)) == (2, True), told


@pytest.mark.full  # one more run of up, and drift eight times
def test_the_edits_of_the_measurement_against_ansible_are_drift_each(fleet: Fleet) -> None:
    base, known = fleet.bases["a"], set[tuple[str, ...]]()
    for name, edit in EDITS.items():
        subprocess.run(["sh", "-c", edit.replace(BASE, str(base))], check=True, timeout=60)
        code, told, text = drift(fleet)
        rows = {tuple(map(str, row.values())) for row in told["a"]["rows"]}
        assert code == 2 and rows - known, (name, text)
        known = rows
    ran = fleet.run("up")
    assert ran.code == 0, ran.text[-4000:]
    assert drift(fleet)[0] == 0


def test_what_cannot_be_reached_or_compared_is_never_the_same(fleet: Fleet) -> None:
    away = {"ssh_hostname": "127.0.0.1", "ssh_port": free_ports(1)[0], "ssh_user": "nobody"}
    fleet.hosts["away"] = away
    kept = receipts.path_of(fleet.folder / "receipts", "a")
    aside = kept.rename(kept.with_suffix(".aside"))
    try:
        code, told, _ = drift(fleet)
    finally:
        del fleet.hosts["away"]
        aside.rename(kept)
    assert code == 1
    assert {row["status"] for row in told.values()} == {"unreadable"}
    assert told["away"]["unreadable"][0].startswith("it could not be reached: 127.0.0.1 port ")
    assert "keeps no receipt" in told["a"]["unreadable"][0]


def test_a_host_that_is_asked_alone_and_not_reached_is_in_the_answer(fleet: Fleet) -> None:
    away = {"ssh_hostname": "127.0.0.1", "ssh_port": free_ports(1)[0], "ssh_user": "nobody"}
    fleet.hosts["away"] = away
    try:
        code, told, text = drift(fleet, "--limit", "away")
        logs = fleet.start("logs", "away", "--json", stderr_apart=True).communicate(timeout=120)[0]
        ran = fleet.run("up", "--limit", "away")
        rolling = fleet.run("up", "--limit", "away", "--canary", "away")
    finally:
        del fleet.hosts["away"]
    assert (code, list(told), told["away"]["status"]) == (1, ["away"], "unreadable"), text
    assert told["away"]["unreadable"][0].startswith("it could not be reached: 127.0.0.1 port ")
    assert json.loads(logs)["away"]["unreadable"] == told["away"]["unreadable"]
    for run in (ran, rolling):
        assert (run.code, run.results()) == (1, {"away": "unreachable"}), run.text
        assert "no host could be reached, see above" in run.text
        assert "cannot be reached" in (run.told.rows["away"].why or "")
        assert "the run failed" not in run.text and "the canary" not in run.text


def test_each_thing_that_was_changed_is_named(fleet: Fleet, tmp_path: Path) -> None:
    base = fleet.bases["a"]
    with (base / "etc/vllm.yaml").open("a") as config:
        config.write("max-num-seqs: 1\n")
    (base / "secrets/api-key").chmod(0o644)
    (base / "bin/pruner.py").unlink()
    site = next((base / "current").resolve().glob("lib/*/site-packages"))
    [package] = site.glob("numpy-*.dist-info")
    package.rename(site / "numpy-99.1.dist-info")
    (site / "stray-1.0.dist-info").mkdir()
    stop = ["python3", str(base / "bin/services.py"), "--base", str(base), "--user", "kvhost"]
    subprocess.run([*stop, "stop", "pruner"], check=True, capture_output=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", base / "tier"], check=True)
    code, told, text = drift(fleet)
    subprocess.run(["umount", base / "tier"], check=True)
    assert code == 2, text
    rows = {(row["part"], row["what"]): (row["wanted"], row["found"]) for row in told["a"]["rows"]}
    assert ("file", f"{base}/etc/vllm.yaml") in rows
    assert rows["file", f"{base}/secrets/api-key"] == ("kvhost 600", "kvhost 644")
    assert rows["file", f"{base}/bin/pruner.py"] == ("a file", "nothing")
    assert rows["engine", "package numpy"][1] == "99.1"
    assert rows["engine", "package stray"] == ("nothing", "1.0")
    assert rows["service", "pruner"][1].startswith("STOPPED")
    assert rows["mount", f"{base}/tier"][1] == f"tmpfs at {base}/tier"
    assert not [row for row in rows if row[0] in ("lock", "settings", "receipt")]
    assert KEY not in text


def test_a_changed_lock_and_a_changed_setting_are_drift(fleet: Fleet, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    skip = shutil.ignore_patterns(".git", ".venv", ".test", ".mypy_cache", ".ruff_cache", "tests")
    shutil.copytree(REPO, copy, ignore=skip)
    for lock in (copy / "locks").glob("cpu-*-py3*.txt"):
        lock.write_text("# another\n" + lock.read_text())
    fleet.repo = copy
    try:
        code, told, _ = drift(fleet, "--data", "pruner_interval_s=7")
    finally:
        fleet.repo = REPO
    assert code == 2
    rows = found(told)
    assert ("lock", "the engine's lock") in rows
    assert ("settings", "digest of the settings") in rows
    assert ("file", f"{fleet.bases['a']}/etc/pruner.json") in rows


def test_a_rebuilt_host_has_an_equal_receipt(fleet: Fleet) -> None:
    base = fleet.bases["a"]
    kept = receipts.load(fleet.folder / "receipts", "a")
    fleet.remove()  # the machine is gone
    assert not base.exists()
    plant(Path("/"), str(base))
    ran = fleet.run("rebuild", "a")
    assert ran.code == 0, ran.text[-4000:]
    assert "its receipt equals" in ran.text
    assert fleet.well("a")
    again = receipts.load(fleet.folder / "receipts", "a")
    assert again.receipt == kept.receipt
    assert drift(fleet)[0] == 0


@pytest.mark.full  # a process that is stopped is ended only by force, after a minute
def test_a_runner_that_hangs_is_drift_and_is_started_anew(fleet: Fleet) -> None:
    """Its process is there, of the present configuration, and nothing ever answers."""
    before = json.loads((fleet.bases["a"] / "run/runner.json").read_text())["pid"]
    assert drift(fleet)[0] == 0
    os.kill(before, signal.SIGSTOP)
    code, told, text = drift(fleet)
    assert (code, found(told)) == (2, [("service", "runner")]), text
    # it has had longer than that to answer
    ran = fleet.run("up", "--data", "ready_timeout_s=5")
    assert ran.code == 0, ran.text[-4000:]
    assert "it hangs" in ran.text
    assert json.loads((fleet.bases["a"] / "run/runner.json").read_text())["pid"] != before
    assert drift(fleet, "--data", "ready_timeout_s=5")[0] == 0


@pytest.mark.full  # three more runs of up
def test_a_model_on_a_path_is_compared_by_what_its_run_derived(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of a model whose context does not fit there is no drift right after a run."""
    top, model = TOP.parent / "drift-path", TOP.parent / "drift-path/model"
    shutil.rmtree(top, ignore_errors=True)
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        top.mkdir(parents=True)
        made.add_here("a", top, model_source=str(model))
        make_model(model)
        (model / "config.json").write_text(json.dumps(LLAMA_8B))
        subprocess.run(["chmod", "-R", "go+rX", model], check=True)
        ran = made.run("up")
        assert ran.code == 0, ran.text[-4000:]
        assert "max_model_len is 8192" in ran.text
        code, told, text = drift(made)
        assert (code, found(told)) == (0, []), text
        os.utime(model / "model.safetensors", (1, 1))
        code, told, text = drift(made)
        assert (code, found(told)) == (2, [("model", str(model))]), text
        assert "model.safetensors" in told["a"]["rows"][0]["found"]
        assert made.run("up").code == 0
        assert drift(made)[0] == 0
    finally:
        made.remove()
        shutil.rmtree(top, ignore_errors=True)


# without a host


def test_what_may_differ_and_what_not() -> None:
    drive = {"uuid": "1", "drive": {"serial": "A"}, "filesystem": "xfs"}
    old = {"settings": "s", "drive": drive, "files": {"/a": "1"}}
    other = {**drive, "uuid": "2", "drive": {"serial": "B"}}
    assert receipts.differences(old, {**old, "drive": other}) == []
    other["filesystem"] = "ext4"
    assert receipts.differences(old, {**old, "drive": other}) == [
        ("drive.filesystem", "xfs", "ext4")
    ]
    assert receipts.differences(old, {**old, "files": {"/a": "1", "/b": "2"}}) == [
        ("files./b", None, "2")
    ]


def test_the_page_lists_what_may_differ() -> None:
    rows = (REPO / "docs/fleets.md").read_text()
    assert all(f"| `{key}` | {why} |" in rows for key, why in receipts.MAY_DIFFER.items())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "kvhost/receipt/1", "host": "b"}'])
def test_a_damaged_receipt_is_no_receipt(tmp_path: Path, text: str) -> None:
    receipts.path_of(tmp_path, "a").write_text(text)
    with pytest.raises(receipts.NoReceipt, match=r"not a receipt|cannot be read"):
        receipts.load(tmp_path, "a")


def test_the_pins_of_a_lock() -> None:
    lock = (
        "# head\nA_b.c==1.2 \\\n    --hash=sha256:00\ntorch==2.13.0+cpu \\\n    --hash=x\n"
        "vllm @ https://h/x.whl \\\n    --hash=sha256:11\n"
    )
    assert pins_of(lock) == {"a-b-c": "1.2", "torch": "2.13.0+cpu", "vllm": ""}


def wanted(**more: Any) -> Wanted:
    kept = {"settings": "s", "engine": {"digest": "l"}, "system": {"kernel": "6.1"}}
    given: dict[str, Any] = {
        "files": {"/b/etc/a": File("11", "644")}, "directories": {"/b": ("root", "755")},
        "env": "/b/envs/l", "current": "/b/current", "pins": {"torch": "2"}, "settings": "s",
        "lock": "l", "system": {"kernel": "6.1"}, "kept": kept, "absent": {"/b/etc/old": ""},
        "checks": {"/b/tools": Check("engine", (), bool, "whole")}, "model": ("/b/m", "m"),
    }  # fmt: skip
    return Wanted(**{**given, **more})


def seen() -> dict[str, Any]:
    own = {"user": "root", "group": "root", "mode": "644"}
    data: dict[str, Any] = {
        "files": {
            "/b/etc/a": {"kind": "file", "sha256": "11", **own},
            "/b/current": {"kind": "link", "target": "/b/envs/l", **own},
        },
        "directories": {"/b": {**own, "kind": "directory", "mode": "755"}},
        "absent": {"/b/etc/old": False},
        "checks": {"/b/tools": {"data": True, "why": None}},
        "model": {"digest": "m", "changed": []},
        "env": {"whole": {"complete": True, "why": None}, "packages": {"torch": "2"}},
        "services": {
            "services": {"cache": {"state": "RUNNING", "detail": "", "alive": True,
                                   "current": True}},
            "supervisor_fresh": True, "manager": "systemd",
        },
        "mounts": {},
        "collector": None,
        "answers": {"runner": None},
    }  # fmt: skip
    return {name: {"status": "ok", "why": None, "data": part} for name, part in data.items()}


def rows_of(look: dict[str, Any], given: Wanted | None = None, held: Any = None,
            drive: tuple[str, ...] = ()) -> list[tuple[str, str]]:  # fmt: skip
    given = given or wanted()
    return [
        (row.part, row.what)
        for row in compare(given, look, given.kept if held is None else held, drive).rows
    ]


def test_each_part_alone() -> None:
    assert rows_of(seen()) == []
    cases: list[tuple[str, Any, tuple[str, str]]] = [
        ("files./b/etc/a.sha256", "22", ("file", "/b/etc/a")),
        ("files./b/etc/a.mode", "666", ("file", "/b/etc/a")),
        ("files./b/etc/a.user", "ann", ("file", "/b/etc/a")),
        ("files./b/etc/a.kind", "link", ("file", "/b/etc/a")),
        ("files./b/etc/a.group", "daemon", ("file", "/b/etc/a")),
        ("files./b/current.target", "/b/envs/x", ("engine", "/b/current")),
        ("directories./b.mode", "777", ("file", "/b")),
        ("directories./b.group", "daemon", ("file", "/b")),
        ("directories./b", None, ("file", "/b")),
        ("absent./b/etc/old", True, ("file", "/b/etc/old")),
        ("checks./b/tools.data", False, ("engine", "/b/tools")),
        ("checks./b/tools.why", "no such file", ("engine", "/b/tools")),
        ("checks./b/tools", None, ("engine", "/b/tools")),
        ("model.digest", "n", ("model", "/b/m")),
        ("model.changed", ["a.safetensors"], ("model", "/b/m")),
        ("env.whole.proven", False, ("engine", "/b/envs/l")),
        ("env.packages.torch", "3", ("engine", "package torch")),
        ("env.packages.new", "1", ("engine", "package new")),
        ("env.whole.complete", False, ("engine", "/b/envs/l")),
        ("services.services.cache.state", "STOPPED", ("service", "cache")),
        ("services.services.cache.alive", False, ("service", "cache")),
        ("services.services.cache.current", False, ("service", "cache")),
        ("services.supervisor_fresh", False, ("service", "systemd")),
        ("answers.runner", "loading", ("service", "runner")),
    ]
    for way, value, row in cases:
        look = seen()
        part, *steps = way.split(".")
        at = look[part]["data"]
        for step in steps[:-1]:
            at = at[step]
        at[steps[-1]] = value
        assert rows_of(look) == [row], way
    assert rows_of(seen(), wanted(lock="m")) == [("lock", "the engine's lock")]
    assert rows_of(seen(), wanted(settings="t")) == [("settings", "digest of the settings")]
    assert rows_of(seen(), wanted(system={"kernel": "6.2"})) == [("system", "kernel")]
    assert rows_of(seen(), drive=("it is not mounted",)) == [("drive", "it is not mounted")]
    look = seen()
    look["collector"]["data"] = "inactive, disabled"
    assert rows_of(look) == []  # none is wanted
    assert rows_of(look, wanted(collector="kvhost-metrics")) == [("service", "kvhost-metrics")]
    look = seen()  # one reason is enough
    look["answers"]["data"]["runner"] = "connection refused"
    look["services"]["data"]["services"]["cache"]["alive"] = False
    assert rows_of(look) == [("service", "cache")]
    look = seen()
    look["directories"]["data"]["/b"]["group"] = "daemon"
    assert rows_of(look, wanted(any_group=frozenset({"/b"}))) == []
    other = {**wanted().kept, "files": {"/x": "1", "/y": "2"}}
    assert rows_of(seen(), held=other) == [("receipt", "files")]
    assert rows_of(seen(), held="none") == [("receipt", "on the host")]


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        ('echo \'{"ready": true, "missing": null, "shared_away": null}\'', None),
        ('echo \'{"ready": false, "missing": "no worker"}\'; exit 1', "no worker"),
        ('echo \'{"ready": true, "version": "0.12", "why": null}\'', None),
        ('echo \'{"ready": false, "version": null, "why": "refused"}\'; exit 1', "refused"),
        ("echo 'no key' >&2; exit 1", "exit code 1: no key"),
        ("echo '[]'; exit 3", "exit code 3: []"),
        ("exit 2", "exit code 2: it printed nothing"),
    ],
)
def test_what_the_runners_command_says(printed: str, missing: str | None) -> None:
    asked = {"runner": ["sh", "-c", printed], "runner-1": ["/nonexistent"]}
    answers = beside("drift_look").answers(asked)
    assert answers.pop("runner-1").endswith("'/nonexistent'")
    assert answers == {"runner": missing}


def test_of_a_secret_that_is_another_no_digest_is_told() -> None:
    key = File(sha256("key"), "644", secret=True)
    (row,) = compare(wanted(files={"/b/etc/a": key}), seen(), wanted().kept, ()).rows
    assert (row.wanted, row.found) == ("the one that is set", "another")


def test_checks_and_what_is_left_over_as_the_host_tells_them(tmp_path: Path) -> None:
    look = beside("drift_look")
    told = look.checks({
        "good": ["sh", "-c", "echo noise; echo '{\"ok\": true}'"],
        "silent": ["true"],
        "failed": ["sh", "-c", "echo no such tools >&2; exit 1"],
        "gone": ["/nonexistent"],
    })  # fmt: skip
    assert told["good"] == {"data": {"ok": True}, "why": None}
    assert told["failed"]["why"] == "no such tools"
    assert all(told[name]["why"] and not told[name]["data"] for name in ("silent", "gone"))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("# Written by kvhost for /b. More\n")
    theirs.write_text("# Written by somebody\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "# Written by kvhost for /b."
    asked = dict.fromkeys(map(str, (ours, theirs, pipe, tmp_path / "none")), text)
    assert list(look.begins(asked).values()) == [True, False, False, False]
    asked = dict.fromkeys(map(str, (theirs, tmp_path, tmp_path / "none")), "")
    assert list(look.begins(asked).values()) == [True, True, False]


@pytest.mark.parametrize("part", wanted().parts)
def test_a_part_that_was_not_read_is_never_the_same(part: str) -> None:
    look = seen()
    look[part] = {"status": "unreadable", "why": "no permission", "data": None}
    assert compare(wanted(), look, wanted().kept, ()).status == "unreadable"
    del look[part]
    assert compare(wanted(), look, wanted().kept, ()).status == "unreadable"


MANY = """
from pyinfra.connectors.local import LocalConnector

LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {}, [])]))
hosts = [f"@local/{name}" for name in ("secret", "cert", "odd", "late")]
"""
#: deploys/drift.py, where each host is at fault in its own way but the last, which answers last
ODD = """
import time
from pathlib import Path

from pyinfra import host

from deploys.common import drift, store
from deploys.common.context import Visit
from kvhost.records.drift import Found
from kvhost.settings import Settings

Path("pw").write_text("0123456789abcdef0123456789abcdef")
Path("pw").chmod(0o600)
FILES = {
    "secret": {"shared_tier_password_file": "/nonexistent"},
    "cert": {"shared_tier_password_file": "pw", "shared_store_cert_file": "/none",
             "shared_store_key_file": "/none"},
}


def look():
    if host.name == "odd":
        return {}["what nobody thought of"]
    if host.name == "late":
        time.sleep(2)
        return Found()
    store.answer = lambda argv: {"kind": "redis-server"}
    where = {"shared_store_address": "10.0.0.1", "shared_store_memory_gib": 1}
    settings = Settings(**where, **FILES[host.name])
    return Found(rows=store.drift_rows(Visit(host.name, "r", settings, None, with_key=False)))


drift.look = look
exec(Path("deploys/drift.py").read_text())
"""


def test_what_is_wrong_with_one_host_is_no_reason_against_another(tmp_path: Path) -> None:
    """pyinfra ends the run of all hosts at the first exception."""
    working_copy.make(tmp_path)
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "odd.py").write_text(ODD)
    code, text = Copy(tmp_path).pyinfra("many.py", "odd.py")
    assert code == 0, text
    told: dict[str, Any] = {}
    for line in text.splitlines():
        told |= json.loads(line) if line.startswith("{") else {}
    status = {name: found["status"] for name, found in told.items()}
    assert status == {"late": "same", **dict.fromkeys(("secret", "cert", "odd"), "unreadable")}
    why = {name: " ".join(found["unreadable"]) for name, found in told.items()}
    assert why["secret"].startswith("shared_tier_password_file: the file cannot be opened")
    assert why["cert"].startswith("shared_store_cert_file: ")
    assert "KeyError: 'what nobody thought of' (" in why["odd"]


class Rebuilds:
    """`kvhost rebuild a`, and what its run leaves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVHOST_RECEIPTS", str(folder))
        self.folder, self.aside = folder, folder / "a.before"
        self.before = receipts.keep(folder, "a", {"settings": "s"}, None).read_text()
        self.ran: list[tuple[str, ...]] = []

    def run(self, code: int, **other: int) -> int:
        def up(args: tuple[str, ...]) -> int:
            self.ran.append(args)
            receipts.keep(self.folder, "a", {"settings": "s", **other}, None)
            return code

        return cli_drift.rebuild("a", up, ("-v",))


@pytest.fixture
def rebuilds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rebuilds:
    return Rebuilds(tmp_path, monkeypatch)


def test_a_rebuild_compares_with_what_the_host_was(rebuilds: Rebuilds) -> None:
    assert rebuilds.run(0) == 0
    assert rebuilds.ran == [("--limit", "a", "-v")]
    assert not rebuilds.aside.exists()
    assert cli_drift.rebuild("b", lambda _: 0, ()) == 1  # none is kept of it


def test_what_a_host_was_stays_until_it_is_that_again(
    rebuilds: Rebuilds, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it is rebuilt, and whatever the runs between leave."""
    assert rebuilds.run(1, x=1) == 1
    assert f"compares with what it was ({rebuilds.aside})" in capsys.readouterr().out
    receipts.keep(rebuilds.folder, "a", {"settings": "s", "x": 1}, None)  # kvhost up
    for _ in range(2):
        assert rebuilds.run(0, x=1) == 2
        assert rebuilds.aside.read_text() == rebuilds.before
    told = capsys.readouterr().out
    assert "a rebuild before this one is not over" in told
    assert f"To take the host as it is now:\n  rm {rebuilds.aside}" in told
    assert rebuilds.run(0) == 0
    assert not rebuilds.aside.exists()


def test_after_a_controller_was_killed_late_in_a_rebuild(rebuilds: Rebuilds) -> None:
    receipts.set_aside(rebuilds.folder, "a")
    kept = receipts.keep(rebuilds.folder, "a", {"settings": "s", "x": 1}, None)
    assert rebuilds.run(0, x=1) == 2
    assert rebuilds.aside.read_text() == rebuilds.before
    rebuilds.aside.unlink()  # a person takes it as it is
    assert rebuilds.run(0, x=1) == 0
    assert kept.exists()


def test_what_a_host_was_that_cannot_be_read_is_not_passed_over(
    rebuilds: Rebuilds, capsys: pytest.CaptureFixture[str]
) -> None:
    rebuilds.aside.write_text("{")
    assert rebuilds.run(0) == 1
    assert (rebuilds.ran, rebuilds.aside.read_text()) == ([], "{")
    assert f"rm {rebuilds.aside}" in capsys.readouterr().out


def test_a_rebuild_with_wrong_arguments_leaves_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHOST_RECEIPTS", str(tmp_path))
    path = receipts.keep(tmp_path, "gpu-1", {"settings": "s"}, None)
    before = path.read_text()

    def up(args: tuple[str, ...]) -> int:
        raise click.exceptions.Exit(2)  # as pyinfra's: no such host in the inventory

    with pytest.raises(click.exceptions.Exit):
        cli_drift.rebuild("gpu-1", up, ())
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    receipts.set_aside(tmp_path, "gpu-1")  # of a rebuild before this one
    with pytest.raises(click.exceptions.Exit):
        cli_drift.rebuild("gpu-1", up, ())
    assert (tmp_path / "gpu-1.before").exists()
    assert path.read_text() == before
    assert cli_drift.rebuild("gpu1", up, ()) == 1
    assert "Did you mean gpu-1?" in capsys.readouterr().out
