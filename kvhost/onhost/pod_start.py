#!/usr/bin/env python3
"""Brings back what a rented container lost when it was stopped, from its volume: the start hook.

pod_start.py --base /workspace/kvhost [--user kvhost]

Makes the service's user again, with the uid that owns the files on the volume; installs the Debian
packages that kvhost had installed; starts the services and returns once they answer. What is there
already is left as it is. Prints {"user", "packages", "services"} as JSON, progress on stderr.
Exit: 0 all runs, 1 not, and why on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import subprocess
import sys

#: Debian gives people uids from here on; a service's is below
FIRST_LOGIN_UID = 1000


class Trouble(Exception):
    """Why the services cannot be brought back, for people."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(*argv: str) -> None:
    """Its output goes to stderr. Raises Trouble."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
    if done.returncode:
        raise Trouble(f"{' '.join(argv[:3])} failed ({done.returncode}), see above")


def bring_user(base: str, user: str) -> bool:
    """Whether the account had to be made. Raises Trouble where files and account do not fit."""
    home = os.path.join(base, "home")
    try:
        owner = os.stat(home)
    except OSError as error:
        raise Trouble(f"{home}: {error.strerror}: is the volume mounted?") from None
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        account = None
    if account is not None:
        if account.pw_uid != owner.st_uid:
            raise Trouble(
                f"{user} has uid {account.pw_uid} here, and the files below {base} belong to uid "
                f"{owner.st_uid}: another image? chown -R the tier, home, log and run, or use the "
                "image that they were made with"
            )
        return False
    if not 0 < owner.st_uid < FIRST_LOGIN_UID:
        raise Trouble(f"{home} belongs to uid {owner.st_uid}, which is no service's")
    gid = str(owner.st_gid)
    if subprocess.run(["getent", "group", gid], stdout=subprocess.DEVNULL, check=False).returncode:
        run("groupadd", "--system", "--gid", gid, user)
    run("useradd", "--system", "--uid", str(owner.st_uid), "--gid", gid, "--home-dir", home,
        "--no-create-home", "--shell", "/usr/sbin/nologin", user)  # fmt: skip
    return True


def bring_packages(base: str) -> list[str]:
    """Names of what had to be installed. Raises Trouble."""
    try:
        with open(os.path.join(base, "state", "packages"), encoding="utf-8") as handle:
            noted = sorted(set(handle.read().split()))
    except FileNotFoundError:
        return []  # kvhost never had to install one
    missing = []
    for name in noted:
        asked = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status}", name],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if asked.stdout.strip() != b"installed":
            missing.append(name)
    if missing:
        say(f"installing {', '.join(missing)}")
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "-q", "update")
        run("apt-get", "-q", "install", "-y", "--no-install-recommends", *missing)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="kvhost's directory on the volume")
    parser.add_argument("--user", default="kvhost", help="the service's user (service_user)")
    args = parser.parse_args()
    told: dict[str, object] = {}
    try:
        if os.geteuid() != 0:
            raise Trouble("this must be started as root")
        told["user"] = "made" if bring_user(args.base, args.user) else "there"
        told["packages"] = bring_packages(args.base)
        services = os.path.join(args.base, "bin", "services.py")
        run(sys.executable, services, "--base", args.base, "--user", args.user, "ensure")
        told["services"] = "running"
    except (Trouble, OSError) as error:
        say(f"pod_start: {error}")
        return 1
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
