"""Tells the journal of the run what happens to each host, and how a run that is broken off ends.

A state callback of pyinfra's: nothing is sent to a host by it. Without KVHOST_JOURNAL only Ctrl-C
and lost links are seen to.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

import gevent
from pyinfra import context, logger
from pyinfra.api.state import BaseStateCallback, StateStage

from deploys.common import reasons
from kvhost.records.journal import VARIABLE, tell

#: exit code after Ctrl-C, as of a shell: 128 + SIGINT
INTERRUPTED = 130
#: seconds for giving the locks back after Ctrl-C; hosts that do not answer keep theirs
GIVE_BACK_S = 45
#: Python's own thresholds
GARBAGE = (700, 10, 10)
_begun = False
_stopping = False


class _Journal(BaseStateCallback):
    @staticmethod
    def operation_start(state: Any, op_hash: str) -> None:
        _hold()

    @staticmethod
    def operation_host_start(state: Any, host: Any, op_hash: str) -> None:
        _hold()
        reasons.forget(host.name)
        if op_hash in state.ops[host]:
            tell("step", host=host.name, name=_name(state, op_hash))

    @staticmethod
    def operation_host_error(
        state: Any, host: Any, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        why = reasons.reason(host.name, os.environ)
        tell("error", host=host.name, name=_name(state, op_hash), why=why)


def _name(state: Any, op_hash: str) -> str:
    return ", ".join(sorted(state.get_op_meta(op_hash).names))


def changes(state: Any, host: Any) -> int:
    """How many operations have changed a host so far."""
    metas = [data.operation_meta for data in state.ops[host].values()]
    return sum(1 for meta in metas if meta.is_complete() and meta.did_change())


def keep_journal() -> None:
    """Called for every host while a run prepares; the first call begins the journal."""
    global _begun
    if _begun:
        return
    _begun = True
    gc.freeze()  # all modules are loaded: garbage is not looked for among them (deploys/start.py)
    gc.set_threshold(*GARBAGE)
    state = context.ctx_state.get()  # the state itself: the proxy is empty at exit
    for host in state.inventory.get_active_hosts():
        reasons.listen(host)
    state.add_callback_handler(_Journal())
    if not os.environ.get(VARIABLE):
        return
    names = [host for host in state.inventory if state.is_host_in_limit(host)]
    away = [host.name for host in names if host not in state.activated_hosts]
    tell("hosts", names=[host.name for host in names], unreachable=away)
    atexit.register(_end, state)


def _end(state: Any) -> None:
    """What became of each host, as far as it was not told; nothing after a kill."""
    over = state.current_stage >= StateStage.Disconnect
    for host in state.activated_hosts:
        if host in state.failed_hosts:
            tell("failed", host=host.name, why=reasons.reason(host.name, os.environ))
        elif over:
            tell("done", host=host.name, changed=changes(state, host))


def heed_interrupts() -> None:
    """Called by config.py; kvhost/commands/running.py held SIGINT back until now."""
    signal.signal(signal.SIGINT, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _interrupted(signum: int, frame: FrameType | None) -> None:
    """pyinfra would wait for what runs on the hosts, and end with 0.

    Nothing is raised here: an exception lands in whichever greenlet is at work, and a greenlet
    that is killed counts as done for pyinfra, which goes on.
    """
    global _stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the locks are given back now: not twice
    if context.ctx_state.get().current_stage < StateStage.Connect:
        os.write(2, b"interrupted: no host was reached\n")  # nothing else is at work yet
        os._exit(INTERRUPTED)
    _stopping = True
    gevent.spawn(_leave)


def _leave() -> None:
    """Gives the locks back, which ends what runs on the hosts, and ends this process."""
    logger.warning("interrupted: the hosts' run locks are given back, what runs there is ended")
    context.ctx_state.get().pool.kill(block=False)
    with gevent.Timeout(GIVE_BACK_S, False):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _hold() -> None:
    """Begins nothing more on any host."""
    while _stopping:
        gevent.sleep(1)
