"""How long the shared tier's client takes over loopback, for each kind of store, in turns.

    python -m bench.shared_tier [--rounds N]        in the repository, with Debian's packages

128 MiB in 32 values are stored, looked up and loaded by another client, through a redis-server and
through OpenStack Swift's S3, whose disk is a directory in /var/tmp. Prints one line for each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.s3_tools import s3
from tests.store_tools import Client, redis

COUNT, BYTES = 32, 4 << 20


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    found = action()
    return time.monotonic() - began, found


def once(at: Any, namespace: str, values: dict[str, bytes]) -> str:
    a, b = (Client(at, namespace, timeout=30) for _ in range(2))
    try:
        stored, fine = timed(lambda: a.put(**values))
        looked, there = timed(lambda: b.there(*values))
        loaded, got = timed(lambda: b.get(*values, size=BYTES))
        assert fine
        assert all(there)
        assert got == list(values.values())
    finally:
        a.close()
        b.close()
    return f"stored in {stored:.2f} s, looked up in {looked:.3f} s, loaded in {loaded:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    values = {f"n{number}": os.urandom(BYTES) for number in range(COUNT)}
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        redis(Path(folder) / "redis") as one,
        s3(Path(folder) / "s3") as other,
    ):
        for number in range(rounds):
            for name, at in (("redis", one.port), ("s3", other.place())):
                print(f"{name}: {once(at, f'ns-{number}', values)}", flush=True)


if __name__ == "__main__":
    main()
