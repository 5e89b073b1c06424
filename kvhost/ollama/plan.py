"""The plan of a host with the runner Ollama: what happens, and every reason not to. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvhost.ollama.dropin import DROP_IN, UNIT, clashes, dropin_text, variables
from kvhost.ollama.server import adopted, models_dir
from kvhost.ollama.verdict import INSTEAD
from kvhost.plan.drives import drive_actions, drive_notes, drive_refusals
from kvhost.plan.host import alive, installed, nvidia, on_address, own_pids
from kvhost.plan.pod import pod_notes, pod_refusals
from kvhost.plan.refusals import any_runner, own_services
from kvhost.plan.replaced import replaced_notes
from kvhost.plan.types import Action, Plan, PlanInputs, Refusal, State, unreadable
from kvhost.records.receipt import system_of
from kvhost.report import HostReport
from kvhost.schema.ollama import archive_parts
from kvhost.settings import Settings

#: of NVIDIA's, below which a newer Ollama computes on the CPU and says nothing (ollama#17290)
LEAST_DRIVER = 550
Look = Mapping[str, Any]


@dataclass(frozen=True)
class OllamaInputs:
    """Beside PlanInputs: what ollama_report.py found, and what stands against an archive that lies
    on the controller."""

    look: Look
    sent: str | None = None
    #: a key for the API is set on the controller
    key: bool = False


def make_ollama_plan(
    settings: Settings, report: HostReport, facts: PlanInputs, more: OllamaInputs
) -> Plan:
    """Raises nothing: what stands against a run is in `refusals`."""
    return Plan(
        tuple(_actions(settings, report, facts, more.look)),
        tuple(dict.fromkeys(_refusals(settings, report, facts, more))),
        (*replaced_notes(settings, report, facts), *_notes(settings, report, more)),
    )


def _refusals(
    settings: Settings, report: HostReport, facts: PlanInputs, more: OllamaInputs
) -> Iterator[Refusal]:
    yield from any_runner(settings, report, facts)
    yield from drive_refusals(settings, report, facts)
    yield from pod_refusals(settings, report, facts)
    yield from _base(settings, report)
    if adopted(settings):
        yield from _unit(settings, more.look)
    else:
        yield from own_services(settings, report, facts)
        yield from _archive(settings, more)
    yield from _port(settings, report)
    yield from _driver(report)


def _base(settings: Settings, report: HostReport) -> Iterator[Refusal]:
    kvhost = report.kvhost.data
    if kvhost and kvhost.base.data and kvhost.base.data.owner == "foreign":
        yield Refusal(
            "storage",
            "path_taken",
            f"base_dir {settings.base_dir} holds something that is not kvhost's",
            "a directory that does not exist, is empty, or is kvhost's own",
            ", ".join(kvhost.base.data.entries),
            "set base_dir to another directory, or move what is there",
        )


def _unit(settings: Settings, look: Look) -> Iterator[Refusal]:
    part = look["unit"]
    unit = part["data"]
    if part["status"] != "ok":
        yield Refusal(
            "runner",
            "no_ollama",
            f"there is no {UNIT} that could be adopted",
            f"a host with systemd and {UNIT}, or ollama_archive",
            str(part["why"]),
            "ollama_archive = 'PATH#sha256=…', which kvhost runs itself, also without systemd",
        )
        return
    if unit["load"] != "loaded":
        yield Refusal(
            "runner",
            "no_ollama",
            f"there is no {UNIT} that could be adopted",
            f"{UNIT}, of the distribution or of Ollama's installer, or ollama_archive",
            f"systemd says: {unit['load'] or 'nothing'}",
            f"systemctl unmask {UNIT}, or ollama_archive = 'PATH#sha256=…'"
            if unit["load"] == "masked"
            else "install Ollama, or ollama_archive = 'PATH#sha256=…'",
        )
        return
    for why in unit["unreadable"]:
        yield unreadable("runner", f"an environment file of {UNIT}", why)
    for clash in clashes(unit, variables(settings)):
        if clash.wins:
            theirs = "takes it away" if clash.theirs is None else f"{clash.theirs!r}"
            yield Refusal(
                "runner",
                "ollama_overruled",
                f"{clash.variable} is set elsewhere, and counts more than kvhost's drop-in",
                f"{clash.variable}={clash.ours} by {DROP_IN} alone",
                f"{theirs} by {clash.place}",
                "remove that line, or set kvhost's setting to what it says",
            )
    models = look["models"]
    if models is None:
        return
    if models["status"] != "ok":
        yield unreadable(
            "runner", f"whether Ollama may enter {models_dir(settings)}", models["why"]
        )
    elif models["data"]["blocked"] is not None:
        yield Refusal(
            "runner",
            "models_closed",
            "Ollama's user may not reach the directory for its models",
            f"{models['data']['user']} may enter every directory above {models_dir(settings)}",
            f"{models['data']['blocked']} is closed to it",
            "open that one directory to it (chmod o+x, or an ACL), or another model_dir",
        )


def _archive(settings: Settings, more: OllamaInputs) -> Iterator[Refusal]:
    part = more.look["archive"]
    why = more.sent
    if why is None and part is not None:
        why = part["why"] if part["status"] != "ok" else part["data"]["against"]
    if why is not None:
        yield Refusal(
            "engine",
            "ollama_archive",
            "Ollama's archive is not the one that ollama_archive names",
            "a .tgz or .tar.zst of Ollama's with that sha256",
            why,
            "sha256sum of the file that you mean; ollama_archive = 'PATH#sha256=…'",
        )


def _port(settings: Settings, report: HostReport) -> Iterator[Refusal]:
    if report.ports.data is None:
        yield unreadable("runner", "ports in use", report.ports.why)
        return
    ours = own_pids(report)
    for row in on_address(report.ports.data.listening, settings.api_host, settings.api_port):
        if row.pid in ours or (adopted(settings) and row.comm == "ollama"):
            continue
        who = f"process {row.pid} ({row.comm})" if row.pid else "a process not seen from here"
        yield Refusal(
            "runner",
            "port_taken",
            f"port {settings.api_port} (api_port) is taken",
            f"{settings.api_host}:{settings.api_port} free, or held by Ollama",
            f"{who} of uid {row.uid} listens on {row.address}:{row.port}",
            "stop it, or set api_port to a free port",
        )


def _driver(report: HostReport) -> Iterator[Refusal]:
    driver = report.driver.data
    loaded = driver.loaded.version if driver and driver.loaded else ""
    major = loaded.partition(".")[0]
    if major.isdecimal() and int(major) < LEAST_DRIVER:
        yield Refusal(
            "accelerator",
            "ollama_driver",
            "Ollama would leave the GPU alone, and say nothing",
            f"NVIDIA's driver {LEAST_DRIVER} or newer",
            loaded,
            "a newer driver (docs/troubleshooting.md, the plan refuses a host)",
        )


def _own(report: HostReport, name: str) -> Any:
    return getattr(report.kvhost.data, name) if report.kvhost.data else report.kvhost


def _state(part: Any, there: bool) -> State:
    return "unknown" if part.status == "unreadable" else "keep" if there else "change"


def _actions(
    settings: Settings, report: HostReport, facts: PlanInputs, look: Look
) -> Iterator[Action]:
    states = report.packages.data or {}
    missing = sorted(name for name, state in states.items() if state != "installed")
    if states:
        what = "packages " + ", ".join(missing or sorted(states))
        yield Action("host", what, _state(report.packages, not missing))
    if not adopted(settings):
        user = bool(report.users.data and report.users.data.service_user)
        yield Action("host", f"user {settings.service_user}", _state(report.users, user))
        tools = _own(report, "tools")
        there = installed(tools, facts.tools_digest) is not None
        what = f"tools (uv, supervisord) {facts.tools_digest[:12]}"
        yield Action("host", what, _state(tools, there))
    files = _changed(report, facts)
    named = f": {len(files)} of them" if files else ""
    yield Action("host", f"scripts{named}", _state(_own(report, "files"), not files))
    yield from drive_actions(settings, report)
    if adopted(settings):
        yield _drop_in(settings, look)
    else:
        yield from _service(settings, report, facts)
    receipt = _own(report, "receipt")
    known = receipt.data if isinstance(receipt.data, dict) else {}
    model = known.get("model") or {}
    there = model.get("source") == settings.model_source
    cost = None if there else "pulled by Ollama from its registry, size not known"
    if settings.model_source.startswith("/"):
        cost = None if there else "Ollama copies it into its own store"
    yield Action("model", f"model {settings.model_source}", _state(receipt, there), cost)
    same = known.get("settings") == facts.settings_digest
    same = same and known.get("system") == system_of(settings, report)
    yield Action("runner", "receipt of the settings", _state(receipt, same))
    verified = _own(report, "verified").data
    stands = isinstance(verified, dict) and verified.get("persisted") == "NO_BY_DESIGN"
    what = "which KV type is in force; nothing persists, by design"
    if settings.verify == "never":
        yield Action("verify", "KV type not asked for (verify = never)", "keep")
    else:
        asked = settings.verify == "always" or not (stands and same and there)
        cost = "loads the model" if asked else None
        yield Action("verify", what, "change" if asked else "keep", cost)


def _drop_in(settings: Settings, look: Look) -> Action:
    unit = look["unit"]["data"] or {}
    text = dropin_text(settings, settings.paths)
    process = unit.get("process") or {}
    same = unit.get("ours") == text and not unit.get("stale")
    same = same and all(process.get(name) == value for name, value in variables(settings).items())
    what = f"drop-in {DROP_IN}: " + " ".join(f"{k}={v}" for k, v in variables(settings).items())
    running = unit.get("active") == "active"
    cost = f"{'restarts' if running else 'starts'} {UNIT}: requests in work are lost, and all KV"
    return Action("runner", what, "keep" if same else "change", None if same else cost)


def _service(settings: Settings, report: HostReport, facts: PlanInputs) -> Iterator[Action]:
    target, digest = archive_parts(settings.ollama_archive or "")
    envs = _own(report, "envs")
    there = installed(envs, facts.lock_digest) is not None
    cost = None
    if not there:
        cost = "downloads it, size not known" if "://" in target else "unpacks it"
    yield Action("engine", f"Ollama's archive {digest[:12]}", _state(envs, there), cost)
    rendered = {k: v for k, v in (facts.rendered or {}).items() if k.endswith("/runner.json")}
    on_host = _own(report, "files").data or {}
    same = all(path in on_host and on_host[path].sha256 == d for path, d in rendered.items())
    running = alive(report, "runner")
    state: State = "keep" if same and there and running else "change"
    cost = "restarts Ollama: requests in work are lost, and all KV" if running else "starts it"
    yield Action("runner", "Ollama", state, cost if state == "change" else None)


def _changed(report: HostReport, facts: PlanInputs) -> list[str]:
    on_host = _own(report, "files").data or {}
    wanted = {p: d for p, d in (facts.rendered or {}).items() if "/bin/" in p}
    return [p for p, d in wanted.items() if p not in on_host or on_host[p].sha256 != d]


def _notes(settings: Settings, report: HostReport, more: OllamaInputs) -> Iterator[str]:
    yield INSTEAD
    if more.key:
        yield "The key for the API is not used: Ollama asks nobody for one."
    unit = (more.look["unit"] or {}).get("data")
    if unit and unit["load"] == "loaded":
        program = unit["program"] or "an unknown program"
        yield f"{UNIT} ({program}, user {unit['user']}) is somebody else's: adopted, not rewritten."
        for clash in clashes(unit, variables(settings)):
            if not clash.wins:
                was = "unset" if clash.theirs is None else clash.theirs
                yield (
                    f"{clash.variable}: {clash.place} says {was}, kvhost's drop-in {clash.ours}, "
                    "which counts; kvhost remove gives it back."
                )
    if settings.ollama_open:
        yield f"Ollama on {settings.api_host}:{settings.api_port} asks nobody for a key."
    gpu = nvidia(report.gpu.data) if report.gpu.data else None
    if gpu is None and settings.ollama_kv_cache_type != "f16":
        yield "On a CPU a quantised KV may be slower; the run says which type is in force."
    yield from pod_notes(settings)
    yield from drive_notes(settings, report)


def digest(text: str) -> str:
    """sha256 in hex, as the report gives it of files."""
    return hashlib.sha256(text.encode()).hexdigest()
