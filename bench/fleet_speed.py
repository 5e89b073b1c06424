"""How long a run over hosts takes, beside the same work by Ansible, and what it consists of.

python -m bench.fleet_speed --folder DIR --hosts 1,8 --delay-ms 20 [--ansible PATH] [--mitogen DIR]

As root, on a machine that may be used up: it makes containers (bench/fleet_hosts.py). One host is
provisioned by kvhost; the others begin as its copies. In every round each tool runs once over the
same hosts, in turns, so that the machine's other work hits both; what is compared are ratios of one
round. Scenarios: nochange; change (one setting, back and forth); with --edits: the same edits are
made behind the back of each, one at a time, and `kvhost drift` must see each and says whether it
was mended; with --first: new hosts with the engine in its place. With --containers N, more hosts
than that are entries of the inventory that share them (for a run that changes nothing, which is all
that is measured then): each is connected to and looked at by itself, and the machine needs no
memory for 200. A line of JSON a run goes to stdout: tool, hosts, delay_ms, scenario, wall_s, cpu_s
(controller), rss_mib (largest process), round_trips, load (of the machine, at the end).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.fleet_hosts import BASE, Fleet
from kvhost.services.describe import ready_argv
from kvhost.services.tier import MARKER_TEXT, NAMESPACE_FILE, TIER_MARKER
from kvhost.settings import Settings
from tests.lab.nspawn import Host

REPO = Path(__file__).resolve().parents[1]
PLAYBOOK = REPO / "bench/ansible"
USER, OTHER_INTERVAL = "kvhost", "31"
KEEP = {k: v for k, v in os.environ.items()
        if not k.startswith("KVHOST_") and k != "PYTHONDONTWRITEBYTECODE"}  # fmt: skip
PACKAGES = ("libnuma1", "ca-certificates", "util-linux", "python3.11-venv")
#: what is sent by the playbook's archive, below BASE
SENT = ("bin", "lib", "etc", "locks", "wheels")

#: edits behind the back, each a shell script on the host
EDITS = {
    "a script": f"echo '# edited' >> {BASE}/bin/ready.py",
    "a mode": f"chmod 600 {BASE}/etc/vllm.yaml",
    # the file has a word a line
    "a description": f"""sed -i '/"--high",/{{n;s/[0-9.]+/0.11/}}' -E {BASE}/etc/pruner.json""",
    "an owner": f"chown daemon {BASE}/locks",
    "the engine's link": f"ln -sfn /nonexistent {BASE}/current",
    "a directory": f"rm -rf {BASE}/home/.cache/numba",
    # one that is killed supervisord starts anew by itself
    "a service": f"python3 {BASE}/bin/services.py --base {BASE} --user {USER} stop pruner",
}


@dataclass
class Bench:
    """The hosts of a run and both tools' inventories of them."""

    fleet: Fleet
    folder: Path
    ansible: str | None
    mitogen: str | None
    proxy: int = 0

    def measured(self, argv: list[str], cwd: Path, **env: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, figures and output of one run from where the hosts are reached."""
        self.round_trips()  # counted anew
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        process = subprocess.Popen(
            self.fleet.lab.argv(*argv), cwd=cwd, env={**KEEP, **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        text, _ = process.communicate(timeout=550)
        wall = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures = {
            "wall_s": round(wall, 2),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
            # the largest of all processes so far: of use where kvhost runs alone
            "rss_mib": after.ru_maxrss >> 10,
            "round_trips": self.round_trips(),
            "load": os.getloadavg()[0],
        }
        return process.returncode, figures, text

    def round_trips(self) -> int:
        proxy = self.fleet.proxies[-1]
        assert proxy.stdin is not None
        proxy.stdin.write(b"\n")
        proxy.stdin.flush()
        path = self.fleet.lab.folder / f"proxy-{self.proxy}.json"
        for _ in range(100):
            time.sleep(0.05)
            lines = path.read_text().splitlines()
            if len(lines) > self.asked:
                self.asked = len(lines)
                return int(json.loads(lines[-1])["round_trips"])
        raise RuntimeError("the proxy tells nothing")

    asked = 0

    def use(self, hosts: list[Host], delay_ms: float, entries: int | None = None) -> None:
        """From now on the runs are over these hosts; as so many entries of the inventory."""
        self.proxy, self.asked = self.fleet.proxy(delay_ms), 0
        rows = self.fleet.rows(hosts, self.proxy)
        if entries is not None:
            at = [divmod(number, len(rows)) for number in range(entries)]
            rows = [(f"{rows[place][0]}-{again}", rows[place][1]) for again, place in at]
        (self.folder / "hosts.py").write_text(f"hosts = {rows!r}\n")
        lines = [
            f"{name} ansible_host={data['ssh_hostname']} ansible_port={data['ssh_port']} "
            f"ansible_user={data['ssh_user']} ansible_ssh_private_key_file={data['ssh_key']}"
            for name, data in rows
        ]
        (self.folder / "hosts.ini").write_text("\n".join(lines) + "\n")

    def kvhost(self, *words: str) -> tuple[int, dict[str, Any], str]:
        inventory = ("--inventory", str(self.folder / "hosts.py"))
        argv = [sys.executable, "-m", "kvhost.cli", "up", *inventory]
        data = ("--data", "verify=never")
        home = {"HOME": str(self.folder), "KVHOST_REPORTS": str(self.folder / "reports")}
        return self.measured([*argv, *words, *data], REPO, **home)

    def drift(self) -> tuple[int, str]:
        argv = [sys.executable, "-m", "kvhost.cli", "drift", "--inventory",
                str(self.folder / "hosts.py"), "--data", "verify=never"]  # fmt: skip
        code, _, text = self.measured(argv, REPO, HOME=str(self.folder))
        return code, text

    def playbook(self, variant: str, *, mitogen: bool = False) -> tuple[int, dict[str, Any], str]:
        assert self.ansible is not None
        argv = [self.ansible, "-i", str(self.folder / "hosts.ini"), "site.yml",
                "-e", f"@{self.folder}/{variant}.json"]  # fmt: skip
        # a master that is left from the run before would spare the connection that kvhost makes
        control = self.folder / f"cm-{time.monotonic_ns()}"
        env = {"HOME": str(self.folder), "ANSIBLE_SSH_CONTROL_PATH_DIR": str(control)}
        if mitogen:
            assert self.mitogen is not None
            env |= {"ANSIBLE_STRATEGY_PLUGINS": self.mitogen, "ANSIBLE_STRATEGY": "mitogen_linear"}
        done = self.measured(argv, PLAYBOOK, **env)
        for path in control.glob("*"):
            stop = ("ssh", "-O", "exit", "-o", f"ControlPath={path}", "any")
            self.fleet.lab.run(*stop)
        shutil.rmtree(control, ignore_errors=True)
        return done

    def payload(self, host: Host, variant: str) -> None:
        """What the playbook is given, of a host that kvhost has just provisioned."""
        inside = " ".join(f"{BASE}/{name}" for name in SENT)
        folders = " ".join(
            f"{BASE}{name}"
            for name in ("", "/models", "/state", "/secrets", "/log", "/run", "/home")
        )
        script = (
            f"tar cPf /root/a.tar --no-recursion {folders} && tar rPf /root/a.tar {inside} && "
            "cat /root/a.tar"
        )
        archive = subprocess.run(host.root_argv("sh", "-c", script), check=True,
                                 stdout=subprocess.PIPE).stdout  # fmt: skip
        (self.folder / f"{variant}.tar").write_bytes(archive)
        text = host.read(f"{BASE}/state/receipt.json")
        (self.folder / f"{variant}-receipt.json").write_text(text)
        receipt = json.loads(text)
        fields, digest = receipt["namespace"]["fields"], receipt["namespace"]["digest"]
        meta = {"schema": 1, "chunk_bytes": receipt["namespace"]["chunk_bytes"],
                "engine_config": fields}  # fmt: skip
        tier, home = f"{BASE}/tier", f"{BASE}/home"
        here = f"{tier}/ns-{digest[:24]}"
        ids = ("--reuid", USER, "--regid", USER, "--init-groups", "--inh-caps=-all")
        settings = Settings(base_dir=BASE)
        caches = ("tmp", ".cache", ".cache/numba", ".cache/vllm")
        words = {
            "base": BASE, "user": USER, "packages": PACKAGES,
            "payload": str(self.folder / f"{variant}.tar"),
            "receipt": str(self.folder / f"{variant}-receipt.json"),
            "env": f"{BASE}/envs/{receipt['engine']['digest'][:16]}",
            "as_user": ["setpriv", *ids, "env", "-i"],
            "home_words": [word for name in caches for word in ("--dir", f"{home}/{name}")],
            "namespace_words": [
                "--dir", here,
                "--file", f"{tier}/{TIER_MARKER}",
                MARKER_TEXT,
                "--file", f"{here}/{NAMESPACE_FILE}",
                json.dumps(meta, indent=1, sort_keys=True) + "\n",
            ],
            "model": host.root("sh", "-c", f"ls -d {BASE}/models/*").strip(),
            "model_digest": receipt["model"]["digest"],
            "resolved": host.root("sh", "-c", f"ls -t {BASE}/state/resolved-*.json").split()[0],
            "ready": list(ready_argv(settings, settings.paths, with_key=False)),
        }  # fmt: skip
        (self.folder / f"{variant}.json").write_text(json.dumps(words))


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def must(done: tuple[int, dict[str, Any], str], what: str) -> dict[str, Any]:
    code, figures, text = done
    if code != 0:
        raise RuntimeError(f"{what}: exit {code}\n{text[-6000:]}")
    return figures


def rounds(
    bench: Bench, args: argparse.Namespace, hosts: list[Host], count: int, delay_ms: float
) -> None:
    """All scenarios over these hosts, the tools in turns."""
    row = {"hosts": count, "delay_ms": delay_ms}
    alone = count == len(hosts)
    tools = ["kvhost", *(["ansible"] if bench.ansible else [])]
    tools += ["mitogen"] if bench.ansible and bench.mitogen else []

    def run(tool: str, variant: str) -> tuple[int, dict[str, Any], str]:
        if tool == "kvhost":
            other = ("--data", f"pruner_interval_s={OTHER_INTERVAL}") if variant == "b" else ()
            return bench.kvhost(*other)
        return bench.playbook(variant, mitogen=tool == "mitogen")

    for tool in list(tools):  # warm, and brings times of files to where each leaves them
        done = run(tool, "a")
        if done[0] != 0 and tool != "kvhost":
            print(f"{tool} does not run: {done[2][-3000:]}", file=sys.stderr, flush=True)
            tools.remove(tool)
            continue
        must(done, tool)
    for _ in range(args.rounds):
        for tool in tools:
            say(tool=tool, scenario="nochange", **row, **must(run(tool, "a"), tool))
    for _ in range(args.changes if alone else 0):
        for tool in tools:
            for variant in ("b", "a"):
                say(tool=tool, scenario="change", **row, **must(run(tool, variant), tool))
    if args.edits and alone:
        for tool in tools:
            for edit in EDITS:
                edited(bench, hosts, edit, tool, partial(run, tool, "a"), row)


def edited(
    bench: Bench, hosts: list[Host], edit: str, tool: str, run: Callable[[], Any], row: Any
) -> None:
    """One edit behind the back: drift must see it, and says whether the tool mends it."""
    for host in hosts:
        host.root("sh", "-c", EDITS[edit])
    before, text = bench.drift()
    if before != 2:
        raise RuntimeError(f"{edit}: kvhost drift ends with {before}\n{text[-3000:]}")
    must(run(), tool)
    code, text = bench.drift()
    say(tool=tool, scenario="edits", edit=edit, **row, drift_before=before, drift_after=code,
        left=[] if code == 0 else text[-800:])  # fmt: skip
    if code != 0:
        must(bench.kvhost(), "mending what was left")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="1", help="numbers of hosts, as 1,8,32")
    parser.add_argument("--delay-ms", default="20", help="round trips, as 0,20,100")
    parser.add_argument("--containers", type=int, help="at most so many real hosts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--changes", type=int, default=0)
    parser.add_argument("--edits", action="store_true")
    parser.add_argument("--first", action="store_true", help="also new hosts")
    parser.add_argument("--ansible", help="path of ansible-playbook; without it kvhost alone")
    parser.add_argument("--mitogen", help="directory of mitogen's strategy plugins")
    parser.add_argument("--folder", type=Path, required=True, help="scratch")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    counts = [int(word) for word in args.hosts.split(",")]
    delays = [float(word) for word in args.delay_ms.split(",")]
    with Fleet() as fleet:
        bench = Bench(fleet, args.folder, args.ansible, args.mitogen)
        [seed] = fleet.hosts(1, "seed")
        bench.use([seed], 0)
        must(bench.kvhost("--data", f"pruner_interval_s={OTHER_INTERVAL}"), "the seed")
        bench.payload(seed, "b")
        must(bench.kvhost(), "the seed")
        bench.payload(seed, "a")
        if args.first:
            for count in counts:
                for tool in ("kvhost", *(["ansible"] if args.ansible else [])):
                    new = fleet.hosts(count, f"new{tool[0]}{count}")
                    bench.use(new, delays[0])
                    done = bench.kvhost() if tool == "kvhost" else bench.playbook("a")
                    say(tool=tool, scenario="first", hosts=count, delay_ms=delays[0],
                        **must(done, tool))  # fmt: skip
                    for host in new:
                        host.power_cut()
        fleet.keep_layer(seed)
        most = min(max(counts), args.containers or max(counts))
        hosts = fleet.hosts(most)
        for count in counts:
            for delay_ms in delays:
                bench.use(hosts[:count], delay_ms, count if count > most else None)
                rounds(bench, args, hosts[:count], count, delay_ms)


if __name__ == "__main__":
    main()
