"""Hosts for bench/fleet_speed.py: containers with sshd, one round trip away, many on one machine.

    with Fleet() as fleet:
        hosts = fleet.hosts(8)
        rows = fleet.rows(hosts, fleet.proxy(delay_ms=20))    # for an inventory of pyinfra

Each has a root file system of its own (an overlay over the lab's Debian), network and PID
namespaces, a user `deploy` with sudo, and no systemd: supervisord runs the services. Real are all
of kvhost's files, scripts and services' supervision, uv and supervisord; in the place of vLLM and
LMCache are small HTTP servers (ENGINE), in an environment with as many files as the real one has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from kvhost.engine.locks import read_lock
from kvhost.engine.matrix import load_matrix
from tests.lab.nspawn import USER, Host, Lab, unmake, until
from tests.lab.nspawn_engine import engine_binds
from tests.lab.nspawn_image import lab_dir, only_one, sh

REPO = Path(__file__).resolve().parents[1]
BASE = "/var/lib/kvhost"
#: files of the CPU engine's environment, bytecode aside
FILES, IN_ONE = 39_000, 100

#: what the engine says of the built-in model; recorded from vLLM 0.32.0 on a CPU
RESOLVED = {
    "architectures": ["LlamaForCausalLM"], "block_size": 128, "dtype": "float32", "head_size": 64,
    "kv_cache_dtype": "auto", "kv_cache_layout": None, "kv_heads": 4, "layers": 8,
    "machine": "x86_64", "max_model_len": 32768, "pipeline_parallel": 1, "quantization": None,
    "rope": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": None,
    "tensor_parallel": 1, "vocab_size": 260,
    "versions": {"lmcache": "0.5.6", "torch": "2.13.0+cpu", "vllm": "0.32.0+cpu.kvhost"},
}  # fmt: skip

#: bin/python: answers resolve.py, the rest is Python's
PYTHON = f"""#!/bin/sh
case "$1" in
*/resolve.py) echo {shlex.quote(json.dumps(RESOLVED))} ;;
*) exec /usr/bin/python3 "$@" ;;
esac
"""

#: bin/vllm and bin/lmcache: healthy, registered, one token for who asks
ENGINE = """#!/usr/bin/python3 -IS
import re, socket, sys
words = sys.argv[1:]
if "--config" in words:
    text = open(words[words.index("--config") + 1]).read()
    ports = [int(re.search(r"(?m)^.?port.?: (\\d+)", text).group(1))]
else:
    ports = [int(words[words.index(name) + 1]) for name in ("--http-port", "--port")]
servers = [socket.create_server(("127.0.0.1", port)) for port in ports]
while True:
    link = servers[0].accept()[0]
    try:
        link.settimeout(5)
        asked = b""
        while b"\\r\\n\\r\\n" not in asked:
            block = link.recv(65536)
            if not block:
                break
            asked += block
        body = b'{"registered_gpu_ids": [0]}'
        head = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n"
        link.sendall(head % len(body) + body)
    except OSError:
        pass
    finally:
        link.close()
"""


#: what engine.py writes into an environment's marker
MANIFEST = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); import engine_whole; "
    "print(json.dumps(engine_whole.tree_manifest(sys.argv[2])))"
)


def environment() -> str:
    """Directory to be bound at BASE/envs: one environment, complete by its marker."""
    locks = REPO / "locks"
    lock = read_lock(locks, load_matrix(locks).fitting(os.uname().machine, "cpu")[0], "3.11")
    made_of = repr((4, lock.digest, FILES, PYTHON, ENGINE))
    place = lab_dir() / f"fleet-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    with only_one(lab_dir(), "fleet"):
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            env = place / "envs" / lock.digest[:16]
            (env / "bin").mkdir(parents=True)
            for name, text in (("python", PYTHON), ("vllm", ENGINE), ("lmcache", ENGINE)):
                (env / "bin" / name).write_text(text)
                (env / "bin" / name).chmod(0o755)
            for number in range(FILES // IN_ONE):
                folder = env / "lib/python3.11/site-packages" / f"package{number}"
                folder.mkdir(parents=True)
                for one in range(IN_ONE):
                    (folder / f"module{one}.py").write_text("")
            for line in lock.text.splitlines():
                if "==" in line and not line.startswith(("#", " ")):
                    pin, _, version = line.split()[0].partition("==")
                    info = f"{pin.replace('-', '_')}-{version}.dist-info"
                    path = env / "lib/python3.11/site-packages" / info / "METADATA"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(f"Name: {pin}\nVersion: {version}\n")
            told = sh(sys.executable, "-c", MANIFEST, str(REPO / "kvhost/onhost"), str(env))
            marker = {"lock": lock.digest, "abi": [], **json.loads(told)}
            (env / ".kvhost-complete.json").write_text(json.dumps(marker))
            (place / "done").write_text("")
    return str(place / "envs")


class FleetHost(Host):
    """A host whose first process is a shell that starts the services and sshd."""

    @property
    def lower(self) -> str:
        layer = self.lab.folder / "layer"
        return f"{layer}:{self.lab.image}" if layer.exists() else str(self.lab.image)

    def argv(self) -> list[str]:
        start = (
            "mkdir -p /run/sshd; "
            f"if [ -e {BASE}/etc/supervisord.conf ]; then "
            f"python3 {BASE}/bin/services.py --base {BASE} --user kvhost ensure & fi; "
            "exec /usr/sbin/sshd -D -o MaxStartups=100 -o MaxSessions=100"
        )
        booted = super().argv()
        booted.remove("-b")
        return [*booted, "--as-pid2", "sh", "-c", start]

    def make(self) -> None:
        super().make()
        state = self.tree / BASE.lstrip("/") / "state"
        state.mkdir(parents=True, exist_ok=True)
        (state / "run.lock.guard").touch()  # the mark of a run that built the environment

    def power_cut(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # all below dies with it: setpriv, unshare
            self.process.wait(20)


class Fleet:
    """Some hosts behind proxies that delay. A context."""

    def __init__(self) -> None:
        self.lab = Lab(kind=FleetHost)
        tools = f"{BASE}/tools"
        self.binds = {f"{BASE}/envs": environment(), tools: engine_binds()[tools]}
        self.proxies: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        self.lab.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for proxy in self.proxies:
            proxy.kill()
            proxy.wait()
        self.lab.__exit__(None, None, None)

    def hosts(self, count: int, prefix: str = "host") -> list[Host]:
        """New hosts; if a layer was kept, they begin with it."""
        made = [
            self.lab.host(f"{prefix}-{number}", binds_ro=self.binds, boot=False)
            for number in range(count)
        ]
        for host in made:
            host.boot(wait=False)
        for host in made:
            host.wait(120)
        return made

    def keep_layer(self, host: Host) -> None:
        """What is on this host, every later host begins with; its services are shut down."""
        host.root(
            "python3", f"{BASE}/bin/services.py", "--base", BASE, "--user", "kvhost", "shutdown"
        )
        host.power_cut()
        unmake("", host.tree)
        sh("cp", "-a", str(host.folder / "upper"), str(self.lab.folder / "layer"))

    def proxy(self, delay_ms: float) -> int:
        """First port of a delay proxy to all hosts; a round trip takes ``delay_ms`` more."""
        first = 20_000 + 1_000 * len(self.proxies)
        hosts = [host.address for host in self.lab.hosts]
        words = ("--delay-ms", str(delay_ms), "--first-port", str(first), *hosts)
        script = str(Path(__file__).with_name("delay_proxy.py"))
        argv = self.lab.argv("setpriv", "--pdeathsig", "KILL", sys.executable, script, *words)
        log = (self.lab.folder / f"proxy-{first}.json").open("wb")
        self.proxies.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log))
        until(lambda: self.listens(first + len(hosts) - 1), 20, "the delay proxy listens")
        return first

    def listens(self, port: int) -> bool:
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        return self.lab.run("/usr/bin/python3", "-c", script).returncode == 0

    def rows(self, hosts: list[Host], first_port: int) -> list[tuple[str, dict[str, object]]]:
        """(name, data) of hosts behind a proxy, for an inventory of pyinfra."""
        port_of = {host.name: first_port + n for n, host in enumerate(self.lab.hosts)}
        return [
            (
                host.name,
                {
                    "ssh_hostname": "127.0.0.1",
                    "ssh_port": port_of[host.name],
                    "ssh_user": USER,
                    "ssh_key": str(self.lab.key),
                    "ssh_known_hosts_file": str(self.lab.folder / "proxied_hosts"),
                    "ssh_strict_host_key_checking": "no",
                    "_sudo": True,
                },
            )
            for host in hosts
        ]
