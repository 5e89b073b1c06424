"""Loop devices of this machine as test drives, and digests of them taken from outside.

with Loops(folder) as loops:
    drive = loops.make("ext4", 64 * MIB)
    before = digest(drive)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.lab.recipe import LabError, run

MIB = 1 << 20
#: seconds that a device may still be in use when it goes
BUSY_S = 20.0
_DIGESTS = Path(__file__).with_name("digests.py")


@dataclass(frozen=True)
class Loop:
    """An attached loop device: its node, and the sparse file that holds its bytes."""

    node: Path
    image: Path
    sector_size: int
    read_only: bool

    @property
    def sys(self) -> Path:
        return Path("/sys/block") / self.node.name

    def scan_partitions(self) -> list[Path]:
        """Makes the kernel know the partitions; their nodes are devtmpfs's, so no udev is needed.

        Kernels without support for partition tables have to be told by partx. Raises LabError.
        """
        if not self.partitions():
            run("partx", "--add", self.node)
        return self.partitions()

    def partitions(self) -> list[Path]:
        """Nodes of the partitions that the kernel knows."""
        found = self.sys.glob(f"{self.node.name}p*")
        return [self.node.with_name(path.name) for path in sorted(found)]

    def sectors_written(self) -> int:
        """The kernel's count of 512-byte sectors written (Documentation/block/stat.rst)."""
        return int((self.sys / "stat").read_text().split()[6])

    def is_ours(self) -> bool:
        """Whether this node still has our image behind it: others use loop devices too."""
        told = self.sys / "loop/backing_file"
        try:
            return told.read_text().removesuffix("\n").removesuffix(" (deleted)") == str(self.image)
        except FileNotFoundError:
            return False


class Loops:
    """Makes loop devices and detaches exactly those when it is left, after a failure too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.made: list[Loop] = []

    def __enter__(self) -> Loops:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def make(
        self,
        name: str,
        size: int,
        *,
        sector_size: int = 512,
        read_only: bool = False,
        partitions: bool = False,
    ) -> Loop:
        """A new sparse image of ``size`` bytes, attached; one of that name is attached as it is."""
        image = self.folder / f"{name}.img"
        if not image.exists():
            with image.open("xb") as handle:
                handle.truncate(size)
        return self.attach(
            image, sector_size=sector_size, read_only=read_only, partitions=partitions
        )

    def attach(
        self, image: Path, *, sector_size: int = 512, read_only: bool = False,
        partitions: bool = False,
    ) -> Loop:  # fmt: skip
        """Attaches an image; only with ``partitions`` can the device have any. Raises LabError."""
        argv = ["losetup", "--find", "--show", "--sector-size", str(sector_size)]
        argv += ["--read-only"] * read_only + ["--partscan"] * partitions
        node = Path(run(*argv, image).strip())
        loop = Loop(node, image, sector_size, read_only)
        self.made.append(loop)
        if not read_only:  # what set it read-only before may have left it so
            run("blockdev", "--setrw", node)
        if not partitions and loop.partitions():
            # of what was attached here before, by somebody who left them
            run("partx", "--delete", node)
        if not read_only and (loop.sys / "ro").read_text().strip() != "0":
            run("blockdev", "--setrw", node)
        return loop

    def detach(self, loop: Loop) -> None:
        """Raises LabError if something still uses the device after BUSY_S seconds."""
        self.made.remove(loop)
        if not loop.is_ours():
            return
        if loop.partitions():
            # they would stay, and be partitions of whatever is attached to this node next; who
            # looks at all drives of the machine has one open for a moment
            for _ in range(300):
                if not loop.partitions():
                    break
                subprocess.run(["partx", "--delete", loop.node], capture_output=True, check=False)
                time.sleep(0.1)
            else:
                raise LabError(f"a partition of {loop.node} ({loop.image.name}) is in use")
        subprocess.run(["losetup", "--detach", loop.node], capture_output=True, check=False)
        # of a device in use the kernel detaches it only later, by itself
        deadline = time.monotonic() + BUSY_S
        while loop.is_ours():
            if time.monotonic() > deadline:
                raise LabError(f"{loop.node} ({loop.image.name}) is still in use")
            time.sleep(0.02)

    def close(self) -> None:
        """Detaches all; every one is tried before the first failure is raised."""
        failures = []
        for loop in reversed(list(self.made)):
            try:
                self.detach(loop)
            except LabError as error:
                failures.append(str(error))
        if failures:
            raise LabError("; ".join(failures))


def flush(loops: Iterable[Loop]) -> None:
    """What was written to the devices is in their images afterwards."""
    for loop in loops:
        # fsync of the node: it also reaches what a mounted filesystem wrote through it
        run("sync", loop.node)


def digests(loops: Iterable[Loop], first: Mapping[str, int] | None = None) -> dict[str, str]:
    """Name of the image -> sha256 of all its bytes, taken by another process from the images.

    ``first``: name of an image -> how many bytes from its start are looked at, instead of all.
    """
    wanted = list(loops)
    flush(wanted)
    named = [str(loop.image) for loop in wanted]
    for n, loop in enumerate(wanted):
        if limit := (first or {}).get(loop.image.stem):
            named[n] += f"::{limit}"
    told = run(sys.executable, "-I", _DIGESTS, *named)
    found = [line.split("  ", 1)[0] for line in told.splitlines()]
    return {loop.image.stem: one for loop, one in zip(wanted, found, strict=True)}


def digest(loop: Loop) -> str:
    return digests([loop])[loop.image.stem]
