#!/usr/bin/env python3
"""What a .gguf file says of itself: gguf.py FILE prints JSON, without reading the weights.

Format: github.com/ggml-org/ggml, docs, version 3 (2 differs in nothing that is read here):
magic, version, number of tensors, number of keys; the keys; name, shape, type and offset of each
tensor; then the data, aligned. Of long lists only the length is told ("tokenizer.ggml.tokens":
{"length": 32000}).
FILE may be the first of a split model, PREFIX-00001-of-00003.gguf: all parts are read then, as
llama.cpp loads them all ("files": their names and bytes; the keys are those of the first).
Exit: 0; 1 not a whole GGUF file, or a part is missing (why: stderr).
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import struct
import sys
from typing import Any, BinaryIO

Data = dict[str, Any]
MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: value type -> struct format; 8 is text, 9 a list
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
           11: "<q", 12: "<d"}  # fmt: skip
TEXT, LIST = 8, 9
#: type of a tensor -> (elements, bytes) of a block (ggml/src/ggml.c, type_traits)
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
#: of a part of a split model: its number, counted from 0; how many; tensors of all of them
PART, PARTS, ALL_TENSORS = "split.no", "split.count", "split.tensors.count"
#: lists of at most as many numbers are told whole
SHORT = 512
#: more than any model has; a broken file must not fill the memory, nor take minutes
MOST, MOST_KEYS, MOST_TEXT, MOST_NAME, MOST_HEADER = 1 << 17, 1 << 12, 1 << 24, 1 << 10, 1 << 26
#: dimensions of a tensor (ggml.h, GGML_MAX_DIMS)
MOST_DIMS = 4
#: characters of a text that is told whole
MOST_TOLD = 200


class NotGguf(Exception):
    """Why it cannot be read, for people."""


class Reader:
    """Reads from the front of a file. Raises NotGguf at its end."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle, self.taken = handle, 0

    def take(self, count: int) -> bytes:
        self.taken += count
        if self.taken > MOST_HEADER:
            raise NotGguf(f"its header has more than {MOST_HEADER} bytes: it is damaged")
        data = self.handle.read(count)
        if len(data) != count:
            raise NotGguf("it ends in the middle of its header: fetch it again")
        return data

    def scalar(self, kind: int) -> Any:
        if kind not in SCALARS:
            raise NotGguf(f"a value of type {kind}, which is not known here")
        layout = SCALARS[kind]
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, most: int = MOST) -> int:
        found = int(self.scalar(10))
        if found > most:
            raise NotGguf(f"a count of {found}: the header is damaged")
        return found

    def text(self, most: int = MOST_TEXT) -> str:
        return self.take(self.count(most)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            return self.scalar(kind)
        inner, length = int(self.scalar(4)), self.count(MOST_TEXT)
        if inner == LIST:
            raise NotGguf("a list of lists, which is not known here")
        if inner == TEXT:
            for _ in range(length):
                self.text()
            return {"length": length}
        if inner not in SCALARS:
            raise NotGguf(f"a list of type {inner}, which is not known here")
        found = [self.scalar(inner) for _ in range(length)] if length <= SHORT else None
        if found is None:
            self.take(length * struct.calcsize(SCALARS[inner]))
        return {"length": length} if found is None else found


def alignment(keys: Data) -> int:
    """Bytes. Raises NotGguf."""
    found = keys.get("general.alignment", 32)
    # a power of two has one bit
    if type(found) is not int or not 0 < found <= MOST_HEADER or found & (found - 1):
        raise NotGguf(f"general.alignment is {found!r:.40}, no power of two: the header is damaged")
    return found


def told(name: str, value: Any) -> Any:
    """A value as it is told: of a tokenizer's lists and of templates only the length."""
    long = isinstance(value, list) and name.startswith("tokenizer.")
    if long or (isinstance(value, str) and len(value) > MOST_TOLD):
        return {"length": len(value)}
    return value


def read(path: str) -> Data:
    """Of one file: {"version", "keys": {key: value}, "tensors", "bytes", "weights_bytes", "types":
    {type: n}, "files": [{"name", "bytes"}]}, the last of itself alone.

    Raises NotGguf, also for a file that is shorter than its tensors; OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotGguf("it is not a regular file")
    with os.fdopen(fd, "rb") as handle:
        size = os.fstat(fd).st_size
        reader = Reader(handle)
        if handle.read(4) != MAGIC:
            raise NotGguf("it is no GGUF file")
        version = reader.scalar(4)
        if int.from_bytes(struct.pack("<I", version), "big") in VERSIONS:
            raise NotGguf("a big-endian GGUF file; only little-endian ones are read")
        if version not in VERSIONS:
            raise NotGguf(f"GGUF of version {version}; {' and '.join(map(str, VERSIONS))} are read")
        tensors, count = reader.count(), reader.count(MOST_KEYS)
        keys = {}
        for _ in range(count):
            name = reader.text(MOST_NAME)
            keys[name] = told(name, reader.value(int(reader.scalar(4))))
        ends, weights = [0], 0
        types: dict[str, int] = {}
        for _ in range(tensors):
            reader.text(MOST_NAME)
            elements, dimensions = 1, int(reader.scalar(4))
            if dimensions > MOST_DIMS:
                raise NotGguf(f"a tensor of {dimensions} dimensions, {MOST_DIMS} are the most: "
                              "the header is damaged")  # fmt: skip
            for _ in range(dimensions):
                elements *= int(reader.scalar(10))
            kind, offset = int(reader.scalar(4)), int(reader.scalar(10))
            types[str(kind)] = types.get(str(kind), 0) + 1
            if kind in BLOCKS:
                per, stored = BLOCKS[kind]
                taken = elements // per * stored
                weights += taken
                ends.append(offset + taken)
        align = alignment(keys)
        start = -(-handle.tell() // align) * align
    # a type that is not known here has bytes all the same
    known = weights > 0 and all(int(kind) in BLOCKS for kind in types)
    if size < start + max(ends):
        raise NotGguf(f"it has {size} bytes and its header says {start + max(ends)}: "
                      "fetch it again")  # fmt: skip
    about = {"version": version, "keys": keys, "tensors": tensors, "types": types}
    about["files"] = [{"name": os.path.basename(path), "bytes": size}]
    return {**about, "bytes": size, "weights_bytes": weights if known else size - start}


def read_model(path: str) -> Data:
    """read() of a whole model, of all its parts together, and {"files": [{"name", "bytes"}]}, which
    lie in one directory. Raises as read() does, for a part that is missing or of another model too.
    """
    found = read(path)
    for part in paths_of(path, found["keys"])[1:]:
        name = os.path.basename(part)
        try:
            more = read(part)
        except FileNotFoundError:
            raise NotGguf(f"its part {name} is not there: fetch it") from None
        except NotGguf as error:
            raise NotGguf(f"its part {name}: {error}") from None
        _same_model(name, found, more)
        found["files"] += more["files"]
        for key in ("tensors", "bytes", "weights_bytes"):
            found[key] += more[key]
        for kind, count in more["types"].items():
            found["types"][kind] = found["types"].get(kind, 0) + count
    wanted = found["keys"].get(ALL_TENSORS)
    if len(found["files"]) > 1 and wanted is not None and wanted != found["tensors"]:
        raise NotGguf(f"its parts have {found['tensors']} tensors, and {wanted!r:.40} were split: "
                      "they are not of one model")  # fmt: skip
    return found


def paths_of(path: str, keys: Data) -> list[str]:
    """The parts of a model by their names, by llama.cpp's rule (llama_split_path), from the keys of
    the first; one that is whole is its own part. Raises NotGguf."""
    count, number = keys.get(PARTS, 1), keys.get(PART, 0)
    if type(count) is not int or type(number) is not int or not 0 <= number < max(1, count):
        raise NotGguf(f"{PART} = {number!r:.40} of {PARTS} = {count!r:.40}: the header is damaged")
    if count <= 1:
        return [path]
    ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
    prefix = path[: -len(ending)]
    if not path.endswith(ending) or not os.path.basename(prefix):
        raise NotGguf(f"it is part {number + 1} of {count} of a split model, and its name must end "
                      f"in {ending}: llama.cpp finds the others by that")  # fmt: skip
    paths = [f"{prefix}-{one:05d}-of-{count:05d}.gguf" for one in range(1, count + 1)]
    if number != 0:
        first = os.path.basename(paths[0])
        raise NotGguf(f"it is part {number + 1} of {count} of a split model: name its first part, "
                      f"{first}")  # fmt: skip
    return paths


def _same_model(name: str, first: Data, part: Data) -> None:
    """Raises NotGguf for a part that says of itself that it is another."""
    number, count = len(first["files"]), first["keys"][PARTS]
    if part["keys"].get(PART) != number or part["keys"].get(PARTS) != count:
        told = f"{PART} = {part['keys'].get(PART)!r:.40}, {PARTS} = {part['keys'].get(PARTS)!r:.40}"
        raise NotGguf(f"its part {name} says {told}, not {number} and {count}: fetch it again")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    args = parser.parse_args()
    try:
        print(json.dumps(read_model(args.file)))
    except (NotGguf, OSError, OverflowError, MemoryError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
