#!/usr/bin/env python3
"""Keeps what is in the slots of llama-server: saves what changed, and before a stop; restores it.

slots.py --base DIR list                      what is saved, as JSON ("slot": that it was saved of)
slots.py --base DIR save NAME [--slot N]      what slot N holds now, under a name of its own
slots.py --base DIR restore NAME [--slot N]   into slot N, after its checksum was compared; "slot"
                                              of the answer is N
slots.py --base DIR forget NAME               exit 1 if nothing is saved under that name
slots.py --base DIR check                     compares all that is saved; exit 1 if any is not whole
Without --slot it is slot 0, and to restore slot-N it is slot N.

By hand as root or as the service's user; --base names kvhost's directory, whose etc/slots.json says
the rest. The services call it with --dir, --api and --record instead, for `run --every S` (the
keeper) and `save --all` (launch.py, before llama-server is told to stop).

The keeper restores once for each start of the server: slot-N into slot N, or another that is empty,
then named ones, the newest first, as long as there are empty slots. What does not verify
(slots_files.py) is removed, and said; the server never hears of it. LLAMA_API_KEY in the
environment holds the API key.
Exit: 0 done, 1 not (why: stderr), 2 usage.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401 (before the identity changes: root's Python may be closed then)
import http.client
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost.slots_files import (
        NAME,
        OF_SLOT,
        Store,
        Trouble,
        is_reserved,
        note_of,
        opened,
        read_json,
        removed,
        say,
        say_once,
    )
else:  # it lies beside this file on a host, where there is no package kvhost
    from slots_files import (
        NAME,
        OF_SLOT,
        Store,
        Trouble,
        is_reserved,
        note_of,
        opened,
        read_json,
        removed,
        say,
        say_once,
    )

Data = dict[str, Any]
#: seconds; a slot of 10 GB is written to a slow drive
SAVE_S, ASK_S, POLL_S = 300.0, 10.0, 0.5
#: seconds that all slots together may take before a stop
STOP_S = 100.0
# loopback is never reached through a proxy, whatever the environment says
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """llama-server over HTTP. Methods raise Trouble."""

    def __init__(self, api: str, record: str, key: str | None) -> None:
        self.api, self.record, self.key = api.rstrip("/"), record, key

    def call(self, path: str, body: Data | None = None, timeout: float = ASK_S) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.api + path, data=data, headers=headers)
            with OPENER.open(request, timeout=timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace").strip()[:300]
            raise Trouble(f"llama-server: HTTP {error.code} {said}") from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise Trouble(f"llama-server does not answer: {error}") from error

    def identity(self) -> str | None:
        """Tells this process from one before it; None without a record of launch.py's."""
        try:
            told = read_json(self.record)
            return f"{told['boot_id']}:{told['pid']}:{told['start_ticks']}"
        except (OSError, ValueError, KeyError):
            return None

    def slots(self) -> list[Data]:
        found = self.call("/slots")
        if not isinstance(found, list):
            raise Trouble("llama-server: /slots is no list")
        return [
            slot for slot in found if isinstance(slot, dict) and isinstance(slot.get("id"), int)
        ]

    def require(self, slot: int) -> None:
        """The server itself takes any number, modulo its slots."""
        known = [one["id"] for one in self.slots()]
        if slot not in known:
            raise Trouble(f"there is no slot {slot}: it has {', '.join(map(str, known))}")

    def build(self) -> str:
        told = self.call("/props")
        if not isinstance(told, dict):
            raise Trouble("llama-server: /props is no object")
        return str(told.get("build_info"))

    def act(self, slot: int, action: str, file: str, timeout: float) -> Data:
        told = self.call(f"/slots/{slot}?action={action}", {"filename": file}, timeout)
        if not isinstance(told, dict):
            raise Trouble(f"llama-server: {action} of slot {slot} says {told!r}")
        return told


def change_key(slot: Data) -> str | None:
    """Another one after every request that the slot has worked on; None while it never did."""
    if "id_task" not in slot:
        return None
    return f"{slot['id_task']}:{slot.get('n_prompt_tokens')}"


class Keeper:
    """Saves and restores; whoever calls holds the lock of the store. Methods raise Trouble."""

    def __init__(self, store: Store, server: Server) -> None:
        self.store, self.server = store, server
        #: names that the last save_changed could not save
        self.failed: list[str] = []

    def save(self, slot: int, name: str, why: str, timeout: float) -> Data | None:
        """None where the slot is empty. What was saved before stays until this is whole."""
        draft = f"{name}.{os.getpid()}.tmp"
        self.store.expect(name, draft)  # nothing is written for nothing
        try:
            told = self.server.act(slot, "save", draft, timeout)
            count, tokens = told.get("n_written"), told.get("n_saved")
            if not isinstance(count, int) or not isinstance(tokens, int):
                raise Trouble(f"llama-server: save of slot {slot} says {told!r}")
            if tokens == 0:
                return None
            about = {"bytes": count, "tokens": tokens, "slot": slot, "why": why}
            return self.store.keep(name, draft, {**about, "server_build": self.server.build()})
        finally:
            removed(self.store.path(draft))

    def save_changed(self, why: str, limit_s: float, *, busy_too: bool) -> list[str]:
        """Saves every slot whose prompt is another than was saved or restored last; their names."""
        deadline, state, done = time.monotonic() + limit_s, self.state(), []
        self.failed = []
        for slot in self.server.slots():
            key, name = change_key(slot), f"slot-{slot['id']}"
            if key is None or state["saved"].get(name) == key:
                continue
            if slot.get("is_processing") and not busy_too:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                say_once(f"{name} is not saved: no time left")
                self.failed.append(name)
                continue
            try:
                note = self.save(slot["id"], name, why, left)
            except (Trouble, OSError) as error:
                say_once(f"{name} is not saved: {error}")
                self.failed.append(name)
                continue
            if note is not None:
                say(f"saved {name}: {note['tokens']} tokens, {note['bytes']} bytes ({why})")
                done.append(name)
            state["saved"][name] = key
            self.store.remember(state)
        return done

    def state(self) -> Data:
        """What was saved and restored of the process that runs now."""
        state, now = self.store.state(), self.server.identity()
        whole = isinstance(state.get("saved"), dict) and isinstance(state.get("restored"), bool)
        if state.get("server") != now or not whole:
            return {"server": now, "saved": {}, "restored": False}
        return state

    def restore(self, slot: int, name: str) -> Data:
        """Raises Trouble for one that does not verify, which is removed."""
        notes = self.store.notes()
        if name not in notes:
            raise Trouble(f"nothing is saved as {name}")
        note = notes[name]
        why = self.store.why_not(name, note, self.server.build())
        if why is not None or note is None:
            left = "was" if self.store.forget(name) else "could not be"
            raise Trouble(f"{name} is not restored and {left} removed: {why}")
        told = self.server.act(slot, "restore", note["file"], SAVE_S)
        # how many it says were restored proves nothing: only a request does (docs/llama.md)
        say(
            f"restored {name} into slot {slot}: {note['tokens']} tokens, {told.get('n_read')} bytes"
        )
        return note

    def restore_all(self) -> None:
        """Once for each process of the server; slots that somebody has used already are left."""
        state = self.state()
        if state["restored"]:
            return
        for gone in self.store.clear():
            say(f"removed {gone}: it belongs to nothing that is saved")
        empty = {slot["id"] for slot in self.server.slots() if change_key(slot) is None}
        notes = self.store.notes()
        own = {int(m.group(1)): name for name in notes for m in [OF_SLOT.match(name)] if m}
        when = {name: note["saved_unix"] if note else 0 for name, note in notes.items()}
        named = sorted(set(notes) - set(own.values()), key=lambda name: -when[name])
        for number in sorted(own):
            if number in empty and self.try_restore(number, own.pop(number)):
                empty.discard(number)
        # what finds its own slot taken, or there is no such slot any more, goes where there is room
        for name in [*own.values(), *named]:
            if empty and self.try_restore(min(empty), name):
                empty.discard(min(empty))
        self.store.remember({**state, "restored": True})

    def try_restore(self, slot: int, name: str) -> bool:
        try:
            self.restore(slot, name)
        except (Trouble, OSError) as error:
            say(str(error))
            return False
        return True


def run(keeper: Keeper, every: float) -> None:
    """Until it is told to stop: the server's own stop saves, by launch.py."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    restored_for: str | None = None
    saved_at = time.monotonic()
    while True:
        now = keeper.server.identity()
        try:
            if now is not None and now != restored_for:
                keeper.server.call("/health", timeout=5)  # 503 while it loads the model
                with keeper.store.locked():
                    keeper.restore_all()
                restored_for, saved_at = now, time.monotonic()
                say_once.cache_clear()
            elif time.monotonic() - saved_at > every:
                saved_at = time.monotonic()
                with keeper.store.locked():
                    keeper.save_changed("changed", SAVE_S, busy_too=False)
                if not keeper.failed:
                    say_once.cache_clear()
        except (Trouble, OSError) as error:
            if "does not answer" not in str(error) and "HTTP 503" not in str(error):
                say_once(str(error))
        time.sleep(POLL_S)


def of_base(base: str) -> list[str]:
    """What the keeper's own description says: --dir, --api, --record. Raises Trouble, OSError."""
    spec = read_json(os.path.join(base, "etc", "slots.json"))
    argv = spec["argv"]
    for path in spec.get("secret_env", {}).values():
        with opened(path) as handle:
            os.environ["LLAMA_API_KEY"] = handle.read().decode().rstrip("\n")
    start = next(n for n, word in enumerate(argv) if word.endswith("/slots.py")) + 1
    return [str(word) for word in argv[start : argv.index("run")]]


def become_owner(folder: str) -> None:
    """As root: whoever the directory belongs to. Nothing in it is made by root."""
    if os.geteuid() == 0:
        st = os.stat(folder)
        os.setgroups([])
        os.setgid(st.st_gid)
        os.setuid(st.st_uid)
    os.umask(0o077)


def name(text: str) -> str:
    if not NAME.match(text) or OF_SLOT.match(text):
        raise argparse.ArgumentTypeError(
            "a name is letters, digits, - and _, at most 64, and not slot-N, which are its own"
        )
    if is_reserved(text):
        raise argparse.ArgumentTypeError(f"{note_of(text)} is a file of kvhost's own: another name")
    return text


def any_name(text: str) -> str:
    return text if OF_SLOT.match(text) else name(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="kvhost's directory, in the place of the next three")
    parser.add_argument("--dir", help="directory of the namespace")
    parser.add_argument("--api", help="base URL of llama-server")
    parser.add_argument("--record", help="record of its process (run/runner.json)")
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("run", help="the keeper")
    keep.add_argument("--every", type=float, default=60.0, help="seconds")
    save = commands.add_parser("save", help="save a slot under a name, or all that changed")
    save.add_argument("name", nargs="?", type=name)
    save.add_argument("--all", action="store_true", help="every slot that changed, as slot-N")
    save.add_argument("--slot", type=int, help="0 without it")
    save.add_argument("--why", default="asked for")
    back = commands.add_parser("restore", help="restore a saved slot")
    back.add_argument("name", type=any_name)
    back.add_argument("--slot", type=int, help="0 without it, and N of slot-N")
    gone = commands.add_parser("forget", help="remove a saved slot")
    gone.add_argument("name", type=any_name)
    commands.add_parser("list", help="what is saved, JSON")
    commands.add_parser("check", help="compare all that is saved, JSON")
    args = parser.parse_args()
    if args.command == "save" and bool(args.name) == args.all:
        parser.error("save: a name, or --all")
    if args.command == "save" and args.all and args.slot is not None:
        parser.error("save --all saves every slot: no --slot")
    if not args.base and not (args.dir and args.api and args.record):
        parser.error("--base, or --dir, --api and --record")
    if args.base:
        try:
            given = of_base(args.base)
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            parser.error(f"--base {args.base}: no keeper of slots is described there ({error!r})")
        for flag, value in zip(given[::2], given[1::2]):  # noqa: B905 (Python 3.9)
            setattr(args, re.sub(r"^--", "", flag), value)
    return args


def shown(note: Data | None) -> Data:
    keys = ("file", "bytes", "tokens", "slot", "why", "saved_unix", "server_build")
    return {key: (note or {}).get(key) for key in keys}


def act(args: argparse.Namespace, keeper: Keeper) -> Any:
    store = keeper.store
    if args.command == "list":
        return {name: shown(note) for name, note in store.notes().items()}
    if args.command == "check":
        return {name: store.why_not(name, note, None) for name, note in store.notes().items()}
    if args.command == "forget":
        if not store.entries(args.name):
            raise Trouble(f"nothing is saved as {args.name}")
        if not store.forget(args.name):
            raise Trouble(f"{args.name} could not be removed")
        return {"forgotten": args.name}
    if args.command == "save" and args.all:
        saved = keeper.save_changed(args.why, STOP_S, busy_too=True)
        return {"saved": saved, "failed": keeper.failed}
    own = OF_SLOT.match(args.name)
    slot = args.slot if args.slot is not None else int(own.group(1)) if own else 0
    keeper.server.require(slot)
    if args.command == "restore":
        return {**shown(keeper.restore(slot, args.name)), "slot": slot}
    note = keeper.save(slot, args.name, args.why, SAVE_S)
    if note is None:
        raise Trouble(f"slot {slot} is empty: nothing was saved")
    return shown(note)


def main() -> int:
    args = parse()
    try:
        become_owner(args.dir)
        keeper = Keeper(
            Store(args.dir), Server(args.api, args.record, os.environ.get("LLAMA_API_KEY"))
        )
        if args.command == "run":
            run(keeper, args.every)
        with keeper.store.locked(STOP_S if args.command == "save" else 300):
            answer = act(args, keeper)
    except (Trouble, OSError) as error:
        say(str(error))
        return 1
    print(json.dumps(answer))
    if keeper.failed:
        return 1
    if args.command == "check":
        return 1 if any(answer.values()) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
