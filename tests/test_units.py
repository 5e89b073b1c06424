"""systemd's units as text: what is in them, how paths are quoted, and that no secret is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from kvhost.services.describe import services
from kvhost.services.units import command, unit_text
from kvhost.settings import Settings

ONHOST = Path(__file__).parents[1] / "kvhost/onhost"
NAMESPACE = "/var/lib/kvhost/tier/ns-0"


def texts(*, gpu: bool = False, with_key: bool = True, **given: Any) -> dict[str, str]:
    settings = Settings(**given)
    made = services(settings, settings.paths, NAMESPACE, with_key=with_key)
    return {s.name: unit_text(s, settings, settings.paths, gpu=gpu) for s in made}


def lines(text: str, key: str) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", text)


def test_the_runner_wants_the_cache_and_is_not_bound_to_it() -> None:
    text = texts()["runner"]
    assert lines(text, "After") == lines(text, "Wants") == ["kvhost-cache.service"]
    for binding in ("Requires", "BindsTo", "PartOf", "Requisite"):
        assert lines(text, binding) == []


def test_an_engine_for_gpus_sees_devices() -> None:
    assert lines(texts()["runner"], "PrivateDevices") == ["yes"]
    assert lines(texts(gpu=True)["runner"], "PrivateDevices") == []


def test_the_tier_is_waited_for_and_only_its_users_write_it() -> None:
    made = texts(tier_dir="/mnt/nvme/kv")
    for name in ("cache", "pruner"):
        assert "/mnt/nvme/kv" in lines(made[name], "RequiresMountsFor")[0].split()
        assert "/mnt/nvme/kv" in lines(made[name], "ReadWritePaths")[0].split()
    assert "/mnt/nvme/kv" not in made["runner"]


def test_a_runner_that_keeps_its_cache_itself_has_the_tier_and_waits_for_no_server() -> None:
    made = texts(tier_dir="/mnt/nvme/kv", cache_kind="native")
    assert set(made) == {"runner", "pruner"}
    for text in made.values():
        assert "/mnt/nvme/kv" in lines(text, "RequiresMountsFor")[0].split()
        assert "/mnt/nvme/kv" in lines(text, "ReadWritePaths")[0].split()
        assert "kvhost-cache" not in text and "close_ports" not in text and "--cache " not in text
    assert lines(made["runner"], "After") == lines(made["runner"], "Wants") == []


def test_the_key_is_named_and_not_told() -> None:
    with_key, without = texts(), texts(with_key=False)
    credential = ["api-key:/var/lib/kvhost/secrets/api-key"]
    assert lines(with_key["runner"], "LoadCredential") == credential
    assert lines(without["runner"], "LoadCredential") == []
    assert lines(with_key["cache"], "LoadCredential") == []


def test_homes_and_tmp_are_hidden_unless_something_in_use_lies_there() -> None:
    assert lines(texts()["runner"], "ProtectHome") == ["yes"]
    assert lines(texts()["runner"], "PrivateTmp") == ["yes"]
    at_home = texts(base_dir="/home/ann/kvhost")["runner"]
    assert lines(at_home, "ProtectHome") == ["read-only"]
    in_tmp = texts(model_source="/tmp/model")["runner"]
    assert lines(in_tmp, "PrivateTmp") == ["no"]


def test_whose_a_unit_is_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ONHOST))  # its siblings are imported as on a host
    services_systemd = importlib.import_module("services_systemd")
    for text in texts().values():
        assert services_systemd.is_ours(text, "/var/lib/kvhost")
        assert not services_systemd.is_ours(text, "/var/lib/kv")
        assert not services_systemd.is_ours(text, "/srv/kvhost")


@pytest.mark.parametrize(
    "word, written",
    [
        ("/plain/path", "/plain/path"),
        ("two words", '"two words"'),
        ("100%", "100%%"),
        ("$HOME", '"$$HOME"'),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
    ],
)
def test_a_word_of_a_command_line(word: str, written: str) -> None:
    assert command((word,)) == written


def test_the_scripts_that_units_name_are_there() -> None:
    for text in texts().values():
        named = re.findall(r"/bin/(\w+\.py)", text)
        assert "launch.py" in named
        for name in named:
            assert (ONHOST / name).is_file(), name
