"""The lines that providers show, read as ssh itself reads them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvhost.fleet.ssh_line import LineError, parse

pytestmark = pytest.mark.fleet

#: line -> address, user, port, key, jump
LINES = {
    "ssh root@203.0.113.7 -p 40022 -i key": ("203.0.113.7", "root", 40022, "key", None),
    "ssh -p 40022 root@203.0.113.7 -L 8080:localhost:8080": (
        "203.0.113.7", "root", 40022, None, None),
    "ssh -p40022 -i ~/.ssh/id_ed25519 root@203.0.113.7": (
        "203.0.113.7", "root", 40022, "~/.ssh/id_ed25519", None),
    "ssh ubuntu@vm.example.com": ("vm.example.com", "ubuntu", None, None, None),
    "ssh -l ubuntu vm.example.com -p 22": ("vm.example.com", "ubuntu", 22, None, None),
    "$ ssh root@203.0.113.7 -p 2222": ("203.0.113.7", "root", 2222, None, None),
    "/usr/bin/ssh -vp 2222 root@203.0.113.7": ("203.0.113.7", "root", 2222, None, None),
    "root@203.0.113.7 -p 2222": ("203.0.113.7", "root", 2222, None, None),
    "ssh://root@203.0.113.7:40022": ("203.0.113.7", "root", 40022, None, None),
    "ssh ssh://root@[2001:db8::1]:40022": ("2001:db8::1", "root", 40022, None, None),
    "ssh root@2001:db8::1": ("2001:db8::1", "root", None, None, None),
    "ssh -J me@bastion:2200,two root@10.0.0.5": (
        "10.0.0.5", "root", None, None, "me@bastion:2200,two"),
    "ssh -o ProxyJump=me@bastion -o Port=2222 -o User=root -o 'IdentityFile k' gpu": (
        "gpu", "root", 2222, "k", "me@bastion"),
    "ssh -o ProxyCommand='ssh -W %h:%p me@bastion' root@10.0.0.5": (
        "10.0.0.5", "root", None, None, "me@bastion"),
    "ssh -oHostName=203.0.113.7 -oport=2222 gpu": ("203.0.113.7", None, 2222, None, None),
    "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@h": (
        "h", "root", None, None, None),
    "ssh abc123-64410@ssh.example.io -i ~/.ssh/id": (
        "ssh.example.io", "abc123-64410", None, "~/.ssh/id", None),
    "ssh -i 'my key' -A -tt root@h -N -D 1080": ("h", "root", None, "my key", None),
    "ssh root@h:2222": ("h", "root", 2222, None, None),
    "ssh -p 1 -p 2 -i a -i b root@h": ("h", "root", 1, "a", None),
    "ssh root@h \\\n  -p 2222": ("h", "root", 2222, None, None),
    "ssh root@h -p 2222 nvidia-smi -L": ("h", "root", 2222, None, None),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_names_its_host(line: str) -> None:
    found = parse(line)
    assert (found.address, found.user, found.port, found.key, found.jump) == LINES[line]


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh here")
@pytest.mark.parametrize(
    "line",
    [line for line in LINES if line.startswith("ssh ") and "root@h:2222" not in line
     and "ProxyCommand" not in line and "2001:db8::1]" not in line],
)  # fmt: skip
def test_ssh_itself_reads_it_the_same_way(line: str, tmp_path: Path) -> None:
    """`ssh -G` prints what a line comes to; of keys only those that are there."""
    for name in ("key", "k", "my key", "a", "b"):
        (tmp_path / name).touch()
    words = shlex.split(line.replace("\\\n", " "))
    done = subprocess.run(
        ["ssh", "-F", "none", "-G", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = dict(row.split(" ", 1) for row in reversed(done.stdout.splitlines()) if " " in row)
    found = parse(line)
    assert rows["hostname"] == found.address
    assert int(rows["port"]) == (found.port or 22)
    if found.user:
        assert rows["user"] == found.user
    if found.key and not found.key.startswith("~"):
        assert rows["identityfile"] == found.key
    assert rows.get("proxyjump") == found.jump


WRONG = {
    "ssh": "no host",
    "": "no host",
    "ssh root@203.0.113.7 -p <port>": "placeholder",
    "ssh root@203.0.113.7 -p 70000": "no port",
    "ssh <user>@203.0.113.7": "no login",
    "ssh root@h -p": "lacks its value",
    "ssh 'root@h": "quotes",
    "scp file root@h:": "not ssh",
    "ssh ssh://root:pass@h": "password in the line",
    "ssh http://h": "ssh://",
    "ssh -o ProxyCommand='nc -X 5 %h %p' root@h": "jump hosts",
    "ssh -J 'a b' root@h": "-J",
    "ssh -Q key root@h": "no connection",
    "ssh root@'h;reboot'": "no name",
    "ssh @h": "no user",
    "ssh -o Port root@h": "NAME=VALUE",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_taken_says_why(line: str) -> None:
    with pytest.raises(LineError, match=WRONG[line]):
        parse(line)


def test_what_is_left_out_is_said() -> None:
    notes = " ".join(parse("ssh -o StrictHostKeyChecking=no -L 1:h:2 root@h uptime").notes)
    assert "known_hosts" in notes
    assert "forwards a port" in notes
    assert "uptime" in notes
