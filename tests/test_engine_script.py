"""engine.py with a real uv and tiny wheels; a double stands in for the ABI check."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import engine, engine_pip

ENGINE = Path(__file__).parent.parent / "kvhost" / "onhost" / "engine.py"
UV = Path(sys.executable).parent / "uv"
STEPS = ("wiped", "venv", "packages", "abi", "marker")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")
needs_uv = pytest.mark.skipif(not UV.exists(), reason="uv is not installed")

ABI_DOUBLE = """
import json, os, sys
detail = json.dumps({**os.environ, "argv": sys.argv[1:]})
checks = [{"name": "double", "state": "ok", "detail": detail}]
print("noise")
print(json.dumps({"ok": True, "checks": checks}))
"""


def wheel(folder: Path, name: str, version: str = "1.0", data: bytes = b"") -> str:
    """A wheel of one module; its sha256."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n".encode(),
        f"{name}.data.txt": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for inner, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{inner},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, content in files.items():
            archive.writestr(zipfile.ZipInfo(inner), content)  # of one time: the same each time
    return hashlib.sha256(path.read_bytes()).hexdigest()


def index(folder: Path, name: str, version: str = "1.0") -> str:
    """A package index in a directory (PEP 503), with one wheel; its sha256."""
    digest = wheel(folder / name, name, version)
    file = f"{name}-{version}-py3-none-any.whl"
    page = f'<!DOCTYPE html><html><body><a href="{file}#sha256={digest}">{file}</a></body></html>'
    (folder / name / "index.html").write_text(page)
    return digest


class Place:
    """A base directory before the engine is installed. No index is asked unless a test sets one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = root / "envs" / "e1"
        self.site = self.env / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        self.links = root / "links"
        self.lock = root / "lock.txt"
        self.digests = {"tinya": wheel(self.links, "tinya", data=b"a" * 1000)}
        self.write_lock()
        self.abi = root / "abi_double.py"
        self.abi.write_text(ABI_DOUBLE)
        (root / "service-env.json").write_text(json.dumps({"HOME": str(root), "MARK": "1"}))
        self.pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links)}
        self.user = os.environ.get("USER", "root") if os.geteuid() else "root"
        self.more: list[str] = []

    def write_lock(self) -> None:
        lines = [f"{name}==1.0 \\\n    --hash=sha256:{d}\n" for name, d in self.digests.items()]
        self.lock.write_text("".join(lines))

    def argv(self) -> list[str]:
        root = self.root
        options = {
            "lock": self.lock, "lock-digest": "d1", "env": self.env, "wheels": root / "wheels",
            "python": sys.executable, "pip-python": sys.executable, "uv": UV,
            "cache": root / "cache", "user": self.user, "service-env": root / "service-env.json",
            "abi-script": self.abi,
        }  # fmt: skip
        pairs = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return [sys.executable, str(ENGINE), "install", *pairs, *self.more]

    def environ(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        quiet = {"PIP_CONFIG_FILE": os.devnull, "UV_HTTP_RETRIES": "0"}
        return {**kept, **quiet, **self.pip, **more}

    def install(self, rc: int = 0, **env: str) -> str:
        done = subprocess.run(
            self.argv(), env=self.environ(**env), capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def status(self) -> Any:
        argv = [sys.executable, str(ENGINE), "status", "--env", str(self.env)]
        return json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)

    def complete(self) -> bool:
        return bool(self.status()["complete"])

    def switch(self, rc: int = 0) -> str:
        argv = [sys.executable, str(ENGINE), "switch", "--env", str(self.env)]
        argv += ["--current", str(self.root / "current")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == rc, done.stderr
        return done.stderr

    def imports(self, name: str = "tinya") -> str:
        argv = [
            str(self.env / "bin" / "python"),
            "-B",
            "-c",
            f"import {name} as m; print(m.VERSION)",
        ]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@needs_uv
def test_installed_proven_switched_and_the_second_time_nothing_is_done(place: Place) -> None:
    assert place.status() == {"complete": False, "why": "not built"}
    said = place.install()
    assert place.complete()
    assert place.imports() == "1.0"
    # the proof saw what the services will see, and nothing of the installer's surroundings
    shown = said[said.index("double") :].splitlines()[0]
    env = json.loads(shown[shown.index("{") :])
    env.pop("LC_CTYPE", None)  # Python's own doing
    assert env.pop("argv") == ["--accelerator", "cpu"]
    assert env == {"HOME": str(place.root), "MARK": "1"}
    place.switch()
    assert (place.root / "current").resolve() == place.env
    shutil.rmtree(place.links)
    assert "complete already" in place.install()


@needs_uv
@pytest.mark.parametrize("how", ["path", "file", "home", "page"])
def test_find_links_in_every_way_that_pip_takes(place: Place, how: str) -> None:
    page = place.links / "page.html"
    page.write_text('<a href="tinya-1.0-py3-none-any.whl">tinya</a>')
    ways = {"path": place.links, "file": f"file://{place.links}", "home": "~/links", "page": page}
    place.pip["PIP_FIND_LINKS"] = f"/nowhere/at-all {ways[how]}"
    said = place.install(HOME=str(place.root))
    assert place.imports() == "1.0"
    assert "find-links /nowhere/at-all is not there" in said


@needs_uv
def test_indexes_as_file_urls_from_a_configuration_file(place: Place) -> None:
    place.digests["tinyb"] = index(place.root / "first", "tinyb")
    place.digests["tinyc"] = index(place.root / "second", "tinyc")
    place.write_lock()
    config = place.root / "pip.conf"
    config.write_text(
        f"[global]\nindex-url = file://{place.root}/first\n"
        f"extra-index-url =\n    file://{place.root}/second\n"
        f"[install]\nfind-links = file://{place.links}\n"
    )
    place.pip = {"PIP_CONFIG_FILE": str(config)}
    place.install()
    assert [place.imports(name) for name in ("tinya", "tinyb", "tinyc")] == ["1.0"] * 3


@needs_uv
def test_wheels_of_kvhost_are_found_without_any_setting(place: Place) -> None:
    place.digests["tinyw"] = wheel(place.root / "wheels", "tinyw")
    place.write_lock()
    place.install()
    assert place.imports("tinyw") == "1.0"


@needs_uv
def test_a_cuda_lock_is_proven_as_one_and_no_local_version_takes_its_place(place: Place) -> None:
    digest = wheel(place.links, "torch")
    wheel(place.links, "torch", "1.0+cpu")  # on a host whose find-links hold the CPU build
    place.lock.write_text(f"torch===1.0 \\\n    --hash=sha256:{digest}\n")
    place.more = ["--cuda", "13", "--gpus", "8.9,?"]
    place.install()
    assert (place.site / "torch-1.0.dist-info").is_dir()
    [check] = json.loads((place.env / ".kvhost-complete.json").read_text())["abi"]
    words = ["--accelerator", "cuda", "--cuda", "13", "--gpus", "8.9,?"]
    assert json.loads(check["detail"])["argv"] == words


@needs_uv
def test_the_index_of_torch_is_used_only_where_the_hosts_places_lack_it(place: Place) -> None:
    place.digests["torch"] = index(place.root / "torch-index", "torch")
    index(place.root / "first", "tinyz")
    place.write_lock()
    place.pip = {
        "PIP_INDEX_URL": f"file://{place.root}/first",
        "PIP_FIND_LINKS": str(place.links),
    }
    place.more = ["--torch-index", f"file://{place.root}/torch-index"]
    assert "torch: from file://" in place.install()
    assert place.imports("torch") == "1.0"
    shutil.rmtree(place.env)
    wheel(place.links, "torch")
    assert "torch: from" not in place.install()
    shutil.rmtree(place.env)
    (place.links / "torch-1.0-py3-none-any.whl").unlink()
    place.pip["PIP_NO_INDEX"] = "1"  # then that index is none either
    shutil.rmtree(place.root / "cache")
    said = place.install(rc=1)
    assert "None of the places" in said
    assert "torch-index" not in said


def with_current(place: Place) -> Path:
    """A complete environment in use; the place then wants another."""
    place.install()
    place.switch()
    old = place.env
    place.env = old.with_name("e2")
    return old


def assert_untouched(place: Place, old: Path) -> None:
    assert not place.env.exists()
    place.env = old
    assert place.complete()
    assert (place.root / "current").resolve() == old


@needs_uv
def test_a_file_that_is_not_the_locked_one(place: Place) -> None:
    old = with_current(place)
    place.digests["tinya"] = "0" * 64
    place.write_lock()
    said = place.install(rc=1)
    assert "not the one that was locked" in said
    assert "tinya" in said
    assert said.rstrip().endswith("The current environment is as it was.")
    assert_untouched(place, old)


@needs_uv
def test_no_network_is_one_clear_error_without_the_password(place: Place) -> None:
    old = with_current(place)
    shutil.rmtree(place.root / "cache")
    url = "http://ada:s3cret@127.0.0.1:9/simple"
    place.pip = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": f"{url}2?token=t0ken"}
    said = place.install(rc=1)
    assert "No network" in said
    assert "index http://***@127.0.0.1:9/simple," in said
    assert "s3cret" not in said
    assert "t0ken" not in said
    assert_untouched(place, old)


@needs_uv
def test_a_package_without_a_hash_is_refused(place: Place) -> None:
    wheel(place.links, "tinyh")
    place.lock.write_text(place.lock.read_text() + "tinyh==1.0\n")
    assert "hash" in place.install(rc=1)


@needs_uv
def test_a_package_that_is_nowhere(place: Place) -> None:
    place.digests["tinyq"] = "0" * 64
    place.write_lock()
    said = place.install(rc=1)
    assert "tinyq was not found" in said
    assert f"None of the places where this host's pip looks (pip config list) has it: find-links " \
        f"{place.links}" in said  # fmt: skip


@needs_uv
@root_only
def test_a_full_disk(place: Place) -> None:
    big = place.root / "big"
    place.digests["tinybig"] = wheel(big, "tinybig", data=os.urandom(8 << 20))
    place.write_lock()
    place.pip["PIP_FIND_LINKS"] += f" {big}"
    envs = place.env.parent
    envs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(envs)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount")
    try:
        said = place.install(rc=1)
        assert "The disk is full: " in said
        assert f"MB are free below {envs}" in said
        assert not place.env.exists()
        assert not (place.root / "cache").exists()
    finally:
        subprocess.run(["umount", str(envs)], check=True)


@needs_uv
@pytest.mark.parametrize("step", STEPS)
def test_killed_after_any_step_the_next_run_completes(place: Place, step: str) -> None:
    place.install(rc=-signal.SIGKILL, KVHOST_TEST_DIE_AFTER=f"engine:{step}")
    assert place.complete() is (step == "marker")
    place.install()
    assert place.complete()
    assert place.imports() == "1.0"


@needs_uv
def test_killed_while_an_installed_one_is_mended(place: Place) -> None:
    place.install()
    (place.site / "tinya.py").write_text("VERSION = 'edited'\n")
    for step in STEPS:
        place.install(rc=-signal.SIGKILL, KVHOST_TEST_DIE_AFTER=f"engine:{step}")
        assert not place.complete()
        assert place.env.with_name("e1.damaged").exists(), step
    place.install()
    assert place.complete()
    assert place.imports() == "1.0"
    assert not place.env.with_name("e1.damaged").exists()


@needs_uv
def test_the_installer_is_no_orphan_when_this_is_killed(place: Place) -> None:
    note, double = place.root / "pid", place.root / "uv_double"
    double.write_text(f"#!/bin/sh\necho $$ > {note}.new && mv {note}.new {note}\nexec sleep 60\n")
    double.chmod(0o755)
    argv = place.argv()
    argv[argv.index("--uv") + 1] = str(double)
    with subprocess.Popen(argv, env=place.environ(), stderr=subprocess.DEVNULL) as engine:
        wait_for(note.exists)
        engine.kill()
    pid = int(note.read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or b"Z" in state(pid))


def state(pid: int) -> bytes:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2][:3]


def wait_for(ready: Any) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_uv
def test_every_change_of_the_tree_is_seen_and_bytecode_is_none(place: Place) -> None:
    place.install()
    module = place.site / "tinya.py"
    bytecode = place.site / "__pycache__"
    bytecode.mkdir()
    (bytecode / "tinya.pyc").write_bytes(b"x")
    assert place.complete()
    text, times = module.read_text(), module.stat()

    def seen() -> None:
        assert "changed since it was built" in place.status()["why"]

    module.write_text(text)  # the same text, another time
    seen()
    os.utime(module, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert place.complete()
    module.chmod(0o600)
    seen()
    module.chmod(times.st_mode)
    place.site.chmod(0o700)
    seen()
    place.site.chmod(0o755)
    assert place.complete()
    link = place.env / "bin" / "python"
    target = link.readlink()
    link.unlink()
    seen()
    link.symlink_to(target)
    seen()  # made anew
    assert "not switched" in place.switch(rc=1)


@needs_uv
def test_an_edited_environment_gets_its_own_files_back(place: Place) -> None:
    place.install()
    with (place.site / "tinya.py").open("a") as module:  # in place: the cache's link sees it too
        module.write("VERSION = 'edited'\n")
    said = place.install()
    assert "was changed since it was built" in said
    assert place.imports() == "1.0"
    assert place.complete()


@needs_uv
def test_an_edited_environment_still_serves_when_the_new_one_fails(place: Place) -> None:
    place.install()
    (place.site / "tinya.py").write_text("VERSION = 'edited'\n")
    (place.links / "tinya-1.0-py3-none-any.whl").unlink()
    place.install(rc=1)
    assert place.imports() == "edited"
    assert not place.complete()


@needs_uv
@pytest.mark.parametrize(
    ("double", "said"),
    [
        ("print('{\"ok\": false, \"checks\": [{\"name\": \"torch\", \"state\": \"failed\","
         " \"detail\": \"not a CPU build\"}]}')", "the ABI check failed: torch"),
        ("import os, sys\nprint('here', file=sys.stderr, flush=True)\nos.abort()", "exit -6"),
        ("print('[]')", "gave no result (exit 0):\n[]"),
        ("print('{\"ok\": true, \"checks\": []}')", "proves nothing (exit 0)"),
        (ABI_DOUBLE + "print('the pool is closed')", "\nthe pool is closed"),
        (ABI_DOUBLE + "sys.exit(3)", "proves nothing (exit 3)"),
        (ABI_DOUBLE.replace('"ok", "detail', '"failed", "detail'), "check failed: double"),
        (ABI_DOUBLE + "print('closed')\nsys.exit('a warning')", "a warning\nnoise\n"),
        ("print('[' * 100000)", "gave no result (exit 0)"),
        ("", "gave no result (exit 0):\nit printed nothing"),
    ],
)  # fmt: skip
def test_an_environment_that_fails_its_proof_is_removed(
    place: Place, double: str, said: str
) -> None:
    old = with_current(place)
    place.abi.write_text(double)
    message = place.install(rc=1)
    assert said in message
    assert "here" in message or "abort" not in double
    assert "not a CPU build" in message or "torch" not in double
    assert_untouched(place, old)


@needs_uv
@root_only
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python for every user")
def test_the_proof_runs_as_the_service_user() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lets no other user in
        Path(folder).chmod(0o755)
        place = Place(Path(folder))
        place.user = "nobody"
        place.abi.write_text(
            "import json, os, tinya\n"  # it may read what was installed
            "checks = [{'name': 'who', 'state': 'ok', 'detail': str(os.getresuid())}]\n"
            "print(json.dumps({'ok': True, 'checks': checks}))\n"
        )
        argv = place.argv()
        argv[argv.index("--python") + 1] = "/usr/bin/python3"
        argv = ["sh", "-c", 'umask 077 && exec "$@"', "sh", *argv]
        done = subprocess.run(argv, env=place.environ(), capture_output=True, text=True, check=True)
    assert "(65534, 65534, 65534)" in done.stderr


@needs_uv
def test_what_lies_in_the_way(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    place.env.parent.mkdir()
    place.env.symlink_to(other)
    place.install()
    assert not place.env.is_symlink()
    assert (other / "mine").exists()
    current = place.root / "current"
    current.mkdir()
    assert "no symlink" in place.switch(rc=1)
    current.rmdir()
    (place.root / "current.new").symlink_to("/left/by/a/killed/run")
    place.switch()
    assert current.resolve() == place.env


def test_wrong_arguments_are_named(place: Place) -> None:
    place.user = "nobody-of-that-name"
    argv = place.argv()
    argv[argv.index("--pip-python") + 1] = "/nowhere/python"
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip configuration cannot be read" in done.stderr
    assert "/nowhere/python" in done.stderr


# What pip is told, for uv


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("global.index-url='https://a/simple'", {"index-url": "https://a/simple"}),
        ("install.index-url='b'\nglobal.index-url='a'", {"index-url": "b"}),
        (":env:.index-url='c'\ninstall.index-url='b'", {"index-url": "c"}),
        ("global.find-links='\\n/a\\n/b'", {"find-links": "\n/a\n/b"}),
        ("download.index-url='a'\nwheel.cert='b'", {}),
        ('global.x="it\'s=1"', {"x": "it's=1"}),
        ("WARNING: something\nglobal.timeout='3'", {"timeout": "3"}),
    ],
)
def test_pip_config_list_is_read(text: str, settings: dict[str, str]) -> None:
    assert engine_pip.parse_settings(text) == settings


def test_a_setting_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"global\.index-url"):
        engine_pip.parse_settings("global.index-url=https://a")


def uv_env(pip: dict[str, str], host: dict[str, str] | None = None) -> dict[str, str]:
    return engine_pip.uv_environment(pip, "/nowhere/wheels", None, "/cache", host or {})


@pytest.mark.parametrize(
    ("pip", "expected"),
    [
        ({"index-url": "https://a"}, {"UV_DEFAULT_INDEX": "https://a"}),
        ({"extra-index-url": "a\n b"}, {"UV_EXTRA_INDEX_URL": "a b"}),
        ({"cert": "/nowhere/ca.pem"}, {"SSL_CERT_FILE": "/nowhere/ca.pem"}),
        ({"cert": "/etc"}, {"SSL_CERT_DIR": "/etc"}),
        ({"client-cert": "/c"}, {"SSL_CLIENT_CERT": "/c"}),
        ({"trusted-host": "a\nb:8"}, {"UV_INSECURE_HOST": "a b:8"}),
        ({"default-timeout": "9"}, {"UV_HTTP_TIMEOUT": "9"}),
        ({"default-timeout": "9", "timeout": "8"}, {"UV_HTTP_TIMEOUT": "8"}),
        ({"retries": "2"}, {"UV_HTTP_RETRIES": "2"}),
        ({"proxy": "http://p:1"}, {"HTTPS_PROXY": "http://p:1", "https_proxy": "http://p:1"}),
        ({"find-links": "/etc /nowhere/x https://l file:///usr"},
         {"UV_FIND_LINKS": "/etc,https://l,/usr"}),
        ({"no-index": "1"}, {"UV_NO_CONFIG": "1"}),
    ],
)  # fmt: skip
def test_each_setting_of_pip_reaches_uv(pip: dict[str, str], expected: dict[str, str]) -> None:
    env = uv_env(pip)
    assert {key: env.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("value", "flags"), [("1", ["--no-index"]), ("true", ["--no-index"]), ("0", []), ("", [])]
)
def test_no_index_is_a_flag(value: str, flags: list[str]) -> None:
    assert engine_pip.uv_flags({"no-index": value}) == flags


def test_of_the_hosts_own_variables_only_the_places_count() -> None:
    host = {
        "UV_INDEX_STRATEGY": "first-index", "UV_NO_VERIFY_HASHES": "1", "UV_DEFAULT_INDEX": "https://d",
        "PYTHONPATH": "/evil", "VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c", "HTTPS_PROXY": "http://p",
        "PATH": "/bin",
    }  # fmt: skip
    env = uv_env({}, host)
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert env["UV_DEFAULT_INDEX"] == "https://d"
    assert (env["HTTPS_PROXY"], env["PATH"]) == ("http://p", "/bin")
    assert not {"UV_NO_VERIFY_HASHES", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"} & set(env)
    assert uv_env({"index-url": "https://pip"}, host)["UV_DEFAULT_INDEX"] == "https://pip"


def test_the_hosts_certificates_are_trusted_unless_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.crt"
    monkeypatch.setattr(engine_pip, "SYSTEM_CERTIFICATES", str(bundle))
    assert "UV_SYSTEM_CERTS" not in uv_env({})
    bundle.touch()
    assert uv_env({})["UV_SYSTEM_CERTS"] == "1"
    assert "UV_SYSTEM_CERTS" not in uv_env({"cert": "/c.pem"})
    assert "UV_SYSTEM_CERTS" not in uv_env({}, {"SSL_CERT_FILE": "/c.pem"})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("at https://ada:s3@h/simple!", "at https://***@h/simple!"),
        ("https://t0ken@h", "https://***@h"),
        ("https://ada:p@ss@h/x", "https://***@h/x"),
        ("(https://h/x?sig=abc) y", "(https://h/x?***) y"),
        ("mail ada@h and why? no", "mail ada@h and why? no"),
        ("https://h/a and https://b:c@h", "https://h/a and https://***@h"),
    ],
)
def test_credentials_are_masked(text: str, masked: str) -> None:
    assert engine_pip.mask(text) == masked


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("error: …: No space left on device (os error 28)", "The disk is full: 3 MB"),
        ("cause: Disk quota exceeded (os error 122)", "quota"),
        ("Hash mismatch for `x`", "not the one that was locked"),
        ("error: Failed to fetch: x\n cause: invalid peer certificate: UnknownIssuer", "authority"),
        ("error: Failed to fetch: https://x", "No network"),
        ("x No solution found when resolving", "None of the places"),
    ],
)
def test_each_kind_of_failure_has_its_hint(said: str, expected: str) -> None:
    assert expected in engine_pip.hint(said, "PLACES", "3 MB")
    assert engine_pip.hint("something else", "PLACES", "3 MB") == ""


DRIVER = """
mount -t tmpfs none /proc/driver && mkdir /proc/driver/nvidia
echo "$0" > /proc/driver/nvidia/version && exec "$@"
"""


@needs_uv
@root_only
def test_what_uv_holds_in_its_cache_counts_as_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment is filled only at the end, and by links from the cache."""
    cache, env = tmp_path / "cache", tmp_path / "env"
    for folder in (cache, env):
        folder.mkdir()
    (cache / "of-before").write_bytes(bytes(5 << 20))
    stop = threading.Event()
    watcher = threading.Thread(target=engine.watch, args=((str(cache), str(env)), stop, 0.05))
    watcher.start()
    try:
        time.sleep(0.1)
        (cache / ".tmp1").write_bytes(bytes(3 << 20))
        time.sleep(0.2)
        os.link(cache / ".tmp1", env / "module.so")
        time.sleep(0.2)
    finally:
        stop.set()
        watcher.join()
    told = [int(line.split()[1]) for line in capsys.readouterr().err.splitlines()]
    assert told[0] == 0
    assert told[-1] == 3, "without what was there before, and a link counts once"


def test_with_another_driver_it_is_proven_again_and_not_built(place: Place) -> None:
    place.more = ["--cuda", "13", "--gpus", "8.9"]

    def under(driver: str, *argv: str, rc: int = 0) -> str:
        words = ["unshare", "-m", "sh", "-ec", DRIVER, driver, *argv]
        done = subprocess.run(words, env=place.environ(), capture_output=True, text=True,
                              check=False, timeout=60)  # fmt: skip
        assert done.returncode == rc, done.stderr
        return done.stdout + done.stderr

    def proven(driver: str) -> bool:
        argv = (sys.executable, str(ENGINE), "status", "--env", str(place.env))
        state = json.loads(under(driver, *argv))
        assert state["complete"]
        return bool(state["proven"])

    assert "ABI check" in under("NVRM version: 580.65.06", *place.argv())
    built = (place.env / "pyvenv.cfg").stat().st_mtime_ns
    assert proven("NVRM version: 580.65.06")
    assert not proven("NVRM version: 580.95.05")
    place.abi.write_text("import sys\nsys.exit('the new driver does not run it')\n")
    assert "does not run it" in under("NVRM version: 580.95.05", *place.argv(), rc=1)
    assert proven("NVRM version: 580.65.06")  # as it was: nothing is removed
    place.abi.write_text(ABI_DOUBLE)
    assert "proven again" in under("NVRM version: 580.95.05", *place.argv())
    assert proven("NVRM version: 580.95.05")
    assert (place.env / "pyvenv.cfg").stat().st_mtime_ns == built
