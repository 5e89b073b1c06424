"""The saved slots of llama-server in their directory: which files are whole, and whose they are.

A saved slot NAME is two files: NAME.DIGEST.kv, which llama-server writes and reads, and .NAME.json,
which says of it {"schema", "name", "file", "sha256", "bytes", "tokens", "slot", "why",
"saved_unix", "engine", "server_build"}: engine are the namespace's fields (model, build, types of K
and V, ...), server_build is what the server itself said. The second is written last and replaced
as a whole, so that a save which is cut off leaves the one before it. llama-server has no checksum:
a damaged file is loaded as if it were good, a short one ends the process. So no file is named to it
before all of this was compared.

The pruner counts and removes *.kv (hidden files it leaves); what it leaves alone is cleared here.

What is no regular file at one of these names is nobody's data: a pipe, a socket, a link (never what
it names) and an empty directory are removed, and said. A directory that holds something stays, and
one line says what cannot be done until it is moved away. Nothing here waits for a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

Data = dict[str, Any]
SCHEMA = 1
NAMESPACE = ".kvhost-namespace.json"
LOCK, STATE = ".slots.lock", ".slots-state.json"
#: what is not a saved slot's, whatever its name is
OWN = frozenset((NAMESPACE, LOCK, STATE))
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
#: what is saved of a slot by itself
OF_SLOT = re.compile(r"slot-(\d+)\Z")
SAVED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{16}\.kv\Z")
UNFINISHED = re.compile(r".*\.tmp\Z|\..*\.json\.new\Z")
#: a save that is at work is younger
OLD_S = 600
LOCK_WAIT_S = 300.0
#: bytes of a note or of the state; theirs have about 1,000
MOST_JSON = 1 << 18


class Trouble(Exception):
    """What went wrong, for people."""


def note_of(name: str) -> str:
    """The file that says what the saved slot ``name`` is."""
    return f".{name}.json"


def is_reserved(name: str) -> bool:
    """Would its note be a file of the keeper's, or the namespace's own?"""
    return note_of(name) in OWN


def say(text: str) -> None:
    print(f"slots: {text}", file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=64)
def say_once(text: str) -> None:
    """What a loop would say in every round. ``say_once.cache_clear()`` makes it new again."""
    say(text)


def opened(path: str) -> BinaryIO:
    """A regular file, no link; a pipe is not waited for. Raises OSError."""
    return os.fdopen(open_regular(path, os.O_RDONLY), "rb")


def open_regular(path: str, flags: int) -> int:
    """As os.open(), of a regular file alone. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def read_json(path: str) -> Data:
    """The object in a small file. Raises OSError, ValueError (what is odd about its content)."""
    with opened(path) as handle:
        text = handle.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise ValueError(f"{path} has more than {MOST_JSON} bytes")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no JSON object")
    return data


def well_formed(name: str, note: Data) -> bool:
    """Is it a note as keep() writes them? Whether it is true is another question."""

    def number(key: str, *kinds: type) -> bool:
        value: Any = note.get(key)
        return type(value) in kinds and 0 <= value < 2**63  # not NaN, no bool

    file = note.get("file")
    return (
        note.get("schema") == SCHEMA
        and isinstance(file, str)
        and bool(SAVED.match(file))
        and file.startswith(f"{name}.")
        and isinstance(note.get("sha256"), str)
        and isinstance(note.get("engine"), dict)
        and number("bytes", int)
        and number("tokens", int)
        and number("saved_unix", int, float)
    )


def removed(path: str) -> bool:
    """Is it gone now? What cannot be removed (a directory that holds something) is said, and
    passed over."""
    try:
        remove(path)
    except OSError as error:
        say_once(f"cannot be removed: {in_the_way(path, error)}")
        return False
    return True


def remove(path: str) -> None:
    """A file, a link itself, or an empty directory. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)


def make_way(path: str) -> None:
    """What is no regular file gives way to one that is to be written. Raises Trouble."""
    try:
        kind = os.lstat(path).st_mode
        if stat.S_ISREG(kind):
            return
        # whoever was quicker may have put a file there
        (os.rmdir if stat.S_ISDIR(kind) else os.unlink)(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise Trouble(f"in the way: {in_the_way(path, error)}") from None
    say(f"removed {path}, which was no file of the slots'")


def in_the_way(path: str, error: OSError) -> str:
    """What lies there and what to do about it."""
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return f"{path} is a directory that holds something: move it away"
    return f"{path} ({error.strerror}): move it away"


def digest_of(handle: BinaryIO) -> tuple[str, int]:
    digest, count = hashlib.sha256(), 0
    for block in iter(lambda: handle.read(1 << 20), b""):
        digest.update(block)
        count += len(block)
    return digest.hexdigest(), count


def sha256(path: str) -> tuple[str, int]:
    """Digest and bytes of a regular file, no link. Raises OSError."""
    with opened(path) as handle:
        return digest_of(handle)


def sync(folder: str) -> None:
    """Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Store:
    """The directory of one namespace. Methods raise Trouble, OSError."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            self.fields: Data = dict(read_json(self.path(NAMESPACE))["engine_config"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Trouble(
                f"{folder} is no namespace of kvhost ({error}): kvhost up makes its file anew"
            ) from error

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @contextlib.contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """One at a time: the keeper, what runs before a stop, and commands by hand."""
        make_way(self.path(LOCK))
        fd = open_regular(self.path(LOCK), os.O_CREAT | os.O_RDWR)
        deadline = time.monotonic() + wait_s
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Trouble(f"{LOCK} was held for {wait_s:.0f} s") from None
                time.sleep(0.05)
            yield
        finally:
            os.close(fd)

    # what the keeper remembers

    def state(self) -> Data:
        """{} without a usable one: it only saves work."""
        try:
            return read_json(self.path(STATE))
        except (OSError, ValueError):
            return {}

    def remember(self, data: Data) -> None:
        """What could not be remembered is done once more."""
        try:
            self.write(STATE, data)
        except (Trouble, OSError) as error:
            say_once(f"what was saved and restored is not remembered: {error}")

    def make_way(self, *names: str) -> None:
        """For files of these names. Raises Trouble for what stays in the way."""
        for name in names:
            make_way(self.path(name))

    def write(self, name: str, data: Data) -> None:
        """Whole or not at all, and on the disk."""
        self.make_way(name, name + ".new")
        new = self.path(name + ".new")
        remove(new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, 0o600), "w", encoding="utf-8") as handle:
            json.dump(data, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(new, self.path(name))
        sync(self.folder)

    # saved slots

    def notes(self) -> dict[str, Data | None]:
        """Name -> what is noted of it; None for a note that cannot be read, or has another form."""
        found: dict[str, Data | None] = {}
        for entry in sorted(os.listdir(self.folder)):
            name = entry[1 : -len(".json")]
            if not (entry.startswith(".") and entry.endswith(".json") and NAME.match(name)):
                continue
            if entry in OWN:
                continue
            found[name] = None
            with contextlib.suppress(OSError, ValueError):
                note = read_json(self.path(entry))
                found[name] = note if well_formed(name, note) else None
        return found

    def expect(self, name: str, draft: str) -> None:
        """Before the server writes ``draft``, which keep() will make ``name``: it would wait for a
        pipe, and write where a link leads. Raises Trouble, OSError."""
        if is_reserved(name):
            raise Trouble(f"{note_of(name)} is a file of kvhost's own: take another name")
        self.make_way(note_of(name), f"{note_of(name)}.new", draft)
        remove(self.path(draft))

    def keep(self, name: str, draft: str, told: Data) -> Data:
        """Makes a file that the server has just written the saved slot ``name``. Raises Trouble if
        it is not as long as the server said."""
        path = self.path(draft)
        with opened(path) as handle:
            os.fchmod(handle.fileno(), 0o600)
            digest, count = digest_of(handle)
            if count != told["bytes"]:
                raise Trouble(f"{draft} has {count} bytes, the server wrote {told['bytes']}")
            os.fsync(handle.fileno())
        before = (self.notes().get(name) or {}).get("file")
        file = f"{name}.{digest[:16]}.kv"
        self.make_way(file)
        os.replace(path, self.path(file))
        sync(self.folder)
        note = {
            "schema": SCHEMA,
            "name": name,
            "file": file,
            "sha256": digest,
            "saved_unix": time.time(),
            "engine": self.fields,
            **told,
        }
        self.write(note_of(name), note)
        if before is not None and before != file:
            removed(self.path(before))
        return note

    def why_not(self, name: str, note: Data | None, server_build: str | None) -> str | None:
        """Why a saved slot must not be named to the server; None when it may. Reads all of it."""
        if note is None:
            return "its note cannot be read, or is of another form"
        wanted = note["engine"]
        if wanted != self.fields:
            keys = {*self.fields, *wanted}
            changed = sorted(key for key in keys if wanted.get(key) != self.fields.get(key))
            return f"it is of another engine: {', '.join(changed)} differ"
        if server_build is not None and note.get("server_build") != server_build:
            return f"it is of build {note.get('server_build')}, and {server_build} runs"
        try:
            with opened(self.path(note["file"])) as handle:
                size = os.fstat(handle.fileno()).st_size
                # the length first: a file that was blown up is not read
                found = digest_of(handle)[0] if size == note["bytes"] else None
        except FileNotFoundError:
            return "its file is gone (the pruner's limit, or somebody's hand)"
        except OSError as error:
            return f"its file cannot be read: {error}"
        if found is None:
            return f"its file has {size} bytes, {note['bytes']} were written"
        return None if found == note["sha256"] else "its file is damaged: the checksum is another"

    def forget(self, name: str) -> bool:
        """Is all of it gone? The note first: a file without one is never named to the server."""
        gone = [removed(self.path(entry)) for entry in self.entries(name)]
        return all(gone)

    def entries(self, name: str) -> list[str]:
        """What lies here of a saved slot, its note first."""
        there, note = os.listdir(self.folder), note_of(name)
        saved = [SAVED.match(entry) for entry in sorted(there)]
        own = [match.group() for match in saved if match and match.group(1) == name]
        return [note, *own] if note in there and not is_reserved(name) else own

    def clear(self) -> list[str]:
        """Removes what belongs to no saved slot: files without a note, and old unfinished ones.
        What cannot be removed is passed over."""
        used = {note["file"] for note in self.notes().values() if note}
        gone = []
        for entry in sorted(os.listdir(self.folder)):
            with contextlib.suppress(FileNotFoundError):
                age = time.time() - os.lstat(self.path(entry)).st_mtime
                lost = SAVED.match(entry) and entry not in used
                stale = lost or (UNFINISHED.match(entry) and age > OLD_S)
                if stale and removed(self.path(entry)):
                    gone.append(entry)
        return gone
