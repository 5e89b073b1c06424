"""A run that is killed at any step is completed by the next, to the same receipt.

Every operation of deploy.py is killed twice, at its start and half-way, one after the other on a
host that begins empty: what the run before left is what the next finds. The steps inside the
engine's installation are killed one by one in test_engine_script.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.e2e_tools import Site

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.full]


def test_killed_at_every_step_the_next_run_completes_to_the_same_receipt(site: Site) -> None:
    # the environment of the controller, and a receipt to compare with, from a run left in peace
    calm = site.up(verify="never")
    assert calm.code == 0, calm.text[-4000:]
    steps, receipt = len(calm.counts()), site.receipt()
    assert steps >= 17
    site.remove()
    killed = 0
    for step in range(1, steps + 1):
        for kill in (str(step), f"{step}@0.4", f"{step}@4"):
            code = site.killed_up(kill, verify="never")
            assert code in (0, -signal.SIGKILL), site.last.text[-4000:]
            killed += code != 0
    assert killed >= 2 * steps
    done = site.up(verify="never")
    assert done.code == 0, done.text[-4000:]
    assert site.receipt() == receipt
    assert site.up(verify="never").changed() == []
    tested = site.up()
    assert tested.code == 0, tested.text[-4000:]
