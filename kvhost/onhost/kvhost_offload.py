"""vLLM's own tiering on a CPU, as vLLM loads it (spec_module_path); on a host only.

TieringOffloadingSpec of vLLM 0.32.0 ends with "only supported on CUDA-alike and XPU GPUs" before it
has looked at anything: what is missing on a CPU is only the copying between the KV blocks and the
memory that its tiers read and write, which it gives to a GPU's copy engine. Here it is copied at
once, in the calling thread. Scheduler, tiers, keys, files and counters are vLLM's own. On a GPU
kvhost names vLLM's own class, and this module is not loaded.
"""

# vLLM is not there where types are checked
# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["KvhostTieringSpec"]


class HostWorker(OffloadingWorker):
    """Copies whole blocks of KV to and from the region that the tiers share, and back."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self.per_chunk, self.region, self.groups = blocks_per_chunk, region, []
        self.done: list[TransferResult] = []
        blocks = [one.tensor.view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        pages = [one.page_size_bytes for one in kv_caches.tensors]
        chunks = [region.create_next_worker_view(page * blocks_per_chunk) for page in pages]
        for refs in kv_caches.group_data_refs:
            # of each layer: its blocks, its chunks, a block's place in a chunk, the bytes in use
            self.groups.append(
                [(blocks[r.tensor_idx], chunks[r.tensor_idx], pages[r.tensor_idx], r) for r in refs]
            )

    def pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[Any, Any]]:
        """(bytes of a block, their place in its chunk). ``blocks`` tells of each group its blocks
        in order, and how many blocks of the request lie before them: the first may stand in the
        middle of a chunk."""
        block_ids, chunk_ids = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        first_chunk = 0
        for group, count, index in zip(
            self.groups, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            skipped = index % self.per_chunk
            for place, block in enumerate(block_ids[:count], skipped):
                chunk = chunk_ids[first_chunk + place // self.per_chunk]
                for kv, stored, page, ref in group:
                    begin, size = place % self.per_chunk * page, ref.page_size_bytes
                    yield kv[block, :size], stored[chunk, begin : begin + size]
            block_ids = block_ids[count:]
            first_chunk += -(-(skipped + count) // self.per_chunk) if count else 0

    def copied(self, job_id: int, pairs: Iterator[tuple[Any, Any]], *, load: bool) -> bool:
        began, size = time.monotonic(), 0
        for block, stored in pairs:
            (block if load else stored).copy_(stored if load else block)
            size += block.numel()
        seconds = time.monotonic() - began
        self.done.append(TransferResult(job_id, True, size, seconds))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copied(job_id, self.pairs(src_spec, dst_spec), load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copied(job_id, self.pairs(dst_spec, src_spec), load=True)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self.groups.clear()  # else the mapping cannot be closed
        self.region.cleanup()


class KvhostTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec whose worker needs no GPU."""

    _worker: Any  # vLLM's own, made at the first call

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        if self.config.canonical_layout or self.replicated_layout:
            raise ValueError("canonical_layout and MLA over several ranks need a GPU")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return HostWorker(kv_caches, self.blocks_per_chunk, region)
        except Exception:
            region.cleanup()
            raise
