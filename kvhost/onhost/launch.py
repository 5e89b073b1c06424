#!/usr/bin/env python3
"""Starts one service of kvhost and stays its parent: launch.py SPEC.json

Runs as the service's user, under supervisord or systemd, and does what neither does alike:
secrets are read from files into the environment (never an argument); the service starts only
once what it needs answers; all that it leaves behind is ended with it; and a record of who runs
since when, with which configuration, lies in run/NAME.json for the deploy, the sweep and the
verdict. Beside the record: NAME.failed says why the last start or run failed (gone when all is
well), NAME.lock is held while this runs and says what it is doing, and NAME.now (made by
services.py) skips the pause that follows quick failures.

SPEC: {"service", "argv", "env": {}, "secret_env": {VAR: file}, "record": file,
       "watch": [files whose change means a restart], "wait_for": ["host:port"], "wait_s",
       "before": [argv, …], "copies": [[source, copy], …] (what the service reads in place of the
       source), "drive": {"mount", "record"} (what has to be mounted where, state/drive.json),
       "require": [paths that must be there], "min_gap_s", "stop_timeout_s",
       "log": file that the output goes to as well when the supervisor's end of it is the journal}
Under systemd a secret is read from the unit's credential of the file's name (LoadCredential=).
Exit: the service's own code; 78 the spec is unusable; 75 something it needs did not come;
1 it could not be started, or it had to be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost.launch_children import (
        GaveUp,
        Signals,
        Stopped,
        boot_id,
        end_descendants,
        end_with_parent,
        leftovers,
        reap,
        say,
        spawn,
        start_ticks,
    )
    from kvhost.onhost.launch_log import also_in_file
    from kvhost.onhost.launch_needs import check_drive, environment, required
    from kvhost.onhost.launch_record import read_json, read_record, write_json
    from kvhost.onhost.launch_spec import config_digest, read_spec
else:  # they lie beside this file on a host, where there is no package kvhost
    from launch_children import (
        GaveUp,
        Signals,
        Stopped,
        boot_id,
        end_descendants,
        end_with_parent,
        leftovers,
        reap,
        say,
        spawn,
        start_ticks,
    )
    from launch_log import also_in_file
    from launch_needs import check_drive, environment, required
    from launch_record import read_json, read_record, write_json
    from launch_spec import config_digest, read_spec

#: a service that ends sooner than this failed to start, rather than crashed; seconds
YOUNG_S = 120
LONGEST_BACKOFF_S = 20
MOST_FILES = 1 << 20


class Launch:
    """One service, from the wait for what it needs to the record of how it ended."""

    def __init__(self, spec_path: str, spec: dict[str, Any], digest: str) -> None:
        self.spec_path = spec_path
        self.spec, self.digest, self.name = spec, digest, spec["service"]
        self.record_path: str = spec["record"]
        stem = self.record_path[:-5] if self.record_path.endswith(".json") else self.record_path
        self.failed_path, self.now_path = stem + ".failed", stem + ".now"
        self.lock_path = stem + ".lock"
        self.signals = Signals()
        self.lock = -1
        self.stop_timeout = float(spec.get("stop_timeout_s", 30))

    def doing(self, what: str | None) -> None:
        """Writes into the lock who holds it and what it waits for (None: the service runs)."""
        text = json.dumps(
            {
                "launcher_pid": os.getpid(),
                "launcher_ticks": start_ticks(os.getpid()),
                "config_digest": self.digest,
                "doing": what,
            }
        ).encode()
        os.pwrite(self.lock, text, 0)
        os.ftruncate(self.lock, len(text))
        if what:
            say(what)

    def take_lock(self) -> None:
        """The launch.py before this one may still be ending its service."""
        self.lock = os.open(self.lock_path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + self.stop_timeout + 15
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise GaveUp(75, f"another launch.py holds {self.lock_path}") from None
            self.signals.pause(0.3)

    def end_leftovers(self, before: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.stop_timeout
        while True:
            left = leftovers(before)
            if not left:
                return
            # asked to stop already, when its parent died; without it nobody tells the others
            if before["pid"] not in left or time.monotonic() > deadline:
                say(f"killing what the run before left behind: {left}")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if time.monotonic() > deadline + 15:
                    raise GaveUp(75, f"processes of the run before cannot be ended: {left}")
            self.signals.pause(0.2)

    def failures(self) -> int:
        """How often in a row it has failed."""
        try:
            return int(read_json(self.failed_path).get("count", 0))
        except (OSError, ValueError, TypeError, OverflowError):
            return 0  # it only decides how long to pause

    def failed(self, why: str, code: int, count: int) -> None:
        say(why)
        data = {"service": self.name, "why": why, "exit": code, "count": count}
        with contextlib.suppress(OSError):  # a full disk: the log has said why
            write_json(self.failed_path, {**data, "failed_unix": time.time()})

    def well(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.failed_path)

    def back_off(self) -> None:
        failures = self.failures()
        if failures:  # no busy loop of starts
            seconds = min(2**failures, LONGEST_BACKOFF_S)
            self.doing(f"failed {failures} times in a row: a pause of {seconds} s")
            self.signals.pause(seconds, until=self.now_path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.now_path)

    def keep_gap(self, before: dict[str, Any]) -> None:
        """Back within a heartbeat, a cache server leaves vLLM unregistered (LMCache#4642)."""
        gap = float(self.spec.get("min_gap_s", 0))
        if not gap or not before or before.get("boot_id") != boot_id():
            return
        ended = before.get("ended_boottime")  # unknown when its launch.py was killed
        if before.get("clean_stop") is not None and isinstance(ended, float):
            gap -= time.clock_gettime(time.CLOCK_BOOTTIME) - ended
        if gap > 0:
            self.doing(f"a pause of {gap:.1f} s since its last end")
            self.signals.pause(gap)

    def wait_for(self) -> None:
        seconds = float(self.spec.get("wait_s", 120))
        deadline = time.monotonic() + seconds
        for address in self.spec.get("wait_for", []):
            self.doing(f"waiting for {address}")
            host, _, port = address.rpartition(":")
            while True:
                try:
                    socket.create_connection((host.strip("[]"), int(port)), 1).close()
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        why = f"nothing answers on {address} after {seconds:.0f} s ({error})"
                        raise GaveUp(75, why) from error
                self.signals.pause(0.25)

    def run_before(self, unclean: bool) -> None:
        for argv in self.spec.get("before", []):
            words = [w for w in argv if w != "{unclean}" or unclean]
            words = ["--unclean" if w == "{unclean}" else w for w in words]
            self.doing("first: " + " ".join(words))
            hook = spawn(words, self.spec["env"])
            code = self.wait_child(hook, None)
            end_descendants()
            if self.signals.asked:
                raise Stopped
            if code != 0:
                raise GaveUp(1, f"{' '.join(words)} failed (exit {code})")

    def run_before_stop(self, child: subprocess.Popen[bytes], env: dict[str, str]) -> None:
        """Commands that need the service to answer, such as one that saves what it holds. One that
        fails, or takes too long, keeps nothing from stopping."""
        deadline = time.monotonic() + max(self.stop_timeout - 30, self.stop_timeout / 2)
        for argv in self.spec.get("before_stop", []):
            self.doing("before it stops: " + " ".join(argv))
            try:
                hook = spawn(argv, env)
            except GaveUp as error:
                say(str(error))
                continue
            while reap(hook, child) is None and child.returncode is None:
                if time.monotonic() > deadline:
                    say(f"{' '.join(argv)} took too long: killed")
                    hook.kill()
                    break
                self.signals.wait(0.2)
            if hook.returncode:
                say(f"{' '.join(argv)} failed (exit {hook.returncode})")

    def wait_child(
        self,
        child: subprocess.Popen[bytes],
        well_at: float | None,
        env: dict[str, str] | None = None,
    ) -> int | None:
        """Its exit code, or None if it had to be killed because it did not stop in time. ``env``:
        of the service itself, for what is done before it is told to stop."""
        deadline, killed = None, False
        while True:
            code = reap(child)
            if code is not None:
                return None if killed else code
            now = time.monotonic()
            if self.signals.asked and deadline is None:
                deadline = now + self.stop_timeout
                if env is not None:
                    self.run_before_stop(child, env)
                if child.returncode is None:
                    child.terminate()
            if deadline is not None and now > deadline and not killed:
                say(f"did not stop within {self.stop_timeout:.0f} s: killed")
                child.kill()
                killed = True
            if well_at is not None and now > well_at:
                self.well()
                well_at = None
            self.signals.wait(1.0)

    def run(self) -> int:
        try:
            self.take_lock()
            before = read_record(self.record_path)
            self.end_leftovers(before)
            self.back_off()
            self.keep_gap(before)
            check_drive(self.spec)
            required(self.spec)
            self.wait_for()
            check_drive(self.spec)
            env = environment(self.spec)
            clean = bool(before.get("clean_stop")) if before else None
            self.run_before(unclean=clean is False)
            return self.serve(env, before, clean)
        except Stopped:
            return 0
        except GaveUp as error:
            self.failed(str(error), error.code, self.failures() + 1)
            return error.code
        except OSError as error:
            self.failed(f"{self.name}: {error}", 1, self.failures() + 1)
            return 1

    def take_copies(self) -> None:
        """Copies what the service will read some seconds from now. Raises GaveUp when that is not
        what was digested: the record would vouch for a configuration that nobody runs."""
        for source, copy in self.spec.get("copies", []):
            with open(source, "rb") as handle:
                data = handle.read()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(copy, flags, 0o600), "wb") as handle:
                handle.write(data)
        if config_digest(self.spec_path, self.spec) != self.digest:
            raise GaveUp(75, "its configuration changed while it waited: it starts anew")

    def serve(self, env: dict[str, str], before: dict[str, Any], clean: bool | None) -> int:
        if "pid" in before:
            # killed between the start and its record, it must not look like a clean stop
            write_json(self.record_path, {**before, "clean_stop": False})
        self.take_copies()
        child = spawn(self.spec["argv"], env)
        began = time.monotonic()
        record: dict[str, Any] = {
            "service": self.name,
            "pid": child.pid,
            "start_ticks": start_ticks(child.pid),
            "boot_id": boot_id(),
            "pid1_ticks": start_ticks(1),
            "launcher_pid": os.getpid(),
            "config_digest": self.digest,
            "started_unix": time.time(),
            "clean_stop": None,
            "clean_stop_before": clean,
            "ended_unix_before": before.get("ended_unix"),
        }
        try:
            write_json(self.record_path, record)
            self.doing(None)
            say(f"{self.name} runs as process {child.pid}")
            code = self.wait_child(child, began + YOUNG_S, env)
        finally:
            end_descendants()  # also when the disk is full and the record cannot be written
        stopped = self.signals.asked and code is not None and code != -signal.SIGKILL
        count = 0
        if stopped:
            self.well()
        elif not self.signals.asked:
            young = time.monotonic() - began < YOUNG_S
            count = self.failures() + 1 if young else 1
            self.failed(f"{self.name} ended by itself with {code}", code or 0, count)
        record.update(
            clean_stop=stopped,
            ended_unix=time.time(),
            ended_boottime=time.clock_gettime(time.CLOCK_BOOTTIME),
            quick_failures=count,
        )
        write_json(self.record_path, record)
        if code is None:
            return 1
        return 0 if self.signals.asked else (code if code >= 0 else 128 - code)


def unusable(spec_path: str, error: Exception) -> int:
    """Says so where the others look too: beside the record, whose place the spec cannot tell."""
    why = f"unusable: {spec_path}: {error}"
    say(why)
    name = os.path.basename(spec_path).rpartition(".")[0]
    run = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(spec_path))), "run")
    failed = {"service": name, "why": why, "exit": 78, "count": 1, "failed_unix": time.time()}
    with contextlib.suppress(OSError):  # the message above is all that is left then
        write_json(os.path.join(run, name + ".failed"), failed)
    return 78


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("spec")
    parser.add_argument("--digest", action="store_true", help="print what would be started and end")
    args = parser.parse_args()
    try:
        spec = read_spec(args.spec)
        digest = config_digest(args.spec, spec)
    except (OSError, ValueError) as error:
        if args.digest:
            print(f"unusable: {args.spec}: {error}", file=sys.stderr)
            return 78
        return unusable(args.spec, error)
    if args.digest:
        print(digest)
        return 0
    os.umask(0o077)  # what is cached is what people asked
    end_with_parent()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    with also_in_file(spec.get("log")):
        return Launch(args.spec, spec, digest).run()


if __name__ == "__main__":
    sys.exit(main())
