"""A rented container: nothing that kvhost keeps lies off its volume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhost.plan.pod import HARMLESS, pod_refusals
from kvhost.settings import Settings, field_notes
from tests.plan_cases import BASE, FACTS, changed, plan

pytestmark = pytest.mark.fleet
ON_VOLUME = {f"{BASE}.mount_point": "/var/lib", f"{BASE}.fs": "nfs4"}
HOST_PATH = re.compile(r"/\w")
HOOK = Path(__file__).parents[1] / "kvhost/onhost/pod_start.py"


def refusals(host: dict[str, Any], **settings: Any) -> list[tuple[str, str]]:
    found = pod_refusals(Settings(**settings), changed(host), FACTS)
    return [(refusal.code, refusal.what) for refusal in found]


def test_all_on_the_volume_is_not_refused_and_the_plan_says_how_it_comes_back() -> None:
    got = plan(ON_VOLUME, volume_dir="/var/lib")
    assert got.refusals == ()
    assert any("pod_start.py --base /var/lib/kvhost" in note for note in got.notes)
    assert not any("pod_start" in note for note in plan().notes)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tier_dir": "/data/tier"}, "tier_dir /data/tier"),
        ({"model_source": "/models/llama"}, "model_source /models/llama"),
        ({"model_dir": "/data/models"}, "model_dir /data/models"),
        ({"drive_serial": "S7KHNJ0W123456A"}, "a drive is claimed"),
    ],
)
def test_each_path_off_the_volume(settings: dict[str, Any], key: str) -> None:
    ((code, what),) = refusals(ON_VOLUME, volume_dir="/var/lib", **settings)
    assert code == "off_the_volume"
    assert key in what


def test_each_setting_that_is_a_path_on_the_host_is_judged_or_harmless_to_lose() -> None:
    paths = {
        key
        for key in Settings.model_fields
        if HOST_PATH.match(str(field_notes(key)["example"]).removeprefix("host:"))
    } | {"engine_bundle"}  # of which the example is one of the controller
    given = {"base_dir": "/data/kv", "tier_dir": "/data/tier", "model_dir": "/data/models"}
    told = [what.split()[0] for _, what in refusals({}, volume_dir="/vol", **given)]
    told += [what.split()[0] for _, what in refusals({}, volume_dir="/vol", model_source="/data/m")]
    of_a_drive = {key for key in paths if key.startswith("drive_")}
    assert set(told) == {"base_dir", "tier_dir", "model_dir", "model_source"}
    assert paths == {*told, *HARMLESS, *of_a_drive, "volume_dir"}


def test_both_are_told_at_once_and_with_what_to_write() -> None:
    got = plan({}, volume_dir="/workspace")
    assert [refusal.code for refusal in got.refusals] == ["off_the_volume"] * 2
    fixes = [refusal.fix for refusal in got.refusals]
    assert fixes == ["base_dir = '/workspace/kvhost'", "tier_dir = '/workspace/kvhost/tier'"]


@pytest.mark.parametrize(
    "host",
    [
        {},
        {f"{BASE}.mount_point": "/var/lib", f"{BASE}.fs": "overlay"},
        {f"{BASE}.mount_point": "/home", f"{BASE}.fs": "ext4"},
    ],
)
def test_a_volume_that_is_not_mounted(host: dict[str, Any]) -> None:
    assert [code for code, _ in refusals(host, volume_dir="/var/lib")] == ["no_volume"]


def test_a_path_that_only_begins_like_the_volume_is_off_it() -> None:
    assert [code for code, _ in refusals({}, volume_dir="/var/lib/kv")] == ["off_the_volume"] * 2


def test_without_a_volume_nothing_is_asked() -> None:
    assert refusals({}, tier_dir="/data/tier") == []


def hook(base: Path, user: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, HOOK, "--base", base, "--user", user], text=True,
                          capture_output=True, check=False, timeout=60)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="root: it makes accounts")
def test_the_start_hook_touches_nothing_where_it_cannot_be_right(tmp_path: Path) -> None:
    done = hook(tmp_path, "kvhostpod")
    assert done.returncode == 1
    assert "is the volume mounted?" in done.stderr
    (tmp_path / "home").mkdir()
    done = hook(tmp_path, "kvhostpod")
    assert done.returncode == 1
    assert "belongs to uid 0" in done.stderr
    os.chown(tmp_path / "home", 987, 987)
    done = hook(tmp_path, "daemon")
    assert done.returncode == 1
    assert "daemon has uid 1 here" in done.stderr
    assert "kvhostpod" not in Path("/etc/passwd").read_text()
