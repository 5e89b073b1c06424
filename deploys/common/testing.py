"""A hook of the tests: the run is killed at a step, as a power cut or an impatient person would.

KVHOST_TEST_KILL=N kills this process group with SIGKILL when the N-th operation starts on a host,
KVHOST_TEST_KILL=N@S when it has run for S seconds. Without the variable nothing is hooked.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from pyinfra import context
from pyinfra.api.state import BaseStateCallback

VARIABLE = "KVHOST_TEST_KILL"


def _kill() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


class _Killer(BaseStateCallback):
    seen = 0

    @staticmethod
    def operation_host_start(state: Any, host: Any, op_hash: str) -> None:
        _Killer.seen += 1
        number, _, seconds = os.environ[VARIABLE].partition("@")
        if _Killer.seen == int(number):
            if not seconds:
                _kill()
            # a thread, because the operation may block this one
            threading.Timer(float(seconds), _kill).start()


def die_at_step() -> None:
    """Installs the hook, if a test asks for it."""
    if os.environ.get(VARIABLE):
        context.state.add_callback_handler(_Killer())
