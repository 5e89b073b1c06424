"""A real S3 server of its own, on loopback: OpenStack Swift with its s3api, from Debian's packages.

One account, one disk, one replica; the packages are only unpacked, nothing is installed or started
by them, and no root is needed. The folder must keep extended attributes (ext4, xfs, btrfs).
"""

from __future__ import annotations

import atexit
import functools
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e_tools import free_ports
from tests.store_tools import PASSWORD, load

#: of tempauth: ACCOUNT:USER
ACCESS = "kvhost:tests"
BUCKET = "kv-tests"
#: Debian's own; what the test machine has already is unpacked again, which harms nothing
PACKAGES = (
    "python3-swift", "python3-eventlet", "python3-greenlet", "python3-dnspython", "python3-xattr",
    "python3-netifaces", "python3-pyeclib", "liberasurecode1", "python3-lxml", "libxslt1.1",
    "libxml2", "libicu72", "python3-pastedeploy", "python3-requests", "python3-urllib3",
    "python3-chardet", "python3-charset-normalizer", "python3-certifi", "python3-idna",
    "python3-cffi-backend", "python3-six", "python3-cryptography", "python3-pkg-resources",
    "memcached", "libevent-2.1-7", "libsasl2-2",
)  # fmt: skip
_SERVERS = ("account", "container", "object")
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, _, port in (word.partition(":") for word in sys.argv[2:]):
    made = RingBuilder(4, 1, 0)
    made.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1",
                  "weight": 1})
    made.rebalance()
    made.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""
_SERVE = """
import importlib, sys
from swift.common.wsgi import run_wsgi
conf, name = sys.argv[1:]
sys.exit(run_wsgi(conf, f"{name}-server", verbose=False))
"""


@functools.cache
def swift() -> Path:
    """Where the packages lie unpacked."""
    folder = Path(tempfile.mkdtemp(prefix="kvhost-swift-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    apt = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
    download = (*apt, "download", *PACKAGES)
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode != 0:
        subprocess.run((*apt, "update"), capture_output=True, check=True)
        subprocess.run(download, cwd=folder, capture_output=True, check=True)
    for deb in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb, folder / "root"], check=True)
    return folder / "root"


@dataclass
class SwiftServer:
    """One store with one bucket. ``options``: further lines of the s3api's section."""

    folder: Path
    options: tuple[str, ...] = ()
    secret: str = PASSWORD
    ports: list[int] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    proxy: subprocess.Popen[bytes] = field(init=False)

    @property
    def port(self) -> int:
        return self.ports[-1]

    def start_python(self, code: str, *argv: str | Path) -> subprocess.Popen[bytes]:
        """The system's Python, for which Debian's packages are, with Swift and its swift.conf."""
        path = str(self.folder / "swift.conf")
        conf = f"from swift.common import utils; utils.SWIFT_CONF_FILE = {path!r}"
        return self.popen("/usr/bin/python3", "-c", f"{conf}\n{code}", *argv)

    def popen(self, *argv: str | Path) -> subprocess.Popen[bytes]:
        root = swift()
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
               "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",
               "LD_LIBRARY_PATH": f"{root}/usr/lib/x86_64-linux-gnu",
               "EVENTLET_NO_GREENDNS": "yes"}  # fmt: skip
        with (self.folder / "swift.log").open("ab") as log:
            return subprocess.Popen([*map(str, argv)], env=env, stdout=log, stderr=log,
                                    stdin=subprocess.DEVNULL)  # fmt: skip

    def make(self) -> None:
        """The configuration, the rings, the disk."""
        self.ports = free_ports(5)
        (self.folder / "disks/d1").mkdir(parents=True)
        os.setxattr(self.folder / "disks/d1", "user.kvhost", b"1")  # raises where none are kept
        common = (f"bind_ip = 127.0.0.1\nworkers = 0\nuser = {getpass.getuser()}\n"
                  f"swift_dir = {self.folder}\ndevices = {self.folder}/disks\n"
                  "mount_check = false\nfallocate_reserve = 0\nlog_address = /nonexistent\n"
                  "log_udp_host = 127.0.0.1\nlog_udp_port = 9\n")  # fmt: skip
        (self.folder / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_suffix = kvhost\nswift_hash_path_prefix = kvhost\n"
            "[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        for name, port in zip(_SERVERS, self.ports, strict=False):
            self.config(name, f"{common}bind_port = {port}\n", f"{name}-server", [
                f"app:{name}-server", f"use = egg:swift#{name}",
            ])  # fmt: skip
        words = [f"{name}:{port}" for name, port in zip(_SERVERS, self.ports, strict=False)]
        assert self.start_python(_RINGS, self.folder, *words).wait(30) == 0
        account, user = ACCESS.split(":")
        steps = (
            "catch_errors gatekeeper cache listing_formats s3api tempauth versioned_writes symlink"
        )
        self.config(
            "proxy", f"{common}bind_port = {self.port}\n", f"{steps} proxy-server",
            ["app:proxy-server", "use = egg:swift#proxy", "account_autocreate = true"],
            ["filter:s3api", "use = egg:swift#s3api", "auth_pipeline_check = false",
             *self.options],
            ["filter:tempauth", "use = egg:swift#tempauth",
             f"user_{account}_{user} = {self.secret} .admin"],
            ["filter:cache", "use = egg:swift#memcache",
             f"memcache_servers = 127.0.0.1:{self.ports[3]}"],
            ["filter:versioned_writes", "use = egg:swift#versioned_writes",
             "allow_object_versioning = true"],
            *([f"filter:{name}", f"use = egg:swift#{name}"]
              for name in ("catch_errors", "gatekeeper", "listing_formats", "symlink")),
        )  # fmt: skip

    def config(self, name: str, default: str, steps: str, *sections: list[str]) -> None:
        more = "".join(f"[{title}]\n" + "\n".join(lines) + "\n" for title, *lines in sections)
        text = f"[DEFAULT]\n{default}[pipeline:main]\npipeline = {steps}\n{more}"
        (self.folder / f"{name}-server.conf").write_text(text)

    def start(self) -> SwiftServer:
        first = not self.ports
        if first:
            self.make()
        self.processes.append(self.popen(
            swift() / "usr/bin/memcached", "-l", "127.0.0.1", "-p", str(self.ports[3]), "-U", "0",
            "-u", getpass.getuser(),
        ))  # fmt: skip
        for name in _SERVERS:
            conf = self.folder / f"{name}-server.conf"
            self.processes.append(self.start_python(_SERVE, conf, name))
        self.front()
        if first:
            self.ask("PUT")
        return self

    def front(self) -> None:
        """What clients talk to; the rest runs on when it is ended."""
        self.proxy = self.start_python(_SERVE, self.folder / "proxy-server.conf", "proxy")
        self.processes.append(self.proxy)
        for port in self.ports:
            self.wait(port)

    def end_front(self, number: int) -> None:
        self.processes.remove(self.proxy)
        end(self.proxy, number)

    def place(self, **more: Any) -> Any:
        place = load("kvhost_s3").Place("127.0.0.1", self.port, BUCKET, ACCESS, "us-east-1")
        return place._replace(**more)

    def params(self) -> dict[str, Any]:
        """As services/shared.py has them."""
        return {"host": "127.0.0.1", "port": self.port, "bucket": BUCKET, "access": ACCESS,
                "region": "us-east-1"}  # fmt: skip

    def settings(self) -> dict[str, Any]:
        return {"shared_tier": f"s3+http://127.0.0.1:{self.port}/{BUCKET}",
                "shared_tier_access_key": ACCESS, "shared_tier_timeout_s": 5.0}  # fmt: skip

    def client(self) -> Any:
        return load("kvhost_s3").Connection(self.place(), self.secret, 10.0)

    def ask(self, method: str, key: str = "", **given: Any) -> bytes:
        """A signed request of any kind, as an owner of the bucket may make it."""
        s3 = load("kvhost_s3")
        asked = object.__new__(s3.Connection)
        asked.place, asked.secret, asked.timeout = self.place(), self.secret, 10.0
        asked.http = s3.Http(asked.place, 10.0)
        answer = asked.request(method, key, **given)
        text: bytes = answer.read()
        asked.close()
        assert answer.status < 300, text
        return text

    def names(self) -> list[str]:
        return sorted(self.client().find("kvhost:*"))

    def wait(self, port: int) -> None:
        deadline = time.monotonic() + 30
        log = self.folder / "swift.log"
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                assert all(one.poll() is None for one in self.processes), log.read_text()
                time.sleep(0.02)

    def hold(self) -> None:
        self.proxy.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.proxy.send_signal(signal.SIGCONT)

    def stop(self, number: int = signal.SIGKILL) -> None:
        for one in self.processes:
            end(one, number)
        self.processes = []


def end(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(signal.SIGCONT)  # one that is held cannot end
    process.send_signal(number)
    process.wait(20)


@contextmanager
def s3(folder: Path, **given: Any) -> Iterator[SwiftServer]:
    folder.mkdir(parents=True, exist_ok=True)
    made = SwiftServer(folder, **given)
    try:
        yield made.start()
    finally:
        made.stop()
