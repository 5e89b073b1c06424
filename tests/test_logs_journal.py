"""`kvhost logs` where systemd runs the services: a real journal in a real host of the lab."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.nspawn import Host, Lab

ONHOST = Path(__file__).parent.parent / "kvhost" / "onhost"
KEY = "pl4nted-key-in-a-file"
PROGRAM = f"""#!/bin/sh
echo '(APIServer pid=1) INFO 11-29 10:00:00 [api.py:1] starting with {KEY}'
echo '(APIServer pid=1) ERROR 11-29 10:00:01 [a.py:9] the last error' >&2
echo '(APIServer pid=1) INFO 11-29 10:00:02 [api.py:1] the end'
sleep 600
"""
UNIT = "[Service]\nExecStart=/root/kv/program\nDynamicUser=no\n"

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, containers"),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Lab() as lab:
        here = lab.host("logs")
        here.root("mkdir", "-p", *(f"/root/kv/{name}" for name in ("bin", "log", "run", "secrets")))
        for name in ("logs.py", "masking.py", "service_names.py"):
            here.write(f"/root/kv/bin/{name}", (ONHOST / name).read_text())
        here.write("/root/kv/secrets/api-key", KEY)
        here.write("/root/kv/program", PROGRAM)
        here.root("chmod", "755", "/root/kv/program")
        here.write("/etc/systemd/system/kvhost-runner.service", UNIT)
        here.root("systemctl", "daemon-reload")
        here.root("systemctl", "start", "kvhost-runner.service")
        here.root("sh", "-c", "sleep 2; journalctl --sync")
        yield here


def logs(host: Host, *words: str) -> dict[str, Any]:
    argv = ("python3", "/root/kv/bin/logs.py", "--base", "/root/kv", "--json", *words)
    loaded: dict[str, Any] = json.loads(host.root(*argv).splitlines()[-1])
    return loaded


def test_the_journal_is_read_where_there_is_a_unit(host: Host) -> None:
    found = logs(host)
    runner = found["runner"]
    assert runner["source"] == "kvhost-runner.service"
    assert [block["lines"][0].rpartition("] ")[2] for block in runner["errors"]] == [
        "the last error"
    ]
    assert runner["lines"][-1].endswith("the end")
    assert KEY not in json.dumps(found)
    assert found["cache"]["source"] == "log/cache.log"  # no such unit here


def test_since_counts_by_the_journals_time(host: Host) -> None:
    assert logs(host, "--since", "5m")["runner"]["errors"]
    assert logs(host, "--since", "2099-01-01")["runner"] == {
        "source": "kvhost-runner.service", "failed": None, "errors": [], "lines": [],
    }  # fmt: skip
