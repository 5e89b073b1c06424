"""The command `kvhost bundle`: everything an engine is installed from, in one directory."""

from __future__ import annotations

from pathlib import Path

import click

from kvhost.basics import counted, printable
from kvhost.commands.matrix import _matrix, locks_dir
from kvhost.commands.options import DONE_HERE
from kvhost.engine.bundle import BundleError, bundle_name, make_bundle
from kvhost.engine.locks import read_lock
from kvhost.engine.matrix import LockError
from kvhost.engine.packages import needed_packages
from kvhost.onhost.bundle_check import find_faults
from kvhost.plan.types import size


@click.command("bundle", epilog=f"{DONE_HERE} Of --check: 1 it is not as it was made.")
@click.argument("name", required=False)
@click.option("--python", metavar="X.Y", help="Python of the host; default: the lock's first.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bundles"),
    show_default=True,
    help="Directory of bundles; each gets one of its own, NAME-pyX.Y.",
)
@click.option(
    "--packages", is_flag=True, help="Debian packages too, of this machine's release, by its apt."
)
@click.option(
    "--check",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Fetch nothing: is this bundle as it was made?",
)
def bundle_command(
    name: str | None, python: str | None, out: Path, packages: bool, check: Path | None
) -> None:
    """Collect what a host without a network installs from.

    NAME is a lock of kvhost matrix. pip's own settings say where it looks. Give the directory as
    engine_bundle (docs/engine.md). A run that was killed is completed by the next.
    """
    if (name is None) == (check is None):
        raise click.UsageError("give the name of a lock (kvhost matrix), or --check DIR")
    if check is not None:
        _check(check)
        return
    matrix = _matrix()
    info = matrix.locks.get(name or "")
    if info is None:
        raise click.UsageError(f"there is no lock {name!r}; there are {', '.join(matrix.locks)}")
    try:
        lock = read_lock(locks_dir(), info, python or info.pythons[0])
        tools = (locks_dir() / "tools.txt").read_text(encoding="utf-8")
        python = f"/usr/bin/python{lock.python}"
        wanted = ("libnuma1", *needed_packages(python, gpu=info.cuda is not None))
        target = out / bundle_name(lock)
        made = make_bundle(target, lock, tools, wanted if packages else ())
    except (BundleError, LockError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{made.path}: {counted(made.files, 'file')}, {size(made.bytes)}, every one by its hash"
    )
    click.echo(f'engine_bundle = "{made.path.resolve()}"')


def _check(path: Path) -> None:
    try:
        faults, manifest = find_faults(str(path))
    except (OSError, ValueError) as error:
        faults, manifest = [str(error)], {}
    if faults:
        shown = [printable(fault) for fault in faults]
        raise click.ClickException("\n  ".join((f"{path} is not as it was made:", *shown)))
    what = f"{manifest['lock']} for Python {manifest['python']}"
    click.echo(f"{path}: whole, {counted(len(manifest['files']), 'file')}, {what}")
