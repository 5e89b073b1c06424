#!/usr/bin/env python3
"""Asks the installed vLLM what a configuration really means, and writes it down.

Run by the engine environment's Python, as the service's user: `resolve.py --config vllm.yaml
--out FILE`. "auto" and defaults are resolved by the engine's own code, so that the digest which
names the KV cache's directory is taken from what will be computed, not from what was asked for.
Every key and argument, the cache server's too, is held against what the installed version takes
(config_check.py), because LMCache only warns. Exit 0: FILE is written. Exit 1: refused; all that
is wrong is on stderr.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import config_check
else:  # it lies beside this file on a host, where there is no package kvhost
    import config_check


class Refused(Exception):
    """What the installed version does not take, a line each."""


def resolved(path: str, extra: list[str], cache_args: list[str]) -> dict[str, Any]:
    """What vLLM 0.32 makes of its configuration and arguments.

    Raises Refused with all unknown keys and arguments, and whatever vLLM raises.
    """
    import yaml
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with open(path, encoding="utf-8") as handle:
        config = yaml.safe_load(handle)
    if not isinstance(config, dict):
        raise Refused(f"{path} is not a mapping of options to values")
    parser = make_arg_parser(FlexibleArgumentParser())
    wrong = config_check.runner_keys(parser, config)
    wrong += config_check.connector_keys(transfer_config(config, extra))
    wrong += config_check.environment_names(os.environ)
    if cache_args:
        wrong += config_check.cache_arguments(cache_args)
    if wrong:
        raise Refused("\n".join(wrong))
    args, problems = config_check.parse(parser, ["--config", path, *extra])
    if args is None:
        raise Refused("\n".join(problems))
    engine = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    model, cache, parallel = engine.model_config, engine.cache_config, engine.parallel_config
    text = model.hf_text_config
    return {
        "dtype": str(model.dtype).replace("torch.", ""),
        "quantization": model.quantization,
        "kv_cache_dtype": kv_dtype(str(cache.cache_dtype), engine.quant_config, mla=model.use_mla),
        "kv_cache_layout": cache.kv_cache_layout,
        "block_size": cache.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "architectures": list(model.architectures),
        "layers": model.get_total_num_hidden_layers(),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "sliding_window": cache.sliding_window,
        "rope": json.loads(json.dumps(getattr(text, "rope_parameters", None), default=str)),
        "max_model_len": model.max_model_len,
        "vocab_size": model.get_vocab_size(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("vllm", "lmcache", "torch")
        },
        "machine": platform.machine(),
    }


def kv_dtype(resolved: str, quantization: Any, *, mla: bool) -> str:
    """A kv_cache_scheme of the checkpoint becomes fp8 only when vLLM makes its layers of attention
    (attention.py), of which MLA's are none: "auto" is what it says before."""
    declared = getattr(quantization, "kv_cache_scheme", None) is not None
    return "fp8" if resolved == "auto" and declared and not mla else resolved


def transfer_config(config: dict[str, Any], extra: list[str]) -> Any:
    """That of the configuration, or of the arguments; None without any. Raises ValueError."""
    word = "--kv-transfer-config"
    if word in extra[:-1]:
        return json.loads(extra[extra.index(word) + 1])
    return config.get(word[2:])


def write(path: str, answer: dict[str, Any], stdout: int) -> None:
    if path == "-":
        os.write(stdout, (json.dumps(answer, sort_keys=True) + "\n").encode())
        return
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(answer, handle, indent=1, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(path + ".new", path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="vLLM's YAML configuration")
    parser.add_argument("--out", required=True, help="a file, or - for standard output")
    parser.add_argument("--cache-args", default="[]", metavar="JSON", help="of lmcache server")
    parser.add_argument("extra", nargs="*", help="after --: further arguments of vllm serve")
    options = parser.parse_args()
    # whatever vLLM, its extensions and its children print goes to standard error
    stdout = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = resolved(options.config, options.extra, json.loads(options.cache_args))
        except Refused as error:
            print(f"The engine refuses {options.config}:\n{error}", file=sys.stderr)
            return 1
        except Exception as error:  # of any kind: what vLLM raises is its answer
            why = f"{type(error).__name__}: {error}"
            print(f"vLLM refuses {options.config}: {why}", file=sys.stderr)
            return 1
    try:
        write(options.out, answer, stdout)
    except OSError as error:
        print(f"resolve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
