"""The drive in a plan: actions, costs, notes, places that wait for it; and `kvhost drives`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvhost.drives.types import Drives
from kvhost.drives.view import drives_to_json, render_drives
from kvhost.plan.make import Plan
from kvhost.plan.storage import waits_for_its_drive
from kvhost.report import HostReport, ReportError, parse_drives
from kvhost.settings import Settings
from tests.claim_cases import (
    LOG,
    MARKER,
    MOUNT,
    OWN_FINDINGS,
    OWN_MOUNTED,
    SERIAL,
    drive,
    drives,
    ok,
    other,
    own,
    token_for,
)
from tests.plan_cases import FACTS, disk, healthy, plan

REPO = Path(__file__).resolve().parents[1]
TIER = f"{MOUNT}/tier"
pytestmark = pytest.mark.drives
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="drives need root")


def planned(*rows: dict[str, Any], mounted: bool = False, **settings: Any) -> Plan:
    """The plan of a healthy host with these drives, claimed by serial."""
    base = "/var/lib/kvhost"
    where = disk(TIER)
    if mounted:
        where["disk"]["data"].update(mount_point=MOUNT, fs="xfs")
    changes = {
        "disks": ok([disk(base), where]),
        "drives": ok(drives(*rows).model_dump(mode="json")),
    }
    return plan(changes, FACTS, **{"drive_serial": SERIAL, **settings})


def said(got: Plan) -> str:
    return "\n".join(f"{a.stage} {a.what} [{a.state}] {a.cost}" for a in got.actions)


def test_what_is_read_formatted_and_mounted_is_in_the_plan_with_its_time() -> None:
    got = planned(drive(), other())
    assert got.refusals == ()
    first, second, third = [a for a in got.actions if SERIAL in a.what]
    assert first.what.startswith("read every byte of /dev/nvme0n1") and "2.000 TB" in first.what
    assert first.cost is not None and "about 33 min at 1 GB/s" in first.cost
    assert "one partition named kvhost, xfs" in second.what
    assert third.what == f"mount /dev/nvme0n1 (serial {SERIAL}) at {MOUNT}, now and at every boot"
    assert {a.state for a in (first, second, third)} == {"change"}


def test_samples_are_called_samples() -> None:
    words = said(planned(drive(), drive_blank_check="sampled"))
    assert "read samples of" in words and "lost unseen" in words and "every byte" not in words


def test_erasing_says_what_is_lost() -> None:
    held = drive(("signature", "ext4 photos at 1080"))
    words = said(planned(held, drive_erase=token_for(held)))
    assert "ERASE /dev/nvme0n1" in words and "lost is signature: ext4 photos at 1080" in words


def test_a_drive_of_kvhosts_is_kept_or_mounted() -> None:
    kept = planned(drive(*OWN_MOUNTED, kvhost=own(mounted_at=[MOUNT], marker=MARKER)), mounted=True)
    assert f"kvhost's, mounted at {MOUNT} [keep]" in said(kept)
    assert "format" not in said(kept) and "read every byte" not in said(kept)
    back = planned(drive(*OWN_FINDINGS, kvhost=own()))
    assert "mount /dev/nvme0n1" in said(back) and "format" not in said(back)


def test_a_refused_drive_leaves_the_action_open_and_stops_the_host() -> None:
    got = planned(drive(("mounted", "nvme0n1 at /data (ext4)")))
    assert [r.code for r in got.refusals] == ["drive_in_use"]
    assert "the claimed drive [unknown]" in said(got)


def test_drives_that_are_not_known_stop_the_host() -> None:
    broken = {"status": "unreadable", "why": "report_drives.py exits 1", "data": None}
    got = plan({"drives": broken}, FACTS, drive_serial=SERIAL)
    assert any(r.code == "unreadable" and "exits 1" in r.found for r in got.refusals)


def test_without_a_claim_nothing_is_said_of_drives() -> None:
    got = plan({"drives": ok(drives(drive()).model_dump(mode="json"))}, FACTS)
    assert "nvme0n1" not in said(got) and not any("nvme" in note for note in got.notes)


def test_the_tiers_place_is_judged_by_its_own_filesystem_alone() -> None:
    """What lies below the mount point now is the root disk, and its free space says nothing."""
    got = planned(drive(), cache_limit_gib=1000.0)
    assert got.refusals == ()
    full = planned(
        drive(*OWN_MOUNTED, kvhost=own(mounted_at=[MOUNT], marker=MARKER)), mounted=True,
        cache_limit_gib=1000.0,
    )  # fmt: skip
    assert [r.code for r in full.refusals] == ["disk_too_small"]


NOTES: list[tuple[str, dict[str, Any], str]] = [
    ("worn", {"health": ok({**LOG, "percentage_used": 85})}, "85 % of what its maker promises"),
    ("spare", {"health": ok({**LOG, "available_spare_percent": 10})}, "10 % of its spare blocks"),
    ("errors", {"health": ok({**LOG, "media_errors": 3})}, "3 errors"),
    ("hot", {"health": ok({**LOG, "temperature_c": 75})}, "75 °C"),
    ("unknown", {"health": {"status": "unreadable", "why": "x y", "data": None}}, "x y"),
    ("slow", {"pcie": ok({"address": "0000:01:00.0", "speed_gts": 8.0, "max_speed_gts": 16.0,
                          "width": 4, "max_width": 4})}, "PCIe 8 GT/s x4 and could at 16 GT/s x4"),
    ("sata", {"transport": "sata"}, "slower than NVMe"),
    ("platters", {"rotational": True, "transport": "sata"}, "turning platters"),
    ("usb", {"transport": "usb", "removable": True}, "can be pulled out"),
    ("closed", {"notes": ["processes that do not show what they have open: 2"]}, "open: 2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), NOTES, ids=[row[0] for row in NOTES])
def test_notes(name: str, changes: dict[str, Any], words: str) -> None:
    got = planned(drive(**changes))
    assert got.refusals == ()
    assert any(words in note for note in got.notes)
    assert not any(words in note for note in planned(drive()).notes)


def test_notes_of_a_kept_drive() -> None:
    marker = ok({**MARKER["data"], "machine_id": "f" * 32})
    row = drive(*OWN_MOUNTED, ("health", "x"), kvhost=own(mounted_at=[MOUNT], marker=marker),
                health=ok({**LOG, "critical_warning": 1}))  # fmt: skip
    notes = "\n".join(planned(row, mounted=True, drive_erase=f"erase-{'0' * 32}").notes)
    for words in (
        "critical warning (0x1)",
        "on another machine",
        "drive_erase is set and not needed",
    ):
        assert words in notes


# ---- kvhost drives


def test_all_drives_are_shown_with_an_opinion_each() -> None:
    rows = drives(
        drive(), other(), drive(("read_only", "x"), name="sdb", path="/dev/sdb", serial="B"),
        drive(("signature", "ext4 a\x1b[31m"), name="sdc", path="/dev/sdc", serial="C", wwn=None),
        drive(name="sdd", path="/dev/sdd", serial="D", why="I/O error"),
        {"status": "unreadable", "why": "gone", "device": None, "findings": []},
        drive(*OWN_FINDINGS, name="sde", path="/dev/sde", serial="E", kvhost=own()),
    )  # fmt: skip
    hosts: dict[str, tuple[Settings, Drives | str]] = {
        "a": (Settings(), rows),
        "b": (Settings(drive_serial=SERIAL), drives(drive())),
        "c": (Settings(), "no sudo"),
        "d": (Settings(drive_serial="C"), rows),
    }
    told = drives_to_json(hosts)
    json.dumps(told)
    assert [row["opinion"] for row in told["a"]["drives"]] == [
        "no header on it", "in use", "not usable", "holds something", "not readable",
        "not readable", "kvhost's own",
    ]  # fmt: skip
    assert told["b"]["drives"][0]["opinion"] == "claimed: format"
    assert (told["c"]["status"], told["c"]["why"]) == ("unreadable", "no sudo")
    assert told["d"]["drives"][3]["opinion"] == "claimed, refused (drive_not_blank)"
    out = io.StringIO()
    Console(file=out, width=150).print(render_drives(hosts))
    for words in ("/dev/disk/by-id/nvme-Samsung_SSD_990_PRO_2TB_S7KHNJ0W123456A", "no sudo",
                  "2.000 TB (1.819 TiB)", "claimed: format", "NOT READ: I/O error"):  # fmt: skip
        assert words in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_what_is_no_report_of_drives_is_quoted() -> None:
    for text, words in (("", "nothing"), ("sh: no python3\n", "sh: no python3"), ("{}", "not a")):
        with pytest.raises(ReportError, match=words):
            parse_drives(text)


# ---- through pyinfra, on this machine

INVENTORY = """\
from pyinfra.connectors.local import LocalConnector
LocalConnector.make_names_data = staticmethod(lambda name=None: iter([(name, {{}}, [])]))
{hosts}
"""


def pyinfra(folder: Path, deploy: str, hosts: str, *more: str, **env: str) -> tuple[int, str, str]:
    inventory = folder / "inventory.py"
    inventory.write_text(INVENTORY.format(hosts=hosts))
    program = Path(sys.executable).with_name("pyinfra")
    done = subprocess.run(
        [program, "-y", inventory, REPO / deploy, *more], cwd=REPO, check=False, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
        env={**os.environ, "COLUMNS": "250", **env},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@as_root
@pytest.mark.parametrize("command", ["drives", "plan"])
def test_several_hosts_in_one_object_and_one_that_is_not_reached(
    tmp_path: Path, command: str
) -> None:
    inventory = tmp_path / "inventory.py"
    away = "('away', {'ssh_hostname': '127.0.0.1', 'ssh_port': 1, 'ssh_user': 'nobody'})"
    inventory.write_text(INVENTORY.format(hosts=f"hosts = ['@local/a', '@local/b', {away}]"))
    done = subprocess.run(
        [sys.executable, "-m", "kvhost.cli", command, "--json", "--inventory", inventory,
         "--data", "base_dir=/var/lib/kvhost-no-such"],
        cwd=REPO, check=False, text=True, capture_output=True, stdin=subprocess.DEVNULL,
        timeout=120, env={**os.environ, "COLUMNS": "250"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"a", "b", "away"}
    assert told["away"]["unreadable"][0].startswith("it could not be reached: 127.0.0.1 port 1")
    if command == "plan":
        assert told["a"]["actions"] and told["a"]["refused"] in (True, False)
        return
    names = [row["device"]["path"] for row in told["a"]["drives"] if row["device"]]
    assert names and told["a"]["status"] == "ok"


TOKEN = f"erase-{'0' * 32}"
PLACES = [
    ("host", f"hosts = [('@local/a', {{'drive_serial': 'x1', 'drive_erase': '{TOKEN}'}})]", (), ""),
    ("group", f"hosts = (['@local/a'], {{'drive_serial': 'x1', 'drive_erase': '{TOKEN}'}})", (),
     "the data of a group"),
    ("--data", "hosts = [('@local/a', {'drive_serial': 'x1'})]", ("--data", f"drive_erase={TOKEN}"),
     "--data"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "hosts", "more", "words"), PLACES, ids=[p[0] for p in PLACES])
def test_a_token_is_taken_from_the_host_in_the_inventory_alone(
    tmp_path: Path, place: str, hosts: str, more: tuple[str, ...], words: str
) -> None:
    _, out, err = pyinfra(tmp_path, "deploys/plan.py", hosts, *more)
    refusal = f"drive_erase (host a): comes from {words}"
    assert (refusal in out + err) == bool(words), out + err


LIMIT = """
import shlex
from deploys.common.facts import HostReportText
argv = ("--base-dir", "/b", "--tier-dir", "/b/tier", "--service-user", "kvhost", "--drives")
print(len(shlex.quote(HostReportText().command(argv))))
"""


def test_the_scripts_fit_into_one_argument_of_a_shell() -> None:
    """execve takes 128 KiB an argument (MAX_ARG_STRLEN), and quoting makes a text longer."""
    done = subprocess.run([sys.executable, "-c", LIMIT], cwd=REPO, text=True, check=True,
                          capture_output=True)  # fmt: skip
    assert int(done.stdout) < 0.9 * (128 << 10)


def test_the_helper_of_the_plan_knows_when_it_waits() -> None:
    report = HostReport.model_validate(healthy())
    assert not waits_for_its_drive(Settings(), report)
    assert waits_for_its_drive(Settings(drive_serial="x1"), report)


IN_USE = {"schema": 1, "mount": MOUNT, "uuid": "u", "drive": {"by_id": "nvme-x_1"}}


@pytest.mark.parametrize(
    ("record", "settings", "codes"),
    [
        (ok(IN_USE), {}, ["drive_left_in_use"]),
        ({"status": "absent", "why": "not there", "data": None}, {}, []),
        ({"status": "unreadable", "why": "torn", "data": None}, {}, ["unreadable"]),
        (ok([]), {}, ["unreadable"]),
        (ok(IN_USE), {"drive_serial": SERIAL}, []),
    ],
)
def test_a_drive_in_use_is_not_forgotten_with_its_setting(
    record: dict[str, Any], settings: dict[str, Any], codes: list[str]
) -> None:
    changes = {"kvhost.drive": record, "drives": ok(drives(drive()).model_dump(mode="json"))}
    got = plan(changes, FACTS, **settings)
    found = [r for r in got.refusals if r.stage == "storage"]
    assert [r.code for r in found] == codes
    if codes == ["drive_left_in_use"]:
        assert "nvme-x_1" in found[0].found and "kvhost release" in found[0].fix
