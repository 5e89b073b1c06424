#!/usr/bin/env python3
"""Builds an engine environment from a lock, proves it, and only then makes it the current one.

engine.py install --lock F --env DIR ...   venv, packages (every one by hash), ABI check, marker
engine.py status  --env DIR                is it complete and untouched? JSON, exit 0
engine.py switch  --env DIR --current LINK point the symlink at a complete environment

The packages come from where the host's own pip configuration says (index, extra indexes,
find-links, certificate, proxy), handed to uv by environment variables, so that credentials in a
URL are in no process list. An environment without its marker is unfinished and is built anew.
Exit: 0 done, 1 failed (the reason is on stderr; the current environment is as it was).
"""

from __future__ import annotations

import argparse
import ast
import errno
import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time

MARKER = ".kvhost-complete.json"
STEPS = ("wiped", "venv", "packages", "abi", "marker", "switch")


def step_done(name):
    """Tests stop the run dead after any step: KVHOST_TEST_DIE_AFTER=engine:venv."""
    if os.environ.get("KVHOST_TEST_DIE_AFTER") == "engine:" + name:
        os.kill(os.getpid(), signal.SIGKILL)


def say(text):
    print(text, file=sys.stderr, flush=True)


def fail(text):
    say("engine: " + text)
    sys.exit(1)


# What pip is told on this host, for uv


def pip_settings(pip_python):
    """Settings of pip on this host, the strongest source of each: {'index-url': '…', …}."""
    done = subprocess.run(
        [pip_python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        fail("could not read the host's pip configuration:\n" + done.stderr.strip())
    return parse_pip_settings(done.stdout)


def parse_pip_settings(text):
    """`pip config list` names a source in each key; install beats global, the environment both."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    best = {}
    for line in text.splitlines():
        key, sep, value = line.partition("=")
        source, dot, option = key.rpartition(".")
        if not sep or not dot or source not in rank:
            continue
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        if option not in best or rank[source] >= best[option][0]:
            best[option] = (rank[source], str(value))
    return {option: value for option, (_, value) in best.items()}


def uv_environment(pip, wheels, torch_index, cache):
    """Environment of uv: the same places that pip would look at, and the wheels of kvhost."""
    env = dict(os.environ)
    if pip.get("index-url"):
        env["UV_DEFAULT_INDEX"] = pip["index-url"]
    extra = pip.get("extra-index-url", "").split() + ([torch_index] if torch_index else [])
    if extra:
        env["UV_EXTRA_INDEX_URL"] = " ".join(extra)
    env["UV_FIND_LINKS"] = ",".join([*pip.get("find-links", "").split(), wheels])
    if pip.get("cert"):
        env["SSL_CERT_FILE"] = pip["cert"]
    if pip.get("client-cert"):
        env["SSL_CLIENT_CERT"] = pip["client-cert"]
    if pip.get("trusted-host"):
        env["UV_INSECURE_HOST"] = pip["trusted-host"]
    if pip.get("proxy"):
        env.setdefault("ALL_PROXY", pip["proxy"])
    if pip.get("timeout") or pip.get("default-timeout"):
        env["UV_HTTP_TIMEOUT"] = pip.get("timeout") or pip["default-timeout"]
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        env["UV_NO_INDEX"] = "1"
    # Several indexes may offer a package; which file is right is said by the hash alone.
    env["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    env["UV_CACHE_DIR"] = cache
    env["UV_NO_PROGRESS"] = "1"
    env["UV_PYTHON_DOWNLOADS"] = "never"
    return env


def needs_torch_index(uv, pip, args):
    """Whether the host's own places do not offer the locked torch (a CPU build is not on PyPI)."""
    with open(args.lock, encoding="utf-8") as lock:
        pins = [line.split()[0] for line in lock if line.startswith("torch==")]
    if not pins or not args.torch_index:
        return False
    done = subprocess.run(
        [uv, "pip", "install", "--dry-run", "--no-deps", "--python", args.env, pins[0]],
        env=uv_environment(pip, args.wheels, None, args.cache),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode != 0


# Progress, digests, running as the service's user


def tree_bytes(folder):
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue  # uv renames files while we look
    return total


def watch(folder, stop, began):
    while not stop.wait(10):
        say("  ... %d MB on disk after %d s" % (tree_bytes(folder) >> 20, time.time() - began))


def tree_manifest(env):
    """Digest over path, size, mode and mtime of every file, so that a later edit is seen."""
    digest, files, size = hashlib.sha256(), 0, 0
    for root, folders, names in os.walk(env):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(root, name)
            if name == MARKER and root == env:
                continue
            st = os.lstat(path)
            line = (os.path.relpath(path, env), st.st_size, oct(st.st_mode), st.st_mtime_ns)
            digest.update(repr(line).encode())
            files += 1
            size += st.st_size
    return {"manifest": digest.hexdigest(), "files": files, "bytes": size}


def as_user(user, argv):
    """argv run with the identity of the service's user (unchanged where we are that user)."""
    account = pwd.getpwnam(user)
    if account.pw_uid == os.geteuid():
        return argv
    ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--init-groups"]
    return ["setpriv", *ids, "--inh-caps=-all", *argv]


def abi_check(args):
    """Runs the proof with the identity and the environment that the services will have."""
    with open(args.service_env, encoding="utf-8") as handle:
        service_env = json.load(handle)
    argv = [os.path.join(args.env, "bin", "python"), args.abi_script, "--accelerator", "cpu"]
    done = subprocess.run(
        as_user(args.user, argv),
        env=service_env,
        cwd=service_env.get("HOME", "/"),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        fail("the ABI check gave no result (exit %d):\n%s" % (done.returncode, tail(done.stderr)))
    for check in result["checks"]:
        say("  %-4s %-22s %s" % (check["state"], check["name"], check["detail"]))
    if not result["ok"]:
        fail(f"the ABI check failed in {args.env}; the current environment is as it was")
    return result["checks"]


def tail(text, lines=15):
    return "\n".join(text.strip().splitlines()[-lines:])


# The commands


def install(args):
    if is_complete(args.env)["complete"]:
        say("complete already: " + args.env)
        return
    began = time.time()
    if os.path.lexists(args.env):
        say("an unfinished environment is here; building it anew")
        shutil.rmtree(args.env)
    step_done("wiped")
    pip = pip_settings(args.pip_python)
    run_uv(args, ["venv", "--python", args.python, args.env], pip, None)
    step_done("venv")
    torch_index = args.torch_index if needs_torch_index(args.uv, pip, args) else None
    if torch_index:
        say(f"torch: from {torch_index} (the host's pip configuration does not offer it)")
    stop = threading.Event()
    threading.Thread(target=watch, args=(args.env, stop, began), daemon=True).start()
    say(f"installing {os.path.basename(args.lock)}")
    try:
        run_uv(
            args,
            ["pip", "install", "--python", args.env, "--no-deps", "--require-hashes"]
            + ["--no-build", "-r", args.lock],
            pip,
            torch_index,
        )
    finally:
        stop.set()
    # umask of whoever runs this may be strict: the service's user must be able to read it all
    subprocess.run(["chmod", "-R", "go+rX,go-w", args.env], check=True)
    step_done("packages")
    say(f"ABI check, as user {args.user}")
    checks = abi_check(args)
    step_done("abi")
    marker = {"lock": args.lock_digest, "abi": checks, **tree_manifest(args.env)}
    write_marker(args.env, marker)
    step_done("marker")
    say("built in %d s, %d MB on disk" % (time.time() - began, marker["bytes"] >> 20))


def run_uv(args, command, pip, torch_index):
    done = subprocess.run(
        [args.uv, *command],
        env=uv_environment(pip, args.wheels, torch_index, args.cache),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    shutil.rmtree(args.env, ignore_errors=True)
    reason = tail(done.stderr)
    free = shutil.disk_usage(os.path.dirname(args.env)).free >> 20
    if os.strerror(errno.ENOSPC) in done.stderr:
        hint = "The disk is full (%d MB free below %s)." % (free, os.path.dirname(args.env))
        shutil.rmtree(args.cache, ignore_errors=True)
    elif "hash" in done.stderr.lower() and "mismatch" in done.stderr.lower():
        hint = "A file is not the one that was locked: do not work around this; look at the index."
    else:
        hint = "If no index can be reached: see the host's pip configuration (pip config list)."
    fail(f"uv could not install:\n{reason}\n{hint}\nThe current environment is as it was.")


def write_marker(env, marker):
    temporary = os.path.join(env, MARKER + ".new")
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(marker, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, os.path.join(env, MARKER))


def is_complete(env):
    """{"complete": bool, "why": str|None}: the marker is there and the tree is as it was."""
    try:
        with open(os.path.join(env, MARKER), encoding="utf-8") as handle:
            marker = json.load(handle)
    except FileNotFoundError:
        return {"complete": False, "why": "not built"}
    except (OSError, ValueError) as error:
        return {"complete": False, "why": f"marker unreadable: {error}"}
    now = tree_manifest(env)
    if now["manifest"] != marker.get("manifest"):
        why = "changed since it was built (%s files then, %s now)"
        return {"complete": False, "why": why % (marker.get("files"), now["files"])}
    return {"complete": True, "why": None, "lock": marker.get("lock"), "bytes": marker["bytes"]}


def switch(args):
    state = is_complete(args.env)
    if not state["complete"]:
        fail("{} is {}: not switched".format(args.env, state["why"]))
    temporary = args.current + ".new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(args.env, temporary)
    os.replace(temporary, args.current)
    step_done("switch")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("install", help="build and prove an environment")
    for name, help_text in (
        ("lock", "requirements file with hashes"),
        ("lock-digest", "written into the marker"),
        ("env", "directory of the environment"),
        ("wheels", "directory of kvhost's own wheels"),
        ("python", "Python that the environment is made of"),
        ("pip-python", "a Python with pip, asked for the host's pip configuration"),
        ("uv", "the uv program"),
        ("cache", "uv's cache; on the same filesystem it costs no second copy"),
        ("user", "the service's user"),
        ("service-env", "JSON file: environment variables of the services"),
        ("abi-script", "abi_check.py"),
    ):
        build.add_argument("--" + name, required=True, help=help_text)
    build.add_argument("--torch-index", help="where torch is if the host's places lack it")
    look = commands.add_parser("status", help="JSON: complete or why not")
    look.add_argument("--env", required=True)
    move = commands.add_parser("switch", help="make an environment the current one")
    move.add_argument("--env", required=True)
    move.add_argument("--current", required=True)
    args = parser.parse_args()
    if args.command == "install":
        install(args)
    elif args.command == "switch":
        switch(args)
    else:
        print(json.dumps(is_complete(args.env)))


if __name__ == "__main__":
    main()
