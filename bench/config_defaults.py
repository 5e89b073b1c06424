"""What the engine's transformers has where a config.json says nothing, family by family.

Run by the engine environment's Python:

    ENV/bin/python bench/config_defaults.py --out tests/fixtures/sizing/defaults.json FAMILY …

Writes {"transformers": version, "families": {model_type: {"default": {key: value}, "wider": ...}}},
of the keys that a size may depend on. "wider" is told twice the hidden size and heads: what follows
from them is then told from what does not. A family that it has no code of is null, as is what the
family itself refuses.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

#: keys of a model's shape; what else a configuration holds decides nothing of its cache
SHAPE = re.compile(
    r"hidden_size|intermediate_size|n_embd|n_layer|n_head|n_positions|d_model|num_.*layers|"
    r"num_.*heads|.*head_dim|max_.*_positions?|max_position_embeddings|.*sliding_window.*|"
    r"use_sliding_window|max_window_layers|layer_types|layers_block_type|.*lora_rank|multi_query|"
    r"new_decoder_architecture|attn_layer_.*|mamba_.*|expand|.*state_size|conv_.*|linear_.*|"
    r"decoder_layers|decoder_attention_heads|full_attn.*|attention_chunk_size|no_rope_layer.*|"
    r"n_groups|full_attention_interval|attention_k_eq_v|use_bidirectional_attention|hybrid_.*|"
    r"swa_.*"
)


def defaults(family: str) -> dict[str, Any] | None:
    from transformers import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[family]
    except KeyError:
        return None
    plain = kind().get_text_config()
    kind = type(plain)
    heads = getattr(plain, "num_attention_heads", None)
    wider: dict[str, Any] | None = None
    if heads is not None and family != "whisper":
        wider = shape(kind(hidden_size=2 * plain.hidden_size, num_attention_heads=2 * heads))
    return {"default": shape(plain), "wider": wider}


def shape(config: Any) -> dict[str, Any]:
    told = config.to_dict()
    found = {key: value for key, value in told.items() if SHAPE.fullmatch(key)}
    # of layers that differ, what they differ in (Gemma 4)
    for own in (told.get("per_layer_config") or {}).values():
        found.update({f"global_{key}": value for key, value in own.items()})
    return {key: found[key] for key in sorted(found)}


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("families", nargs="+")
    args = parser.parse_args()
    rows = [
        f" {json.dumps(family)}: {json.dumps(defaults(family))}" for family in sorted(args.families)
    ]
    head = f'{{"transformers": {json.dumps(transformers.__version__)}, "families": {{\n'
    args.out.write_text(head + ",\n".join(rows) + "\n}}\n")


if __name__ == "__main__":
    main()
