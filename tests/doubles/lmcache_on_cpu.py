"""LMCacheConnectorV1 on a machine without a GPU, for tests: what copies KV is ours, the rest real.

LMCache's in-process connector has code for the KV memory of CUDA, XPU, MUSA and HPU, none for
a CPU's. This module, given to vLLM as kv_connector_module_path with its directory in PYTHONPATH,
puts a plain copy in that place; look-up, keys, hashing and the backends (`local_disk`, `fs://`)
are LMCache's own. Written for vLLM 0.32.0 and LMCache 0.5.6; not imported by the tests.
"""

from __future__ import annotations

from typing import Any

import lmcache.v1.gpu_connector as connectors
import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class CpuConnector(GPUConnectorInterface):
    """Copies chunks between vLLM's blocks and LMCache's memory objects.

    vLLM's layers on CPU are [block, head, offset, K and V of a head]; a memory object is
    [2, layer, token, hidden]. What lies where in it matters to nobody else.
    """

    def __init__(self, layers: int, hidden: int) -> None:
        self.layers, self.hidden = layers, hidden
        self.kvcaches: Any = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.layers, num_tokens, self.hidden])

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        if "kvcaches" in kwargs:
            self.kvcaches = kwargs["kvcaches"]

    def _places(self, layer: Any, slots: Any) -> tuple[Any, Any]:
        size = layer.shape[2]
        return slots // size, slots % size

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        slots = kwargs["slot_mapping"][start:end]
        for index, layer in enumerate(self.kvcaches):
            blocks, offsets = self._places(layer, slots)
            rows = layer[blocks, :, offsets].reshape(end - start, 2, self.hidden)
            memory_obj.tensor[:, index].copy_(rows.transpose(0, 1))

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        skip = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][start + skip : end]
        for index, layer in enumerate(self.kvcaches):
            blocks, offsets = self._places(layer, slots)
            rows = memory_obj.tensor[:, index, skip:].transpose(0, 1)
            heads, width = layer.shape[1], layer.shape[3]
            layer[blocks, :, offsets] = rows.reshape(len(slots), heads, width)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=False):
            self.to_gpu(one, start, end, **kwargs)


def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> CpuConnector:
    layers, _, _, heads, size = metadata.kv_shape
    return CpuConnector(layers, heads * size)


connectors.CreateGPUConnector = create


class LMCacheConnectorOnCpu(LMCacheConnectorV1):
    """vLLM's LMCacheConnectorV1, unchanged."""
