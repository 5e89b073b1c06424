"""A flipped bit in a file of the tier: ext4 hands it on, btrfs refuses to read it.

LMCache keeps no checksum of a chunk, so that the file system is what can tell (docs/services.md).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.nspawn_image import sh

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
]
SIZE = 256 << 20
CHUNK = 4 << 20


@pytest.fixture(params=["ext4", "btrfs"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """(type, image, mount point) of a file system with a chunk in it, not mounted."""
    kind, image, place = str(request.param), tmp_path / "image", tmp_path / "tier"
    if kind == "btrfs" and not Path("/usr/bin/mkfs.btrfs").exists():
        apt = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
        sh(*apt, "update")
        sh(*apt, "install", "-y", "--no-install-recommends", "btrfs-progs")
    with image.open("wb") as handle:
        handle.truncate(SIZE)
    sh(f"mkfs.{kind}", "-q", str(image))
    place.mkdir()
    sh("mount", "-o", "loop", str(image), str(place))
    (place / "chunk").write_bytes(os.urandom(CHUNK))
    sh("umount", str(place))
    yield kind, image, place
    if os.path.ismount(place):
        sh("umount", str(place))


def test_a_flipped_bit(tier: tuple[str, Path, Path]) -> None:
    kind, image, place = tier
    sh("mount", "-o", "loop,ro", str(image), str(place))
    right = (place / "chunk").read_bytes()
    sh("umount", str(place))
    middle = right[CHUNK // 2 : CHUNK // 2 + 512]
    at = image.read_bytes().find(middle)
    assert at > 0
    with image.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([middle[0] ^ 1]))
    sh("mount", "-o", "loop,ro", str(image), str(place))
    if kind == "btrfs":
        with pytest.raises(OSError) as caught:
            (place / "chunk").read_bytes()
        assert caught.value.errno == errno.EIO
        return
    wrong = (place / "chunk").read_bytes()
    assert len(wrong) == len(right)
    assert [n for n, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b] == [CHUNK // 2]
