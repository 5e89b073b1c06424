"""vLLM's own tiers, without an engine: engine_tiering.py DIRECTORY ROOM CHUNKS. Run by its Python.

A request whose prompt has CHUNKS chunks, all of them in files below DIRECTORY, is looked up as
vLLM's scheduler does it (OffloadingConnectorScheduler._maximal_prefix_lookup, 0.32.0) until it is
known how many may be loaded; the memory has room for ROOM chunks. Prints that number as JSON; null:
still not known after 5 s.
"""

# vLLM is not there where types are checked
# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path

from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

BYTES = 4096


def manager(folder: str, room: int) -> tuple[TieringOffloadingManager, FileSystemTierManager]:
    told = config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(128, ("layer",), 0),),
        worker_kv_bytes_per_block=BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=f"test-{os.getpid()}",
        model=config.OffloadingModelConfig("m", "float32"),
        cache=config.OffloadingCacheConfig(128, 1),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    events = types.SimpleNamespace(enable_kv_cache_events=False)
    spec = types.SimpleNamespace(config=told, blocks_per_chunk=1, kv_events_config=events)
    region = SharedOffloadRegion(told.engine_id, room, None, BYTES, BYTES)
    Path(region.mmap_path).unlink()  # it stays mapped
    region._creator = False
    memory = CPUPrimaryTierOffloadingManager(room, region)
    files = FileSystemTierManager(spec, memory.get_kv_memoryview(), "fs", folder)
    return TieringOffloadingManager(memory, [files]), files


def looked_up(tiers: TieringOffloadingManager, keys: list[bytes], req: ReqContext) -> int | None:
    found, later = 0, False
    for key in keys:
        result = tiers.lookup(key, req)
        if result is LookupResult.MISS:
            break
        later = later or result is not LookupResult.HIT
        found += result is not LookupResult.RETRY
    return None if later else found


def main() -> None:
    folder, room, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tiers, files = manager(folder, room)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(chunks)]
    for key in keys:
        path = Path(files.file_mapper.get_file_name(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * BYTES)
    request, deadline, found = ReqContext(req_id="one"), time.monotonic() + 5, None
    tiers.on_new_request(request)
    while found is None and time.monotonic() < deadline:
        found = looked_up(tiers, keys, request)
        tiers.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))
        time.sleep(0.005)
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads are no business of this


if __name__ == "__main__":
    main()
