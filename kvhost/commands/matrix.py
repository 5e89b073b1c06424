"""The commands `kvhost matrix` and `kvhost lock`: nothing of them reaches a host."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvhost.commands.options import DONE_HERE
from kvhost.engine.lock_make import check_lock, lock_path, make_lock
from kvhost.engine.matrix import LockError, LockInfo, Matrix, load_matrix
from kvhost.working_copy import CopyError, root


def locks_dir() -> Path:
    """The locks of the working copy."""
    try:
        return root() / "locks"
    except CopyError as error:
        raise click.ClickException(str(error)) from error


def _matrix() -> Matrix:
    try:
        return load_matrix(locks_dir())
    except LockError as error:
        raise click.ClickException(str(error)) from error


@click.command("matrix", epilog=DONE_HERE)
@click.option("--json", "as_json", is_flag=True, help="The matrix as JSON.")
def matrix_command(as_json: bool) -> None:
    """Which versions fit together, and what was run."""
    matrix = _matrix()
    if as_json:
        rows = [
            {**one.model_dump(mode="json"), "accelerator": one.accelerator, "state": one.state}
            for one in matrix.locks.values()
        ]
        absent = [one.model_dump(mode="json") for one in matrix.absent]
        programs = [
            {**one.model_dump(mode="json"), "accelerator": one.accelerator, "state": one.state}
            for one in matrix.programs.values()
        ]
        told = {"locks": rows, "programs": programs, "absent": absent}
        click.echo(json.dumps(told, indent=1))
        return
    console = Console()
    console.print(matrix_table(matrix))
    for gap in matrix.absent:
        console.print(f"vLLM {gap.vllm} is not here: {gap.why}.", highlight=False)


def matrix_table(matrix: Matrix) -> Table:
    """A block for each lock. Its name is never cut: `engine_lock` asks for it."""
    table = Table(title="What fits together", title_justify="left")
    table.add_column("lock", no_wrap=True)
    table.add_column("what it is")
    for one in matrix.locks.values():
        cuda = f", CUDA {one.cuda}" if one.cuda is not None else ""
        lines = [f"vLLM {one.vllm}, LMCache {one.lmcache}, torch {one.torch}{cuda}"]
        lines.append(f"{one.machine}, Python {', '.join(one.pythons)}")
        if one.cuda is not None:
            lines.append(f"driver {one.driver_least} or later, best {one.driver_best}")
            lines.append(f"GPUs of compute capability {', '.join(one.capabilities)}")
        table.add_row(one.name, "\n".join((*lines, one.state)), end_section=True)
    for program in matrix.programs.values():
        lines = [f"{program.title} {program.version}, runner {program.runner}"]
        lines.append(f"{program.machine}, Python {', '.join(program.pythons)}, no GPU")
        if program.build is not None:
            lines.append(f"built on the host, {program.build}")
        table.add_row(program.name, "\n".join((*lines, program.state)), end_section=True)
    return table


@click.command(
    "lock", context_settings={"ignore_unknown_options": True},
    epilog=f"{DONE_HERE} Of --check: 1 one resolves no more, or a file is offered no more.",
)  # fmt: skip
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every lock of the matrix.")
@click.option("--python", "pythons", multiple=True, metavar="X.Y", help="Only for this Python.")
@click.option("--check", is_flag=True, help="Write nothing: does what is committed still resolve?")
@click.option("--uv-arg", "more", multiple=True, help="Passed on to uv pip compile.")
def lock_command(
    names: tuple[str, ...],
    every: bool,
    pythons: tuple[str, ...],
    check: bool,
    more: tuple[str, ...],
) -> None:
    """Resolve locks of the matrix by name.

    Written to locks/, one file for each Python. Needs a package index (uv's own settings say
    which) and downloads no package.
    """
    matrix, uv = _matrix(), _uv()
    if bool(names) == every:
        raise click.UsageError("give the names of locks, or --all")
    failed = False
    for name in names or tuple(matrix.locks):
        info = matrix.locks.get(name)
        if info is None:
            listed = ", ".join(matrix.locks)
            raise click.UsageError(
                f"there is no lock {name!r} in locks/matrix.yaml; it has {listed}"
            )
        for python in info.pythons:
            if pythons and python not in pythons:
                continue
            try:
                click.echo(_one(info, python, uv, check, more))
            except LockError as error:
                click.echo(str(error), err=True)
                failed = True
    sys.exit(1 if failed else 0)


def _one(info: LockInfo, python: str, uv: Path, check: bool, more: tuple[str, ...]) -> str:
    path = lock_path(locks_dir(), info, python)
    if check:
        check_lock(locks_dir(), info, python, uv, more)
        return f"{path.name}: resolves, every file is offered"
    made = make_lock(locks_dir(), info, python, uv, more)
    draft = path.with_name(path.name + ".new")
    draft.write_text(made.text, encoding="utf-8")
    draft.replace(path)
    return f"{path.name}: {made.wheels} packages, {made.download_bytes:,} bytes to download"


def _uv() -> Path:
    beside = Path(sys.executable).with_name("uv")
    found = beside if beside.exists() else shutil.which("uv")
    if found is None:
        raise click.ClickException(f"no uv beside {sys.executable} and none in PATH")
    return Path(found)
