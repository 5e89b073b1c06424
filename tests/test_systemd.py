"""A host with a real systemd, provisioned over SSH as an unprivileged user with sudo; real engine.

One host and one start of the engine for all of it: the order of the tests is that of its life.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from kvhost.reports.kept import latest_report
from tests.e2e_tools import Done
from tests.systemd_site import BASE, KEY, Site, systemd_site

pytestmark = [pytest.mark.systemd, pytest.mark.engine, pytest.mark.full]
ORDER = ("cache", "runner", "pruner")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.fail("these tests need root: namespaces, mounts, containers (docs/testing.md)")
    with systemd_site(tmp_path_factory.mktemp("systemd")) as made:
        yield made


@pytest.fixture(scope="module")
def first(site: Site) -> Done:
    return site.pyinfra()


@pytest.fixture
def up(site: Site, first: Done) -> Site:
    assert first.code == 0, first.text[-16000:]
    return site


def test_over_ssh_with_sudo_from_nothing_to_a_verdict(site: Site, first: Done) -> None:
    assert first.code == 0, first.text[-16000:]
    assert "persisted PASS" in first.text


def test_again_nothing_changes(up: Site) -> None:
    began = time.monotonic()
    done = up.pyinfra()
    print(f"second run: {time.monotonic() - began:.1f} s")
    assert done.code == 0, done.text[-4000:]
    assert done.changed() == []
    assert len(done.counts()) >= 18


def test_the_engine_runs_in_its_sandbox(up: Site) -> None:
    table = up.host.root("systemd-analyze", "security", "--no-pager", ok=False)
    scores = dict(re.findall(r"kvhost-(\w+)\.service +(\d+\.\d)", table))
    print("exposure:", scores)
    assert set(scores) == set(ORDER)
    assert max(map(float, scores.values())) <= 2.6
    for name in ORDER:
        record = up.rows()[name]["pid"]
        status = up.host.read(f"/proc/{record}/status")
        assert re.search(r"NoNewPrivs:\s+1\n", status), name
        assert re.search(r"CapBnd:\s+0+\n", status), name
        assert re.search(r"Seccomp:\s+2\n", status), name


def test_a_reboot_and_the_prompt_of_before_comes_from_l2(up: Site) -> None:
    up.served_from_l2_after_a_reboot(seed=1)


def test_after_the_reboot_nothing_is_to_be_done(up: Site) -> None:
    done = up.pyinfra(verify="never")
    assert done.code == 0, done.text[-4000:]
    assert done.changed() == []


def test_the_test_itself_reboots_the_host_and_a_second_pair_shares_the_tier(up: Site) -> None:
    before = up.host.read("/proc/1/stat").split()[21]
    done = up.pyinfra("verify.py", "-y", disrupt="true", verify_events='["reboot", "other"]')
    assert done.code == 0, done.text[-6000:]
    report = latest_report(up.copy.repo / "reports", "kv")
    assert report is not None
    told = {one.verdict.event: one.verdict.persisted for one in report.results}
    assert told == {"other": "PASS", "reboot": "PASS"}
    assert up.host.read("/proc/1/stat").split()[21] != before


def test_the_key_and_the_prompts_are_nowhere(up: Site, first: Done) -> None:
    planted = "kvhostplantedpromptzebra"
    code = (
        "import json,urllib.request as u; r=u.Request('http://127.0.0.1:8000/v1/completions',"
        f"json.dumps({{'model':'kvhost-builtin','prompt':'{planted}','max_tokens':1}}).encode(),"
        f"{{'Content-Type':'application/json','Authorization':'Bearer {KEY}'}});"
        "print(u.urlopen(r).status)"
    )
    assert up.host.in_network("/usr/bin/python3", "-c", code).stdout.strip() == "200"
    diff = up.pyinfra("deploy.py", "--dry", "--diff", verify="never")
    reports = "".join(p.read_text() for p in (up.copy.repo / "reports").rglob("*") if p.is_file())
    looked_at = {
        "ps": up.host.root("ps", "axww", "-o", "args"),
        "units": up.host.root("sh", "-c", "cat /etc/systemd/system/kvhost-*"),
        "shown": up.host.root("systemctl", "show", "kvhost-*"),
        "journal": up.host.root("journalctl", "--no-pager", "-o", "export"),
        "files": up.host.root("sh", "-c", f"cat {BASE}/log/* {BASE}/etc/* {BASE}/run/*.json "
                                          f"{BASE}/state/*.json"),
        "output": first.text,
        "diff": diff.text,
        "reports": reports,
    }  # fmt: skip
    assert reports
    for name, text in looked_at.items():
        assert text, name
        assert KEY not in text, name
        assert planted not in text, name


def test_a_broken_setting_is_refused_before_the_service_is_touched(up: Site) -> None:
    pids = {name: row["pid"] for name, row in up.rows().items()}
    unknown = up.pyinfra(cache_limit_gb="3")
    assert unknown.code == 1
    assert "cache_limit_gib" in unknown.text
    broken = up.pyinfra(verify="never", runner_extra_args='["--quantization", "nonsense"]')
    assert broken.code == 1
    assert "nonsense" in broken.text
    assert {name: row["pid"] for name, row in up.rows().items()} == pids
    assert up.ask(seed=2)["status"] == 200
