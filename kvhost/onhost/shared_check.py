#!/usr/bin/env python3
"""Whether what one host computed is served on another from the tier that they share: evidence.

    shared_check.py --config FILE      (as root, on each of the two hosts in turn)

The config is that of evidence.py, and further: step ("write" on the first, "read" on the second),
seed (64 hex digits, the same on both: of the prompts, which are kept nowhere), chunks ([RANK:GROUP:
HASH, ...] that the first one's answer named), store {"place": as kvhost_store.py takes it,
"password_file", "namespace"}.

write: a prompt that nobody has seen, and a short one; until both lie in the store; then this
host's own files of them are removed. read: none of these chunks lies here; the first prompt again;
half of the short one with a new second half; one that nobody has seen; then all of the test's own
are removed, here and in the store. No service is restarted. The answer, JSON, holds no prompt.
Exit: 0 evidence was collected (also of a failure), 1 not (why, stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_config import load_config
    from kvhost.onhost.evidence_events import Test
    from kvhost.onhost.kvhost_store import (
        PREFIX,
        Said,
        StoreError,
        connect,
        password_in,
        place_of,
    )
else:  # on the host the files lie beside each other, in no package; the last in lib/
    sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "lib")]
    import evidence_probe as probe
    from evidence_config import load_config
    from evidence_events import Test
    from kvhost_store import PREFIX, Said, StoreError, connect, password_in, place_of

Json = dict[str, Any]
#: of this check alone, beside those of evidence.py
OWN = ("step", "seed", "chunks", "store")
LOADS = "lmcache_mp_l2_load_completed_requests_total"  # lmcache 0.5.6, by adapter


def chunk_of(name: str) -> str:
    """RANK:GROUP:HASH of a file of the tier, as it stands in the store's key. The adapter fs writes
    numbers with 0x, fs_native without.

    >>> chunk_of("m@00000100@0@c0ffee.data"), chunk_of("m@0x100@0x0@c0ffee.data")
    ('00000100:0:c0ffee', '00000100:0:c0ffee')
    """
    _, rank, group, chunk = os.path.splitext(name)[0].split("@")[:4]
    return f"{int(rank, 16):08x}:{int(group, 16):x}:{chunk}"


def shared_state(status: Any) -> Json | None:
    """What the cache server's /status says of the shared tier; None without one."""
    if isinstance(status, dict):
        if status.get("type") == "kvhost_shared" and isinstance(status.get("shared"), dict):
            return dict(status["shared"])
        status = list(status.values())
    found = [shared_state(one) for one in status] if isinstance(status, list) else []
    return next((one for one in found if one is not None), None)


class Check:
    """One of the two steps, with what evidence.py asks and counts by."""

    def __init__(self, config: Json, own: Json) -> None:
        self.test = Test(config, "both", own["seed"])
        self.test.event, self.test.total = "shared", {"write": 2, "read": 3}[own["step"]]
        self.config, self.own = config, own
        self.names: set[str] = set()

    def run(self) -> Json:
        self.test.identify()
        answer: Json = {"namespace": os.path.basename(self.config["namespace_dir"])}
        answer["fields"] = self.fields()
        answer["before"] = self.state()
        answer["expected"] = {
            "prompt": self.test.files_of(self.test.chunks),
            "short": self.test.files_of(self.test.small),
            "half_tokens": self.test.small // 2 * self.config["chunk_size"],
            "whole_tokens": self.test.chunks * self.config["chunk_size"],
        }
        try:
            (self.write if self.own["step"] == "write" else self.read)(answer)
        finally:
            self.names |= {name for _, new in self.test.windows for name in new}
            answer["chunks"] = sorted(map(chunk_of, self.names))
            answer["cleanup"] = self.test.clean_up()
        answer["requests"] = self.test.evidence["requests"]
        answer["after"] = self.state()
        if self.own["step"] == "read":
            answer["removed_from_store"] = self.forget([*self.own["chunks"], *answer["chunks"]])
        return answer

    def fields(self) -> Json:
        """What the namespace is the digest of."""
        path = os.path.join(self.config["namespace_dir"], ".kvhost-namespace.json")
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as handle:
            return dict(json.load(handle).get("engine_config") or {})
        return {}

    def state(self) -> Json:
        url = self.test.asked["cache_http"]
        wanted = {
            "loads_shared": (LOADS, {"l2_name": "plugin"}),
            "loads_all": (LOADS, {}),
        }
        page = probe.parse_metrics(self.test.get(f"{url}/metrics"), wanted)
        return {"store": shared_state(json.loads(self.test.get(f"{url}/status"))), **page}

    def ask(self, role: str, prompt: str, files: int) -> None:
        self.test.step(role, lambda: self.test.request(role, self.test.prompt(prompt), files))

    def write(self, answer: Json) -> None:
        expected = answer["expected"]
        self.ask("cold", "cold", expected["prompt"])
        self.ask("half_cold", "half_cold", expected["short"])
        began = time.monotonic()
        before, wanted = answer["before"]["store"], expected["prompt"] + expected["short"]
        while True:
            now = shared_state(json.loads(self.test.get(self.test.asked["cache_http"] + "/status")))
            came = arrived(before, now)
            if came is None or came >= wanted or not (now and now["answers"]):
                break  # or the store is not used at all
            if time.monotonic() - began > self.config["timeouts"]["write_s"]:
                break
            time.sleep(0.2)
        answer["arrived"] = {"values": came, "wanted": wanted}

    def read(self, answer: Json) -> None:
        there, _ = probe.scan(self.config["namespace_dir"])
        held = {chunk_of(name) for name in there if name.count("@") >= 3}
        answer["held_here"] = len(held & set(self.own["chunks"]))
        self.ask("again", "cold", 0)
        answer["after_again"] = self.state()
        self.ask("half", "half", answer["expected"]["short"] // 2)
        self.ask("unseen", "unseen", answer["expected"]["prompt"])

    def forget(self, chunks: list[str]) -> int | None:
        """How many of these the store had and lost; None if it could not be asked."""
        store = self.own["store"]
        try:
            asked = connect(place_of(store["place"]), password_in(store["password_file"]), 10)
            keys = [f"{PREFIX}{store['namespace']}:{chunk}:-" for chunk in dict.fromkeys(chunks)]
            answers = dict(zip(keys, asked.there(keys)))  # noqa: B905 (Python 3.9)
            there = [key for key in keys if answers[key]]
            asked.forget(there)
            asked.close()
        except (StoreError, Said, OSError) as error:
            print(f"shared_check: what the test stored stays there: {error}", file=sys.stderr)
            return None
        return len(there)


def arrived(before: Json | None, now: Json | None) -> int | None:
    """Values that came into the store, or were there, since; None without a shared tier."""
    if not before or not now:
        return None
    return sum(int(now[key]) - int(before[key]) for key in ("stored", "there_already"))


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON, see above")
    args = parser.parse_args()
    try:
        with open(args.config, encoding="utf-8") as handle:
            given = json.load(handle)
        own = {key: given.pop(key, None) for key in OWN}
        if own["step"] not in ("write", "read") or not own["seed"] or not own["store"]:
            raise ValueError("step must be write or read, and seed and store be given")
        rest = args.config + ".evidence"
        probe.write_json(rest, given, 0o600)
        try:
            config = load_config(rest)
        finally:
            os.unlink(rest)
        answer = Check(config, {**own, "chunks": own["chunks"] or []}).run()
    except (OSError, ValueError, KeyError) as error:
        print(f"shared_check: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
