"""A user's own repository: made, used with an installed wheel, brought up to date; run logs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import quote, quote_plus

import click
import pytest
from click.testing import CliRunner

from kvhost import _copied, working_copy
from kvhost.cli import main
from kvhost.commands import run as cli_run
from kvhost.commands import running
from kvhost.commands.run_log import KEPT, Mask, open_log
from kvhost.fleet.read import load_fleet, pyinfra_hosts
from tests.e2e_tools import free_ports, make_site

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]


def test_it_is_made_beside_a_users_own_files_and_found_from_below(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    made = working_copy.make(tmp_path)
    assert {"deploy.py", "deploys/common/prepare.py", "locks/matrix.yaml"} <= set(made.written)
    assert not (tmp_path / "tests").exists()
    assert not (tmp_path / "setup.py").exists()
    assert (tmp_path / "README.md").read_text() == "mine"
    assert working_copy.root(tmp_path / "deploys") == tmp_path
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for secret in ("secrets/api_key", "keys/id_ed25519", "host.pem", "deploys/host.pem"):
        asked = ["git", "-C", str(tmp_path), "check-ignore", "-q", secret]
        assert subprocess.run(asked, check=False).returncode == 0, secret
    assert working_copy.make(tmp_path).written == []


def test_one_fleets_settings_do_not_reach_another_by_a_clone(tmp_path: Path) -> None:
    clone = make_site(tmp_path).repo
    for name, text in {
        "group_data/all.py": 'base_dir = "/of-the-first"\n',
        "group_data/gpu_a.py": "chunk_size = 512\n",
        "inventories/home.py": 'hosts = ["192.0.2.77"]\n',
        "inventories/mine.py": 'hosts = ["192.0.2.78"]\n',
        "inventory.py": 'hosts = ["192.0.2.79"]\n',
        "hosts.py": 'hosts = ["192.0.2.80"]\n',
    }.items():
        (clone / name).write_text(text)
    out = tmp_path / "out"
    code = "import sys; from pathlib import Path; from kvhost.working_copy import make; "
    env = {**os.environ, "PYTHONPATH": str(clone)}
    subprocess.run([sys.executable, "-c", f"{code}make(Path(sys.argv[1]))", out], check=True,
                   env=env, cwd=tmp_path, timeout=60)  # fmt: skip
    for name in ("group_data/all.py", "inventories/home.py", "inventory.py"):
        assert (out / name).read_text() == (clone / "pristine" / name).read_text()
    for name in ("group_data/gpu_a.py", "inventories/mine.py", "hosts.py", "pristine"):
        assert not (out / name).exists(), name


def test_a_copy_without_a_host_is_not_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `kvhost up` there would provision the laptop; every command with an inventory asks."""
    working_copy.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    ctx = click.Context(main)
    found = {name: main.get_command(ctx, name) for name in main.list_commands(ctx)}
    asking = [
        name
        for name, command in found.items()
        if command and any(option.name == "inventory" for option in command.params)
    ]
    assert {"up", "plan", "verify", "storage", "drives", "release", "grow"} <= set(asking)
    for name in asking:
        done = CliRunner().invoke(main, [name, *(["gpu1"] if name == "rebuild" else [])])
        assert done.exit_code == 2, (name, done.output)
        assert "no host yet" in done.output, name
        assert "--inventory inventory.py for this machine" in done.output
    assert CliRunner().invoke(main, ["up", "--help"]).exit_code == 0
    server = CliRunner().invoke(main, ["verify", "--url", "http://127.0.0.1:1"])
    assert "--metrics-url: needed" in server.output, "no inventory is needed for it"
    assert list(tmp_path.glob("logs/*")) == []


def test_a_clone_is_this_machine_until_its_fleet_has_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_run, "root", lambda: tmp_path)
    with pytest.raises(click.UsageError, match=f"no working copy in .*: cd {tmp_path}"):
        cli_run.default_inventory()  # nobody who is elsewhere asked for this machine
    monkeypatch.chdir(tmp_path)
    assert cli_run.default_inventory() == "inventory.py"
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("hosts: {}\n")
    assert cli_run.default_inventory() == "inventory.py"
    assert capsys.readouterr().err == ""
    fleet.write_text("hosts:\n  one: {address: 192.0.2.1}\n")
    assert cli_run.default_inventory() == "inventories/fleet.py"
    told = "fleet.yaml: 1 host; this machine is not among them\n"
    assert capsys.readouterr().err == told
    fleet.write_text('hosts:\n  one: {address: 192.0.2.1}\n  "@local": {address: "@local"}\n')
    assert cli_run.default_inventory() == "inventories/fleet.py"
    assert capsys.readouterr().err == ""
    groups = pyinfra_hosts(load_fleet(fleet), {})
    assert dict(groups["all"])["@local"] == {}


@pytest.mark.parametrize("name", _copied.EDITED)
def test_what_a_clone_begins_with_is_what_a_copy_begins_with(name: str) -> None:
    def trees(path: str) -> str:
        return subprocess.run(["git", "rev-parse", f"HEAD:{path}"], cwd=REPO, text=True,
                              check=True, capture_output=True).stdout  # fmt: skip

    assert trees(name) == trees(f"pristine/{name}"), "a change of one belongs into the other"


def test_a_copy_has_every_program_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", ":!*/*"], cwd=REPO, text=True,
                            check=True, capture_output=True).stdout.split()  # fmt: skip
    assert {*listed} == {*_copied.TOP, "inventory.py", "setup.py"}
    manifest = (REPO / "MANIFEST.in").read_text()
    assert f"include {' '.join(_copied.TOP)}\n" in manifest
    assert all(f"graft {name}\n" in manifest for name in (*_copied.FOLDERS, _copied.PRISTINE))


def test_it_replaces_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text("theirs")
    with pytest.raises(working_copy.CopyError, match=r"would be replaced: deploy\.py"):
        working_copy.make(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["deploy.py"]


def test_a_new_version_leaves_what_the_user_changed(tmp_path: Path) -> None:
    working_copy.make(tmp_path)
    mark = tmp_path / working_copy.MARK
    told = json.loads(mark.read_text())
    old = {"deploy.py": "old", "grow.py": "old", "gone.py": "old", "kept.py": "old"}
    for name, text in old.items():  # as an older version wrote them
        (tmp_path / name).write_text(text)
        told["files"][name] = working_copy._digest(text.encode())
    mark.write_text(json.dumps({**told, "version": "0.0.1"}))
    (tmp_path / "grow.py").write_text("changed by the user")
    (tmp_path / "kept.py").write_text("changed by the user")
    (tmp_path / "fleet.yaml").write_text("hosts: {}  # mine\n")
    with pytest.raises(working_copy.CopyError, match=r"is of kvhost 0\.0\.1"):
        working_copy.check_version(tmp_path)
    made = working_copy.make(tmp_path)
    assert (made.written, made.removed, made.beside) == (["deploy.py"], ["gone.py"], ["grow.py"])
    assert (tmp_path / "deploy.py").read_text() == (REPO / "deploy.py").read_text()
    assert (tmp_path / "grow.py").read_text() == "changed by the user"
    assert (tmp_path / "grow.py.new").read_text() == (REPO / "grow.py").read_text()
    assert (tmp_path / "kept.py").exists()
    assert (tmp_path / "fleet.yaml").read_text() == "hosts: {}  # mine\n"
    working_copy.check_version(tmp_path)


@pytest.mark.parametrize("with_own", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_installed_wheel_makes_a_copy_that_plans(tmp_path: Path, with_own: bool) -> None:
    """Built from a clean copy, in an environment of its own; ``with_own``: dependencies too, else
    those of the tests."""
    repo = make_site(tmp_path).repo

    def run(*argv: str | Path, cwd: Path) -> str:
        keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KVHOST_REPORTS")}
        done = subprocess.run(
            [*map(str, argv)], cwd=cwd, env=keep, text=True, timeout=300, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    quiet = ("-q", "--disable-pip-version-check")
    left = repo / "build/lib/kvhost/_copy/inventories/mine.py"  # of a build before this one
    left.parent.mkdir(parents=True)
    left.write_text("hosts = []")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, kvhost = tmp_path / "venv/bin/python", tmp_path / "venv/bin/kvhost"
    run(python, "-m", "pip", "wheel", *quiet, "--no-deps", "-w", tmp_path, repo, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    if with_own:
        run(python, "-m", "pip", "install", *quiet, wheel, cwd=tmp_path)
    else:
        run(python, "-m", "pip", "install", *quiet, "--no-deps", wheel, cwd=tmp_path)
        (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        script = Path(sys.executable).with_name("pyinfra").read_text().splitlines(True)
        (tmp_path / "venv/bin/pyinfra").write_text("".join([f"#!{python}\n", *script[1:]]))
        (tmp_path / "venv/bin/pyinfra").chmod(0o755)
    assert not [name for name in ("deploys", "tests", "deploy.py", "config.py")
                if (site / name).exists()]  # fmt: skip
    run(kvhost, "init", "mine", cwd=tmp_path)
    inventories = {path.name for path in (tmp_path / "mine/inventories").iterdir()}
    assert inventories == {"fleet.py", "home.py", "pod.py", "rented_vm.py"}
    names = ("api_port", "cache_port", "cache_http_port")  # this machine may serve already
    ports = [f"{name}={port}" for name, port in zip(names, free_ports(3), strict=True)]
    data = [w for one in ("base_dir=/var/lib/kvhost-wheel", *ports) for w in ("--data", one)]
    planned = run(kvhost, "plan", "--inventory", "inventory.py", "--json", *data,
                  cwd=tmp_path / "mine/locks")  # fmt: skip
    line = next(line for line in planned.splitlines() if line.startswith('{"@local"'))
    assert json.loads(line)["@local"]["actions"]
    assert f"log of this run: {tmp_path}/mine/logs/" in planned


def test_secrets_do_not_reach_a_log() -> None:
    mask = Mask(["hunter22", "a"])
    assert mask("x hunter22 y a") == "x ******** y a"
    assert mask("Authorization: Bearer abcdef") == "Authorization: Bearer ********"
    assert mask("token hf_" + "a" * 24 + ".") == "token ********."
    assert mask("env PYINFRA_SUDO_PASSWORD='x y' sudo") == "env PYINFRA_SUDO_PASSWORD=******** sudo"


ODD = "gehe/im+\"pä\\ss wort'&="
LINES = "-----BEGIN KEY-----\nabcdefgh\nijklmnop\n-----END KEY-----\n"


@pytest.mark.parametrize(
    "written",
    [
        ODD, quote(ODD), quote(ODD, safe=""), quote_plus(ODD), quote(ODD, safe="").lower(),
        json.dumps(ODD), json.dumps(ODD, ensure_ascii=False), json.dumps(ODD).replace("/", "\\/"),
        shlex.quote(ODD), json.dumps(ODD).replace("&", "\\u0026"),
        LINES, " ".join(LINES.split("\n")), json.dumps(LINES), quote(LINES),
        *LINES.split("\n")[1:3],
    ],
)  # fmt: skip
def test_a_known_secret_is_masked_however_it_is_written(written: str) -> None:
    said = Mask([ODD, LINES])(f"x {written} y")
    assert said.startswith("x ") and said.endswith(" y")
    for part in ("gehe", "im", "ss", "wort", "abcd", "mnop"):
        assert part not in said.lower(), said


@pytest.mark.parametrize(
    "text, masked",
    [
        ("at https://t0ken@h/x", "at https://********@h/x"),
        ("redis://user:pa@ss@h:6379/0", "redis://********@h:6379/0"),
        ("redis://user:pa/ss@h", "redis://********@h"),
        ("--api-key=sesame1 --port 1", "--api-key=******** --port 1"),
        ("--api-key sesame1 --port 1", "--api-key ******** --port 1"),
        ("['--api-key', 'sesame1', 'b']", "['--api-key', ********, 'b']"),
        ("password=sesame1, then", "password=********, then"),
        ('password: "two words" x', "password: ******** x"),
        ("GET http://127.0.0.1:8000/v1/models/a@b 200", ""),
        ("key_length = 8, tokens: 9, api_key_file=secrets/key", ""),
        ("https://h/simple, mail ada@h", ""),
    ],
)  # fmt: skip
def test_an_unknown_secret_is_masked_by_its_look(text: str, masked: str) -> None:
    assert Mask()(text) == (masked or text)


def test_a_run_keeps_its_log_and_the_oldest_go(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for n in range(KEPT + 5):
        (logs / f"2026-01-01T0000{n:02}Z-plan-1.log").touch()
    (logs / "notes.txt").touch()
    script = (
        "import json, os, sys, time\n"
        "print('key', os.environ['KVHOST_API_KEY'])\n"
        "print('to stderr', file=sys.stderr)\n"
        "raise SystemExit(3)\n"
    )
    code = (
        "import sys; from pathlib import Path; from kvhost.commands import running\n"
        f"sys.exit(running.run([sys.executable, '-c', {script!r}], Path('.'), Path('logs'), "
        "'deploy', lambda: ['key-7c1d0f4b9a']))"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO), "KVHOST_API_KEY": "key-7c1d0f4b9a"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, text=True,
                          capture_output=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 3
    assert "to stderr" in done.stderr
    told = re.search(r"log of this run: (\S+)", done.stderr)
    assert told
    log = tmp_path / told[1]
    assert "key ********" in log.read_text()
    assert "to stderr" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert len(list(logs.glob("*.log"))) == KEPT
    assert (logs / "notes.txt").exists()


def rows(*events: tuple[str, str, str, int]) -> list[dict[str, object]]:
    return [{"time": 100.0 + n, "host": host, "event": event, "text": text, "steps": steps}
            for n, (host, event, text, steps) in enumerate(events)]  # fmt: skip


def shown(board: running.Board, width: int = 100) -> list[str]:
    from rich.console import Console

    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(board.render(160.0))
    return captured.get().splitlines()


def test_each_host_is_seen_where_it_is() -> None:
    board = running.Board()
    board.take(rows(
        ("a", "connecting", "", 0), ("b", "connecting", "", 0), ("c", "connecting", "", 0),
        ("b", "unreachable", "no route", 0), ("a", "connected", "", 0),
        ("a", "step", "engine: install", 2), ("c", "step", "x", 1), ("c", "done", "x", 0),
    ))  # fmt: skip
    lines = shown(board)
    assert [line.split()[0] for line in lines] == ["a", "b", "c"]
    assert "0/2 engine: install" in lines[0]
    assert "55 s" in lines[0]
    assert "unreachable no route" in lines[1]
    assert "finished" in lines[2]
    assert board.stands() == ["a: step 0/2 engine: install", "b: unreachable no route"]


def test_two_hundred_hosts_fit_a_screen() -> None:
    board = running.Board()
    events = [(f"h{n}", "step", "engine", 9) for n in range(197)]
    events += [("h197", "failed", "cache", 0), ("h198", "unreachable", "away", 0)]
    events += [("h199", "step", "x", 1), ("h199", "done", "x", 0)]
    board.take(rows(*events))
    lines = shown(board)
    assert len(lines) <= running.MOST_LINES
    assert lines[0] == "200 hosts: 197 at work, 1 failed, 1 finished, 1 unreachable"
    assert [line.split()[0] for line in lines[1:4]] == ["h197", "h198", "h0"]


def test_a_log_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(OSError):
        open_log(tmp_path / "logs", "plan")


def test_on_a_terminal_the_hosts_are_shown_in_place_of_a_line_for_each(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from kvhost.records.progress import tell\n"
        "print('    [one] Connected', flush=True); tell('one', 'connecting')\n"
        "tell('one', 'step', 'engine: environment', 7); time.sleep(1)\n"
        "print('    [one] Error: executed 0 commands', file=sys.stderr, flush=True)\n"
        "tell('one', 'failed', 'engine: environment'); time.sleep(0.6)\n"
    )
    code = (
        "import sys; from pathlib import Path; from kvhost.commands import running\n"
        f"sys.exit(running.run([sys.executable, '-c', {script!r}], Path('.'), Path('logs'), 'up'))"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env,
                               stdin=theirs, stdout=theirs, stderr=theirs)  # fmt: skip
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(ours, 65536):
            seen += part
    os.close(ours)
    assert process.wait(30) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"one +0/7 engine: environment +[01] s", text), text
    assert re.search(r"one +failed 0/7 engine: environment", text), text
    assert "[one] Error: executed 0 commands" in text
    assert "[one] Connected" not in text
    assert "[one] Connected" in next((tmp_path / "logs").glob("*.log")).read_text()
