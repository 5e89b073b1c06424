"""Models and bundles of the controller's on a host, by pyinfra: on this machine and over SSH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhost.engine.bundle import BundleError, make_bundle
from kvhost.engine.bundle_packages import this_release
from kvhost.onhost.bundle_check import find_faults
from tests.e2e_tools import Done, make_site
from tests.lab.nspawn import Host, Lab
from tests.test_bundle import Shop

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what is sent is root's on the host")
MODEL = """
import json, os
from deploys.model.sent import sent_model
sent_model(name="sent: model", **json.loads(os.environ["SENT"]))
"""
BUNDLE = """
import json, os
from pathlib import Path
from deploys.common.bundle import Place
from deploys.engine.bundle import bundle_on_host
given = json.loads(os.environ["SENT"])
bundle_on_host(
    name="sent: bundle", place=Place(given["dest"], Path(given["source"])), around=given["around"],
    installed=(("cat", given["done"]),),
    prove=("python3", given["script"], "--bundle", given["dest"]),
)
"""

PACKAGES = """
import json, os
from pathlib import Path
from deploys.common.bundle import Place
from deploys.host.operations import debian_packages
from kvhost.onhost.bundle_check import read_manifest
given = json.loads(os.environ["SENT"])
debian_packages(
    name="sent: packages", packages=("libnuma1",), note=given["note"], release=given["release"],
    around=given["around"],
    bundle=Place(given["dest"], Path(given["source"]), read_manifest(given["source"])),
)
"""


@dataclass
class Way:
    """A copy of the repository and one host: this machine, or one over SSH by a user with sudo."""

    repo: Path
    base: Path
    host: Host | None
    inventory: str

    def run(self, deploy: str, **given: str) -> Done:
        (self.repo / "sent.py").write_text(deploy)
        pyinfra = str(Path(sys.executable).with_name("pyinfra"))
        argv = [pyinfra, self.inventory, "sent.py", "-y"]
        done = subprocess.run(
            argv if self.host is None else self.host.lab.argv(*argv), cwd=self.repo,
            env={**os.environ, "PYTHONPATH": str(self.repo), "SENT": json.dumps(given),
                 "XDG_CACHE_HOME": str(self.repo)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)

    def on_host(self, *words: str) -> str:
        if self.host is not None:
            return self.host.root(*words)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def script(self, name: str) -> str:
        """One of kvhost's scripts, put where the host can run it, and what it imports."""
        for one in (name, "gguf"):
            source = self.repo / "kvhost" / "onhost" / f"{one}.py"
            if self.host is not None:
                self.host.write(f"{self.base}/{one}.py", source.read_text())
            else:
                shutil.copy(source, self.base)
        return f"{self.base}/{name}.py"


@pytest.fixture(
    scope="module",
    params=["here", pytest.param("ssh", marks=[pytest.mark.full, pytest.mark.systemd])],
)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("sent")
    repo, base = make_site(folder / "site").repo, folder / "host"
    if request.param == "here":
        base.mkdir()
        yield Way(repo, base, None, "@local")
        return
    with Lab() as lab:
        host = lab.host("sent")
        host.root("mkdir", "-p", "/srv/host")
        inventory = lab.inventory(folder / "hosts.py")
        yield Way(repo, Path("/srv/host"), host, str(inventory))


def tiny(folder: Path, fill: bytes) -> None:
    """The files of a model, as model_digest.py takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + fill * 9
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    (folder / "notes.md").write_text("not of the model")


def test_a_model_is_sent_once_replaced_when_it_changed_and_never_taken_for_another(
    way: Way, tmp_path: Path
) -> None:
    tiny(tmp_path / "tiny", b"a")
    here = f"{way.base}/models/sent--tiny"
    given = {
        "source": f"controller:{tmp_path}/tiny", "here": here, "state": str(way.base),
        "script": way.script("model_digest"),
    }  # fmt: skip
    done = way.run(MODEL, **given)
    assert done.code == 0, done.text[-3000:]
    names = way.on_host("ls", here).split()
    assert names == ["config.json", "model.safetensors"]
    assert way.on_host("stat", "-c", "%U %a", here, f"{here}/config.json") == "root 755\nroot 644\n"
    assert way.run(MODEL, **given).changed() == []
    tiny(tmp_path / "tiny", b"b")
    done = way.run(MODEL, **given)
    assert done.changed() == ["sent: model"], done.text[-3000:]
    assert way.on_host("tail", "-c", "9", f"{here}/model.safetensors") == "b" * 9
    assert way.on_host("ls", f"{way.base}/models").split() == ["sent--tiny"]
    # a file of others in the draft would be served with the model
    tiny(tmp_path / "tiny", b"c")
    way.on_host("mkdir", f"{here}.partial")
    way.on_host("cp", f"{here}/config.json", f"{here}.partial/tokenizer.json")
    done = way.run(MODEL, **given)
    assert done.code == 1
    assert f"more lies there: remove {here}.partial" in done.text
    assert way.on_host("tail", "-c", "9", f"{here}/model.safetensors") == "b" * 9
    way.on_host("rm", "-r", f"{here}.partial")
    assert way.run(MODEL, **given).code == 0


def test_what_is_no_model_is_refused_before_anything_is_sent(way: Way, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    here = f"{way.base}/models/sent--none"
    script = way.script("model_digest")
    source = f"controller:{tmp_path}/none"
    done = way.run(MODEL, source=source, here=here, state=str(way.base), script=script)
    assert done.code == 1
    assert "has no config.json: is it the directory of a model?" in done.text
    assert "Traceback" not in done.text
    assert "sent--none" not in way.on_host("ls", f"{way.base}")


@pytest.mark.full
def test_a_bundle_is_sent_goes_on_where_it_was_and_is_verified_on_the_host(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Shop(tmp_path, monkeypatch).make()
    dest, done = f"{way.base}/bundle/0123", f"{way.base}/done"
    given = {
        "source": str(bundle), "dest": dest, "around": f"{way.base}/bundle", "done": done,
        "script": way.script("bundle_check"),
    }  # fmt: skip
    first = way.run(BUNDLE, **given)
    assert first.code == 0, first.text[-3000:]
    assert "the bundle is whole: 8 files" in first.text
    assert way.on_host("ls", "-A", f"{way.base}/bundle").split() == ["0123"]
    # a file that was cut off, and one that was tampered with on its way, are sent again
    wheel = f"{dest}/wheels/tiny1-1.0-py3-none-any.whl"
    kept = way.on_host("stat", "-c", "%Y.%i", f"{dest}/wheels/tiny2-1.0-py3-none-any.whl")
    way.on_host("truncate", "--size", "100", wheel)
    again = way.run(BUNDLE, **given)
    assert again.code == 0, again.text[-3000:]
    assert way.on_host("stat", "-c", "%Y.%i", f"{dest}/wheels/tiny2-1.0-py3-none-any.whl") == kept
    # what is additional there is named, and stays
    way.on_host("cp", wheel, f"{dest}/wheels/more-1.0-py3-none-any.whl")
    more = way.run(BUNDLE, **given)
    assert more.code == 1
    assert "wheels/more-1.0-py3-none-any.whl: additional" in more.text
    way.on_host("sh", "-c", f"echo true > {done}")
    assert way.run(BUNDLE, **given).changed() == []
    way.on_host("rm", "-r", done, f"{way.base}/bundle")


@pytest.mark.full
def test_debian_packages_come_from_a_bundle_where_there_is_no_network(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.host is None:
        pytest.skip("no package is taken from this machine: the host over SSH has no way out")
    shop = Shop(tmp_path, monkeypatch)
    bundle = make_bundle(shop.out, shop.lock, shop.tools, ("libnuma1",)).path
    assert {path.name.partition("_")[0] for path in bundle.glob("packages/*.deb")} >= {"libc6"}
    assert find_faults(str(bundle))[0] == []
    with pytest.raises(BundleError, match="without Debian packages"):
        (plain := Shop(tmp_path / "plain", monkeypatch)).make()
        make_bundle(plain.out, plain.lock, plain.tools, ("libnuma1",))
    given = {
        "source": str(bundle), "dest": f"{way.base}/bundle/4567", "around": f"{way.base}/bundle",
        "note": f"{way.base}/packages", "release": "ubuntu 22.04",
    }  # fmt: skip
    way.on_host("dpkg", "--purge", "--force-depends", "libnuma1")
    done = way.run(PACKAGES, **given)
    assert done.code == 1
    assert "this host is ubuntu 22.04: make the bundle on such a machine" in done.text
    given["release"] = this_release()
    done = way.run(PACKAGES, **given)
    assert done.code == 0, done.text[-3000:]
    assert "install ok installed" in way.on_host("dpkg-query", "-W", "-f", "${Status}", "libnuma1")
    assert way.on_host("cat", f"{way.base}/packages") == "libnuma1\n"
    assert way.run(PACKAGES, **given).changed() == []
    # a package that was changed, with its size as it was
    way.on_host("rm", "-r", f"{way.base}/bundle")
    way.on_host("dpkg", "--purge", "--force-depends", "libnuma1")
    [deb] = bundle.glob("packages/libnuma1_*.deb")
    content = bytearray(deb.read_bytes())
    content[-1] ^= 1
    deb.write_bytes(content)
    done = way.run(PACKAGES, **given)
    assert done.code == 1
    assert "libnuma1" not in way.on_host(
        "dpkg-query", "-W", "-f", "${Package} ${Status}\n", "*numa*"
    )
