"""The settings: unknown keys, flags of the runner, secrets, many hosts, odd values."""

from __future__ import annotations

import math

import pytest

from kvhost.schema.problems import holds_a_secret, names_a_secret, shown
from kvhost.schema.runner_args import DENIED, flag_name, why_denied
from kvhost.settings import Settings, SettingsError, settings_digest, validate_hosts
from tests.settings_cases import DEFAULTS, HF_TOKEN, PYINFRA, SHA, check, refused

# ---- flags of the runner


# Written out, so that a flag that falls out of the table is missed.
MUST_BE_DENIED = (
    *("--enable-log-requests", "--enable-log-outputs"),
    *("--api-key", "--block-size", "--code-revision", "--config", "--default-mm-loras"),
    *("--disable-log-stats", "--dtype", "--enable-lora", "--enable-prompt-tokens-details"),
    *("--enable-ssl-refresh", "--grpc", "--grpc-port", "--headless", "--help", "--hf-token"),
    *("--tensor-parallel-size", "--gpu-memory-utilization"),
    *(
        "--shutdown-timeout",
        "--host",
        "--kv-cache-dtype",
        "--kv-offloading-backend",
        "--kv-offloading-size",
    ),
    *("--kv-transfer-config", "--load-format", "--lora-modules", "--max-model-len", "--model"),
    *("--port", "--revision", "--served-model-name", "--ssl-ca-certs", "--ssl-cert-reqs"),
    *("--ssl-certfile", "--ssl-ciphers", "--ssl-keyfile", "--swap-space"),
    *("--tokenizer-revision", "--trust-remote-code", "--uds"),
)


def test_the_denied_flags_are_these() -> None:
    assert set(DENIED) == set(MUST_BE_DENIED)


@pytest.mark.parametrize("flag", MUST_BE_DENIED)
def test_a_denied_flag_is_refused_in_every_form(flag: str) -> None:
    forms = [flag, f"{flag}=x", f"{flag}.key=x", "--no-" + flag[2:], flag[:-1]]
    forms.append("--" + flag[2:].replace("-", "_"))
    for form in forms:
        problems = refused({"runner_extra_args": ["--seed", "1", form]})
        said = problems["runner_extra_args"]
        assert "is not for runner_extra_args: " in said, form
        if form != flag[:-1]:
            assert "vLLM reads it as" not in said, "the flag itself, not the beginning of another"


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
        ("-t", "tensor_parallel_size"),  # argparse takes it for -tp
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
    own = f"{meant} = the value that was given"
    line = f"{meant} (pyinfra's own)" if meant in PYINFRA else own
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
        ("gpu_memory_utilization", "gpu_memory_share"),
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


def test_a_size_without_a_unit_is_not_answered_with_quotes() -> None:
    told = refused({"drive_serial": "X", "drive_min_size": 2000})["drive_min_size"]
    assert "'1.9TB'" in told
    assert "--data" not in told
