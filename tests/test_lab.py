"""The lab's own tools: what they say must be true before anything is judged by them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.lab import loop
from tests.lab.loop import MIB, Loops, digest, digests
from tests.lab.recipe import LabError, recipe_digest, uncompressed_kernel

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root"),
]


def write(node: Path, offset: int, content: bytes) -> None:
    with node.open("r+b") as handle:
        handle.seek(offset)
        handle.write(content)


def test_a_digest_is_the_sha256_of_all_bytes_and_sees_one_that_changed(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        one = loops.make("one", 16 * MIB)
        write(one.node, 5 * MIB + 17, b"x" * 5000)
        before = digest(one)
        assert before == hashlib.sha256(one.image.read_bytes()).hexdigest()
        write(one.node, 16 * MIB - 1, b"x")
        assert digest(one) != before
        write(one.node, 16 * MIB - 1, b"\0")  # not a hole any more, and the same bytes
        assert digest(one) == before


def test_a_digest_of_the_start_sees_only_that(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        one = loops.make("one", 4 * MIB)
        write(one.node, 4095, b"x")
        before = digests([one], {"one": 4096})["one"]
        assert before == hashlib.sha256(one.image.read_bytes()[:4096]).hexdigest()
        write(one.node, 4096, b"x" * 4096)
        assert digests([one], {"one": 4096})["one"] == before
        write(one.node, 0, b"x")
        assert digests([one], {"one": 4096})["one"] != before


def test_no_partition_stays_behind(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        made = loops.make("parts", 8 * MIB)
        subprocess.run(["sfdisk", "-q", made.node], input="label: gpt\n,,\n", text=True, check=True)
        assert made.scan_partitions()
        loops.detach(made)
        assert not made.partitions()


def test_each_device_gets_its_own_digest(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        made = [loops.make(name, size * MIB) for name, size in (("a", 1), ("b", 2), ("c", 1))]
        found = digests(made)
        assert found["a"] == found["c"] != found["b"]


def test_only_own_devices_are_detached_and_after_a_failure_too(tmp_path: Path) -> None:
    with Loops(tmp_path / "other") as others:
        other = others.make("other", MIB)
        with pytest.raises(ZeroDivisionError), Loops(tmp_path / "mine") as mine:
            made = mine.make("mine", MIB)
            assert made.is_ours()
            raise ZeroDivisionError
        assert not made.is_ours()
        assert other.is_ours()


def test_a_device_in_use_is_told_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BUSY_S", 1.0)
    loops = Loops(tmp_path)
    busy, idle = loops.make("busy", MIB), loops.make("idle", MIB)
    with busy.node.open("rb"), pytest.raises(LabError, match=r"busy\.img"):
        loops.close()
    assert not idle.is_ours()
    assert not busy.is_ours()  # the kernel lets go of it when the last user does


def test_sector_size_read_only_and_partitions(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        large = loops.make("large", 8 * MIB, sector_size=4096)
        assert (large.sys / "queue/logical_block_size").read_text().strip() == "4096"
        fixed = loops.make("fixed", 8 * MIB, read_only=True)
        # some kernels open it for writing all the same; none takes a byte
        with pytest.raises(PermissionError):
            write(fixed.node, 0, b"x")
        parts = loops.make("parts", 8 * MIB, partitions=True)
        subprocess.run(
            ["sfdisk", "-q", parts.node], input="label: gpt\n,2M\n,,\n", text=True, check=True
        )
        assert len(parts.scan_partitions()) == 2


def test_writes_are_counted(tmp_path: Path) -> None:
    with Loops(tmp_path) as loops:
        one = loops.make("one", MIB)
        before = one.sectors_written()
        write(one.node, 0, b"x" * 4096)
        digest(one)
        assert one.sectors_written() - before == 8


def test_the_recipe_names_the_image() -> None:
    assert len(recipe_digest()) == 12


def test_a_kernel_in_an_unknown_packing_is_an_error() -> None:
    image = bytearray(2048)
    image[0x1F1] = 1
    image[0x248:0x250] = (0).to_bytes(4, "little") + (16).to_bytes(4, "little")
    with pytest.raises(LabError, match="unknown way"):
        uncompressed_kernel(bytes(image))
