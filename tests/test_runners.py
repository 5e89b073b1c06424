"""Several runners on one host: settings, services, plan, and a real supervisord with doubles."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import ready
from kvhost.plan.make import ModelNeed, Plan, make_plan, planned
from kvhost.services.describe import services
from kvhost.services.runners import asked_runner, left_over, runners_of
from kvhost.services.units import unit_text
from kvhost.services.vllm import vllm_config
from kvhost.settings import Settings, settings_digest
from tests.plan_cases import (
    FACTS,
    GIB,
    action,
    changed,
    installed_host,
    listener,
    ok,
    plan,
    service,
)
from tests.report_tools import put
from tests.settings_cases import check, refused
from tests.test_driver import BY_ID
from tests.test_generations import Base as Passed
from tests.test_plan_accelerator import codes, on_gpu
from tests.test_remove import Base as Removed
from tests.test_services_script import ORDER, Base, ended, lives

pytestmark = pytest.mark.runners

SECOND: dict[str, Any] = {"name": "second", "api_port": 8001}
A, B, C = (f"GPU-{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "abc")
NAMESPACE = "/var/lib/kvhost/tier/ns-0"


def two(**more: Any) -> Settings:
    return check({"more_runners": [{**SECOND, **more}]})


# Settings


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"more_runners": [{"name": "b"}]}, "item 1 has no api_port"),
        ({"more_runners": [SECOND, {**SECOND, "prt": 1}]}, "item 2: a further runner has no prt"),
        ({"more_runners": [{**SECOND, "api_prt": 1}]}, "did you mean api_port?"),
        (
            {"more_runners": [{**SECOND, "model_source": "/m"}]},
            "it is one for all runners of a host",
        ),
        ({"more_runners": ["b"]}, "item 1 must be a mapping with name and api_port"),
        ({"more_runners": "b"}, "must be a list"),
        ({"more_runners": [{**SECOND, "name": "a-b"}]}, "item 1, name: a name is a small letter"),
        ({"more_runners": [{**SECOND, "name": "cache"}]}, "none of kvhost's own"),
        ({"more_runners": [{**SECOND, "api_port": 80}]}, "item 1, api_port: "),
        ({"more_runners": [{**SECOND, "gpus": ["0"]}]}, "item 1, gpus: a GPU is named by its UUID"),
        ({"more_runners": [{**SECOND, "engine_kv_gib": 0}]}, "engine_kv_gib of second must be"),
        ({"more_runners": [{**SECOND, "gpu_memory_share": 1.0}]}, "at most 0.95"),
        ({"more_runners": [SECOND, {**SECOND, "api_port": 8002}]}, "two runners are called second"),
        ({"more_runners": [{**SECOND, "api_port": 8000}]}, "api_port and api_port of second: all"),
        (
            {"more_runners": [SECOND, {**SECOND, "name": "third"}]},
            "and api_port of third",
        ),
        ({"more_runners": [{**SECOND, "api_port": 5555}]}, "cache_port and api_port of second"),
        ({"gpus": [A, A]}, "named twice"),
        ({"gpus": ["MIG-1"]}, "nvidia-smi -L"),
        ({"gpus": [A, B]}, "the runner has 2 GPUs and needs 1"),
        ({"gpus": [A], "tensor_parallel_size": 2}, "has 1 GPUs and needs 2"),
        ({"gpus": [A, B, C], "runner_extra_args": ["-pp", "2"]}, "-parallel-size 2)"),
        ({"gpus": [A, B, C], "runner_extra_args": ["--pipeline=2"]}, "-parallel-size 2)"),
        ({"gpus": [A], "more_runners": [{**SECOND, "gpus": [B, C]}]}, "the runner second has 2"),
        (
            {"gpus": [A], "more_runners": [{**SECOND, "gpus": [A]}]},
            "the runner and the runner second are on GPU-aaaaaaaa",
        ),
        (
            {"gpus": [A], "gpu_memory_share": 0.5, "more_runners": [{**SECOND, "gpus": [A]}]},
            "gpu_memory_share = 0.45 for each of them",
        ),
        (
            {
                "gpus": [A],
                "gpu_memory_share": 0.5,
                "more_runners": [{**SECOND, "gpus": [A], "gpu_memory_share": 0.5}],
            },
            "1.00 together, more than 0.95",
        ),
        ({"verify_runner": "third"}, "there is only the first"),
        ({"verify_runner": "third", "more_runners": [SECOND]}, "there are second"),
        ({"runner_extra_args": ["-tp", "2"]}, "from the setting tensor_parallel_size"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_error(data: dict[str, Any], said: str) -> None:
    problems = refused(data)
    assert len(problems) == 1, problems
    assert said in next(iter(problems.values()))


def test_two_runners_share_one_gpu_when_each_says_how_much() -> None:
    share = {"gpus": [A], "gpu_memory_share": 0.4}
    first, second = runners_of(check({**share, "more_runners": [{**SECOND, **share}]}))
    assert first.settings.gpus == second.settings.gpus == [A]


def test_an_entry_takes_the_rest_from_its_host_but_no_gpu() -> None:
    ours = check(
        {
            "gpus": [A],
            "gpu_memory_share": 0.5,
            "engine_kv_gib": 3,
            "max_model_len": 16384,
            "more_runners": [{**SECOND, "served_model_name": "two"}],
        }
    )
    first, second = runners_of(ours)
    assert (first.service, first.settings) == ("runner", ours)
    assert (second.service, second.title) == ("runner-second", "the runner second")
    own = second.settings
    assert (own.api_port, own.served_model_name, own.engine_kv_gib) == (8001, "two", 3)
    assert (own.gpus, own.gpu_memory_share, own.max_model_len) == ([], None, 16384)


def test_the_restart_test_asks_the_first_unless_another_is_named() -> None:
    assert asked_runner(two()).service == "runner"
    chosen = asked_runner(check({"more_runners": [SECOND], "verify_runner": "second"}))
    assert (chosen.service, chosen.settings.api_port) == ("runner-second", 8001)


def test_the_digest_of_one_runner_is_what_it_was_before_there_could_be_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[dict[str, Any]] = []

    def dumps(data: dict[str, Any], **_: object) -> str:
        digested.append(data)
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(json, "dumps", dumps)
        settings_digest(check({}))
    ours = {"more_runners", "gpus", "gpu_memory_share", "tensor_parallel_size", "verify_runner"}
    assert not ours & set(digested[0])
    assert settings_digest(two()) != settings_digest(check({}))
    assert settings_digest(check({"tensor_parallel_size": 2})) != settings_digest(check({}))


# Services


def described(ours: Settings, **more: Any) -> dict[str, Any]:
    made = services(ours, ours.paths, NAMESPACE, with_key=False, **more)
    return {one.name: json.loads(one.launch_spec(ours.paths)) for one in made}


def test_one_cache_server_one_pruner_and_a_service_for_each_runner() -> None:
    ours = two(served_model_name="two", engine_kv_gib=2)
    alone, both = described(check({})), described(ours)
    assert list(both) == ["cache", "runner", "runner-second", "pruner"]
    assert {name: both[name] for name in alone} == alone  # the first is as without the second
    second = both["runner-second"]
    base = "/var/lib/kvhost"
    assert second["copies"] == [[f"{base}/etc/vllm-second.yaml", f"{base}/run/vllm-second.yaml"]]
    assert second["argv"][-1] == f"{base}/run/vllm-second.yaml"
    assert second["record"] == f"{base}/run/runner-second.json"
    assert second["wait_for"] == alone["runner"]["wait_for"]
    assert second["env"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
    _, runner = runners_of(ours)
    config = vllm_config(runner.settings, ours.paths, with_key=False)
    first = vllm_config(ours, ours.paths, with_key=False)
    assert (config["port"], config["served-model-name"]) == (8001, ["two"])
    assert config["kv-transfer-config"] == first["kv-transfer-config"]
    assert {key for key in config if config[key] != first[key]} == {"port", "served-model-name"}


def test_gpus_reach_the_runner_by_uuid_and_parallelism_its_configuration() -> None:
    ours = check(
        {
            "gpus": [A, B],
            "tensor_parallel_size": 2,
            "more_runners": [{**SECOND, "gpus": [B, C], "gpu_memory_share": 0.4}],
            "gpu_memory_share": 0.5,
        }
    )
    made = described(ours, gpus=2)
    assert made["runner"]["env"]["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"
    assert made["runner-second"]["env"]["CUDA_VISIBLE_DEVICES"] == f"{B},{C}"
    assert made["runner-second"]["before"][0][-6:-2] == ["--uuid", B, "--uuid", C]
    assert "CUDA_VISIBLE_DEVICES" not in made["cache"]["env"]
    assert made["runner"]["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in described(check({}))["runner"]["env"]
    configs = [vllm_config(one.settings, ours.paths, with_key=False) for one in runners_of(ours)]
    assert [c["tensor-parallel-size"] for c in configs] == [2, 2]
    assert [c["gpu-memory-utilization"] for c in configs] == [0.5, 0.4]
    plain = vllm_config(check({}), ours.paths, with_key=False)
    assert not {"tensor-parallel-size", "gpu-memory-utilization"} & set(plain)


def test_a_unit_of_its_own_asks_its_own_runner() -> None:
    ours = two()
    made = services(ours, ours.paths, NAMESPACE, with_key=False)
    [second] = [one for one in made if one.name == "runner-second"]
    text = unit_text(second, ours, ours.paths, gpu=False)
    assert "Description=kvhost: vLLM second" in text
    assert "--runner runner-second" in text and "http://127.0.0.1:8001" in text
    assert "After=kvhost-cache.service" in text


def test_which_files_go_with_a_runner_that_goes() -> None:
    gone = ("kvhost-runner-gone.service", "runner-gone.json", "vllm-gone.yaml")
    stays = ("kvhost-runner.service", "model-digest", "runner.json")
    wanted = ("cache.json", "runner-second.json", "vllm-second.yaml", "vllm.yaml")
    there = [f"/b/etc/{name}" for name in (*gone, *stays, *wanted)]
    there.append("/b/bin/runner-gone.json")
    found = left_over(there, [f"/b/etc/{name}" for name in wanted], "/b/etc")
    assert found == [f"/b/etc/{name}" for name in gone]


# The plan


def test_each_runner_is_a_step_of_the_plan() -> None:
    names = [name for name, _, _ in planned(two())]
    assert names == ["cache", "pruner", "runner", "runner-second"]
    rows = [service(n, i) for i, n in enumerate(("runner", "cache", "pruner"))]
    large = {"memory.available": 12 * GIB}
    host = {**installed_host(), **large, "kvhost.services": ok(rows)}
    got = plan(host, more_runners=[SECOND])
    assert got.refusals == ()
    assert action(got, "the runner second").cost == "starts the runner second"
    host["kvhost.services"] = ok([*rows, service("runner-second", 7)])
    assert action(plan(host, more_runners=[SECOND]), "the runner second").state == "keep"


def test_the_port_of_each_runner_must_be_free() -> None:
    taken = {"ports.listening": [listener(port=8001)], "memory.available": 12 * GIB}
    [refusal] = plan(taken, more_runners=[SECOND]).refusals
    assert (refusal.code, refusal.what) == ("port_taken", "port 8001 (api_port of second) is taken")


def memory(got: Plan) -> str:
    [refusal] = [one for one in got.refusals if one.code == "ram_too_small"]
    return refusal.needed


def test_memory_is_added_up_over_runners_and_ranks() -> None:
    small: dict[str, Any] = {"memory.available": 6 * GIB}
    # weights 1 GiB, engine_kv_gib 1, l1_gib 1, processes 3.5: 6.5 of one
    assert "6.5 GiB: weights 1 GiB, engine_kv_gib 1 GiB, l1_gib 1 GiB" in memory(plan(small))
    more = plan(small, more_runners=[{**SECOND, "engine_kv_gib": 4}])
    assert memory(more) == (
        "14 GiB: weights 2 GiB, engine_kv_gib 5 GiB (1 + 4 of 2 runners), l1_gib 1 GiB, "
        "processes 6 GiB"
    )
    wide = plan(small, tensor_parallel_size=2)
    assert "10 GiB: weights 1 GiB, engine_kv_gib 2 GiB, l1_gib 1 GiB" in memory(wide)


TWO_GPUS = BY_ID["two 4090 without NVSwitch, where the fabric manager has nothing to do"]


def gpu_plan(**settings: Any) -> Plan:
    """Of a host with the GPUs A and B."""
    case = copy.deepcopy(TWO_GPUS)
    for gpu, uuid in zip(case["smi"]["gpus"], (A, B), strict=True):
        gpu.append(f"uuid:{uuid}")
    return on_gpu(case, {"memory.available": 64 * GIB}, **settings)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"gpus": [A]}, None, ""),
        ({"gpus": [C]}, "gpu_unknown", f"{A} (NVIDIA GeForce RTX 4090), {B}"),
        ({"more_runners": [SECOND]}, "gpu_not_chosen", "gpus of each of the runner and the runner"),
        ({"gpus": [A], "more_runners": [{**SECOND, "gpus": [B]}]}, None, ""),
        ({"gpus": [A], "more_runners": [SECOND]}, "gpu_not_chosen", "none for the runner second"),
        ({"gpus": [A], "more_runners": [{**SECOND, "gpus": [C]}]}, "gpu_unknown", C),
    ],
)
def test_which_gpu_each_runner_takes(
    settings: dict[str, Any], code: str | None, words: str
) -> None:
    got = gpu_plan(**settings)
    assert set(codes(got)) == ({code} if code else set())
    assert words in str(got.refusals)


def test_gpus_on_a_host_with_an_engine_for_the_cpu() -> None:
    [refusal] = plan({}, gpus=[A]).refusals
    assert refusal.code == "gpus_without_cuda"
    assert refusal.needed == "a lock for CUDA: gpus is set for the runner"


def test_heads_that_cannot_be_shared_out() -> None:
    need = ModelNeed(GIB, 8192, 40960, heads=12, kv_heads=4)
    facts, large = replace(FACTS, model=need), changed({"memory.available": 64 * GIB})
    [refusal] = make_plan(Settings(tensor_parallel_size=8), large, facts).refusals
    assert refusal.code == "heads_not_divisible"
    assert refusal.fix == "tensor_parallel_size = one of 1, 2, 3, 4, 6, 12"
    assert make_plan(Settings(tensor_parallel_size=4), large, facts).refusals == ()


def test_more_ranks_than_kv_heads_hold_a_whole_head_each() -> None:
    need = ModelNeed(8, 4096, 1, heads=16, kv_heads=4)
    assert [need.kv_of_rank(n) for n in (1, 2, 4, 8)] == [4096, 2048, 1024, 1024]
    assert need.kv_of_rank(2, 2) == 1024
    assert need.weights_of_rank(4) == 2


# On the host


def test_a_way_back_takes_away_the_runners_that_were_added_since(tmp_path: Path) -> None:
    base = Passed(tmp_path)
    base.settle()
    base.deploy("2")
    added = ("runner-b.json", "vllm-b.yaml", "kvhost-runner-b.service")
    for name in (*added, "notes.json"):
        (base.root / "etc" / name).write_text("{}")
    base.call("back", "--user", "u", "--why", "x", "--lock", "l", "--settings", "s")
    left = {path.name for path in (base.root / "etc").iterdir()}
    assert base.current() == "1"
    assert not left & set(added)
    assert {"runner.json", "vllm.yaml", "notes.json"} <= left


def test_a_removal_takes_along_what_a_run_without_a_receipt_left(tmp_path: Path) -> None:
    base = Removed(tmp_path)
    stranger = base.root / "etc/of-others"
    for name in ("runner-b.json", "vllm-b.yaml", "kvhost-runner-b.service", stranger.name):
        (base.root / "etc" / name).write_text("x")
    base.call()
    assert {n for n in base.left() if n.startswith("etc/")} == {"etc/of-others"}


def test_its_own_requests_are_counted_for_each_runner(tmp_path: Path) -> None:
    for name, pid in (("runner", 1), ("runner-b", 2)):
        put(tmp_path / f"run/{name}.json", json.dumps({"pid": pid, "start_ticks": 7}))
    (tmp_path / "state").mkdir()
    for name in ("runner", "runner-b", "runner-b"):
        ready.count_own_request(str(tmp_path), name)
    counts = {
        path.name: json.loads(path.read_text()) for path in (tmp_path / "state").glob("own-*")
    }
    assert counts == {
        "own-requests.json": {"pid": 1, "start_ticks": 7, "count": 1},
        "own-requests-b.json": {"pid": 2, "start_ticks": 7, "count": 2},
    }


# The real supervisord, doubles in the place of the engine


class Wide(Base):
    """A host with a further runner, until it is dropped."""

    order: tuple[str, ...] = (*ORDER[:2], "runner-second", "pruner")

    def drop(self) -> None:
        self.order = ORDER
        (self.root / "etc/runner-second.json").unlink()
        self.render()


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Wide]:
    made = Wide(tmp_path)
    made.call("ensure")
    yield made
    ended(made)


def test_a_runner_that_is_dropped_goes_and_the_others_stay(wide: Wide) -> None:
    before = wide.pids()
    assert list(before) == ["cache", "runner", "runner-second", "pruner"]
    assert wide.good()
    assert "no service runner-third; there are cache, runner, runner-second" in wide.call(
        "stop", "runner-third", rc=2
    )
    wide.call("restart", "runner-second")
    assert {n for n, pid in wide.pids().items() if pid != before[n]} == {"runner-second"}
    gone = wide.pids()["runner-second"]
    wide.drop()
    assert wide.status()["supervisor_fresh"] is False
    wide.call("ensure")
    assert wide.good()
    assert not lives(gone)
    after = wide.pids()
    assert (after["cache"], after["runner"]) == (before["cache"], before["runner"])


class Changing(Base):
    """A host with vLLM's services, until its settings name another runner."""

    def change(self) -> None:
        self.order = ("runner", "slots", "pruner")
        self.codes["slots"], self.more["slots"] = self.codes["runner"], {}
        self.codes["runner"] += "  # another program"
        (self.root / "etc/cache.json").unlink()
        self.render()


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Changing]:
    made = Changing(tmp_path)
    made.call("ensure")
    yield made
    ended(made)


def test_another_runner_takes_the_services_of_the_old_one_away(changing: Changing) -> None:
    before = changing.pids()
    assert list(before) == ["cache", "runner", "pruner"]
    changing.change()
    changing.call("ensure")
    assert changing.good()
    after = changing.pids()
    assert list(after) == ["runner", "slots", "pruner"]
    assert not lives(before["cache"]) and not lives(before["runner"])
    assert after["pruner"] == before["pruner"]
    assert "no service cache" in changing.call("stop", "cache", rc=2)
