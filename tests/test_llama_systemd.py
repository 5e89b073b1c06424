"""A real llama-server under a real systemd: saved before every stop, restored after a reboot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import engine_program
from kvhost.reports.kept import latest_report
from tests.e2e_tools import Done, make_site
from tests.lab.nspawn import Host, Lab, until
from tests.lab.nspawn_engine import engine_binds
from tests.llama_tools import WHY_NONE, binary

pytestmark = [pytest.mark.systemd, pytest.mark.runners, pytest.mark.full]
BASE, OWN = "/var/lib/kvhost", "/opt/llama"
KEY = "sk-lab-4bd02f7c61"
LIBRARY = "usr/lib/x86_64-linux-gnu/libgomp.so.1"
#: asks in the host itself: a prompt of 400 bytes by its seed
ASK = """import json, random, sys, urllib.request as u
draw = random.Random(int(sys.argv[1]))
body = {{"prompt": [draw.randrange(32, 127) for _ in range(400)], "n_predict": 8,
        "temperature": 0, "id_slot": 0, "return_tokens": True}}
head = {{"Content-Type": "application/json", "Authorization": "Bearer {key}"}}
told = json.load(u.urlopen(u.Request("http://127.0.0.1:8000/completion",
                                     json.dumps(body).encode(), head)))
print(json.dumps([told["tokens"], told["timings"]["cache_n"]]))
"""


class Site:
    """A host with systemd, a copy of the repository as its controller."""

    def __init__(self, lab: Lab, folder: Path, program: Path) -> None:
        self.lab, self.copy = lab, make_site(folder / "controller")
        own = folder / "own"
        own.mkdir()
        shutil.copy(program, own / "llama-server")
        tools = f"{BASE}/tools"
        binds = {tools: engine_binds(BASE)[tools], OWN: str(own)}
        self.host: Host = lab.host("kv", binds_ro=binds, boot=False)
        state = self.host.tree / BASE.lstrip("/") / "state"
        state.mkdir(parents=True)
        (state / "run.lock.guard").touch()
        self.give_libgomp()
        self.host.boot()
        self.inventory = lab.inventory(folder / "hosts.py")
        digest = engine_program.sha256(str(program))
        self.source = f"{OWN}/llama-server#sha256={digest}"

    def give_libgomp(self) -> None:
        """Its network reaches no mirror, and the image lacks that one package."""
        shutil.copy(Path("/") / LIBRARY, self.host.tree / LIBRARY)
        with (self.host.tree / "var/lib/dpkg/status").open("a") as status:
            status.write(
                "\nPackage: libgomp1\nStatus: install ok installed\nArchitecture: amd64\n"
                "Maintainer: the test\nVersion: 12\nDescription: the test's\n"
            )

    def pyinfra(self, *words: str, **data: str) -> Done:
        given = {"runner": "llama_server", "llama_binary": f'"{self.source}"'}
        given |= {"max_model_len": "4096", "verify_prompt_tokens": "1200", "cache_limit_gib": "1"}
        given |= {"free_floor_gib": "0.2", **data}
        flags = [w for key, value in given.items() for w in ("--data", f"{key}={value}")]
        program = Path(sys.executable).with_name("pyinfra")
        argv = self.lab.argv(str(program), str(self.inventory), *(words or ("deploy.py", "-y")))
        done = subprocess.run(
            [*argv, *flags], cwd=self.copy.repo, text=True, timeout=600, check=False,
            env={**self.copy.own_env, "KVHOST_API_KEY": KEY},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)

    def ask(self, seed: int) -> list[Any]:
        """The answer, and how many tokens of the prompt were there already."""
        text = self.host.root("python3", "-c", ASK.format(key=KEY), str(seed))
        return list(json.loads(text))

    @property
    def base(self) -> Path:
        return self.host.tree / BASE.lstrip("/")

    def note(self) -> dict[str, Any]:
        (path,) = self.base.glob("tier/ns-*/.slot-0.json")
        return dict(json.loads(path.read_text()))

    def restored(self) -> bool:
        """Whether the keeper has restored what it had, into the process that runs now."""
        who = json.loads((self.base / "run/runner.json").read_text())
        paths = list(self.base.glob("tier/ns-*/.slots-state.json"))
        if not paths:
            return False
        state = json.loads(paths[0].read_text())
        server = f"{who['boot_id']}:{who['pid']}:{who['start_ticks']}"
        return bool(state["restored"]) and state["server"] == server

    def running(self) -> bool:
        said = self.host.root("systemctl", "is-active", "kvhost-runner", "kvhost-slots", ok=False)
        return said.split() == ["active", "active"]

    def wait_restored(self) -> None:
        until(lambda: self.running() and self.restored(), 120, "the keeper restores")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.fail("these tests need root: namespaces, mounts, containers (docs/testing.md)")
    program = binary()
    if program is None:
        pytest.skip(WHY_NONE)
    with Lab() as lab:
        yield Site(lab, tmp_path_factory.mktemp("llama"), program)


def test_from_nothing_to_a_verdict_and_nothing_to_do_again(site: Site) -> None:
    done = site.pyinfra()
    assert done.code == 0, done.text[-6000:]
    report = latest_report(site.copy.repo / "reports", "kv")
    assert report is not None and report.persisted == "PASS"
    again = site.pyinfra()
    assert again.code == 0 and again.changed() == [], again.text[-3000:]


def test_a_stop_of_the_runner_alone_saves_first(site: Site) -> None:
    answer, cached = site.ask(1)
    assert cached == 0
    site.host.root("systemctl", "stop", "kvhost-runner")
    assert site.note()["why"] == "stop" and site.note()["tokens"] >= 400
    site.host.root("systemctl", "start", "kvhost-runner")
    site.wait_restored()
    assert site.ask(1) == [answer, 399]


def test_a_reboot_saves_and_restores(site: Site) -> None:
    answer, _ = site.ask(2)
    site.host.reboot()
    site.wait_restored()
    assert site.ask(2) == [answer, 399]
    assert site.ask(3)[1] == 0


def test_the_key_is_in_no_unit_process_list_or_journal(site: Site) -> None:
    for argv in (
        ("ps", "axww", "-o", "args"),
        ("sh", "-c", f"cat /etc/systemd/system/kvhost-* {BASE}/etc/* {BASE}/log/*"),
        ("journalctl", "--no-pager", "-o", "export"),
    ):
        assert KEY not in site.host.root(*argv)
