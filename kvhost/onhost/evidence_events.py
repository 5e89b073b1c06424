"""What is done to the services in each event of the test, and in which order. Lies beside
evidence.py.

Every event: cold requests, written to L2; the event; files out of the page cache; the controls; the
same request again; an unseen prompt. The events differ in the middle, see docs/verdict.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_collect import (
        Files,
        Json,
        finishing_first,
    )
    from kvhost.onhost.evidence_other import SecondPair
    from kvhost.onhost.evidence_restart import Services
    from kvhost.onhost.evidence_steps import SIGNALS, Interrupted, InUse
else:  # on the host the files lie beside each other, in no package
    import evidence_probe as probe
    from evidence_collect import finishing_first
    from evidence_other import SecondPair
    from evidence_restart import Services
    from evidence_steps import SIGNALS, Interrupted, InUse

KILL_BOTH = "both services in a write, start them"
ASIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "evidence_aside.py")


def python_for_all() -> str:
    """An interpreter that the service's user can run too: root's own may lie in its home."""
    system = "/usr/bin/python3"
    return system if os.access(system, os.X_OK) else sys.executable


def use(vllm: Json | None, own: int | None) -> Json:
    """Requests that a runner answers now, and those that it has answered and were not kvhost's."""
    if not vllm or vllm["requests_finished"] is None or own is None:
        return {"busy": None, "foreign": None, "own": own}  # cannot know: refused too
    busy = int((vllm["running"] or 0) + (vllm["waiting"] or 0))
    return {"busy": busy, "foreign": int(vllm["requests_finished"]) - own, "own": own}


def use_words(found: Json) -> str:
    """Why a runner is in use. kvhost counts a request of its own once its answer begins, and the
    runner once it ended: fewer finished than counted are such that still run.

    >>> use_words({"busy": 1, "foreign": -1, "own": 1})
    "1 request now, 1 of them of kvhost's own, which did not end yet"
    """
    busy, foreign = found["busy"], found["foreign"]
    if busy is None or foreign is None:
        return "the runner's metrics or record cannot be read"
    now = "1 request now" if busy == 1 else f"{busy} requests now"
    if foreign >= 0:
        return f"{now}, {foreign} finished are not kvhost's"
    if -foreign <= busy:
        return f"{now}, {-foreign} of them of kvhost's own, which did not end yet"
    return (
        f"{now}, and it has finished {-foreign} fewer than kvhost sent to the process "
        "of the runner's record: another process may answer there"
    )


class RebootNow(Exception):
    """The host is to be rebooted; the rest of the test follows."""


class Test(Services):
    """One event's test."""

    __test__ = False  # not for pytest

    def identify(self) -> None:
        self.read_key()
        for name, service in self.config["services"].items():
            who = self.identity(name)
            self.evidence["services"][name] = {"before": who, "after": None, "restart": None}
            path = service.get("log")
            found = probe.read_log(path) if path else None
            self.logs[name] = {"from": found[0] if found else 0, "to": None, "lines": []}
        urls = {"vllm": self.asked["api_base"]}
        if not self.native:
            urls["lmcache"] = self.asked["cache_http"]
        for name, base in urls.items():
            url = base + "/version"
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self.get(url))
                version = found.get("version") if isinstance(found, dict) else found
                self.evidence["versions"][name] = str(version)

    def read_key(self) -> None:
        if self.config["api_key_file"]:
            with open(self.config["api_key_file"], encoding="utf-8") as handle:
                self.key = handle.read().strip()

    def use_of(self, other: Json) -> Json | None:
        """Of a further runner, which loses the cache server for a while; None where none runs."""
        vllm, proc = None, None
        wrong = (OSError, ValueError, KeyError, TypeError)
        with contextlib.suppress(*wrong), open(other["record"], encoding="utf-8") as handle:
            proc = probe.process(json.load(handle)["pid"])
        if proc is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            vllm = probe.parse_metrics(self.get(other["metrics_url"]), probe.VLLM)
        return use(vllm, probe.own_requests(other["own_requests"], proc))

    def check_use(self) -> Json:
        found = use(self.scrape()[0], self.own_requests())
        for other in self.config["others"] if self.event != "runner" else ():
            used = self.use_of(other)
            if used is not None and found["busy"] is not None:
                # what cannot be known of one is not known
                found = (
                    {**found, "busy": None, "foreign": None}
                    if used["busy"] is None
                    else {k: found[k] + used[k] for k in found}
                )
        free = found["busy"] == 0 and found["foreign"] == 0
        if not free and not self.config["disrupt"]:
            self.evidence["refused"] = found
            raise InUse(use_words(found))
        return found if found["foreign"] is None else {**found, "foreign": max(found["foreign"], 0)}

    # -- files ----------------------------------------------------------------------------------
    def aside(self, command: str, *words: str, names: Any = None) -> Json:
        """evidence_aside.py, as the namespace's owner. Raises ValueError with what it said."""
        info = os.stat(self.config["namespace_dir"])
        who: Json = {}
        if os.geteuid() == 0 and info.st_uid != 0:  # root moves nothing by path where others write
            who = {"user": info.st_uid, "group": info.st_gid, "extra_groups": []}
        done = subprocess.run(
            [python_for_all(), ASIDE, command, *words],
            input=json.dumps(names),
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
            **who,
        )
        if not done.stdout.strip():
            raise ValueError(probe.scrub(done.stderr, self.key) or f"exit {done.returncode}")
        found: Json = json.loads(done.stdout)
        return found

    def heal(self) -> Json:
        return self.aside("heal", "--tier", os.path.dirname(self.config["namespace_dir"]))

    def drop_pages(self) -> Json:
        root = self.config["namespace_dir"]
        found = probe.drop_pages(root, self.cold_files)
        for files in self.small_files.values():
            probe.drop_pages(root, files)
        self.evidence["page_cache"] = found
        return found

    def moved_control(self) -> Json:
        """The files of one prompt moved to another namespace; the prompt; the files put back."""
        files = self.small_files.get("moved_cold", {})
        namespace = self.config["namespace_dir"]
        result: Json = {"moved": 0, "put_back": 0, "left": 0, "pages": 0, "resident_after": None}
        self.evidence["moved"] = result
        pid = ("--pid", str(os.getpid()))
        moved = self.aside("move", "--namespace", namespace, *pid, names=list(files))
        result["moved"], place = moved["files"], moved["place"]
        try:
            pages = probe.drop_pages(place, files)
            result["pages"] = pages["pages"]
            if not pages["resident_after"]:  # else who read them later could not be seen
                result["resident_after"] = 0
            expected = self.expected_of("moved") if files else 0
            shown = self.request("moved", self.prompt("moved_cold"), expected)
            if result["resident_after"] is not None:
                paths = [os.path.join(place, name) for name in files]
                # a file may be gone, or have been truncated before it was moved
                sizes = {path: os.path.getsize(path) for path in paths if os.path.exists(path)}
                result["resident_after"] = sum(
                    probe.resident_pages(path, size) for path, size in sizes.items() if size
                )
        finally:
            with finishing_first():
                back = self.aside("put-back", "--namespace", namespace)
            result["put_back"], result["left"] = back["put_back"], back["left"]
        return {**shown, **result}

    # -- the order -------------------------------------------------------------------------------
    def middle(self) -> Iterator[bool]:
        """The event itself."""
        if self.event == "kill":
            whom = "the runner in a write, start it" if self.native else KILL_BOTH
            yield self.step(f"kill -9 {whom}", self.kill_midway)
        if self.event == "reboot":
            self.step("flush the test's files to the drive", self.drop_pages)
            raise RebootNow
        if self.event == "other":
            self.pair = SecondPair(self)
            yield self.step("start a second pair of services", self.pair.start)
        if self.event in ("cache", "both"):
            yield self.step("restart the cache server", lambda: self.restart("cache"))
        if self.event in ("runner", "both"):
            yield self.step("restart the runner", lambda: self.restart("runner"))
        if self.event == "runner" and not self.native:
            self.stays("cache")
        if self.event == "cache":
            yield self.step("the runner registers again", self.wait_registered)
            yield self.step("empty the engine's own memory", self.flush_engine)
            self.stays("runner")

    pair: SecondPair | None = None

    def before_event(self) -> Iterator[bool]:
        yield self.step("identify the services", self.identify)
        yield self.step("is the server in use", self.check_use)
        yield self.step("put back what a dead test has moved", self.heal)
        yield self.step("cold request, until it is written", lambda: self.cold("cold"))
        # the moved files of a cache server that goes on would not be missed: its memory answers
        controls = ("half",) if self.server_goes_on else ("moved", "half")
        for name in controls if self.small else ():
            self.step(f"cold request of a control: {name}", partial(self.cold, f"{name}_cold"))
        if self.config["warm"]:
            self.step("warm request", lambda: self.request("warm", self.prompt("cold"), 0))

    @property
    def server_goes_on(self) -> bool:
        return self.event == "runner" and not self.native

    def cold(self, role: str) -> Json:
        return self.request(role, self.prompt(role), self.expected_of(role))

    def after_event(self) -> Iterator[bool]:
        self.step("drop the test's files from the page cache", self.drop_pages)
        wait = bool(self.cold_files)  # without an L2 there is nothing to wait for
        if "half_cold" in self.evidence["requests"]:
            if "moved_cold" in self.evidence["requests"]:
                self.step("control: files moved to another namespace", self.moved_control)
            count = self.expected_of("half") if wait else 0
            half = self.prompt("half")
            self.step(
                "control: the first half of a prompt", lambda: self.request("half", half, count)
            )
        self.step(
            "the same request again", lambda: self.request("restored", self.prompt("cold"), 0)
        )
        if self.event == "kill":
            kept = self.evidence["killed"]["kept"] or 0
            rest, whole = self.files_of(self.chunks) - kept, self.files_of(self.chunks)
            killed = self.prompt("killed")
            self.step("the killed request again", lambda: self.request("cut", killed, rest))
            salt = self.seed[:16]  # another key for the same tokens, on both sides
            self.step(
                "the killed request, computed anew",
                lambda: self.request("reference", killed, whole, salt),
            )
        count = self.files_of(self.chunks) if wait else 0
        other = self.prompt("unseen")
        self.step("control: an unseen prompt", lambda: self.request("control", other, count))
        yield True

    def steps(self, resumed: bool) -> Iterator[bool]:
        """The steps in order; a False one ends the test, the clean-up still follows."""
        if resumed:
            yield self.come_back()
        else:
            yield from self.before_event()
            yield from self.middle()
        yield from self.after_event()

    def run(self, resumed: bool = False) -> None:
        """Raises RebootNow when the rest has to follow after a reboot; nothing else."""
        self.total = self.count_steps()
        try:
            for going_on in self.steps(resumed):
                if not going_on:
                    break
        except InUse:
            return
        except Interrupted as error:
            self.evidence["interrupted"] = str(error)
        for number in SIGNALS:  # the rest is short and must happen
            signal.signal(number, signal.SIG_IGN)
        if self.pair is not None:
            self.step("end the second pair of services", self.pair.stop)
        self.step("remove the test's files", self.clean_up)
        self.step("read the logs", self.read_logs)

    def count_steps(self) -> int:
        """For the progress shown; a test that ends early does fewer."""
        controls = 0 if not self.small else 2 if self.server_goes_on else 4
        middle = {"runner": 1, "cache": 3, "both": 2, "kill": 3, "reboot": 1, "other": 2}
        return 4 + controls + bool(self.config["warm"]) + middle[self.event] + 5

    # -- across a reboot ------------------------------------------------------------------------
    def journal(self) -> Json:
        """What the rest of the test needs after a reboot. No prompts: the seed makes them again."""
        return {
            "seed": self.seed,
            "evidence": self.evidence,
            "cold_files": self.cold_files,
            "small_files": self.small_files,
            "windows": self.windows,
            "number": self.number,
            "pid1_ticks": probe.pid1_ticks(),
        }

    @classmethod
    def after_reboot(cls, config: Json, journal: Json) -> Test:
        """The test that wrote this journal. Raises KeyError, TypeError, ValueError if unusable."""
        test = cls(config, "reboot", journal["seed"])
        test.evidence = journal["evidence"]
        test.logs = test.evidence["logs"]
        test.cold_files = _files(journal["cold_files"])
        test.small_files = {role: _files(f) for role, f in journal["small_files"].items()}
        test.windows = [(role, _files(files)) for role, files in journal["windows"]]
        test.number = journal["number"]
        test.evidence["resumed"] = {
            "boot_id": test.evidence["boot_id"],
            "pid1_ticks": journal["pid1_ticks"],
            "boot_id_after": probe.boot_id(),
            "pid1_ticks_after": probe.pid1_ticks(),
            "waited_s": 0.0,
        }
        test.read_key()
        return test

    def rebooted(self) -> bool:
        found = self.evidence["resumed"]
        return any(found[key] != found[key + "_after"] for key in ("boot_id", "pid1_ticks"))

    def come_back(self) -> bool:
        """Waits for the services, which must start by themselves after a reboot."""
        started = time.monotonic()

        def both() -> Json:
            for name in self.evidence["services"]:
                self.evidence["services"][name]["restart"] = {"exit_code": 0, "ready_s": None}
                self.wait_ready(name)
            waited = round(time.monotonic() - started, 2)
            self.evidence["resumed"]["waited_s"] = waited
            return {"waited_s": waited}

        return self.step("the services come back by themselves", both)


def _files(given: Any) -> Files:
    return {name: (int(a), int(b), int(c)) for name, (a, b, c) in given.items()}
