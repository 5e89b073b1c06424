"""Stage model: the weights, from a path, a hub, the controller, or made on the host."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.made import builtin_script, model_check
from deploys.common.operations import Directory, as_service, directories, run_unless, secret_file
from deploys.model.sent import sent_model
from kvhost.schema.values import is_sent
from kvhost.services.served import model_dir
from kvhost.services.vllm import service_env


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    source, here = run.settings.model_source, model_dir(run.settings, run.paths)
    if source.startswith("/"):
        return
    if source != "builtin":
        yield ("file", run.settings.resolved_model_dir)
        yield ("file", f"{run.paths.secrets}/hf-token")
        if not is_sent(source):
            yield ("file", here)
    yield ("argv", *model_check(run))


def deploy(run: Run) -> None:
    source, here = run.settings.model_source, model_dir(run.settings, run.paths)
    if source.startswith("/"):
        return  # the user's own: read, never written
    if source == "builtin":
        script, path = builtin_script(run)
        run_unless(
            name="model: the built-in one",
            check=model_check(run),
            command=f"python3 {script} --out {path} > /dev/null",
            when_ok=lambda state: bool(state["ok"]),
        )
        return
    directories(
        name="model: directory of models",
        wanted=[Directory(run.settings.resolved_model_dir, "root", "755")],
    )
    if is_sent(source):
        sent_model(
            name="model: sent from the controller",
            source=source,
            here=here,
            script=run.script("model_digest"),
            state=run.paths.state,
        )
        return
    token_file = f"{run.paths.secrets}/hf-token"
    if run.hf_token is not None:
        secret_file(
            name="model: token of the hub",
            path=token_file,
            secret=run.hf_token,
            user=run.user,
        )
    directories(name="model: directory", wanted=[Directory(here, run.user, "755")])
    env = {**service_env(run.settings, run.paths), "HF_HUB_OFFLINE": "0"}
    if run.settings.hf_endpoint is not None:
        env["HF_ENDPOINT"] = run.settings.hf_endpoint
    fetch = (
        f"{run.env_dir}/bin/python", run.script("model_fetch"), "--repo", source,
        "--revision", run.settings.model_revision or "", "--out", here,
        *(("--token-file", token_file) if run.hf_token is not None else ()),
    )  # fmt: skip
    run_unless(
        name="model: fetched from the hub",
        check=model_check(run),
        command=as_service(run.user, env, fetch),
        when_ok=lambda state: state.get("revision") == run.settings.model_revision,
    )
