"""The description of the services: their arguments, and that no secret is in a rendered file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from kvhost.onhost import evidence_probe
from kvhost.onhost.model_builtin import DIGEST
from kvhost.services import describe, second_pair, served, vllm
from kvhost.services.service import Service
from kvhost.settings import Settings

TEMPLATES = Path(__file__).parent.parent / "templates"
NAMESPACE = "/data/tier/ns-" + "a" * 24
BASE = "/var/lib/kvhost"


def settings(**more: Any) -> Settings:
    return Settings.model_validate(more)


def described(with_key: bool = False, **more: Any) -> dict[str, Service]:
    ours = settings(**more)
    made = describe.services(ours, ours.paths, NAMESPACE, with_key=with_key)
    return {service.name: service for service in made}


def spec(service: Service) -> Any:
    return json.loads(service.launch_spec(settings().paths))


def option(argv: tuple[str, ...], name: str) -> str:
    assert argv.count(name) == 1, argv
    return argv[argv.index(name) + 1]


def supervisord_conf(**more: Any) -> str:
    loader = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined
    )
    template = loader.get_template("supervisord.conf.j2")
    return template.render(paths=settings(**more).paths, services=described(**more).values())


def test_they_start_in_order_cache_runner_pruner() -> None:
    found = described()
    assert list(found) == ["cache", "runner", "pruner"]
    priorities = [service.priority for service in found.values()]
    assert priorities == sorted(priorities)
    assert found["runner"].wait_for == ("127.0.0.1:5555",)


def test_only_an_engine_for_gpus_waits_for_them() -> None:
    ours = settings()
    made = describe.services(ours, ours.paths, NAMESPACE, with_key=False, gpus=4)
    cache, runner, pruner = (json.loads(one.launch_spec(ours.paths))["before"] for one in made)
    gate = f"{BASE}/tools/current/bin/python {BASE}/bin/gpu_gate.py --expect 4 --wait 120".split()
    assert runner[0] == gate
    assert gate not in cache + pruner
    assert "gpu_gate" not in "".join(one.launch_spec(ours.paths) for one in described().values())


def test_a_key_is_named_by_its_file_and_never_by_its_value() -> None:
    found = described(with_key=True)
    assert found["runner"].secret_env == {"VLLM_API_KEY": f"{BASE}/secrets/api-key"}
    assert not described()["runner"].secret_env
    text = "".join(service.launch_spec(settings().paths) for service in found.values())
    assert "--api-key" not in text
    assert not found["cache"].secret_env
    assert not found["pruner"].secret_env
    for service in found.values():
        assert not [name for name in service.env if re.search("KEY|TOKEN|SECRET", name)]
    # supervisord is given no environment of a service, so that its file is nobody's secret
    assert "environment" not in supervisord_conf()


def test_the_cache_servers_arguments() -> None:
    cache = described(cache_port=6001, cache_http_port=6002, l1_gib=3, chunk_size=512)["cache"]
    argv = cache.argv
    assert argv[:2] == (f"{BASE}/current/bin/lmcache", "server")
    assert option(argv, "--host") == option(argv, "--http-host") == "127.0.0.1"
    assert (option(argv, "--port"), option(argv, "--http-port")) == ("6001", "6002")
    assert option(argv, "--l1-size-gb") == option(argv, "--l1-init-size-gb") == "3"
    assert option(argv, "--chunk-size") == "512"
    assert option(argv, "--supported-transfer-mode") == "auto"  # else vLLM on CPU does not start
    assert json.loads(option(argv, "--l2-adapter"))["base_path"] == NAMESPACE


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_every_adapter_writes_into_the_namespace_and_has_no_cap_of_its_own(kind: str) -> None:
    adapter = vllm.l2_adapter(settings(l2_adapter=kind), NAMESPACE)
    assert adapter["type"] == kind
    assert NAMESPACE in json.dumps(adapter)
    assert not [key for key in adapter if re.search("max|size|cap|limit", key)]


def test_the_sweep_is_told_of_an_unclean_stop_and_of_the_current_namespace() -> None:
    cache = described(tier_dir="/data/tier")["cache"]
    stale, heal, sweep = cache.before
    assert heal[1:] == (f"{BASE}/bin/evidence_aside.py", "heal", "--tier", "/data/tier")
    assert stale[1:] == (
        f"{BASE}/bin/shm_sweep.py", "lmcache_l1_pool_kvhost-var-lib-kvhost", "lmcache_kv_*",
    )  # fmt: skip
    assert sweep[:3] == (f"{BASE}/tools/current/bin/python", f"{BASE}/bin/pruner.py", "sweep")
    assert option(sweep, "--tier") == "/data/tier"
    assert option(sweep, "--current") == "ns-" + "a" * 24
    assert sweep[-1] == "{unclean}"
    assert option(sweep, "--record") == f"{BASE}/run/cache.json"
    assert spec(cache)["before"] == [list(stale), list(heal), list(sweep)]


def test_the_cache_server_is_away_for_longer_than_two_heartbeats() -> None:
    assert described(heartbeat_s=4.0)["cache"].min_gap_s > 8
    assert spec(described(heartbeat_s=4.0)["cache"])["min_gap_s"] > 8


def test_the_runners_arguments() -> None:
    runner = described(runner_extra_args=["--max-num-seqs", "4"])["runner"]
    config, copy = f"{BASE}/etc/vllm.yaml", f"{BASE}/run/vllm.yaml"
    assert spec(runner)["copies"] == [[config, copy]]
    assert runner.argv == (
        f"{BASE}/current/bin/vllm", "serve", "--config", copy, "--max-num-seqs", "4",
    )  # fmt: skip
    # another model, another configuration, another environment: each restarts it
    modules = {f"{BASE}/lib/kvhost_guard.py", f"{BASE}/lib/kvhost_connector.py"}
    assert set(runner.watch) == {f"{BASE}/current", config, f"{BASE}/etc/model-digest", *modules}
    assert described()["cache"].watch == (f"{BASE}/current",)


def test_vllms_configuration_degrades_and_recovers_and_fails_no_request() -> None:
    ours = settings(api_port=9000, cache_port=6001, heartbeat_s=3.0, mq_timeout_s=11.0)
    config = vllm.vllm_config(ours, ours.paths, with_key=False)
    transfer = config["kv-transfer-config"]
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = transfer["kv_connector_extra_config"]
    assert extra["lmcache.mp.port"] == 6001
    assert (extra["lmcache.mp.heartbeat_interval"], extra["lmcache.mp.mq_timeout"]) == (3.0, 11.0)
    assert (config["host"], config["port"]) == ("127.0.0.1", 9000)
    # vLLM is given its time for the requests at work, and then half a minute to end
    assert config["shutdown-timeout"] == 30
    assert described(drain_s=45)["runner"].stop_timeout_s == 75
    assert not [key for key in config if "key" in key or "trust" in key]
    loader = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES))
    text = loader.get_template("vllm.yaml.j2").render(config=config)
    assert yaml.safe_load(text) == config


@pytest.mark.parametrize(
    ("source", "revision", "where", "name"),
    [
        ("builtin", None, f"{BASE}/models/builtin-{DIGEST[:16]}", "kvhost-builtin"),
        ("/srv/m/tiny", None, "/srv/m/tiny", "tiny"),
        ("org/name", "0123456789abcdef" + "0" * 24, f"{BASE}/models/org--name--0123456789ab",
         "name"),
        ("controller:m/llama-8B", None, f"{BASE}/models/sent--llama-8B", "llama-8B"),
        ("controller:llama", None, f"{BASE}/models/sent--llama", "llama"),
    ],
)  # fmt: skip
def test_where_a_model_lies_and_what_it_is_called(
    source: str, revision: str | None, where: str, name: str
) -> None:
    ours = settings(model_source=source, model_revision=revision)
    assert served.model_dir(ours, ours.paths) == where
    assert served.served_name(ours) == name
    assert served.served_name(settings(served_model_name="mine")) == "mine"


def test_models_lie_on_the_claimed_drive_and_the_runner_waits_for_it() -> None:
    drive = settings(model_source="controller:m/llama", drive_serial="S1x")
    assert served.model_dir(drive, drive.paths) == f"{BASE}/drive/models/sent--llama"
    set_elsewhere = drive.model_copy(update={"model_dir": "/srv/m"})
    assert served.model_dir(set_elsewhere, drive.paths) == "/srv/m/sent--llama"
    for ours, waits in ((drive, f"{BASE}/drive"), (set_elsewhere, None), (settings(), None)):
        runner = vllm.runner_service(ours, ours.paths, with_key=False)
        assert runner.needs_mount == waits
    builtin = settings(drive_serial="S1x")
    assert served.model_dir(builtin, builtin.paths).startswith(f"{BASE}/models/builtin-")
    assert vllm.runner_service(builtin, builtin.paths, with_key=False).needs_mount is None


def test_the_built_in_model_is_asked_for_in_float32_unless_somebody_says_otherwise() -> None:
    assert vllm.dtype(settings()) == "float32"
    assert vllm.dtype(settings(dtype="bfloat16")) == "bfloat16"
    assert vllm.dtype(settings(model_source="/srv/m")) == "auto"


def test_all_that_an_engine_writes_lies_in_the_service_users_home() -> None:
    ours = settings(base_dir="/srv/kv", engine_kv_gib=2)
    env = vllm.service_env(ours, ours.paths)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT", "HF_HOME",
                 "PYTHONPYCACHEPREFIX"):  # fmt: skip
        assert env[name].startswith("/srv/kv/home/"), name
    assert env["HOME"] == "/srv/kv/home"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert vllm.service_env(ours, ours.paths) == env
    assert described()["runner"].env == {**described()["cache"].env, "PYTHONPATH": f"{BASE}/lib"}


def test_with_a_key_every_path_of_the_api_is_guarded() -> None:
    ours = settings()
    assert "middleware" not in vllm.vllm_config(ours, ours.paths, with_key=False)
    guarded = vllm.vllm_config(ours, ours.paths, with_key=True)
    assert guarded["middleware"] == ["kvhost_guard.Guard"]


def test_the_pruner_is_given_the_limits_in_bytes() -> None:
    argv = described(cache_limit_gib=1.5, free_floor_gib=0.5, pruner_interval_s=7.0)["pruner"].argv
    assert option(argv, "--limit-bytes") == str(3 << 29)
    assert option(argv, "--free-floor-bytes") == str(1 << 29)
    assert float(option(argv, "--interval")) == 7
    assert option(described()["pruner"].argv, "--limit-bytes") == str(20 << 30)
    on_a_drive = described(drive_serial="S1")["pruner"].argv
    assert option(on_a_drive, "--limit-bytes") == "all"
    on_a_drive = described(drive_serial="S1", cache_limit_gib=3.0)["pruner"].argv
    assert option(on_a_drive, "--limit-bytes") == str(3 << 30)
    assert (option(argv, "--high"), option(argv, "--low")) == ("0.95", "0.85")
    assert option(argv, "--current") == "ns-" + "a" * 24


def test_services_of_the_tier_need_its_drive() -> None:
    assert all("drive" not in spec(service) for service in described().values())
    on_a_drive = described(drive_serial="S1")
    wanted = {"mount": f"{BASE}/drive", "record": f"{BASE}/state/drive.json"}
    assert [spec(on_a_drive[name]).get("drive") for name in ("cache", "pruner", "runner")] == [
        wanted, wanted, None,
    ]  # fmt: skip


def test_what_launch_reads_is_whole() -> None:
    for service in described(with_key=True).values():
        data = spec(service)
        assert data["record"] == f"{BASE}/run/{service.name}.json"
        assert data["argv"] == list(service.argv)
        assert data["env"] == service.env
        assert data["stop_timeout_s"] == service.stop_timeout_s
        assert data["secret_env"] == service.secret_env
        assert data["wait_for"] == list(service.wait_for)
        unit = f"{BASE}/etc/kvhost-{service.name}.service"  # without systemd there is none
        assert data["watch"] == [*service.watch, unit]
        assert data["require"] == list(service.require)
        assert data["log"] == f"{BASE}/log/{service.name}.log"


def test_supervisords_file_starts_each_through_launch_and_outwaits_it() -> None:
    text = supervisord_conf()
    for service in described().values():
        part = text.partition(f"[program:{service.name}]")[2].partition("[program:")[0]
        command = f"command={BASE}/tools/current/bin/python {BASE}/bin/launch.py"
        assert f"{command} {BASE}/etc/{service.name}.json\n" in part
        wait = re.search(r"stopwaitsecs=(\d+)", part)
        assert wait
        assert int(wait[1]) > service.stop_timeout_s
        assert "autorestart=true" in part
    assert "chmod=0700" in text
    assert "inet_http_server" not in text


def test_two_installations_share_no_memory_segment() -> None:
    one, two = settings(base_dir="/a/kv").paths, settings(base_dir="/b/kv").paths
    assert vllm.shm_name(one) != vllm.shm_name(two)


def test_a_second_pair_is_the_first_on_other_ports_and_nothing_it_leaves_is_shared() -> None:
    own = settings()
    paths = own.paths
    given = second_pair.second_pair(own, paths, NAMESPACE, with_key=True)
    ports = {"api_port": 41001, "cache_port": 41002, "cache_http_port": 41003}
    pair = evidence_probe.filled(given, ports)
    cache, runner = pair["cache"]["argv"], pair["runner"]["argv"]
    assert (option(cache, "--port"), option(cache, "--http-port")) == ("41002", "41003")
    assert option(runner, "--port") == "41001" and option(runner, "--host") == "127.0.0.1"
    extra = json.loads(option(runner, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["lmcache.mp.port"] == 41002
    first = described()
    assert option(cache, "--l2-adapter") == option(first["cache"].argv, "--l2-adapter")
    assert option(cache, "--shm-name") != option(first["cache"].argv, "--shm-name")
    for name, one in pair.items():
        assert one["record"] == f"{BASE}/run/other-{name}.json"
        assert one["before"] == []  # a sweep would take what the first pair uses for stale
    assert pair["runner"]["wait_for"] == ["127.0.0.1:41002"]
    assert pair["runner"]["copies"] == [[f"{BASE}/etc/vllm.yaml", f"{BASE}/run/other-vllm.yaml"]]
    assert option(runner, "--config") == f"{BASE}/run/other-vllm.yaml"
    assert "{" + "api_port" not in json.dumps(pair)
