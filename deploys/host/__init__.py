"""Stage host: packages, the service's user, directories, the scripts that run on the host."""

from __future__ import annotations

from deploys.common.context import Run
from deploys.common.facts import LIBRARY, scripts
from deploys.common.operations import Directory, TextFile, directories, many_root_files
from deploys.common.own import own_directories
from deploys.host.operations import debian_packages, service_user
from kvhost.packages import drive_packages, needed_packages


def wanted_directories(run: Run) -> list[Directory]:
    paths, user = run.paths, run.user
    roots = (
        paths.base_dir, paths.bin, paths.lib, paths.etc, paths.locks, paths.wheels, paths.tools,
        paths.envs, paths.models, paths.state,
    )  # fmt: skip
    return [
        *(Directory(path, "root", "755") for path in roots),
        # root's, so that nobody can put a link in the place of a key; a key is its reader's, 0600
        Directory(paths.secrets, "root", "711"),
        *(Directory(path, user, "700") for path in (paths.log, paths.run, paths.home)),
    ]


def inside_home(run: Run) -> tuple[str, ...]:
    home = run.paths.home
    return (f"{home}/tmp", *(f"{home}/.cache{sub}" for sub in ("", "/numba", "/vllm")))


def deploy(run: Run) -> None:
    debian_packages(
        name="host: packages",
        packages=(
            *needed_packages(run.python, gpu=run.lock.cuda is not None),
            *drive_packages(run.settings),
        ),
        note=f"{run.paths.state}/packages",
    )
    service_user(name="host: the service's user", user=run.user, home=run.paths.home)
    directories(name="host: directories", wanted=wanted_directories(run))
    many_root_files(
        name="host: scripts",
        wanted=[
            *(TextFile(f"{run.paths.bin}/{p.name}", p.read_text(), "755") for p in scripts()),
            *(TextFile(f"{run.paths.lib}/{p.name}", p.read_text()) for p in LIBRARY),
        ],
        passing=f"{run.paths.state}/scripts.tar",
    )
    own_directories(name="host: directories in the service's home", run=run, paths=inside_home(run))
