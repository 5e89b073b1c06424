"""Real sshd on hosts of the lab: a host is looked at and written, keys, jumps, sudo, no sftp."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhost import working_copy
from tests.lab.nspawn import Host, Lab, until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(os.geteuid() != 0, reason="root: namespaces and containers"),
]
REPO = Path(__file__).parents[1]
PASSWORD = "sudo-91c4e0 'x $y"  # planted, and searched for

#: a user whose sudo asks; sshd without sftp on 2201, and one whose host key changes on 2202
SETUP = f"""
useradd --create-home --shell /bin/bash pw
chpasswd <<'END'
pw:{PASSWORD}
END
echo 'pw ALL=(ALL:ALL) ALL' > /etc/sudoers.d/pw
install -d -m 700 -o pw -g pw /home/pw/.ssh
install -m 600 -o pw -g pw /home/deploy/.ssh/authorized_keys /home/pw/.ssh/authorized_keys
mkdir -p /run/sshd /etc/keys
for n in a b; do ssh-keygen -q -t ed25519 -N '' -f /etc/keys/$n; done
printf 'Port 2201\\nPidFile /run/nosftp.pid\\nUsePAM yes\\nUseDNS no\\n' > /etc/ssh/nosftp
for n in a b; do
  printf "Port 2202\\nPidFile /run/key.pid\\nUsePAM yes\\nUseDNS no\\nHostKey /etc/keys/$n\\n" \
    > /etc/ssh/key-$n
  echo 'Subsystem sftp internal-sftp' >> /etc/ssh/key-$n
done
/usr/sbin/sshd -f /etc/ssh/nosftp
/usr/sbin/sshd -f /etc/ssh/key-a
"""


@dataclass
class Site:
    """A working copy in the network of two hosts."""

    lab: Lab
    one: Host
    two: Host
    copy: Path

    @property
    def fleet(self) -> Path:
        return self.copy / "fleet.yaml"

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KVHOST_", "PYTEST"))}
        return subprocess.run(
            self.lab.argv(*argv), cwd=self.copy, text=True, timeout=120, check=False,
            start_new_session=True,  # no terminal
            env={**keep, "PYTHONPATH": f"{self.copy}:{REPO}", "HOME": str(self.copy), **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kvhost(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "kvhost.cli", *words, **env)

    def add(self, line: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.kvhost("inventory", "add", f"ssh -i {self.lab.key} {line}", *more, **env)

    def pyinfra(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("pyinfra"))
        return self.run(program, "-y", "inventories/fleet.py", *words, **env)

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.copy / "logs").glob("*.log"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Lab, Host, Host]]:
    with Lab() as lab:
        one, two = lab.host("one", boot=False), lab.host("two", boot=False)
        for host in (one, two):
            host.boot(wait=False)
        for host in (one, two):
            host.wait()
        one.root("sh", "-ec", SETUP)
        yield lab, one, two


@pytest.fixture
def site(hosts: tuple[Lab, Host, Host], tmp_path: Path) -> Site:
    working_copy.make(tmp_path)
    return Site(*hosts, tmp_path)


def test_a_host_is_looked_at_and_written(site: Site) -> None:
    before = "# mine\nsettings: {cache_limit_gib: 3}   # small\nhosts:\n  # none yet\n"
    site.fleet.write_text(before)
    line = f"-p 22 deploy@{site.one.address} -L 8000:localhost:8000 -o StrictHostKeyChecking=no"
    done = site.add(line, "--name", "one", "--group", "cellar")
    assert done.returncode == 0, done.stdout
    for words in ("Debian GNU/Linux 12", "systemd", "deploy, sudo without a password",
                  "GPU       none seen", "files by  sftp", "-L 8000:localhost:8000"):  # fmt: skip
        assert words in done.stdout, done.stdout
    text = site.fleet.read_text()
    assert text.startswith("# mine\nsettings: {cache_limit_gib: 3}   # small\nhosts:\n")
    assert f"    address: {site.one.address}\n    user: deploy\n" in text
    assert "    sudo: true\n" in text
    assert "groups: [cellar]" in text or "- cellar" in text
    assert f"{site.one.address} " in (site.copy / "known_hosts").read_text()
    planned = site.kvhost("plan", "--json")
    plan = json.loads(next(row for row in planned.stdout.splitlines() if row.startswith('{"one"')))
    assert "not_root" not in [refusal["code"] for refusal in plan["one"]["refusals"]]
    # the same host once more is no second host
    again = site.add(line)
    assert again.returncode == 0, again.stdout
    assert site.fleet.read_text().count("address:") == 1


def test_a_host_that_is_not_there_is_not_written(site: Site) -> None:
    text = site.fleet.read_text()
    done = site.add(f"deploy@{site.one.address} -p 2999")
    assert done.returncode == 1
    assert f"{site.one.address} port 2999 cannot be reached" in done.stdout
    assert "not written" in done.stdout
    wrong = site.add(f"nobody@{site.one.address}")
    assert "lets nobody in with this login and key" in wrong.stdout
    assert site.fleet.read_text() == text


def test_sudo_with_a_password(site: Site) -> None:
    line = f"pw@{site.one.address}"
    done = site.add(line)
    assert done.returncode == 1
    assert "user pw is not root, and sudo asks for a password" in done.stdout
    wrong = site.add(line, "--sudo-password-env", "PW_SUDO", PW_SUDO="wrong-5521")
    assert wrong.returncode == 1
    assert "sudo does not take the password of sudo_password" in wrong.stdout
    unset = site.add(line, "--sudo-password-env", "PW_SUDO")
    assert "PW_SUDO is not in the environment" in unset.stdout
    # every command line of the host, while a run goes on, as any user there sees them
    watch = (
        "import glob, sys, time\nend = time.time() + 60\nseen = set()\n"
        "while time.time() < end and not __import__('os').path.exists('/tmp/stop'):\n"
        "    for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "        try: seen.add(open(path, 'rb').read())\n"
        "        except OSError: pass\n"
        "open('/tmp/seen', 'wb').write(b'\\n'.join(seen))\n"
    )
    watcher = subprocess.Popen(site.one.root_argv("python3", "-c", watch))
    try:
        done = site.add(line, "--name", "pw", "--sudo-password-env", "PW_SUDO", PW_SUDO=PASSWORD)
        assert done.returncode == 0, done.stdout
        planned = site.kvhost("plan", "--json", PW_SUDO=PASSWORD)
    finally:
        site.one.root("touch", "/tmp/stop")
        watcher.wait(70)
    plan = json.loads(next(row for row in planned.stdout.splitlines() if row.startswith('{"pw"')))
    assert "not_root" not in [refusal["code"] for refusal in plan["pw"]["refusals"]]
    seen = site.one.root("cat", "/tmp/seen")
    assert "sudo\0-H\0-A" in seen, "the watcher saw no sudo: it proves nothing"
    for told in (seen, site.logs(), done.stdout, planned.stdout, site.fleet.read_text()):
        assert PASSWORD not in told
        assert shlex.quote(PASSWORD) not in told
    left = site.one.root("sh", "-c", "ls /dev/shm /tmp /run/user/* 2>/dev/null; true")
    assert "askpass" not in left
    # without a password it says what to write, and asks nobody
    site.fleet.write_text(re.sub(r"    sudo_password:\n +env: PW_SUDO\n", "",
                                 site.fleet.read_text()))  # fmt: skip
    asked = site.pyinfra("exec", "--", "true")
    assert "sudo asks for a password. Write sudo_password: {env: NAME}" in asked.stdout


def test_an_sshd_without_sftp(site: Site) -> None:
    done = site.add(f"deploy@{site.one.address} -p 2201", "--name", "bare")
    assert done.returncode == 0, done.stdout
    assert "files by  scp" in done.stdout
    assert "transfer: scp" in site.fleet.read_text()
    (site.copy / "up.txt").write_text("sent")
    put = ("files.put", "src=up.txt", "_sudo=False")
    done = site.pyinfra(*put, "dest=/tmp/by-scp")
    assert site.one.read("/tmp/by-scp") == "sent", done.stdout
    # one who wrote the host by hand and does not know: by scp all the same, and said
    site.fleet.write_text(site.fleet.read_text().replace("transfer: scp", "transfer: sftp"))
    done = site.pyinfra(*put, "dest=/tmp/by-itself")
    assert "sshd has no sftp: files go by scp" in done.stdout
    assert site.one.read("/tmp/by-itself") == "sent"
    site.one.root("mv", "/usr/bin/scp", "/usr/bin/scp.away")
    try:
        done = site.pyinfra(*put, "dest=/tmp/by-none")
        assert done.returncode == 1
        assert "apt-get install openssh-sftp-server" in done.stdout
        refused = site.add(f"deploy@{site.one.address} -p 2201", "--name", "bare")
        assert refused.returncode == 1
        assert "there is no scp" in refused.stdout
    finally:
        site.one.root("mv", "/usr/bin/scp.away", "/usr/bin/scp")


def test_a_key_with_a_passphrase_by_the_agent(site: Site, tmp_path: Path) -> None:
    """A login with the agent's key, where the agent holds others too; without it, one line."""
    key, other, socket, ask = (tmp_path / name for name in ("id", "other", "agent.sock", "ask"))
    shutil.copy(site.lab.key, key)
    shutil.copy(site.lab.key.with_suffix(".pub"), tmp_path / "id.pub")
    new = ("ssh-keygen", "-q", "-f")
    subprocess.run([*new, str(key), "-p", "-P", "", "-N", PASSWORD], check=True)
    subprocess.run([*new, str(other), "-t", "ed25519", "-N", ""], check=True)
    ask.write_text(f"#!/bin/sh\necho {shlex.quote(PASSWORD)}\n")
    ask.chmod(0o700)
    env = {"SSH_AUTH_SOCK": str(socket)}
    asks = {**env, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as agent:
        try:
            until(socket.exists, 10, "the agent's socket")
            assert site.run("ssh-add", str(other), str(key), **asks).returncode == 0
            line = f"ssh -i {key} deploy@{site.one.address}"
            done = site.kvhost("inventory", "add", line, "--name", "locked", **env)
            assert done.returncode == 0, done.stdout
            assert "Success" in site.pyinfra("exec", "--", "true", **env).stdout
        finally:
            agent.terminate()
    alone = site.pyinfra("exec", "--", "true", SSH_AUTH_SOCK="")
    assert f"{key} has a passphrase, and there is no terminal" in alone.stdout


def sshd_with(host: Host, key: str) -> None:
    host.root("sh", "-ec", f"kill $(cat /run/key.pid); sleep 0.3; /usr/sbin/sshd -f /etc/ssh/{key}")


def test_an_address_that_comes_back_with_another_key(site: Site) -> None:
    sshd_with(site.one, "key-a")
    name = ("--name", "rented")
    added = site.add(f"deploy@{site.one.address} -p 2202", *name)
    assert added.returncode == 0, added.stdout
    sshd_with(site.one, "key-b")
    refused = site.kvhost("plan", "--limit", "rented")
    assert refused.returncode == 1
    assert "shows another host key than the one kept in known_hosts" in refused.stdout
    assert "kvhost inventory new-key rented" in refused.stdout
    done = site.kvhost("inventory", "new-key", "rented")
    assert re.search(rf"\[{site.one.address}\]:2202: SHA256:\S+ taken out of known_hosts",
                     done.stdout), done.stdout  # fmt: skip
    assert "Connected" in site.pyinfra("exec", "--", "true").stdout
    known = (site.copy / "known_hosts").read_text()
    assert re.search(rf"(?m)^# \S+ taken out: \[{site.one.address}\]:2202 ssh-ed25519", known)
    # a machine that is another one each time
    entry = site.fleet.read_text()
    site.fleet.write_text(entry.replace("    user: deploy", "    user: deploy\n    host_key: any"))
    sshd_with(site.one, "key-a")
    done = site.pyinfra("exec", "--", "true")
    assert "accepted and recorded (host_key: any)" in done.stdout
    assert "Connected" in done.stdout
    # and one whose key must be known before
    (site.copy / "known_hosts").write_text("")
    before = "    user: deploy\n    host_key: known"
    site.fleet.write_text(entry.replace("    user: deploy", before))
    done = site.pyinfra("exec", "--", "true")
    assert "is not in known_hosts, and host_key is known" in done.stdout


def test_by_a_jump_host(site: Site) -> None:
    done = site.add(f"-J deploy@{site.one.address} deploy@{site.two.address}", "--name", "two")
    assert done.returncode == 0, done.stdout
    assert "Connected" in site.pyinfra("exec", "--", "true").stdout
    journal = site.two.root("journalctl", "--no-pager", "-o", "cat")
    assert f"Accepted publickey for deploy from {site.one.address} " in journal
    known = (site.copy / "known_hosts").read_text()
    assert site.one.address in known
    assert site.two.address in known
