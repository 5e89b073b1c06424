"""Purge of a namespace, a model or a tenant: what goes, what stays, and in which order.

First with files named as LMCache 0.5.6 names them and a double in the place of services.py; then
(full tier) with the real engine, that nothing of a tenant is left, on disk or in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvhost import cli
from kvhost.commands import care, options
from kvhost.onhost.purge import is_model, parse
from tests.e2e_tools import API_KEY, Site
from tests.s3_tools import s3
from tests.store_tools import PASSWORD, redis

ONHOST = Path(__file__).parent.parent / "kvhost" / "onhost"
SERVICES = """
import json, pathlib, sys
base = pathlib.Path(sys.argv[sys.argv.index("--base") + 1])
words = [w for w in sys.argv[1:] if w not in ("--base", str(base), "--user", "u", "--json")]
with (base / "calls").open("a") as calls:
    calls.write(" ".join([*words, str(len(list(base.glob("tier/*/*.data"))))]) + "\\n")
alive = not (base / "stopped").exists()
row = {"alive": alive, "state": "RUNNING" if alive else "STOPPED"}
print(json.dumps({"services": {name: row for name in ("cache", "runner", "pruner")}}))
sys.exit(words[0] == "stop" and (base / "no-stop").exists())
"""
NOW, OLD = "ns-" + "a" * 24, "ns-" + "b" * 24


def digest(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()


class Base:
    """A tier with two namespaces, two models and two tenants; 3 files each, of one block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bin", "etc"):
            (root / name).mkdir(parents=True)
        for script in ONHOST.glob("[a-z]*.py"):
            (root / "bin" / script.name).write_text(script.read_text())
        (root / "bin/services.py").write_text(SERVICES)
        adapter = json.dumps({"type": "fs_native", "base_path": str(root / "tier" / NOW)})
        argv = ["lmcache", "server", "--l2-adapter", adapter]
        (root / "etc/cache.json").write_text(json.dumps({"argv": argv, "before": []}))
        for namespace in (NOW, OLD):
            here = root / "tier" / namespace
            here.mkdir(parents=True)
            (here / ".kvhost-namespace.json").write_text("{}")
            for model in ("-SEP-srv-SEP-llama", "org-SEP-other"):
                for end in ("@ann.data", "@bob.data", ".data"):
                    (here / f"{model}@0x01000100@0@{'ab' * 32}{end}").write_bytes(b"x" * 100)
        (root / "tier" / ".kvhost-tier").write_text("marker")

    def call(self, command: str, *words: str, rc: int = 0) -> Any:
        argv = [
            sys.executable, str(self.root / "bin/purge.py"), command, "--base", str(self.root),
            "--tier", str(self.root / "tier"), "--user", "u", *words,
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if rc == 0 else done.stderr

    def files(self) -> set[tuple[str, str, str]]:
        """(namespace, model, tenant) of the files that are there."""
        rows = set()
        for path in self.root.glob("tier/ns-*/*.data"):
            parts = path.stem.split("@")
            rows.add((path.parent.name, parts[0], parts[4] if len(parts) > 4 else ""))
        return rows

    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


@pytest.mark.parametrize(
    "name, model, tenant",
    [
        ("org-SEP-m@0x01@0@ab.data", "org/m", "-"),
        ("m@0x01@0@ab@s.a-l_t.data", "m", digest("s.a-l_t")),
        ("m@0x01@0@ab@s.tmp", "m", digest("s")),
        ("m@0x01@0@ab@s@t.data", None, None),
        ("m@0x01@ab.data", None, None),
        ("m@0x01@0@ab.bin", None, None),
    ],
)
def test_the_name_of_a_file_tells_model_and_tenant(
    name: str, model: str | None, tenant: str | None
) -> None:
    assert parse(name) == (model, tenant)


@pytest.mark.parametrize(
    "wanted, yes",
    [
        ("/var/lib/kvhost/models/builtin-0123", True),
        ("builtin-0123", True),
        ("builtin", True),
        ("built", False),
        ("/var/lib/kvhost/models", False),
        ("org/name", False),
    ],
)
def test_a_model_is_named_by_its_path_or_its_last_part(wanted: str, yes: bool) -> None:
    assert is_model("/var/lib/kvhost/models/builtin-0123", wanted) is yes


def test_a_model_of_the_hub_is_named_as_there() -> None:
    path = "/b/models/org--name--0123456789ab"
    assert is_model(path, "org/name")
    assert not is_model(path, "org/nam")
    assert not is_model(path, "org")


def sharing(base: Base, params: dict[str, Any]) -> None:
    """The cache server of the base uses a store too."""
    spec = json.loads((base.root / "etc/cache.json").read_text())
    plugin = {"type": "plugin", "adapter_params": {**params, "namespace": NOW, "timeout_s": 1}}
    spec["argv"] += ["--l2-adapter", json.dumps(plugin)]
    (base.root / "etc/cache.json").write_text(json.dumps(spec))
    (base.root / "secrets").mkdir(exist_ok=True)
    (base.root / "secrets/shared-password").write_text(PASSWORD + "\n")


@pytest.mark.parametrize(("store", "scheme"), [(redis, "redis"), (s3, "s3+http")])
def test_of_the_shared_tier_the_same_goes_and_nothing_else(
    base: Base, tmp_path: Path, store: Any, scheme: str
) -> None:
    with store(tmp_path / "store") as server:
        sharing(base, server.params())
        for space in (NOW, OLD, "ns-" + "f" * 24):
            for tenant in ("-", digest("ann"), digest("bob")):
                name = f"kvhost:{space}:00000100:0:{'ab' * 32}:{tenant}"
                server.client().put(name, memoryview(b"x"))
        assert base.call("look", "--tenant-sha256", digest("ann"))["shared"] == 3
        assert base.call("remove", "--tenant-sha256", digest("ann"))["shared"] == 3
        left = server.names()
        assert len(left) == 6
        assert digest("ann") not in "".join(left)
        assert base.call("remove", "--namespace", OLD)["shared"] == 2
        assert base.call("remove", "--model", "llama", "--tenant-sha256", "-")["shared"] == 1
        server.stop()
        told = base.call("look")
        assert told["shared"] is None
        assert "Connection refused" in told["shared_why"]
        said = base.call("remove", "--tenant-sha256", digest("bob"), rc=1)
        assert f"the files are removed, and what is in the shared tier stays: {scheme}://" in said
        assert PASSWORD not in said
        assert not [row for row in base.files() if row[2] == "bob"]


def test_look_counts_and_never_shows_a_salt(base: Base) -> None:
    found = base.call("look")
    assert (found["files"], len(found["rows"]), found["current"]) == (12, 12, NOW)
    assert found["bytes"] >= 12 * 100
    assert "ann" not in json.dumps(found)
    assert digest("ann") in json.dumps(found)
    assert base.calls() == []


@pytest.mark.parametrize(
    "words, gone",
    [
        (("--tenant-sha256", digest("ann")), lambda ns, m, t: t == "ann"),
        (("--tenant-sha256", "-"), lambda ns, m, t: t == ""),
        (("--model", "llama"), lambda ns, m, t: "llama" in m),
        (("--model", "org/other"), lambda ns, m, t: "other" in m),
        (("--namespace", NOW), lambda ns, m, t: ns == NOW),
        (("--namespace", OLD, "--tenant-sha256", digest("bob")),
         lambda ns, m, t: ns == OLD and t == "bob"),
        (("--tenant-sha256", digest("nobody")), lambda ns, m, t: False),
    ],
)  # fmt: skip
def test_what_was_named_goes_and_nothing_else(
    base: Base, words: tuple[str, ...], gone: Any
) -> None:
    wanted = {row for row in base.files() if not gone(*row)}
    base.call("remove", *words)
    assert base.files() == wanted
    assert (base.root / "tier/.kvhost-tier").exists()


def test_what_holds_it_in_memory_is_stopped_before_and_started_after(base: Base) -> None:
    base.call("remove", "--tenant-sha256", digest("ann"))
    assert base.calls() == ["status 12", "stop runner cache 12", "start cache runner 8"]


def test_what_did_not_run_stays_stopped(base: Base) -> None:
    (base.root / "stopped").touch()
    base.call("remove", "--model", "llama")
    assert not [call for call in base.calls() if call.startswith("start")]


def test_a_namespace_that_is_not_in_use_goes_whole_and_nothing_is_restarted(base: Base) -> None:
    base.call("remove", "--namespace", OLD)
    assert base.calls() == []
    assert not (base.root / "tier" / OLD).exists()
    assert (base.root / "tier" / NOW).exists()


def saved_slots(base: Base, namespace: str, model: str | None = None) -> Path:
    here = base.root / "tier" / namespace
    here.mkdir()
    about = {"engine_config": {"model_digest": "cd" * 32}} | ({"model": model} if model else {})
    (here / ".kvhost-namespace.json").write_text(json.dumps(about))
    for name in (".slots.lock", ".slots-state.json", ".slot-0.json", ".system.json"):
        (here / name).write_text("{}")
    for name in (f"slot-0.{'ab' * 8}.kv", f"system.{'ab' * 8}.kv", "slot-1.77.tmp"):
        (here / name).write_bytes(b"x" * 100)
    (here / ".gone.json").write_text("{}")  # of one that the pruner took
    return here


def slot_rows(base: Base, *words: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = base.call("look", *words)["rows"]
    return [row for row in rows if row["namespace"] == "ns-03"]


def test_saved_slots_without_a_model_go_with_their_notes_by_namespace_alone(base: Base) -> None:
    here = saved_slots(base, "ns-03")
    for what in (("--model", "llama"), ("--tenant-sha256", digest("ann"))):
        assert "purge the namespace" in base.call("remove", *what, rc=1)
    assert len(list(here.glob("*.kv"))) == 2 and base.calls() == []
    (row,) = slot_rows(base)
    assert (row["model"], row["weights"], row["files"]) == (None, "cd" * 32, 3)
    assert base.call("remove", "--namespace", "ns-03")["files"] == 3
    assert not here.exists() and (base.root / "tier" / NOW).exists()


@pytest.mark.parametrize(
    "model, named",
    [("/srv/q8/llama-8b.gguf", "llama-8b.gguf"), ("builtin", "builtin")],
)
def test_saved_slots_are_of_the_model_that_their_namespace_was_made_for(
    model: str, named: str, base: Base
) -> None:
    here = saved_slots(base, "ns-03", model)
    (row,) = slot_rows(base)
    assert (row["model"], row["tenant"], row["files"]) == (model, None, 3)
    assert "do not tell tenants" in base.call("remove", "--tenant-sha256", digest("ann"), rc=1)
    assert slot_rows(base, "--model", "/srv/llama") == []  # of another
    base.call("remove", "--model", "/srv/llama")
    assert len(list(here.glob("*.kv"))) == 2
    assert base.call("remove", "--model", named)["files"] == 3
    assert not list(here.glob("*.*kv")) and not list(here.glob("*.tmp"))


def test_a_data_file_named_as_the_namespaces_own_takes_nothing_with_it(base: Base) -> None:
    here = saved_slots(base, "ns-03", "m")
    (here / f"kvhost-namespace.{'ab' * 8}.kv").write_bytes(b"x")
    (here / "slots-state.77.tmp").write_bytes(b"x")
    assert base.call("remove", "--model", "m")["files"] == 5
    assert (here / ".kvhost-namespace.json").exists() and (here / ".slots-state.json").exists()


@pytest.mark.parametrize("odd", ["{", "[]", '{"engine_config": 3, "model": "m"}', '{"model": 7}'])
def test_a_namespace_whose_file_tells_nothing_has_no_model(odd: str, base: Base) -> None:
    here = saved_slots(base, "ns-03", "m")
    (here / ".kvhost-namespace.json").write_text(odd)
    assert [(row["model"], row["weights"]) for row in slot_rows(base)] == [(None, None)]
    (here / ".kvhost-namespace.json").unlink()
    os.mkfifo(here / ".kvhost-namespace.json")
    assert [row["model"] for row in slot_rows(base)] == [None]


def test_the_model_of_a_running_llama_server_is_known_also_without_files(base: Base) -> None:
    here = saved_slots(base, "ns-03", "builtin")
    argv = ["llama-server", "--model", "/b/gguf-ab/model.gguf", "--slot-save-path", str(here)]
    (base.root / "etc/runner.json").write_text(json.dumps({"argv": argv, "before": []}))
    for path in here.glob("[a-z]*"):
        path.unlink()
    assert base.call("remove", "--model", "builtin")["files"] == 0
    assert "stop" in (base.root / "calls").read_text()


def test_a_directory_of_a_notes_name_keeps_no_slot_from_going(base: Base) -> None:
    here = saved_slots(base, "ns-03", "builtin")
    for name in (".slot-0.json", ".slots.lock"):
        (here / name).unlink()
        (here / name).mkdir()
    assert base.call("remove", "--namespace", "ns-03")["files"] == 3
    assert sorted(path.name for path in here.iterdir()) == [".slot-0.json", ".slots.lock"]


def test_the_namespace_of_a_running_llama_server_is_emptied_after_its_stop(base: Base) -> None:
    here = saved_slots(base, "ns-03")
    (base.root / "etc/cache.json").unlink()
    argv = ["llama-server", "--slot-save-path", str(here), "--slots"]
    (base.root / "etc/runner.json").write_text(json.dumps({"argv": argv, "before": []}))
    told = base.call("remove", "--namespace", "ns-03")
    assert told["files"] == 3 and told["restarted"]
    assert sorted(path.name for path in here.iterdir()) == [
        *(".gone.json", ".kvhost-namespace.json", ".slots-state.json", ".slots.lock"),
    ]


def test_services_that_do_not_stop_keep_everything(base: Base) -> None:
    (base.root / "no-stop").touch()
    before = base.files()
    assert "nothing was removed" in base.call("remove", "--model", "llama", rc=1)
    assert base.files() == before


@pytest.mark.parametrize(
    ("what", "there"),
    [
        (("--model", "kvhost-builtin"), "/srv/llama, org/other"),
        (("--namespace", "ns-" + "c" * 24), f"{NOW}, {OLD}"),
    ],
)
def test_a_slip_of_the_pen_stops_no_service(base: Base, what: Any, there: str) -> None:
    before = base.files()
    assert f"there is: {there}" in base.call("remove", *what, rc=1)
    assert base.files() == before and not (base.root / "calls").exists()


def test_a_model_that_is_served_is_purged_from_memory_also_without_files(base: Base) -> None:
    (base.root / "etc/runner.json").write_text(json.dumps({"argv": ["vllm", "/srv/fresh"]}))
    assert base.call("remove", "--model", "fresh")["files"] == 0
    assert "stop" in (base.root / "calls").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming a user needs root")
def test_shared_memory_that_stays_is_said(base: Base) -> None:
    name = f"lmcache_l1_pool_{base.root.name}"
    described = json.loads((base.root / "etc/cache.json").read_text())
    sweeping = [["/bin/true", "/bin/shm_sweep.py", name, "lmcache_kv_*"]]
    (base.root / "etc/cache.json").write_text(json.dumps({**described, "before": sweeping}))
    Path("/dev/shm", name).write_text("x")
    try:
        said = base.call("remove", "--model", "llama", "--user", "root", rc=1)
        assert f"shared memory is left: {name}" in said
    finally:
        Path("/dev/shm", name).unlink()
    base.call("remove", "--model", "org/other", "--user", "root")


def test_a_link_in_the_place_of_a_namespace_is_not_followed(base: Base) -> None:
    away = base.root / "away"
    (base.root / "tier" / OLD).rename(away)
    (base.root / "tier" / OLD).symlink_to(away)
    before = set(away.iterdir())
    base.call("remove", "--model", "llama", rc=1)
    assert set(away.iterdir()) == before


def test_remove_wants_to_know_what(base: Base) -> None:
    done = base.call("remove", rc=2)
    assert "remove needs" in done
    assert len(base.files()) == 12


# The command


class Hosts:
    """In the place of pyinfra: notes what it is asked, answers as hosts would."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, files: int = 3, terminal: bool = True, **more: Any
    ) -> None:
        self.more = {"restarts": True, **more}
        monkeypatch.setattr(options, "terminal", lambda: terminal)
        self.asked: list[dict[str, Any]] = []
        self.args: list[tuple[str, ...]] = []
        self.files = files
        monkeypatch.setattr(cli, "pyinfra", self.run)

    def run(self, inventory: str, deploy: str, args: tuple[str, ...]) -> int:
        from kvhost.commands import asking

        self.asked.append(asking.question())
        self.args.append(args)
        row = {"namespace": NOW, "model": "/m", "tenant": digest("s3cret"), "files": 3, "bytes": 9}
        rows = [row] if self.files else []
        found = {"rows": rows, "current": NOW, "files": self.files, "bytes": 9, **self.more}
        asking.answer("h", found)
        return 0


def run(*words: str, typed: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["purge", *words], input=typed)
    return done.exit_code, done.output


def test_it_asks_first_and_no_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    code, text = run("--tenant", "s3cret", typed="n\n")
    assert code == 1
    assert [asked["verb"] for asked in hosts.asked] == ["look"]
    assert "3 files" in text
    assert "not overwritten" in text
    assert "restarted" in text


def test_yes_is_yes_and_the_salt_travels_as_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    code, text = run("--tenant", "s3cret", "--yes", "--limit", "h")
    assert code == 0
    assert [asked["verb"] for asked in hosts.asked] == ["look", "remove"]
    assert {asked["tenant_sha256"] for asked in hosts.asked} == {digest("s3cret")}
    assert "s3cret" not in text + repr(hosts.asked) + repr(hosts.args)


def test_a_salt_can_be_typed_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    code, text = run("--tenant", "-", typed="s3cret\ny\n")
    assert code == 0
    assert hosts.asked[1]["tenant_sha256"] == digest("s3cret")
    assert "s3cret" not in text


def test_without_a_selection_it_only_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    assert run()[0] == 0
    assert [asked["verb"] for asked in hosts.asked] == ["look"]


def test_what_purge_is_to_be_told_is_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Hosts(monkeypatch)
    assert NOW in run()[1]


@pytest.mark.parametrize(
    "row, shown",
    [
        ({"model": "/srv/llama-8b.gguf", "weights": "cd" * 32}, "/srv/llama-8b.gguf"),
        ({"model": "[red]x", "weights": None}, "[red]x"),
        ({"model": None, "weights": "cd" * 32}, "weights cdcdcdcdcdcd…"),
        ({"model": None}, "?"),
    ],
)
def test_the_table_says_what_a_row_is_of(row: dict[str, Any], shown: str) -> None:
    whole = {"namespace": NOW, "tenant": None, "files": 1, "bytes": 1, **row}
    table = care.purge_table([{"host": "h", "rows": [whole], "current": None}])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    assert f" {shown} " in console.export_text()


def test_that_nothing_lies_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Hosts(monkeypatch, files=0)
    assert "The cache holds no files." in run()[1]
    assert "namespace" not in run()[1]
    assert "No files of the cache are that" in run("--model", "x", typed="n\n")[1]


def test_where_there_is_nothing_to_do_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, files=0, restarts=False)
    code, text = run("--namespace", "ns-doesnotexist")
    assert (code, "There is nothing to remove." in text, "[y/N]" in text) == (0, True, False)
    assert [asked["verb"] for asked in hosts.asked] == ["look"]


def test_memory_without_files_is_purged_and_no_count_of_files_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hosts(monkeypatch, files=0)
    code, text = run("--no-tenant", typed="n\n")
    assert code == 1
    assert "may hold it without a file" in " ".join(text.split())
    assert "0 files" not in text


def test_without_a_terminal_purge_says_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, terminal=False)
    code, text = run("--tenant", "s3cret")
    assert (code, "Aborted" in text) == (1, False)
    assert "nothing was removed: no terminal to ask on; add -y" in text
    code, text = run("--tenant", "-", "-y")
    assert (code, "Aborted" in text) == (1, False)
    assert "no cache_salt on stdin" in text
    assert [asked["verb"] for asked in hosts.asked] == ["look"]


def test_that_there_is_no_cache_yet_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, base: Base
) -> None:
    shutil.rmtree(base.root / "tier")
    (base.root / "stopped").touch()
    for words in ((), ("--tenant-sha256", "-")):
        found = base.call("look", *words)
        assert (found["tier"], found["rows"], found["restarts"]) == (None, [], False)
    Hosts(monkeypatch, files=0, restarts=False, tier=None)
    for told in ((), ("--no-tenant",)):
        code, text = run(*told)
        assert (code, "there is no cache yet" in text, "No files" in text) == (0, True, False)


@pytest.mark.parametrize(
    "words, restarts",
    [
        (("--tenant-sha256", "-"), True),
        (("--namespace", NOW), True),
        (("--namespace", OLD), False),
        (("--namespace", "ns-0"), False),
        (("--model", "nobodys"), False),
        ((), False),
    ],
)
def test_look_tells_whether_a_service_would_be_restarted(
    base: Base, words: tuple[str, ...], restarts: bool
) -> None:
    assert base.call("look", *words)["restarts"] is restarts
    assert not any(call.startswith(("stop", "start")) for call in base.calls())
    (base.root / "stopped").touch()
    assert base.call("look", *words)["restarts"] is False


# With the real engine


def ask(site: Site, tokens: list[int], salt: str | None) -> int:
    """Cached tokens of a request."""
    body: dict[str, Any] = {"model": "kvhost-builtin", "prompt": tokens, "max_tokens": 1}
    if salt is not None:
        body["cache_salt"] = salt
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.ports[0]}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        usage = json.load(reply)["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def shared_memory(site: Site) -> set[int]:
    """The cache server's files in /dev/shm, by inode."""
    return {p.stat().st_ino for p in Path("/dev/shm").iterdir() if site.base.name in p.name}


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.full
def test_nothing_of_a_tenant_is_left_and_the_others_keep_theirs(site: Site) -> None:
    if not (site.base / "current").exists():  # run by itself
        assert site.up(verify="never").code == 0
    tokens = [20 + n * 7 % 200 for n in range(1100)]  # four chunks of 256, and a rest
    for salt in ("ann-5a1t", "bob-5a1t", None):
        assert ask(site, tokens, salt) == 0
        assert ask(site, tokens, salt) >= 1024
    logs = b"".join(p.read_bytes() for p in (site.base / "log").iterdir() if p.is_file())
    assert b"-5a1t" not in logs  # a salt is half a key
    pids = [site.record(name)["pid"] for name in ("cache", "runner")]
    pools = shared_memory(site)
    assert pools
    done = site.run(".venv/bin/kvhost", "purge", "--tenant", "ann-5a1t", "--yes", *site.arguments())
    assert done.code == 0, done.text[-3000:]
    assert "removed 4 files" in done.text
    assert "ann-5a1t" not in done.text
    left = [path.name for path in (site.base / "tier").glob("ns-*/*")]
    assert not [name for name in left if "ann-5a1t" in name]
    assert len([name for name in left if "bob-5a1t" in name]) == 4
    assert [site.record(name)["pid"] for name in ("cache", "runner")] != pids  # memory is new
    assert shared_memory(site).isdisjoint(pools)
    assert ask(site, tokens, "ann-5a1t") == 0  # nowhere
    assert ask(site, tokens, "bob-5a1t") >= 1024  # from the files
    assert ask(site, tokens, None) >= 1024
    # a whole model: not one file, and nobody's prompt is known
    model = site.run(".venv/bin/kvhost", "purge", "--model", "builtin", "--yes", *site.arguments())
    assert model.code == 0, model.text[-3000:]
    assert not list((site.base / "tier").glob("ns-*/*.data"))
    assert [ask(site, tokens, salt) for salt in ("ann-5a1t", "bob-5a1t", None)] == [0, 0, 0]
