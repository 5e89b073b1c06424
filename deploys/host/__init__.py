"""Stage host: packages, the service's user, directories, the scripts that run on the host."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.bundle import bundle_place
from deploys.common.context import Run
from deploys.common.facts import LIBRARY, script_text, scripts
from deploys.common.looks import Ask
from deploys.common.made import inside_home, packages, wanted_directories
from deploys.common.operations import (
    TextFile,
    directories,
    directory_asks,
    file_asks,
    root_files,
)
from deploys.common.own import own_directories, own_files_ask, words_for
from deploys.host.operations import debian_packages, packages_ask, service_user, user_ask
from kvhost.ollama.server import adopted


def own_scripts(run: Run) -> list[TextFile]:
    paths = run.paths
    return [
        *(TextFile(f"{paths.bin}/{p.name}", script_text(p), "755") for p in scripts()),
        *(TextFile(f"{paths.lib}/{p.name}", script_text(p)) for p in LIBRARY),
    ]


def asks(run: Run) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield packages_ask(packages(run))
    if not adopted(run.settings):
        yield user_ask(run.user)
    yield from directory_asks(wanted_directories(run))
    yield from file_asks(own_scripts(run))
    if not adopted(run.settings):
        yield own_files_ask(run, *words_for(inside_home(run)))


def deploy(run: Run) -> None:
    state, release = run.paths.state, run.report.os.data
    debian_packages(
        name="host: packages",
        packages=packages(run),
        note=f"{state}/packages",
        bundle=bundle_place(run),
        release=f"{release.id} {release.version_id}" if release else "",
        around=run.paths.bundle,
    )
    if not adopted(run.settings):
        service_user(name="host: the service's user", user=run.user, home=run.paths.home)
    directories(name="host: directories", wanted=wanted_directories(run))
    root_files(name="host: scripts", wanted=own_scripts(run), passing=f"{state}/scripts.tar")
    if not adopted(run.settings):
        own_directories(
            name="host: directories in the service's home", run=run, paths=inside_home(run)
        )
