#!/usr/bin/env python3
"""Closes ports on loopback to other users: close_ports.py --ports 5555,8085 --user U

The ports ask for no password, and who opens the first runs code as U (docs/hazards.md). A table of
nftables of kvhost's own lets only root and U connect to them over loopback. Run by the unit of the
cache server before each start, so that a flushed rule set is made whole again; --remove takes the
table away. Without nft, or where the kernel does not take the rule, it says that the ports are
open, and ends well: the cache server starts all the same. Exit: 0; 1 only for a wrong call.
"""

from __future__ import annotations

import argparse
import pwd
import shutil
import subprocess
import sys

TABLE = "inet kvhost_ports"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def rules(ports: list[int], uid: int) -> str:
    """For `nft -f`: one transaction, the same result whether the table is there or not."""
    listed = ", ".join(map(str, ports))
    return (
        f"table {TABLE}\ndelete table {TABLE}\n"
        f"table {TABLE} {{\n  chain output {{\n"
        "    type filter hook output priority 0; policy accept;\n"
        f'    oifname "lo" tcp dport {{ {listed} }} meta skuid != {{ 0, {uid} }} '
        "reject with tcp reset\n  }\n}\n"
    )


def run(text: str) -> str | None:
    """Why nft did not take it; None when it did."""
    nft = shutil.which("nft", path=PATH)
    if nft is None:
        return "nft is not installed (package nftables)"
    try:
        done = subprocess.run([nft, "-f", "-"], input=text, capture_output=True, text=True,
                              timeout=20, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ports", default="", help="comma-separated")
    parser.add_argument("--user")
    parser.add_argument("--remove", action="store_true")
    args = parser.parse_args()
    if args.remove:
        why = run(f"table {TABLE}\ndelete table {TABLE}\n")
        if why:
            print(f"the table {TABLE} stays: {why}", file=sys.stderr)
        return 0
    try:
        ports, uid = [int(port) for port in args.ports.split(",")], pwd.getpwnam(args.user).pw_uid
    except (ValueError, KeyError, TypeError) as error:
        print(f"close_ports: unusable arguments: {error}", file=sys.stderr)
        return 1
    why = run(rules(ports, uid))
    if why:
        print(f"THE CACHE SERVER'S PORTS {args.ports} ARE OPEN TO ALL USERS OF THIS HOST: {why}",
              file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
