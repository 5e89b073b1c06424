#!/usr/bin/env python3
"""LMCache's storage of one host, without a server and an engine: shared_storage.py ADAPTERS VERB.

ADAPTERS: JSON list of --l2-adapter. VERB: write (8 chunks, until all adapters have them), read
(the same chunks, into an empty L1) or longer (these, and four that nobody has). Prints JSON: hits,
how many of them came from L2, whether every byte is right, and what the shared tier says of itself.
Run by the engine's Python.
"""

# neither LMCache nor torch is there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

COUNT, FLOATS = 8, 1 << 18
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([FLOATS])], dtypes=[torch.float32])


def content(number: int) -> Any:
    return torch.arange(FLOATS, dtype=torch.float32) + number


def shared(storage: Any) -> dict[str, Any]:
    rows = storage.report_status()["l2_adapters"]
    return dict(next(row["shared"] for row in rows if row["type"] == "kvhost_shared"))


def main() -> None:
    adapters, verb, model = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    words = ["--l1-size-gb", "0.1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
    for one in adapters:
        words += ["--l2-adapter", json.dumps(one)]
    storage = StorageManager(parse_args_to_config(parser.parse_args(words)))
    keys = [
        ObjectKey(chunk_hash=ObjectKey.IntHash2Bytes(n + 1), model_name=model, kv_rank=256)
        for n in range(COUNT + (4 if verb == "longer" else 0))
    ]
    told: dict[str, Any] = {}
    if verb == "write":
        places = storage.reserve_write(keys, LAYOUT)
        for number, key in enumerate(keys):
            places[key].tensor.copy_(content(number))
        storage.finish_write(keys)
        deadline = time.monotonic() + 20
        while shared(storage)["stored"] < COUNT and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        handle = storage.submit_prefetch_task(spec)
        storage.wait_prefetch_status(handle, 20)
        found = storage.query_prefetch_status(handle)
        told["hits"] = sum(row.popcount() for row in found.hit_cells)
        told["from_l2"] = sum(row.popcount() for row in found.l2_hit_cells)
        if told["hits"]:
            with storage.read_prefetched_results(keys[:COUNT]) as objects:
                told["same"] = all(
                    torch.equal(one.tensor.reshape(-1), content(number))
                    for number, one in enumerate(objects)
                )
    print("\n" + json.dumps({**told, "shared": shared(storage)}), flush=True)
    storage.close()
    os._exit(0)  # threads of LMCache that end when it likes


if __name__ == "__main__":
    main()
