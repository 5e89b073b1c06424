"""The settings of the runner Ollama, and the environment that its server is given."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost.ollama.dropin import DROP_IN, clashes, dropin_text, variables
from kvhost.onhost.ollama_sets import sets_of
from kvhost.schema.ollama_combinations import MEANINGLESS
from kvhost.settings import Settings, SettingsError, field_notes, settings_digest
from tests.settings_cases import COMPANIONS, SHA, check, refused

pytestmark = pytest.mark.runners
LEAST: dict[str, object] = {"runner": "ollama", "model_source": "llama3.2:3b"}


def test_the_least_that_is_to_be_said() -> None:
    found = check(LEAST)
    assert (found.api_port, found.api_host) == (11434, "127.0.0.1")
    assert check({**LEAST, "api_port": 8000}).api_port == 8000
    assert check({}).api_port == 8000


@pytest.mark.parametrize("key", sorted(MEANINGLESS.keys() - {"cache_kind"}))
def test_what_means_nothing_is_refused_with_its_reason(key: str) -> None:
    value = field_notes(key)["example"]
    companions = {k: v for k, v in COMPANIONS.get(key, {}).items() if k not in LEAST}
    if key == "shared_tier_password_file":  # with a store it means something
        companions = {}
    told = refused({**LEAST, **companions, key: value})
    assert MEANINGLESS[key] in told[f"runner, {key}"]


def test_a_default_that_is_written_out_is_none() -> None:
    assert check({**LEAST, "chunk_size": 256, "verify_events": ["both"]}) == check(LEAST)


@pytest.mark.parametrize("part", ["m-00001-of-00002.gguf", "m-00007-of-00010.GGUF"])
def test_a_part_of_a_split_model_is_refused(part: str) -> None:
    told = refused({**LEAST, "model_source": f"/srv/{part}"})
    assert "a part of a split model" in told["runner, model_source"]
    for whole in ("m-00001-of-00001.gguf", "m.gguf"):
        assert check({**LEAST, "model_source": f"/srv/{whole}"})


def test_all_that_is_wrong_comes_at_once() -> None:
    told = refused(
        {
            "runner": "ollama",
            "tier_dir": "/mnt/nvme/kv",
            "chunk_size": 512,
            "runner_extra_args": ["--max-num-seqs", "4"],
            "api_host": "0.0.0.0",
            "ollama_kv_cache_type": "q8_0",
            "ollama_flash_attention": "off",
        }
    )
    assert set(told) == {
        "runner, tier_dir",
        "runner, chunk_size",
        "runner, runner_extra_args",
        "runner, model_source",
        "api_host, ollama_open",
        "ollama_flash_attention, ollama_kv_cache_type",
    }


@pytest.mark.parametrize("key", ["ollama_keep_alive", "ollama_kv_cache_type"])
def test_its_settings_are_refused_with_another_runner(key: str) -> None:
    told = refused({key: field_notes(key)["example"]})
    assert "runner = 'ollama'" in told[f"runner, {key}"]


def test_a_model_of_its_library_is_refused_with_another_runner() -> None:
    assert "Ollama's library" in refused({"model_source": "llama3.2:3b"})["runner, model_source"]


MODELS = ("llama3.2:3b", "user/model:latest", "qwen3:0.6b-q4_K_M", "/srv/models/a.gguf")


@pytest.mark.parametrize("source", MODELS)
def test_models_that_it_takes(source: str) -> None:
    assert check({**LEAST, "model_source": source}).model_source == source


@pytest.mark.parametrize("source", ["llama3.2", "builtin", "controller:models/a", "A:b", "a:b:c"])
def test_models_that_it_does_not_take(source: str) -> None:
    with pytest.raises(SettingsError):
        check({**LEAST, "model_source": source})


ARCHIVES = {
    f"/srv/ollama.tgz#sha256={SHA}": None,
    f"controller:ollama.tar.zst#sha256={SHA}": None,
    f"https://example.org/ollama-linux-amd64.tgz#sha256={SHA}": None,
    "/srv/ollama.tgz": "#sha256=",
    f"ollama.tgz#sha256={SHA}": "URL",
    f"controller:#sha256={SHA}": "no file",
    f"https://u:secret@example.org/o.tgz#sha256={SHA}": "no user, password",
}


@pytest.mark.parametrize("value", ARCHIVES)
def test_archives(value: str) -> None:
    said = ARCHIVES[value]
    if said is None:
        assert check({**LEAST, "ollama_archive": value}).ollama_archive == value
        return
    told = refused({**LEAST, "ollama_archive": value})["ollama_archive"]
    assert said in told
    assert "secret" not in told


def settings(**given: object) -> Settings:
    return check({**LEAST, **given})


#: settings -> variables, beside the address
VARIABLES: list[tuple[dict[str, object], dict[str, str]]] = [
    ({}, {"OLLAMA_KV_CACHE_TYPE": "f16"}),
    (
        {"ollama_kv_cache_type": "q8_0"},
        {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"},
    ),
    (
        {"ollama_flash_attention": "off"},
        {"OLLAMA_KV_CACHE_TYPE": "f16", "OLLAMA_FLASH_ATTENTION": "0"},
    ),
    (
        {"ollama_num_parallel": 4, "ollama_keep_alive": "-1", "max_model_len": 8192},
        {
            "OLLAMA_KV_CACHE_TYPE": "f16",
            "OLLAMA_NUM_PARALLEL": "4",
            "OLLAMA_KEEP_ALIVE": "-1",
            "OLLAMA_CONTEXT_LENGTH": "8192",
        },
    ),
    (
        {"ollama_archive": f"/a.tgz#sha256={SHA}"},
        {"OLLAMA_KV_CACHE_TYPE": "f16", "OLLAMA_MODELS": "/var/lib/kvhost/models/ollama"},
    ),
    (
        {"model_dir": "/mnt/nvme/models"},
        {"OLLAMA_KV_CACHE_TYPE": "f16", "OLLAMA_MODELS": "/mnt/nvme/models/ollama"},
    ),
]


@pytest.mark.parametrize(("given", "wanted"), VARIABLES)
def test_the_server_is_given_what_was_asked_for_and_no_more(
    given: dict[str, object], wanted: dict[str, str]
) -> None:
    found = variables(settings(**given))
    assert found.pop("OLLAMA_HOST") == "127.0.0.1:11434"
    assert found == wanted


def test_the_drop_in_says_what_it_sets() -> None:
    """As the script on the host reads it, which reads as systemd does."""
    made = settings(ollama_kv_cache_type="q4_0", api_host="::1", api_port=11500)
    text = dropin_text(made, made.paths)
    rows, files = sets_of(DROP_IN, text)
    assert {row["variable"]: row["value"] for row in rows} == variables(made)
    assert "OLLAMA_HOST=[::1]:11500" in text
    assert text.startswith("# Written by kvhost for /var/lib/kvhost. ")
    assert not files


FRAGMENT = "/etc/systemd/system/ollama.service"
FOLDER = f"{FRAGMENT}.d"


def row(file: str, value: str | None, last: bool = False) -> dict[str, Any]:
    name = "OLLAMA_KV_CACHE_TYPE"
    return {"file": file, "line": 3, "variable": name, "value": value, "last": last}


#: what else sets it -> None: nothing is to be said; else whether theirs wins
CLASHES: dict[str, tuple[list[dict[str, Any]], bool | None]] = {
    "nobody": ([], None),
    "ours alone": ([row(DROP_IN, "q8_0")], None),
    "the unit": ([row(FRAGMENT, "f16")], False),
    "the unit, the same": ([row(FRAGMENT, "q8_0")], None),
    "before ours by name": ([row(f"{FOLDER}/aa.conf", "f16")], False),
    "after ours by name": ([row(f"{FOLDER}/override.conf", "f16")], True),
    "after ours, the same": ([row(f"{FOLDER}/override.conf", "q8_0")], None),
    "after ours, elsewhere": ([row("/run/systemd/system/ollama.service.d/x.conf", "f16")], True),
    "of all services": ([row("/etc/systemd/system/service.d/zz.conf", "f16")], True),
    "an environment file": ([row("/etc/default/ollama", "f16")], True),
    "one that ends in .conf": ([row("/etc/ollama.conf", "f16")], True),
    "unset": ([row(FRAGMENT, None, last=True)], True),
}


@pytest.mark.parametrize("case", CLASHES)
def test_who_else_sets_a_variable_is_named(case: str) -> None:
    rows, wins = CLASHES[case]
    look = {"fragment": FRAGMENT, "sets": rows}
    found = clashes(look, {"OLLAMA_KV_CACHE_TYPE": "q8_0"})
    assert [one.wins for one in found] == ([] if wins is None else [wins])
    if found:
        assert found[0].place.startswith(rows[-1]["file"])


def test_receipts_of_other_runners_stay_what_they_are() -> None:
    assert settings_digest(check({"ollama_kv_cache_type": "f16"})) == settings_digest(check({}))
