"""Operations of the stage monitoring."""

from __future__ import annotations

import hashlib
import shlex

from pyinfra.api import StringCommand, operation

from deploys.common.context import Run
from deploys.common.looks import ask, ask_file
from deploys.common.operations import Commands, TextFile, converges, refuse, write_files
from deploys.common.rendered import metrics_script
from kvhost.services.monitoring import UNIT, textfile, unit_text, written_for

PLACE = f"/etc/systemd/system/{UNIT}"
#: ends well when it runs now and after a boot
ACTIVE = ("sh", "-c", f"systemctl -q is-enabled {UNIT} && systemctl -q is-active {UNIT}")


def writable(run: Run) -> tuple[str, ...]:
    """Command that ends well if the service's user may write to the directory."""
    folder = run.settings.monitoring_textfile_dir
    ids = ("--reuid", run.user, "--regid", run.user, "--init-groups", "--inh-caps=-all")
    return ("setpriv", *ids, "test", "-w", folder)


def makes_folder(run: Run) -> Commands:
    """The directory where it is missing; one that is there keeps its owner and mode."""
    folder = run.settings.monitoring_textfile_dir
    there = ask_file(folder)
    if there is None:
        owner = "root" if run.systemd else run.user
        text = shlex.quote(folder)
        yield StringCommand(
            f"mkdir -p $(dirname {text}) && install -d -m 755 -o {owner} -g {owner} {text}"
        )
    elif there["kind"] != "directory":
        yield refuse(f"monitoring_textfile_dir: {folder} is a {there['kind']}, not a directory")


def ours(run: Run, path: str) -> bool:
    """Whether the file is this installation's, by its first line."""
    there = ask(("text", path))
    return bool(
        there and there["status"] == "ok" and there["text"].startswith(written_for(run.paths))
    )


@operation()
@converges
def collector(run: Run) -> Commands:
    """The collector runs, with its present text.

    + run: the run of this host
    """
    if run.systemd:
        yield from unit(run)
    elif ask_file(run.settings.monitoring_textfile_dir) is None:
        yield from makes_folder(run)
    else:
        folder, answer = run.settings.monitoring_textfile_dir, ask(("argv", *writable(run)))
        if answer is None or answer["exit"] != 0:
            yield refuse(
                f"monitoring_textfile_dir: {run.user} may not write to {folder}, and supervisord "
                f"runs everything as that user: chown {run.user} {folder}, or name another"
            )


def unit(run: Run) -> Commands:
    there = ask_file(PLACE)
    if there is not None and not ours(run, PLACE):
        yield refuse(f"{PLACE} is not this installation's unit: it is left; move it away")
        return
    yield from makes_folder(run)
    text = unit_text(run.settings, run.paths, metrics_script())
    same = (there or {}).get("sha256") == hashlib.sha256(text.encode()).hexdigest()
    answer = ask(("argv", *ACTIVE))
    if same and answer is not None and answer["exit"] == 0:
        return
    yield from write_files([TextFile(PLACE, text)], f"{run.paths.state}/metrics.tar")
    yield StringCommand(
        f"systemctl daemon-reload && systemctl enable -q {UNIT} && systemctl restart {UNIT}"
    )


@operation()
@converges
def no_collector(run: Run) -> Commands:
    """Neither a unit nor a file of the collector is there.

    + run: the run of this host
    """
    if ours(run, PLACE):
        yield StringCommand(
            f"systemctl disable -q --now {UNIT}; rm -f {PLACE}; systemctl daemon-reload"
        )
    if ours(run, textfile(run.settings)):
        yield StringCommand(f"rm -f {shlex.quote(textfile(run.settings))}")
