"""Drives that hold something, or are in use: none is ever written to, whatever kvhost was told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.drive_states import PACKAGES, STATES, State, ready
from tests.lab.loop import Loops, digest
from tests.lab.recipe import install

pytestmark = [
    pytest.mark.drives,
    pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts need root"),
]


@pytest.fixture(scope="session")
def tools() -> None:
    """The programs that make the states."""
    install(PACKAGES)


def test_there_are_more_than_sixty_states_and_each_has_a_name() -> None:
    names = [state.name for state in STATES]
    assert len(names) > 60 and len(set(names)) == len(names)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_the_state_is_what_it_says_and_keeps_its_digest_when_it_is_looked_at(
    state: State, tmp_path: Path
) -> None:
    with Loops(tmp_path / "images") as loops, ready(loops, state, tmp_path / "work") as loop:
        before = digest(loop)
        subprocess.run(["blkid", "-p", loop.node], capture_output=True, check=False)
        found = subprocess.run(["wipefs", "-n", loop.node], capture_output=True, check=True)
        assert bool(found.stdout) or state.finding not in ("signature", "partition_table")
        assert digest(loop) == before
        holds = subprocess.run(["cmp", "-s", "-n", str(loop.image.stat().st_size),
                                loop.image, "/dev/zero"], check=False).returncode  # fmt: skip
        assert holds or state.use or state.read_only, "nothing is on it, and nothing uses it"
