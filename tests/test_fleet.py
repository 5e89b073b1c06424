"""fleet.yaml: what is taken, every fault at once with its line, secrets by reference alone."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvhost.fleet import known_hosts
from kvhost.fleet.read import load_fleet, pyinfra_hosts
from kvhost.fleet.ways import way_to
from kvhost.fleet.yaml import FleetError
from kvhost.settings import validate_hosts

pytestmark = pytest.mark.fleet
REPO = Path(__file__).parents[1]

GOOD = """\
# the fleet of the cellar
settings:
  cache_limit_gib: 10
groups:
  gpu_a: {settings: {cache_limit_gib: 50, chunk_size: 512}}
  slow:
hosts:
  one:
    address: 192.0.2.1
    user: ann
    key: keys/id   # beside this file
    sudo: true
    sudo_password: {env: ONE_SUDO}
    groups: [gpu_a, slow]
    settings: {drive_serial: S7KHNJ0W123456A}
  p1:
    address: 203.0.113.7
    port: 40022
    role: pod
    volume: /workspace
    jump: me@bastion:2200
    password: {env: P1_LOGIN}
    host_key: any
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def faults(folder: Path, text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(FleetError) as caught:
        load_fleet(write(folder, text))
    return [(fault.line, fault.key, fault.what) for fault in caught.value.faults]


def test_hosts_as_pyinfra_has_them(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/id").touch(mode=0o600)
    env = {"ONE_SUDO": "pw-of-sudo", "P1_LOGIN": "pw-of-ssh"}
    groups = pyinfra_hosts(load_fleet(write(tmp_path, GOOD)), env)
    one, pod = (dict(groups["all"])[name] for name in ("one", "p1"))
    assert one["ssh_hostname"] == "192.0.2.1"
    assert one["ssh_key"] == str(tmp_path / "keys/id")
    assert one["ssh_known_hosts_file"] == str(tmp_path / "known_hosts")
    assert one["_sudo"] is True
    assert (one["cache_limit_gib"], one["drive_serial"]) == (50, "S7KHNJ0W123456A")
    assert (pod["base_dir"], pod["volume_dir"]) == ("/workspace/kvhost", "/workspace")
    assert (pod["ssh_port"], pod["ssh_known_hosts_file"]) == (40022, "/dev/null")
    assert pod["cache_limit_gib"] == 10
    assert (groups["gpu_a"], groups["pod"], groups["vm"]) == (["one"], ["p1"], ["one"])
    assert "pw-of" not in repr(groups), "the password is among the data that pyinfra shows"
    assert pod["ssh_config_file"] == "/dev/null", "a way in ~/.ssh/config is not the fleet's"
    assert "ssh_config_file" not in one


def test_every_fault_at_once_with_its_line(tmp_path: Path) -> None:
    found = faults(tmp_path, """\
setings: {}
groups:
  all: {settings: {}}
hosts:
  one:
    adress: 10.0.0.1
    port: "22"
    role: server
  two:
    address: root@10.0.0.1
    jump: "a b"
    sudo_password: hunter2
""")  # fmt: skip
    assert [(line, key) for line, key, _ in found] == [
        (1, "setings"),
        (3, "groups.all"),
        (5, "hosts.one.address"),
        (6, "hosts.one.adress"),
        (7, "hosts.one.port"),
        (8, "hosts.one.role"),
        (10, "hosts.two.address"),
        (11, "hosts.two.jump"),
        (12, "hosts.two.sudo_password"),
    ]
    with pytest.raises(FleetError) as caught:
        load_fleet(tmp_path / "fleet.yaml")
    said = str(caught.value)
    assert "hunter2" not in said
    assert "did you mean settings?" in said
    assert "did you mean address?" in said
    assert said.startswith(f"9 problems in {tmp_path / 'fleet.yaml'}. No host was reached.")


def test_faults_of_every_kind_come_in_one_round(tmp_path: Path) -> None:
    """Form, settings, secrets among settings, groups, what does not fit together, key files."""
    text = """\
settings:
  cache_limit_gb: 3
groups:
  all: {settings: {l1_gib: nope}}
  b:
    settings: {api_key: sk-aaaaaaaaaaaaaaaaaaaaaaaa}
hosts:
  one:
    address: root@10.0.0.1
    key: keys/gone
    groups: [b, "B B", c]
    settings: {chunk_size: 1}
  two:
    adress: 10.0.0.2
    role: server
    volume: /workspace
    sudo_password: {env: NOT_SET}
  'a b':
    address: 10.0.0.3
    key: keys/gone
    settings: {hf_token: x, 5: y}
  four: [10.0.0.4]
  five:
    address: 10.0.0.5
    jump: "a b"
    role: pod
    password: {file: secrets/none}
  six: {address: 10.0.0.5, sudo: 1, sudo_password: {env: NOT_SET}}
"""
    with pytest.raises(FleetError) as caught:
        load_fleet(write(tmp_path, text), env={})
    assert [(fault.line, fault.key) for fault in caught.value.faults] == [
        (2, "settings.cache_limit_gb"),
        (4, "groups.all"),
        (4, "groups.all.settings.l1_gib"),
        (6, "groups.b.settings.api_key"),
        (9, "hosts.one.address"),
        (10, "hosts.one.key"),
        (11, "hosts.one.groups"),
        (11, "hosts.one.groups.1"),
        (12, "hosts.one.settings.chunk_size"),
        (13, "hosts.two.address"),
        (14, "hosts.two.adress"),
        (15, "hosts.two.role"),
        (17, "hosts.two.sudo_password"),
        (18, "hosts.a b"),
        (20, "hosts.a b.key"),
        (21, "hosts.a b.settings.5"),
        (21, "hosts.a b.settings.hf_token"),
        (22, "hosts.four"),
        (25, "hosts.five.jump"),
        (26, "hosts.five.role"),
        (27, "hosts.five.password"),
        (28, "hosts.six.sudo"),
        (28, "hosts.six.sudo_password"),
    ]
    assert "sk-aaaa" not in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        "key: SECRET",
        "password: {env: SECRET}",
        "jump: SECRET/",
        "groups: [SECRET]",
        "user: SECRET/",
    ],
)
def test_a_secret_in_an_odd_place_is_not_shown(entry: str, tmp_path: Path) -> None:
    secret = "hf_" + "a" * 30
    text = f"hosts:\n  one: {{address: x, {entry.replace('SECRET', secret)}}}\n"
    with pytest.raises(FleetError) as caught:
        load_fleet(write(tmp_path, text), env={})
    assert "hf_" not in str(caught.value)
    assert caught.value.faults[0].line == 2


def test_what_hangs_on_a_broken_part_is_not_told_as_a_fault_of_its_own(tmp_path: Path) -> None:
    for text, key in {
        "groups: [gpu]\nhosts:\n  a: {address: x, groups: [gpu]}\n": "groups",
        "hosts:\n  a: {address: x, role: 3, volume: /w}\n": "hosts.a.role",
        "hosts:\n  a: {address: x, volume: '', role: pod}\n": "hosts.a.volume",
        "hosts:\n  a: {address: x}\n  b: {address: x, port: '23'}\n": "hosts.b.port",
        "hosts:\n  a: {address: x, sudo: 1, sudo_password: {env: A}}\n": "hosts.a.sudo",
        "hosts:\n  a: {address: ' ', jump: m}\n  b: {address: y, jump: n}\n": "hosts.a.address",
    }.items():
        assert [found[1] for found in faults(tmp_path, text)] == [key], text


def test_settings_are_checked_where_they_stand(tmp_path: Path) -> None:
    token = "erase-" + "0" * 32
    found = faults(tmp_path, f"""\
settings:
  cache_limit_gb: 3
groups:
  a:
    settings:
      drive_erase: {token}
      l1_gib: nope
hosts:
  one: {{address: 10.0.0.1, groups: [b]}}
  two: {{address: 10.0.0.1, settings: {{chunk_size: 1}}}}
""")  # fmt: skip
    assert [(line, key) for line, key, _ in found] == [
        (2, "settings.cache_limit_gb"),
        (6, "groups.a.settings.drive_erase"),
        (7, "groups.a.settings.l1_gib"),
        (9, "hosts.one.groups"),
        (10, "hosts.two.address"),
        (10, "hosts.two.settings.chunk_size"),
    ]
    assert "could reach more than the one host" in found[1][2]
    assert "one machine, two names" in found[4][2]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("hosts:\n  a: {address: x}\n  a: {address: y}\n", 3, "stands there twice"),
        ("hosts: [\n", 2, "expected"),
        ("- hosts\n", 1, "must begin with a key"),
        ("hosts:\n  p: {address: x, role: pod}\n", 2, "role: pod and volume belong together"),
        ("hosts:\n  'a b': {address: x}\n", 2, "must be letters"),
        ("hosts:\n  a: {address: x, sudo_password: {env: A}}\n", 2, "sudo is not asked for"),
        ("hosts:\n  a: {address: x, password: {env: A, file: b}}\n", 2, "names one place"),
        ("groups: {b: }\nhosts:\n  a: {address: x, groups: [b]}\n  b: {address: y}\n", 4,
         "is the name of a group too"),
        ("groups: {b: }\nhosts:\n  b: {address: y}\n", 3, "--limit would take all hosts of"),
        ("hosts:\n  vm: {address: y}\n", 2, "is the name of a group or a role"),
        ("hosts:\n  fleet: {address: y}\n", 2, "is the name of a group or a role"),
        ("hosts:\n  a: {address: x, port: 0}\n", 2, "must be a port"),
        ("hosts:\n  a: {address: '@local'}\n", 2, "this machine is called @local"),
        ("hosts:\n  '@local': {address: x}\n", 2, "this machine is called @local"),
        ("hosts:\n  '@local': {address: '@local', port: 22}\n", 2, "port means nothing here"),
        ("hosts:\n  a: {address: x, settings: {api_key_file: sk-aaaaaaaaaaaaaaaaaaaaaaaa}}\n", 2,
         "secret itself"),
    ],
)  # fmt: skip
def test_one_fault(tmp_path: Path, text: str, line: int, what: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    assert found[0][0] == line
    assert what in found[0][2]
    assert "sk-aaaa" not in str(found)


def test_a_secret_that_is_not_there_or_open_to_others(tmp_path: Path) -> None:
    text = """\
hosts:
  one: {address: a, sudo: true, sudo_password: {env: NOT_SET}}
  two: {address: b, password: {file: secrets/two}}
  three: {address: c}
"""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/two").write_text("pass word two\n")
    fleet = load_fleet(write(tmp_path, text))
    with pytest.raises(FleetError) as caught:
        pyinfra_hosts(fleet, {})
    said = [(fault.line, fault.what) for fault in caught.value.faults]
    assert said[0] == (2, "NOT_SET is not in the environment")
    assert said[1][0] == 3
    assert "chmod 600" in said[1][1]
    assert "pass word" not in str(caught.value)
    # with all that else is wrong, before any host is reached
    path = write(tmp_path, text.replace("address: c", "address: c, key: keys/gone"))
    with pytest.raises(FleetError) as caught:
        load_fleet(path, env={})
    assert [fault.line for fault in caught.value.faults] == [2, 3, 4]


def test_a_key_that_is_none_is_told_with_every_other_fault(tmp_path: Path) -> None:
    entry = "hosts:\n  a: {address: x, key: keys/gone, %s}\n"
    for fault in ("prot: 22", "groups: [nosuch]"):  # of the file's form, and of what it means
        said = [what for _, _, what in faults(tmp_path, entry % fault)]
        assert len(said) == 2, said
        assert f"no such file on the controller: {tmp_path / 'keys/gone'}" in said
    for name, mode, what in (("open.pem", 0o644, "has mode 0644, so"), ("a.pub", 0o600, "public")):
        (tmp_path / name).touch(mode=mode)
        [(line, _, said_of_it)] = faults(tmp_path, f"hosts:\n  a: {{address: x, key: {name}}}\n")
        assert line == 2
        assert said_of_it.startswith(f"{tmp_path / name} ")
        assert what in said_of_it


def test_a_key_with_nothing_below_it_is_one_that_was_just_begun(tmp_path: Path) -> None:
    text = "settings:\ngroups:\n  # none\nhosts:\n  # none yet\n"
    assert load_fleet(write(tmp_path, text)).file.hosts == {}


#: hosts that lie behind each other, and the logins that lead to each
WAYS = {
    "inner": ("{address: 10.0.0.5, jump: me@bastion}", "me@bastion:22"),
    "deep": ("{address: 10.0.0.6, jump: root@10.0.0.5:2222}", "me@bastion:22 root@10.0.0.5:2222"),
    "deeper": ("{address: 10.0.0.7, jump: 10.0.0.6}",
               "me@bastion:22 root@10.0.0.5:2222 10.0.0.6:22"),
    "two": ("{address: 10.0.0.8, jump: 'm@[2001:db8::1]:2200,10.0.0.9'}",
            "m@2001:db8::1:2200 ann@10.0.0.9:22"),
    "nine": ("{address: 10.0.0.9, user: ann}", ""),
}  # fmt: skip


@pytest.mark.parametrize("order", [list(WAYS), list(reversed(WAYS))], ids=["on", "back"])
def test_the_way_to_a_host_leads_through_every_jump_host(order: list[str], tmp_path: Path) -> None:
    """Whichever host the file has first; a host of the fleet on the way has its own key there."""
    text = "hosts:\n" + "".join(f"  {name}: {WAYS[name][0]}\n" for name in order)
    file = load_fleet(write(tmp_path, text)).file
    for name, (_, expected) in WAYS.items():
        hops = way_to(file, name)
        said = [f"{hop.user}@" * bool(hop.user) + f"{hop.address}:{hop.port}" for hop in hops]
        assert " ".join(said) == expected, name
    assert [hop.host for hop in way_to(file, "deeper")] == [None, None, "deep"]


KEY_A, KEY_B = "QUFBQQ==", "QkJCQg=="


def test_another_host_key_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("# mine\nother ssh-ed25519 QUFBQQ==\n")
    assert "first that is seen" in str(known_hosts.record(path, "h", 40022, "ssh-ed25519", KEY_A))
    assert known_hosts.record(path, "h", 40022, "ssh-ed25519", KEY_A) is None
    told = str(known_hosts.record(path, "h", 40022, "ssh-ed25519", KEY_B))
    assert f"{known_hosts.fingerprint(KEY_B)}, not {known_hosts.fingerprint(KEY_A)}" in told
    assert known_hosts.forget(path, "[h]:40022") == [known_hosts.fingerprint(KEY_B)]
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# mine", "other ssh-ed25519 QUFBQQ=="]
    assert [line.split()[2] for line in lines[2:]] == ["replaced:", "taken"]
    assert known_hosts.entry_name("h", 22) == "h"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="openssh-client")
def test_a_key_is_forgotten_however_its_line_was_written(tmp_path: Path) -> None:
    """Lines that people put there: several names, or hashed, as Debian's ssh writes them."""
    path, at = tmp_path / "known_hosts", "[203.0.113.7]:40022"
    path.write_text(f"gpu,{at},10.0.0.1 ssh-rsa {KEY_B}\n")
    assert known_hosts.entries(path, "203.0.113.7") == [at]
    assert known_hosts.forget(path, at) == [known_hosts.fingerprint(KEY_B)]
    assert path.read_text().splitlines()[1:] == [f"gpu,10.0.0.1 ssh-rsa {KEY_B}"]
    key = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    kind, text, *_ = key.with_suffix(".pub").read_text().split()
    path.write_text(f"{at} {kind} {text}\nother {kind} {text}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", path], check=True, capture_output=True)
    assert at not in path.read_text(), "it is hashed"
    assert known_hosts.entries(path, "203.0.113.7:40022") == [at]
    assert known_hosts.record(path, "203.0.113.7", 40022, kind, text) is None
    assert known_hosts.forget(path, at) == [known_hosts.fingerprint(text)]
    assert known_hosts.forget(path, at) == []
    assert known_hosts.entries(path, "other") == ["other"]


def test_an_address_is_found_among_the_known(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    names = ["h", "[h]:2200", "[i]:2200", "[i]:2201", "2001:db8::1", "[2001:db8::1]:2200"]
    path.write_text("".join(f"{name} ssh-ed25519 {KEY_A}\n" for name in names))
    for given, found in {
        "h": ["h"], "h:22": ["h"], "h:2200": ["[h]:2200"], "[h]:2200": ["[h]:2200"], "h:1": [],
        "i": ["[i]:2200", "[i]:2201"], "2001:db8::1": ["2001:db8::1"], "db8": [], "": [],
        "[2001:db8::1]:22": ["2001:db8::1"], "[2001:db8::1]:2200": ["[2001:db8::1]:2200"],
    }.items():  # fmt: skip
        assert known_hosts.entries(path, given) == found, given
    assert known_hosts.entries(tmp_path / "none", "h") == []


@pytest.mark.parametrize("name", ["home", "rented_vm", "pod"])
def test_an_example_inventory_holds_settings_that_are_taken(name: str) -> None:
    """Plain data, for people to edit: nothing of pyinfra is imported by it."""
    found = runpy.run_path(str(REPO / f"inventories/{name}.py"))
    (hosts,) = [value for value in found.values() if isinstance(value, list)]
    for host, data in hosts:
        foreign = frozenset(key for key in data if key.startswith(("ssh_", "_")))
        settings = validate_hosts({host: data}, foreign)[host]
        assert (settings.volume_dir is not None) == (name == "pod")
        assert settings.base_dir.startswith(settings.volume_dir or "/var/lib/kvhost")


def test_the_inventory_of_one_box_is_planned() -> None:
    argv = ["plan", "--json", "--inventory", "inventories/home.py", "--data",
            "base_dir=/var/lib/kvhost-home"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "kvhost.cli", *argv], cwd=REPO, text=True,
                          capture_output=True, check=False, timeout=120)  # fmt: skip
    plans = json.loads(next(row for row in done.stdout.splitlines() if row.startswith("{")))
    assert list(plans) == ["@local"]
    assert plans["@local"]["actions"]
