"""LMCacheMPConnector as vLLM loads it (kv_connector_module_path), with one repair; on a host only.

With LMCache 0.5.6 on a CPU the engine asks the cache server for room before each store, in the
middle of a forward pass. A server that does not answer within lmcache.mp.mq_timeout (killed, or its
drive stands still) raises TimeoutError there, and the whole engine ends with every request in it.
Here that store is left out instead: the KV of those tokens is computed again some day. On a GPU
nothing waits there, and this changes nothing.
"""

# neither is there where types are checked
# mypy: disable-error-code="import-not-found,misc,no-any-return"
from __future__ import annotations

import logging
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

__all__ = ["LMCacheMPConnector"]
logger = logging.getLogger("vllm.kvhost")
_prepare = EngineDrivenContextShm.prepare_store


def prepare_store(self: Any, key: Any, instance_id: int) -> Any:
    try:
        return _prepare(self, key, instance_id)
    except TimeoutError as error:
        logger.warning("kvhost: not stored, the cache server does not answer: %s", error)
        return [], []  # what LMCache itself answers when there is nothing to store


EngineDrivenContextShm.prepare_store = prepare_store
