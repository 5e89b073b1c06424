"""cache_kind native without an engine: settings, services, files, the plan's words, the verdict."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.engine.matrix import load_matrix
from kvhost.onhost import evidence_probe as probe
from kvhost.onhost import ready, service_names
from kvhost.onhost.evidence_config import load_config
from kvhost.plan.derive import derived
from kvhost.plan.lock import choose_lock
from kvhost.plan.types import GIB, ModelNeed, Refusal
from kvhost.services import native
from kvhost.services.describe import services
from kvhost.services.namespace import namespace_of
from kvhost.services.runners import left_over
from kvhost.services.vllm import vllm_config
from kvhost.settings import Settings
from kvhost.verdict.evidence import Evidence
from kvhost.verdict.judge import judge
from tests.plan_cases import FACTS, installed_host, ok, plan
from tests.plan_cases import changed as changed_report
from tests.settings_cases import check, refused

REPO = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
NAMESPACE = "/var/lib/kvhost/tier/ns-0123"
NATIVE: dict[str, Any] = {"cache_kind": "native"}
ETC = [f"/var/lib/kvhost/etc/{name}.json" for name in ("cache", "runner", "pruner")]
Json = dict[str, Any]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("l2_adapter", "fs", "vLLM writes its files itself"),
        ("cache_port", 5600, "no cache server to listen"),
        ("cache_http_port", 5601, "no cache server to listen"),
        ("heartbeat_s", 3.0, "no cache server to be asked"),
        ("mq_timeout_s", 20.0, "no cache server to be waited for"),
        ("verify_events", ["cache"], "no cache server to restart"),
        ("verify_events", ["both", "kill"], "one service, the runner"),
        ("verify_events", ["runner", "other"], "second vLLM"),
        ("runner_extra_args", ["--prefix_caching_hash_algo=xxhash"], "names of the files"),
        ("runner_extra_args", ["--prefix-caching-hash", "xxhash"], "names of the files"),
        ("runner_extra_args", ["--data-parallel-size", "2"], "each vLLM would have a memory"),
        ("runner_extra_args", ["--data_parallel_si=2"], "each vLLM would have a memory"),
        ("runner_extra_args", ["--data-parallel-rank", "1"], "each vLLM would have a memory"),
        ("runner_extra_args", ["-dp", "2"], "each vLLM would have a memory"),
        ("runner_extra_args", ["-dpl=2"], "each vLLM would have a memory"),
        ("more_runners", [{"name": "second", "api_port": 8001}], "one runner"),
    ],
)
def test_what_means_nothing_without_a_cache_server_is_refused(
    key: str, value: object, said: str
) -> None:
    problems = refused({**NATIVE, key: value})
    assert set(problems) == {f"{key}, cache_kind"}
    assert said in problems[f"{key}, cache_kind"]
    check({key: value})  # and it is fine with the server


def test_a_shared_tier_is_one_of_the_cache_server() -> None:
    shared: dict[str, Any] = {"shared_tier": "rediss://kv.example.org:6379"}
    shared["shared_tier_password_file"] = "secrets/store"
    assert "second tier of LMCache's" in refused({**NATIVE, **shared})["shared_tier, cache_kind"]
    check(shared)
    for key, value in (("shared_tier_ca_file", "ca.pem"), ("shared_tier_timeout_s", 5.0)):
        assert "second tier of LMCache's" in refused({**NATIVE, key: value})[f"{key}, cache_kind"]
    password = {"shared_tier_password_file": "secrets/store"}
    assert set(refused({**NATIVE, **password})) == {
        "shared_tier_password_file, shared_store_address"
    }
    store = {"shared_store_address": "10.0.0.5", "shared_store_memory_gib": 1.0}
    check({**NATIVE, **password, **store})  # it is the password of the store on this host


def test_without_prefix_caching_vllm_still_asks_its_connector() -> None:
    check({**NATIVE, "runner_extra_args": ["--no-enable-prefix-caching"]})


def test_all_that_means_nothing_is_said_at_once() -> None:
    assert len(refused({**NATIVE, "l2_adapter": "fs", "cache_port": 5600, "heartbeat_s": 3.0})) == 3


def test_the_event_is_the_restart_of_the_one_service_that_there_is() -> None:
    assert check(NATIVE).events == ["runner"] and check({}).events == ["both"]
    given = check({**NATIVE, "verify_events": ["runner", "kill", "reboot"], "reboot_local": True})
    assert given.events == ["runner", "kill", "reboot"]
    # a default that is written out asks for nothing
    assert check({**NATIVE, "verify_events": ["both"], "cache_port": 5555}).events == ["runner"]


@pytest.mark.parametrize("flag", ["--kv-offloading-size", "--kv-offloading-backend=native"])
def test_vllms_own_shortcuts_are_refused_with_what_to_write_instead(flag: str) -> None:
    told = refused({"runner_extra_args": [flag]})["runner_extra_args"]
    assert "cache_kind = 'native'" in told and "l1_gib" in told


def test_ports_of_a_server_that_is_not_there_are_not_claimed() -> None:
    assert check({**NATIVE, "api_port": 5555}).cache_ports == {}
    assert set(check({}).cache_ports) == {"cache_port", "cache_http_port"}


# -- services -------------------------------------------------------------------------------------


def made(gpus: int = 0, **data: object) -> dict[str, Any]:
    ours = check({**NATIVE, **data})
    found = services(ours, ours.paths, NAMESPACE, with_key=False, gpus=gpus)
    return {one.name: one for one in found}


def transfer(service: Any) -> Json:
    loaded: Json = json.loads(service.argv[service.argv.index("--kv-transfer-config") + 1])
    return loaded


def test_there_is_a_runner_and_a_pruner_and_nothing_waits_for_a_server() -> None:
    found = made(l1_gib=3, chunk_size=512)
    assert list(found) == ["runner", "pruner"]
    runner = found["runner"]
    assert not runner.wait_for and not runner.after and not runner.closed_ports
    assert "--cache" not in runner.ready and "cache" not in runner.launch_spec(check({}).paths)[:40]
    told = transfer(runner)
    assert told["kv_connector"] == "OffloadingConnector"
    assert told["kv_connector_extra_config"] == {
        "spec_name": "KvhostTieringSpec",
        "spec_module_path": "kvhost_offload",
        "cpu_bytes_to_use": 3 << 30,
        "block_size": 512,
        "secondary_tiers": [{"type": "fs", "root_dir": NAMESPACE}],
    }
    ours = check(NATIVE)
    assert "kv-transfer-config" not in vllm_config(ours, ours.paths, with_key=False)


def test_on_a_gpu_it_is_vllms_own_class() -> None:
    extra = transfer(made(gpus=1)["runner"])["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec" and "spec_module_path" not in extra


def test_flags_of_the_user_come_after_kvhosts() -> None:
    argv = made(runner_extra_args=["--max-num-seqs", "4"])["runner"].argv
    assert argv[:2] == ("/var/lib/kvhost/current/bin/vllm", "serve")
    assert argv[-2:] == ("--max-num-seqs", "4") and "--kv-transfer-config" in argv[:-2]


def test_the_runner_does_for_the_tier_what_the_cache_server_does() -> None:
    runner = made()["runner"]
    first = [" ".join(argv) for argv in runner.before]
    assert any("shm_sweep.py vllm_offload_*.mmap" in one for one in first)
    heal = next(n for n, one in enumerate(first) if "evidence_aside.py heal" in one)
    sweep = next(n for n, one in enumerate(first) if "pruner.py sweep" in one)
    assert heal < sweep and "--record /var/lib/kvhost/run/runner.json" in first[sweep]
    assert first[sweep].endswith("{unclean}")
    marks = ("/var/lib/kvhost/tier/.kvhost-tier", f"{NAMESPACE}/.kvhost-namespace.json")
    assert runner.require == marks
    assert runner.writes == ("/var/lib/kvhost/tier",)
    assert "/var/lib/kvhost/lib/kvhost_offload.py" in runner.watch


def test_it_does_not_start_while_the_drive_with_its_cache_is_away() -> None:
    runner = made(drive_serial="S1x", model_source="/srv/model")["runner"]
    assert runner.needs_mount == "/var/lib/kvhost/drive"


# -- a host that changes its kind -----------------------------------------------------------------


def test_the_cache_servers_files_are_left_over_and_its_service_is_none(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    assert service_names.names(str(tmp_path)) == ("cache", "runner", "pruner"), "not known yet"
    for name in ("cache.json", "runner.json", "pruner.json", "kvhost-cache.service"):
        (etc / name).touch()
    assert service_names.names(str(tmp_path)) == ("cache", "runner", "pruner")
    wanted = [f"{etc}/runner.json", f"{etc}/pruner.json"]
    gone = left_over([str(path) for path in etc.iterdir()], wanted, str(etc))
    assert gone == [f"{etc}/cache.json", f"{etc}/kvhost-cache.service"]
    for path in gone:
        Path(path).unlink()
    assert service_names.names(str(tmp_path)) == ("runner", "pruner")
    assert left_over([f"{etc}/cache.json"], [f"{etc}/cache.json"], str(etc)) == []


RESOLVED: Json = {
    "dtype": "float32",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "kv_cache_layout": None,
    "block_size": 128,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "rope": None,
    "versions": {"vllm": "0.32.0"},
    "machine": "x86_64",
    "architectures": ["LlamaForCausalLM"],
    "layers": 3,
    "kv_heads": 1,
    "head_size": 2,
    "sliding_window": None,
}


def namespace(resolved: Json = RESOLVED, model: str = "m", **data: object) -> Any:
    ours = check(data)
    return namespace_of(
        resolved,
        model_digest=model,
        model_revision=None,
        chunk_size=ours.chunk_size,
        l2_adapter=ours.tier_format,
        extra_args=ours.runner_extra_args,
    )


def test_each_writer_of_files_and_each_meaning_of_them_has_a_namespace() -> None:
    own = namespace(**NATIVE)
    others = [
        namespace(),
        namespace(l2_adapter="fs"),
        namespace({**RESOLVED, "dtype": "bfloat16"}, **NATIVE),
        namespace({**RESOLVED, "kv_cache_dtype": "fp8"}, **NATIVE),
        namespace({**RESOLVED, "versions": {"vllm": "0.33.0"}}, **NATIVE),
        namespace(model="other weights", **NATIVE),
        namespace(chunk_size=512, **NATIVE),
    ]
    digests = {one.digest for one in others}
    assert len(digests) == len(others) and own.digest not in digests
    # what vLLM's own digest below it does not hold: the weights of a model at the same path
    assert own.digest == namespace(**NATIVE).digest


def test_a_chunks_size_is_rounded_up_to_a_page_as_vllm_does() -> None:
    # 3 layers x 1 head x 2 x (K and V) x 4 bytes = 48 bytes a token
    assert namespace(chunk_size=256).chunk_bytes == 12288
    assert namespace(chunk_size=384, **NATIVE).chunk_bytes == 20480
    assert namespace(chunk_size=384).chunk_bytes == 18432


# -- the plan -------------------------------------------------------------------------------------


def test_a_vllm_that_was_not_tried_is_refused() -> None:
    matrix = load_matrix(REPO / "locks")
    report = changed_report({})
    _, fine = choose_lock(check({**NATIVE, "engine_lock": "cpu-x86_64"}), report, matrix)
    assert not [one for one in fine if one.code == "native_not_tried"]
    info, _ = choose_lock(check({"engine_lock": "cpu-x86_64"}), report, matrix)
    old = info.model_copy(update={"vllm": "0.26.0"})
    changed = matrix.model_copy(update={"locks": {**matrix.locks, "cpu-x86_64": old}})
    _, found = choose_lock(check({**NATIVE, "engine_lock": "cpu-x86_64"}), report, changed)
    assert [one.code for one in found] == ["native_not_tried"] and "0.26.0" in found[0].found
    _, plain = choose_lock(check({"engine_lock": "cpu-x86_64"}), report, changed)
    assert not plain


def test_the_plan_says_who_does_the_copying() -> None:
    ours = check(NATIVE)
    assert "kvhost_offload.py" in native.native_notes(ours, cuda=False)[0]
    assert "tested it on CPUs only" in native.native_notes(ours, cuda=True)[0]
    assert native.native_notes(check({}), cuda=False) == []


LONG: Any = {"max_model_len": 32768}


def against(need: ModelNeed, **data: Any) -> list[Refusal]:
    got = plan(facts=replace(FACTS, model=need), **{**NATIVE, **LONG, **data})
    return [one for one in got.refusals if one.code == "l1_too_small"]


def test_a_prompt_that_the_memory_does_not_hold_is_refused_for_it_would_hang() -> None:
    need = ModelNeed(GIB, 128 << 10, 32768)  # 4 GiB of KV in 32,768 tokens
    [one] = against(need, l1_gib=3, engine_kv_gib=8)
    assert "4 GiB" in one.needed and "l1_gib = 3" in one.found
    assert one.fix == "l1_gib = 4, or max_model_len = 24576"
    assert not against(need, l1_gib=4, engine_kv_gib=8)
    assert not against(need, l1_gib=3, max_model_len=24576, engine_kv_gib=8)
    assert not against(need, l1_gib=3, cache_kind="mp", engine_kv_gib=8)
    # a chunk that is not whole takes its room all the same
    assert against(need, l1_gib=3, max_model_len=24577, engine_kv_gib=8)


def test_what_the_engine_says_of_a_chunk_is_held_against_the_memory_too() -> None:
    """Of a model of the hub the plan knows nothing before its download."""
    ours = check({**NATIVE, **LONG, "l1_gib": 3})
    why = native.too_little_memory(ours, 32 << 20)  # 128 chunks
    assert why is not None and "l1_gib = 4" in why
    assert native.too_little_memory(ours, 24 << 20) is None
    assert native.too_little_memory(ours, None) is None
    assert native.too_little_memory(check({**LONG, "l1_gib": 3}), 32 << 20) is None


def test_memory_for_one_prompt_follows_from_the_model() -> None:
    need = ModelNeed(GIB, 128 << 10, 32768)
    given = check({**NATIVE, **LONG, "engine_kv_gib": 8})
    got, notes = derived(given, changed_report({}), need, cuda=False)
    assert got.l1_gib == 4 and any(note.startswith("l1_gib is 4") for note in notes)
    assert "l1_gib" not in got.model_fields_set
    kept, notes = derived(check({**LONG, "engine_kv_gib": 8}), changed_report({}), need, cuda=False)
    assert kept.l1_gib == 1 and not notes
    own = check({**NATIVE, **LONG, "engine_kv_gib": 8, "l1_gib": 2})
    assert derived(own, changed_report({}), need, cuda=False)[0].l1_gib == 2, "as it was given"


# -- who asks -------------------------------------------------------------------------------------


def test_ready_asks_no_server(tmp_path: Path) -> None:
    script = str(REPO / "kvhost/onhost/ready.py")
    argv = [sys.executable, script, "--base", str(tmp_path), "--once"]
    asked = [*argv, "--api", "http://127.0.0.1:9", "--model", "m"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["missing"].startswith("vLLM: ")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--api, --cache or both" in done.stderr
    assert ready.registered({}) is None


PAGE = (FIXTURES / "metrics" / "vllm-native.txt").read_text()


def test_what_vllms_tiers_found_is_told_in_tokens() -> None:
    found = probe.tier_counters(PAGE, 256)
    assert (found["hit_l1_tokens"], found["hit_l2_tokens"], found["lookups"]) == (0.0, 8192.0, 32.0)
    assert found["hit_tokens"] == 8192.0 and found["l2_adapters"] == 1.0
    assert probe.tier_counters(PAGE, 512)["hit_l2_tokens"] == 16384.0
    # nothing is known before the first lookup, and a page of the other kind of cache says nothing
    assert set(probe.tier_counters("", 256).values()) == {None}
    without = "\n".join(line for line in PAGE.splitlines() if "chunk_hits" not in line)
    assert probe.tier_counters(without, 256)["hit_tokens"] == 0.0


def test_evidence_needs_a_server_for_the_events_of_one(tmp_path: Path) -> None:
    service = {"record": "/r", "restart": ["true"]}
    texts = ("api_base", "metrics_url", "model", "namespace_dir", "own_requests")
    config: Json = {**dict.fromkeys(texts, "x"), "services": {"runner": service}}
    config |= {
        "cache_http": None,
        "prompt_tokens": 8200,
        "chunk_size": 256,
        "vocab": [1, 9],
        "events": ["runner"],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_config(str(path))["cache_http"] is None
    for event in ("cache", "both", "other"):
        path.write_text(json.dumps({**config, "events": [event]}))
        with pytest.raises(ValueError, match="need a cache_http"):
            load_config(str(path))
    path.write_text(json.dumps({**config, "cache_http": "http://127.0.0.1:1"}))
    with pytest.raises(ValueError, match=r"services\.cache\.record"):
        load_config(str(path))


# -- purge ----------------------------------------------------------------------------------------


class Purged:
    """A base with a namespace of vLLM's own tier, in use, and an older one; no service runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.old = root, "ns-" + "a" * 24, "ns-" + "b" * 24
        for part in ("bin", "etc"):
            (root / part).mkdir()
        for script in (REPO / "kvhost/onhost").glob("[a-z]*.py"):
            (root / "bin" / script.name).symlink_to(script)
        told = native.transfer_config(check(NATIVE), f"{root}/tier/{self.now}", cuda=False)
        argv = ["vllm", "serve", "--kv-transfer-config", json.dumps(told)]
        (root / "etc/runner.json").write_text(json.dumps({"argv": argv, "before": []}))
        for name in (self.now, self.old):
            for number, model in enumerate(("_srv_llama", "_srv_my_llama")):
                folder = root / "tier" / name / f"{model}_0123456789ab_r0" / "abc" / "de_g0"
                folder.mkdir(parents=True)
                (folder / f"{number:064x}.bin").write_bytes(b"x" * 100)
                told_by_vllm = root / "tier" / name / f"{model}_0123456789ab"
                told_by_vllm.mkdir()
                (told_by_vllm / "config.json").write_text("{}")
            (root / "tier" / name / ".kvhost-namespace.json").write_text("{}")

    def call(self, command: str, *words: str, rc: int = 0) -> Any:
        argv = [sys.executable, "-B", str(REPO / "kvhost/onhost/purge.py"), command]
        argv += ["--base", str(self.root), "--tier", str(self.root / "tier"), "--user", "u", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == rc, done.stderr
        return json.loads(done.stdout) if rc == 0 else done.stderr


def test_purge_finds_the_files_and_the_namespace_that_is_written_to(tmp_path: Path) -> None:
    base = Purged(tmp_path)
    found = base.call("look")
    assert (found["files"], found["current"]) == (4, base.now)
    assert {row["model"] for row in found["rows"]} == {"_srv_llama", "_srv_my_llama"}
    assert base.call("look", "--model", "/srv/llama")["files"] == 2, "and none of my_llama"


def test_purge_takes_a_namespace_away_whole(tmp_path: Path) -> None:
    base = Purged(tmp_path)
    assert base.call("remove", "--namespace", base.old)["files"] == 2
    assert [path.name for path in (tmp_path / "tier").iterdir()] == [base.now]
    assert len(list((tmp_path / "tier").rglob("*.bin"))) == 2


def test_what_is_not_vllms_keeps_its_directory(tmp_path: Path) -> None:
    base = Purged(tmp_path)
    mine = tmp_path / "tier" / base.old / "_srv_llama_0123456789ab_r0" / "notes.txt"
    mine.write_text("mine")
    assert base.call("remove", "--namespace", base.old)["files"] == 2
    assert [path for path in (tmp_path / "tier" / base.old).rglob("*") if path.is_file()] == [mine]


def test_no_tenant_can_be_told_from_these_files(tmp_path: Path) -> None:
    base = Purged(tmp_path)
    for command in ("look", "remove"):
        assert "do not tell tenants" in base.call(command, "--tenant-sha256", "-", rc=1)
    assert len(list((tmp_path / "tier").rglob("*.bin"))) == 4


# -- the verdict ----------------------------------------------------------------------------------


def recorded(name: str = "native-runner") -> Json:
    loaded: Json = json.loads((FIXTURES / "evidence" / f"{name}.json").read_text())
    return loaded


def judged(evidence: Json) -> Any:
    return judge(Evidence.model_validate_json(json.dumps(evidence)))


@pytest.mark.parametrize("name", ["native-runner", "native-kill"])
def test_a_recorded_test_passes_and_asks_nothing_of_a_server(name: str) -> None:
    verdict = judged(recorded(name))
    assert verdict.persisted == "PASS", verdict.summary
    asked = {condition.id for condition in verdict.conditions}
    assert not asked & {"restarted_cache", "alone_cache", "registered", "cache_hits"}
    assert {"l2_hits", "l1_zero", "moved_misses", "dropped", "half_hits"} <= asked


def edited(*path: str, to: object) -> Json:
    evidence = copy.deepcopy(recorded())
    place: Any = evidence
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != to
    place[path[-1]] = to
    return evidence


RESTORED = ("requests", "restored", "after", "cache")


@pytest.mark.parametrize(
    ("evidence", "persisted"),
    [
        # the files were not read, and nothing came from outside
        (edited(*RESTORED, "hit_l2_tokens", to=0.0), "INCONCLUSIVE"),
        (edited(*RESTORED, "hit_l1_tokens", to=8192.0), "INCONCLUSIVE"),
        (edited("requests", "restored", "output_tokens", to=[1] * 16), "FAIL"),
        (edited("requests", "restored", "after", "cache", to=None), "INCONCLUSIVE"),
        (edited("moved", "moved", to=0), "INCONCLUSIVE"),
    ],
)
def test_what_is_missing_or_wrong_is_no_pass(evidence: Json, persisted: str) -> None:
    assert judged(evidence).persisted == persisted


def test_evidence_of_a_server_is_judged_as_before() -> None:
    assert replace(check({}).paths) == check({}).paths  # a value, compared as one
    old = json.loads((FIXTURES / "evidence" / "healthy-fs.json").read_text())
    assert "native" not in old["config"] and judged(old).persisted == "PASS"


def test_the_settings_digest_of_a_host_with_a_server_is_what_it_was() -> None:
    assert Settings.model_fields["cache_kind"].default == "mp"


def test_the_plan_says_which_service_goes() -> None:
    there = {name: {"uid": 0, "mode": "0644", "sha256": "0" * 64} for name in ETC}
    changes = {**installed_host(), "kvhost.files": ok(there)}
    got = plan(changes, **NATIVE)
    gone = [(one.what, one.cost) for one in got.actions if "no more" in one.what]
    assert gone == [("the service cache, in the settings no more, goes", "stops the service cache")]
    assert not [one for one in plan(changes).actions if "no more" in one.what]
