"""Something happens to the drive between the plan and the step that writes: nothing is written.

The step is stopped at each place before its first write; there the drive is given to somebody else.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.drive_states import mounted, opened, write
from tests.drive_tools import Host, host_with
from tests.lab.loop import MIB, Loop, digest

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]
#: those of drive_apply.STEPS that come before anything is written
BEFORE = ("hold", "probe", "blank", "counter")
Happening = Callable[[Loop, Path], AbstractContextManager[None]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with host_with(tmp_path) as made:
        yield made


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True)


def one_byte(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    write(loop, 7 * MIB + 1, b"\x01")
    run("sync", loop.node)
    return nullcontext()


def swap_space(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    run("mkswap", loop.node)
    run("sync", loop.node)
    return nullcontext()


def lvm(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    write(loop, 512, b"LABELONE" + (1).to_bytes(8, "little") + bytes(8) + b"LVM2 001")
    run("sync", loop.node)
    return nullcontext()


def filesystem_in_use(loop: Loop, scratch: Path) -> AbstractContextManager[None]:
    run("mkfs.ext4", "-q", "-F", loop.node)
    return mounted(loop.node, scratch)


@contextmanager
def read_only(loop: Loop, scratch: Path) -> Iterator[None]:
    run("blockdev", "--setro", loop.node)
    try:
        yield
    finally:
        run("blockdev", "--setrw", loop.node)  # it would stay so for the next image


@contextmanager
def other_disk(loop: Loop, scratch: Path) -> Iterator[None]:
    """Another image behind the same name and numbers; the kernel counts it as another disk."""
    image = loop.image.with_name("other.img")
    image.write_bytes(bytes(loop.image.stat().st_size))
    run("losetup", "--detach", loop.node)
    run("losetup", loop.node, image)
    try:
        yield
        run("sync", loop.node)
        assert not any(image.read_bytes())
    finally:
        run("losetup", "--detach", loop.node)


@contextmanager
def node_of_another(loop: Loop, scratch: Path) -> Iterator[None]:
    """The name leads to another device, as after a reboot: here a node of a test's own."""
    path = scratch / "disk"
    path.unlink()
    path.symlink_to("/dev/null")
    yield


HAPPENINGS: dict[str, Happening] = {
    "one byte is written": one_byte,
    "a swap space is made": swap_space,
    "it joins LVM": lvm,
    "a process opens it to write": opened("os.O_RDWR"),
    "it is formatted and mounted": filesystem_in_use,
    "it becomes read-only": read_only,
    "another disk has its name": other_disk,
    "the name leads elsewhere": node_of_another,
}
# what the exclusive hold of kvhost makes impossible from the step on, or cannot be done to it
NOT_FROM = {
    "it is formatted and mounted": "blank",
    "a swap space is made": "blank",
    "another disk has its name": "probe",
    "the name leads elsewhere": "probe",
}
CASES = [
    pytest.param(what, step, id=f"{what}, at {step}")
    for what in HAPPENINGS
    for step in BEFORE[: BEFORE.index(NOT_FROM[what]) if what in NOT_FROM else None]
]


@pytest.mark.parametrize(("what", "step"), CASES)
def test_nothing_is_written(host: Host, tmp_path: Path, what: str, step: str) -> None:
    loop = host.drive()
    order = host.order(loop)
    (tmp_path / "disk").symlink_to(loop.node)
    if what == "the name leads elsewhere":
        order["drive"]["path"] = str(tmp_path / "disk")
    told: dict[str, Any] = {}
    with told_after(host, order, step, told), HAPPENINGS[what](loop, tmp_path):
        before = digest(loop) if loop.is_ours() else None
        told["resume"]()
        after = digest(loop) if loop.is_ours() else None
    assert told["exit"] == 3, told
    assert told["status"] == "refused" and told["changed"] == [], told
    assert after == before
    assert host.fstab.read_text() == "# of this host\n"


@contextmanager
def told_after(
    host: Host, order: dict[str, Any], step: str, told: dict[str, Any]
) -> Iterator[None]:
    """Stopped at the step; told["resume"]() goes on and waits for the answer."""
    pause = host.paused(order, step)
    answer = pause.__enter__()

    def resume() -> None:
        pause.__exit__(None, None, None)
        told.update(answer)

    told["resume"] = resume
    try:
        yield
    finally:
        if "exit" not in told:
            resume()


def test_without_a_happening_the_same_order_is_carried_out(host: Host) -> None:
    loop = host.drive()
    with host.paused(host.order(loop), "counter") as told:
        pass
    assert told["exit"] == 0 and told["changed"], told


@pytest.mark.parametrize("step", ["blank", "counter"])
def test_nobody_else_can_have_it_while_it_is_read(host: Host, step: str) -> None:
    """What a mount, a swapon, LVM, md and others ask the kernel for is refused to them."""
    loop = host.drive()
    with host.paused(host.order(loop), step), pytest.raises(OSError) as raised:
        os.open(loop.node, os.O_RDWR | os.O_EXCL)
    assert raised.value.errno == errno.EBUSY
