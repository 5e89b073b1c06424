#!/usr/bin/env python3
"""Builds an engine environment from a lock, proves it, and only then makes it the current one.

engine.py install --lock F --env DIR ...   venv, packages (every one by hash), ABI check, marker
engine.py status  --env DIR                is it complete and untouched? JSON, exit 0
engine.py switch  --env DIR --current LINK point the symlink at a complete environment

The packages come from where the host's own pip configuration says (engine_pip.py). An environment
without its marker is unfinished and is built anew; one that was changed since it was built stays
beside as DIR.damaged, and comes back if the new one fails.
Exit: 0 done, 1 failed (the reason is on stderr; the current environment is as it was).
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import bounded, engine_pip, engine_program
    from kvhost.onhost.engine_whole import (
        damaged,
        gpu_driver,
        has_marker,
        is_complete,
        read_marker,
        tree_manifest,
        write_marker,
    )
else:  # they lie beside this file on a host, where there is no package kvhost
    import bounded
    import engine_pip
    import engine_program
    from engine_whole import (
        damaged,
        gpu_driver,
        has_marker,
        is_complete,
        read_marker,
        tree_manifest,
        write_marker,
    )

STEPS = ("wiped", "venv", "packages", "abi", "marker", "switch")
ABI_LIMIT_S = 900


class Failed(Exception):
    """Why, for people."""


def step_done(name: str) -> None:
    """Tests stop the run dead after any step: KVHOST_TEST_DIE_AFTER=engine:venv."""
    if os.environ.get("KVHOST_TEST_DIE_AFTER") == "engine:" + name:
        os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def tree_bytes(*folders: str) -> int:
    """Of all of them; a file with two names counts once: uv links from its cache."""
    sizes: dict[tuple[int, int], int] = {}
    for root, _, names in (entry for folder in folders for entry in os.walk(folder)):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:
                continue  # uv renames files while we look
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def watch(folders: tuple[str, ...], stop: threading.Event, every_s: float = 10) -> None:
    """How much came so far: uv downloads and unpacks into its cache, and fills the environment
    only when it has all."""
    began, before = time.monotonic(), tree_bytes(*folders)
    while not stop.wait(every_s):
        came = max(tree_bytes(*folders) - before, 0) >> 20
        say(f"  ... {came} MB came so far, after {time.monotonic() - began:.0f} s")


def remove(path: str) -> None:
    """Whatever it is; a link is not followed. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


# Building


def with_parent(argv: list[str], user: str | None = None) -> list[str]:
    """argv so that it dies with this process, with the identity of ``user`` if that is another."""
    ids: list[str] = []
    if user is not None:
        try:
            account = pwd.getpwnam(user)
        except KeyError:
            raise Failed(f"there is no user {user} on this host") from None
        if account.pw_uid != os.geteuid():
            ids = ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid)]
            ids += ["--init-groups", "--inh-caps=-all"]
    return ["setpriv", *ids, "--pdeathsig", "KILL", *argv]


def _said(done: bounded.Said) -> str:
    """How it ended, and the last of what it printed."""
    lines = "\n".join(filter(None, (tail(done.err), tail(done.out, 3))))
    return f" (exit {done.code}):\n{lines[-2000:] or 'it printed nothing'}"


class Build:
    """One installation. Every method raises Failed or OSError."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.env: str = args.env
        try:
            self.pip = (
                engine_pip.of_bundle(args.bundle)
                if args.bundle
                else (engine_pip.read_settings(args.pip_python))
            )
        except (OSError, ValueError) as error:
            raise Failed(f"the host's pip configuration cannot be read: {error}") from error
        self.torch_index: str | None = None

    def make_room(self) -> None:
        """Nothing lies at the place of the environment; what may still serve waits beside it."""
        above = os.path.dirname(self.env)
        if not os.path.isdir(above):
            os.makedirs(above)
            os.chmod(above, 0o755)  # whatever the umask: the service's user passes through
        if has_marker(self.env):
            say(f"{self.env} was changed since it was built; building it anew")
            remove(damaged(self.env))
            os.rename(self.env, damaged(self.env))
        elif os.path.lexists(self.env):
            say("an unfinished environment is here; building it anew")
            remove(self.env)
        if os.path.lexists(damaged(self.env)):
            # uv links files from its cache: an edit in the one is an edit in the other
            remove(self.args.cache)

    def undo(self) -> None:
        """Removes what is unfinished, and puts back what was there."""
        if not has_marker(self.env):
            shutil.rmtree(self.env, ignore_errors=True)
        if os.path.isdir(damaged(self.env)) and not os.path.lexists(self.env):
            os.rename(damaged(self.env), self.env)

    def uv(
        self, command: list[str], torch_index: str | None, more: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        args = self.args
        env = engine_pip.uv_environment(self.pip, args.wheels, torch_index, args.cache, os.environ)
        return subprocess.run(
            with_parent([args.uv, *command]),
            env={**env, **(more or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def run_uv(self, command: list[str], more: dict[str, str] | None = None) -> None:
        done = self.uv(command, self.torch_index, more)
        if done.returncode != 0:
            above = os.path.dirname(self.env)
            free = shutil.disk_usage(above).free >> 20  # before anything is removed
            places = engine_pip.places(self.pip, self.torch_index)
            hint = engine_pip.hint(done.stderr, places, f"{free} MB are free below {above}")
            if "os error 28" in done.stderr:
                shutil.rmtree(self.args.cache, ignore_errors=True)  # the services need the room
            reason = engine_pip.mask(tail(done.stderr)) or f"exit {done.returncode}"
            raise Failed(f"uv could not install:\n{reason}\n{hint}".rstrip())

    def choose_torch_index(self) -> None:
        """The index is used when the host's own places lack the locked torch (a CPU build)."""
        index = self.args.torch_index
        flags = engine_pip.uv_flags(self.pip)
        with open(self.args.lock, encoding="utf-8") as lock:
            pins = [line.split()[0] for line in lock if line.startswith("torch==")]
        if not pins or not index or flags:
            return
        dry = ["pip", "install", "--dry-run", "--no-deps", "--python", self.env, pins[0]]
        if self.uv(dry, None).returncode != 0:
            self.torch_index = index
            where = engine_pip.mask(index)
            say(f"torch: from {where} (the host's pip configuration does not offer it)")

    def packages(self) -> None:
        for link in engine_pip.find_links(self.pip)[1]:
            say(f"pip's find-links {engine_pip.mask(link)} is not there: passed over")
        self.choose_torch_index()
        say(f"installing {os.path.basename(self.args.lock)}")
        stop = threading.Event()
        grows = (self.args.cache, self.env)
        watcher = threading.Thread(target=watch, args=(grows, stop), daemon=True)
        watcher.start()
        try:
            if self.args.program_source:
                self.own_program()
            elif self.args.package:
                self.built_program()
            else:
                self.from_lock(self.args.lock, "--no-build")
        finally:
            stop.set()
            watcher.join()
        # umask of whoever runs this may be strict: the service's user must be able to read it all
        subprocess.run(["chmod", "-R", "go+rX,go-w", self.env], check=True)

    def from_lock(self, lock: str, *words: str, more: dict[str, str] | None = None) -> None:
        install = ["pip", "install", "--python", self.env, "--no-deps", "--require-hashes"]
        self.run_uv([*install, *words, *engine_pip.uv_flags(self.pip), "-r", lock], more)

    def own_program(self) -> None:
        try:
            engine_program.bring(self.env, self.args.program, self.args.program_source)
        except engine_program.NoProgram as error:
            raise Failed(str(error)) from error

    def built_program(self) -> None:
        """What builds it is installed first, all wheels; then it is built with just these."""
        package, program = self.args.package, self.args.program
        with open(self.args.lock, encoding="utf-8") as handle:
            text = handle.read()
        more = engine_program.build_variables(json.loads(self.args.build_env))
        try:
            wheels, built = engine_program.split(text, package)
            with tempfile.TemporaryDirectory() as scratch:
                parts = [os.path.join(scratch, name) for name in ("wheels.txt", "built.txt")]
                for path, part in zip(parts, (wheels, built)):  # noqa: B905 (Python 3.9)
                    with open(path, "w", encoding="utf-8") as handle:
                        handle.write(part)
                self.from_lock(parts[0], "--no-build")
                say(f"building {program}, with {more['LLAMA_CPP_BUILD_JOBS']} compilers at a time")
                self.from_lock(parts[1], "--no-build-isolation", "--no-binary", package, more=more)
            engine_program.link(self.env, program, os.path.join(self.env, "lib"))
            remove(self.args.cache)  # sources and objects, three times what stays
        except engine_program.NoProgram as error:
            raise Failed(str(error)) from error

    def abi_check(self) -> list[dict[str, str]]:
        """The proof, with the identity and the environment that the services will have."""
        say(f"ABI check, as user {self.args.user}")
        argv = [os.path.join(self.env, "bin", "python"), self.args.abi_script]
        cuda = self.args.cuda
        argv += ["--accelerator", "cpu"] if cuda is None else ["--accelerator", "cuda"]
        argv += [] if cuda is None else ["--cuda", str(cuda), "--gpus", self.args.gpus]
        try:
            with open(self.args.service_env, encoding="utf-8") as handle:
                env = json.load(handle)
            done = bounded.run(
                with_parent(argv, self.args.user), ABI_LIMIT_S, tail=True,
                env=env, cwd=env.get("HOME", "/"),
            )  # fmt: skip
        except bounded.TooMuch as error:
            raise Failed(f"the ABI check: {error}") from error
        try:
            result = json.loads(done.out.strip().splitlines()[-1])
            checks: list[dict[str, str]] = result["checks"]
            for check in checks:
                say(f"  {check['state']:<14} {check['name']:<22} {check['detail']}")
            failed = [check["name"] for check in checks if check["state"] == "failed"]
            ok = result["ok"] is True and done.code == 0 and bool(checks)
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Failed(f"the ABI check gave no result{_said(done)}") from None
        if failed:
            raise Failed(f"the ABI check failed: {', '.join(failed)} (see above)")
        if not ok:
            raise Failed(f"the ABI check proves nothing{_said(done)}")
        return checks

    def proof(self, checks: list[dict[str, str]]) -> dict[str, Any]:
        about = {"lock": self.args.lock_digest, "cuda": self.args.cuda, "driver": gpu_driver()}
        return {**about, "abi": checks}

    def prove_again(self) -> None:
        """The driver is another one than the environment was proven with; nothing is built."""
        say("another driver than this environment was proven with: it is proven again")
        marker = read_marker(self.env) or {}
        write_marker(self.env, {**marker, **self.proof(self.abi_check())})

    def run(self) -> None:
        began = time.monotonic()
        self.make_room()
        step_done("wiped")
        self.run_uv(["venv", "--python", self.args.python, self.env])
        step_done("venv")
        self.packages()
        step_done("packages")
        checks = self.abi_check()
        step_done("abi")
        marker = {**self.proof(checks), **tree_manifest(self.env)}
        write_marker(self.env, marker)
        step_done("marker")
        remove(damaged(self.env))
        say(f"built in {time.monotonic() - began:.0f} s, {marker['bytes'] >> 20} MB on disk")


# The commands


def install(args: argparse.Namespace) -> None:
    args.env = os.path.abspath(args.env)
    if has_marker(args.env):
        remove(damaged(args.env))  # a run was killed before it could
    state = is_complete(args.env)
    if state["complete"]:
        if not state["proven"]:
            Build(args).prove_again()
        say("complete already: " + args.env)
        return
    build = Build(args)
    try:
        build.run()
    except BaseException:
        build.undo()
        raise


def switch(args: argparse.Namespace) -> None:
    state = is_complete(args.env)
    if not state["complete"]:
        raise Failed(f"{args.env} is {state['why']}: not switched")
    if os.path.lexists(args.current) and not os.path.islink(args.current):
        raise Failed(f"{args.current} is no symlink: move it away, kvhost does not remove it")
    temporary = args.current + ".new"
    remove(temporary)
    os.symlink(args.env, temporary)
    os.replace(temporary, args.current)
    step_done("switch")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    build.add_argument("--cuda", type=int, help="major version of CUDA that the lock is for")
    build.add_argument("--gpus", default="", help="compute capability of each GPU: 8.9,8.9")
    build.add_argument("--bundle", help="install from this directory alone (bundle_check.py)")
    build.add_argument("--torch-index", help="where torch is if the host's places lack it")
    build.add_argument("--program", help="name of the runner's program, of an engine that has one")
    build.add_argument("--program-source", help="PATH_OR_URL#sha256=HEX of the user's own")
    build.add_argument("--package", help="package of the lock whose source is built for it")
    build.add_argument("--build-env", default="{}", help="JSON: variables of that build")
    look = commands.add_parser("status", help="JSON: complete or why not")
    look.add_argument("--env", required=True)
    move = commands.add_parser("switch", help="make an environment the current one")
    move.add_argument("--env", required=True)
    move.add_argument("--current", required=True)
    args = parser.parse_args()
    try:
        if args.command == "install":
            install(args)
        elif args.command == "switch":
            switch(args)
        else:
            print(json.dumps(is_complete(args.env)))
    except (Failed, OSError, ValueError, subprocess.CalledProcessError) as error:
        say(f"engine: {error}\nThe current environment is as it was.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
