"""The plan of a host that could not be made: that host is refused, and no other. Pure."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb

from kvhost.basics import printable
from kvhost.plan.types import Plan, Refusal


def controller_refused(why: str) -> Plan:
    """For a secret, a lock or a mirror on the controller that this host's settings name."""
    return Plan(
        (),
        (
            Refusal(
                "host", "controller", "what its settings name on the controller cannot be used",
                "secrets, locks and a mirror that can be read", why,
                "mend what the reason names",
            ),
        ),
        (),
    )  # fmt: skip


def place(error: Exception) -> str:
    """What an error is, and where it was raised, in one line."""
    frames = extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return printable(f"{type(error).__name__}: {error}".splitlines()[0][:200]) + where


def plan_failed(error: Exception) -> Plan:
    """For what nobody thought of; one line says where it happened."""
    return Plan(
        (),
        (
            Refusal(
                "host", "plan_failed", "its plan could not be made",
                "a report and settings that kvhost understands", place(error),
                "a fault of kvhost's: report it with this line and `kvhost plan --json`",
            ),
        ),
        (),
    )  # fmt: skip
