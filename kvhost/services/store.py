"""The store of the shared tier as `kvhost shared` makes it: its files, and what stands against it.

Pure. An instance of the distribution's own unit (redis-server@kvhost, valkey-server@kvhost), with
all its hardening, and files of kvhost's own; no file of the distribution's is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvhost.plan.types import GIB, Refusal, size
from kvhost.records.drift import NOTHING, Drift
from kvhost.secrets import Secret
from kvhost.settings import Settings

#: root's, 0755: what redis may not write to. Debian's own /etc/redis is the server's group's.
ETC = "/etc/kvhost-store"
CONFIG, USERS, START = f"{ETC}/store.conf", f"{ETC}/users.acl", f"{ETC}/start.env"
CERT, KEY = f"{ETC}/store.pem", f"{ETC}/store.key"
#: what the one user of the store may do, and with keys of kvhost's alone. LMCache's side needs no
#: UNLINK and SCAN: `kvhost purge` does.
RIGHTS = (
    *("-@all", "+auth", "+hello", "+ping", "+get", "+set", "+exists", "+touch", "+unlink"),
    *("+scan", "+info", "+dbsize"),
)
#: digits of a password that a digest of it may be kept of, as Redis keeps it, without salt
SHORTEST_PASSWORD = 16
OLDEST_REDIS = 7  # set-proc-title came with 6.2; 7.0 is what was tried
SHARE = 0.9  # of the host's memory that the data may take; the rest is for what is on its way


@dataclass(frozen=True)
class Kind:
    """A server of the distribution's. `name`: its package, program and unit."""

    name: str
    user: str

    @property
    def unit(self) -> str:
        return f"{self.name}@kvhost.service"

    @property
    def drop_in(self) -> str:
        return f"/etc/systemd/system/{self.unit}.d/kvhost.conf"

    @property
    def data(self) -> str:
        """Where a snapshot or log lies: the unit may write nowhere else."""
        return f"/var/lib/{self.user}/kvhost"


KINDS = (Kind("redis-server", "redis"), Kind("valkey-server", "valkey"))


def kind_of(packages: Mapping[str, str]) -> Kind:
    """That which is installed; else that which the distribution has, Redis first."""
    for state in ("installed", "available"):
        for kind in KINDS:
            if packages.get(kind.name) == state:
                return kind
    return KINDS[0]  # apt says then that there is none


def config_text(settings: Settings, kind: Kind) -> str:
    """The server's own configuration. No secret is in it."""
    port, tls = settings.shared_store_port, settings.shared_store_cert_file is not None
    persistence = settings.shared_store_persistence
    lines = [
        mark(settings),
        f"bind {settings.shared_store_address}",
        f"port {0 if tls else port}",
        *(
            (
                f"tls-port {port}",
                f"tls-cert-file {CERT}",
                f"tls-key-file {KEY}",
                "tls-auth-clients no",
                'tls-protocols "TLSv1.2 TLSv1.3"',
            )
            if tls
            else ()
        ),
        "protected-mode yes",
        f"aclfile {USERS}",
        f"maxmemory {int((settings.shared_store_memory_gib or 0) * GIB)}",
        f"maxmemory-policy {settings.shared_store_eviction}",
        # values are megabytes: they are freed beside the work, not in it
        "lazyfree-lazy-eviction yes",
        "lazyfree-lazy-user-del yes",
        # five minutes, and at an orderly stop
        "save 300 1" if persistence == "rdb" else 'save ""',
        # a full disk must cost the snapshot, not every write
        "stop-writes-on-bgsave-error no",
        f"appendonly {'yes' if persistence == 'aof' else 'no'}",
        "appendfsync everysec",
        f"dir {kind.data}",
        "dbfilename kvhost.rdb",
        "databases 1",
        "tcp-keepalive 60",
        f"pidfile /run/{kind.user}-kvhost/{kind.name}.pid",
        'logfile ""',
        # a title is written over the environment, in which `start.env` is found again
        "set-proc-title no",
    ]
    return "\n".join(lines) + "\n"


def mark(settings: Settings) -> str:
    """First line of what kvhost writes there: whose store it is."""
    return f"# Written by kvhost for {settings.base_dir}. Changes here are undone by the next run."


def users_text(password: Secret) -> str:
    """The one user: by the digest of its password, as Redis itself keeps it."""
    digest = hashlib.sha256(password.get_secret_value().encode()).hexdigest()
    return f"user default on #{digest} resetchannels ~kvhost:* {' '.join(RIGHTS)}"


def drop_in_text(settings: Settings, kind: Kind) -> str:
    run = f"/usr/bin/{kind.name} {CONFIG} --supervised systemd --daemonize no"
    return "\n".join(
        (
            mark(settings),
            "[Unit]",
            # an address that is not there yet would end it
            "After=network-online.target",
            "Wants=network-online.target",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "ExecStart=",
            f"ExecStart={run}",
            # by it a server is told that was started with other files than lie there now
            f"EnvironmentFile={START}",
            "RestartSec=2",
            # it answers systemd once it has read its snapshot, which may be large
            "TimeoutStartSec=infinity",
            "LimitCORE=0",
            "",
        )
    )


def start_text(*texts: str) -> str:
    """What the server is started with, as one digest; root's alone, as the password is in it."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"KVHOST_STORE={digest}"


def store_refusals(
    settings: Settings, found: Mapping[str, Any], password: Secret
) -> Iterator[Refusal]:
    """What stands against a store on this host, by what onhost/shared_store.py looked at."""
    address, port = settings.shared_store_address, settings.shared_store_port
    if not found["systemd"]:
        yield Refusal(
            "cache", "store_needs_systemd",
            "the store runs as the distribution's own unit, with its sandbox",
            "systemd as PID 1", "a host without it",
            "make the store on another host of the fleet, or leave shared_store_address out",
        )  # fmt: skip
        return
    if not found["apt"]:
        yield Refusal(
            "cache", "store_needs_apt", "the store comes from the distribution's packages",
            "Debian or Ubuntu, with apt", "no apt-get",
            "make the store on another host, or point shared_tier at one that you run yourself",
        )  # fmt: skip
    kind = kind_of(found["packages"])
    version = found["versions"].get(kind.name)
    number = str(version).rpartition(":")[2].partition(".")[0]
    if kind.name == "redis-server" and version and number.isdigit() and int(number) < OLDEST_REDIS:
        yield Refusal(
            "cache", "store_too_old", "this redis-server does not take the store's configuration",
            f"redis-server {OLDEST_REDIS}.0 or later", version,
            "make the store on a host with Debian 12, Ubuntu 24.04 or later",
        )  # fmt: skip
    if not found["address"]:
        yield Refusal(
            "cache", "store_address", "the store's address is none of this host",
            f"shared_store_address {address} on one of its interfaces",
            f"bind: {found['address_why']}", "an address that ip addr shows on this host",
        )  # fmt: skip
    elif found["port_taken"]:
        yield Refusal(
            "cache", "store_port", "the store's port is taken",
            f"{address}:{port} free", str(found["port_taken"]),
            "shared_store_port = another one, or stop what listens there",
        )  # fmt: skip
    if found["other"]:
        yield Refusal(
            "cache", "store_of_others", f"{CONFIG} is not this installation's",
            f"a file whose first line names {settings.base_dir}", str(found["other"]),
            "remove the other one's store first (kvhost shared --remove with its base_dir)",
        )  # fmt: skip
    wanted = (settings.shared_store_memory_gib or 0) * GIB
    if wanted > SHARE * found["memory_bytes"]:
        yield Refusal(
            "cache", "store_memory", "the store would take more memory than this host has for it",
            f"at most {SHARE:.0%} of the host's memory",
            f"shared_store_memory_gib is {size(wanted)}, the host has "
            f"{size(found['memory_bytes'])}",
            f"shared_store_memory_gib = {int(SHARE * found['memory_bytes'] / GIB * 10) / 10}",
        )  # fmt: skip
    factor = {"none": 0, "rdb": 2, "aof": 3}[settings.shared_store_persistence]
    if factor and found["disk_free_bytes"] < factor * wanted:
        yield Refusal(
            "cache", "store_disk", "the store's files would fill the disk",
            f"{factor} times its memory free ({size(factor * wanted)}): a new file is written "
            "beside the old one",
            f"{size(found['disk_free_bytes'])} free",
            "a smaller shared_store_memory_gib, or shared_store_persistence = 'none'",
        )  # fmt: skip
    if len(password.get_secret_value()) < SHORTEST_PASSWORD:
        yield Refusal(
            "cache", "store_password", "the store's password is too short",
            f"at least {SHORTEST_PASSWORD} characters: the server keeps a digest of it without "
            "salt, and takes thousands of tries a second",
            "a shorter one", "openssl rand -hex 24 > secrets/shared",
        )  # fmt: skip


def store_drift(
    plain: Mapping[str, str], secret: Mapping[str, tuple[Secret, str]], seen: Mapping[str, Any]
) -> list[Drift]:
    """What of a store is not as settings say. ``plain``: path -> content of root's files;
    ``secret``: path -> content without its last newline, and owner; ``seen``: what
    `onhost/shared_store.py drift` printed. No content is shown."""
    wanted = {path: ("root", "644", text) for path, text in plain.items()}
    for path, (one, user) in secret.items():
        wanted[path] = (user, "600", one.get_secret_value() + "\n")
    rows = []
    for path in sorted({*wanted, *seen["files"]}):
        found = seen["files"].get(path)
        if path not in wanted:
            rows += [Drift("store", path, NOTHING, "a file")] if found else []
            continue
        user, mode, text = wanted[path]
        if found is None:
            rows.append(Drift("store", path, "a file", NOTHING))
            continue
        if found["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            rows.append(Drift("store", path, "as the settings say", "another content"))
        if (found["user"], found["mode"]) != (user, mode):
            rows.append(Drift("store", path, f"{user} {mode}", f"{found['user']} {found['mode']}"))
    state = seen["state"]
    for key, word in (("active", "runs"), ("enabled", "starts at a boot")):
        rows += [] if state[key] else [Drift("store", "the server", word, "not so")]
    if state["active"] and not state["fresh"]:
        rows.append(Drift("store", "the server", "started with these files", "with others"))
    if state["active"] and state["asks"] is not None:
        rows.append(Drift("store", "the server", "asks for a password", str(state["asks"])))
    return rows


def store_notes(settings: Settings) -> Iterator[str]:
    """What is to be known of a store that is made or kept."""
    kept = {
        "none": "Nothing of the store outlives its restart; the hosts' own tiers do.",
        "rdb": "Of the store outlives a crash what was there at the last snapshot, at most 5 "
        "minutes before; an orderly stop keeps all. While one is written memory may be needed "
        "twice.",
        "aof": "Of the store outlives a crash all but the last second. While its log is written "
        "anew memory may be needed twice.",
    }
    yield kept[settings.shared_store_persistence]
    yield (
        f"No firewall is set: whoever reaches {settings.shared_store_address}:"
        f"{settings.shared_store_port} may try passwords."
    )
