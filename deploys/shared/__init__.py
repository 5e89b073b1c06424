"""Stage shared: the store of the tier that hosts share, made, kept and taken away."""

from __future__ import annotations

from collections.abc import Iterator

from deploys.common.context import Visit
from deploys.common.looks import Ask
from deploys.common.operations import (
    Directory,
    TextFile,
    directories,
    directory_asks,
    file_asks,
    no_file,
    root_files,
    secret_file,
)
from deploys.common.store import Store
from deploys.shared.operations import no_store, package, package_ask, runs, runs_ask, taken_away
from kvhost.services.store import CERT, ETC, KEY

__all__ = ["asks", "deploy", "no_store", "remove"]


def wanted_directories(store: Store) -> list[Directory]:
    folder = store.kind.drop_in.rpartition("/")[0]
    return [
        Directory(ETC, "root", "755"),
        Directory(folder, "root", "755"),
        Directory(store.kind.data, store.kind.user, "750"),
    ]


def left_over(store: Store) -> list[str]:
    """Files of TLS that the settings do not have any more."""
    return [] if store.cert is not None else [CERT, KEY]


def asks(store: Store) -> Iterator[Ask]:
    """What the operations of deploy() will ask."""
    yield package_ask(store)
    yield from directory_asks(wanted_directories(store))
    for path in (*store.secret, *left_over(store)):
        yield ("file", path)
    yield from file_asks([TextFile(path, text) for path, text in store.plain.items()])
    yield runs_ask(store)


def deploy(store: Store) -> None:
    package(name="shared: the server's package", store=store)
    directories(name="shared: directories of the store", wanted=wanted_directories(store))
    root_files(
        name="shared: configuration of the store",
        wanted=[TextFile(path, text) for path, text in store.plain.items()],
        passing=f"{store.at.paths.state}/store.tar",
    )
    for path, (secret, user) in store.secret.items():
        secret_file(name=f"shared: {path}", path=path, secret=secret, user=user)
    for path in left_over(store):
        no_file(name=f"shared: no {path}", path=path)
    runs(name="shared: the store runs and asks for its password", store=store)


def remove(at: Visit) -> None:
    taken_away(name="shared: the store taken away", at=at)
