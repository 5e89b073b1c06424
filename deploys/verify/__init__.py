"""Stage verify: the restart-persistence test; the host collects evidence, the judge sits here."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Run
from deploys.common.looks import Ask
from deploys.common.made import settle_command
from deploys.common.rendered import last_namespace, resolved_path
from deploys.verify.operations import restart_test, settle
from kvhost.records.journal import tell
from kvhost.reports.kept import tell_summary
from kvhost.services.runners import runners_of
from kvhost.services.served import api_url, served_name


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield ("text", run.paths.receipt)
    yield ("text", f"{run.paths.state}/verified.json")
    if (last := last_namespace(run)) is not None:
        where = resolved_path(run, last.fields["model_digest"])
        yield ("argv", *settle_command(run, where, clear=True), "--check")


def deploy(run: Run, *, always: bool = False) -> None:
    """``always``: also when nothing has changed since the last verdict."""
    if not always:
        for one in runners_of(run.settings):
            url = f"{api_url(one.settings)}/v1"
            tell_summary(run.host, api=url, model=served_name(one.settings))
    if run.settings.verify != "never" or always:
        asked = always or run.settings.verify == "always"
        restart_test(name="verify: does the KV cache survive a restart", run=run, asked=asked)
    else:
        tell("untested", host=run.host)
    settle(name="verify: what passed is recorded, the rest cleared away", run=run, clear=not always)
