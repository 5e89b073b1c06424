"""A real redis-server of its own, on loopback, and the client of kvhost over it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e_tools import free_ports

ONHOST = Path(__file__).parents[1] / "kvhost/onhost"
PASSWORD = "planted-9f2c77ab41d0-store"  # searched for where no secret may be
_ADAPTER = "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter"


def redis_server() -> list[str]:
    """The command; without Debian's redis-server, whose package would start one, its tools are
    installed: the program is the same file."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return [found]
    if shutil.which("redis-check-rdb") is None:
        apt = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
        install = (*apt, "install", "-y", "--no-install-recommends", "redis-tools")
        if subprocess.run(install, capture_output=True, check=False).returncode != 0:
            subprocess.run((*apt, "update"), capture_output=True, check=True)
            subprocess.run(install, capture_output=True, check=True)
    program = shutil.which("redis-check-rdb")
    assert program is not None
    return ["bash", "-c", f'exec -a redis-server {program} "$@"', "redis-server"]


@dataclass
class RedisServer:
    """One store. Its files lie in ``folder``; ``lines`` are further lines of its configuration."""

    folder: Path
    lines: list[str] = field(default_factory=list)
    port: int = 0
    password: str | None = PASSWORD
    tls: bool = False
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        self.port = self.port or free_ports(1)[0]
        config = self.folder / "redis.conf"
        user = ""
        if self.password is not None:
            digest = hashlib.sha256(self.password.encode()).hexdigest()
            user = f"user default on #{digest} ~kvhost:* resetchannels +@all\n"
        ports = f"port 0\ntls-port {self.port}\n" if self.tls else f"port {self.port}\n"
        config.write_text(
            f"bind 127.0.0.1\n{ports}{user}dir {self.folder}\n"
            'daemonize no\nsave ""\nlogfile ""\n' + "".join(f"{line}\n" for line in self.lines)
        )
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*redis_server(), str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "redis.log").read_text()
                assert self.process.poll() is None, (self.folder / "redis.log").read_text()
                time.sleep(0.02)

    def hold(self) -> None:
        assert self.process is not None
        self.process.send_signal(19)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(18)

    def stop(self, signal: int = 15) -> None:
        if self.process is not None:
            self.process.send_signal(18)  # one that is held cannot end
            self.process.send_signal(signal)
            self.process.wait(20)
            self.process = None

    def names(self) -> list[str]:
        return sorted(self.client().find("*"))

    def params(self) -> dict[str, Any]:
        """As services/shared.py has them."""
        return {"host": "127.0.0.1", "port": self.port}

    def settings(self) -> dict[str, Any]:
        return {"shared_tier": f"redis://127.0.0.1:{self.port}", "shared_tier_timeout_s": 1.0}

    def client(self) -> Any:
        resp = load("kvhost_resp")
        return resp.Connection(resp.Place("127.0.0.1", self.port), self.password, 5.0)


@contextmanager
def redis(folder: Path, **given: Any) -> Iterator[RedisServer]:
    folder.mkdir(parents=True, exist_ok=True)
    made = RedisServer(folder, **given)
    try:
        yield made.start()
    finally:
        made.stop(9)


def load(name: str) -> Any:
    """A module of kvhost/onhost as it is loaded on a host: by its own name, in no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ONHOST / f"{name}.py")
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(ONHOST))  # of those that it loads itself
        try:
            spec.loader.exec_module(sys.modules[name])
        finally:
            sys.path.remove(str(ONHOST))
    return sys.modules[name]


def shared_module() -> Any:
    """kvhost_shared.py over a double of LMCache's adapter class, which it only hands a client."""
    words = _ADAPTER.split(".")
    made = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    before = {name: sys.modules.get(name) for name in made}
    for name in made:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[_ADAPTER].NativeConnectorL2Adapter = object  # type: ignore[attr-defined]
    try:
        return load("kvhost_shared")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Client:
    """One cache server's client of a store, a port of Redis or a place, asked as LMCache's adapter
    asks it."""

    def __init__(
        self, at: Any, namespace: str = "ns-" + "a" * 24, *, password: str | None = PASSWORD,
        timeout: float = 1.0, **more: Any,
    ) -> None:  # fmt: skip
        module = shared_module()
        place = load("kvhost_resp").Place("127.0.0.1", at, **more) if isinstance(at, int) else at
        held = os.environ.pop(module.PASSWORD, None)
        if password is not None:
            os.environ[module.PASSWORD] = password
        try:
            self.store = module.Store(place, namespace, timeout, None)
        finally:
            os.environ.pop(module.PASSWORD, None)
            if held is not None:
                os.environ[module.PASSWORD] = held

    def wait(self, number: int, seconds: float = 30) -> tuple[bool, list[bool]]:
        deadline = time.monotonic() + seconds
        while True:
            for done, ok, _, good in self.store.drain_completions():
                assert done == number
                return ok, good
            assert time.monotonic() < deadline, "no completion"
            time.sleep(0.005)

    def put(self, **values: bytes) -> bool:
        views = [memoryview(bytearray(value)) for value in values.values()]
        return self.wait(self.store.submit_batch_set([key(n) for n in values], views))[0]

    def there(self, *names: str) -> list[bool]:
        return self.wait(self.store.submit_batch_exists([key(n) for n in names]))[1]

    def get(self, *names: str, size: int) -> list[bytes | None]:
        views = [memoryview(bytearray(size)) for _ in names]
        _, good = self.wait(self.store.submit_batch_get([key(n) for n in names], views))
        return [bytes(v) if ok else None for v, ok in zip(views, good, strict=True)]

    def until(self, answers: bool, seconds: float = 10) -> str | None:
        """Until the store stands so; why."""
        deadline = time.monotonic() + seconds
        while (state := self.store.state())["answers"] is not answers:
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        why: str | None = state["why"]
        return why

    def close(self) -> None:
        self.store.close()


def key(name: str) -> str:
    """As LMCache writes it; a name with @ has a salt."""
    chunk, _, salt = name.partition("__")
    text = f"/models/m@00000001@0@{hashlib.sha256(chunk.encode()).hexdigest()}"
    return f"{text}@{salt}" if salt else text


def trickle(door: socket.socket, port: int) -> None:
    """A proxy that hands the store's answers on at 100 KB/s."""

    def pipe(source: socket.socket, target: socket.socket, pause: float) -> None:
        try:
            while data := source.recv(1 << 10 if pause else 1 << 16):
                target.sendall(data)
                time.sleep(pause)
        except OSError:
            pass

    while True:
        try:
            client, _ = door.accept()
        except OSError:
            return
        store = socket.create_connection(("127.0.0.1", port))
        for words in ((client, store, 0.0), (store, client, 0.01)):
            threading.Thread(target=pipe, args=words, daemon=True).start()


def certificate(folder: Path, name: str, alternative: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
         f"subjectAltName={alternative}", "-keyout", folder / f"{name}.key",
         "-out", folder / f"{name}.pem"],
        check=True, capture_output=True,
    )  # fmt: skip


#: Debian's own, with what they need beyond the lab's image
PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1", "adduser",
            "gcc-12-base", "lsb-base", "sysvinit-utils")  # fmt: skip


def debian_packages(folder: Path) -> Path:
    """A repository of files with those packages, for a host that reaches no archive."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # apt's own user writes there
    argv = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "download", *PACKAGES]
    if subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode != 0:
        update = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update"]
        subprocess.run(update, capture_output=True, check=True)
        subprocess.run(argv, cwd=folder, capture_output=True, check=True)
    rows = []
    for deb in sorted(folder.glob("*.deb")):
        fields = ["dpkg-deb", "--field", str(deb)]
        about = subprocess.run(fields, capture_output=True, text=True, check=True).stdout
        content = deb.read_bytes()
        rows.append(f"{about}Filename: ./{deb.name}\nSize: {len(content)}\n"
                    f"SHA256: {hashlib.sha256(content).hexdigest()}\n")  # fmt: skip
    (folder / "Packages").write_text("\n".join(rows))
    folder.chmod(0o755)
    return folder


@contextmanager
def says(words: bytes) -> Iterator[int]:
    """The port of something that is no store: whatever it is asked, it says that and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            while True:
                try:
                    near, _ = door.accept()
                except OSError:
                    return
                with near:
                    near.recv(1000)
                    near.sendall(words)

        threading.Thread(target=answer, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
