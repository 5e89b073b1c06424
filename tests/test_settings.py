"""The settings: what is taken, what is refused, what they are together, their digest."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvhost.paths import HostPaths
from kvhost.schema.drive_values import bytes_of
from kvhost.schema.drives import CRITERIA
from kvhost.settings import Settings, SettingsError, field_notes, settings_digest, validate_hosts
from tests.settings_cases import (
    ACCEPTED,
    COMBINATIONS,
    COMPANIONS,
    DEFAULTS,
    HF_TOKEN,
    PYINFRA,
    REFUSED,
    REVISION,
    check,
    refused,
)

REPOSITORY = Path(__file__).resolve().parents[1]


PARSE = """
import json, sys
from pyinfra_cli.util import parse_cli_arg
print(json.dumps(parse_cli_arg(sys.argv[1])))
"""


def parse_cli_arg(typed: str) -> object:
    """What pyinfra makes of a value of --data. In a process of its own: pyinfra_cli patches the
    threads, sockets and processes of whoever imports it."""
    argv = [sys.executable, "-c", PARSE, typed]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    parsed: object = json.loads(done.stdout)
    return parsed


def test_nothing_set_gives_the_defaults() -> None:
    assert check({}).model_dump() == DEFAULTS


def test_a_default_is_valid_when_it_is_written_out() -> None:
    assert check(dict(DEFAULTS)) == check({})


@pytest.mark.parametrize("key", DEFAULTS)
def test_the_example_of_a_setting_is_valid(key: str) -> None:
    example = field_notes(key)["example"]
    checked = check({key: example, **COMPANIONS.get(key, {})})
    assert checked.model_dump(exclude_none=True)[key] == example


def test_a_setting_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        check({}).api_port = 1


def test_paths_follow_base_dir_and_tier_dir() -> None:
    inside = check({"base_dir": "/srv/kv"})
    assert inside.paths == HostPaths("/srv/kv", "/srv/kv/tier")
    outside = check({"tier_dir": "/mnt/nvme/kv"})
    assert outside.paths == HostPaths("/var/lib/kvhost", "/mnt/nvme/kv")
    assert outside.resolved_tier_dir == "/mnt/nvme/kv"


@pytest.mark.parametrize(("key", "value"), ACCEPTED)
def test_accepted(key: str, value: object) -> None:
    assert getattr(check({key: value}), key) == value


@pytest.mark.parametrize(("key", "value", "said"), REFUSED)
def test_refused(key: str, value: object, said: str) -> None:
    problems = refused({key: value})
    assert set(problems) == {key}, "one problem, and no other"
    assert said in problems[key]
    line = problems[key].partition(" | ")[2].partition(" (text")[0]
    assert line.startswith(f"{key} = "), "and a line to write"
    check({key: ast.literal_eval(line.partition(" = ")[2]), **COMPANIONS.get(key, {})})


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


def test_a_claimed_drive_takes_the_cache_with_it() -> None:
    assert not check({}).claims_a_drive
    for key in CRITERIA:
        assert check({key: field_notes(key)["example"]}).claims_a_drive, key
    drive: dict[str, object] = {"drive_serial": "S1x"}
    assert check(drive).resolved_tier_dir == "/var/lib/kvhost/drive/tier"
    assert check({**drive, "drive_mount": "/srv/d"}).resolved_tier_dir == "/srv/d/tier"
    assert check({**drive, "drive_mount": "/srv/d", "tier_dir": "/srv/d/kv"}).resolved_tier_dir == (
        "/srv/d/kv"
    )


def test_sizes_are_what_they_say() -> None:
    assert bytes_of("2TB") == 2 * 10**12 and bytes_of("1.8TiB") == 1979120929997
    assert bytes_of("500 GB") == 5 * 10**11 and bytes_of("1MiB") == 1 << 20


@pytest.mark.parametrize("place", ["--data", "the data of a group"])
def test_a_token_to_erase_is_taken_from_the_hosts_own_data_alone(place: str) -> None:
    data: dict[str, object] = {"drive_serial": "S1x", "drive_erase": f"erase-{'0' * 32}"}
    validate_hosts({"one": data}, PYINFRA, {}, {"two": {"drive_erase": place}})
    with pytest.raises(SettingsError) as caught:
        validate_hosts({"one": data}, PYINFRA, {}, {"one": {"drive_erase": place}})
    (problem,) = caught.value.problems
    assert problem.key == "drive_erase" and place in problem.what
    validate_hosts({"one": data}, PYINFRA, {}, {"one": {"drive_serial": place}})


def test_the_controller_is_rebooted_only_with_consent() -> None:
    data: dict[str, object] = {"verify_events": ["both", "reboot"]}
    for name, changes in (("web-1", {}), ("@local", {"reboot_local": True})):
        validate_hosts({name: {**data, **changes}}, PYINFRA, {})
    with pytest.raises(SettingsError) as caught:
        validate_hosts({"@local": data, "web-1": data}, PYINFRA, {})
    [(problem, hosts)] = caught.value.problems.items()
    assert (problem.key, list(hosts)) == ("verify_events, reboot_local", ["@local"])


def test_the_driver_of_the_controller_itself_is_not_rebooted_for() -> None:
    data = {"driver_install": True, "driver_reboot": True}
    assert validate_hosts({"web-1": data}, frozenset(), {})["web-1"].driver_reboot
    with pytest.raises(SettingsError) as caught:
        validate_hosts({"web-1": data, "@local": data}, frozenset(), {})
    [(problem, hosts)] = caught.value.problems.items()
    assert (problem.key, list(hosts)) == ("driver_reboot", ["@local"])


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


# ---- the digest


def test_the_digest_is_stable() -> None:
    assert settings_digest(Settings()) == settings_digest(check({}))
    assert settings_digest(check({"cache_limit_gib": 20})) == settings_digest(Settings())
    written_out = check({"tier_dir": "/var/lib/kvhost/tier"})
    assert settings_digest(written_out) == settings_digest(Settings())
    assert len(settings_digest(Settings())) == 64


STAYS_ON_THE_CONTROLLER = {
    *(
        "engine_lock",
        "engine_bundle",
        "hf_token_file",
        "hf_endpoint",
        "api_key_file",
        "break_lock",
        "disrupt",
    ),
    "retry_failed",
    "remove_cache",
    "remove_models",
    "verify_runner",
    *("verify", "verify_prompt_tokens", "verify_min_hit"),
    *("verify_events", "reboot_local"),
    *("driver_install", "driver_reboot", "driver_version", "driver_repository"),
    "driver_repository_key",
    *("drive_adopt", "drive_blank_check", "drive_erase"),
    *("monitoring", "monitoring_textfile_dir"),  # reach the host, but not what is proven of it
    *("shared_tier_password_file", "shared_tier_ca_file"),  # files on the controller
    *("shared_store_address", "shared_store_port", "shared_store_memory_gib"),
    *("shared_store_eviction", "shared_store_persistence"),  # of a store, not of its host's engine
    *("shared_store_cert_file", "shared_store_key_file"),
}


#: set with their companion, or not at all
TOGETHER = (
    *("model_revision", "driver_repository", "driver_repository_key"),
    *("shared_store_cert_file", "shared_store_key_file"),
    *("shared_tier", "shared_tier_password_file", "shared_store_address"),
    "shared_tier_access_key",
)


# The runner and the kind of cache have one value only in this version.
@pytest.mark.parametrize("key", sorted(DEFAULTS.keys() - {"runner", "cache_kind"}))
def test_the_digest_follows_what_reaches_the_host_and_nothing_else(key: str) -> None:
    value = "other" if key == "service_user" else field_notes(key)["example"]
    companions = COMPANIONS.get(key, {})
    without = check(companions if key not in TOGETHER else {})
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
