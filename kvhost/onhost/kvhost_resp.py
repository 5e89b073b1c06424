"""A client for the store that several hosts share: Redis or Valkey, by their protocol (RESP2).

A module for kvhost_shared.py (in the cache server) and for scripts that ask the store; in lib/ on
the host. Only what these need: a password, TLS, pipelines, and values that are read into memory
that is there already. Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    Word = str | bytes | memoryview

#: what every key of kvhost begins with; the store's user may reach no other
PREFIX = "kvhost:"
#: bytes of one line of an answer; a longer one is no answer of a store
LONGEST_LINE = 1 << 16


class StoreError(Exception):
    """The store is not to be used: it does not answer, or refuses. The message holds no secret."""


class Said(Exception):
    """An error that the store answered one command with, as it words it."""


class Place(NamedTuple):
    """Where the store is. ``ca``: file with certificates that its own must come from; None: the
    system's."""

    host: str
    port: int
    user: str | None = None
    tls: bool = False
    ca: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}"


def place_of(params: Any) -> Place:
    """From the JSON that services.py renders. Raises KeyError, TypeError."""
    return Place(
        str(params["host"]), int(params["port"]), params.get("user"),
        bool(params.get("tls")), params.get("ca"),
    )  # fmt: skip


def words_of(words: Sequence[Word]) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode() if isinstance(word, str) else bytes(word)
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


def dial(place: Any, timeout: float) -> socket.socket:
    """A connection to a place, of Redis or S3, with TLS where it has that. Raises StoreError."""
    try:
        raw = socket.create_connection((place.host, place.port), timeout)
    except OSError as error:
        raise StoreError(f"{place}: {reason(error, timeout)}") from None
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not place.tls:
            return raw
        context = ssl.create_default_context(cafile=place.ca)
        return context.wrap_socket(raw, server_hostname=place.host)
    except ssl.SSLCertVerificationError as error:
        raw.close()
        raise StoreError(f"{place}: its certificate: {error.verify_message}") from None
    except (OSError, ValueError) as error:
        raw.close()
        raise StoreError(f"{place}: TLS: {error}") from None


def reason(error: OSError, timeout: float) -> str:
    if isinstance(error, (socket.timeout, TimeoutError)):
        return f"no answer within {timeout:g} s"
    return error.strerror or str(error)


class Connection:
    """One connection, authenticated. Every method may raise StoreError, after which it is of no
    more use, and Said, after which it is. Times in seconds; none waits longer than ``timeout`` for
    one answer, however slowly it comes."""

    #: how many values at once, and how many parts of a look-up, for all its keys are one request
    workers, lookers = 4, 1

    def __init__(self, place: Place, password: str | None, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.rest = b""
        self.deadline = time.monotonic() + timeout
        self.socket = dial(place, timeout)
        try:
            self.introduce(password)
        except BaseException:
            self.close()
            raise

    def introduce(self, password: str | None) -> None:
        try:
            if password is not None:
                user = (self.place.user,) if self.place.user else ()
                self.ask("AUTH", *user, password)
            self.ask("PING")
        except Said as error:
            raise StoreError(f"{self.place}: {meaning(str(error))}") from None

    def close(self) -> None:
        self.socket.close()

    def ask(self, *words: Word) -> Any:
        """One command and its answer: text as bytes, numbers, lists, None."""
        (answer,) = self.ask_all([words])
        if isinstance(answer, Said):
            raise answer
        return answer

    def ask_all(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Short commands sent together, their answers in order; one that was refused is a Said."""
        self.begin()
        self.send(b"".join(map(words_of, commands)))
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.answer())
            except Said as error:
                answers.append(error)
        return answers

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there; they count as used now."""
        answers = self.ask_all([("TOUCH", key) for key in keys])
        refused = next((one for one in answers if isinstance(one, Said)), None)
        if refused is not None:
            raise refused
        return [answer == 1 for answer in answers]

    def put(self, key: str, value: memoryview) -> None:
        """SET: the value goes out as it lies in memory."""
        self.begin()
        self.send(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$" % (len(key), key.encode()))
        self.send(b"%d\r\n" % value.nbytes)
        self.send(value)
        self.send(b"\r\n")
        self.answer()

    def get_into(self, key: str, target: memoryview) -> bool:
        """GET into ``target``. False where nothing is, or something of another size."""
        self.begin()
        self.send(words_of(("GET", key)))
        line = self.line()
        if line[:1] == b"-":
            raise Said(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise StoreError(f"{self.place}: this is no answer of Redis: {line[:40]!r}")
        size = self.number(line)
        if size < 0:
            return False
        if size != target.nbytes:
            self.skip(size + 2)
            return False
        self.read_into(target)
        self.skip(2)
        return True

    def find(self, pattern: str) -> Iterator[str]:
        """Keys that fit a pattern of Redis, each at least once."""
        cursor = b"0"
        while True:
            cursor, found = self.ask("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            for key in found:
                yield key.decode(errors="surrogateescape")
            if cursor == b"0":
                return

    def forget(self, keys: Sequence[str]) -> None:
        """Removes them."""
        for start in range(0, len(keys), 500):
            self.ask("UNLINK", *keys[start : start + 500])

    # the wire

    def begin(self) -> None:
        self.deadline = time.monotonic() + self.timeout

    def left(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise StoreError(f"{self.place}: no answer within {self.timeout:g} s")
        return seconds

    def failed(self, error: OSError) -> StoreError:
        return StoreError(f"{self.place}: {reason(error, self.timeout)}")

    def send(self, data: bytes | memoryview) -> None:
        try:
            self.socket.settimeout(self.left())  # of all of it (socket.sendall, since Python 3.5)
            self.socket.sendall(data)
        except OSError as error:
            raise self.failed(error) from None

    def more(self) -> None:
        try:
            self.socket.settimeout(self.left())
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise self.failed(error) from None
        if not data:
            raise StoreError(f"{self.place}: the store closed the connection")
        self.rest += data

    def line(self) -> bytes:
        while b"\r\n" not in self.rest:
            if len(self.rest) > LONGEST_LINE:
                raise StoreError(f"{self.place}: this is no answer of Redis")
            self.more()
        line, _, self.rest = self.rest.partition(b"\r\n")
        return line

    def read_into(self, target: memoryview) -> None:
        view = target.cast("B") if target.format != "B" else target
        had = min(len(self.rest), len(view))
        view[:had] = self.rest[:had]
        self.rest = self.rest[had:]
        while had < len(view):
            try:
                self.socket.settimeout(self.left())
                count = self.socket.recv_into(view[had:])
            except OSError as error:
                raise self.failed(error) from None
            if not count:
                raise StoreError(f"{self.place}: the store closed the connection")
            had += count

    def skip(self, count: int) -> None:
        while count > len(self.rest):
            count -= len(self.rest)
            self.rest = b""
            self.more()
        self.rest = self.rest[count:]

    def number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise StoreError(f"{self.place}: this is no answer of Redis: {line[:40]!r}") from None

    def answer(self) -> Any:
        line = self.line()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            raise Said(line[1:].decode(errors="replace"))
        if kind == b":":
            return self.number(line)
        if kind == b"$":
            size = self.number(line)
            if size < 0:
                return None
            data = bytearray(size)
            self.read_into(memoryview(data))
            self.skip(2)
            return bytes(data)
        if kind == b"*":
            return [self.answer() for _ in range(self.number(line))]
        raise StoreError(f"{self.place}: this is no answer of Redis: {line[:40]!r}")


def meaning(said: str) -> str:
    """What a refusal at the beginning means, and what to do about it."""
    word = said.split(" ", 1)[0]
    if word == "WRONGPASS" or said.startswith("ERR invalid password"):
        return "it refuses the password (shared_tier_password_file, KVHOST_SHARED_PASSWORD)"
    if word == "NOAUTH":
        return "it asks for a password: set shared_tier_password_file or KVHOST_SHARED_PASSWORD"
    if word == "ERR" and "without any password" in said:
        return "it has no password, and one is set here (shared_tier_password_file)"
    if word == "LOADING":
        return "it is still reading its file from the disk"
    if word == "DENIED":
        return "it takes nothing but loopback (protected-mode): give it a password and an address"
    return f"it refuses: {said[:200]}"


def password_in(path: str | None) -> str | None:
    """The password in a file, None without one. Raises OSError."""
    if path is None or not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as handle:
        return handle.read().rstrip("\n")
