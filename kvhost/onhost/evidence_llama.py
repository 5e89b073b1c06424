#!/usr/bin/env python3
"""Collects the evidence whether llama-server's slots survive what happens to it; gives no verdict.

    evidence_llama.py --config FILE --out FILE        (as root, on the host)

For each event: who serves; is the server in use?; what is in the test's slot is saved aside; a
random prompt, cold, then warm; the event; what the keeper says it restored; the saved file,
compared with its note; the same request again, and an unseen one of the same length; the slot is
given back what was in it. Around each request: the server's counters and the processes' identity.

Events: both (llama-server and the keeper of its slots are restarted), kill (both are killed with
SIGKILL after a save).

The config is one JSON object. URLs are plain HTTP on this host; paths are absolute.
  api_base      str   URL of llama-server
  api_key_file  str|null
  model         str   name that it serves
  namespace_dir str   directory of the saved slots
  own_tokens    str   file {"pid", "start_ticks", "tokens"}: kvhost's own share of its counters
  services      {"runner": S, "slots": S}, S = {"record": str, "log": str}
  restart, start [str, ...]   commands that restart, or start, both
  keeper        [str, ...]    slots.py with what it needs, a command of its own is added
  slot          int   slot that the test uses
  prompt_tokens int
  vocab         [int, int]    prompts are drawn from these token ids, the second one excluded
  Optional: events ["both"]; max_tokens 16; disrupt false; exact_numerics true; timeouts
  {"request_s": 600, "ready_s": 600, "restart_s": 400, "restored_s": 120}, seconds.

--out is written 0600. It holds no prompt and no key: a prompt appears as its digest. Exit: 0
evidence is written (also of a failure), 3 refused because in use (evidence says so), 1 bad config,
or no evidence could be written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_steps import SIGNALS, Interrupted, InUse, run_step
    from kvhost.onhost.slots_files import NAMESPACE, STATE, read_json, sha256
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import evidence_probe as probe
    from evidence_steps import SIGNALS, Interrupted, InUse, run_step
    from slots_files import NAMESPACE, STATE, read_json, sha256

SCHEMA = "kvhost/evidence-llama/1"
Json = dict[str, Any]
NEEDED = {
    "api_base": str, "model": str, "namespace_dir": str, "own_tokens": str, "services": dict,
    "restart": list, "start": list, "keeper": list, "slot": int, "prompt_tokens": int,
    "vocab": list,
}  # fmt: skip
DEFAULTS: Json = {
    "api_key_file": None,
    "events": ["both"],
    "max_tokens": 16,
    "disrupt": False,
    "exact_numerics": True,
}
TIMEOUTS = {"request_s": 600, "ready_s": 600, "restart_s": 400, "restored_s": 120}
EVENTS = ("both", "kill")
#: what was in the test's slot, while the test uses it
ASIDE = "kvhost-verify-aside"
COUNTERS: Json = {
    "prompt_tokens": ("llamacpp:prompt_tokens_total", {}),
    "cached_tokens": ("llamacpp:prompt_tokens_cached_total", {}),
    "predicted_tokens": ("llamacpp:tokens_predicted_total", {}),
}
#: seconds that the counters may be behind an answer
BEHIND_S = 3.0


def stop(number: int, _frame: Any) -> None:
    raise Interrupted(signal.Signals(number).name)


class Test:
    """One event; fills ``evidence``, whatever happens."""

    def __init__(self, config: Json, event: str) -> None:
        self.config, self.event, self.limits = config, event, config["timeouts"]
        self.key = read_key(config["api_key_file"])
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.draw = random.Random(secrets.token_hex(32))
        self.slot: int = config["slot"]
        self.aside = False
        self.prompts = self.make_prompts()
        shown = ("model", "prompt_tokens", "max_tokens", "slot", "namespace_dir", "disrupt")
        self.evidence: Json = {
            "schema": SCHEMA,
            "started_unix": time.time(),
            "finished_unix": 0.0,
            "event": event,
            "config": {key: config[key] for key in (*shown, "exact_numerics")},
            "boot_id": probe.boot_id(),
            "filesystem": probe.mount_of(config["namespace_dir"]),
            "versions": {},
            "services": {},
            "requests": {},
            "steps": [],
            **dict.fromkeys(("refused", "interrupted", "saved", "restored", "cleanup")),
        }

    def make_prompts(self) -> dict[str, list[int]]:
        low, high = self.config["vocab"]
        count = self.config["prompt_tokens"]
        cold, control = ([self.draw.randrange(low, high) for _ in range(count)] for _ in range(2))
        while control[0] == cold[0]:  # not even the first token is shared
            control[0] = self.draw.randrange(low, high)
        return {"cold": cold, "warm": cold, "restored": cold, "control": control}

    # asking

    def call(self, path: str, body: Json | None = None, timeout: float = 10) -> str:
        """Raises OSError, ValueError with what the server said."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.config["api_base"] + path, data, headers)
        try:
            with self.opener.open(request, timeout=timeout) as reply:
                return str(reply.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:300]
            raise ValueError(f"HTTP {error.code} {said}") from None

    def counters(self) -> Json | None:
        with contextlib.suppress(OSError, ValueError):
            found = probe.parse_metrics(self.call("/metrics"), COUNTERS)
            return None if None in found.values() else found
        return None

    def identity(self, name: str) -> Json:
        """{"record", "proc", "listens"} of a service; parts that cannot be had are None."""
        record, proc, holds = None, None, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = read_json(self.config["services"][name]["record"])
            record = {key: found[key] for key in ("pid", "start_ticks", "boot_id")}
            proc = probe.process(record["pid"])
        if record and proc and name == "runner":
            port = urllib.parse.urlsplit(self.config["api_base"]).port or 80
            holds = probe.listens(record["pid"], port)
        return {"record": record, "proc": proc, "listens": holds}

    def snapshot(self, least: Json | None = None) -> Json:
        """``least``: counters that must have been reached; an answer may come before them."""
        deadline = time.monotonic() + BEHIND_S
        while True:
            now = self.counters()
            enough = least is None or now is None or all(now[k] >= v for k, v in least.items())
            if enough or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return {"unix": time.time(), "counters": now, "process": self.identity("runner")["proc"]}

    def ask(self, role: str) -> Json:
        """One greedy completion, with the state around it. Raises OSError, ValueError."""
        prompt = self.prompts[role]
        result: Json = dict.fromkeys(
            ("error", "http_status", "ttft_s", "total_s", "output_tokens", "prompt_n", "cache_n",
             "first_logprobs", "before", "after")
        )  # fmt: skip
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
        self.evidence["requests"][role] = result
        result.update(role=role, prompt_digest=digest, prompt_tokens=len(prompt))
        result["before"] = self.snapshot()
        body = {
            "prompt": prompt,
            "n_predict": self.config["max_tokens"],
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": self.slot,
            "return_tokens": True,
            "n_probs": 5,
            "stream": False,
            "ignore_eos": True,
        }
        started = time.monotonic()
        try:
            told = json.loads(self.call("/completion", body, self.limits["request_s"]))
        except (OSError, ValueError) as error:
            result["error"] = probe.scrub(f"{type(error).__name__}: {error}", self.key)
            raise
        result["http_status"], result["total_s"] = 200, round(time.monotonic() - started, 3)
        timings = told["timings"]
        result["prompt_n"], result["cache_n"] = timings["prompt_n"], timings["cache_n"]
        # the server's own time for the prompt, and that of one token
        first_ms = timings["prompt_ms"] + timings.get("predicted_per_token_ms", 0)
        result["ttft_s"] = round(first_ms / 1000, 4)
        result["output_tokens"] = told["tokens"]
        with contextlib.suppress(KeyError, IndexError, TypeError):
            first = told["completion_probabilities"][0]["top_logprobs"]
            result["first_logprobs"] = {str(one["id"]): float(one["logprob"]) for one in first}
        before = result["before"]["counters"]
        own = {"prompt_tokens": result["prompt_n"], "cached_tokens": result["cache_n"],
               "predicted_tokens": len(told["tokens"])}  # fmt: skip
        least = {key: before[key] + own[key] for key in own} if before else None
        result["after"] = self.snapshot(least)
        self.remember_own(own)
        told = {"reused_tokens": result["cache_n"], "computed_tokens": result["prompt_n"]}
        return {"ttft_s": result["ttft_s"], **told}

    # whose requests the counters hold

    def remember_own(self, own: Json) -> None:
        proc = self.identity("runner")["proc"]
        if proc:
            who = {"pid": proc["pid"], "start_ticks": proc["start_ticks"]}
            tokens = self.own_tokens(proc) + sum(own.values())
            probe.write_json(self.config["own_tokens"], {**who, "tokens": tokens}, 0o644)

    def own_tokens(self, proc: Json) -> float:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            own = read_json(self.config["own_tokens"])
            if own["pid"] == proc["pid"] and own["start_ticks"] == proc["start_ticks"]:
                return float(own["tokens"])
        return 0.0

    def is_it_free(self) -> Json:
        """Raises InUse, with what is known of it in the evidence."""
        slots = json.loads(self.call("/slots"))
        busy = sum(bool(slot.get("is_processing")) for slot in slots)
        proc, now = self.identity("runner")["proc"], self.counters()
        own = int(self.own_tokens(proc)) if proc else 0
        foreign = None if now is None else int(sum(now.values())) - own
        if (busy or foreign is None or foreign > 0) and not self.config["disrupt"]:
            self.evidence["refused"] = {"busy": busy, "foreign": foreign, "own": own}
            others = (
                "tokens of others not known"
                if foreign is None
                else (f"{max(foreign, 0)} tokens of others")
            )
            raise InUse(f"{busy} requests at work, {others}")
        return {"busy": busy, "tokens_of_others": foreign}

    # the keeper

    def keeper(self, *words: str) -> Json:
        """Raises ValueError with what it said."""
        argv = [*self.config["keeper"], *words]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=self.limits["restart_s"],
        )  # fmt: skip
        if done.returncode:
            raise ValueError(probe.scrub(done.stderr.decode(errors="replace"), self.key, last=True))
        return dict(json.loads(done.stdout))

    def set_aside(self) -> str:
        try:
            told = self.keeper("save", ASIDE, "--slot", str(self.slot))
        except ValueError as error:
            if "is empty" not in str(error):
                raise
            return "the slot is empty"
        self.aside = True
        return f"{told['tokens']} tokens saved aside"

    def note(self) -> Json:
        return read_json(os.path.join(self.config["namespace_dir"], f".slot-{self.slot}.json"))

    def look_at_file(self) -> Json:
        """What was saved of the test's slot, by its note and by the file itself."""
        found: Json = dict.fromkeys(
            ("tokens", "bytes", "file_bytes", "same_digest", "same_engine", "saved_unix")
        )
        self.evidence["saved"] = found
        note = self.note()
        folder = self.config["namespace_dir"]
        digest, count = sha256(os.path.join(folder, note["file"]))
        fields = read_json(os.path.join(folder, NAMESPACE))["engine_config"]
        found.update({key: note[key] for key in ("tokens", "bytes", "saved_unix")})
        found.update(file_bytes=count, same_digest=digest == note["sha256"])
        found["same_engine"] = note["engine"] == fields
        self.evidence["versions"] = {"llama.cpp": str(note["server_build"])}
        return {key: found[key] for key in ("tokens", "bytes", "same_digest", "same_engine")}

    def wait_restored(self) -> Json:
        """The keeper has restored what it had, into the process that runs now."""
        proc = self.identity("runner")["proc"] or {}
        who = f"{proc.get('boot_id')}:{proc.get('pid')}:{proc.get('start_ticks')}"
        deadline = time.monotonic() + self.limits["restored_s"]
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                state = read_json(os.path.join(self.config["namespace_dir"], STATE))
                if state.get("server") == who and state.get("restored"):
                    self.evidence["restored"] = True
                    return {"restored": True}
            time.sleep(0.2)
        self.evidence["restored"] = False
        raise ValueError("the keeper of the slots has restored nothing in time")

    # the event

    def command(self, argv: list[str]) -> int:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=self.limits["restart_s"], check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode:
            said = probe.scrub(done.stdout.decode(errors="replace"), self.key, last=True)
            raise ValueError(f"exit {done.returncode}: {said}")
        return done.returncode

    def happen(self) -> Json:
        restart: Json = {"exit_code": None, "ready_s": None}
        self.evidence["services"]["runner"]["restart"] = restart
        started = time.monotonic()
        for number in SIGNALS:  # a signal counts afterwards: no service is left stopped
            signal.signal(number, signal.SIG_IGN)
        try:
            if self.event == "kill":
                for name in ("slots", "runner"):
                    proc = self.identity(name)["proc"]
                    if proc is None:
                        raise ValueError(f"{name} does not run")
                    os.kill(proc["pid"], signal.SIGKILL)
                restart["exit_code"] = self.command(self.config["start"])
            else:
                restart["exit_code"] = self.command(self.config["restart"])
        finally:
            for number in SIGNALS:
                signal.signal(number, stop)
        deadline = time.monotonic() + self.limits["ready_s"]
        while True:
            try:
                self.call("/health", timeout=5)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise ValueError(f"llama-server is not ready: {error}") from error
            time.sleep(0.2)
        restart["ready_s"] = round(time.monotonic() - started, 2)
        return dict(restart)

    def clean_up(self) -> Json:
        """The slot holds again what it held, and nothing of the test is left."""
        found: Json = {"erased": False, "given_back": None, "why": None}
        self.evidence["cleanup"] = found
        with contextlib.suppress(ValueError):
            self.keeper("forget", f"slot-{self.slot}")
        try:
            self.call(f"/slots/{self.slot}?action=erase", {}, self.limits["request_s"])
            found["erased"] = True
            if self.aside:
                self.keeper("restore", ASIDE, "--slot", str(self.slot))
                found["given_back"] = True
                self.keeper("forget", ASIDE)
        except (OSError, ValueError) as error:
            found["why"] = probe.scrub(str(error), self.key)
            if self.aside and not found["given_back"]:
                found["given_back"] = False
            raise
        return found

    # all of it

    def step(self, title: str, action: Callable[[], Any]) -> bool:
        head = f"{self.event}: "
        return run_step(self.evidence["steps"], title, action, self.key, head)

    def who(self, side: str) -> None:
        for name in ("runner", "slots"):
            row = self.evidence["services"].setdefault(
                name, {"before": None, "after": None, "restart": None}
            )
            row[side] = self.identity(name)

    def run(self) -> None:
        self.who("before")
        touched = False
        try:
            if not self.step("is the server in use", self.is_it_free):
                return
            # until a step fails: what is not known is not asked further
            before: list[Any] = [
                ("what is in the test's slot is set aside", self.set_aside),
                ("cold request", lambda: self.ask("cold")),
                ("warm request", lambda: self.ask("warm")),
            ]
            if self.event == "kill":
                why = ("save", "--all", "--why", "verify")
                before.append(("the slots are saved", lambda: self.keeper(*why)))
            touched = True
            if not all(self.step(*one) for one in before):
                return
            happened = self.step(
                "llama-server and its keeper are "
                + ("killed" if self.event == "kill" else "restarted"),
                self.happen,
            )
            self.who("after")
            if not happened:
                return
            for one in (
                ("the keeper restores", self.wait_restored),
                ("the saved file", self.look_at_file),
                ("the same request again", lambda: self.ask("restored")),
                ("an unseen prompt", lambda: self.ask("control")),
            ):
                self.step(*one)
        except InUse:
            pass
        except Interrupted as error:
            self.evidence["interrupted"] = str(error)
        finally:
            if touched:
                with contextlib.suppress(Interrupted):
                    self.step("clean up", self.clean_up)
            self.evidence["finished_unix"] = time.time()


def read_key(path: str | None) -> str | None:
    """Raises OSError."""
    if not path:
        return None
    with open(path, encoding="utf-8") as handle:
        return handle.read().rstrip("\n")


def load_config(path: str) -> Json:
    """Raises OSError, ValueError that names what is wrong."""
    with open(path, encoding="utf-8") as handle:
        given = json.load(handle)
    if not isinstance(given, dict):
        raise ValueError("not a JSON object")
    wrong = [key for key, kind in NEEDED.items() if not isinstance(given.get(key), kind)]
    unknown = sorted(set(given) - {*NEEDED, *DEFAULTS, "timeouts"})
    config = {**DEFAULTS, **given, "timeouts": {**TIMEOUTS, **given.get("timeouts", {})}}
    wrong += [f"event {event}" for event in config["events"] if event not in EVENTS]
    if wrong or unknown:
        raise ValueError(f"missing or wrong: {', '.join(wrong) or 'none'}; unknown: "
                         f"{', '.join(unknown) or 'none'}")  # fmt: skip
    return config


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON, see above")
    parser.add_argument("--out", required=True, help="where the evidence is written")
    args = parser.parse_args()
    done: list[Json] = []
    try:
        config = load_config(args.config)
        for event in config["events"]:
            test = Test(config, event)
            for number in SIGNALS:
                signal.signal(number, stop)
            test.run()
            done.append(test.evidence)
            if test.evidence["refused"] or test.evidence["interrupted"]:
                break
    except (OSError, ValueError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1
    try:
        probe.write_json(args.out, {"schema": SCHEMA, "events": done}, 0o600)
    except OSError as error:
        print(f"the evidence cannot be written: {error}", file=sys.stderr)
        return 1
    if any(one["refused"] for one in done):
        print("refused: in use; set disrupt to run the test anyway", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
