"""Operations of the stage verify."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO, StringIO
from typing import Any

from pyinfra import context, logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from rich.console import Console

from deploys.common.back import go_back
from deploys.common.context import Run
from deploys.common.kept import judged, keep, left
from deploys.common.looks import ask_json, ask_json_file
from deploys.common.made import settle_command
from deploys.common.operations import (
    Commands,
    connector_arguments,
    converges,
    executing,
    refuse,
    shown,
    unknown_yet,
)
from deploys.common.ready import ready_command
from deploys.common.reasons import because, failed
from deploys.common.reboot import reboot
from deploys.common.refused import UP
from deploys.common.rendered import Late, look
from kvhost.llama.evidence import parse_llama
from kvhost.llama.verdict import judge_llama
from kvhost.onhost.ready import own_requests
from kvhost.records.journal import tell
from kvhost.reports.kept import (
    Report,
    check_writable,
    make_report,
    reports_dir,
    standing_report,
    tell_summary,
    write_report,
)
from kvhost.services.runners import asked_runner, runners_of
from kvhost.services.second_pair import second_pair
from kvhost.services.served import api_key_path, api_url, served_name
from kvhost.services.shared import pause_path
from kvhost.verdict.evidence import parse_events
from kvhost.verdict.judge import judge
from kvhost.verdict.types import Thresholds, Verdict
from kvhost.verdict.view import headline, verdict_table

#: exit codes of evidence.py
IN_USE, REBOOT = 3, 4
#: Token ids at both ends of a vocabulary are often special; prompts are drawn between them.
SPECIAL_IDS = 20


def evidence_config(run: Run, late: Late) -> dict[str, Any]:
    """What onhost/evidence.py is told (its docstring is the schema)."""
    paths, runner = run.paths, asked_runner(run.settings)
    settings = runner.settings
    api = api_url(settings)
    server = {} if settings.native else {"cache": "cache"}
    names = {**server, "runner": runner.service}
    vocab_size = int((late.resolved or {})["vocab_size"])
    restart = ["python3", run.script("services"), "--base", paths.base_dir, "--user", run.user]
    return {
        "api_base": api,
        "metrics_url": f"{api}/metrics",
        "cache_http": f"http://127.0.0.1:{settings.cache_http_port}" if server else None,
        "model": served_name(settings),
        "api_key_file": api_key_path(paths) if run.with_key else None,
        "namespace_dir": late.namespace_dir(run),
        "own_requests": own_requests(paths.state, runner.service),
        "services": {
            role: {
                "record": f"{paths.run}/{name}.json",
                "restart": [*restart, "restart", name],
                "log": f"{paths.log}/{name}.log",
            }
            for role, name in names.items()
        },
        # the reboot last: what comes before it must not have to survive it
        "events": sorted(settings.events, key=lambda event: event == "reboot"),
        "exact_numerics": run.lock.cuda is None,
        "heartbeat_s": settings.heartbeat_s,
        # at a cache server each rank writes a file of its own, and registers
        "files_per_chunk": runner.ranks if server else 1,
        "others": [
            {
                "metrics_url": f"{api_url(one.settings)}/metrics",
                "record": f"{paths.run}/{one.service}.json",
                "own_requests": own_requests(paths.state, one.service),
            }
            for one in runners_of(run.settings)
            if one.service != runner.service
        ],
        "engines": sum(one.ranks for one in runners_of(run.settings)),
        "other": other_pair(run, late) if "other" in settings.events else None,
        "pause": pause_path(paths) if settings.shared_tier is not None else None,
        "prompt_tokens": settings.verify_prompt_tokens,
        "chunk_size": settings.chunk_size,
        "vocab": [SPECIAL_IDS, vocab_size - SPECIAL_IDS],
        "disrupt": settings.disrupt,
        "timeouts": {"ready_s": settings.ready_timeout_s},
    }


def llama_config(run: Run, late: Late) -> dict[str, Any]:
    """What onhost/evidence_llama.py is told (its docstring is the schema)."""
    paths, settings = run.paths, run.settings
    vocab_size = int((late.resolved or {})["vocab_size"])
    services = ["python3", run.script("services"), "--base", paths.base_dir, "--user", run.user]
    names = ("runner", "slots")
    return {
        "api_base": api_url(settings),
        "api_key_file": api_key_path(paths) if run.with_key else None,
        "model": served_name(settings),
        "namespace_dir": late.namespace_dir(run),
        "own_tokens": f"{paths.state}/own-tokens.json",
        "services": {
            name: {"record": f"{paths.run}/{name}.json", "log": f"{paths.log}/{name}.log"}
            for name in names
        },
        "restart": [*services, "restart", *names],
        "start": [*services, "start", *names],
        "keeper": [run.tools_python, run.script("slots"), "--base", paths.base_dir],
        "slot": settings.llama_slots - 1,
        "prompt_tokens": settings.verify_prompt_tokens,
        "vocab": [SPECIAL_IDS, vocab_size - SPECIAL_IDS],
        "events": list(settings.verify_events),
        "exact_numerics": run.lock.cuda is None,
        "disrupt": settings.disrupt,
        "timeouts": {"ready_s": settings.ready_timeout_s},
    }


@dataclass(frozen=True)
class Verifier:
    """How a runner is tested: the script of kvhost/onhost that collects the evidence, what it is
    told, and how its answer is read and judged."""

    script: str
    config: Callable[[Run, Late], dict[str, Any]]
    parse: Callable[[str], Sequence[Any]]
    judge: Callable[[Any, Thresholds], Verdict]


VERIFIERS = {
    "vllm": Verifier("evidence", evidence_config, parse_events, judge),
    "llama_server": Verifier("evidence_llama", llama_config, parse_llama, judge_llama),
}


def other_pair(run: Run, late: Late) -> dict[str, Any]:
    """How the event "other" starts a second pair of services."""
    namespace = late.namespace_dir(run)
    ids = ("--reuid", run.user, "--regid", run.user, "--init-groups", "--inh-caps=-all")
    api = "http://127.0.0.1:{api_port}"
    return {
        "user": run.user,
        "start": ["setpriv", *ids, run.tools_python, run.script("launch")],
        "services": second_pair(run.settings, run.paths, namespace, with_key=run.with_key),
        "api_base": api,
        "metrics_url": f"{api}/metrics",
        "cache_http": "http://127.0.0.1:{cache_http_port}",
    }


def changed_so_far() -> bool:
    """Whether an operation of this run has changed this host."""
    this = context.ctx_host.get()
    for op_hash in context.state.get_op_order():
        data = context.state.ops[this].get(op_hash)
        meta = data.operation_meta if data is not None else None
        if meta is not None and meta.is_complete() and meta.did_change():
            return True
    return False


@operation()
@converges
def restart_test(run: Run, asked: bool) -> Commands:
    """Restarts both services between two equal requests and judges what came back.

    Not repeated when nothing has changed since the last verdict, unless asked for.

    + run: the run of this host
    + asked: repeat it in any case
    """
    if not executing():
        verified = ask_json_file(f"{run.paths.state}/verified.json")
        if asked or verified["status"] != "ok":
            yield unknown_yet()
        return
    late = look(run)
    receipt = ask_json_file(run.paths.receipt)
    if late.resolved is None or receipt["status"] != "ok":
        yield refuse(f"not provisioned: {late.why or receipt['why']}; run deploy.py first")
        return
    left(run.host, receipt["data"])
    digest = hashlib.sha256(json.dumps(receipt["data"], sort_keys=True).encode()).hexdigest()
    verified = ask_json_file(f"{run.paths.state}/verified.json")
    known = verified["data"] if isinstance(verified["data"], dict) else {}
    stands = known.get("receipt") == digest and known.get("persisted") == "PASS"
    if not asked and stands and not changed_so_far():
        tell_last(run, known)
        return
    engine = receipt["data"]["engine"]["digest"]
    if engine != run.lock.digest:
        yield refuse(
            f"this host runs the engine of lock {engine[:16]}, not of {run.lock.digest[:16]} that "
            "these settings ask for: deploy.py first, or test with the lock that it runs"
        )
        return
    if run.settings.runner not in VERIFIERS:
        yield refuse(
            f"there is no restart test of {run.settings.runner} in this version: verify = never"
        )
        return
    yield FunctionCommand(test_or_go_back, (run, late, digest), {})


@operation()
@converges
def settle(run: Run, clear: bool) -> Commands:
    """What passed is recorded as the last good one; environments that nothing needs any more go.

    + run: the run of this host
    + clear: false to remove nothing
    """
    if executing() and (trouble := keep(run.host)):
        yield refuse(trouble)
        return
    late = look(run)
    if late.resolved_path is None:
        yield unknown_yet()
        return
    argv = settle_command(run, late.resolved_path, clear=clear)
    state = ask_json((*argv, "--check"))
    if state["status"] != "ok" or not state["data"]["settled"]:
        yield shown(argv)


def collect(host: Any, run: Run, config: str, out: str) -> int | None:
    """Runs evidence.py on the host; its exit code, None if that could not be had."""
    evidence = run.script(VERIFIERS[run.settings.runner].script)
    script = f"python3 {evidence} --config {config} --out {out}"
    command = StringCommand(f'{script}; echo "exit $?"')
    _, output = host.run_shell_command(command, print_output=True, **connector_arguments())
    last = output.stdout.rpartition("exit ")[2].strip()
    return int(last) if last.isdecimal() else None


def tell_last(run: Run, known: dict[str, Any]) -> None:
    judged(run.host, "PASS", str(known.get("time")))
    tell_summary(run.host, persisted="PASS", time=str(known.get("time")))
    try:
        last, _ = standing_report(reports_dir(), run.host)
    except (OSError, ValueError) as error:  # a file of another's: the verdict is the host's
        logger.warning(f"    [{run.host}] the newest report is not readable: {error}")
        last = None
    if last is not None and last.time == known.get("time"):
        Console(stderr=True).print(headline(run.host, last.verdict))
    logger.info(
        f"    [{run.host}] persisted {known.get('persisted')} at {known.get('time')} (UTC); "
        "nothing has changed since, so the test is not repeated"
    )


def why_in_short(report: Report) -> str:
    """Of a verdict that is not PASS."""
    if report.left_out:
        return "the server is in use, and the test would restart it: it was left out"
    causes = report.verdict.causes
    return causes[0].title if causes else report.verdict.summary


#: hosts whose test was left out, because they are in use for instance: nothing has failed
_not_measured: set[str] = set()


def test_or_go_back(state: Any, host: Any, run: Run, late: Late, digest: str) -> bool:
    """The test; after a switch whose test is not passed, the way back. False: not PASS."""
    if test_and_judge(state, host, run, late, digest):
        return True
    back = run.host not in _not_measured and go_back(
        host, run, "the restart-persistence test was not passed"
    )
    if not back and (trouble := keep(run.host)):
        failed(host, trouble)
    return False


def test_and_judge(state: Any, host: Any, run: Run, late: Late, digest: str) -> bool:
    """Collects the evidence on the host, judges it here, keeps the report. False: not PASS."""
    try:
        check_writable(reports_dir())
    except OSError as error:
        _not_measured.add(run.host)  # the controller's trouble, not the host's
        return failed(host, f"no report could be kept: {error}")
    config, out = f"{run.paths.state}/verify.json", f"{run.paths.state}/evidence.json"
    how = connector_arguments()
    # a server that is only starting is waited for, and keeps its verdict if it does not come
    wait = ready_command(run, "--timeout", str(run.settings.ready_timeout_s))
    ok, _ = host.run_shell_command(StringCommand(shlex.join(wait)), print_output=True, **how)
    if not ok:
        message = f"the server does not answer, so there is nothing to test: {UP} mends it"
        return failed(host, message)
    # a test that is broken off leaves no old verdict standing; one that was never begun does
    stands, before = f"{run.paths.state}/verified.json", f"{run.paths.state}/verified.before"
    aside = f"rm -f {out}; if [ -e {stands} ]; then mv -f {stands} {before}; fi"
    host.run_shell_command(StringCommand(aside), **how)
    how_verified = VERIFIERS[run.settings.runner]
    told = json.dumps(how_verified.config(run, late), indent=1) + "\n"
    host.put_file(StringIO(told), config, **how)
    code = collect(host, run, config, out)
    if code == REBOOT:
        # on the machine that this runs on it ends here: kvhost verify goes on after the reboot
        code = collect(host, run, config, out) if reboot(host, run) else None
    spool = BytesIO()
    if code not in (0, IN_USE) or not host.get_file(out, spool, **how):
        return failed(host, "no evidence could be collected")
    try:
        events = how_verified.parse(spool.getvalue().decode())
    except ValueError as error:
        return failed(host, f"the evidence is not usable: {error}")
    limits = Thresholds(min_hit=run.settings.verify_min_hit)
    results = [(how_verified.judge(evidence, limits), evidence) for evidence in events]
    report = make_report(run.host, results, datetime.now(UTC), digest)
    try:
        path = write_report(reports_dir(), report)
    except OSError as error:  # the disk filled up while the test ran
        what = f"persisted {report.persisted}, but no report could be kept, so it does not count"
        if report.persisted != "FAIL":
            _not_measured.add(run.host)
        return failed(host, f"{what}: {error}")
    for verdict, evidence in results:
        if evidence.refused is None:
            Console(stderr=True).print(verdict_table(run.host, verdict))
            continue
        # nothing was measured: a table would be a list of what is missing
        Console(stderr=True).print(headline(run.host, verdict))
        logger.info(
            f"    [{run.host}] the server is in use, and the test would restart it: it was left "
            "out. What a run changed before is in force. When the server may be disturbed: the "
            "same command with --data disrupt=true"
        )
    if report.persisted != "FAIL" and any(evidence.refused for _, evidence in results):
        _not_measured.add(run.host)
    if report.persisted != "PASS":
        because(run.host, why_in_short(report))
    logger.info(f"    [{run.host}] report: {path}")
    tell_summary(run.host, persisted=report.persisted, time=report.time)
    judged(run.host, report.persisted, report.time)
    if report.left_out:
        tell("in_use", host=run.host)
        back = f"if [ -e {before} ]; then mv -f {before} {stands}; fi"
        host.run_shell_command(StringCommand(back), **how)
        return False
    known: dict[str, Any] = {"receipt": digest, "persisted": report.persisted, "time": report.time}
    # for onhost/metrics.py
    known["events"] = {one.verdict.event: one.verdict.persisted for one in report.results}
    text = StringIO(json.dumps(known) + "\n")
    host.put_file(text, f"{run.paths.state}/verified.json", **how)
    return report.persisted == "PASS"
