"""A hook of the tests: the run is killed at a step, as a power cut or an impatient person would.

KVHOST_TEST_KILL=N kills this process group with SIGKILL when the N-th operation starts on a host;
KVHOST_TEST_KILL=N+ when it has ended. Without the variable nothing is hooked.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from pyinfra import context
from pyinfra.api.state import BaseStateCallback

VARIABLE = "KVHOST_TEST_KILL"


class _Killer(BaseStateCallback):
    seen = 0

    @classmethod
    def _step(cls, after: bool) -> None:
        wanted = os.environ[VARIABLE]
        cls.seen += 0 if after else 1
        if wanted == f"{cls.seen}{'+' if after else ''}":
            os.killpg(os.getpgid(0), signal.SIGKILL)

    @staticmethod
    def operation_host_start(state: Any, host: Any, op_hash: str) -> None:
        _Killer._step(after=False)

    @staticmethod
    def operation_host_success(state: Any, host: Any, op_hash: str, retry_count: int = 0) -> None:
        _Killer._step(after=True)


def die_at_step() -> None:
    """Installs the hook, if a test asks for it."""
    if os.environ.get(VARIABLE):
        context.state.add_callback_handler(_Killer())
