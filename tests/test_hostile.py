"""Files, lines and values that nobody should write: one clear error, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvhost import cli
from kvhost.commands.run import default_inventory
from kvhost.fleet.read import load_fleet, pyinfra_hosts
from kvhost.fleet.ssh_line import LineError, parse
from kvhost.fleet.yaml import FleetError
from kvhost.settings import SettingsError, validate_hosts
from kvhost.working_copy import make

pytestmark = pytest.mark.fleet

HOST = "hosts:\n  a:\n    address: 192.0.2.1\n"
BOMB = "".join(
    f"{b}: &{b} [{', '.join(9 * [f'*{a}' if a else 'x'])}]\n"
    for a, b in zip(["", *"abcdef"], "abcdefg", strict=True)
)
#: file -> what its one fault says
FILES = {
    "port of 5,000 digits": (f"{HOST}    port: {'9' * 5000}\n", "number far too large"),
    "a date that there is not": (f"settings: {{model_source: 2024-13-45}}\n{HOST}", "a date that"),
    "deep": (f"settings: {'{a: ' * 900}1{'}' * 900}\n{HOST}", "nested too deeply"),
    "aliases upon aliases": (BOMB, "500000 values"),
    "Latin 1": ("# \udce9\n" + HOST, "is not UTF-8"),
    "NUL": (HOST + "\0", "is not YAML"),
    "a secret twice": (
        f"{HOST}    password: hunter2\n    password: hunter3\n",
        "password stands there twice",
    ),
    "key of no such user": (f"{HOST}    key: ~nobody-here/id\n", "no such file on the controller"),
    "key of a long name": (f"{HOST}    key: {'x' * 300}\n", "no such file on the controller"),
    "an option for an address": ("hosts:\n  a: {address: -oProxyCommand}\n", "must be a name or"),
    "an option for a jump": (f"{HOST}    jump: me@-oX\n", r"must be [USER@]HOST"),
    "a jump through itself": ("hosts: {a: {address: x, port: 4000, jump: x}}", "leads back"),
    "two ways to an address": (
        "hosts:\n  a: {address: x, jump: y}\n  b: {address: x, port: 4, jump: z}\n",
        "is another way to x than that of a",
    ),
    "a secret for a setting's name": (
        f"settings: {{sk-{'a' * 30}: 1}}\n{HOST}",
        "is not a setting",
    ),
}


def said(path: Path) -> str:
    with pytest.raises(FleetError) as caught:
        pyinfra_hosts(load_fleet(path), {})
    text = str(caught.value)
    assert len(caught.value.faults) == 1
    assert all(c.isprintable() or c == "\n" for c in text), "it would steer a terminal"
    assert "hunter" not in text
    return text


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, tmp_path: Path) -> None:
    text, expected = FILES[case]
    path = tmp_path / "fleet.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert expected in said(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    os.mkfifo(path)
    assert "is not a regular file" in said(path), "a pipe would be waited for"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "is not a regular file" in said(path)
    path.unlink()
    path.write_text("#" * (4 * 2**20 + 1))
    assert "bytes; at most" in said(path)


def test_a_jump_through_each_other(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("hosts:\n  a: {address: x, jump: y}\n  b: {address: y, jump: x}\n")
    with pytest.raises(FleetError) as caught:
        load_fleet(path)
    assert [fault.what for fault in caught.value.faults] == 2 * ["leads back to the host itself"]
    path.write_text(
        "hosts:\n  a: {address: x, jump: y}\n  b: {address: y}\n  c: {address: z, jump: y}\n"
    )
    assert len(load_fleet(path).file.hosts) == 3


@pytest.mark.parametrize("target", ["nowhere", "fleet.yaml"])
def test_a_fleet_that_cannot_be_read_is_not_this_machine(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to nowhere, or to itself: else `kvhost up` would provision the controller."""
    make(tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    with pytest.raises(click.UsageError, match="no host yet"):
        default_inventory()
    Path("fleet.yaml").unlink()
    Path("fleet.yaml").symlink_to(target)
    assert default_inventory() == "inventories/fleet.py"


LINES = [
    f"ssh -p {'9' * 5000} a",
    f"ssh a:{'9' * 5000}",
    "ssh ssh://[::1",
    "ssh -J me@-oX a",
    "ssh -J -oX a",
    "ssh root@-oProxyCommand=id",
    "ssh a;id",
    "ssh $(id)",
    "sudo ssh a",
]


@pytest.mark.parametrize("line", LINES)
def test_lines(line: str) -> None:
    with pytest.raises(LineError):
        parse(line)


def test_a_line_that_cannot_be_used_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = Path("fleet.yaml").read_bytes()
    for line in ("ssh ssh://[::1", "ssh root@-oProxyCommand=id", "ssh a -J -oX"):
        result = CliRunner().invoke(cli.main, ["inventory", "add", "--no-look", line])
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), line
    assert Path("fleet.yaml").read_bytes() == before


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


def test_settings_of_no_sense() -> None:
    """All in one error; a list in itself, one of 5,000 levels, keys that are no text."""
    ring: list[Any] = []
    ring.append(ring)
    data: dict[Any, Any] = {"verify_events": ring, "gpus": deep(), "no_such": deep(), 5: 6, None: 1}
    with pytest.raises(SettingsError) as caught:
        validate_hosts({"h": data}, frozenset(), {})
    keys = {problem.key for problem in caught.value.problems}
    assert {"verify_events", "gpus", "no_such", "a key of type int"} <= keys


def add(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["inventory", "add", "--no-look", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.mark.parametrize("text", ["hosts: [a]\n", "groups: 5\n", "hosts: 5\n", "hosts:\n  a: 5\n"])
def test_a_fleet_with_faults_is_not_written_over(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(text)
    code, said = add("root@192.0.2.1", "--group", "g")
    assert (code, Path("fleet.yaml").read_text()) == (1, text)
    assert "fleet.yaml:" in said


def test_a_linked_fleet_stays_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, away = tmp_path / "copy", tmp_path / "away.yaml"
    make(copy)
    monkeypatch.chdir(copy)
    Path("fleet.yaml").rename(away)
    away.chmod(0o600)
    Path("fleet.yaml").symlink_to(away)
    assert add("root@192.0.2.1")[0] == 0
    assert Path("fleet.yaml").is_symlink()
    assert "192.0.2.1" in away.read_text()
    assert away.stat().st_mode & 0o777 == 0o600
    away.unlink()
    code, said = add("root@192.0.2.1")
    assert (code, Path("fleet.yaml").is_symlink()) == (1, True)
    assert "No such file" in said


def test_names_that_are_made_and_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "host-1 is in" in add("root@::1")[1], "--canary 1 would be another host"
    assert add(f"root@{'a' * 200}")[0] == 0
    for name in ("all", "-x", "a\nb", "ä"):
        code, said = add("root@192.0.2.1", "--name", name)
        assert code == 1
        assert said.startswith("Error: the name ")


def test_a_line_is_the_whole_way_to_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port or a jump host of before would lead to another machine, or to none."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert add("ssh -J me@bastion root@10.0.0.5 -p 2222", "--name", "gpu")[0] == 0
    code, said = add("ssh -J me@other root@10.0.0.6", "--name", "gpu")
    assert (code, "left out" in said) == (0, False)
    assert load_fleet(Path("fleet.yaml")).file.hosts["gpu"].jump == "me@other"
    code, said = add("root@203.0.113.7", "--name", "gpu")
    assert code == 0
    assert "note: the jump host of gpu is left out: the line has none (-J)" in said
    entry = load_fleet(Path("fleet.yaml")).file.hosts["gpu"]
    assert (entry.address, entry.port, entry.jump) == ("203.0.113.7", 22, None)


def test_a_host_and_a_group_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyinfra looks for the group first: --limit would act on all hosts of it."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = "groups:\n  gpu:\n  # more\nhosts:\n  one: {address: 192.0.2.1, groups: [gpu]}\n"
    Path("fleet.yaml").write_text(text)
    for words in (("--name", "gpu"), ("--name", "two", "--group", "one"),
                  ("--name", "two", "--group", "two")):  # fmt: skip
        code, said = add("root@192.0.2.2", *words)
        assert (code, Path("fleet.yaml").read_text()) == (1, text), said
        assert "would be a host and a group, and --limit would take the group; write" in said
    Path("fleet.yaml").write_text("groups:\n  # none yet\nhosts:\n")
    assert add("root@192.0.2.2", "--name", "one", "--group", "gpu")[0] == 0


def test_hosts_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    make(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = [sys.executable, "-m", "kvhost.cli", "inventory", "add", "--no-look"]
    adding = [
        subprocess.Popen(
            [*argv, f"root@192.0.2.{number}"], cwd=tmp_path, env=env,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for number in range(1, 5)
    ]  # fmt: skip
    for process in adding:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert len(load_fleet(tmp_path / "fleet.yaml").file.hosts) == 4
