#!/usr/bin/env python3
"""The built-in model (model_builtin.py) as one .gguf file, for llama-server: the same weights.

model_gguf.py --out FILE      made, whole or not at all; a good one that is there is kept
model_gguf.py --check FILE    is it the pinned one?
Both print {"ok", "digest", "why"}. Weights are float32, as the model is meant to be computed
(docs/model.md). Format: github.com/ggml-org/ggml, docs. llama.cpp turns the pairs (2i,
2i + 1) of a head where transformers' Llama turns (i, i + D/2), so the rows of Q and K are in
another order here (its convert_hf_to_gguf.py: permute).
Exit: 0; 1 not the pinned file, or it cannot be written (why: stderr).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import model_builtin as model
else:  # it lies beside this file on a host, where there is no package kvhost
    import model_builtin as model

#: sha256 of the file
DIGEST = "9756d6ef3114bd66f1c9695300f259e640942ea6f4fb11c4337404790f8b145e"
ALIGN = 32
F32 = 0
U32, FLOAT, TEXT, LIST, BOOL, INT = 4, 6, 8, 9, 7, 5
#: of a token (llama.cpp, llama_token_type)
NORMAL, CONTROL = 1, 3
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def name_of(tensor: str) -> str:
    """llama.cpp's name of a tensor of transformers' Llama."""
    if tensor in OUTER:
        return OUTER[tensor]
    number, _, rest = tensor.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        return text(value)
    return struct.pack({U32: "<I", FLOAT: "<f", BOOL: "<?", INT: "<i"}[kind], value)


def key(name: str, kind: int, value: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + value_of(kind, value)


def keys(name: str, kind: int, values: list[Any]) -> bytes:
    head = text(name) + struct.pack("<IIQ", LIST, kind, len(values))
    return head + b"".join(value_of(kind, value) for value in values)


def header() -> list[bytes]:
    """Every key with its value."""
    llama = {
        "block_count": model.LAYERS,
        "context_length": model.CONTEXT,
        "embedding_length": model.HIDDEN,
        "feed_forward_length": model.MLP,
        "attention.head_count": model.HEADS,
        "attention.head_count_kv": model.KV_HEADS,
        "attention.key_length": model.HEAD_DIM,
        "attention.value_length": model.HEAD_DIM,
        "rope.dimension_count": model.HEAD_DIM,
        "vocab_size": model.VOCAB,
    }
    config, at = model.config(), "tokenizer.ggml."
    kinds = [NORMAL] * 256 + [CONTROL] * len(model.SPECIALS)
    return [
        key("general.architecture", TEXT, "llama"),
        key("general.name", TEXT, "kvhost-builtin"),
        key("general.file_type", U32, 0),
        *(key(f"llama.{name}", U32, value) for name, value in llama.items()),
        key("llama.attention.layer_norm_rms_epsilon", FLOAT, config["rms_norm_eps"]),
        key("llama.rope.freq_base", FLOAT, config["rope_theta"]),
        key(at + "model", TEXT, "gpt2"),
        key(at + "pre", TEXT, "gpt-2"),
        keys(at + "tokens", TEXT, [*model.byte_symbols(), *model.SPECIALS]),
        keys(at + "token_type", INT, kinds),
        keys(at + "merges", TEXT, []),
        key(at + "bos_token_id", U32, model.BOS),
        key(at + "eos_token_id", U32, model.EOS),
        key(at + "padding_token_id", U32, model.PAD),
        key(at + "add_bos_token", BOOL, False),
        key(at + "add_space_prefix", BOOL, False),
        key("tokenizer.chat_template", TEXT, model.CHAT_TEMPLATE),
    ]


def data_of(tensor: model.Tensor) -> bytes:
    """Its values as float32, in llama.cpp's order of rows."""
    short = model.tensor_bytes(tensor)
    data = bytearray(2 * len(short))
    data[2::4], data[3::4] = short[0::2], short[1::2]  # a bfloat16 is the upper half of a float32
    if not tensor.name.endswith(("q_proj.weight", "k_proj.weight")):
        return bytes(data)
    row, half = 4 * tensor.shape[1], model.HEAD_DIM // 2
    order = (
        head + i % 2 * half + i // 2
        for head in range(0, tensor.shape[0], model.HEAD_DIM)
        for i in range(model.HEAD_DIM)
    )
    return b"".join(data[n * row : (n + 1) * row] for n in order)


def pieces() -> Iterator[bytes]:
    """The file, in order."""
    tensors, about, at = model.tensors(), [], 0
    for tensor in tensors:
        shape, size = tensor.shape[::-1], 4
        for length in shape:
            size *= length
        about.append(text(name_of(tensor.name)) + struct.pack("<I", len(shape)))
        about.append(struct.pack(f"<{len(shape)}QIQ", *shape, F32, at))
        at += -(-size // ALIGN) * ALIGN
    told = header()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(told)) + b"".join(told + about)
    yield head + bytes(-len(head) % ALIGN)
    for tensor in tensors:
        data = data_of(tensor)
        yield data + bytes(-len(data) % ALIGN)


def digest_of(path: str) -> str:
    """Raises OSError."""
    found = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def check(path: str) -> dict[str, Any]:
    try:
        digest = digest_of(path)
        closed = not os.stat(path).st_mode & 0o004
    except OSError as error:
        return {"ok": False, "digest": None, "why": str(error)}
    why = None if digest == DIGEST else "not the pinned file"
    why = "closed to the service's user: chmod 0644" if closed else why
    return {"ok": why is None, "digest": digest, "why": why}


def make(path: str) -> dict[str, Any]:
    """Raises OSError."""
    if check(path)["ok"]:
        return check(path)
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    found, new = hashlib.sha256(), path + ".new"
    with open(new, "wb") as handle:
        for piece in pieces():
            handle.write(piece)
            found.update(piece)
        os.fchmod(handle.fileno(), 0o644)
        handle.flush()
        os.fsync(handle.fileno())
    if found.hexdigest() != DIGEST:
        os.unlink(new)
        return {"ok": False, "digest": found.hexdigest(), "why": "not the pinned file was made"}
    os.replace(new, path)
    return check(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="FILE", help="make it")
    what.add_argument("--check", metavar="FILE", help="compare it with the pinned one")
    args = parser.parse_args()
    try:
        result = make(os.path.abspath(args.out)) if args.out else check(args.check)
    except OSError as error:
        print(f"model_gguf: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
