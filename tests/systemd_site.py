"""A host of the lab that kvhost provisions over SSH, with the real engine and a tier of its own.

The tier is an ext4 file system in a loop device, which the host knows as TIER_DEVICE. It is mounted
at boot by the unit that systemd makes of a line with nofail in fstab; in a container it makes none.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e_tools import Done, make_site
from tests.lab.nspawn import Host, Lab, until
from tests.lab.nspawn_engine import engine_host
from tests.lab.nspawn_image import LabError, sh

KEY = "sk-lab-9a61e0d2c4"  # planted, and searched for everywhere
TIER, TIER_DEVICE, TIER_BYTES = "/srv/tier", "/dev/tier", 3 << 30
MOUNT = "srv-tier.mount"
BASE = "/var/lib/kvhost"
API_PORT = 8000
CLIENT = Path(__file__).with_name("engine_client.py")
#: settings of every run; the floor is what the tier's small file system can spare
DATA = {"tier_dir": f"{TIER}/kv", "cache_limit_gib": "2", "free_floor_gib": "0.2"}


@contextlib.contextmanager
def systemd_site(folder: Path) -> Iterator[Site]:
    """A lab with one host that is not provisioned yet."""
    image = folder / "tier.img"
    with image.open("wb") as handle:
        handle.truncate(TIER_BYTES)
    sh("mkfs.ext4", "-q", "-F", str(image))
    loop = sh("losetup", "--find", "--show", str(image)).strip()
    try:
        with Lab() as lab:
            made = Site(lab, folder, loop)
            try:
                yield made
            finally:
                made.keep()
    finally:
        sh("losetup", "--detach", loop)


class Site:
    """A copy of the repository as the controller, and one host."""

    def __init__(self, lab: Lab, folder: Path, loop: str) -> None:
        self.lab, self.folder = lab, folder
        self.copy = make_site(folder / "controller")
        self.host: Host = engine_host(lab, "kv", boot=False, binds={TIER_DEVICE: loop})
        (self.host.tree / TIER.lstrip("/")).mkdir(parents=True)
        units = self.host.tree / "etc/systemd/system"
        (units / MOUNT).write_text(
            f"[Mount]\nWhat={TIER_DEVICE}\nWhere={TIER}\nType=ext4\nOptions=relatime\n"
        )
        (units / "local-fs.target.wants").mkdir(exist_ok=True)
        (units / "local-fs.target.wants" / MOUNT).symlink_to(f"../{MOUNT}")
        self.host.boot()
        self.inventory = lab.inventory(folder / "hosts.py")

    def pyinfra(self, *words: str, **data: str) -> Done:
        """`pyinfra hosts.py deploy.py`, from the copy, over SSH as an unprivileged user."""
        given = [w for key, value in {**DATA, **data}.items() for w in ("--data", f"{key}={value}")]
        program = Path(sys.executable).with_name("pyinfra")
        argv = self.lab.argv(str(program), str(self.inventory), *(words or ("deploy.py", "-y")))
        done = subprocess.run(
            [*argv, *given], cwd=self.copy.repo, text=True, timeout=900, check=False,
            env={**self.copy.own_env, "KVHOST_API_KEY": KEY},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        text = done.stdout
        if done.returncode != 0:  # the host is gone when somebody reads this
            logs = ("sh", "-c", f"tail -n 60 {BASE}/log/runner.log {BASE}/log/cache.log")
            text += self.host.root(*logs, ok=False)
        return Done(done.returncode, text)

    def keep(self) -> None:
        """The host is gone when somebody wants to know: its logs stay in ``folder``/kept."""
        kept = self.folder / "kept"
        kept.mkdir(exist_ok=True)
        copy = f"tar -C {BASE} -cf - log run state etc"
        journal = "journalctl --no-pager -o short-precise"
        for name, command in (("base.tar", copy), ("journal.txt", journal)):
            with (kept / name).open("wb") as handle, contextlib.suppress(LabError):
                argv = self.host.root_argv("sh", "-c", command)
                subprocess.run(argv, stdout=handle, stderr=subprocess.STDOUT, check=False)

    def ask_argv(self, seed: int, tokens: float = 2100, **options: float) -> list[str]:
        flags = [w for key, value in options.items() for w in (f"--{key}", str(value))]
        words = (
            "/usr/bin/python3",
            str(CLIENT),
            str(API_PORT),
            str(seed),
            str(int(tokens)),
            *flags,
        )
        key = ("env", f"KVHOST_API_KEY={KEY}")
        return ["ip", "netns", "exec", self.host.netns, *key, *words]

    def ask(self, seed: int, tokens: float = 2100, **options: float) -> dict[str, Any]:
        done = subprocess.run(self.ask_argv(seed, tokens, **options), capture_output=True,
                              text=True, check=True, timeout=400)  # fmt: skip
        return dict(json.loads(done.stdout))

    def served_from_l2_after_a_reboot(self, seed: int) -> None:
        """Asserts it of a new prompt, and that one which was not asked before misses."""
        before = self.ask(seed)
        assert (before["status"], before["cached"]) == (200, 0), before
        assert self.settled() >= 8  # 2,100 tokens in chunks of 256
        self.host.reboot()
        self.wait_good()
        after, control = self.ask(seed), self.ask(seed + 1)
        assert (after["status"], after["text"]) == (200, before["text"]), after
        assert after["cached"] >= 2048, after
        assert (control["status"], control["cached"]) == (200, 0), control

    def services(self, *words: str) -> str:
        argv = ("python3", f"{BASE}/bin/services.py", "--base", BASE, "--user", "kvhost", *words)
        return self.host.root(*argv, ok=False, timeout=600)

    def rows(self) -> dict[str, Any]:
        lines = self.services("--json", "status").splitlines()
        return dict(json.loads(lines[-1])["services"]) if lines else {}

    def good(self) -> bool:
        rows = self.rows().values()
        return bool(rows) and all(r["state"] == "RUNNING" and r["alive"] for r in rows)

    def wait_good(self, seconds: float = 180) -> None:
        until(self.good, seconds, f"the services run: {self.services('status')}")

    def namespace(self) -> str:
        """Directory of the one namespace, on the host."""
        return self.host.root("sh", "-c", f"ls -d {TIER}/kv/ns-*").strip()

    def chunks(self) -> list[str]:
        """Whole files of the KV cache, oldest first."""
        names = self.host.root("ls", "-tr", self.namespace()).split()
        return [name for name in names if ".tmp" not in name]

    def settled(self, seconds: float = 60) -> int:
        """Number of files in L2 once none has been added for two seconds."""
        last: list[int] = []

        def same() -> bool:
            last.append(len(self.chunks()))
            return len(last) > 20 and len(set(last[-20:])) == 1

        until(same, seconds, "the cache is written")
        return last[-1]

    def kill(self, name: str, who: str = "pid") -> None:
        record = json.loads(self.host.read(f"{BASE}/run/{name}.json"))
        self.host.root("kill", "-9", str(record[who]))
