#!/usr/bin/env python3
"""Make and check the model that kvhost builds itself: a small Llama and its byte tokenizer.

Nothing is downloaded and nothing is trained. Every weight is a byte of a SHAKE-256 stream over a
fixed seed and the tensor's name, mapped through a table of 256 Gaussian quantiles to bfloat16, so
that the files are the same to the byte on every machine and Python. docs/model.md says why the
scales are what they are. Run the model in float32: docs/model.md has the reason, `--describe` the
figures.

Formats: config.json and weights as transformers' LlamaForCausalLM reads them; model.safetensors by
hand (8 bytes of header length, JSON header, data; github.com/huggingface/safetensors, README);
tokenizer.json as the `tokenizers` library reads it.

Exit status: 0 done or good, 1 refused, failed or not good, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

SEED = b"kvhost builtin model 1"

LAYERS = 8
HIDDEN = 512
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
MLP = 1024
CONTEXT = 32768  # tokens
DTYPE_BYTES = 4  # float32 at run time

# Token ids: a byte's is its value; then come the special tokens.
SPECIALS = ("<s>", "</s>", "<pad>", "<unk>")
VOCAB = 256 + len(SPECIALS)
BOS, EOS, PAD = 256, 257, 258
# Only these bytes can be generated, so that a reply's text shows every token of it.
PRINTABLE = range(0x20, 0x7F)

# Standard deviations of what each matrix makes of an input of RMS 1. docs/model.md: how found.
QK_STD = 2.1  # attention scores spread by QK_STD ** 2: some ten keys share each head's attention
V_STD = 1.0
O_STD = 1.5  # each layer adds about as much from the context as the token itself brought
MLP_STD = 1.0
LOGIT_STD = 4.0  # nats

# sha256 of each file, and of the sorted lines "NAME SHA256\n" of them all.
# The first tells the host report that the directory is whole: it is named in the manifest too.
MANIFEST: dict[str, str] = {
    ".kvhost-complete.json": "35e215b982c61ce68e41da5cb7ad50a067d553a42184999d37fafbbb468ed579",
    "config.json": "e21d40422eb33755f3c67ba621f73a6ee4e63696e57ebd8305c861a4a1d44585",
    "generation_config.json": "0eaff214d0367b3d5cb845c84bdb9ef872112e7688cfe842271d4d13496ddfbe",
    "model.safetensors": "9586a26f7445ce498739da19fcdc2e041202ab6c57aed8e97ee06fdf3d7b021d",
    "tokenizer.json": "9696c862a48c9e964dec275a504a2f88db66274dda3badf33dcad167c0c04b2f",
    "tokenizer_config.json": "004adff1bd600739acbffe27bfa43b7ed9442700c916f048123546fd9d8d645b",
}
DIGEST = "bfed1c097466cb8021f7cf9febe736cb24881b574a5052f32e24ee0b007a4d05"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ModelError(Exception):
    """The model cannot be made or read; the text says what, where and what to do."""


class Tensor(NamedTuple):
    """One tensor: `shape` as transformers expects it, `std` of its values.

    Rows outside `rows` are zero (all rows are filled where it is None).
    """

    name: str
    shape: tuple[int, ...]
    std: float
    rows: Any = None


def tensors() -> list[Tensor]:
    """All tensors of the model, sorted by name."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    unit = 1 / math.sqrt(HIDDEN)
    out = [
        Tensor("model.embed_tokens.weight", (VOCAB, HIDDEN), 1.0),
        Tensor("model.norm.weight", (HIDDEN,), 0.0),
        Tensor("lm_head.weight", (VOCAB, HIDDEN), LOGIT_STD * unit, PRINTABLE),
    ]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        out += [
            Tensor(at + "input_layernorm.weight", (HIDDEN,), 0.0),
            Tensor(at + "self_attn.q_proj.weight", (q, HIDDEN), QK_STD * unit),
            Tensor(at + "self_attn.k_proj.weight", (kv, HIDDEN), QK_STD * unit),
            Tensor(at + "self_attn.v_proj.weight", (kv, HIDDEN), V_STD * unit),
            Tensor(at + "self_attn.o_proj.weight", (HIDDEN, q), O_STD / math.sqrt(q)),
            Tensor(at + "post_attention_layernorm.weight", (HIDDEN,), 0.0),
            Tensor(at + "mlp.gate_proj.weight", (MLP, HIDDEN), unit),
            Tensor(at + "mlp.up_proj.weight", (MLP, HIDDEN), unit),
            Tensor(at + "mlp.down_proj.weight", (HIDDEN, MLP), MLP_STD / math.sqrt(MLP)),
        ]
    return sorted(out)


def byte_symbols() -> list[str]:
    """The character that byte-level tokenizers write for each of the 256 bytes.

    Visible characters of Latin-1 stand for themselves, the others for U+0100 and on, in order
    (the alphabet of `tokenizers`' ByteLevel).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(b) if b in visible else chr(next(hidden)) for b in range(256)]


def bf16(value: float) -> bytes:
    """`value` as bfloat16, rounded to nearest even, little-endian."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def quantiles() -> list[float]:
    """256 equally likely values of a Gaussian, mean 0, variance 1."""
    values = [NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]
    scale = math.sqrt(sum(v * v for v in values) / 256)
    return [v / scale for v in values]


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of `tensor` as bfloat16, little-endian, row by row; ones where std is 0."""
    count = math.prod(tensor.shape)
    if tensor.std == 0:
        return bf16(1.0) * count
    table = [bf16(tensor.std * v) for v in quantiles()]
    stream = hashlib.shake_256(SEED + b"|" + tensor.name.encode()).digest(count)
    data = bytearray(2 * count)
    data[0::2] = stream.translate(bytes(t[0] for t in table))
    data[1::2] = stream.translate(bytes(t[1] for t in table))
    if tensor.rows is not None:
        row = 2 * count // tensor.shape[0]
        for i in set(range(tensor.shape[0])) - set(tensor.rows):
            data[i * row : (i + 1) * row] = bytes(row)
    return bytes(data)


def safetensors() -> Iterator[bytes]:
    """The pieces of model.safetensors, in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors():
        size = 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors():
        yield tensor_bytes(tensor)


def config() -> dict[str, Any]:
    """config.json; what is left out has LlamaConfig's default."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 500000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges, one token a byte, so every text encodes."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    special = {text: 256 + i for i, text in enumerate(SPECIALS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **plain, "special": True} for text, i in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {**{symbol: i for i, symbol in enumerate(byte_symbols())}, **special},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    bos, eos, pad, unk = SPECIALS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }


def files() -> Iterator[tuple[str, Iterator[bytes]]]:
    """Every file of the model: its name and its pieces."""

    def text(value: dict[str, Any]) -> Iterator[bytes]:
        yield (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()

    yield ".kvhost-complete.json", text({"model": "kvhost-builtin"})
    yield "config.json", text(config())
    yield "generation_config.json", text({"bos_token_id": BOS, "eos_token_id": EOS})
    yield "model.safetensors", safetensors()
    yield "tokenizer.json", text(tokenizer())
    yield "tokenizer_config.json", text(tokenizer_config())


def digest_of(sums: dict[str, str]) -> str:
    """sha256 over the lines "NAME SHA256\\n", sorted by name."""
    lines = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()


def describe() -> dict[str, Any]:
    """The figures a plan needs; sizes in bytes, context in tokens."""
    parameters = sum(math.prod(t.shape) for t in tensors())
    return {
        "digest": DIGEST,
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "parameters": parameters,
        "weights_bytes": 2 * parameters,
        "weights_memory_bytes": DTYPE_BYTES * parameters,
        "kv_bytes_per_token": 2 * LAYERS * KV_HEADS * HEAD_DIM * DTYPE_BYTES,
        "context_tokens": CONTEXT,
        "layers": LAYERS,
        "attention_heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
    }


def sum_file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def check(directory: Path) -> dict[str, Any]:
    """Compare `directory` with the pinned manifest.

    Returns {"ok", "digest" (of what lies there; null where a file is missing), "expected",
    "files": {name: sha256 or null}, "problems": [text]}.
    Raises ModelError where the directory or a file cannot be read.
    """
    problems = []
    sums: dict[str, Any] = dict.fromkeys(MANIFEST)
    try:
        present = sorted(path.name for path in directory.iterdir())
        if stat.S_IMODE(directory.stat().st_mode) & 0o555 != 0o555:
            problems.append(f"{directory} is closed to the service's user: chmod 0755")
        problems += [f"{name} is not the model's" for name in present if name not in MANIFEST]
        for name in sorted(MANIFEST):
            path = directory / name
            if name not in present:
                problems.append(f"{name} is missing")
                continue
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode):
                problems.append(f"{name} is not a regular file")
                continue
            if mode & 0o444 != 0o444:
                problems.append(f"{name} is closed to the service's user: chmod 0644")
            sums[name] = sum_file(path)
            if sums[name] != MANIFEST[name]:
                problems.append(f"{name} has sha256 {sums[name]}, expected {MANIFEST[name]}")
    except OSError as error:
        raise ModelError(
            f"cannot read {error.filename or directory}: {error.strerror}; "
            "--check needs a directory that --out made"
        ) from error
    whole = None if None in sums.values() else digest_of(sums)
    return {
        "ok": not problems,
        "digest": whole,
        "expected": DIGEST,
        "files": sums,
        "problems": problems,
    }


def write_files(directory: Path) -> dict[str, str]:
    """Write all files below `directory` (0644, synced); returns their sha256 by name."""
    sums = {}
    for name, pieces in files():
        found = hashlib.sha256()
        with (directory / name).open("xb") as file:
            for piece in pieces:
                file.write(piece)
                found.update(piece)
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        sums[name] = found.hexdigest()
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)
    return sums


def build(out: Path) -> dict[str, Any]:
    """Make the model in `out`, whole or not at all; a good one that is there already is kept.

    Returns what `check` returns, and "built": whether files were written.
    Raises ModelError where `out`'s parent is missing, `out` holds anything that is not the
    model's, it cannot be written, or the files made here are not the pinned ones.
    """
    out = Path.cwd() / out
    try:
        parent = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ModelError(f"cannot use {out.parent}: {error.strerror}; make it first") from error
    try:
        # One builder at a time, so that what a killed one left behind may be removed.
        fcntl.flock(parent, fcntl.LOCK_EX)
        for left in out.parent.glob(out.name + ".tmp-*"):
            shutil.rmtree(left)
        if os.path.lexists(out):
            if out.is_symlink() or not out.is_dir():
                raise ModelError(f"{out} is not a directory: name another, or move it away")
            foreign = sorted({path.name for path in out.iterdir()} - set(MANIFEST))
            if foreign:
                raise ModelError(
                    f"{out} holds what is not the model's ({', '.join(foreign[:5])}): "
                    "name another directory, or move it away"
                )
            found = check(out)
            if found["ok"]:
                return {**found, "built": False}
        replace(out)
        os.fsync(parent)
    except OSError as error:
        raise ModelError(f"cannot write the model in {out}: {error}") from error
    finally:
        os.close(parent)
    return {**check(out), "built": True}


def replace(out: Path) -> None:
    """Write beside `out`, compare with the pinned digest, rename; nothing is left on failure."""
    temporary = Path(tempfile.mkdtemp(prefix=out.name + ".tmp-", dir=out.parent))
    try:
        new = temporary / "new"
        new.mkdir()
        sums = write_files(new)
        if digest_of(sums) != DIGEST:
            wrong = [name for name in sorted(sums) if sums[name] != MANIFEST.get(name)]
            raise ModelError(
                f"what Python {sys.version.split()[0]} made is not the pinned model "
                f"({', '.join(wrong)} differ); nothing was kept"
            )
        new.chmod(0o755)
        if out.exists():
            out.rename(temporary / "old")
        new.rename(out)
    finally:
        shutil.rmtree(temporary)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make and check kvhost's built-in model.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="make the model in DIR")
    what.add_argument("--check", type=Path, metavar="DIR", help="compare DIR with the manifest")
    what.add_argument("--digest", action="store_true", help="print the pinned digest")
    what.add_argument("--describe", action="store_true", help="print sizes and shape as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.digest:
            print(DIGEST)
            return 0
        if options.describe:
            print(json.dumps(describe()))
            return 0
        result = build(options.out) if options.out else check(options.check)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
