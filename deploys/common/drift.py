"""Compares a host with what settings, lock and receipt say. Two or three commands, no change."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from pyinfra import host

from deploys.common.context import REPO, Run, Visit
from deploys.common.facts import DriftText, DriveCheck
from deploys.common.ollama import prepare_ollama
from deploys.common.ollama_texts import texts_of
from deploys.common.prepare import all_settings, gather, key_is_there, predicted, run_id
from deploys.common.ready import ready_commands
from deploys.common.rendered import (
    gpus_of,
    manager_texts,
    metrics_script,
    own_scripts,
    shared_texts,
    vllm_yamls,
)
from deploys.common.settled import settled
from deploys.common.store import drift_rows
from kvhost.drives.order import drive_order
from kvhost.engine.locks import EngineLock, LockError, own_engine, read_lock, tools_digest
from kvhost.ollama.dropin import DROP_IN, dropin_text
from kvhost.ollama.server import adopted
from kvhost.plan.drives import claim_of
from kvhost.plan.host import choose_python, minor
from kvhost.plan.make import Plan
from kvhost.records import receipts
from kvhost.records.drift import Drift, File, Found, Wanted, compare, pins_of, sha256
from kvhost.records.receipt import system_of
from kvhost.report import HostReport, ReportError
from kvhost.reports.kept import reports_dir
from kvhost.reports.since import last_removal
from kvhost.secrets import SecretError, api_key
from kvhost.services import monitoring
from kvhost.services.describe import services
from kvhost.services.namespace import digest_of
from kvhost.services.runners import runners_of
from kvhost.services.served import api_key_path
from kvhost.services.service import unit_file
from kvhost.services.shared import password_path
from kvhost.settings import Settings, settings_digest

#: where services.py puts the units, of kvhost/onhost/services_systemd.py
UNITS = "/etc/systemd/system"


def find_drift() -> dict[str, Any]:
    """{"status": same|drift|unreadable, "rows", "unreadable"}, plain JSON values.

    Raises DeployError for settings that cannot be used.
    """
    try:
        found = look()
    except (ReportError, LockError, SecretError, receipts.NoReceipt) as error:
        found = Found(unreadable=[str(error)])
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
    key = api_key(settings, os.environ)
    run = Run(
        host=host.name, run_id=run_id(), settings=settings, report=report, plan=Plan((), (), ()),
        lock=lock, tools_digest=tools_digest(REPO / "locks"), python=python, api_key=None,
        with_key=key is not None or key_is_there(settings, report), hf_token=None,
        drive_order=drive_order(settings, found_drive.claimed) if found_drive.claimed else None,
    )  # fmt: skip
    wanted = wanted_of(run, kept)
    seen = parsed(host.get_fact(DriftText, ask=json.dumps(ask_of(run, wanted))))
    found = compare(wanted, seen, own.receipt.data, drive_trouble(run))
    found.rows += store
    return found


def look_at_ollama(settings: Settings, report: HostReport, kept: dict[str, Any]) -> Found:
    """The same of a host with the runner Ollama. Raises ReportError."""
    run, is_adopted = prepare_ollama(settings, report, run_id()), adopted(settings)
    scripts, paths = own_scripts(run), run.paths
    texts = texts_of(run)
    if is_adopted:
        texts[DROP_IN] = dropin_text(settings, paths)
    elif run.systemd:
        unit = f"{paths.etc}/{unit_file('runner')}"
        texts[f"{UNITS}/{unit_file('runner')}"] = texts[unit]
    files = {
        path: File(sha256(text), "755" if path.startswith(f"{paths.bin}/") else "644")
        for path, text in {**texts, **scripts}.items()
    }
    own = () if is_adopted else (paths.log, paths.run, paths.home)
    wanted = Wanted(
        files=files,
        directories={
            **dict.fromkeys((paths.base_dir, paths.bin, paths.etc), ("root", "755")),
            **dict.fromkeys(own, (run.user, "700")),
        },
        env=run.env_dir,
        current=paths.current,
        pins={},
        settings=settings_digest(settings),
        lock=run.lock.digest,
        system=system_of(settings, report),
        kept=kept,
        tier_dir=paths.tier_dir,
        parts=("files", "directories")
        if is_adopted
        else ("files", "directories", "env", "services", "answers"),
    )
    ask = {**ask_of(run, wanted), "parts": wanted.parts}
    seen = parsed(host.get_fact(DriftText, ask=json.dumps(ask)))
    held = report.kvhost.data.receipt.data if report.kvhost.data else None
    found = compare(wanted, seen, held, drive_trouble(run))
    for refusal in run.plan.refusals:
        found.rows.append(Drift("host", refusal.what, refusal.needed, refusal.found))
    late = [one for one in run.plan.actions if one.what.startswith("drop-in")]
    if is_adopted and not found.rows and late and late[0].state != "keep":
        what = "the running server"
        found.rows.append(Drift("service", what, "started with kvhost's drop-in", "without it"))
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


def wanted_of(run: Run, kept: dict[str, Any]) -> Wanted:
    paths, etc = run.paths, run.paths.etc
    files = {
        path: File(sha256(text), "755" if path.startswith(f"{paths.bin}/") else "644")
        for path, text in own_scripts(run).items()
    }
    texts = vllm_yamls(run.settings, with_key=run.with_key)
    fields = predicted(kept, run.settings, run.lock)
    if fields is None:
        raise receipts.NoReceipt(
            "the kept receipt is of another runner or model than these settings, or of an older "
            "form: give the settings of the last run; kvhost up would change the host to these"
        )
    gpus = gpus_of(run.settings, run.lock)
    place = paths.namespace(digest_of(fields))
    described = services(run.settings, paths, place, with_key=run.with_key, gpus=gpus)
    texts |= {f"{etc}/{one.name}.json": one.launch_spec(paths) for one in described}
    texts[f"{etc}/model-digest"] = f"{kept['model']['digest']}\n"
    texts |= manager_texts(run, described)
    if run.systemd:
        units = [unit_file(one.name) for one in described]
        texts |= {f"{UNITS}/{unit}": texts[f"{etc}/{unit}"] for unit in units}
    texts |= shared_texts(run.settings)
    files |= {path: File(sha256(text), "644") for path, text in texts.items()}
    if run.settings.monitoring and run.systemd:
        unit = monitoring.unit_text(run.settings, paths, metrics_script())
        files[f"{UNITS}/{monitoring.UNIT}"] = File(sha256(unit), "644")
    if run.settings.shared_tier is not None:
        owner = "root" if run.systemd else run.user
        files[password_path(paths)] = File(None, "600", owner)
    if run.with_key:
        owner = "root" if run.systemd else run.user
        files[api_key_path(paths)] = File(None, "600", owner)
    roots = (paths.base_dir, paths.bin, paths.lib, paths.etc, paths.state, paths.envs)
    return Wanted(
        files=files,
        directories={
            **dict.fromkeys(roots, ("root", "755")),
            paths.secrets: ("root", "711"),
            **dict.fromkeys((paths.log, paths.run, paths.home), (run.user, "700")),
            paths.tier_dir: (run.user, "700"),
            place: (run.user, "700"),
        },
        env=run.env_dir,
        current=paths.current,
        pins=pins_of(run.lock.text),
        settings=settings_digest(run.settings),
        lock=run.lock.digest,
        system=system_of(run.settings, run.report),
        kept=kept,
        tier_dir=paths.tier_dir,
        collector=collector_of(run),
    )


def collector_of(run: Run) -> str | None:
    """What the host's manager calls the program that writes the figures for Prometheus."""
    if not run.settings.monitoring:
        return None
    return monitoring.UNIT.removesuffix(".service") if run.systemd else monitoring.PROGRAM


def ask_of(run: Run, wanted: Wanted) -> dict[str, Any]:
    """What drift_look.py is asked."""
    return {
        "base": run.paths.base_dir,
        "user": run.user,
        "files": [*wanted.files, wanted.current],
        "directories": list(wanted.directories),
        "env": run.env_dir,
        "mounts": [run.paths.tier_dir],
        "collector": wanted.collector,
        "answers": {
            runner.service: argv
            for runner, argv in zip(
                runners_of(run.settings), ready_commands(run, "--once"), strict=True
            )
        },
    }


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
