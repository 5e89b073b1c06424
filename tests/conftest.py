"""Fixtures of the tests that go the whole way, and the tiers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drive_states import PACKAGES
from tests.e2e_tools import Site, make_site
from tests.lab.recipe import install

# the scripts of a host import each other as they lie there, beside each other; last on the path
sys.path.append(str(Path(__file__).resolve().parents[1] / "kvhost/onhost"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what is too long for the core tier")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full, tests of the full tier are deselected, and counted as such by pytest."""
    # what needs an engine takes that of the end-to-end tests, which begin with nothing
    items.sort(key=lambda item: "engine" in getattr(item, "fixturenames", ()))
    if config.getoption("--full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session", autouse=True)
def tools_of_drives(request: pytest.FixtureRequest) -> None:
    """Debian's packages that the tests of drives make filesystems with, on a new machine too."""
    if os.geteuid() == 0 and any(i.get_closest_marker("drives") for i in request.session.items):
        install(PACKAGES)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A clean copy of the repository; nothing is provisioned yet."""
    if os.geteuid() != 0:
        pytest.fail("these tests provision this machine: run them as root (docs/testing.md)")
    here = make_site(tmp_path_factory.mktemp("e2e"))
    here.remove()
    yield here
    here.remove()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Path:
    """An environment with the engine: a given one, or that of the end-to-end tests."""
    given = os.environ.get("KVHOST_TEST_ENGINE")
    if given:
        return Path(given)
    site: Site = request.getfixturevalue("site")
    if not (site.base / "current").exists():
        done = site.up(verify="never")
        assert done.code == 0, done.text[-4000:]
    return (site.base / "current").resolve()
