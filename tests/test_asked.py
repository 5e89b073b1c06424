"""Arguments that cannot be meant, and keys that are none: one line, before anything is done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvhost import working_copy
from tests.copy_tools import Copy

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]
PASSPHRASE = "phrase-71c0"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    path = tmp_path_factory.mktemp("copy")
    working_copy.make(path)
    return Copy(path)


@pytest.mark.parametrize(
    "command",
    ["plan", "drives", "logs nosuch", "release", "up", "up --batch 1", "drift", "purge"],
)
def test_a_limit_that_names_nobody_is_wrong_usage(copy: Copy, command: str) -> None:
    words = command.split()
    more = [] if "nosuch" in words else ["--limit", "nosuch"]
    inventory = copy.inventory('"@local", ("gpu-1", {"ssh_hostname": "127.0.0.1"})')
    code, text = copy.kvhost(words[0], *words[1:], *more, "--inventory", inventory)
    assert code == 2, text
    assert "--limit nosuch: no such host or group; there are @local, gpu-1." in text
    for wrong in ("no verdict", "could be reached", "Connecting to hosts"):
        assert wrong not in text


def test_a_limit_that_is_a_host_and_a_group_is_wrong_usage(copy: Copy) -> None:
    """pyinfra takes the group, and so all of its hosts: here that of the file, some.py."""
    inventory = copy.inventory('"@local", ("some", {"ssh_hostname": "127.0.0.1"})')
    for option in ("--limit", "--exclude"):
        code, text = copy.pyinfra(inventory, "exec", option, "some", "--", "true")
        assert (code, "Connecting" in text) == (2, False), text
        assert f"{option} some: a host and a group are called so" in text
    alone = copy.inventory('("some", {"ssh_hostname": "127.0.0.1", "ssh_port": 1})')
    code, text = copy.pyinfra(alone, "exec", "--limit", "some", "--", "true")
    assert (code, "127.0.0.1 port 1 cannot be reached" in text) == (1, True), text


def test_the_nearest_host_is_named_and_every_limit_counts(copy: Copy) -> None:
    inventory = copy.inventory('"@local", ("gpu-1", {"ssh_hostname": "127.0.0.1"})')
    for option, word in (("--limit", "gpu1"), ("--exclude", "gpu_1")):
        words = (inventory, "exec", "--limit", "@local", option, word, "--", "true")
        code, text = copy.pyinfra(*words)
        assert code == 2, text
        assert f"{option} {word}: no such host or group; did you mean gpu-1?" in text
    code, text = copy.pyinfra(inventory, "exec", "--limit", "nohost", "--", "true")
    assert code == 2
    assert "did you mean" not in text, "hosts is the group of all"
    both = ("--limit", "@local", "--exclude", "@loc*")
    code, text = copy.pyinfra(inventory, "exec", *both, "--", "true")
    assert (code, "leave no host" in text) == (2, True), text
    good = ("--limit", "@l*", "--exclude", "gpu-1")
    code, text = copy.pyinfra(inventory, "exec", *good, "--", "true")
    assert (code, "Success" in text) == (0, True), text
    code, text = copy.pyinfra(copy.inventory(""), "exec", "--", "true")
    assert (code, "the inventory has no host" in text) == (2, True), text


def test_data_without_a_value_is_wrong_usage(copy: Copy) -> None:
    for words in (("plan", "--data", "foo"), ("up", "--data=foo")):
        code, text = copy.kvhost(*words, "--inventory", "inventory.py")
        assert code == 2, text
        assert "--data 'foo' has no value: write --data KEY=VALUE" in text
        assert "Loading inventory" not in text
    secret = "sk-aaaaaaaaaaaaaaaaaaaaaaaa"
    code, text = copy.kvhost("plan", "--data", secret)
    assert (code, secret in text) == (2, False)


def test_the_digits_of_another_script_are_no_number(copy: Copy) -> None:
    for value in ("\uff11\uff12\uff13\uff14", "\u0668000", "-\u0967", "1\u2003"):
        code, text = copy.kvhost(
            "plan", "--inventory", "inventory.py", "--data", f"api_port={value}"
        )
        assert (code, "api_port: the digits of a number are 0 to 9" in text) == (2, True), text
        assert "Loading inventory" not in text
    name = ("--data", "served_model_name=\u0661\u0662x")  # text of another script is text
    code, text = copy.kvhost("plan", "--inventory", "inventory.py", *name, "--limit", "nosuch")
    assert "nosuch: no such host" in text


def test_a_way_in_which_a_failed_host_is_not_seen_is_refused(copy: Copy) -> None:
    for run in (copy.kvhost, copy.pyinfra):
        words = ("up", "--inventory") if run == copy.kvhost else ()
        more = () if run == copy.kvhost else ("exec", "--", "false")
        code, text = run(*words, copy.inventory('"@local"'), "--no-wait", *more)
        assert (code, "--no-wait: with it pyinfra" in text) == (2, True), text
        assert "Loading inventory" not in text


def keys(folder: Path) -> dict[str, tuple[Path, str]]:
    """Name -> a file that is no usable key, and what is to be said of it."""
    for name, phrase in (("good", ""), ("locked", PASSPHRASE)):
        argv = ("ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", str(folder / name))
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    (folder / "text").write_text("not a key\n")
    (folder / "bytes").write_bytes(bytes(range(256)) * 8)
    good = (folder / "good").read_text().splitlines()
    (folder / "cut").write_text("\n".join([*good[:2], good[-1], ""]))
    (folder / "ppk").write_text("PuTTY-User-Key-File-3: ssh-ed25519\n")
    os.mkfifo(folder / "pipe")
    says = {
        "gone": "no such file on the controller", "good.pub": "is a public key. Write the private",
        "text": "is not a private key", "bytes": "is not a private key", "cut": "is not a private",
        "ppk": "is a key of PuTTY", "pipe": "no such file", "locked": "ssh-add",
    }  # fmt: skip
    return {name: (folder / name, said) for name, said in says.items()}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="openssh-client")
def test_a_bad_key_fails_its_host_alone(copy: Copy, tmp_path: Path) -> None:
    bad = keys(tmp_path)
    rows = ['"@local"']
    for name, (path, _) in bad.items():
        rows.append(
            repr((name, {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "ssh_key": str(path)}))
        )
    wrong = {"ssh_hostname": "127.0.0.1", "ssh_key": str(tmp_path / "locked")}
    rows.append(repr(("wrong", {**wrong, "ssh_key_password": "another"})))
    code, text = copy.pyinfra(copy.inventory(", ".join(rows)), "exec", "--", "true")
    assert re.search(r"\[@local\] +Success", text), text
    assert code == 1
    for name, (path, said) in bad.items():
        [line] = [row for row in text.splitlines() if f"[{name}] " in row]
        assert said in line
        assert str(path) in line
    assert "the passphrase of ssh_key_password does not open it" in text


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="openssh-client")
def test_no_look_writes_no_host_whose_key_is_none(copy: Copy, tmp_path: Path) -> None:
    bad = keys(tmp_path)
    fleet = copy.path / "fleet.yaml"
    before = fleet.read_text()
    for name in ("gone", "good.pub", "text"):
        line = f"ssh -i {bad[name][0]} root@203.0.113.7"
        code, text = copy.kvhost("inventory", "add", line, "--no-look")
        assert (code, bad[name][1] in text) == (1, True), text
        assert fleet.read_text() == before
    for name in ("good", "locked"):
        line = f"ssh -i {tmp_path / name} root@203.0.113.7"
        code, text = copy.kvhost("inventory", "add", line, "--no-look")
        assert code == 0, text
    fleet.write_text(before)


@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="openssh-client")
def test_a_key_with_a_passphrase_is_taken_from_the_agent(copy: Copy, tmp_path: Path) -> None:
    """No server: that the connection gets as far as the port proves that the key was no fault."""
    path, _ = keys(tmp_path)["locked"]
    socket, ask = tmp_path / "agent", tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho {PASSPHRASE}\n")
    ask.chmod(0o700)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        env = {"SSH_AUTH_SOCK": str(socket), "SSH_ASKPASS": str(ask), "DISPLAY": ":0"}
        env |= {"SSH_ASKPASS_REQUIRE": "force"}
        for _ in range(100):
            code, text = copy.run("ssh-add", str(path), **env)
            if code == 0:
                break
        assert code == 0, text
        host = ("a", {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "ssh_key": str(path)})
        words = (copy.inventory(repr(host)), "exec", "--", "true")
        _, text = copy.pyinfra(*words, SSH_AUTH_SOCK=str(socket))
        assert "127.0.0.1 port 1 cannot be reached" in text, text
        _, text = copy.pyinfra(*words)
        assert "ssh-add" in text
    finally:
        agent.terminate()
        agent.wait(10)
