"""Every reason not to start on a host, from its settings and its report. Pure.

A part of the report that a decision needs and that could not be read is a reason too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvhost.basics import counted
from kvhost.plan.accelerator import accelerator_refusals
from kvhost.plan.drives import drive_refusals
from kvhost.plan.host import (
    SUPPORTED,
    choose_python,
    lock_is_free,
    lock_owner,
    minor,
    on_address,
    own_pids,
    own_shm,
)
from kvhost.plan.llama import llama_model
from kvhost.plan.memory import memory_refusals
from kvhost.plan.native import native_refusals
from kvhost.plan.pod import pod_refusals
from kvhost.plan.storage import places, room
from kvhost.plan.types import GIB, ModelNeed, PlanInputs, Refusal, size, unreadable
from kvhost.plan.upgrade import failed_before
from kvhost.report import HostReport, Os
from kvhost.services.runners import FIRST, runners_of
from kvhost.settings import Settings

# vLLM's own queues and the workers' semaphores beside LMCache's pool.
SHM_MARGIN_BYTES = GIB // 8

Check = Callable[[Settings, HostReport, PlanInputs], Iterator[Refusal]]


#: what runlock.py calls the run that holds a lock which it cannot read
UNREADABLE_LOCK = "unreadable"
#: Debian gives people uids from here on (adduser.conf, FIRST_UID)
FIRST_LOGIN_UID = 1000


def find_refusals(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Refusal]:
    """All reasons, in the order of the stages."""
    llama = settings.runner == "llama_server"
    checks: list[Check] = [_privilege, _account, _run_lock, _units, _os, _cpu]
    checks += [memory_refusals, _ports] if llama else [memory_refusals, _shm, _ports]
    checks += [
        drive_refusals,
        places,
        pod_refusals,
        room,
        accelerator_refusals,
        _python,
        failed_before,
        llama_model if llama else _model,
        native_refusals,
    ]
    found = [refusal for check in checks for refusal in check(settings, report, facts)]
    found += facts.lock_refusals + facts.bundle_refusals
    return list(dict.fromkeys(found))


def any_runner(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """What holds for every runner: who may change the host, and who changes it now."""
    for check in (_privilege, _run_lock):
        yield from check(settings, report, facts)


def own_services(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """What holds where kvhost runs services of its own: account, units, Python of the tools."""
    for check in (_account, _units, _python):
        yield from check(settings, report, facts)


def _privilege(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    users = report.users
    if users.data is None:
        yield unreadable("host", "users", users.why)
    elif users.data.uid != 0 and users.data.sudo is not True:
        yield Refusal(
            "host",
            "not_root",
            "the run may not change this host",
            "user root (uid 0), or sudo without a password",
            f"user {users.data.name} (uid {users.data.uid}), for whom sudo asks or refuses",
            "connect as root, or allow this user sudo with NOPASSWD",
        )


def _account(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """The services run as an account of their own: nobody's login is handed to them."""
    there = report.users.data.service_user if report.users.data else None
    if there is None:
        return
    login = there.shell.rpartition("/")[2] not in ("nologin", "false", "")
    others = there.home.rpartition("/")[2] != "home"  # kvhost's own have BASE_DIR/home
    if login or others or there.uid == 0 or there.uid >= FIRST_LOGIN_UID:
        yield Refusal(
            "host",
            "foreign_account",
            f"service_user {there.name} is an account that kvhost did not make",
            f"kvhost's own (uid below {FIRST_LOGIN_UID}, shell nologin), or none of that name",
            f"{there.name} with uid {there.uid}, shell {there.shell or '(none)'}, "
            f"home {there.home}",
            "set service_user to a name of its own, such as kvhost; the run makes the account",
        )


def _run_lock(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    kvhost = report.kvhost.data
    if kvhost is None:
        yield unreadable("host", "kvhost's own state", report.kvhost.why)
        return
    if kvhost.services.status == "unreadable":
        yield unreadable("host", "the services' records", kvhost.services.why)
    if kvhost.run_lock.status == "unreadable" and settings.break_lock != UNREADABLE_LOCK:
        torn = unreadable("host", "the run lock", kvhost.run_lock.why)
        fix = f"if no other run is at work here: break_lock = {UNREADABLE_LOCK!r}"
        yield replace(torn, fix=fix)
    lock = kvhost.run_lock.data
    if lock and not lock_is_free(settings, lock, facts):
        run_id = lock.content.get("run_id")
        yield Refusal(
            "host",
            "run_in_progress",
            "another run is changing this host",
            "no other run, or one that gave no sign of life for 30 min",
            f"run {run_id} of {lock_owner(lock)}, alive {lock.age_s:.0f} s ago",
            f"wait for it; if it is known to be dead: break_lock = {run_id!r}",
        )


def _units(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    """Who runs the services, and that their units' names are free."""
    if report.pid1.data is None:
        yield unreadable("runner", "what PID 1 is", report.pid1.why)
    elif report.pid1.data.systemd and report.kvhost.data is not None:
        units = report.kvhost.data.units
        if units.data is None:
            yield unreadable("runner", "systemd's units", units.why)
        for unit in units.data or []:
            if unit.installation is not None:
                yield Refusal(
                    "runner",
                    "unit_taken",
                    f"{unit.path} is of another kvhost installation in {unit.installation}",
                    "one installation on a host with systemd",
                    f"base_dir {unit.installation} there, {settings.base_dir} here",
                    f"base_dir = {unit.installation!r}, or remove.py with that base_dir first",
                )
            elif not unit.ours:
                yield Refusal(
                    "runner",
                    "unit_taken",
                    f"{unit.path} is not a unit of this installation",
                    f"no unit of that name, or one that kvhost wrote for {settings.base_dir}",
                    "another's unit, a link, or masked",
                    "move it away, or `systemctl unmask` it; changes of your own belong into a "
                    "drop-in (systemctl edit)",
                )


def _supported(found: Os) -> bool | None:
    """True, False, or None for a derivative, where a fitting Python decides."""
    least = {"debian": 12.0, "ubuntu": 22.04}
    if found.id in least:
        try:  # testing and unstable have no version
            return found.version_id is None or float(found.version_id) >= least[found.id]
        except ValueError:
            return False
    return None if {"debian", "ubuntu"} & set(found.id_like) else False


def _os(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if report.os.data is None:
        yield unreadable("host", "the operating system", report.os.why)
        return
    found = report.os.data
    supported = _supported(found)
    derivative = supported is None
    if derivative:
        supported = choose_python(settings, report, facts.lock_pythons) is not None
    if not supported:
        with_python = f" with Python {' or '.join(facts.lock_pythons)}" if derivative else ""
        version = f"{found.id} {found.version_id or 'without a version'}"
        yield Refusal(
            "host",
            "unsupported_os",
            f"{found.pretty} is not supported",
            SUPPORTED + with_python,
            version + (f", like {' '.join(found.id_like)}, and no such Python" * derivative),
            "install such a Python" if derivative else "use a supported system",
        )


def _cpu(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    arch, cpus = report.arch, report.cpus
    if arch.data is None:
        yield unreadable("engine", "the architecture", arch.why)
    elif arch.data.machine != facts.lock_arch:
        yield Refusal(
            "engine",
            "wrong_arch",
            f"the lock {facts.lock_name} is for another architecture",
            facts.lock_arch,
            arch.data.machine,
            f"use a host with {facts.lock_arch}, or a lock for {arch.data.machine}",
        )
    if facts.lock_arch != "x86_64" or (arch.data and arch.data.machine != "x86_64"):
        return
    if facts.cuda is not None or settings.runner != "vllm":
        return  # what follows is of the CPU build of vLLM
    if cpus.data is None:
        yield unreadable("accelerator", "the CPU's instruction sets", cpus.why)
    elif "avx2" not in cpus.data.flags:
        yield Refusal(
            "accelerator",
            "no_avx2",
            "the engine's CPU build does not run on this CPU",
            "AVX2",
            f"{cpus.data.model or 'a CPU'} with {', '.join(cpus.data.flags) or 'no newer set'}",
            "use a newer CPU; in a virtual machine, pass the host's CPU through",
        )


def _shm(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    shm = report.shm
    needed = settings.l1_gib * GIB + SHM_MARGIN_BYTES
    if shm.status == "unreadable":
        yield unreadable("cache", "/dev/shm", shm.why)
        return
    have = shm.data.free + own_shm(report) if shm.data else 0
    if needed > have:
        files = shm.data.files if shm.data else []
        big = [f"{f.name} {size(f.bytes)}" for f in files if f.bytes >= 1 << 20][:4]
        left = f"; already there: {', '.join(big)}" if big else ""
        found = f"{size(have)} free of {size(shm.data.size)}{left}" if shm.data else str(shm.why)
        yield Refusal(
            "cache",
            "shm_too_small",
            "/dev/shm is too small for the cache's memory tier",
            f"{size(needed)}: l1_gib {settings.l1_gib} GiB and {size(SHM_MARGIN_BYTES)} beside it",
            found,
            "lower l1_gib, or give the container more (docker run --shm-size=2g)",
        )


def _ports(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if report.ports.data is None:
        yield unreadable("runner", "ports in use", report.ports.why)
        return
    ours = own_pids(report)
    more = [(f"api_port of {one.name}", one.api_port) for one in settings.more_runners]
    wanted = [
        ("api_port", settings.api_host, settings.api_port),
        *((key, settings.api_host, port) for key, port in more),
        *((key, "127.0.0.1", port) for key, port in settings.cache_ports.items()),
    ]
    for key, host, port in wanted:
        for row in on_address(report.ports.data.listening, host, port):
            if row.pid in ours:
                continue
            who = f"process {row.pid} ({row.comm})" if row.pid else "a process not seen from here"
            yield Refusal(
                "runner",
                "port_taken",
                f"port {port} ({key}) is taken",
                f"{host}:{port} free, or held by kvhost's own service",
                f"{who} of uid {row.uid} listens on {row.address}:{port}",
                f"stop it, or set {key} to a free port",
            )


def _python(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if report.pythons.data is None:
        yield unreadable("engine", "Python", report.pythons.why)
        return
    if choose_python(settings, report, facts.lock_pythons):
        return
    seen = []
    for p in report.pythons.data:
        why = f"exists, but {p.error}" if p.error else f"is {p.version}"
        if not p.error and minor(p) in facts.lock_pythons and not p.usable_by_service:
            why += f", closed to {settings.service_user}"
            why += f" by {p.blocked_by}" if p.blocked_by else ""
        seen.append(f"{p.path} {why}")
    covered = ", ".join(facts.lock_pythons)
    asked = "" if settings.python == "auto" else f" at {settings.python} (setting python)"
    yield Refusal(
        "engine",
        "no_python",
        f"there is no Python that the engine can be installed for{asked}",
        f"Python {covered}, which {settings.service_user} can run",
        "; ".join(seen) or "no Python 3.11 to 3.13 in /usr/bin, /usr/local/bin or PATH",
        "install one from the distribution (apt install python3.11 python3.11-venv), "
        "or set python to the path of one outside of home directories (on an older release: "
        "docs/engine.md, Which Python)",
    )


def _model(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Refusal]:
    if settings.model_source.startswith("/"):
        yield from _model_dir(settings, report)
    need = facts.model
    if need is None:
        return
    tokens = settings.max_model_len
    if tokens > need.max_context:
        yield Refusal(
            "model",
            "context_too_long",
            "max_model_len is more than the model's context",
            f"max_model_len of at most {need.max_context} tokens",
            f"max_model_len = {tokens} tokens",
            f"max_model_len = {need.max_context}",
        )
    yield from _heads(settings, need)
    for runner in runners_of(settings) if facts.cuda is None else ():
        gib, tensor = runner.settings.engine_kv_gib, runner.settings.tensor_parallel_size
        # every rank holds its part of each token's KV, and has that much memory
        per_token = need.kv_of_rank(tensor, runner.pipeline)
        wanted = per_token * tokens
        if wanted > gib * GIB:
            fits = int(gib * GIB // per_token)
            short = settings.kv_cache_dtype == "auto"
            fp8 = ", or kv_cache_dtype = 'fp8' (it begins a new cache)" if short else ""
            yield Refusal(
                "model",
                "kv_too_small",
                "one request of max_model_len tokens does not fit into the engine's KV memory",
                f"{size(wanted)}: {tokens} tokens of {size(per_token)} each",
                f"engine_kv_gib = {gib} GiB" + f" of {runner.title}" * (runner.service != FIRST),
                f"engine_kv_gib = {math.ceil(wanted / GIB)}, or max_model_len = {fits}" + fp8,
            )


def _heads(settings: Settings, need: ModelNeed) -> Iterator[Refusal]:
    """vLLM gives every rank of tensor parallelism the same number of attention heads."""
    ranks = settings.tensor_parallel_size
    if need.heads is not None and need.heads % ranks:
        fitting = [n for n in range(1, need.heads + 1) if need.heads % n == 0 and n <= 64]
        yield Refusal(
            "model",
            "heads_not_divisible",
            "the model's attention heads cannot be shared out among the ranks",
            f"tensor_parallel_size that divides {need.heads} heads",
            f"tensor_parallel_size = {ranks}",
            f"tensor_parallel_size = one of {', '.join(map(str, fitting))}",
        )


def _model_dir(settings: Settings, report: HostReport) -> Iterator[Refusal]:
    model, path = report.model, settings.model_source
    if model.status == "unreadable":
        yield unreadable("model", f"the model at {path}", model.why)
    elif model.data is None or not any(f.name == "config.json" for f in model.data.files):
        yield Refusal(
            "model",
            "no_model",
            "there is no model where model_source says",
            f"a directory with config.json and safetensors at {path}",
            str(model.why)
            if model.data is None
            else f"{counted(len(model.data.files), 'file')}, no config.json",
            "set model_source to the model's directory on the host",
        )
    elif model.data.blocked_by or model.data.closed:
        by = model.data.blocked_by
        closed = ", ".join(model.data.closed[:4])
        yield Refusal(
            "model",
            "model_closed",
            f"the service's user {settings.service_user} cannot read the model",
            f"every directory above {path} passable (x) and its files readable (r) to that user",
            f"{by} is not passable"
            if by
            else f"{counted(len(model.data.closed), 'file')} without that right: {closed}",
            f"chmod o+x {by}" if by else f"chmod o+r {path}/*",
        )
    elif (told := model.data.weights.data) is not None and told.missing:
        some = ", ".join(told.missing[:3]) + (", …" if len(told.missing) > 3 else "")
        yield Refusal(
            "model",
            "no_model",
            "files of the model's weights are missing",
            f"all files that the index of the weights at {path} names",
            f"{counted(len(told.missing), 'file')} not there: {some}",
            "fetch them: the download was broken off",
        )
