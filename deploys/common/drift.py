"""Compares a host with what settings, lock and receipt say. Two or three commands, no change."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from pyinfra import host, logger
from pyinfra.api.exceptions import PyinfraError

from deploys.common.back import BROKEN_OFF
from deploys.common.context import REPO, Run, Visit
from deploys.common.facts import DriftText, DriveCheck
from deploys.common.made import packages
from deploys.common.ollama import prepare_ollama
from deploys.common.prepare import all_settings, gather, key_is_there, run_id
from deploys.common.reasons import hide
from deploys.common.settled import settled
from deploys.common.store import drift_rows
from deploys.common.wanted import ask_of, wanted_of, wanted_of_ollama
from kvhost.drives.order import drive_order
from kvhost.engine.locks import EngineLock, LockError, own_engine, read_lock, tools_digest
from kvhost.ollama.server import adopted
from kvhost.plan.drives import claim_of
from kvhost.plan.host import choose_python, minor
from kvhost.plan.make import Plan
from kvhost.plan.stopped import place
from kvhost.records import receipts
from kvhost.records.drift import Drift, Found, Wanted, compare
from kvhost.report import HostReport, ReportError
from kvhost.reports.kept import reports_dir
from kvhost.reports.since import last_removal
from kvhost.secrets import SecretError, api_key, hf_token, shared_password
from kvhost.settings import Settings


def find_drift() -> dict[str, Any]:
    """{"status": same|drift|unreadable, "rows", "unreadable"}, plain JSON values.

    Raises DeployError for settings that cannot be used.
    """
    try:
        found = look()
    except (ReportError, LockError, SecretError, receipts.NoReceipt) as error:
        found = Found(unreadable=[str(error)])
    except PyinfraError:
        raise  # pyinfra's own way to end a host, or the run
    except Exception as error:  # whatever is odd about one host: the others go on
        logger.debug("%s: it could not be compared", host.name, exc_info=error)
        found = Found(unreadable=[f"a fault of kvhost's, report it with this line: {place(error)}"])
    return {"status": found.status, **asdict(found)}


def look() -> Found:
    """Raises ReportError, LockError, SecretError, NoReceipt."""
    settings = all_settings()[host.name]
    report = gather(settings)
    own = report.kvhost.data
    if own is None or own.receipt.status == "unreadable":
        why = own.receipt.why if own else report.kvhost.why
        return Found(unreadable=[f"kvhost's own state: {why}"])
    owner = own.base.data.owner if own.base.data else "nobody"
    store: list[Drift] = []
    if settings.shared_store_address is not None:
        store = drift_rows(Visit(host.name, run_id(), settings, report, with_key=False))
        was_here = receipts.path_of(receipts.receipts_dir(), host.name).exists()
        if own.receipt.status == "absent" and not was_here:
            return Found(rows=store)  # a host of a store alone
    removed, again = last_removal(reports_dir(), host.name)
    if own.receipt.status == "absent" and removed is not None and again is None:
        gone = f"removed at {removed} by kvhost remove"
        return Found(rows=[*store, Drift("host", settings.base_dir, "provisioned", gone)])
    if own.receipt.status == "absent" and owner != "kvhost":
        return Found(rows=[Drift("host", settings.base_dir, "provisioned", "nothing of kvhost")])
    kept = receipts.load(receipts.receipts_dir(), host.name).receipt
    if settings.runner == "ollama":
        found = look_at_ollama(settings, report, kept)
        found.rows += store
        return found
    settings, lock, python = lock_of(settings, report)
    found_drive = claim_of(settings, report)
    key, token = api_key(settings, os.environ), hf_token(settings, os.environ)
    password = shared_password(settings, os.environ)
    hide((key, token, password))
    run = Run(
        host=host.name, run_id=run_id(), settings=settings, report=report, plan=Plan((), (), ()),
        lock=lock, tools_digest=tools_digest(REPO / "locks"), python=python, api_key=key,
        with_key=key is not None or key_is_there(settings, report), hf_token=token,
        shared_password=password,
        drive_order=drive_order(settings, found_drive.claimed) if found_drive.claimed else None,
    )  # fmt: skip
    wanted = wanted_of(run, kept)
    seen = parsed(host.get_fact(DriftText, ask=json.dumps(ask_of(run, wanted))))
    found = compared(run, wanted, seen)
    found.rows += store
    return found


def look_at_ollama(settings: Settings, report: HostReport, kept: dict[str, Any]) -> Found:
    """The same of a host with the runner Ollama. Raises ReportError."""
    run = prepare_ollama(settings, report, run_id())
    wanted = wanted_of_ollama(run, kept)
    ask = ask_of(run, wanted)
    seen = parsed(host.get_fact(DriftText, ask=json.dumps(ask)))
    found = compared(run, wanted, seen)
    for refusal in run.plan.refusals:
        found.rows.append(Drift("host", refusal.what, refusal.needed, refusal.found))
    late = [one for one in run.plan.actions if one.what.startswith("drop-in")]
    if adopted(settings) and not found.rows and late and late[0].state != "keep":
        what = "the running server"
        found.rows.append(Drift("service", what, "started with kvhost's drop-in", "without it"))
    return found


def compared(run: Run, wanted: Wanted, seen: dict[str, Any]) -> Found:
    """All but what only one runner has. Raises ReportError."""
    own = run.report.kvhost.data
    found = compare(wanted, seen, own.receipt.data if own else None, drive_trouble(run))
    if run.report.packages.data is None:
        found.unreadable.append(f"packages: {run.report.packages.why}")
    states = run.report.packages.data or {}
    found.rows += [
        Drift("host", f"package {name}", "installed", states[name])
        for name in packages(run)
        if states.get(name, "installed") != "installed"
    ]
    failed = own.failed.data if own else None
    if isinstance(failed, dict) and failed.get("state") == BROKEN_OFF:
        found.rows.append(Drift("host", "a way back", "completed", "broken off"))
    return found


def parsed(text: str) -> dict[str, Any]:
    """Raises ReportError."""
    try:
        loaded = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ReportError(f"the look at the host gave no answer: {text[:300]!r}") from None
    if not isinstance(loaded, dict):
        raise ReportError(f"the look at the host gave no answer: {text[:300]!r}")
    return loaded


def lock_of(settings: Settings, report: HostReport) -> tuple[Settings, EngineLock, str]:
    """The settings by which a run would go now, the lock, and its Python. Raises LockError."""
    found = settled(settings, report)
    python = choose_python(settings, report, found.info.pythons)
    if python is None:
        raise LockError("the host has no Python that the lock covers any more")
    own = own_engine(settings, found.info)
    lock = read_lock(REPO / "locks", found.info, minor(python), own)
    return found.settings, lock, python.path


def drive_trouble(run: Run) -> list[str]:
    """What is wrong with the claimed drive. Raises ReportError if it cannot be told."""
    if not run.settings.claims_a_drive:
        return []
    if run.drive_order is None:
        return ["the claim leads to no drive (kvhost drives says why)"]
    order = json.dumps(run.drive_order, sort_keys=True)
    told = parsed(host.get_fact(DriveCheck, order=order, state=run.paths.state))
    if "ok" not in told:
        raise ReportError(f"the drive: {told.get('why')}")
    return [str(row) for row in told.get("wrong", [])]
