#!/usr/bin/env python3
"""Starts one service of kvhost and stays its parent: launch.py SPEC.json

Runs as the service's user, under supervisord or systemd, and does what neither does alike:
secrets are read from files into the environment (never an argument); the service starts only
once what it needs answers; all that it leaves behind is ended with it; and a record of who runs
since when, with which configuration, lies in run/NAME.json for the deploy, the sweep and the
verdict.

SPEC: {"service", "argv", "env": {}, "secret_env": {VAR: file}, "record": file,
       "watch": [files whose change means a restart], "wait_for": ["host:port"], "wait_s",
       "before": [argv, …], "min_gap_s", "stop_timeout_s"}
Exit: the service's own code; 78 the spec is unusable; 75 something waited for did not come.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36


def say(text):
    print("launch: " + text, flush=True)


def config_digest(spec_path, spec):
    """Digest of all that the service was started with. A secret's file counts by inode, size and
    time, never by content: a digest of a weak key would give it away."""
    digest = hashlib.sha256()
    with open(spec_path, "rb") as handle:
        digest.update(handle.read())
    for path in spec.get("watch", []):
        digest.update(path.encode())
        if os.path.islink(path):
            digest.update(os.readlink(path).encode())
        elif os.path.isfile(path):
            with open(path, "rb") as handle:
                digest.update(handle.read())
    for path in sorted(spec.get("secret_env", {}).values()):
        st = os.stat(path)
        digest.update(repr((path, st.st_ino, st.st_size, st.st_mtime_ns)).encode())
    return digest.hexdigest()


def boot_id():
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


def start_ticks(pid):
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and parentheses."""
    with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as handle:
        return int(handle.read().rpartition(")")[2].split()[19])


def read_record(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        say(f"the record of the run before is unreadable ({error}): taken as an unclean stop")
        return {"clean_stop": False}


def write_record(path, record):
    temporary = path + ".new"
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(record, handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def wait_for(addresses, seconds):
    deadline = time.monotonic() + seconds
    for address in addresses:
        host, _, port = address.rpartition(":")
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    say("nothing answers on %s after %d s" % (address, seconds))
                    sys.exit(75)
                time.sleep(0.25)


def in_child():
    """The service dies with this parent, also if that is killed (EngineCore outlives its own)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_group(pgid, why):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)
        say("ended what was left of process group %d (%s)" % (pgid, why))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec")
    parser.add_argument("--digest", action="store_true", help="print what would be started and end")
    args = parser.parse_args()
    try:
        with open(args.spec, encoding="utf-8") as handle:
            spec = json.load(handle)
        digest = config_digest(args.spec, spec)
    except (OSError, ValueError) as error:
        say(f"unusable: {args.spec}: {error}")
        return 78
    if args.digest:
        print(digest)
        return 0
    return run(spec, digest)


def run(spec, digest):
    before = read_record(spec["record"])
    clean_before = before.get("clean_stop")
    if before and clean_before is None:
        clean_before = False  # it never got to say that it stopped
    stopping = {"asked": False, "pid": None}

    def stop(signum, _frame):
        stopping["asked"] = True
        if stopping["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopping["pid"], signal.SIGTERM)
        else:
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    # A cache server that is back within a heartbeat leaves vLLM unregistered (LMCache#4642).
    gap = spec.get("min_gap_s", 0) - (time.time() - before.get("ended_unix", 0))
    if 0 < gap <= spec.get("min_gap_s", 0):
        time.sleep(gap)
    failures = before.get("quick_failures", 0)
    if failures:  # it died young the last times: no busy loop of starts
        time.sleep(min(2**failures, 20))
    wait_for(spec.get("wait_for", []), spec.get("wait_s", 120))
    env = dict(spec["env"])
    for variable, path in spec.get("secret_env", {}).items():
        with open(path, encoding="utf-8") as handle:
            env[variable] = handle.read().rstrip("\n")
    for argv in spec.get("before", []):
        unclean = ["--unclean"] if clean_before is False else []
        subprocess.run(
            [part for a in argv for part in (unclean if a == "{unclean}" else [a])],
            env=env,
            check=True,
        )

    child = subprocess.Popen(
        spec["argv"],
        env=env,
        cwd=env.get("HOME", "/"),
        start_new_session=True,
        preexec_fn=in_child,
        stdin=subprocess.DEVNULL,
    )
    stopping["pid"] = child.pid
    if stopping["asked"]:
        child.terminate()
    record = {
        "service": spec["service"],
        "pid": child.pid,
        "start_ticks": start_ticks(child.pid),
        "boot_id": boot_id(),
        "config_digest": digest,
        "started_unix": time.time(),
        "clean_stop": None,
        "clean_stop_before": clean_before,
        "ended_unix_before": before.get("ended_unix"),
    }
    write_record(spec["record"], record)
    say("%s runs as process %d" % (spec["service"], child.pid))

    code = wait_child(child, stopping, spec.get("stop_timeout_s", 30))
    end_group(child.pid, f"its parent ended with {code}")
    clean = stopping["asked"] and code is not None
    young = time.time() - record["started_unix"] < 120
    record.update(
        clean_stop=clean,
        ended_unix=time.time(),
        quick_failures=failures + 1 if young and not clean else 0,
    )
    write_record(spec["record"], record)
    if code is None:
        return 1
    return 0 if stopping["asked"] else (code if code >= 0 else 128 - code)


def wait_child(child, stopping, stop_timeout):
    """Its exit code, or None if it had to be killed because it did not stop in time."""
    deadline = None
    while True:
        try:
            return child.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        if stopping["asked"]:
            deadline = deadline or time.monotonic() + stop_timeout
            if time.monotonic() > deadline:
                say("did not stop within %d s: killed" % stop_timeout)
                end_group(child.pid, "stop timed out")
                child.wait()
                return None


if __name__ == "__main__":
    sys.exit(main())
