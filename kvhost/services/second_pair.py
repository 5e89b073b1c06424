"""A second cache server and runner beside the first, for the event "other" of the restart test.

The same description, model and namespace, on ports that onhost/evidence_other.py finds when it
starts them: it fills in "{api_port}", "{cache_port}" and "{cache_http_port}". Pure functions.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvhost.paths import HostPaths
from kvhost.services.vllm import cache_service, runner_service, shm_name, vllm_config
from kvhost.settings import Settings

PLACES = {name: "{" + name + "}" for name in ("api_port", "cache_port", "cache_http_port")}


def second_pair(
    settings: Settings, paths: HostPaths, namespace_dir: str, *, with_key: bool
) -> dict[str, Any]:
    """Launch specifications of both services by name. No secret is in them.

    They run nothing before they start: the sweeps are for what the first pair has left.
    """
    # not validated: a port that is filled in later is text
    other = settings.model_copy(update={**PLACES, "api_host": "127.0.0.1"})
    cache = cache_service(other, paths, namespace_dir)
    runner = runner_service(other, paths, with_key=with_key)
    first, second = shm_name(paths), shm_name(paths) + "-other"
    config = vllm_config(other, paths, with_key=with_key)["kv-transfer-config"]
    transfer = json.dumps(config).replace('"{cache_port}"', "{cache_port}")
    copy = f"{paths.run}/other-vllm.yaml"
    argv = [copy if word == f"{paths.run}/vllm.yaml" else word for word in runner.argv]
    argv += ["--host", "127.0.0.1", "--port", PLACES["api_port"], "--kv-transfer-config", transfer]
    changed = {
        "cache": dataclasses.replace(
            cache, argv=tuple(second if word == first else word for word in cache.argv)
        ),
        "runner": dataclasses.replace(
            runner, argv=tuple(argv), copies=((f"{paths.etc}/vllm.yaml", copy),)
        ),
    }
    specs = {}
    for name, service in changed.items():
        plain = dataclasses.replace(service, name=f"other-{name}", before=(), min_gap_s=0, watch=())
        specs[name] = json.loads(plain.launch_spec(paths))
    return specs
