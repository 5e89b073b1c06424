"""Flags of llama-server that a user may add, and why others may not.

The names are those of llama.cpp b11434 (`llama-server --help`); new ones come with every build, so
that what is not known to be harmless is refused. Its parser takes a flag by its whole name, with
`_` for `-`, and the next word as its value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from kvhost.schema.problems import Refusal
from kvhost.schema.values import one_line

#: flags that take the next word
_WITH_VALUE = """
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll
-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch
-b --batch-size -ub --ubatch-size --numa -lm --load-mode
--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx
--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast
-n --predict --n-predict --samplers -s --seed --sampler-seq --sampling-seq --temp --temperature
--top-k --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold
--typical --typical-p --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty
--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker
--adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
--mirostat --mirostat-lr --mirostat-ent -l --logit-bias
-to --timeout --threads-http --sse-ping-interval --tags --chat-template --chat-template-kwargs
--reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget
--reasoning-budget-message --log-colors
"""
WITH_VALUE = frozenset(_WITH_VALUE.split())
#: flags that stand alone
_ALONE = """
--perf --no-perf -e --escape --no-escape --repack -nr --no-repack --check-tensors
--ignore-eos -sp --special -cb --cont-batching -nocb --no-cont-batching --jinja --no-jinja
--reasoning-preserve --no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing
--prefill-assistant --no-prefill-assistant --log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps --mlock --mmap --no-mmap
"""
ALONE = frozenset(_ALONE.split())
#: of those, the ones that builds before --load-mode have
OLDER = frozenset({"--mlock", "--mmap", "--no-mmap"})


def _all(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


_SET = "kvhost sets it itself, from the setting {}"
_PROMPTS = "it writes prompts into a log or a file"
_COMMANDS = "it runs commands on the host, or reaches other servers, for whoever has the key"
_STOPS = "llama-server would print something and stop"
_GPU = "GPUs are not in this version for llama-server"
_NOT_TOLD = "a saved slot does not tell of it, and would be read without it"
_TLS = "kvhost's own checks speak plain HTTP; put a proxy with TLS before it"
_FETCHES = "it fetches from the network; kvhost serves the one file that model_source names"
#: the well-known ones, with what to use instead
REFUSED: Mapping[str, str] = {
    **_all("-m --model -mu --model-url -hf -hfr --hf-repo -hff --hf-file -dr --docker-repo",
           _SET.format("model_source")),
    **_all("-a --alias", _SET.format("served_model_name")),
    **_all("-c --ctx-size", _SET.format("max_model_len")),
    **_all("-np --parallel", _SET.format("llama_slots")),
    **_all("--max-num-seqs", "it is no flag of llama-server; llama_slots is how many prompts it "
           "works on"),
    **_all("-ctk --cache-type-k", _SET.format("llama_cache_type_k")),
    **_all("-ctv --cache-type-v", _SET.format("llama_cache_type_v")),
    **_all("-cram --cache-ram", _SET.format("l1_gib")),
    **_all("--host", _SET.format("api_host")),
    **_all("--port", _SET.format("api_port")),
    **_all("--api-key --api-key-file", "every user of the host can read the process list; use the "
           "setting api_key_file or KVHOST_API_KEY in the controller's environment"),
    **_all("-hft --hf-token", "models are not fetched from the hub for it in this version"),
    **_all("--slot-save-path --slots --no-slots", "kvhost saves the slots"),
    **_all("--metrics --offline --no-offline --ui --no-ui --webui --no-webui",
           "kvhost sets it itself"),
    **_all("-fa --flash-attn", "kvhost sets it: V of a type of its own needs it"),
    **_all("-kvu --kv-unified -no-kvu --no-kv-unified --kv-unified-per-slot",
           "kvhost sets it: slots that share memory are cleared before they are saved"),
    **_all("--cache-idle-slots --no-cache-prompt --sleep-idle-seconds",
           "what is in the slots would be gone before it is saved"),
    **_all("-v --verbose --log-verbose -lv --verbosity --log-verbosity --log-file "
           "--log-prompts-dir", _PROMPTS),
    **_all("--lora --lora-scaled --lora-init-without-apply --control-vector "
           "--control-vector-scaled --control-vector-layer-range", _NOT_TOLD),
    **_all("--models-dir --models-preset --models-max", "kvhost serves one model"),
    **_all("--swa-full", "a saved slot of another kind would be read"),
    **_all("--media-path --path", "it opens files of the host to whoever reaches the port"),
    **_all("-ag --agent --tools --tools-runtime --mcp-servers-json --mcp-servers-config "
           "--ui-mcp-proxy --webui-mcp-proxy --rpc", _COMMANDS),
    **_all("--api-prefix --reuse-port", "kvhost's own checks ask api_host and api_port as is"),
    **_all("--ssl-key-file --ssl-cert-file", _TLS),
    **_all("-mmu --mmproj-url --spec-draft-hf -hfd -hfrd --hf-repo-draft", _FETCHES),
    **_all("-h --help --usage --version -cl --cache-list --completion-bash --list-devices",
           _STOPS),
    **_all("-kvo --kv-offload -nkvo --no-kv-offload -ngl --gpu-layers --n-gpu-layers -dev "
           "--device -sm --split-mode -ts --tensor-split -mg --main-gpu", _GPU),
    **_all("--no-warmup", "its warm-up is how kvhost knows that it can compute"),
}  # fmt: skip
EXAMPLE = ["--threads", "8"]


def _reason(name: str) -> str | None:
    if name in WITH_VALUE or name in ALONE:
        return None
    if name in REFUSED:
        return REFUSED[name]
    near = difflib.get_close_matches(name, sorted(WITH_VALUE | ALONE), n=1, cutoff=0)
    return f"it is not among those that kvhost knows to be harmless; the nearest is {near[0]}"


def llama_extra_args(items: list[str]) -> list[str]:
    """Flags for llama-server, one list item for each word. Raises `Refusal` naming every bad one.

    Only the name of a flag is ever repeated: what stands after it may be a key.
    """
    wrong: list[str] = []
    value_of = ""  # the flag before, when it still wants its value
    anything = False  # the value of a flag that was refused may follow
    for number, item in enumerate(items, start=1):
        try:
            one_line(item)
        except Refusal as refusal:
            wrong.append(f"item {number} {refusal.what}")
            value_of, anything = "", True
            continue
        # a negative number is a value, all else with a dash is read as a flag
        if not item.startswith("-") or (value_of and re.fullmatch(r"-\d+(\.\d+)?", item)):
            if not value_of and not anything:
                wrong.append(f"item {number} is the value of no flag")
            value_of, anything = "", False
            continue
        if value_of:
            wrong.append(f"{value_of} has no value")
        head, equals, _ = item.partition("=")
        name = head.replace("_", "-") if head.startswith("--") else head
        value_of, anything = "", True
        if re.search(r"\s", head):
            wrong.append(f"item {number} has a space in it; a flag and its value are two items")
        elif why := _reason(name):
            wrong.append(f"{name[:60]} is not for runner_extra_args: {why}")
        elif equals:
            wrong.append(f"{name} has a = in it; a flag and its value are two items")
        else:
            value_of, anything = (name if name in WITH_VALUE else ""), False
    if value_of:
        wrong.append(f"{value_of} has no value")
    if wrong:
        raise Refusal("; ".join(wrong), EXAMPLE)
    return items
