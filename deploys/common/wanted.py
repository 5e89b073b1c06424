"""What should lie on a host now, for drift: all that a run would put right, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deploys.common.bundle import bundle_place
from deploys.common.context import Run
from deploys.common.made import (
    digest_here,
    inside_home,
    lock_files,
    model_check,
    ollama_model,
    settle_command,
    tools_check,
    tools_lock,
    wanted_directories,
    wheel_command,
)
from deploys.common.ollama_texts import drop_in_source, gone_files, texts_of
from deploys.common.prepare import predicted
from deploys.common.ready import ready_commands
from deploys.common.rendered import (
    Late,
    gone_runners,
    gpus_of,
    manager_texts,
    metrics_script,
    own_scripts,
    resolved_path,
    shared_texts,
    vllm_yamls,
)
from kvhost.ollama.dropin import DROP_IN, dropin_text
from kvhost.ollama.server import adopted, models_dir
from kvhost.records import receipts
from kvhost.records.drift import Check, File, Wanted, pins_of, sha256
from kvhost.records.receipt import system_of
from kvhost.report import ReportError
from kvhost.schema.values import is_sent
from kvhost.secrets import Secret
from kvhost.services import monitoring
from kvhost.services.describe import services
from kvhost.services.namespace import Namespace
from kvhost.services.runners import runners_of
from kvhost.services.served import api_key_path, model_dir, model_path
from kvhost.services.service import unit_file
from kvhost.services.shared import password_path
from kvhost.services.tier import MARKER_TEXT, NAMESPACE_FILE, TIER_MARKER
from kvhost.settings import settings_digest

#: where services.py puts the units, of kvhost/onhost/services_systemd.py
UNITS = "/etc/systemd/system"


def wanted_of(run: Run, kept: dict[str, Any]) -> Wanted:
    """Raises NoReceipt, ReportError."""
    paths, etc = run.paths, run.paths.etc
    texts = vllm_yamls(run.settings, with_key=run.with_key)
    fields = fields_of(run, kept)
    if fields is None:
        raise receipts.NoReceipt(
            "the kept receipt is of another runner or model than these settings, or of an older "
            "form: give the settings of the last run; kvhost up would change the host to these"
        )
    gpus = gpus_of(run.settings, run.lock)
    namespace = Namespace(fields, kept["namespace"]["chunk_bytes"])
    place = paths.namespace(namespace.digest)
    described = services(run.settings, paths, place, with_key=run.with_key, gpus=gpus)
    texts |= {f"{etc}/{one.name}.json": one.launch_spec(paths) for one in described}
    texts[f"{etc}/model-digest"] = f"{kept['model']['digest']}\n"
    texts |= manager_texts(run, described)
    gone = gone_runners(run, texts)
    if run.systemd:
        units = [unit_file(one.name) for one in described]
        texts |= {f"{UNITS}/{unit}": texts[f"{etc}/{unit}"] for unit in units}
    texts |= shared_texts(run.settings)
    texts |= {one.path: one.text for one in lock_files(run)}
    files = {**files_of(run, texts, kept), **secrets_of(run)}
    if run.settings.monitoring and run.systemd:
        unit = monitoring.unit_text(run.settings, paths, metrics_script())
        files[f"{UNITS}/{monitoring.UNIT}"] = File(sha256(unit), "644")
    in_tier = {
        f"{paths.tier_dir}/{TIER_MARKER}": MARKER_TEXT,
        f"{place}/{NAMESPACE_FILE}": namespace.metadata(run.settings.model_source),
    }
    files |= {path: File(sha256(text), "600", run.user) for path, text in in_tier.items()}
    return Wanted(
        files=files,
        directories={
            **directories_of(run),
            paths.tier_dir: (run.user, "700"),
            place: (run.user, "700"),
            **directories_of_models(run),
        },
        any_group=frozenset((*inside_home(run), *in_tier, place)),
        absent={**absent_of(run, gone), **left_of_others(run)},
        checks=checks_of(run, kept, namespace),
        model=(model_path(run.settings, paths), kept["model"]["digest"]),
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


def fields_of(run: Run, kept: dict[str, Any]) -> Mapping[str, Any] | None:
    """The namespace's: the engine's own word, where nothing has changed by which it was asked; what
    a run would guess else. None where the receipt tells nothing of them."""
    guess = predicted(kept, run.settings, run.lock)
    inputs = (settings_digest(run.settings), run.lock.digest)
    if guess is None or (kept.get("settings"), kept["engine"]["digest"]) != inputs:
        return guess
    fields: Mapping[str, Any] = kept["namespace"]["fields"]
    return fields


def wanted_of_ollama(run: Run, kept: dict[str, Any]) -> Wanted:
    """The same of a host with the runner Ollama. Raises ReportError."""
    is_adopted, paths = adopted(run.settings), run.paths
    texts, gone = texts_of(run), gone_files(run)
    if is_adopted:
        texts[DROP_IN] = dropin_text(run.settings, paths)
    elif run.systemd:
        unit = f"{paths.etc}/{unit_file('runner')}"
        texts[f"{UNITS}/{unit_file('runner')}"] = texts[unit]
    if not is_adopted:
        texts |= {one.path: one.text for one in tools_lock(run)}
    store, directories = models_dir(run.settings), {}
    checks = {f"the model {kept['model']['name']}": ollama_check(run, kept)}
    if store is not None:
        directories = {run.settings.resolved_model_dir: ("root", "755")}
        if is_adopted:  # whose it is the unit tells
            checks |= there(store)
        else:
            directories[store] = (run.user, "755")
    if not is_adopted:
        checks |= {f"{paths.tools}/current": tools_of(run)}
    more = () if is_adopted else ("env", "services", "answers")
    return Wanted(
        files=files_of(run, texts, kept),
        directories={**directories_of(run), **directories},
        any_group=frozenset(inside_home(run)),
        absent=absent_of(run, gone),
        checks=checks,
        env=run.env_dir,
        current=paths.current,
        pins={},
        settings=settings_digest(run.settings),
        lock=run.lock.digest,
        system=system_of(run.settings, run.report),
        kept=kept,
        tier_dir=paths.tier_dir,
        parts=("files", "directories", "absent", "checks", *more),
    )


def files_of(run: Run, texts: Mapping[str, str], kept: Mapping[str, Any]) -> dict[str, File]:
    """kvhost's programs, ``texts`` that are root's, and the receipt."""
    files = {
        path: File(sha256(text), "755" if path.startswith(f"{run.paths.bin}/") else "644")
        for path, text in {**texts, **own_scripts(run)}.items()
    }
    own = run.report.kvhost.data
    same = own is not None and own.receipt.data == kept  # else it is told by what differs
    text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
    return {**files, run.paths.receipt: File(sha256(text) if same else None, "644")}


def secrets_of(run: Run) -> dict[str, File]:
    """Of one that is not set here, what is there counts."""
    owner = "root" if run.systemd else run.user
    files = {}
    if run.settings.shared_tier is not None:
        files[password_path(run.paths)] = secret_file(run.shared_password, owner)
    if run.with_key:
        files[api_key_path(run.paths)] = secret_file(run.api_key, owner)
    if run.hf_token is not None:
        files[f"{run.paths.secrets}/hf-token"] = secret_file(run.hf_token, run.user)
    return files


def secret_file(secret: Secret | None, owner: str) -> File:
    digest = None if secret is None else sha256(secret.get_secret_value() + "\n")
    return File(digest, "600", owner, secret=True)


def directories_of(run: Run) -> dict[str, tuple[str, str]]:
    """Path -> owner and mode."""
    own = () if adopted(run.settings) else inside_home(run)
    return {
        **{one.path: (one.user, one.mode) for one in wanted_directories(run)},
        **dict.fromkeys(own, (run.user, "700")),
    }


def directories_of_models(run: Run) -> dict[str, tuple[str, str]]:
    """Where a model lies that was fetched or sent."""
    source = run.settings.model_source
    if source == "builtin" or source.startswith("/"):
        return {}
    found = {run.settings.resolved_model_dir: ("root", "755")}
    if not is_sent(source):
        found[model_dir(run.settings, run.paths)] = (run.user, "755")
    return found


def absent_of(run: Run, gone: Iterable[str]) -> dict[str, str]:
    """What a run removes: path -> the text by which it tells its own."""
    found = dict.fromkeys(gone, "")
    if not run.settings.monitoring:
        own = monitoring.written_for(run.paths)
        places = (f"{UNITS}/{monitoring.UNIT}", monitoring.textfile(run.settings))
        found |= dict.fromkeys(places, own)
    return found


def left_of_others(run: Run) -> dict[str, str]:
    """The same of what only a run without Ollama removes."""
    password, drop_in = password_path(run.paths), drop_in_source(run)
    left = [drop_in] if drop_in in run.files else []
    left += [password] if run.settings.shared_tier is None and password in run.files else []
    bundle = bundle_place(run)
    left += [run.paths.bundle] if bundle is not None and bundle.source is not None else []
    return dict.fromkeys(left, "")


def checks_of(run: Run, kept: dict[str, Any], namespace: Namespace) -> dict[str, Check]:
    """What is asked by a command. Raises ReportError."""
    paths, digest = run.paths, kept["model"]["digest"]
    resolved = resolved_path(run, digest)
    return {
        f"{paths.tools}/current": tools_of(run),
        **{
            f"{paths.wheels}/{name}": Check("file", wheel_command(run, name), bool, "kvhost's own")
            for name in run.lock.wheels
        },
        resolved: Check(
            "file", ("cat", resolved), means(run, digest, namespace), "what the engine said"
        ),
        **model_checks(run),
        "what passed": Check(
            "host",
            (*settle_command(run, resolved, clear=True), "--check"),
            lambda told: bool(told["settled"]),
            "recorded, and nothing left of what is used no more",
        ),
        **(there(run.settings.monitoring_textfile_dir) if run.settings.monitoring else {}),
    }


def tools_of(run: Run) -> Check:
    return Check("engine", tools_check(run), bool, "whole, by the lock of the tools")


def there(path: str) -> dict[str, Check]:
    """A directory of which only that counts."""
    argv = ("sh", "-c", f"[ -d {shlex.quote(path)} ] && echo true")
    return {path: Check("file", argv, bool, "a directory")}


def means(run: Run, model_digest: str, namespace: Namespace) -> Callable[[Any], bool]:
    """Whether what lies there leads to this namespace."""

    def good(resolved: Any) -> bool:
        try:
            return Late(model_digest, None, resolved).namespace(run) == namespace
        except (KeyError, TypeError, ValueError, AttributeError):
            return False

    return good


def model_checks(run: Run) -> dict[str, Check]:
    """By what a run tells that a model is there: its weights themselves are looked at apart."""
    source, settings = run.settings.model_source, run.settings
    if source.startswith("/"):
        return {}
    argv = model_check(run)
    if source == "builtin":
        return {argv[-1]: Check("model", argv, lambda told: bool(told["ok"]), "the built-in one")}
    key, wanted = "revision", settings.model_revision
    if is_sent(source):
        key, (wanted, why) = "digest", digest_here(source)
        if not wanted:
            raise ReportError(f"model_source: {why}")
    return {
        argv[-1]: Check("model", argv, lambda told: told.get(key) == wanted, f"{key} {wanted}"[:24])
    }


def ollama_check(run: Run, kept: Mapping[str, Any]) -> Check:
    digest = kept["model"]["digest"]
    return Check(
        "model",
        (*ollama_model(run, "check"), "--remembered"),
        lambda told: bool(told["there"]) and told["digest"] == digest,
        f"in Ollama's list as {str(digest)[:12]}",
    )


def collector_of(run: Run) -> str | None:
    """What the host's manager calls the program that writes the figures for Prometheus."""
    if not run.settings.monitoring:
        return None
    return monitoring.UNIT.removesuffix(".service") if run.systemd else monitoring.PROGRAM


def ask_of(run: Run, wanted: Wanted) -> dict[str, Any]:
    """What drift_look.py is asked."""
    return {
        "parts": wanted.parts,
        "base": run.paths.base_dir,
        "user": run.user,
        "files": [*wanted.files, wanted.current],
        "directories": list(wanted.directories),
        "absent": dict(wanted.absent),
        "checks": {what: list(check.argv) for what, check in wanted.checks.items()},
        "model": wanted.model[0],
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
