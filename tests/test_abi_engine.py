"""The ABI check on the real engine: whole, and damaged in one place; what fails is not switched to.

The environment is the real one seen through PYTHONPATH, so that nothing is copied or downloaded; a
part is damaged in a copy of its package that lies before it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhost.onhost import abi_check
from kvhost.paths import HostPaths
from kvhost.services.vllm import service_env
from kvhost.settings import Settings
from tests.test_engine_script import Place

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="the proof runs as another user: needs root"),
]
USER = "nobody"
#: one that LMCache's native part takes from Python
SYMBOL = b"_PyType_Lookup\0"


class Proven(Place):
    """A place whose environments see the real engine, behind ``overlay``."""

    def __init__(self, root: Path, engine: Path) -> None:
        super().__init__(root)
        [self.real] = (engine / "lib").glob("python3.*/site-packages")
        self.overlay = root / "overlay"
        self.overlay.mkdir()
        self.python = (engine / "bin/python").resolve()
        self.user, self.abi = USER, Path(str(abi_check.__file__))
        env = service_env(Settings(), HostPaths(base_dir=str(root), tier_dir=str(root / "tier")))
        del env["PYTHONPYCACHEPREFIX"]  # an engine that was used has its bytecode beside it
        env["PYTHONPATH"] = f"{self.overlay}:{self.real}"
        for name in ("HOME", "TMPDIR", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT"):
            Path(env[name]).mkdir(parents=True, exist_ok=True)
        for folder, _, _ in os.walk(env["HOME"]):
            shutil.chown(folder, USER)
        (root / "service-env.json").write_text(json.dumps(env))

    def argv(self) -> list[str]:
        argv = super().argv()
        argv[argv.index("--python") + 1] = str(self.python)
        return argv

    def copied(self, package: str) -> Path:
        """The package in the overlay, as links to what is in the real one."""
        place = self.overlay / package
        place.mkdir()
        for path in (self.real / package).iterdir():
            if path.name != "__pycache__":
                (place / path.name).symlink_to(path)
        return place


@pytest.fixture
def proven(engine: Path) -> Iterator[Proven]:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lets no other user in
        Path(folder).chmod(0o755)
        yield Proven(Path(folder), engine)


def rows(said: str) -> dict[str, tuple[str, str]]:
    """Check -> (state, detail) of the table that engine.py prints."""
    lines = [line for line in said.splitlines() if line.startswith("  ") and line[2] != " "]
    cells = [(line[2:17].strip(), line[17:40].strip(), line[40:]) for line in lines]
    return {name: (state, detail) for state, name, detail in cells}


GPU = {name for name, _ in abi_check.GPU_CHECKS}


@pytest.mark.full  # in the core tier the end-to-end tests install and prove it
def test_the_whole_engine_passes_and_its_table_is_kept(proven: Proven) -> None:
    table = rows(proven.install())
    assert {name for name, (state, _) in table.items() if state == "ok"} == {
        *(name for name, _ in abi_check.CHECKS), "no silent fallback"
    }  # fmt: skip
    assert {name for name, (state, _) in table.items() if state == "not applicable"} == GPU
    kept = json.loads((proven.env / ".kvhost-complete.json").read_text())["abi"]
    assert {row["name"]: (row["state"], row["detail"]) for row in kept} == table
    proven.switch()


def other_symbol(proven: Proven) -> None:
    """A compiled part that asks for a symbol which is not here, as one built for another torch."""
    package = proven.copied("lmcache")
    [part] = package.glob("lmcache_native.*.so")
    content = part.read_bytes()
    assert SYMBOL in content
    part.unlink()
    part.write_bytes(content.replace(SYMBOL, b"_PyType_Lookuq\0"))


def lose_compiled(proven: Proven) -> None:
    [part] = proven.copied("lmcache").glob("lmcache_native.*.so")
    part.unlink()


def adapter_that_keeps_nothing(proven: Proven) -> None:
    """LMCache's adapter loses its files when it closes."""
    package = proven.copied("lmcache")
    for inner in ("v1", "v1/distributed", "v1/distributed/l2_adapters"):
        here, real = package / inner, proven.real / "lmcache" / inner
        here.unlink()
        here.mkdir()
        for path in real.iterdir():
            if path.name != "__pycache__":
                (here / path.name).symlink_to(path)
    adapter = package / "v1/distributed/l2_adapters/fs_l2_adapter.py"
    text = adapter.read_text()
    adapter.unlink()
    adapter.write_text(text + "\nFSL2Adapter.close = lambda self: __import__('shutil').rmtree("
                       "self._base_path)\n")  # fmt: skip


@pytest.mark.parametrize(
    "damage, check, words",
    [
        pytest.param(other_symbol, "lmcache", "undefined symbol", id="other-symbol"),
        pytest.param(lose_compiled, "lmcache", "are missing", id="lost", marks=pytest.mark.full),
        pytest.param(
            adapter_that_keeps_nothing, "store and load", "is not found", id="keeps-nothing",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_damaged_part_is_found_and_nothing_is_switched(
    proven: Proven, damage: Callable[[Proven], None], check: str, words: str
) -> None:
    old = proven.root / "envs/old"
    old.mkdir(parents=True)
    (proven.root / "current").symlink_to(old)
    damage(proven)
    said = proven.install(rc=1)
    state, detail = rows(said)[check]
    assert (state, words in detail) == ("failed", True), said
    assert "the ABI check failed" in said
    assert not proven.env.exists()
    assert "not switched" in proven.switch(rc=1)
    assert (proven.root / "current").readlink() == old


@pytest.mark.full
def test_a_cpu_build_of_torch_on_a_gpu_host_is_refused(proven: Proven) -> None:
    """The environment is the real one for a CPU: no line for a GPU passes or is left out."""
    proven.more = ["--cuda", "13", "--gpus", "8.9"]
    said = proven.install(rc=1)
    table = rows(said)
    assert "is a CPU build, and a GPU is to be used" in table["torch"][1]
    passed = {name for name in GPU if table[name][0] != "failed"}
    assert passed <= {"compiler"}, said
    assert not proven.env.exists()
