"""Which bytes of which block go to which place of which chunk, on a CPU; with doubles of vLLM.

The double of a tensor is rows of bytes. tests/test_native_engine.py has the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "kvhost/onhost/kvhost_offload.py"


class Bytes:
    """Rows of bytes; what is taken from it can be copied to."""

    def __init__(self, rows: int, width: int, fill: int | None = None) -> None:
        self.rows = [bytearray(width) for _ in range(rows)]
        if fill is not None:
            self.rows = [bytearray([fill + n] * width) for n in range(rows)]

    def view(self, *_shape: int) -> Bytes:
        return self

    def __getitem__(self, at: tuple[int, slice]) -> Any:
        row, part = self.rows[at[0]], at[1]

        class Part:
            data = bytes(row[part])

            def copy_(self, other: Any) -> None:
                assert len(other.data) == len(self.data)
                row[part] = other.data

            def numel(self) -> int:
                return len(self.data)

        return Part()


class Ids(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


class Region:
    """Hands out a tensor for each kind of block, as SharedOffloadRegion does."""

    def __init__(self, chunks: int) -> None:
        self.chunks, self.made, self.cleaned = chunks, list[Bytes](), False

    def create_next_worker_view(self, width: int) -> Bytes:
        self.made.append(Bytes(self.chunks, width))
        return self.made[-1]

    def cleanup(self) -> None:
        self.cleaned = True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, parts in (
        ("vllm.v1.kv_offload.base", {"OffloadingWorker": object, "TransferResult": tuple_of}),
        ("vllm.v1.kv_offload.cpu.shared_offload_region", {"SharedOffloadRegion": Region}),
        ("vllm.v1.kv_offload.tiering.spec", {"TieringOffloadingSpec": object}),
    ):
        words = name.split(".")
        for count in range(1, len(words)):
            monkeypatch.setitem(sys.modules, ".".join(words[:count]), types.ModuleType("double"))
        double = types.ModuleType(name)
        double.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, double)
    spec = importlib.util.spec_from_file_location("kvhost_offload", SCRIPT)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def tuple_of(*values: object) -> tuple[object, ...]:
    return values


def blocks(ids: list[int], sizes: list[int], before: list[int]) -> Any:
    return types.SimpleNamespace(block_ids=Ids(ids), group_sizes=sizes, block_indices=before)


def chunks(ids: list[int]) -> Any:
    return types.SimpleNamespace(block_ids=Ids(ids))


def worker(
    module: Any, tensors: list[tuple[Bytes, int]], groups: list[list[tuple[int, int]]]
) -> Any:
    """``tensors``: blocks and bytes of one; ``groups``: (tensor, bytes in use) of each layer."""
    kv = types.SimpleNamespace(
        tensors=[types.SimpleNamespace(tensor=t, page_size_bytes=size) for t, size in tensors],
        group_data_refs=[
            [types.SimpleNamespace(tensor_idx=n, page_size_bytes=size) for n, size in group]
            for group in groups
        ],
    )
    return module.HostWorker(kv, 2, Region(chunks=8))


def test_blocks_go_two_by_two_into_chunks_and_come_back(module: Any) -> None:
    kv = Bytes(10, 4, fill=1)
    one = worker(module, [(kv, 4)], [[(0, 4)]])
    assert one.submit_store(7, blocks([3, 5, 8, 9], [4], [0]), chunks([6, 2]))
    stored = one.region.made[0].rows
    assert stored[6] == bytes([4] * 4 + [6] * 4) and stored[2] == bytes([9] * 4 + [10] * 4)
    assert not any(stored[n].strip(b"\0") for n in (0, 1, 3, 4, 5, 7))
    [(job, done, size, seconds)] = one.get_finished()
    assert (job, done, size) == (7, True, 16) and seconds >= 0
    assert one.get_finished() == []
    assert one.submit_load(8, chunks([2, 6]), blocks([0, 1, 2, 3], [4], [0]))
    assert [row[0] for row in kv.rows[:4]] == [9, 10, 4, 6]


def test_the_first_block_may_stand_in_the_middle_of_a_chunk(module: Any) -> None:
    kv = Bytes(10, 4, fill=1)
    one = worker(module, [(kv, 4)], [[(0, 4)]])
    # blocks 5, 6, 7 of a request: the second half of a chunk, then a whole one
    one.submit_store(1, blocks([0, 1, 2], [3], [5]), chunks([4, 1]))
    stored = one.region.made[0].rows
    assert stored[4] == bytes([0] * 4 + [1] * 4) and stored[1] == bytes([2] * 4 + [3] * 4)


def test_groups_have_chunks_of_their_own_one_after_another(module: Any) -> None:
    first, second = Bytes(10, 4, fill=1), Bytes(10, 2, fill=101)
    one = worker(module, [(first, 4), (second, 2)], [[(0, 4)], [(1, 2)]])
    one.submit_store(1, blocks([0, 1, 2, 9], [3, 1], [0, 2]), chunks([0, 3, 5]))
    made = [region.rows for region in one.region.made]
    assert made[0][0] == bytes([1] * 4 + [2] * 4) and made[0][3] == bytes([3] * 4 + [0] * 4)
    assert made[1][5] == bytes([110] * 2 + [0] * 2)
    assert not any(made[1][0]) and not any(made[0][5])


def test_a_group_without_blocks_takes_no_chunk(module: Any) -> None:
    first, second = Bytes(4, 4, fill=1), Bytes(4, 4, fill=101)
    one = worker(module, [(first, 4), (second, 4)], [[(0, 4)], [(1, 4)]])
    one.submit_store(1, blocks([2, 3], [0, 2], [1, 0]), chunks([7]))
    assert one.region.made[1].rows[7] == bytes([103] * 4 + [104] * 4)
    assert not any(one.region.made[0].rows[7])


def test_what_a_page_is_padded_with_is_not_copied(module: Any) -> None:
    kv = Bytes(2, 4, fill=1)
    one = worker(module, [(kv, 4)], [[(0, 3)]])
    one.submit_store(1, blocks([0, 1], [2], [0]), chunks([0]))
    assert one.region.made[0].rows[0] == bytes([1, 1, 1, 0, 2, 2, 2, 0])


def test_the_memory_is_given_back(module: Any) -> None:
    one = worker(module, [(Bytes(1, 4), 4)], [[(0, 4)]])
    one.wait({1})
    one.shutdown()
    assert one.region.cleaned and not one.groups
