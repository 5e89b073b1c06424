"""Operations of the stage ollama."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from rich.console import Console

from deploys.common.context import Run
from deploys.common.kept import judged, keep, left
from deploys.common.looks import Ask, ask_json, ask_json_file
from deploys.common.made import ollama_model
from deploys.common.ollama_texts import drop_in_source, gone_files, texts_of
from deploys.common.operations import (
    Commands,
    Directory,
    TextFile,
    connector_arguments,
    converges,
    executing,
    make_directories,
    refuse,
    shown,
    unknown_yet,
    write_files,
)
from deploys.common.ready import ready_commands
from deploys.common.reasons import end_of, failed
from deploys.common.rendered import own_scripts
from deploys.common.send import Sent, send
from kvhost.ollama.dropin import UNIT, dropin_text, variables
from kvhost.ollama.facts import OllamaEvidence, parse_facts
from kvhost.ollama.receipt import make_ollama_receipt
from kvhost.ollama.server import adopted, log_argv, models_dir
from kvhost.ollama.verdict import verdict_of
from kvhost.records.receipt import system_of
from kvhost.reports.kept import (
    check_writable,
    make_report,
    reports_dir,
    tell_summary,
    write_report,
)
from kvhost.schema.ollama import archive_parts
from kvhost.schema.values import SENT, is_sent
from kvhost.services.served import api_url
from kvhost.verdict.view import verdict_table


def state_command(run: Run) -> tuple[str, ...]:
    return ("python3", run.script("engine"), "status", "--env", run.env_dir)


def unit_command(run: Run) -> tuple[str, ...]:
    return ("python3", run.script("ollama_unit"), "look")


def services_command(run: Run, *words: str) -> tuple[str, ...]:
    base = ("--base", run.paths.base_dir, "--user", run.user)
    return ("python3", run.script("services"), *base, *words)


def version_command(run: Run) -> tuple[str, ...]:
    return ("python3", run.script("ollama_ready"), "--url", api_url(run.settings), "--once")


def asks_of_the_server(run: Run) -> Iterator[Ask]:
    """What the operations here will ask."""
    if adopted(run.settings):
        yield ("argv", *unit_command(run))
    else:
        yield ("argv", *services_command(run, "--json", "status"))
        yield ("argv", *version_command(run))
    if models_dir(run.settings) is not None:
        yield ("file", run.settings.resolved_model_dir)
        yield ("file", models_dir(run.settings) or "")
    yield ("argv", *ollama_model(run, "check"))
    yield ("argv", *version_command(run))
    if run.drive_order is not None:
        yield ("text", run.paths.drive)
    yield ("file", run.paths.receipt)
    yield ("text", run.paths.receipt)
    yield ("text", f"{run.paths.state}/verified.json")


@operation()
@converges
def left_over(run: Run) -> Commands:
    """Services of another runner, or of the other way to have Ollama, are stopped and taken away.

    + run: the run of this host
    """
    gone = gone_files(run)
    if not gone:
        return
    commands = []
    if any(path.endswith(".json") for path in gone):
        commands.append(shlex.join(services_command(run, "uninstall")))
    if drop_in_source(run) in gone:
        commands.append(shlex.join(remove_drop_in(run)))
    yield shown(" && ".join([*commands, shlex.join(("rm", "-f", "--", *sorted(gone)))]))


def remove_drop_in(run: Run) -> tuple[str, ...]:
    return ("python3", run.script("ollama_unit"), "remove", "--base", run.paths.base_dir)


@operation()
@converges
def left_drop_in(run: Run) -> Commands:
    """kvhost's drop-in beside an ollama.service is taken away: another runner was chosen.

    + run: the run of this host
    """
    gone = shlex.join(("rm", "-f", drop_in_source(run)))
    yield shown(f"{shlex.join(remove_drop_in(run))} && {gone}")


@operation()
@converges
def archive_sent(run: Run) -> Commands:
    """An archive that lies on the controller, where it is not unpacked yet.

    + run: the run of this host
    """
    target, sha256 = archive_parts(run.settings.ollama_archive or "")
    if not is_sent(target):
        return
    state = ask_json(state_command(run))
    if state["status"] == "ok" and state["data"]["complete"]:
        return
    source = Path(target.removeprefix(SENT)).expanduser()
    yield send(
        "Ollama's archive",
        lambda: [Sent(source, sha256[:16], source.stat().st_size, sha256)],
        f"{run.paths.bundle}/ollama",
        run.paths.bundle,
    )


@operation()
@converges
def models_place(run: Run) -> Commands:
    """Where Ollama's models lie, if kvhost says where: its user's.

    + run: the run of this host
    """
    store = models_dir(run.settings)
    if store is None:
        return
    user = run.user
    if adopted(run.settings):
        unit = ask_json(unit_command(run))
        if unit["status"] != "ok":
            yield refuse(f"{UNIT}: {unit['why']}") if executing() else unknown_yet()
            return
        user = unit["data"]["user"]
    above = Directory(run.settings.resolved_model_dir, "root", "755")
    yield from make_directories([above, Directory(store, user, "755")])


@operation()
@converges
def drop_in(run: Run) -> Commands:
    """kvhost's drop-in beside a unit of somebody else, in force in the server that runs.

    + run: the run of this host
    """
    text = dropin_text(run.settings, run.paths)
    look = ask_json(unit_command(run))
    if look["status"] == "ok":
        unit, wanted = look["data"], variables(run.settings)
        process = unit["process"] or {}
        read = unit["ours"] == text and not unit["stale"] and unit["active"] == "active"
        if read and all(process.get(name) == value for name, value in wanted.items()):
            return
    yield shown(
        (
            *("python3", run.script("ollama_unit"), "apply", "--base", run.paths.base_dir),
            *("--text", drop_in_source(run), "--url", api_url(run.settings)),
        )
    )


@operation()
@converges
def own_service(run: Run) -> Commands:
    """Ollama of the archive runs with its present configuration, and answers.

    + run: the run of this host
    """
    state = ask_json(services_command(run, "--json", "status"))
    good = state["status"] == "ok" and state["data"]["supervisor_fresh"]
    good = good and all(
        row["state"] == "RUNNING" and row["alive"] and row["current"]
        for row in state["data"]["services"].values()
    )
    if good:
        answer = ask_json(version_command(run))
        if answer["status"] == "ok" and answer["data"]["ready"]:
            return
    timeout = ("--timeout", str(run.settings.ready_timeout_s))
    waits = [shlex.join(argv) for argv in ready_commands(run, *timeout)]
    yield shown(" && ".join([shlex.join(services_command(run, "ensure")), *waits]))


@operation()
@converges
def model(run: Run) -> Commands:
    """The model is in Ollama's list, with the digest that is pinned.

    + run: the run of this host
    """
    answer = ask_json(ollama_model(run, "check"))
    if answer["status"] == "ok" and answer["data"]["there"]:
        return
    program = f"{run.paths.current}/bin/ollama"
    if adopted(run.settings) and run.settings.model_source.startswith("/"):
        unit = ask_json(unit_command(run))
        program = (unit["data"] or {}).get("program") or "ollama"
    yield shown((*ollama_model(run, "ensure"), "--program", program))


@operation()
@converges
def receipt(run: Run) -> Commands:
    """What is installed and set, by digest.

    + run: the run of this host
    """
    server, found = ask_json(version_command(run)), ask_json(ollama_model(run, "check"))
    wrong = next((one["why"] for one in (server, found) if one["status"] != "ok"), None)
    if wrong is not None:
        yield refuse(f"Ollama does not answer: {wrong}") if executing() else unknown_yet()
        return
    drive = None
    if run.drive_order is not None:
        known = ask_json_file(run.paths.drive)
        if known["status"] != "ok":
            yield refuse(f"the drive's state: {known['why']}") if executing() else unknown_yet()
            return
        drive = known["data"]
    text = make_ollama_receipt(
        run.settings,
        run.lock,
        version=server["data"]["version"],
        model={"name": found["data"]["name"], "digest": found["data"]["digest"]},
        tools_digest="" if adopted(run.settings) else run.tools_digest,
        files=texts_of(run),
        scripts=own_scripts(run),
        system=system_of(run.settings, run.report),
        drive=drive,
    )
    if executing():
        left(run.host, json.loads(text))
    wanted = [TextFile(run.paths.receipt, text)]
    yield from write_files(wanted, f"{run.paths.state}/receipt.tar")


@operation()
@converges
def which_kv_type(run: Run, asked: bool) -> Commands:
    """Loads the model and reads in the server's log which KV type is in force.

    Not repeated when nothing has changed since it was seen to be the wanted one.

    + run: the run of this host
    + asked: repeat it in any case
    """
    known = ask_json_file(f"{run.paths.state}/verified.json")
    if not executing():
        if asked or known["status"] != "ok":
            yield unknown_yet()
        return
    held = ask_json_file(run.paths.receipt)
    if held["status"] != "ok":
        yield refuse(f"not provisioned: {held['why']}; run deploy.py first")
        return
    left(run.host, held["data"])
    digest = hashlib.sha256(json.dumps(held["data"], sort_keys=True).encode()).hexdigest()
    told = known["data"] if isinstance(known["data"], dict) else {}
    if not asked and told.get("receipt") == digest and told.get("persisted") == "NO_BY_DESIGN":
        judged(run.host, "NO_BY_DESIGN", str(told.get("time")))
        tell_summary(run.host, persisted="NO_BY_DESIGN", time=str(told.get("time")))
        logger.info(
            f"    [{run.host}] KV type {told.get('kv')} in force at {told.get('time')} (UTC), "
            "nothing has changed since; nothing persists, by design"
        )
        return
    yield FunctionCommand(look_and_judge, (run, held["data"], digest), {})


def look_and_judge(state: Any, host: Any, run: Run, held: dict[str, Any], digest: str) -> bool:
    """False where what is asked of this host is not so, or cannot be told."""
    how = connector_arguments()

    try:
        check_writable(reports_dir())
    except OSError as error:
        return failed(host, f"no report could be kept: {error}")
    verified = shlex.quote(f"{run.paths.state}/verified.json")
    argv = (
        *("python3", run.script("ollama_look"), "--url", api_url(run.settings)),
        *("--model", held["model"]["name"], "--load", *log_argv(run.settings, run.paths)),
        *("--timeout", str(run.settings.ready_timeout_s)),
    )
    begun = time.time()
    ok, output = host.run_shell_command(
        StringCommand(f"rm -f {verified}; {shlex.join(argv)}"), **how
    )
    try:
        facts = parse_facts(output.stdout.strip().splitlines()[-1] if ok else "")
    except (ValueError, IndexError) as error:
        said = end_of(output.stderr, 300)
        return failed(host, f"what Ollama said could not be read: {error}; {said}")
    evidence = OllamaEvidence(
        started_unix=begun,
        finished_unix=time.time(),
        wanted=run.settings.ollama_kv_cache_type,
        wanted_digest=run.settings.ollama_model_digest,
        facts=facts,
    )
    verdict = verdict_of(evidence)
    report = make_report(run.host, [(verdict, evidence)], datetime.now(UTC), digest)
    try:
        path = write_report(reports_dir(), report)
    except OSError as error:
        return failed(host, f"no report could be kept: {error}")
    Console(stderr=True).print(verdict_table(run.host, verdict))
    logger.info(f"    [{run.host}] report: {path}")
    code = verdict.exit_code
    tell_summary(run.host, persisted="NO_BY_DESIGN", time=report.time, code=str(code))
    judged(run.host, "NO_BY_DESIGN", report.time)
    if code != 3:
        return failed(host, f"{verdict.causes[0].title}: {verdict.causes[0].change}")
    told = {"receipt": digest, "persisted": "NO_BY_DESIGN", "time": report.time, "events": {}}
    text = StringIO(json.dumps({**told, "kv": evidence.wanted}) + "\n")
    host.put_file(text, f"{run.paths.state}/verified.json", **how)
    return True


@operation()
@converges
def kept_here(run: Run) -> Commands:
    """The receipt is kept on the controller, with what was said of it.

    + run: the run of this host
    """
    if executing() and (trouble := keep(run.host)):
        yield refuse(trouble)
