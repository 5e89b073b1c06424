"""Flags of `vllm serve` that a user may not add, and what to write instead.

The names are those of vLLM 0.32.0 (`vllm serve --help=all`). Its parser takes `_` for `-`, any
unambiguous beginning of a flag, `--no-FLAG`, `--FLAG=VALUE` and `--FLAG.key VALUE`: all are seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvhost.schema.problems import Refusal
from kvhost.schema.values import one_line

_SET = "kvhost sets it itself, from the setting {}"
_OWN = "kvhost sets it itself"
_LORA = (
    "adapters share the keys of the cache, so that one would read the KV of another (vllm#44250)"
)
_TLS = "kvhost's own checks speak plain HTTP to the runner; put a proxy with TLS before it"
_LISTEN = "it moves the API away from api_host and api_port"
_PROMPTS = "it writes prompts or answers into the log, which kvhost keeps free of them"
_SECOND = (
    "vLLM would make a connector of its own of it, and kvhost sets the connector; vLLM's own "
    "tiering is cache_kind = 'native', its memory l1_gib, the limit of its files cache_limit_gib"
)

DENIED: dict[str, str] = {
    "--api-key": "every user of the host can read the process list; use the setting api_key_file "
    "or KVHOST_API_KEY in the controller's environment",
    "--hf-token": "every user of the host can read the process list; use the setting hf_token_file "
    "or HF_TOKEN in the controller's environment",
    "--trust-remote-code": "it runs code that came with the model; kvhost keeps it off always",
    "--swap-space": "vLLM has no such flag since 0.22 and would not start; memory that KV passes "
    "through is l1_gib, and what a drive keeps is cache_limit_gib",
    "--enable-log-requests": _PROMPTS,
    "--enable-log-outputs": _PROMPTS,
    "--config": "it reads flags from a file, past this check; list the flags here",
    "--help": "vLLM would print its help and stop",
    "--model": _SET.format("model_source"),
    "--revision": _SET.format("model_revision"),
    "--code-revision": _SET.format("model_revision"),
    "--tokenizer-revision": _SET.format("model_revision"),
    "--served-model-name": _SET.format("served_model_name"),
    "--max-model-len": _SET.format("max_model_len"),
    "--dtype": _SET.format("dtype"),
    "--kv-cache-dtype": _SET.format("kv_cache_dtype"),
    "--shutdown-timeout": _SET.format("drain_s"),
    "--host": _SET.format("api_host"),
    "--port": _SET.format("api_port"),
    "--tensor-parallel-size": _SET.format("tensor_parallel_size"),
    "--gpu-memory-utilization": _SET.format("gpu_memory_share"),
    "--kv-transfer-config": f"{_OWN}, from the settings of the cache",
    "--kv-offloading-size": _SECOND,
    "--kv-offloading-backend": _SECOND,
    "--enable-prompt-tokens-details": f"{_OWN}: the verdict reads the cached tokens it reports",
    "--disable-log-stats": "the verdict reads the counters that it turns off",
    "--block-size": "chunk_size is checked against the block size that vLLM chooses itself",
    "--load-format": "kvhost loads safetensors only; other formats can run code while they load",
    "--uds": _LISTEN,
    "--grpc": _LISTEN,
    "--grpc-port": "it opens a port that no key protects",
    "--headless": "it starts no API at all",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-ciphers": _TLS,
    "--enable-ssl-refresh": _TLS,
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--default-mm-loras": _LORA,
}
# Flags of vLLM that may be given although a denied flag begins with the same letters.
_ALLOWED_BEGINNINGS = frozenset({"--tokenizer"})
_SHORT = {"-h": "--help", "-tp": "--tensor-parallel-size"}
_EXAMPLE = ["--max-num-seqs", "4"]


def flag_name(item: str) -> str:
    """The flag alone, as vLLM reads it: '--no-kv_transfer_config.x=1' is '--kv-transfer-config'."""
    name = re.split(r"[=.]", item, maxsplit=1)[0].replace("_", "-")
    return "--" + name[5:] if name.startswith("--no-") else name


def could_mean(item: str, flag: str) -> bool:
    """Whether vLLM may read an item of the command line as `flag`: it takes beginnings."""
    name = flag_name(item)
    return flag.startswith(name) and name not in ("-", "--")


def why_denied(item: str) -> str | None:
    """Why this flag may not be given, or None. Only flags are looked at, not their values."""
    name = flag_name(item)
    short = next((flag for flag in _SHORT if could_mean(item, flag)), None)
    if short is not None:
        return DENIED[_SHORT[short]]
    if not name.startswith("--") or name in _ALLOWED_BEGINNINGS:
        return None
    if re.search(r"-loras?(-|$)", name):
        return _LORA
    if name in DENIED:
        return DENIED[name]
    longer = [flag for flag in DENIED if flag.startswith(name)]
    if longer:
        return f"vLLM reads it as {' or '.join(longer)}: {DENIED[longer[0]]}"
    return None


def runner_extra_args(items: list[str]) -> list[str]:
    """Flags for `vllm serve`, one list item for each word. Raises `Refusal` naming every bad one.

    Only the name of a flag is ever repeated: what stands after it may be a key.
    """
    wrong: list[str] = []
    for number, item in enumerate(items, start=1):
        try:
            one_line(item)
        except Refusal as refusal:
            wrong.append(f"item {number} {refusal.what}")
            continue
        if number == 1 and not item.startswith("-"):
            wrong.append("item 1 must be a flag; the model is set by model_source")
        if item == "--":
            wrong.append(f"item {number} is '--' alone, after which flags are not read as flags")
        elif item.startswith("-"):
            if re.search(r"\s", item.partition("=")[0]):
                wrong.append(f"item {number} has a space in it; a flag and its value are two items")
                continue
            reason = why_denied(item)
            if reason is not None:
                wrong.append(f"{flag_name(item)[:60]} is not for runner_extra_args: {reason}")
    if wrong:
        raise Refusal("; ".join(wrong), _EXAMPLE)
    return items


def count_flag(args: Sequence[str], *names: str) -> int:
    """A flag of vllm serve that is a whole number, by any of its names without dashes, or the
    beginning of one; 1 when it is not there, or is what vLLM will refuse."""
    flags = [f"-{name}" if len(name) < 4 else f"--{name}" for name in names]
    found = ""
    for place, word in enumerate(args):
        _, equals, value = word.partition("=")
        if word.startswith("-") and any(could_mean(word, flag) for flag in flags):
            found = value if equals else next(iter(args[place + 1 : place + 2]), "")
    return max(1, int(found)) if re.fullmatch(r"\d+", found) else 1
