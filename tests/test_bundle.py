"""Bundles of tiny wheels: made with a real pip, installed by a real uv without a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvhost.engine import bundle as bundles
from kvhost.engine.bundle import BundleError, bundle_refusals, find_bundle, make_bundle, platforms
from kvhost.engine.locks import EngineLock
from kvhost.engine.tools import tools_commands
from kvhost.onhost import bundle_check
from kvhost.paths import HostPaths
from tests.test_engine_script import Place, needs_uv, root_only, wheel

REPO = Path(__file__).resolve().parents[1]
CHECK = REPO / "kvhost" / "onhost" / "bundle_check.py"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
OWN = b"a wheel of kvhost's own"
OWN_NAME = "own-1.0-py3-none-any.whl"


def pinned(names: dict[str, str]) -> str:
    return "".join(f"{name}==1.0 \\\n    --hash=sha256:{d}\n" for name, d in names.items())


class Shop:
    """An index (find-links) of tiny wheels, the lock of four of them, and that of one tool."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.links, self.out = root, root / "links", root / "out"
        self.names = {f"tiny{n}": wheel(self.links, f"tiny{n}", data=b"x" * n) for n in range(4)}
        own = {"own": hashlib.sha256(OWN).hexdigest()}
        self.tools = pinned({"tool": wheel(self.links, "tool")})
        self.lock = EngineLock(
            name="cpu-test", cuda=None, machine="x86_64", python=PYTHON,
            text=pinned(self.names | own), versions={"vllm": "1", "lmcache": "1", "torch": "1+cpu"},
            download_bytes=1 << 20, disk_bytes=1 << 20, third_party=None, wheels={OWN_NAME: OWN},
        )  # fmt: skip
        for key in [key for key in os.environ if key.startswith("PIP_")]:
            patch.delenv(key)
        patch.setattr(bundles, "GROUP", 2)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(self.links))

    def make(self) -> Path:
        return make_bundle(self.out, self.lock, self.tools).path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """One bundle that the tests of this file copy."""
    with pytest.MonkeyPatch.context() as patch:
        shop = Shop(tmp_path_factory.mktemp("shop"), patch)
        shop.make()
        return shop


@pytest.fixture
def copy(made: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.out, tmp_path / "copy"))


def check(bundle: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(CHECK), "--bundle", str(bundle), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


# Making one


def test_everything_of_the_lock_is_in_it_and_the_second_time_nothing_is_fetched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shop.make()
    names = {p.name for p in (path / "wheels").iterdir()}
    assert names == {*(f"tiny{n}-1.0-py3-none-any.whl" for n in range(4)), OWN_NAME}
    assert [p.name for p in (path / "tools").iterdir()] == ["tool-1.0-py3-none-any.whl"]
    assert (path / "lock.txt").read_text() == shop.lock.text
    manifest = json.loads((path / "manifest.json").read_text())
    for name, row in manifest["files"].items():
        content = (path / name).read_bytes()
        assert row == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert not shop.out.with_name("out.partial").exists()
    monkeypatch.setattr(bundles, "_pip", lambda *_: pytest.fail("pip was asked"))
    assert shop.make() == path


def test_what_a_failed_run_had_is_kept_and_only_the_rest_is_fetched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = shop.links / "tiny3-1.0-py3-none-any.whl"
    aside = last.rename(shop.root / last.name)
    with pytest.raises(BundleError, match=r"found for tiny3==1.0\n.*the next run goes on"):
        shop.make()
    assert not shop.out.exists()
    draft = shop.out.with_name("out.partial")
    assert (draft / "wheels" / "tiny0-1.0-py3-none-any.whl").exists()
    (draft / "wheels" / "tiny1-1.0-py3-none-any.whl").write_bytes(b"half")  # and one was damaged
    aside.rename(last)
    asked: list[str] = []
    real = bundles._pip

    def pip(passing: Path, lock: EngineLock, more: list[str]) -> subprocess.CompletedProcess[str]:
        asked.extend(
            line.split("==")[0] for line in (passing / "wanted.txt").read_text().splitlines()
        )
        return real(passing, lock, more)

    monkeypatch.setattr(bundles, "_pip", pip)
    shop.make()
    assert "tiny1" in asked
    assert "tiny3" in asked
    assert "tiny0" not in asked
    assert check(shop.out).returncode == 0


def test_a_killed_run_is_completed_by_the_next(shop: Shop) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from kvhost.engine import bundle\n"
        "from kvhost.engine.locks import EngineLock; import pickle\n"
        "out, lock, tools = pickle.load(open(sys.argv[2], 'rb')); bundle.GROUP = 1\n"
        "bundle.make_bundle(out, lock, tools)\n"
    )
    import pickle

    told = shop.root / "told"
    told.write_bytes(pickle.dumps((shop.out, shop.lock, shop.tools)))
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(REPO), str(told)], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wheels = shop.out.with_name("out.partial") / "wheels"
    limit = time.monotonic() + 30
    while not list(wheels.glob("tiny*")):
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert not shop.out.exists()
    shop.make()
    assert check(shop.out).returncode == 0


def test_a_file_that_is_not_the_locked_one_is_one_clear_error(shop: Shop) -> None:
    wheel(shop.links, "tiny1", data=b"other")
    with pytest.raises(BundleError) as caught:
        shop.make()
    assert "tiny1==1.0 is not the one that was locked" in str(caught.value)
    assert "tiny0" not in str(caught.value)
    assert not shop.out.exists()


@root_only
def test_a_full_disk_is_one_clear_error(shop: Shop) -> None:
    big = {"tinybig": wheel(shop.links, "tinybig", data=os.urandom(6 << 20))}
    shop.lock = replace(shop.lock, text=shop.lock.text + pinned(big), download_bytes=1000)
    small = shop.root / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=False
    ).returncode:
        pytest.skip("no right to mount")
    try:
        shop.out = small / "out"
        with pytest.raises(BundleError, match=r"the disk is full: .* are free at .*out\.partial"):
            shop.make()
        shop.lock = replace(shop.lock, download_bytes=1 << 30)
        with pytest.raises(BundleError, match=r"10\d\d MiB are to be fetched, and .* are free"):
            shop.make()
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_write_that_fails_for_want_of_space_is_said_so(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundles, "_fetch", full)
    with pytest.raises(BundleError, match="the disk is full"):
        shop.make()


def test_two_runs_at_once_are_refused(shop: Shop) -> None:
    draft = shop.out.with_name("out.partial")
    draft.mkdir()
    with bundles._alone(draft), pytest.raises(BundleError, match="another run is at work"):
        shop.make()


def test_another_bundle_in_its_place_is_not_overwritten(made: Shop, copy: Path) -> None:
    other = replace(made.lock, text=made.lock.text + "# other\n")
    with pytest.raises(BundleError, match=r"lock\.txt: the bundle was made from another one"):
        make_bundle(copy, other, made.tools)
    assert check(copy).returncode == 0


def test_wheels_for_the_oldest_glibc_that_is_supported() -> None:
    tags = platforms("x86_64")
    assert tags[0] == "manylinux_2_35_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(tags)
    assert "manylinux_2_36_x86_64" not in tags
    assert "manylinux1_aarch64" not in platforms("aarch64")


# Whether one is whole


def other_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def both(bundle: Path) -> None:
    """A wheel and its line in the manifest are changed together."""
    path = bundle / "wheels/tiny2-1.0-py3-none-any.whl"
    other_byte(path)
    manifest = json.loads((bundle / "manifest.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["files"]["wheels/tiny2-1.0-py3-none-any.whl"]["sha256"] = digest
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def link(bundle: Path) -> None:
    path = bundle / "wheels/tiny2-1.0-py3-none-any.whl"
    path.symlink_to(path.rename(bundle.parent / "elsewhere.whl"))


def unlisted(bundle: Path) -> None:
    """A wheel goes, and its line in the manifest with it."""
    (bundle / "tools/tool-1.0-py3-none-any.whl").unlink()
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["files"]["tools/tool-1.0-py3-none-any.whl"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))


W2, W0 = "wheels/tiny2-1.0-py3-none-any.whl", "wheels/tiny0-1.0-py3-none-any.whl"
TOOL, MORE = "tools/tool-1.0-py3-none-any.whl", "wheels/more-1.0-py3-none-any.whl"


def reword(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda b: (b / name).write_text((b / name).read_text().replace(old, new))


TAMPERED: list[tuple[str, Callable[[Path], object], str]] = [
    ("byte", lambda b: other_byte(b / W2), f"{W2}: changed"),
    ("tool", lambda b: other_byte(b / TOOL), f"{TOOL}: changed"),
    ("missing", lambda b: (b / W0).unlink(), f"{W0}: missing"),
    ("additional", lambda b: (b / MORE).write_text(""), f"{MORE}: additional"),
    ("beside", lambda b: (b / "note").write_text(""), "note: additional"),
    ("shorter", lambda b: (b / W0).write_text(""), f"{W0}: has 0 bytes, the manifest says"),
    ("both", both, f"{W2}: not a file of the lock"),
    ("link", link, f"{W2}: not a regular file"),
    ("unlisted", unlisted, "tools/: no file of tool==1.0"),
    ("lock", reword("lock.txt", "tiny2", "tiny9"), "lock.txt: changed"),
    ("no manifest", lambda b: (b / "manifest.json").unlink(), "manifest.json"),
    ("not JSON", lambda b: (b / "manifest.json").write_text("{"), "refused"),
    ("out", reword("manifest.json", '"tools.txt"', '"../tools.txt"'), "no place in a bundle"),
]


@pytest.mark.parametrize(("how", "tamper", "said"), TAMPERED, ids=[row[0] for row in TAMPERED])
def test_what_is_not_as_it_was_made_is_refused_and_named(
    copy: Path, how: str, tamper: Callable[[Path], object], said: str
) -> None:
    assert check(copy).returncode == 0
    tamper(copy)
    done = check(copy)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr
    assert "Nothing of it was installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lock_that_is_wanted_counts_not_the_bundles_own(copy: Path, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text((copy / "lock.txt").read_text())
    assert check(copy, "--lock", str(lock)).returncode == 0
    lock.write_text(lock.read_text().replace("tiny2==1.0", "tiny2==2.0"))
    done = check(copy, "--lock", str(lock))
    assert done.returncode == 1
    assert "lock.txt: the bundle was made from another one" in done.stderr


# In a plan


def test_a_bundle_on_the_controller_is_looked_at_before_any_host_is_touched(
    made: Shop, copy: Path, tmp_path: Path
) -> None:
    shop, path = made, copy

    def codes(where: Path, lock: EngineLock = made.lock, tools: str = shop.tools) -> list[str]:
        return [one.code for one in bundle_refusals(str(where), lock, tools)]

    assert codes(path) == []
    assert codes(path, replace(shop.lock, text=shop.lock.text + "#\n")) == [
        "bundle_of_another_lock"
    ]
    assert codes(path, tools=shop.tools + "#\n") == ["bundle_of_another_lock"]
    assert codes(tmp_path / "nothing") == ["bundle_unusable"]
    folder = tmp_path / "bundles"
    folder.mkdir()
    inside = path.rename(folder / f"cpu-test-py{PYTHON}")
    assert codes(folder) == []  # the right one of a directory of bundles
    assert find_bundle(folder, shop.lock) == inside
    assert codes(inside.rename(tmp_path / "a b")) == ["bundle_unusable"]
    (tmp_path / "a b" / "wheels" / OWN_NAME).unlink()
    [refusal] = bundle_refusals(str(tmp_path / "a b"), shop.lock, shop.tools)
    assert f"wheels/{OWN_NAME}: missing" in refusal.found
    assert f"kvhost bundle cpu-test --python {PYTHON}" in refusal.fix


# Installing from one, with no network


def without_network(argv: list[str]) -> list[str]:
    return ["unshare", "--net", *argv]


@root_only
@needs_uv
def test_installed_with_no_network_whatever_the_host_says_of_indexes(
    copy: Path, tmp_path: Path
) -> None:
    """The host's pip names an index that does not answer, and another tiny2 lies in find-links."""
    place = Place(tmp_path)
    lock = (copy / "lock.txt").read_text()
    own = hashlib.sha256(OWN).hexdigest()  # no real wheel: it is left out here
    place.lock.write_text(lock.replace(f"own==1.0 \\\n    --hash=sha256:{own}\n", ""))
    wheel(place.links, "tiny2", data=b"of the host")
    place.pip = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": str(place.links)}
    place.more = ["--bundle", str(copy)]
    env = place.environ(UV_DEFAULT_INDEX="http://127.0.0.1:9/simple")
    done = subprocess.run(
        without_network(place.argv()), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [place.imports(f"tiny{n}") for n in range(4)] == ["1.0"] * 4
    assert (place.site / "tiny2.data.txt").read_text() == "xx"


@root_only
def test_the_tools_come_from_the_bundle_with_no_network(copy: Path, tmp_path: Path) -> None:
    paths = HostPaths(str(tmp_path / "base"), str(tmp_path / "tier"))
    for folder in (paths.tools, paths.locks):
        Path(folder).mkdir(parents=True)
    shutil.copy(copy / "tools.txt", paths.locks)
    _, build = tools_commands(paths, "d" * 64, sys.executable, str(copy))
    other = tmp_path / "constraints.txt"
    other.write_text("tool==2.0\n")  # what the host's pip is told does not count
    env = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONSTRAINT": str(other)}
    done = subprocess.run(
        without_network(["sh", "-c", build]), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(Path(paths.tools).glob("*/lib/python*/site-packages/tool.py"))


def test_the_check_of_a_bundle_reads_every_byte(copy: Path) -> None:
    faults, manifest = bundle_check.find_faults(str(copy))
    assert faults == []
    assert len(manifest["files"]) == 8
