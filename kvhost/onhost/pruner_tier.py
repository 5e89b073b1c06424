"""The tier as the pruner sees it: its files, their last use, and the removal of names. Reaches
everything through file descriptors, follows no link, and leaves other mounts alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MARKER = ".kvhost-tier"
#: a status names every namespace; no file of kvhost's own is larger
MOST_BYTES = 16 << 20
#: what reading a file of JSON raises that is none of kvhost's, however it was made
NONSENSE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
METADATA = ".kvhost-namespace.json"  # {"chunk_bytes": size of each file | null}
NAMESPACE = re.compile(r"ns-[0-9a-f]+\Z")
#: directories of vLLM's file tier by their depth below a namespace, and the files in the last
#: (vllm/v1/kv_offload/file_mapper.py, 0.32.0; the suffix of a temporary file is a random number)
VLLM_DIRS = tuple(map(re.compile, (r".+_r\d+\Z", r"[0-9a-f]{3}\Z", r"[0-9a-f]{2}_g\d+\Z")))
VLLM_FILE = re.compile(r"[0-9a-f]+\.bin(_\d+\.tmp)?\Z")
#: holds what vLLM says of its own digest, config.json, and nothing else
VLLM_ABOUT = re.compile(r".+_[0-9a-f]{12}\Z")
LOCK_WAIT_S = 30.0
SETTLED_S = 30.0  # ZFS and some network filesystems tell the blocks of a new file only later
STRICT = "lru (access times move with every read)"
REARMED = "lru (relatime, re-armed at each scan: exact to one interval)"
FIFO = "fifo (access times do not move here)"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Refused(Exception):
    """The directory given is not a tier that may be pruned."""


class Busy(Exception):
    """Another pruner holds the lock of this tier."""


class File(NamedTuple):
    """One L2 file: sizes in bytes (``size`` is allocated), times in ns since the epoch. ``name`` is
    its path below the namespace."""

    namespace: str
    name: str
    inode: int
    size: int
    apparent: int
    links: int
    mtime: int
    used: int

    @property
    def temporary(self) -> bool:
        # fs, fs_native: X.tmp for X.data; nixl_store_dynamic: X.bin.tmp.<hex> (lmcache 0.5.6);
        # vLLM: X.bin_<number>.tmp
        return self.name.endswith(".tmp") or ".tmp." in self.name

    @property
    def kind(self) -> tuple[str, ...]:
        """Files of one kind have one size: fs names MODEL@RANK@OBJECTGROUP@HASH.data, vLLM
        MODEL_rRANK/HHH/HH_gGROUP/HASH.bin."""
        if "/" in self.name:
            model, _, group, _ = self.name.split("/")
            return (self.namespace, model, group.partition("_")[2])
        return (self.namespace, *self.name.split("@")[1:3])


Victim = tuple[File, str]  # with the reason


class Scan(NamedTuple):
    """What lies in the tier; ``declared``: bytes that a file of a namespace must have, if known."""

    files: list[File]
    declared: dict[str, int | None]
    left_alone: Counter[str]
    free: int
    #: (namespace, path below it) of vLLM's directories that hold nothing, deepest first
    empty: list[tuple[str, str]]

    @property
    def usage(self) -> int:
        return sum(f.size for f in self.files)


class Tier:
    """An opened, checked and locked tier. All below it is reached through file descriptors."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        """Raises Refused for a directory that may not be pruned, Busy when it is locked."""
        self.stack = stack
        self.namespaces: dict[str, int] = {}
        self.mounts = mounts_below(path)
        try:  # normpath: with a slash at its end O_NOFOLLOW would follow the link
            self.root = self._open(os.path.normpath(path), os.O_RDONLY | os.O_DIRECTORY)
        except OSError as why:
            raise Refused(f"{path}: cannot be opened as a directory, or is a link: {why}") from why
        info, me = os.fstat(self.root), os.geteuid()
        if os.path.samestat(info, Path("/").stat()):
            raise Refused(f"{path}: is the root of the filesystem; give the tier's directory")
        if me != 0 and info.st_uid not in (0, me):
            raise Refused(f"{path}: belongs to uid {info.st_uid}; run this as that user")
        try:
            try:  # NFS locks exclusively for writers only
                marker = self._open(MARKER, os.O_RDWR, self.root)
            except PermissionError:
                marker = self._open(MARKER, os.O_RDONLY, self.root)
        except OSError as why:
            raise Refused(f"{path}: no tier of kvhost, its {MARKER} does not open: {why}") from why
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"{path}: another pruner has had the lock for 30 s") from None
                time.sleep(0.02)

    def _open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
        self.stack.callback(os.close, fd)
        return fd

    def _enter(self, name: str) -> str | None:
        """Open a namespace; returns why it is left alone, or None."""
        try:
            fd = self._open(name, os.O_RDONLY | os.O_DIRECTORY, self.root)
        except FileNotFoundError:
            return None
        except OSError as why:
            return f"namespace that does not open as a directory ({why.strerror})"
        # Files are not compared: on overlayfs their device may differ from their directory's.
        if _place(fd) != _place(self.root):
            return "namespace on another mount"
        self.namespaces[name] = fd
        return None

    def _declared_size(self, namespace: int) -> int | None:
        """Raises one of NONSENSE for metadata that makes no sense."""
        size = json.loads(read_small(METADATA, namespace))["chunk_bytes"]
        if size is None or (type(size) is int and size > 0):
            return size
        raise ValueError(size)

    def scan(self, policy: str, *, rearm: bool) -> Scan:
        """Look at every file of every namespace once."""
        now = time.time()
        found = Scan([], {}, Counter(), free_bytes(self.root), [])
        with os.scandir(self.root) as entries:
            names = sorted(e.name for e in entries if NAMESPACE.match(e.name))
        found.left_alone.update(filter(None, map(self._enter, names)))
        for namespace, fd in self.namespaces.items():
            found.declared[namespace] = None
            try:
                found.declared[namespace] = self._declared_size(fd)
            except FileNotFoundError:
                pass
            except NONSENSE:
                found.left_alone[f"{METADATA} that makes no sense"] += 1
            self._scan_directory(found, namespace, "", fd, (policy, rearm, now))
        return found

    def _scan_directory(
        self, found: Scan, namespace: str, above: str, fd: int, how: tuple[str, bool, float]
    ) -> int:
        """Look at what lies in ``above`` ("" or a path that ends in "/"); the number of names."""
        policy, rearm, now = how
        depth, names = above.count("/"), 0
        with os.scandir(fd) as entries:
            for entry in entries:
                names += 1
                if entry.name.startswith("."):
                    continue
                try:
                    st = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(st.st_mode) and depth < len(VLLM_DIRS):
                        names -= self._scan_below(found, namespace, above, entry.name, fd, how)
                        continue
                    if not stat.S_ISREG(st.st_mode):
                        found.left_alone["not a regular file"] += 1
                        continue
                    if above and not (depth == len(VLLM_DIRS) and VLLM_FILE.match(entry.name)):
                        found.left_alone["not a file of vLLM's tier"] += 1
                        continue
                    found.files.append(_file(namespace, above + entry.name, st, policy, now))
                    # A read between stat and utime loses nothing: it would move no time.
                    if rearm and st.st_atime_ns > max(st.st_mtime_ns, st.st_ctime_ns):
                        times = (st.st_atime_ns, st.st_mtime_ns)
                        os.utime(entry.name, ns=times, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except PermissionError:
                    found.left_alone["times of another owner's file"] += 1
        return names

    def _scan_below(
        self,
        found: Scan,
        namespace: str,
        above: str,
        name: str,
        fd: int,
        how: tuple[str, bool, float],
    ) -> bool:
        """A directory of vLLM's tier; True if nothing is in it. Others are left alone."""
        if not VLLM_DIRS[above.count("/")].match(name):
            if above or not VLLM_ABOUT.match(name):
                found.left_alone["not a regular file"] += 1
            return False
        try:
            below = os.open(name, DIRECTORY, dir_fd=fd)
        except OSError as why:
            found.left_alone[f"directory that does not open ({why.strerror})"] += 1
            return False
        try:
            if f"{namespace}/{above}{name}" in self.mounts or not _same_device(below, fd):
                found.left_alone["directory on another mount"] += 1
                return False
            here = f"{above}{name}/"
            empty = self._scan_directory(found, namespace, here, below, how) == 0
        finally:
            os.close(below)
        if empty:
            found.empty.append((namespace, here[:-1]))
        return empty

    def remove(self, victims: list[Victim], policy: str) -> tuple[list[Victim], Counter[str]]:
        """Unlink; returns what went, and the errors. A file used since the scan stays."""
        gone: list[Victim] = []
        errors: Counter[str] = Counter()
        for victim, reason in victims:
            try:
                with self._parent(victim.namespace, victim.name) as (fd, name):
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if st.st_ino != victim.inode or _used(st, policy) != victim.used:
                        continue
                    os.unlink(name, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as why:
                errors[str(why.strerror)] += 1
                continue
            gone.append((victim, reason))
        return gone, errors

    @contextlib.contextmanager
    def _parent(self, namespace: str, path: str) -> Iterator[tuple[int, str]]:
        """(descriptor of the directory, last name) of a path below a namespace; no link is
        followed on the way. Raises OSError."""
        *folders, name = path.split("/")
        fd = self.namespaces[namespace]
        with contextlib.ExitStack() as opened:
            for folder in folders:
                fd = os.open(folder, DIRECTORY, dir_fd=fd)
                opened.callback(os.close, fd)
            yield fd, name

    def remove_empty(self, empty: list[tuple[str, str]]) -> int:
        """Directories of vLLM's that hold nothing; how many went. One that is in use stays."""
        gone = 0
        for namespace, path in empty:
            with contextlib.suppress(OSError), self._parent(namespace, path) as (fd, name):
                os.rmdir(name, dir_fd=fd)
                gone += 1
        return gone

    def probe(self) -> str:
        """Find out whether reading moves the access time of a file in this directory."""
        name = f".kvhost-probe.{os.getpid()}"
        old = time.time_ns() - 2 * 86400 * 10**9
        seen = []
        try:
            with contextlib.suppress(FileNotFoundError):  # left by a killed one of this number
                os.unlink(name, dir_fd=self.root)
            fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.root)
            try:
                os.write(fd, b"x")
                os.utime(fd, ns=(old, old - 10**9))
                for _ in range(2):
                    time.sleep(0.03)  # longer than the tick of the clock that stamps files
                    os.pread(fd, 1, 0)
                    seen.append(os.fstat(fd).st_atime_ns)
            finally:
                os.unlink(name, dir_fd=self.root)
        except OSError as why:
            return f"fifo (access times unknown: {why.strerror})"
        if seen[0] == old:
            return FIFO
        return STRICT if seen[1] > seen[0] else REARMED


def _place(fd: int) -> tuple[int, str]:
    """Device and mount of a directory: a bind mount keeps the device, only the mount's id tells."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return os.fstat(fd).st_dev, next((line for line in lines if line.startswith("mnt_id")), "")


def above(gone: list[Victim]) -> list[tuple[str, str]]:
    """The directories that files lay in which are gone, as Scan.empty has them."""
    found = {
        (f.namespace, f.name.rsplit("/", up)[0])
        for f, _ in gone
        for up in range(1, f.name.count("/") + 1)
    }
    return sorted(found, key=lambda one: -one[1].count("/"))


def _same_device(one: int, other: int) -> bool:
    return os.fstat(one).st_dev == os.fstat(other).st_dev


def mounts_below(path: str) -> frozenset[str]:
    """Mount points below a directory, as paths relative to it: a bind mount keeps the device."""
    top = os.path.realpath(path).rstrip("/") + "/"
    rows = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    points = (row.split()[4].replace("\\040", " ") for row in rows)
    return frozenset(point[len(top) :] for point in points if point.startswith(top))


def _used(st: os.stat_result, policy: str) -> int:
    return max(st.st_atime_ns, st.st_mtime_ns) if policy.startswith("lru") else st.st_mtime_ns


def _file(namespace: str, name: str, st: os.stat_result, policy: str, now: float) -> File:
    size = st.st_blocks * 512
    if size == 0 or now - st.st_mtime < SETTLED_S:
        size = max(size, st.st_size)
    used = _used(st, policy)
    return File(namespace, name, st.st_ino, size, st.st_size, st.st_nlink, st.st_mtime_ns, used)


def read_small(path: str, dir_fd: int | None = None) -> str:
    """Text of a regular file of at most MOST_BYTES; no link, and a pipe is not waited for.

    Raises OSError, ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError("larger than any that kvhost writes")
    return data.decode()


def free_bytes(where: int | str) -> int:
    """Bytes that an unprivileged user can still write to the filesystem."""
    st = os.statvfs(where)
    return st.f_bavail * st.f_frsize
