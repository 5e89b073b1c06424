"""What is written to a host, rendered on the controller, and what it follows from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from pyinfra.api.command import PyinfraCommand

from deploys.common.context import REPO, Run
from deploys.common.facts import LIBRARY, script_text, scripts
from deploys.common.looks import ask_json, ask_json_file
from deploys.common.operations import executing, refuse, unknown_yet
from deploys.common.sent import ONHOST
from kvhost.engine.locks import EngineLock
from kvhost.llama import facts as llama
from kvhost.secrets import certificates
from kvhost.services import native
from kvhost.services.describe import services
from kvhost.services.monitoring import program
from kvhost.services.namespace import Namespace, input_digest, namespace_of
from kvhost.services.runners import config_name, left_over, ranks, runners_of
from kvhost.services.served import model_path
from kvhost.services.service import Service, unit_file
from kvhost.services.shared import ca_path
from kvhost.services.units import unit_text
from kvhost.services.vllm import vllm_config
from kvhost.settings import Settings

#: in place of the namespace's digest, before it is known
STAND_IN = "0" * 24
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(REPO / "templates"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    autoescape=False,  # these are configuration files, not HTML
)


def vllm_yaml_of(settings: Settings, *, with_key: bool) -> str:
    """vLLM's configuration file; needs nothing of the host."""
    config = vllm_config(settings, settings.paths, with_key=with_key)
    return _templates.get_template("vllm.yaml.j2").render(config=config)


def vllm_yaml(run: Run) -> str:
    """That of the first runner."""
    return vllm_yaml_of(run.settings, with_key=run.with_key)


def vllm_yamls(settings: Settings, *, with_key: bool) -> dict[str, str]:
    """Path -> content of the configuration of every runner; none where the runner is not vLLM."""
    if settings.runner != "vllm":
        return {}
    return {
        f"{settings.paths.etc}/{config_name(one.service)}": vllm_yaml_of(
            one.settings, with_key=with_key
        )
        for one in runners_of(settings)
    }


def shared_texts(settings: Settings) -> dict[str, str]:
    """Path -> content of the certificates that the shared tier's store is recognised by."""
    if settings.shared_tier is None or settings.shared_tier_ca_file is None:
        return {}
    text = certificates("shared_tier_ca_file", settings.shared_tier_ca_file)
    return {ca_path(settings.paths): text}


def cache_arguments(run: Run) -> list[str]:
    """Those of `lmcache server`, or of another runner than vLLM itself, before the namespace is
    known: its directory is a stand-in. None where vLLM keeps its cache itself."""
    (first, *_) = services_of(run)
    if run.settings.native:
        return []
    return list(first.argv[2:] if run.settings.runner == "vllm" else first.argv[1:])


def runner_arguments(run: Run) -> list[str]:
    """Those of `vllm serve` beside its configuration, with the same stand-in."""
    stand_in, cuda = run.paths.namespace(STAND_IN), run.lock.cuda is not None
    words = native.transfer_words(run.settings, stand_in, cuda=cuda) if run.settings.native else ()
    return [*words, *run.settings.runner_extra_args]


def gpus_of(settings: Settings, lock: EngineLock) -> int:
    """GPUs that each runner waits for at its start; 0 with an engine for CPUs."""
    return ranks(settings) if lock.cuda is not None else 0


def services_of(run: Run) -> tuple[Service, ...]:
    """The services before the namespace is known: its directory is a stand-in."""
    stand_in = run.paths.namespace(STAND_IN)
    gpus = gpus_of(run.settings, run.lock)
    return services(run.settings, run.paths, stand_in, with_key=run.with_key, gpus=gpus)


def own_scripts(run: Run) -> dict[str, str]:
    """Path on the host -> content of kvhost's own programs there."""
    here = dict.fromkeys(scripts(), run.paths.bin)
    here.update(dict.fromkeys(LIBRARY, run.paths.lib))
    return {f"{folder}/{path.name}": script_text(path) for path, folder in here.items()}


def supervisord_conf(run: Run, described: tuple[Service, ...]) -> str:
    template = _templates.get_template("supervisord.conf.j2")
    metrics = program(run.settings, run.paths, metrics_script())
    return template.render(paths=run.paths, services=described, metrics=metrics)


def metrics_script() -> str:
    """Text of the collector of figures."""
    return (ONHOST / "metrics.py").read_text("utf-8")


def manager_texts(run: Run, described: tuple[Service, ...]) -> dict[str, str]:
    """Path -> content of what systemd or supervisord reads."""
    if run.systemd:
        return unit_texts(run.settings, run.lock, described)
    return {f"{run.paths.etc}/supervisord.conf": supervisord_conf(run, described)}


def unit_texts(
    settings: Settings, lock: EngineLock, described: tuple[Service, ...]
) -> dict[str, str]:
    """Path -> content of the units; services.py puts them where systemd reads them."""
    paths = settings.paths
    gpu = lock.cuda is not None
    return {
        f"{paths.etc}/{unit_file(s.name)}": unit_text(s, settings, paths, gpu=gpu)
        for s in described
    }


def gone_runners(run: Run, texts: Mapping[str, str]) -> list[str]:
    """Files of runners that the settings do not have any more, as the report told them when the
    run began. ``texts``: path -> content of what describes the services."""
    wanted = {*texts, *vllm_yamls(run.settings, with_key=run.with_key)}
    return left_over(run.files, wanted, run.paths.etc)


@dataclass(frozen=True)
class Late:
    """What can only be known on the host, once model and environment are there; or why not."""

    model_digest: str | None = None
    resolved_path: str | None = None
    resolved: dict[str, Any] | None = None
    why: str | None = None

    def namespace(self, run: Run) -> Namespace:
        if self.resolved is None or self.model_digest is None:
            raise RuntimeError(f"asked for the namespace before it is known: {self.why}")
        if run.settings.runner == "llama_server":
            return llama.namespace(run.settings, self.resolved, self.model_digest)
        return namespace_of(
            self.resolved,
            model_digest=self.model_digest,
            model_revision=run.settings.model_revision,
            chunk_size=run.settings.chunk_size,
            l2_adapter=run.settings.tier_format,
            extra_args=run.settings.runner_extra_args,
        )

    def namespace_dir(self, run: Run) -> str:
        return run.paths.namespace(self.namespace(run).digest)

    def services(self, run: Run) -> tuple[Service, ...]:
        gpus = gpus_of(run.settings, run.lock)
        where = self.namespace_dir(run)
        return services(run.settings, run.paths, where, with_key=run.with_key, gpus=gpus)


def digest_command(run: Run) -> tuple[str, ...]:
    """The digests of unchanged weights are remembered on the host."""
    return (
        "python3", run.script("model_digest"), "--model", model_path(run.settings, run.paths),
        "--cache", f"{run.paths.state}/model-digests.json", "--user", run.user,
    )  # fmt: skip


def resolved_path(run: Run, model_digest: str) -> str:
    """Where the engine's own word on this configuration lies."""
    name = input_digest(
        vllm_yaml(run) if run.settings.runner == "vllm" else "",
        runner_arguments(run),
        model_digest,
        run.lock.digest,
        cache_args=cache_arguments(run),
    )[:24]
    return f"{run.paths.state}/resolved-{name}.json"


def last_namespace(run: Run) -> Namespace | None:
    """That of the last run, by the receipt: good for a guess of what will be asked."""
    receipt: Any = run.report.kvhost.data.receipt.data if run.report.kvhost.data else None
    try:
        last = receipt["namespace"]
        found = Namespace(dict(last["fields"]), last["chunk_bytes"])
        str(found.fields["model_digest"])
    except (TypeError, KeyError, ValueError):
        return None  # none yet, or of another version
    return found


def look(run: Run) -> Late:
    """Asks the host."""
    model = ask_json(digest_command(run))
    if model["status"] != "ok":
        return Late(why=model["why"])
    digest = model["data"]["digest"]
    path = resolved_path(run, digest)
    resolved = ask_json_file(path)
    if resolved["status"] != "ok":
        return Late(digest, path, why=resolved["why"])
    return Late(digest, path, resolved["data"])


def not_resolved(late: Late) -> PyinfraCommand:
    """For an operation that needs the namespace: while preparing, a change that is not known yet;
    in the run itself, what fails this host with the reason."""
    return refuse(f"not resolved: {late.why}") if executing() else unknown_yet()
