#!/usr/bin/env python3
"""Keeps what last passed, goes back to it, and clears away what is used no more.

generations.py status --base DIR                 what is kept, what failed; JSON
generations.py settle --base DIR [--resolved F]  after a PASS: records it, clears away the rest
       --record-only                             clears nothing away
       --check                                   only says what it would do; JSON
generations.py back   --base DIR --user U --why TEXT --lock D --settings D [-- READY …]
                                                 the environment, the configuration and with it the
                                                 namespace that passed last; READY must exit 0

A generation is an environment with the rendered files, the receipt and the verdict that belong to
it: state/good is the last that passed, state/previous the one before, state/failed.json names what
was gone back from. Kept are the environments of these and the one in use; nothing is cleared away
before anything has passed. Secrets are no part of a generation. Exit: 0 done, 1 not (why, stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import engine, engine_whole
    from kvhost.onhost.kept import kept
    from kvhost.onhost.service_names import OPTIONAL
else:  # they lie beside this file on a host, where there is no package kvhost
    import engine
    import engine_whole
    from kept import kept
    from service_names import OPTIONAL

READY_LIMIT_S = 1200
Data = dict[str, Any]


class Trouble(Exception):
    """What went wrong, for people."""


def read_json(path: str) -> Data | None:
    """None without it. Raises OSError; ValueError for what is no JSON object."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def write(path: str, text: str) -> None:
    """Whole or not at all, 0644."""
    with open(path + ".new", "w", encoding="utf-8") as handle:
        os.fchmod(handle.fileno(), 0o644)
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(path + ".new", path)


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def receipt_digest(receipt: Data) -> str:
    """The same as the controller's, which writes it into verified.json."""
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()


class Host:
    """One installation. Methods raise Trouble, OSError or ValueError."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.current = self.path("current")

    def path(self, *parts: str) -> str:
        return os.path.join(self.base, *parts)

    def state(self, *parts: str) -> str:
        return self.path("state", *parts)

    def link(self) -> str | None:
        return os.readlink(self.current) if os.path.islink(self.current) else None

    def manifest(self, name: str) -> Data | None:
        return read_json(self.state(name, "manifest.json"))

    def failed(self) -> Data | None:
        return read_json(self.state("failed.json"))

    # recording

    def passed(self) -> Data | None:
        """The receipt, if the last verdict is PASS and was given for it and for what is here."""
        receipt, verified = read_json(self.state("receipt.json")), None
        if receipt is not None:
            verified = read_json(self.state("verified.json"))
        if receipt is None or verified is None or verified.get("persisted") != "PASS":
            return None
        link = self.link() or ""
        named = os.path.basename(link) == str(receipt["engine"]["digest"])[:16]
        same = verified.get("receipt") == receipt_digest(receipt)
        return receipt if same and named else None

    def to_record(self) -> Data | None:
        """The receipt that passed and is not the last good one yet."""
        receipt, good = self.passed(), self.manifest("good")
        if receipt is None or (good and good.get("receipt") == receipt_digest(receipt)):
            return None
        return receipt

    def record(self, receipt: Data, resolved: str | None) -> None:
        new, link = self.state("good.new"), self.link()
        engine.remove(new)
        os.makedirs(os.path.join(new, "files"), 0o755)
        files = {}
        for number, (path, digest) in enumerate(sorted(receipt["files"].items())):
            text = read_text(path)
            if hashlib.sha256(text.encode()).hexdigest() != digest:
                raise Trouble(f"{path} is not what the receipt says: nothing was recorded")
            files[path] = str(number)
            write(os.path.join(new, "files", str(number)), text)
        for name in ("receipt.json", "verified.json"):
            write(os.path.join(new, name), read_text(self.state(name)))
        manifest = {
            "schema": 1,
            "env": link,
            "receipt": receipt_digest(receipt),
            "versions": receipt["engine"].get("versions"),
            "time": read_text_time(self.state("verified.json")),
            "files": files,
            "resolved": resolved,
        }
        write(os.path.join(new, "manifest.json"), json.dumps(manifest, indent=1) + "\n")
        good = self.manifest("good")
        if good and good.get("env") != link:
            engine.remove(self.state("previous"))
            os.rename(self.state("good"), self.state("previous"))
            engine.remove(self.state("failed.json"))  # there is a newer one that passed
        engine.remove(self.state("good"))
        os.rename(new, self.state("good"))

    # clearing away

    def unused(self, wanted_resolved: str | None, link: str | None) -> list[str]:
        """Paths that no generation needs; none before a first PASS is recorded."""
        good, previous = self.manifest("good"), self.manifest("previous")
        if good is None:
            return []
        failed = self.failed()
        names = kept(good, previous, failed, current=link)
        found = [self.path("envs", n) for n in listed(self.path("envs")) if n not in names]
        tools = os.path.basename(os.readlink(self.path("tools", "current")))
        found += [
            self.path("tools", n) for n in listed(self.path("tools")) if n not in ("current", tools)
        ]
        for name in listed(self.path("locks")):
            match = re.search(r"-([0-9a-f]{16})\.txt$", name)
            if match and match.group(1) not in names:
                found.append(self.path("locks", name))
        used = {wanted_resolved, good.get("resolved"), (previous or {}).get("resolved")}
        if wanted_resolved:
            found += [
                self.state(n)
                for n in listed(self.path("state"))
                if re.fullmatch(r"resolved-[0-9a-f]+\.json", n) and self.state(n) not in used
            ]
        return [path for path in found if not in_use(path)]

    def clear(self, paths: list[str]) -> None:
        for path in paths:
            engine.say(f"removing {path}, used no more")
            if os.path.isdir(path) and not os.path.islink(path):
                # its marker first: what a run that is killed here leaves does not look whole
                engine.remove(os.path.join(path, engine_whole.MARKER))
            engine.remove(path)
        if any(os.path.dirname(path) == self.path("envs") for path in paths):
            # its files are links to those of uv's cache: only without both is the space free
            engine.remove(self.path("uv-cache"))

    # going back

    def back(self, args: argparse.Namespace) -> Data:
        good, link = self.manifest("good"), self.link()
        if good is None:
            return {"rolled_back": False, "why": "no earlier environment has passed here"}
        env, failed = str(good["env"]), self.failed()
        broken_off = bool(failed and failed.get("state") == "rolling back")
        if env == link and not broken_off:
            return {"rolled_back": False, "why": "the environment is the one that passed last"}
        whole = engine_whole.is_complete(env)
        if not whole["complete"]:
            raise Trouble(f"{env}, which passed last, is {whole['why']}: not gone back to")
        self.check_secrets(good)
        if failed is None or not broken_off:
            failed = {
                "schema": 1,
                "env": link,
                "lock": args.lock,
                "settings": args.settings,
                "why": args.why,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "back_to": env,
            }
        self.tell_failed({**failed, "state": "rolling back"})
        engine.say(f"going back to {env}, which passed last")
        engine.switch(argparse.Namespace(env=env, current=self.current))
        units = False
        for path, name in sorted(good["files"].items()):
            write(path, read_text(self.state("good", "files", name)))
            units = units or path.startswith("/etc/systemd/")
        # services that were added since: without a description services.py takes them away
        for name in listed(self.path("etc")):
            if OPTIONAL.fullmatch(name) and self.path("etc", name) not in good["files"]:
                engine.remove(self.path("etc", name))
        for name in ("receipt.json", "verified.json"):
            write(self.state(name), read_text(self.state("good", name)))
        if units:
            subprocess.run(["systemctl", "daemon-reload"], check=True)
        services = [self.path("bin", "services.py"), "--base", self.base, "--user", args.user]
        run([sys.executable, *services, "ensure"], "its services did not come up")
        if args.ready:
            run(args.ready, "it does not answer")
        self.tell_failed({**failed, "state": "rolled back"})
        return {"rolled_back": True, "env": env, "failed_env": failed["env"]}

    def tell_failed(self, data: Data) -> None:
        write(self.state("failed.json"), json.dumps(data, indent=1) + "\n")

    def check_secrets(self, good: Data) -> None:
        """The keys that the old configuration reads are there: they are no part of it."""
        for path, name in good["files"].items():
            if path.endswith(".json"):
                spec = json.loads(read_text(self.state("good", "files", name)))
                for secret in spec.get("secret_env", {}).values():
                    if not os.path.exists(secret):
                        raise Trouble(f"{secret} is needed to go back, and is not there any more")


def run(argv: list[str], failed: str) -> None:
    try:
        code = subprocess.run(argv, check=False, timeout=READY_LIMIT_S, stdout=sys.stderr)
    except subprocess.TimeoutExpired:
        raise Trouble(f"went back, but {failed} within {READY_LIMIT_S} s") from None
    if code.returncode != 0:
        raise Trouble(f"went back, but {failed} (see above)")


def read_text_time(path: str) -> str | None:
    time_ = (read_json(path) or {}).get("time")
    return None if time_ is None else str(time_)


def listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def in_use(path: str) -> bool:
    """Whether a process was started from below it, such as a supervisord of older tools."""
    inside = os.fsencode(path.rstrip("/") + "/")
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as handle:
                if inside in handle.read():
                    return True
            with open(f"/proc/{pid}/maps", "rb") as handle:
                if inside in handle.read():
                    return True
        except OSError:
            continue  # it has ended
    return False


def size_of(paths: list[str]) -> int:
    return sum(
        engine.tree_bytes(path) if os.path.isdir(path) else os.lstat(path).st_size for path in paths
    )


def settle(host: Host, args: argparse.Namespace) -> Data:
    receipt = host.to_record()
    if args.check and receipt is not None:
        return {"settled": False, "record": True, "remove": []}  # the rest follows from that
    if receipt is not None:
        host.record(receipt, args.resolved)
        engine.say(f"recorded as the last that passed: {host.link()}")
    unused = [] if args.record_only else host.unused(args.resolved, host.link())
    if not args.check:
        freed = size_of(unused)
        host.clear(unused)
        return {"settled": True, "record": receipt is not None, "remove": unused, "bytes": freed}
    return {"settled": not unused, "record": False, "remove": unused}


def status(host: Host) -> Data:
    return {
        "current": host.link(),
        "good": host.manifest("good"),
        "previous": host.manifest("previous"),
        "failed": host.failed(),
        "free_bytes": shutil.disk_usage(host.base).free,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="what is kept, and what failed")
    tidy = commands.add_parser("settle", help="record what passed, clear away the rest")
    tidy.add_argument("--check", action="store_true", help="change nothing")
    tidy.add_argument("--record-only", action="store_true", help="clear nothing away")
    tidy.add_argument("--resolved", help="the resolved configuration in use, which stays")
    back = commands.add_parser("back", help="go back to what passed last")
    for name, text in (
        ("user", "the service's user"),
        ("why", "what went wrong, for people"),
        ("lock", "digest of the lock that failed"),
        ("settings", "digest of the settings that it failed with"),
    ):
        back.add_argument("--" + name, required=True, help=text)
    back.add_argument("ready", nargs="*", help="after --: command that exits 0 once it answers")
    for command in commands.choices.values():
        command.add_argument("--base", required=True, help="kvhost's directory")
    args = parser.parse_args()
    host = Host(args.base)
    try:
        if args.command == "status":
            answer = status(host)
        elif args.command == "settle":
            answer = settle(host, args)
        else:
            answer = host.back(args)
    except (Trouble, engine.Failed, OSError, ValueError, KeyError, TypeError) as error:
        print(f"generations: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"generations: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
