"""The first half of a run: settings of all hosts, a report and a plan of each. Changes nothing."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyinfra import context, host, logger
from pyinfra.api.arguments import all_global_arguments
from pyinfra.api.exceptions import DeployError, PyinfraError
from rich.console import Console

from deploys.common import early
from deploys.common.context import REPO, Run, Visit
from deploys.common.facts import HostReportText, script_text, scripts
from deploys.common.journal import keep_journal
from deploys.common.kept import written
from deploys.common.ollama import prepare_ollama
from deploys.common.operations import sha256
from deploys.common.program import against_program
from deploys.common.reasons import failed, hide
from deploys.common.rendered import gpus_of, shared_texts, vllm_yamls
from deploys.common.runlock import is_dead
from deploys.common.settled import model_need, settled, the_matrix
from kvhost.driver.mend import mend_of
from kvhost.driver.sources import MirrorError, mirror_of
from kvhost.drives.order import drive_order
from kvhost.drives.smart import counters
from kvhost.engine.bundle import bundle_refusals
from kvhost.engine.locks import EngineLock, LockError, own_engine, read_lock
from kvhost.engine.locks import tools_digest as digest_of_tools
from kvhost.engine.matrix import LockInfo, ProgramInfo
from kvhost.engine.packages import drive_packages, needed_packages, runner_packages
from kvhost.llama import facts as llama
from kvhost.onhost import model_builtin, model_gguf
from kvhost.plan.accelerator import accelerator_refusals, decision_of
from kvhost.plan.drives import claim_of, drive_notes
from kvhost.plan.host import installed, minor
from kvhost.plan.make import Plan, PlanInputs, choose_python, make_plan
from kvhost.plan.stopped import controller_refused, plan_failed
from kvhost.plan.types import Refusal, Stage, unreadable
from kvhost.plan.view import render_plans
from kvhost.records import progress
from kvhost.records.journal import tell
from kvhost.report import HostReport, ReportError, parse_report
from kvhost.reports.kept import tell_summary
from kvhost.secrets import SecretError, api_key, hf_token, shared_password
from kvhost.services.describe import services
from kvhost.services.namespace import digest_of, predicted_fields, predicted_versions
from kvhost.services.runners import runners_of
from kvhost.services.served import api_key_path
from kvhost.settings import Settings, SettingsError, settings_digest, validate_hosts

RUN_ID = uuid.uuid4().hex[:12]
PYTHONS = ("3.11", "3.12", "3.13")

_settings: dict[str, Settings] = {}
_plans: dict[str, Plan] = {}
#: host -> why it gave no report that is one
_unreported: dict[str, str] = {}


def pyinfra_keys() -> frozenset[str]:
    """Data keys that are pyinfra's: global arguments and what the connectors take."""
    keys = {name for name, _ in all_global_arguments()}
    for one in context.state.inventory:
        keys |= set(getattr(one.connector_cls, "data_cls", dict).__annotations__)
    return frozenset(keys)


def places() -> dict[str, dict[str, str]]:
    """Host -> key -> where it comes from, of the keys that are not the host's own data.

    Of a key in several places the one that counts: --data before host, host before group.
    """
    inventory = context.state.inventory
    override = {str(key): "--data" for key in inventory.get_override_data()}
    return {
        one.name: {
            **{
                str(key): "the data of a group"
                for key in one.group_data
                if key not in one.host_data
            },
            **override,
        }
        for one in inventory
    }


def all_settings() -> dict[str, Settings]:
    """Settings of every host of the inventory, checked once for the whole run.

    Raises DeployError with all problems of all hosts, before anything is touched anywhere.
    """
    if not _settings:
        data = {one.name: dict(one.data.dict()) for one in context.state.inventory}
        keep_journal()  # so that it tells of a refusal, too
        try:
            _settings.update(validate_hosts(data, pyinfra_keys(), elsewhere=places()))
        except SettingsError as error:
            for name in dict.fromkeys(name for hosts in error.problems.values() for name in hosts):
                if name in {one.name for one in context.state.inventory.get_active_hosts()}:
                    tell("refused", host=name, why="its settings are not usable, see above")
            raise DeployError(f"the settings are not usable:\n{error}") from error
    return _settings


def gather(settings: Settings) -> HostReport:
    """The host's report, in one round trip. Raises ReportError if what came is none."""
    # which Python it will be is only known once the report is there
    packages = sorted(
        {p for v in PYTHONS for p in needed_packages(f"/usr/bin/python{v}", gpu=True)}
        | {*runner_packages(settings), *drive_packages(settings)}
    )
    apis = [one.settings.api_port for one in runners_of(settings)]
    ports = (*apis, *settings.cache_ports.values())
    argv = [
        "--base-dir", settings.base_dir, "--tier-dir", settings.resolved_tier_dir,
        "--service-user", settings.service_user, "--packages", ",".join(packages),
        "--ports", ",".join(map(str, ports)),
    ]  # fmt: skip
    if settings.python != "auto":
        argv += ["--python", settings.python]
    if settings.model_source.startswith("/"):
        argv += ["--model-path", settings.model_source]
    if settings.model_dir is not None or settings.claims_a_drive:
        argv += ["--models-dir", settings.resolved_model_dir]
    if settings.claims_a_drive:
        argv += ["--drives", "--drive-mount", settings.resolved_drive_mount]
    if settings.shared_tier is not None:
        argv += ["--shared", settings.shared_tier]
    words = tuple(argv)
    said = early.report(host.name, words)
    return parse_report(said if said is not None else host.get_fact(HostReportText, argv=words))


def prepare(*, only_refusals: bool = False, stages: frozenset[Stage] | None = None) -> Run | None:
    """Everything that is decided before a host is touched; None if the host is refused.

    Prints the plans of all hosts in one table as soon as the last is known; with
    ``only_refusals`` (a run that installs nothing) what stands against it, and nothing else.
    ``stages``: a run of these alone; what stands against others is no reason, and no plan of it.
    """
    settings = all_settings()[host.name]
    keep_journal()
    try:
        return _prepare(settings, only_refusals=only_refusals, stages=stages)
    except (SecretError, LockError, MirrorError) as error:
        stopped(controller_refused(str(error)))
    except PyinfraError:
        raise  # pyinfra's own way to end a host, or the run
    except Exception as error:  # whatever is odd about one host: the others go on
        logger.debug("%s: no plan", host.name, exc_info=error)
        stopped(plan_failed(error))
    return None


def stopped(plan: Plan) -> None:
    """This host alone is refused, in one line beside its plan; the others go on."""
    (refusal,) = plan.refusals
    failed(host, f"{refusal.what}: {refusal.found}")
    show(plan)


def _prepare(
    settings: Settings, *, only_refusals: bool, stages: frozenset[Stage] | None
) -> Run | None:
    """Raises SecretError, LockError, MirrorError for what lies on the controller."""
    key, token = api_key(settings, os.environ), hf_token(settings, os.environ)
    shared = shared_password(settings, os.environ)
    hide((key, token, shared))
    shared_texts(settings)  # a file that is missing is said before anything is done
    matrix, mirror = the_matrix(), mirror_of(settings)
    progress.tell(host.name, "looked at")
    try:
        report = gather(settings)
    except ReportError as error:
        # this host alone is refused: the others go on
        show(Plan((), (unreadable("host", "the host's report", str(error)),), ()))
        return None
    if settings.runner == "ollama":
        run = prepare_ollama(settings, report, run_id(), key=key is not None)
        show(Plan((), run.plan.refusals, ()) if only_refusals else run.plan)
        tell_summary(host.name)
        return None if run.plan.refusals else run
    found = settled(settings, report)
    settings, info = found.settings, found.info
    python = choose_python(settings, report, info.pythons)
    version = minor(python) if python else info.pythons[0]
    python_path = python.path if python else "/usr/bin/python3"
    packages = (
        *needed_packages(python_path, gpu=info.cuda is not None),
        *runner_packages(settings),
        *drive_packages(settings),
    )
    report = only_packages(report, packages)
    lock = read_lock(REPO / "locks", info, version, own_engine(settings, info))
    with_key = key is not None or (only_refusals and key_is_there(settings, report))
    decision = decision_of(report, info, matrix)
    # a run that installs nothing installs no driver
    mend = None if only_refusals else mend_of(settings, report, decision, mirror)
    inputs = replace(
        plan_inputs(settings, report, info, lock, found.refusals, with_key=with_key),
        lock_state=info.state,
        bundle_refusals=against_bundle(settings, report, lock)
        + against_program(settings, report, lock),
        cuda=info.cuda,
        derived=found.notes,
        driver=decision,
        mend=mend,
    )
    plan = make_plan(settings, report, inputs)
    if stages is not None:
        plan = Plan(
            tuple(action for action in plan.actions if action.stage in stages),
            tuple(refusal for refusal in plan.refusals if refusal.stage in stages),
            tuple(drive_notes(settings, report)),
        )
    show(Plan((), plan.refusals, ()) if only_refusals else plan)
    if plan.refusals or (python is None and stages is None):
        return None
    claimed = claim_of(settings, report).claimed
    written(host.name, counters(report.drives.data))
    tell_summary(host.name)
    return Run(
        host=host.name,
        run_id=run_id(),
        settings=settings,
        report=report,
        plan=plan,
        lock=lock,
        tools_digest=inputs.tools_digest,
        python=python_path,
        api_key=key,
        with_key=with_key,
        hf_token=token,
        shared_password=shared,
        drive_order=drive_order(settings, claimed) if claimed else None,
        driver_order=mend.order if mend else None,
    )


def against_bundle(settings: Settings, report: HostReport, lock: EngineLock) -> tuple[Refusal, ...]:
    """What stands against a bundle of the controller's, where something is still to be installed
    from it. One that lies on the host is judged there."""
    where, kvhost = settings.engine_bundle, report.kvhost.data
    if where is None or where.startswith("host:"):
        return ()
    tools = REPO / "locks" / "tools.txt"
    have = kvhost is not None and installed(kvhost.envs, lock.digest)
    if have and kvhost is not None and installed(kvhost.tools, digest_of_tools(REPO / "locks")):
        return ()
    return tuple(bundle_refusals(where, lock, tools.read_text(encoding="utf-8")))


def against_the_gpu(run: Run) -> tuple[Refusal, ...]:
    """What stands against the GPU now, decided anew of a new report. Raises ReportError."""
    report = gather(run.settings)
    matrix = the_matrix()
    info = matrix.locks.get(run.lock.name) or matrix.programs[run.lock.name]
    facts = replace(
        plan_inputs(run.settings, report, info, run.lock, (), with_key=run.with_key),
        cuda=info.cuda,
        driver=decision_of(report, info, matrix),
    )
    return tuple(accelerator_refusals(run.settings, report, facts))


def visit() -> Visit | None:
    """A host that is asked something, or loses something: settings and report, no plan.

    None, with the reason told, if the host gave no report. Raises DeployError for bad settings.
    """
    settings = all_settings()[host.name]
    keep_journal()
    try:
        report = gather(settings)
    except ReportError as error:
        _unreported[host.name] = str(error)
        host.log_styled(str(error), fg="red", log_func=logger.error)
        return None
    return Visit(host.name, run_id(), settings, report, key_is_there(settings, report))


def run_id() -> str:
    return f"{RUN_ID}-{digest_of(host.name)[:6]}"  # two entries may be one machine


def why_unreported() -> str:
    """Why visit() came to None, of the host that is worked on."""
    return _unreported[host.name]


def known_plans() -> dict[str, Plan]:
    """Host -> plan, of the hosts that were looked at so far."""
    return _plans


def key_is_there(settings: Settings, report: HostReport) -> bool:
    files = report.kvhost.data.files.data if report.kvhost.data else None
    return api_key_path(settings.paths) in (files or {})


def only_packages(report: HostReport, names: tuple[str, ...]) -> HostReport:
    """The report without the packages that this host will not need after all."""
    if report.packages.data is None:
        return report
    states = {name: state for name, state in report.packages.data.items() if name in names}
    return report.model_copy(
        update={"packages": report.packages.model_copy(update={"data": states})}
    )


def show(plan: Plan) -> None:
    _plans[host.name] = plan
    progress.tell(host.name, "refused" if plan.refusals else "planned")
    if plan.refusals:
        codes = [refusal.code for refusal in plan.refusals]
        tell("refused", host=host.name, why=", ".join(codes))
    told = [plan for plan in _plans.values() if plan.actions or plan.refusals]
    if told and len(_plans) == len(context.state.inventory.get_active_hosts()):
        # stderr: stdout is pyinfra's --json
        Console(stderr=True).print(render_plans(_plans))


def plan_inputs(
    settings: Settings,
    report: HostReport,
    info: LockInfo | ProgramInfo,
    lock: EngineLock,
    lock_refusals: tuple[Refusal, ...],
    *,
    with_key: bool,
) -> PlanInputs:
    fields = predict(settings, report, lock)
    builtin, llama = model_builtin.describe(), settings.runner == "llama_server"
    run_lock = report.kvhost.data.run_lock.data if report.kvhost.data else None
    return PlanInputs(
        lock_name=info.name,
        lock_digest=lock.digest,
        lock_pythons=info.pythons,
        lock_arch=info.machine,
        download_bytes=lock.download_bytes,
        env_disk_bytes=lock.disk_bytes,
        third_party=lock.third_party,
        build_cost=lock.program.cost if lock.program else None,
        lock_refusals=lock_refusals,
        tools_digest=digest_of_tools(REPO / "locks"),
        settings_digest=settings_digest(settings),
        model=model_need(settings, report),
        builtin_digest=model_gguf.DIGEST if llama else model_builtin.DIGEST,
        builtin_bytes=builtin["weights_bytes"],
        engine_config_digest=digest_of(fields) if fields is not None else None,
        engine_config=fields or {},
        rendered=rendered(settings, lock, fields, with_key=with_key),
        with_key=with_key,
        lock_is_stale=is_dead(run_lock) if run_lock else None,
    )


def rendered(
    settings: Settings,
    lock: EngineLock,
    fields: Mapping[str, Any] | None,
    *,
    with_key: bool,
) -> Mapping[str, str]:
    """sha256 of what this run would write, as far as that is known before it starts: what
    describes the services only where the namespace (``fields``) can be told."""
    texts = {f"{settings.paths.bin}/{p.name}": script_text(p) for p in scripts()}
    texts |= vllm_yamls(settings, with_key=with_key)
    if fields is not None:
        namespace_dir = settings.paths.namespace(digest_of(fields))
        gpus = gpus_of(settings, lock)
        for one in services(settings, settings.paths, namespace_dir, with_key=with_key, gpus=gpus):
            texts[f"{settings.paths.etc}/{one.name}.json"] = one.launch_spec(settings.paths)
    return {path: sha256(text) for path, text in texts.items()}


def predict(settings: Settings, report: HostReport, lock: EngineLock) -> Mapping[str, Any] | None:
    """The namespace's fields that this run will come to, from those of the last; None if unknown.

    The engine's own word (stage cache) is what counts; this is for the plan.
    """
    receipt: Any = report.kvhost.data.receipt.data if report.kvhost.data else None
    return predicted(receipt, settings, lock)


def predicted(receipt: Any, settings: Settings, lock: EngineLock) -> Mapping[str, Any] | None:
    """The same from any receipt."""
    try:
        source, last = receipt["model"]["source"], dict(receipt["namespace"]["fields"])
        engine = receipt["engine"]["digest"]
        versions = dict(last.get("versions", {}))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None  # none yet, or not a receipt: this run writes it anew
    if source != settings.model_source or last.get("runner", "vllm") != settings.runner:
        return None
    if settings.runner == "llama_server":
        # another build is known only once it is there
        return None if engine != lock.digest else {**last, **llama.from_settings(settings)}
    changes: dict[str, Any] = {
        "chunk_size": settings.chunk_size,
        "l2_adapter": settings.tier_format,
        "extra_args": list(settings.runner_extra_args),
        "model_revision": settings.model_revision,
        "tensor_parallel": settings.tensor_parallel_size,
    }
    if settings.kv_cache_dtype != "auto":
        changes["kv_cache_dtype"] = settings.kv_cache_dtype
    if settings.dtype != "auto":
        changes["dtype"] = settings.dtype
    if engine != lock.digest:
        changes["versions"] = predicted_versions(
            versions,
            vllm=lock.versions["vllm"],
            lmcache=lock.versions["lmcache"],
            torch=lock.versions["torch"],
        )
    return predicted_fields(last, changes)
