"""Hosts behind others, with a login at each on the way; whose fault it is, and what mends it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paramiko import ECDSAKey

from kvhost import working_copy
from tests.copy_tools import Copy

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]
OTHER = f"ecdsa-sha2-nistp256 {ECDSAKey.generate().get_base64()}"


@dataclass
class Sshd:
    """A double of sshd, and what it printed."""

    process: subprocess.Popen[str]
    address: str
    port: int

    @property
    def place(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    def said(self) -> list[str]:
        """What happened there, after it is ended."""
        self.process.terminate()
        return self.process.communicate(timeout=20)[0].splitlines()


Start = Callable[..., Sshd]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Sshd] = []

    def one(address: str, *more: str) -> Sshd:
        argv = [sys.executable, str(REPO / "tests/doubles/sshd.py"), address, *more]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        started.append(Sshd(process, address, int(process.stdout.readline())))
        return started[-1]

    yield one
    for sshd in started:
        sshd.process.kill()
        sshd.process.wait()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    working_copy.make(tmp_path)
    (tmp_path / "keys").mkdir()
    ECDSAKey.generate().write_private_key_file(str(tmp_path / "keys/id"))
    (tmp_path / "keys/id").chmod(0o600)
    return Copy(tmp_path)


def fleet(copy: Copy, **hosts: str) -> None:
    rows = (f"  {name}: {{user: root, key: keys/id, {entry}}}\n" for name, entry in hosts.items())
    (copy.path / "fleet.yaml").write_text("hosts:\n" + "".join(rows))


def reach(copy: Copy, name: str) -> tuple[int, str]:
    code, text = copy.pyinfra("inventories/fleet.py", "--limit", name, "exec", "--", "true")
    return code, " ".join(text.split())


@pytest.mark.parametrize("first", ["inner", "deep"])
def test_a_jump_host_behind_a_jump_host(first: str, copy: Copy, start: Start) -> None:
    """Whichever the file has first: all logins, with the key, at hosts whose keys are kept."""
    bastion, inner, deep = start("127.0.0.2"), start("127.0.0.3"), start("127.0.0.4")
    hosts = {
        "inner": f"address: {inner.address}, port: {inner.port}, jump: 'me@{bastion.place}'",
        "deep": f"address: {deep.address}, port: {deep.port}, jump: 'ann@{inner.place}'",
    }
    fleet(copy, **{name: hosts[name] for name in sorted(hosts, reverse=first == "inner")})
    for name in hosts:
        code, text = reach(copy, name)
        assert (code, "[y/n]" in text) == (0, False), text
    known = (copy.path / "known_hosts").read_text()
    for sshd in (bastion, inner, deep):
        assert f"[{sshd.address}]:{sshd.port} " in known
    assert bastion.said() == 2 * ["login me", f"to {inner.address} {inner.port}"]
    assert inner.said() == ["login root", "login ann", f"to {deep.address} {deep.port}"]
    assert deep.said() == ["login root"]


def test_jump_hosts_with_an_ipv6_address_and_a_port(copy: Copy, start: Start) -> None:
    bastion, inner, deep = start("::1"), start("::1"), start("127.0.0.4")
    way = f"me@{bastion.place},ann@{inner.place}"
    fleet(copy, deep=f"address: {deep.address}, port: {deep.port}, jump: '{way}'")
    code, text = reach(copy, "deep")
    assert code == 0, text
    assert bastion.said() == ["login me", f"to ::1 {inner.port}"]
    assert inner.said() == ["login ann", f"to {deep.address} {deep.port}"]


def test_a_fault_of_a_jump_host_is_told_as_its_own(copy: Copy, start: Start) -> None:
    bastion, deep = start("127.0.0.2", "--only", "me"), start("127.0.0.4")
    at = f"address: {deep.address}, port: {deep.port}"
    known, who = copy.path / "known_hosts", f"the jump host {bastion.address} port {bastion.port}"
    other = f"[{bastion.address}]:{bastion.port} {OTHER}\n"
    known.write_text(other)
    fleet(copy, deep=f"{at}, jump: 'me@{bastion.place}'")
    code, text = reach(copy, "deep")
    assert code == 1
    assert f"{who} shows another host key than the one kept in known_hosts." in text, text
    (mend,) = re.findall(r"If you know that it is new: kvhost (inventory new-key \S+)", text)
    assert copy.kvhost(*mend.split())[0] == 0
    code, text = reach(copy, "deep")
    assert code == 0, text
    code, text = copy.kvhost("inventory", "new-key", "127.0.0.9")
    assert (code, "and no such address in known_hosts" in text) == (1, True)

    fleet(copy, deep=f"{at}, jump: 'you@{bastion.place}'")
    text = reach(copy, "deep")[1]
    assert f"{who} lets nobody in with this login and key: " in text
    assert "Is the user right (jump: USER@HOST), and is the key (key: FILE of deep)" in text

    fleet(copy, deep=f"{at}, jump: 'me@127.0.0.2:1'")
    text = reach(copy, "deep")[1]
    assert "the jump host 127.0.0.2 port 1 cannot be reached: Could not connect" in text

    fleet(copy, deep=f"address: {deep.address}, port: 1, jump: 'me@{bastion.place}'")
    text = reach(copy, "deep")[1]
    assert f"{deep.address} port 1 cannot be reached from {who}: " in text

    # one that has a name in the fleet, and whose key must be known
    fleet(copy, deep=f"{at}, jump: 'me@{bastion.place}'",
          gate=f"address: {bastion.address}, port: {bastion.port}, host_key: known")  # fmt: skip
    known.write_text("")
    text = reach(copy, "deep")[1]
    assert (
        f"the jump host gate, {bastion.address} port {bastion.port} is not in known_hosts" in text
    )


def test_the_hosts_own_fault_is_its_own_behind_a_jump_host(copy: Copy, start: Start) -> None:
    bastion, deep = start("127.0.0.2"), start("127.0.0.4", "--only", "root")
    at, jump = f"address: {deep.address}, port: {deep.port}", f"jump: 'me@{bastion.place}'"
    (copy.path / "known_hosts").write_text(f"[{deep.address}]:{deep.port} {OTHER}\n")
    fleet(copy, deep=f"{at}, {jump}")
    text = reach(copy, "deep")[1]
    assert "If you know that it is new: kvhost inventory new-key deep" in text
    assert copy.kvhost("inventory", "new-key", "deep")[0] == 0
    code, text = reach(copy, "deep")
    assert code == 0, text
    (copy.path / "fleet.yaml").write_text(
        f"hosts:\n  deep: {{user: nobody, key: keys/id, {at}, {jump}}}\n"
    )
    text = reach(copy, "deep")[1]
    assert f"{deep.address} port {deep.port} lets nobody in" in text
    assert "the jump host" not in text


def test_another_key_of_a_host_that_is_added(copy: Copy, start: Start) -> None:
    """fleet.yaml has not its address yet, so that new-key would forget another key, or none."""
    sshd, bastion = start("127.0.0.2"), start("127.0.0.3")
    (copy.path / "known_hosts").write_text(
        "".join(f"[{one.address}]:{one.port} {OTHER}\n" for one in (sshd, bastion))
    )
    line = f"root@{sshd.address} -p {sshd.port} -i keys/id"
    text = copy.kvhost("inventory", "add", f"ssh {line}", "--name", "new")[1]
    assert "If you know that it is new: the same command with --new-key" in text
    text = copy.kvhost("inventory", "add", f"ssh {line} -J me@{bastion.place}", "--name", "new")[1]
    (mend,) = re.findall(r"If you know that it is new: kvhost (inventory new-key \S+)", text)
    assert copy.kvhost(*mend.split())[0] == 0
    assert bastion.address not in re.sub("#.*", "", (copy.path / "known_hosts").read_text())


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="openssh-client")
@pytest.mark.parametrize("kept", ["known_hosts", ".ssh/known_hosts"])
def test_another_key_of_a_host_that_is_not_of_the_fleet(
    kept: str, copy: Copy, start: Start
) -> None:
    """What is said works there too: of a file that the inventory names, and of the login's own."""
    sshd = start("127.0.0.2", "--only", "root")
    data = {"ssh_hostname": sshd.address, "ssh_port": sshd.port, "ssh_user": "root",
            "ssh_key": "keys/id"}  # fmt: skip
    if kept == "known_hosts":
        data["ssh_known_hosts_file"] = kept
    known = copy.path / kept
    known.parent.mkdir(exist_ok=True)
    known.write_text(f"[{sshd.address}]:{sshd.port} {OTHER}\n")

    def run(**more: str) -> tuple[int, str]:
        inventory = copy.inventory(repr(("pod-1", data | more)))
        code, text = copy.pyinfra(inventory, "exec", "--", "true")
        return code, " ".join(text.split())

    code, text = run()
    assert code == 1
    assert f"shows another host key than the one kept in {known}. " in text
    (mend,) = re.findall(r"If you know that it is new: (ssh-keygen -R \S+ -f \S+)", text)
    subprocess.run(mend, shell=True, check=True, capture_output=True)
    code, text = run(ssh_strict_host_key_checking="yes")
    assert f"is not in {known}, and ssh_strict_host_key_checking is" in text
    assert 'or set ssh_strict_host_key_checking to "accept-new"' in text
    code, text = run()
    assert code == 0, text
    text = run(ssh_user="nobody")[1]
    assert "Is ssh_user right, and is the key (ssh_key) among" in text


def test_a_jump_host_of_the_users_own_configuration(copy: Copy, start: Start) -> None:
    bastion, target = start("127.0.0.2", "--only", "me"), start("127.0.0.4")
    (copy.path / ".ssh").mkdir()
    config, known = copy.path / ".ssh/config", copy.path / ".ssh/known_hosts"
    config.write_text(f"Host *.4\n  ProxyJump me@{bastion.place}\nHost {bastion.address}\n"
                      f"  IdentityFile {copy.path}/keys/id\n  StrictHostKeyChecking accept-new\n"
                      )  # fmt: skip
    known.write_text(f"[{bastion.address}]:{bastion.port} {OTHER}\n")
    host = f"('a', {{'ssh_hostname': '{target.address}', 'ssh_port': {target.port}}})"
    inventory = copy.inventory(host)
    text = " ".join(copy.pyinfra(inventory, "exec", "--", "true")[1].split())
    who = f"a jump host (ProxyJump of your SSH configuration) before {target.address} port"
    assert f"{who} {target.port} shows another host key" in text
    assert f"`ssh {bastion.address}` says which line of which file it is" in text
    known.unlink()
    config.write_text(config.read_text().replace("me@", "you@"))
    text = " ".join(copy.pyinfra(inventory, "exec", "--", "true")[1].split())
    assert f"{who} {target.port} lets nobody in" in text
