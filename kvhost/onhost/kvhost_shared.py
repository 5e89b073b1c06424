"""The tier that several hosts share, as LMCache's cache server loads it (--l2-adapter "plugin").

LMCache's own adapter for Redis ("resp", 0.5.6) has no prefix for its keys, no TLS and no way back
once a connection is lost, and a store that is away when the server starts ends the server. So this
one puts the same adapter (NativeConnectorL2Adapter) over a client of kvhost's own:

- a key begins with the namespace, which is the digest of all that decides what the bytes mean: two
  hosts share what means the same, and nothing else. The model's name, which is a path, and the salt
  of a tenant, which is a secret, are not in it: kvhost:NAMESPACE:RANK:GROUP:HASH:SHA256-OF-SALT.
- a store that is away, slow, full or refuses costs a request nothing but the hit: look-ups are
  misses, stores are dropped, and a thread in the background asks until it is back.
- one host's cache server never deletes what is in the store: that is the store's own eviction.
"""

# LMCache is not there where types are checked
# mypy: disable-error-code="import-not-found,misc,no-any-return"
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

if TYPE_CHECKING:
    from kvhost.onhost.kvhost_store import (
        PREFIX,
        Connection,
        Place,
        Said,
        StoreError,
        at_once,
        connect,
        place_of,
    )
else:  # it lies beside this file, in lib/
    from kvhost_store import PREFIX, Said, StoreError, at_once, connect, place_of

__all__ = ["SharedAdapter"]
logger = logging.getLogger("lmcache.kvhost")

PASSWORD = "KVHOST_SHARED_PASSWORD"
#: seconds between two looks at a store that is away
RETRY_S = 2.0
Completion = tuple[int, bool, str, "list[bool] | None"]


def store_key(namespace: str, key: str) -> str:
    """LMCache's text of a key (MODEL@RANK@GROUP@HASH[@SALT]) as it stands in the store.

    >>> store_key("ns-ab", "/models/x@00000001@0@c0ffee")
    'kvhost:ns-ab:00000001:0:c0ffee:-'
    """
    _, rank, group, chunk, *salt = key.split("@")
    tenant = hashlib.sha256(os.fsencode(salt[0])).hexdigest() if salt else "-"
    return f"{PREFIX}{namespace}:{rank}:{group}:{chunk}:{tenant}"


class Batch:
    """One task of LMCache's: its keys are worked on by several threads; the last one tells.

    ``look``: a look-up, which is told as well done also where it did not find all: of one that is
    not, LMCache (0.5.6) takes nothing as found, not even the beginning of a prompt that is there.
    """

    def __init__(
        self, number: int, count: int, tell: Callable[[Completion], None], *, look: bool
    ) -> None:
        self.number, self.tell, self.look = number, tell, look
        self.good = [False] * count
        self.left = 0
        self.lock = threading.Lock()

    def part_done(self) -> None:
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            ok = self.look or all(self.good)
            self.tell((self.number, ok, "" if ok else "not all", self.good))


class Store:
    """What NativeConnectorL2Adapter asks of a client: submit_batch_…, event_fd, drain_completions,
    close. There is no submit_batch_delete, by intent."""

    def __init__(self, place: Place, namespace: str, timeout: float, pause: str | None) -> None:
        self.place, self.namespace, self.timeout, self.pause = place, namespace, timeout, pause
        self.password = os.environ.get(PASSWORD)
        self.workers, self.lookers = at_once(place)
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.lock = threading.Lock()
        self.done: list[Completion] = []
        self.next = 0
        #: why the store is not used; None while it is
        self.away: str | None = "not asked yet"
        self.counts = dict.fromkeys(
            ("found", "not_found", "loaded", "stored", "there_already", "failed"), 0
        )
        self.mine = threading.local()
        self.said, self.said_at = "", 0.0
        self.pool = ThreadPoolExecutor(max(at_once(place)), thread_name_prefix="kvhost-shared")
        self.closed = threading.Event()
        self.look()  # so that the log says at once how it stands
        threading.Thread(target=self.keep_looking, name="kvhost-shared", daemon=True).start()

    # how the store stands

    def look(self) -> None:
        try:
            connect(self.place, self.password, self.timeout).close()
        except StoreError as error:
            self.stands(str(error))
        else:
            self.stands(None)

    def keep_looking(self) -> None:
        while not self.closed.wait(RETRY_S):
            if self.away is not None:
                self.look()

    def stands(self, away: str | None) -> None:
        with self.lock:
            before, self.away = self.away, away
        if away == before:
            return
        if away is None:
            logger.info("kvhost: the shared tier answers (%s)", self.place)
        else:
            logger.warning("kvhost: the shared tier is not used: %s", away)

    def paused(self) -> bool:
        """Whether a test of the host's own tier runs, which nothing else may answer."""
        if self.pause is None:
            return False
        try:
            with open(self.pause, encoding="utf-8") as handle:
                holder = json.load(handle)
            with open(f"/proc/{int(holder['pid'])}/stat", encoding="utf-8") as handle:
                return int(handle.read().rpartition(")")[2].split()[19]) == holder["start_ticks"]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False  # none, or one that was killed: it holds nothing back

    def state(self) -> dict[str, Any]:
        with self.lock:
            told = {"answers": self.away is None, "why": self.away, **self.counts}
        return {"place": str(self.place), "namespace": self.namespace, **told}

    def count(self, name: str, more: int = 1) -> None:
        with self.lock:
            self.counts[name] += more

    # one thread's connection

    def use(self, action: Callable[[Connection], Any]) -> Any:
        """Raises StoreError, once it is told, and Said. What the store closed meanwhile, as a
        restart does, is opened again."""
        if self.away is not None:
            raise StoreError(self.away)
        old, began = getattr(self.mine, "connection", None), time.monotonic()
        try:
            if old is not None:
                try:
                    return self.kept(old, action)
                except StoreError:
                    if time.monotonic() - began >= self.timeout:
                        raise
            return self.kept(connect(self.place, self.password, self.timeout), action)
        except StoreError as error:
            self.stands(str(error))
            raise

    def kept(self, connection: Connection, action: Callable[[Connection], Any]) -> Any:
        """The connection is this thread's from now on, unless it is of no more use."""
        self.mine.connection = connection
        try:
            return action(connection)
        except StoreError:
            self.mine.connection = None
            connection.close()
            raise

    # what LMCache asks

    def event_fd(self) -> int:
        return self.event

    def drain_completions(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)
        with self.lock:
            done, self.done = self.done, []
        return done

    def tell(self, completion: Completion) -> None:
        with self.lock:
            self.done.append(completion)
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self.event, 1)

    def submit(
        self, count: int, work: Callable[[Batch, range], None], parts: int, *, look: bool = False
    ) -> int:
        with self.lock:
            self.next += 1
            batch = Batch(self.next, count, self.tell, look=look)
        slices = [range(start, count, parts) for start in range(min(parts, count))]
        batch.left = max(len(slices), 1)
        if not slices or self.away is not None or self.paused():
            batch.left = 1
            batch.part_done()
            return batch.number

        def run(part: range) -> None:
            try:
                work(batch, part)
            except StoreError:
                pass  # told by stands(); what is not marked good is a miss, or not stored
            except Exception:  # else LMCache would wait for this task for ever
                logger.exception("kvhost: the shared tier")
            finally:
                batch.part_done()

        for part in slices:
            self.pool.submit(run, part)
        return batch.number

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        names = [store_key(self.namespace, key) for key in keys]

        def work(batch: Batch, part: range) -> None:
            for number, there in zip(part, self.touch([names[n] for n in part]), strict=True):
                batch.good[number] = there
            found = sum(batch.good[n] for n in part)
            self.count("found", found)
            self.count("not_found", len(part) - found)

        return self.submit(len(names), work, self.lookers, look=True)

    def touch(self, names: list[str]) -> list[bool]:
        """Which keys are there. Raises StoreError."""
        try:
            return list(self.use(lambda store: store.there(names)))
        except Said as error:
            self.stands(f"{self.place}: it refuses: {str(error)[:200]}")
            raise StoreError(str(error)) from None

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        names = [store_key(self.namespace, key) for key in keys]

        def work(batch: Batch, part: range) -> None:
            for number in part:
                name, view = names[number], memoryview(views[number]).cast("B")
                try:
                    batch.good[number] = self.use(lambda s, n=name, v=view: s.get_into(n, v))
                except Said as error:
                    self.refused(error)
                self.count("loaded" if batch.good[number] else "failed")

        return self.submit(len(names), work, self.workers)

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        names = [store_key(self.namespace, key) for key in keys]

        def work(batch: Batch, part: range) -> None:
            # another host may have stored them: what is there does not cross the network again
            known = self.touch([names[n] for n in part])
            for number, there in zip(part, known, strict=True):
                if there:
                    self.count("there_already")
                    batch.good[number] = True
                    continue
                name, view = names[number], memoryview(views[number]).cast("B")
                try:
                    self.use(lambda s, n=name, v=view: s.put(n, v))
                    batch.good[number] = True
                except Said as error:
                    self.refused(error)
                self.count("stored" if batch.good[number] else "failed")

        return self.submit(len(names), work, self.workers)

    def refused(self, error: Said) -> None:
        """One command was: no room (OOM), or rights were taken away. Said once a minute."""
        now = time.monotonic()
        with self.lock:
            fresh = self.said != str(error) or now - self.said_at > 60
            if fresh:
                self.said, self.said_at = str(error), now
        if fresh:
            logger.warning("kvhost: the shared tier (%s) refuses: %s", self.place, error)

    def close(self) -> None:
        self.closed.set()
        self.pool.shutdown(wait=True, cancel_futures=True)
        os.close(self.event)


class SharedAdapter(NativeConnectorL2Adapter):
    """LMCache's adapter over that client; `adapter_params` of the plugin are its settings."""

    def __init__(self, params: dict[str, Any], **_: Any) -> None:
        self.store = Store(
            place_of(params), str(params["namespace"]), float(params["timeout_s"]),
            params.get("pause"),
        )  # fmt: skip
        super().__init__(self.store, type_name="kvhost_shared")

    def report_status(self) -> dict[str, Any]:
        """A store that is away is no fault of this server: `is_healthy` stays."""
        return {**super().report_status(), "shared": self.store.state()}
