"""An ollama.service of somebody else, adopted by a drop-in and given back, under a real systemd."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.ollama.facts import parse_facts
from kvhost.ollama.verdict import judge_kv
from tests.lab.nspawn import Host, Lab
from tests.ollama_site import (
    BASE,
    DROP_IN,
    FOLDER,
    PLACE,
    UNIT,
    UNIT_TEXT,
    api,
    behave,
    install,
    show,
)

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.runners,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]
REPO = Path(__file__).parents[1]
TEXT = f"""# Written by kvhost for {BASE}. Changes here are undone by the next run:
[Service]
Environment="OLLAMA_FLASH_ATTENTION=1"
Environment="OLLAMA_HOST=127.0.0.1:11500"
Environment="OLLAMA_KV_CACHE_TYPE=q8_0"
"""
URL = "http://127.0.0.1:11500"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Lab() as lab:
        here = lab.host("ollama")
        here.root("mkdir", "-p", f"{BASE}/bin", f"{BASE}/etc")
        for script in (REPO / "kvhost/onhost").glob("[a-z]*.py"):
            here.write(f"{BASE}/bin/{script.name}", script.read_text())
        install(here)
        yield here


@pytest.fixture(autouse=True)
def clean(host: Host) -> Iterator[None]:
    yield
    behave(host)
    host.root("rm", "-rf", FOLDER)
    host.root("systemctl", "daemon-reload")
    host.root("systemctl", "restart", UNIT)


def call(host: Host, *words: str, ok: bool = True) -> str:
    line = shlex.join(("python3", f"{BASE}/bin/ollama_unit.py", *words))
    return host.root("sh", "-c", line if ok else f"{line} 2>&1", ok=ok)


def apply(host: Host, text: str = TEXT, ok: bool = True) -> str:
    host.write(f"{BASE}/etc/ollama.conf", text)
    words = ("--base", BASE, "--text", f"{BASE}/etc/ollama.conf", "--url", URL, "--timeout", "6")
    return call(host, "apply", *words, ok=ok)


def look(host: Host) -> dict[str, Any]:
    return dict(json.loads(call(host, "look")))


def test_it_is_adopted_and_given_back(host: Host) -> None:
    before = look(host)
    assert (before["load"], before["active"], before["user"]) == ("loaded", "active", "ollama")
    assert before["program"] == "/usr/local/bin/ollama"
    apply(host)
    assert show(host, "Environment").endswith("OLLAMA_KV_CACHE_TYPE=q8_0")
    after = look(host)
    assert after["process"] == {
        "OLLAMA_FLASH_ATTENTION": "1",
        "OLLAMA_HOST": "127.0.0.1:11500",
        "OLLAMA_KEEP_ALIVE": "10m",  # of the unit: not ours, and as it was
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
    }
    assert host.read(PLACE) == UNIT_TEXT
    pid = show(host, "MainPID")
    apply(host)
    assert show(host, "MainPID") == pid, "nothing has changed, so nothing is restarted"
    call(host, "remove", "--base", BASE)
    assert look(host)["process"] == before["process"]
    assert host.root("ls", "/etc/systemd/system", "-1").count("ollama.service.d") == 0
    assert host.read(PLACE) == UNIT_TEXT


def test_the_kv_type_of_its_journal_is_judged(host: Host) -> None:
    apply(host)
    api(host, "pull", {"model": "qwen3:0.6b"}, port=11500)
    api(host, "pull", {"model": "odd:1b"}, port=11500)
    found = {}
    for name in ("qwen3:0.6b", "odd:1b"):
        argv = ("--url", URL, "--model", name, "--unit", UNIT, "--load")
        text = host.root("python3", f"{BASE}/bin/ollama_look.py", *argv)
        found[name] = judge_kv(parse_facts(text), "q8_0")
    assert (found["qwen3:0.6b"].found, found["qwen3:0.6b"].in_force) == ("q8_0", "yes")
    assert (found["odd:1b"].found, found["odd:1b"].in_force) == ("f16", "no")


def test_a_drop_in_with_which_it_does_not_come_up_is_taken_back(host: Host) -> None:
    behave(host, dies=True)
    said = apply(host, ok=False)
    assert "the drop-in is taken back" in said
    assert "something is wrong" in said, "its last lines are shown"
    assert host.root("ls", "/etc/systemd/system", "-1").count("ollama.service.d") == 0


def test_what_is_not_ours_is_left(host: Host) -> None:
    host.root("mkdir", "-p", FOLDER)
    host.write(DROP_IN, "[Service]\nEnvironment=OLLAMA_KEEP_ALIVE=1m\n")
    assert "is not kvhost's" in apply(host, ok=False)
    call(host, "remove", "--base", BASE)
    assert "KEEP_ALIVE=1m" in host.read(DROP_IN)


def test_the_order_is_that_of_systemd(host: Host) -> None:
    """Unit, drop-ins by their file name wherever they lie, environment files, what is unset."""
    apply(host)
    host.root("mkdir", "-p", "/run/systemd/system/ollama.service.d")
    host.write("/run/systemd/system/ollama.service.d/zz.conf",
               "[Service]\nEnvironment=OLLAMA_KV_CACHE_TYPE=q4_0\n")  # fmt: skip
    host.write(f"{FOLDER}/aa.conf", "[Service]\nEnvironment=OLLAMA_KV_CACHE_TYPE=f16\n"
               "EnvironmentFile=/etc/default/ollama\n")  # fmt: skip
    host.write("/etc/default/ollama", "OLLAMA_HOST=127.0.0.1:11501\n")
    host.root("systemctl", "daemon-reload")
    host.root("systemctl", "restart", UNIT)
    found = look(host)
    last = {row["variable"]: row["value"] for row in found["sets"]}
    assert (last["OLLAMA_KV_CACHE_TYPE"], last["OLLAMA_HOST"]) == ("q4_0", "127.0.0.1:11501")
    assert found["process"] == last
    host.root("rm", "-r", "/run/systemd/system/ollama.service.d", "/etc/default/ollama")
