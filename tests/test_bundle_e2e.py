"""The real engine from a bundle, with the network cut off; and a bundle with one changed byte."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhost.onhost.abi_check import NOT_APPLICABLE, OK
from tests.e2e_tools import Done, Site, make_site

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.engine]
#: no index, no wheels of this machine's: what is not in the bundle is nowhere
NOWHERE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://[::1]:9/"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = make_site(tmp_path_factory.mktemp("bundle"))
    site.remove()
    assert site.run("bin/up", "--help").code == 0  # the controller's own environment
    yield site
    site.remove()


@pytest.fixture(scope="module")
def bundle(alone: Site) -> Path:
    """Fetched once; KVHOST_TEST_BUNDLES names a directory to keep bundles in."""
    folder = os.environ.get("KVHOST_TEST_BUNDLES", str(alone.repo / "bundles"))
    words = ("bundle", "cpu-x86_64", "--python", "3.11", "--out", folder)
    done = alone.run(".venv/bin/kvhost", *words)
    assert done.code == 0, done.text[-3000:]
    again = alone.run(".venv/bin/kvhost", *words)
    assert again.code == 0, again.text[-3000:]
    return Path(folder, "cpu-x86_64-py3.11")


@pytest.fixture(scope="module")
def island() -> Iterator[int]:
    """PID of a process in a network namespace that has loopback and no route."""
    command = (
        'ip link set lo up && [ -z "$(ip route; ip -6 route show default)" ] && echo up && cat'
    )
    argv = ["unshare", "--net", "sh", "-c", command]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sitting:
        assert sitting.stdin is not None and sitting.stdout is not None
        assert sitting.stdout.readline() == "up\n"
        yield sitting.pid
        sitting.stdin.close()


def cut_off(site: Site, island: int, **data: str) -> Done:
    """`bin/up` from there: the services of one run are seen by the next."""
    argv = ("nsenter", "--target", str(island), "--net", "bin/up", *site.arguments(**data))
    return site.run(*argv, env=NOWHERE)


def test_one_changed_byte_is_refused_and_named_and_nothing_is_installed(
    alone: Site, bundle: Path, island: int, tmp_path: Path
) -> None:
    wheel = next(bundle.glob("wheels/lmcache-*.whl"))
    other = tmp_path / "bundle"
    for path in bundle.rglob("*"):
        target = other / path.relative_to(bundle)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target) if path != wheel else target.write_bytes(changed(path))
    done = cut_off(alone, island, engine_bundle=str(other), verify="never")
    assert done.code == 1, done.text[-3000:]
    assert f"wheels/{wheel.name}: changed" in done.text
    assert not list((alone.base / "envs").iterdir())
    assert not list((alone.base / "tools").iterdir())


def changed(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


def test_from_a_bundle_to_a_verdict_with_the_network_cut_off(
    alone: Site, bundle: Path, island: int
) -> None:
    done = cut_off(alone, island, engine_bundle=str(bundle))
    assert done.code == 0, done.text[-6000:]
    assert "persisted PASS" in done.text
    assert "the bundle is whole" in done.text
    [marker] = alone.base.glob("envs/*/.kvhost-complete.json")
    assert {row["state"] for row in json.loads(marker.read_text())["abi"]} <= {OK, NOT_APPLICABLE}
    again = cut_off(alone, island, engine_bundle=str(bundle))
    assert again.code == 0, again.text[-3000:]
    assert again.changed() == []
