#!/usr/bin/env python3
"""Takes kvhost away from a host: services, units, programs, configuration, keys, its user.

uninstall.py --base DIR --tier DIR --user U [--caches] [--models] [--check]

What the receipt lists goes, with the directories that are kvhost's alone; what is not known stays
and is named. The cache and the models stay unless asked for, packages and mounts always. The
receipt goes last, so that a run which was killed is completed by the next; done a second time it
changes nothing. The services are stopped before anything is removed. --check changes nothing and
says what would go; JSON. Started as root. Exit: 0 done, 1 not (why, stderr).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import stat
import subprocess
import sys
from typing import Any

#: directories that are kvhost's alone
TREES = ("envs", "tools", "uv-cache", "wheels", "bundle", "locks", "home", "log", "run")
#: directories in which others may have put files: only what is known goes
MIXED = ("lib", "etc", "bin", "secrets")
SERVICES = ("cache", "runner", "slots", "pruner")
KNOWN = {
    "etc": (
        *("service-env.json", "vllm.yaml", "supervisord.conf", "model-digest", "ollama.conf"),
        "shared-ca.pem",
        *(f"{name}.json" for name in SERVICES),
        *(f"kvhost-{name}.service" for name in SERVICES),
    ),
    "secrets": ("api-key", "hf-token", "shared-password"),
}
#: of further runners: description, unit, configuration
FURTHER = re.compile(r"runner-\w+\.json|kvhost-runner-\w+\.service|vllm-\w+\.yaml")
NAMESPACE = re.compile(r"^ns-[0-9a-f]+$")
GUARD = "run.lock.guard"
#: onhost/metrics.py as systemd runs it (kvhost/services/monitoring.py)
METRICS = "/etc/systemd/system/kvhost-metrics.service"
#: beside a unit of somebody else's, which ollama_unit.py takes it from
DROP_IN = "/etc/systemd/system/ollama.service.d/kvhost.conf"
STORE = "/etc/kvhost-store/store.conf"  # of shared_store.py
DRIVE = "drive.json"  # of a claimed drive (drive_apply.py)
Data = dict[str, Any]


class Trouble(Exception):
    """What went wrong, for people."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def mounts() -> list[str]:
    """Mount points, as mountinfo writes them (proc_pid_mountinfo(5))."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        fields = [line.split()[4] for line in handle]
    return [re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), field) for field in fields]


def size(path: str, counted: set[tuple[int, int]]) -> int:
    """Bytes on disk. ``counted``: files seen so far, as uv's cache and the environments share
    theirs by hard links; a symlink counts for itself."""
    if os.path.islink(path) or not os.path.isdir(path):
        return os.lstat(path).st_blocks * 512
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(folder, name))
                if (found.st_dev, found.st_ino) not in counted:
                    counted.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total


def remove_tree(path: str) -> None:
    """Whatever it is; links are not followed, and nothing on another mount is touched."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    held = [m for m in mounts() if m == path or m.startswith(path + "/")]
    for folder, folders, names, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        if any(folder == m or folder.startswith(m + "/") for m in held):
            continue
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        for name in folders:
            inner = os.path.join(folder, name)
            if any(m == inner or m.startswith(inner + "/") for m in held):
                continue
            linked = stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
            (os.unlink if linked else os.rmdir)(name, dir_fd=fd)
    if not held:
        os.rmdir(path)


class Host:
    """One installation. Methods raise OSError, ValueError, Trouble."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base: str = args.base.rstrip("/")
        self.receipt = self.read("state/receipt.json")

    def path(self, *parts: str) -> str:
        return os.path.join(self.base, *parts)

    def read(self, name: str) -> Data:
        try:
            with open(self.path(name), encoding="utf-8") as handle:
                loaded = json.load(handle)
        except FileNotFoundError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def listed(self) -> set[str]:
        """Paths that the receipt names."""
        return {*self.receipt.get("files", {}), *self.receipt.get("scripts", {})}

    def outside(self) -> list[str]:
        """Of these what lies elsewhere on the host: units. And what no receipt names: the collector
        of figures, with the file that it writes."""
        found = {p for p in self.listed() if not p.startswith(self.base + "/") and there(p)}
        unit = text_of(METRICS) if self.mine(text_of(METRICS)) else ""
        found |= {METRICS} if unit else set()
        found |= {DROP_IN} if self.mine(text_of(DROP_IN)) else set()
        for text in (unit, text_of(self.path("etc", "supervisord.conf"))):
            match = re.search(r"/metrics\.py .*--out (/[\w/.+-]+)", text)
            if match and self.mine(text_of(file := match[1] + "/kvhost.prom")):
                found.add(file)
        return sorted(found)

    def mine(self, text: str) -> bool:
        return text.startswith(f"# Written by kvhost for {self.base}.")

    def known(self, folder: str) -> list[str]:
        """Files of a mixed directory that are kvhost's."""
        names = sorted(os.listdir(self.path(folder))) if there(self.path(folder)) else []
        here = self.path(folder)
        ours = {os.path.basename(p) for p in self.listed() if os.path.dirname(p) == here}
        ours |= set(KNOWN.get(folder, ()))
        ours |= {name for name in names if folder == "etc" and FURTHER.fullmatch(name)}
        if folder in ("bin", "lib"):  # before the first receipt all programs there are kvhost's
            ours |= {n for n in names if n == "__pycache__" or (not ours and n.endswith(".py"))}
            # a newer version's, which release or storage brought without a receipt
            ours |= set(self.args.scripts.split(","))
        return [self.path(folder, n) for n in names if n in ours]

    def to_remove(self) -> list[str]:
        found = self.outside()
        found += [self.path(n) for n in ("current", "current.new", *TREES) if there(self.path(n))]
        for folder in MIXED:
            whole = there(self.path(folder)) and not self.strangers(folder)
            found += [self.path(folder)] if whole else self.known(folder)
        if self.args.caches:
            found += self.caches()
        if self.args.models and there(self.path("models")):
            found.append(self.path("models"))
        stay = self.state_that_stays()
        return [
            *found,
            *(self.path("state", n) for n in listdir(self.path("state")) if n not in stay),
        ]

    def state_that_stays(self) -> set[str]:
        """The lock that is held now; and while a drive is claimed, what its release needs."""
        held = there(self.path("state", DRIVE))
        names = listdir(self.path("state")) if held else []
        drive = {n for n in names if n.startswith(("drive.", "drive-"))}  # not the GPU driver's
        return {GUARD, "run.lock", *drive}

    def strangers(self, folder: str) -> list[str]:
        known = set(self.known(folder))
        return [p for n in listdir(self.path(folder)) if (p := self.path(folder, n)) not in known]

    def caches(self) -> list[str]:
        tier = self.args.tier
        names = [n for n in listdir(tier) if NAMESPACE.match(n) or n.startswith(".kvhost")]
        names = [n for n in names if n != ".kvhost-drive.json"]  # of the drive, not of the cache
        return [os.path.join(tier, n) for n in names]

    def user(self) -> bool:
        """Whether the service's user is kvhost's own, and nothing that stays belongs to it."""
        return is_account(self.args.user) and self.user_stays() is None

    def user_stays(self) -> str | None:
        """Why the service's user, which is there, stays; None when it goes."""
        account = pwd.getpwnam(self.args.user)
        if account.pw_dir != self.path("home") or not account.pw_shell.endswith("nologin"):
            return f"not made for {self.base}, by its home or shell"
        keeps = ["the cache"] if self.caches() and not self.args.caches else []
        keeps += ["the models"] if there(self.path("models")) and not self.args.models else []
        if not keeps:
            return None
        return f"it owns {' and '.join(keeps)} here"

    def stays(self) -> list[str]:
        """What is left, for people."""
        found = [f"{p}, not known to kvhost" for f in MIXED for p in self.strangers(f)]
        own = {*TREES, *MIXED, "current", "current.new", "models", "state"}
        for name in listdir(self.base):
            path = self.path(name)
            if name not in own and not f"{self.args.tier}/".startswith(f"{path}/"):
                found.append(f"{path}, not known to kvhost")
        if self.caches() and not self.args.caches:
            found.append(f"the cache in {self.args.tier} (remove_cache)")
        if there(self.path("models")) and not self.args.models:
            found.append(f"models in {self.path('models')} (remove_models)")
        top = (self.base + "/", self.args.tier.rstrip("/") + "/")
        found += [f"the mount {m}" for m in mounts() if f"{m}/".startswith(top)]
        if there(self.path("state", DRIVE)):
            found.append("the drive that is claimed: give it back by release.py, before this")
        if self.mine(text_of(STORE)):
            found.append("the store of the shared tier: kvhost shared --remove, before this")
        with contextlib.suppress(FileNotFoundError), open(self.path("state", "packages")) as lines:
            packages = sorted(set(lines.read().split()))
            found += [f"packages that kvhost installed: {', '.join(packages)}"] if packages else []
        why = self.user_stays() if is_account(self.args.user) else None
        if why is not None:
            found.append(f"the user {self.args.user}: {why}")
        return found

    # doing it

    def stop(self) -> None:
        script = self.path("bin", "services.py")
        if there(script) and is_account(self.args.user):
            argv = [sys.executable, script, "--base", self.base, "--user", self.args.user]
            for verb in ("uninstall", "shutdown"):  # the first takes systemd's units away too
                done = subprocess.run([*argv, verb], check=False, stdout=sys.stderr)
                if done.returncode != 2:  # argparse: a services.py that does not know it
                    break
            if done.returncode != 0:
                raise Trouble("the services could not be stopped: nothing was removed")
        self.give_back_ollama()
        units = [p for p in self.outside() if p.startswith("/etc/systemd/system/")]
        names = [os.path.basename(p) for p in units if "." in os.path.basename(p)]
        if names:
            subprocess.run(["systemctl", "disable", "--now", *names], check=False)
        running = self.processes()
        if running:
            raise Trouble(f"process {running[0]} still runs from {self.base}: nothing was removed")
        sweeper = self.path("bin", "shm_sweep.py")
        if there(sweeper) and is_account(self.args.user):
            pool = "lmcache_l1_pool_kvhost" + self.base.replace("/", "-")
            ids = ["--reuid", self.args.user, "--regid", self.args.user, "--init-groups"]
            argv = [sys.executable, sweeper, pool, "lmcache_kv_*", "psm_*", "sem.mp-*"]
            subprocess.run(["setpriv", *ids, *argv], check=False, stdout=sys.stderr)

    def give_back_ollama(self) -> None:
        """The drop-in goes, and the unit, which is somebody else's, runs as it was."""
        script = self.path("bin", "ollama_unit.py")
        if self.mine(text_of(DROP_IN)) and there(script):
            argv = [sys.executable, script, "remove", "--base", self.base]
            if subprocess.run(argv, check=False, stdout=sys.stderr).returncode != 0:
                raise Trouble("ollama.service could not be given back: nothing was removed")

    def processes(self) -> list[int]:
        """Processes that were started from below base_dir."""
        inside, found = os.fsencode(self.base + "/"), []
        for name in listdir("/proc"):
            with contextlib.suppress(OSError):
                if not name.isdigit() or int(name) == os.getpid():
                    continue
                with open(f"/proc/{name}/cmdline", "rb") as handle:
                    words = handle.read().split(b"\0")[:2]
                ours = any(word.startswith(inside) for word in words)
                # one of a container on this host means another directory by the same path
                if ours and os.path.samefile(f"/proc/{name}/root", "/"):
                    found.append(int(name))
        return found

    def uid_in_use(self) -> bool:
        uid = pwd.getpwnam(self.args.user).pw_uid
        for name in (n for n in listdir("/proc") if n.isdigit()):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    return True
        return False

    def remove(self) -> None:
        paths, outside, user = self.to_remove(), self.outside(), self.user()
        self.stop()
        receipt = self.path("state", "receipt.json")
        for path in paths:
            if path != receipt and not path.startswith(self.path("state") + "/"):
                remove_tree(path)
                step_done(path)
        if any(p.startswith("/etc/systemd/") for p in outside):
            subprocess.run(["systemctl", "daemon-reload"], check=False)
        if self.args.caches and self.args.tier not in mounts():
            with contextlib.suppress(OSError):  # something of others is in it
                os.rmdir(self.args.tier)
        if user and self.uid_in_use():
            say(f"the user {self.args.user} stays: processes run as it that are not kvhost's")
        elif user:
            subprocess.run(["userdel", self.args.user], check=True, stdout=sys.stderr)
        for path in paths:  # what tells a later run that this one was not complete: last
            if path != receipt and path.startswith(self.path("state") + "/"):
                remove_tree(path)
                step_done(path)
        if there(receipt):
            os.unlink(receipt)
        self.leave()

    def leave(self) -> None:
        """base_dir itself goes if nothing is left in it; else the guard says whose it is."""
        left = [n for n in listdir(self.base) if n not in ("state", "lost+found")]
        left += [n for n in listdir(self.path("state")) if n not in (GUARD, "run.lock")]
        if left or self.base in mounts():
            return
        for name in (GUARD, "run.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path("state", name))
        for path in (self.path("state"), self.base):
            with contextlib.suppress(OSError):
                os.rmdir(path)


def step_done(path: str) -> None:
    """Tests stop the run dead after a path: KVHOST_TEST_DIE_AFTER=uninstall:NAME."""
    if os.environ.get("KVHOST_TEST_DIE_AFTER") == "uninstall:" + os.path.basename(path):
        os.kill(os.getpid(), 9)


def text_of(path: str) -> str:
    """What lies there; nothing where that is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="utf-8", errors="replace") as handle:
            return handle.read(1 << 20)
    except (FileNotFoundError, IsADirectoryError):
        return ""


def there(path: str) -> bool:
    return os.path.lexists(path)


def listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="kvhost's directory")
    parser.add_argument("--tier", required=True, help="directory of the KV cache")
    parser.add_argument("--user", required=True, help="the service's user")
    parser.add_argument("--caches", action="store_true", help="the KV cache too")
    parser.add_argument("--models", action="store_true", help="the models too")
    parser.add_argument("--scripts", default="", help="names of kvhost's programs, by commas")
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    try:
        host = Host(args)
        paths = host.to_remove()
        counted: set[tuple[int, int]] = set()
        answer: Data = {
            "remove": [{"path": path, "bytes": size(path, counted)} for path in paths],
            "user": host.user(),
            "stays": host.stays(),
        }
        if not args.check and (paths or answer["user"]):
            host.remove()
    except (Trouble, OSError, ValueError, subprocess.CalledProcessError) as error:
        say(f"uninstall: {error}")
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
