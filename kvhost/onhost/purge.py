#!/usr/bin/env python3
"""Removes the KV of one namespace, one model or one tenant: files, memory, shared memory.

purge.py look   --base DIR --tier DIR [what]           what lies there and what would go; JSON
purge.py remove --base DIR --tier DIR --user U [what]  removes it; restarts what holds it in memory
what: --namespace NAME, --model NAME, --tenant-sha256 HEX (of cache_salt; "-" for requests without
one); several narrow each other. `look` without any shows all.

LMCache 0.5.6 names a file MODEL@RANK@GROUP@HASH[@SALT].data, with "-SEP-" for "/" in MODEL, so the
salt stands in it in clear; only its digest is ever shown or passed. The memory of the cache server
and of the engine cannot be cleared by tenant: both are stopped first, the shared memory is swept,
and they are started again. vLLM's own tier has files in MODEL_DIGEST_rRANK/, "_" for "/" in MODEL;
their salt is in a hash, so that no tenant of them can be told, and is refused; so is that of
llama-server's saved slots, whose model is the one that the namespace's own file names. Of the store
that hosts share (kvhost_shared.py) the same goes, for all of them; the memory and files of the
others stay until they are asked too. Removing is unlinking: the blocks on the disk are not
overwritten.
Exit: 0 done, 1 not, or not all (why, stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import kvhost_store as stores
    from kvhost.onhost.pruner_tier import (
        DIRECTORY,
        METADATA,
        NONSENSE,
        VLLM_ABOUT,
        VLLM_DIRS,
        VLLM_FILE,
        read_small,
    )
    from kvhost.onhost.slots_files import is_reserved
else:  # it lies beside this file on a host, where there is no package kvhost, or in lib/
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, os.path.join(os.path.dirname(here), "lib")]
    import kvhost_store as stores
    from pruner_tier import (
        DIRECTORY,
        METADATA,
        NONSENSE,
        VLLM_ABOUT,
        VLLM_DIRS,
        VLLM_FILE,
        read_small,
    )
    from slots_files import is_reserved
NAMESPACE = re.compile(r"^ns-[0-9a-f]+$")
ENDINGS = (".data", ".tmp")
#: the cache server's memory in /dev/shm, named for the installation (kvhost/services/vllm.py)
POOL = "lmcache_l1_pool_"
#: a saved slot of llama-server, or one whose save was cut off
SLOT = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.([0-9a-f]{16}\.kv|\d+\.tmp)\Z")
#: what else its keeper has there: its lock, its state, the note of each slot
KEEPERS = re.compile(r"\.slots\.lock\Z|\.[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.json(\.new)?\Z")
#: characters of a model's name that are told
MOST_NAME = 4096
Data = dict[str, Any]


class Trouble(Exception):
    """What went wrong, for people."""


class Row(NamedTuple):
    """One file; model and tenant are None where its name is of another form."""

    namespace: str
    name: str
    size: int
    model: str | None
    #: sha256 of the salt, "-" without one
    tenant: str | None
    #: sha256 of the model's weights, of saved slots
    weights: str | None = None


def parse(name: str) -> tuple[str | None, str | None]:
    """Model and tenant of a file's name.

    >>> parse("org-SEP-m@01@0@ab@s.data")[0], parse("m@01@0@ab.data")
    ('org/m', ('m', '-'))
    >>> parse("_srv_m_0123456789ab_r0/abc/de_g0/ff.bin")
    ('_srv_m', None)
    """
    if "/" in name:
        return name.partition("/")[0].rpartition("_r")[0].rpartition("_")[0], None
    stem, ending = os.path.splitext(name)
    parts = stem.split("@")
    if ending not in ENDINGS or len(parts) not in (4, 5):
        return None, None
    salt = parts[4] if len(parts) == 5 else ""
    tenant = hashlib.sha256(os.fsencode(salt)).hexdigest() if salt else "-"
    return parts[0].replace("-SEP-", "/"), tenant


def is_model(model: str | None, wanted: str) -> bool:
    """By its path or name as vLLM was given it, its last part, or as the hub calls it."""
    if model is None:
        return False
    last = model.rstrip("/").rpartition("/")[2]
    hub = wanted.replace("/", "--") + "--"  # models/OWNER--NAME--REVISION
    by_hub = "/" in wanted and last.startswith(hub)
    builtin = wanted == "builtin" and (last.startswith("builtin-") or "_builtin-" in last)
    # as vLLM's own tier names it: a path in which "/" is "_"
    flat = wanted.startswith("/") and model == wanted.replace("/", "_")
    return wanted in (model, last) or by_hub or builtin or flat


class Tier:
    """The tier's directory, held open; no link is ever followed. Methods raise OSError."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.root: int | None = None  # no run came so far that it was made
        with contextlib.suppress(FileNotFoundError):
            self.root = self._open(os.path.normpath(path), None)

    def _open(self, name: str, at: int | None) -> int:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        self.stack.callback(os.close, fd)
        return fd

    def namespaces(self) -> dict[str, int]:
        if self.root is None:
            return {}
        names = sorted(name for name in os.listdir(self.root) if NAMESPACE.match(name))
        return {name: self._open(name, self.root) for name in names}

    def rows(self, opened: dict[str, int]) -> Iterator[Row]:
        for namespace, fd in opened.items():
            model, weights = made_for(fd)
            for name, found in files_below(fd):
                size = found.st_blocks * 512
                if SLOT.match(name):
                    yield Row(namespace, name, size, model, None, weights)
                else:
                    yield Row(namespace, name, size, *parse(name))


def made_for(fd: int) -> tuple[str | None, str | None]:
    """The model that a namespace was made for, as model_source named it, and the digest of its
    weights, by the namespace's own file; None: it does not tell."""
    try:
        told = json.loads(read_small(METADATA, fd))
        found = (told.get("model"), told["engine_config"].get("model_digest"))
    except NONSENSE:
        return None, None
    model, weights = (
        text if isinstance(text, str) and 0 < len(text) <= MOST_NAME else None for text in found
    )
    return model, weights


def files_below(fd: int, above: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """(path below the namespace, stat) of the files of a cache; of vLLM's directories too."""
    depth = above.count("/")
    for name in sorted(os.listdir(fd)):
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if name.startswith("."):
                continue
            if stat.S_ISREG(found.st_mode) and (not above or VLLM_FILE.match(name)):
                yield above + name, found
            elif stat.S_ISDIR(found.st_mode) and depth < 3 and VLLM_DIRS[depth].match(name):
                with opened(name, fd) as below:
                    yield from files_below(below, f"{above}{name}/")
        except FileNotFoundError:  # pruned meanwhile
            continue


@contextlib.contextmanager
def opened(path: str, fd: int) -> Iterator[int]:
    """A directory below another one, no link followed on the way. Raises OSError."""
    with contextlib.ExitStack() as stack:
        for part in filter(None, path.split("/")):
            fd = os.open(part, DIRECTORY, dir_fd=fd)
            stack.callback(os.close, fd)
        yield fd


def chosen(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """Of a namespace every file; of a model or tenant those whose name says so, and of a model the
    slots of its namespaces. Raises Trouble where files may be of any tenant, or of any model."""
    slots = [row for row in rows if SLOT.match(row.name)]
    slots = [row for row in slots if args.namespace in (None, row.namespace)]
    if args.model is not None:  # those of another model are not asked for
        slots = [row for row in slots if row.model is None or is_model(row.model, args.model)]
    mute = {row.namespace for row in slots if row.model is None}
    if args.model is not None and mute:
        raise Trouble(
            "which model these saved slots of llama-server are of is not noted "
            f"({', '.join(sorted(mute))}): purge the namespace"
        )
    if args.tenant_sha256 is not None and slots:
        raise Trouble(
            "saved slots of llama-server do not tell tenants "
            f"({', '.join(sorted({row.namespace for row in slots}))}): purge the namespace"
        )
    mute = {row.namespace for row in rows if "/" in row.name}
    if args.namespace is not None:
        mute &= {args.namespace}
    if args.tenant_sha256 is not None and mute:
        raise Trouble(
            f"the files of vLLM's own tier do not tell tenants ({', '.join(sorted(mute))}): "
            "purge the namespace"
        )
    return [
        row
        for row in rows
        if (args.namespace is None or row.namespace == args.namespace)
        and (args.model is None or is_model(row.model, args.model))
        and (args.tenant_sha256 is None or row.tenant == args.tenant_sha256)
    ]


def spec(base: str, name: str) -> Data:
    """etc/NAME.json, {} without it. Raises OSError, ValueError."""
    try:
        with open(os.path.join(base, "etc", name + ".json"), encoding="utf-8") as handle:
            loaded: Data = json.load(handle)
    except FileNotFoundError:
        return {}
    return loaded


def current(base: str) -> str | None:
    """The namespace that is written to, by the cache server or by the runner itself."""
    argv = spec(base, "runner").get("argv", [])
    if "--slot-save-path" in argv:  # llama-server
        return os.path.basename(str(argv[argv.index("--slot-save-path") + 1]))
    if "--kv-transfer-config" in argv:  # vLLM's own tiering
        config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        tier = config["kv_connector_extra_config"]["secondary_tiers"][0]
        return os.path.basename(str(tier["root_dir"]))
    argv = spec(base, "cache").get("argv", [])
    if "--l2-adapter" not in argv:
        return None
    adapter = json.loads(argv[argv.index("--l2-adapter") + 1])
    return os.path.basename(str(adapter["base_path"]))


def adapter_of(base: str, kind: str) -> Data:
    """LMCache's description of one tier, from the cache server's arguments; {} without one."""
    argv = spec(base, "cache").get("argv", [])
    for number in (n for n, word in enumerate(argv) if word == "--l2-adapter"):
        adapter: Data = json.loads(argv[number + 1])
        if adapter.get("type") == kind:
            return adapter
    return {}


class Shared:
    """The store that this host shares KV through, if it uses one."""

    def __init__(self, args: argparse.Namespace, rows: list[Row]) -> None:
        self.args = args
        self.params: Data = adapter_of(args.base, "plugin").get("adapter_params") or {}
        self.rows = rows

    def patterns(self) -> list[str]:
        """Of its keys, kvhost:NAMESPACE:RANK:GROUP:HASH:TENANT. A model is known by the namespaces
        that hold it here, or that serve it now."""
        spaces = {"*"} if self.args.namespace is None else {self.args.namespace}
        if self.args.model is not None:
            spaces = {row.namespace for row in self.rows if is_model(row.model, self.args.model)}
            served = spec(self.args.base, "runner").get("argv", [])
            if any(is_model(word, self.args.model) for word in served):
                spaces.add(str(self.params["namespace"]))
            if self.args.namespace is not None:
                spaces &= {self.args.namespace}
        tenant = self.args.tenant_sha256 or "*"
        return [f"kvhost:{space}:*:*:*:{tenant}" for space in sorted(spaces)]

    def ask(self, *, remove: bool) -> Data:
        """{"shared": how many keys are that, and, removed, were; None: not known, or no shared
        tier, "shared_why": why they are not known}."""
        if not self.params:
            return {"shared": None, "shared_why": None}
        password = os.path.join(self.args.base, "secrets", "shared-password")
        try:
            place = stores.place_of(self.params)
            store = stores.connect(place, stores.password_in(password), 20)
            keys = {key for pattern in self.patterns() for key in store.find(pattern)}
            if remove:
                store.forget(list(keys))
            store.close()
        except (stores.StoreError, stores.Said, OSError) as error:
            return {"shared": None, "shared_why": str(error)}
        return {"shared": len(keys), "shared_why": None}


def services(args: argparse.Namespace, *words: str) -> subprocess.CompletedProcess[str]:
    script = os.path.join(args.base, "bin", "services.py")
    argv = [sys.executable, script, "--base", args.base, "--user", args.user, *words]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)


def holders(args: argparse.Namespace) -> dict[str, bool]:
    """The services that hold KV in memory, in the order of their stop, and whether each runs or is
    about to."""
    done = services(args, "--json", "status")
    if done.returncode != 0:
        raise Trouble("which services run could not be found out (see above)")
    rows = json.loads(done.stdout.strip().splitlines()[-1])["services"]
    # what starts by itself counts too: only what was stopped by a person is left stopped
    idle = ("STOPPED", "EXITED", "DOWN", "inactive")
    return {
        name: bool(rows[name]["alive"]) or rows[name]["state"] not in idle
        for name in reversed(rows)
        if name != "pruner"
    }


def sweep(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """/dev/shm, with the commands that run before each start, as the service's user. What is of
    this installation's own name and still there afterwards: shm_sweep.py never fails."""
    left: set[str] = set()
    ids = ["--reuid", args.user, "--regid", args.user, "--init-groups", "--inh-caps=-all"]
    for name in names:
        for argv in spec(args.base, name).get("before", []):
            if any(os.path.basename(word) == "shm_sweep.py" for word in argv):
                prefix = ["setpriv", *ids] if os.geteuid() == 0 else []
                subprocess.run([*prefix, *argv], check=True, stdout=sys.stderr)
                # names with * may be other engines' of this user, which are in use
                left |= {word for word in argv if word.startswith(POOL) and "*" not in word}
    return sorted(name for name in left if os.path.lexists(f"/dev/shm/{name}"))


def summary(rows: list[Row]) -> list[Data]:
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for row in rows:
        what = (row.namespace, row.model, row.tenant, row.weights)
        groups.setdefault(what, []).append(row.size)
    keys = ("namespace", "model", "tenant", "weights")
    return [
        {**dict(zip(keys, what)), "files": len(sizes), "bytes": sum(sizes)}  # noqa: B905 (3.9)
        for what, sizes in sorted(groups.items(), key=lambda item: repr(item[0]))
    ]


def in_memory(tier: Tier, args: argparse.Namespace, opened: dict[str, int]) -> bool:
    """Whether a service runs whose memory may hold what is asked for, so that it is restarted."""
    if args.namespace not in (None, current(args.base)):
        return False
    try:
        known(args, tier, opened)
    except Trouble:
        return False  # of it nothing can be here
    if not spec(args.base, "runner") and not spec(args.base, "cache"):
        return False  # no service was ever described
    try:
        return args.user is None or any(holders(args).values())
    except Trouble:
        return True  # not known, so it is not left out


def look(tier: Tier, args: argparse.Namespace) -> Data:
    opened = tier.namespaces()
    rows = list(tier.rows(opened))
    found = chosen(rows, args)
    now = current(args.base)
    what = (args.namespace, args.model, args.tenant_sha256)
    return {
        **Shared(args, rows).ask(remove=False),
        "rows": summary(found),
        "current": now,
        "files": len(found),
        "bytes": sum(row.size for row in found),
        "tier": None if tier.root is None else args.tier,
        "restarts": what != (None, None, None) and in_memory(tier, args, opened),
    }


def known(args: argparse.Namespace, tier: Tier, opened: Any) -> None:
    """Raises Trouble for a namespace or model of which nothing can be here: a slip of the pen must
    stop no service. A tenant may be in memory alone, and its files say nothing about that."""
    if args.namespace is not None and args.namespace not in opened:
        there = ", ".join(sorted(opened)) or "none"
        raise Trouble(f"no namespace {args.namespace} in {args.tier}; there is: {there}")
    rows = list(tier.rows(opened))
    chosen(rows, args)  # before a service is stopped for nothing
    models = {row.model for row in rows if row.model is not None}
    served = list(spec(args.base, "runner").get("argv", []))  # its KV may be in memory alone
    if (now := current(args.base)) in opened:
        served.append(made_for(opened[now])[0])
    if args.model is not None and not any(is_model(one, args.model) for one in (*models, *served)):
        there = ", ".join(sorted(models)) or "none"
        raise Trouble(f"no KV of a model {args.model} in {args.tier}; there is: {there}")


def remove(tier: Tier, args: argparse.Namespace) -> Data:
    """Stops what holds KV in memory, unlinks, sweeps, and starts again what ran."""
    stopped: list[str] = []
    held_by: dict[str, bool] = {}
    namespaces = tier.namespaces()
    now = current(args.base)
    known(args, tier, namespaces)
    # memory may hold what the tier no longer does: the files say nothing about that
    if args.namespace in (None, now):
        held_by = holders(args)
        stopped = [name for name, runs in held_by.items() if runs]
        if services(args, "stop", *held_by).returncode != 0:
            raise Trouble("the services could not be stopped: nothing was removed")
    try:
        rows = list(tier.rows(namespaces))
        gone = chosen(rows, args)
        for row in gone:
            with contextlib.suppress(FileNotFoundError):  # the pruner was faster
                folder, _, name = row.name.rpartition("/")
                with opened(folder, namespaces[row.namespace]) as where:
                    os.unlink(name, dir_fd=where)
                    if (slot := SLOT.match(name)) and not is_reserved(slot[1]):
                        unlink(f".{slot[1]}.json", where)
        for fd in namespaces.values():
            os.fsync(fd)
        # this host stores nothing meanwhile, unless what is asked for is not in use
        shared = Shared(args, rows).ask(remove=True)
        if args.namespace is not None and args.namespace != now and args.namespace in namespaces:
            drop(tier, args.namespace, namespaces[args.namespace])
            del namespaces[args.namespace]
        held = sweep(args, held_by) if held_by else []
        left = chosen(list(tier.rows(namespaces)), args)
    finally:
        failed = stopped and services(args, "start", *reversed(stopped)).returncode != 0
    if failed:
        raise Trouble(f"removed, but {', '.join(stopped)} did not start again (see above)")
    if held:
        raise Trouble(
            f"the files are removed, and shared memory is left: {', '.join(held)} (above)"
        )
    if shared["shared_why"] is not None:
        why = shared["shared_why"]
        raise Trouble(f"the files are removed, and what is in the shared tier stays: {why}")
    if left:
        raise Trouble(f"{len(left)} files are still there, {left[0].name} among them")
    return {
        **shared,
        "removed": summary(gone),
        "files": len(gone),
        "bytes": sum(row.size for row in gone),
        "restarted": list(reversed(stopped)),
    }


def unlink(name: str, fd: int) -> None:
    """A file beside the cache's own. A directory of its name is none of kvhost's."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=fd)


def drop(tier: Tier, name: str, fd: int) -> None:
    """The empty directory of a namespace that is not in use; what is not a cache file keeps it."""
    for own in os.listdir(fd):
        if own.startswith(".kvhost") or KEEPERS.match(own):
            unlink(own, fd)
    drop_empty(fd)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=tier.root)


def drop_empty(fd: int, depth: int = 0) -> None:
    """vLLM's directories that hold nothing any more, and what it says of its digest."""
    for name in os.listdir(fd):
        about = depth == 0 and VLLM_ABOUT.match(name)
        if not about and not (depth < 3 and VLLM_DIRS[depth].match(name)):
            continue
        with contextlib.suppress(OSError):  # it is none, or something else lies in it
            with opened(name, fd) as below:
                if about:
                    os.unlink("config.json", dir_fd=below)
                else:
                    drop_empty(below, depth + 1)
            os.rmdir(name, dir_fd=fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["look", "remove"])
    parser.add_argument("--base", required=True, help="kvhost's directory")
    parser.add_argument("--tier", required=True, help="directory of the KV cache")
    parser.add_argument("--user", help="the service's user; needed to remove")
    parser.add_argument("--namespace", help="all of this one: ns-…")
    parser.add_argument("--model", help="its path or name, as `look` shows it")
    parser.add_argument("--tenant-sha256", metavar="HEX", help='of cache_salt; "-": without one')
    args = parser.parse_args()
    what = (args.namespace, args.model, args.tenant_sha256)
    if args.command == "remove" and (args.user is None or what == (None, None, None)):
        parser.error("remove needs --user, and what: --namespace, --model or --tenant-sha256")
    try:
        with contextlib.ExitStack() as stack:
            tier = Tier(args.tier, stack)
            answer = look(tier, args) if args.command == "look" else remove(tier, args)
    except (Trouble, OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        print(f"purge: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
