"""model_fetch.py with the engine's own huggingface_hub, against a double of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvhost.commands.model import model_command
from tests.doubles.hub import COMMIT, REPO, Hub, serve
from tests.e2e_tools import Done, make_site

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).resolve().parents[1] / "kvhost" / "onhost" / "model_fetch.py"
WEIGHTS = "model-00001-of-00002.safetensors"
BLOCK = 10 << 20  # huggingface_hub writes blocks of this size
TOKEN = "hf_" + "planted" * 4  # the form of a token, not one


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = random.Random(7)
    files = {
        "config.json": b'{"a": 1}',
        "tokenizer.json": made.randbytes(2000),
        WEIGHTS: made.randbytes(1_500_000),
        "model-00002-of-00002.safetensors": made.randbytes(500_000),
        "pytorch_model.bin": made.randbytes(3000),
        "README.md": b"words",
    }
    with serve(Hub(files)) as hub:
        yield hub


class Home:
    """Where a model goes, and runs of the script."""

    def __init__(self, root: Path, engine: Path, hub: Hub) -> None:
        self.root, self.engine, self.hub, self.out = root, engine, hub, root / "model"
        self.more: list[str] = []

    def argv(self) -> list[str]:
        words = ["--repo", REPO, "--revision", COMMIT, "--out", str(self.out)]
        return [str(self.engine / "bin" / "python"), "-B", str(SCRIPT), *words, *self.more]

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.root), "LC_ALL": "C.UTF-8",
            "HF_HOME": str(self.root / "hf"), "HF_ENDPOINT": self.hub.endpoint,
        }  # fmt: skip

    def fetch(self, rc: int = 0) -> str:
        self.out.mkdir(exist_ok=True)
        done = subprocess.run(
            self.argv(), env=self.env, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def there(self) -> dict[str, bytes]:
        paths = (path for path in self.out.rglob("*") if path.is_file())
        return {path.relative_to(self.out).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def home(tmp_path: Path, engine: Path, hub: Hub) -> Home:
    return Home(tmp_path, engine, hub)


def test_safetensors_and_texts_are_taken_whole_and_nothing_else(home: Home, hub: Hub) -> None:
    said = home.fetch()
    found = home.there()
    marker = json.loads(found.pop(".kvhost-complete.json"))
    left_out = ("pytorch_model.bin", "README.md")
    wanted = {name: content for name, content in hub.files.items() if name not in left_out}
    assert found == wanted
    assert (marker["repo"], marker["revision"]) == (REPO, COMMIT)
    assert marker["files"][WEIGHTS] == {
        "bytes": 1_500_000, "sha256": hashlib.sha256(hub.files[WEIGHTS]).hexdigest(),
    }  # fmt: skip
    assert not any(hub.gets(name) for name in left_out)
    assert "each with the hub's digest" in said
    hub.asked.clear()
    home.fetch()  # what is here is read, not fetched
    assert not hub.gets(WEIGHTS)


def large(hub: Hub) -> None:
    hub.files[WEIGHTS] = random.Random(8).randbytes(24_000_000)


def test_a_connection_that_is_cut_goes_on_in_the_same_run(home: Home, hub: Hub) -> None:
    large(hub)
    hub.cuts = {WEIGHTS: 15_000_000}
    home.fetch()
    assert home.there()[WEIGHTS] == hub.files[WEIGHTS]
    assert [one.range for one in hub.gets(WEIGHTS)] == [None, f"bytes={BLOCK}-"]


def test_a_killed_run_is_gone_on_from_where_it_was(home: Home, hub: Hub) -> None:
    large(hub)
    hub.slow = 0.01
    home.out.mkdir()
    run = subprocess.Popen(home.argv(), env=home.env, stderr=subprocess.DEVNULL)
    part = home.out / ".parts" / hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    limit = time.monotonic() + 60
    while not part.exists() or part.stat().st_size < BLOCK:
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    began = part.stat().st_size
    assert began < len(hub.files[WEIGHTS])
    assert not (home.out / ".kvhost-complete.json").exists()
    hub.slow = 0
    hub.asked.clear()
    said = home.fetch()
    assert home.there()[WEIGHTS] == hub.files[WEIGHTS]
    assert [one.range for one in hub.gets(WEIGHTS) if one.range] == [f"bytes={began}-"]
    assert f"{WEIGHTS}: goes on at" in said


def test_a_damaged_part_is_fetched_from_the_beginning(home: Home, hub: Hub) -> None:
    part = home.out / ".parts" / hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(300_000))  # as a loss of power leaves it
    assert "the part of an earlier run was damaged" in home.fetch()
    assert home.there()[WEIGHTS] == hub.files[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_of_another_digest_is_refused_and_named(home: Home, hub: Hub, name: str) -> None:
    wrong = bytearray(hub.files[name])
    wrong[-2] ^= 1
    hub.wrong[name] = bytes(wrong)
    said = home.fetch(rc=1)
    assert f"{name} has not the digest that the hub gives for it" in said
    assert not (home.out / ".kvhost-complete.json").exists()
    assert name not in home.there()
    hub.wrong.clear()
    home.fetch()
    assert home.there()[name] == hub.files[name]


def test_the_token_goes_to_the_hub_alone_and_is_shown_nowhere(home: Home, hub: Hub) -> None:
    hub.token = TOKEN
    said = home.fetch(rc=1)
    assert "could not fetch" in said
    file = home.root / "token"
    file.write_text(TOKEN + "\n")
    home.more = ["--token-file", str(file)]
    said = home.fetch()
    assert TOKEN not in said
    assert {one.authorization for one in hub.asked if one.server == "store"} == {None}
    assert f"Bearer {TOKEN}" in {one.authorization for one in hub.asked}
    assert not any(TOKEN.encode() in content for content in home.there().values())


def test_offline_what_is_complete_stays_and_what_is_not_is_one_clear_error(
    home: Home, hub: Hub
) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    said = home.fetch(rc=1)
    assert f"could not fetch {REPO}@{COMMIT}" in said
    assert "the next run goes on" in said


def test_a_model_without_safetensors_and_names_that_lead_out_are_refused(
    home: Home, hub: Hub
) -> None:
    weights = {name: hub.files.pop(name) for name in list(hub.files) if "safetensors" in name}
    assert "no safetensors weights" in home.fetch(rc=1)
    hub.files |= {"../../evil.safetensors": weights[WEIGHTS]}
    assert "not one that kvhost writes" in home.fetch(rc=1)
    assert not (home.root / "evil.safetensors").exists()


def test_too_small_a_disk_is_said_before_the_first_byte(home: Home, hub: Hub) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    home.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(home.out)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no right to mount")
    try:
        assert "2.0 MB are to be fetched, 1.0 MB are free" in home.fetch(rc=1)
        assert not hub.gets(WEIGHTS)
    finally:
        subprocess.run(["umount", str(home.out)], check=True)


def model(hub: Hub, *words: str, **env: str) -> Result:
    runner = CliRunner(env={"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": None, **env})
    return runner.invoke(model_command, [REPO, *words])


def test_the_command_says_which_commit_a_branch_is(hub: Hub) -> None:
    done = model(hub)
    assert done.exit_code == 0, done.output
    assert f'model_revision = "{COMMIT}"' in done.output
    assert "2 files of weights, 1.9 MiB" in done.output
    hub.token = TOKEN
    assert "private or gated" in model(hub).output
    assert model(hub, HF_TOKEN=TOKEN).exit_code == 0
    gone = model(hub, "--revision", "nowhere/else", HF_TOKEN=TOKEN)
    assert gone.exit_code == 1
    assert "no revision 'nowhere/else'" in gone.output
    hub.endpoint = "http://127.0.0.1:9"
    done = model(hub, HF_TOKEN=TOKEN)
    assert "gave no answer" in done.output
    assert TOKEN not in done.output


STAGE = """
import os
from types import SimpleNamespace
from deploys.model import deploy
from kvhost.secrets import Secret
from kvhost.settings import Settings
base, token = os.environ["STAGE_BASE"], os.environ.get("STAGE_TOKEN")
settings = Settings(
    base_dir=base, model_source="org/tiny", model_revision=os.environ["STAGE_COMMIT"],
    hf_endpoint=os.environ["STAGE_HUB"],
)
deploy(SimpleNamespace(
    settings=settings, paths=settings.paths, user="root", env_dir=os.environ["STAGE_ENGINE"],
    script=lambda name: f"kvhost/onhost/{name}.py", hf_token=Secret(token) if token else None,
))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the stage runs as root")
def test_the_stage_fetches_once_with_the_token_as_a_credential_and_is_offline_then(
    engine: Path, hub: Hub
) -> None:
    base = Path(tempfile.mkdtemp(prefix="kvhost-stage-", dir="/var/lib"))
    try:
        (base / "secrets").mkdir()
        (base / "home").mkdir()
        copy = make_site(base / "site")
        repo = copy.repo
        (repo / "stage.py").write_text(STAGE)
        hub.token = TOKEN
        env = {
            **copy.own_env, "STAGE_BASE": str(base), "STAGE_TOKEN": TOKEN, "STAGE_COMMIT": COMMIT,
            "STAGE_HUB": hub.endpoint, "STAGE_ENGINE": str(engine),
        }  # fmt: skip

        def stage() -> Done:
            argv = [
                str(Path(sys.executable).with_name("pyinfra")),
                "@local",
                "stage.py",
                "-y",
                "-v",
            ]
            done = subprocess.run(
                argv, cwd=repo, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-3000:]
            return Done(done.returncode, done.stdout)

        first = stage()
        here = base / "models" / f"org--tiny--{COMMIT[:12]}"
        assert (here / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
        assert TOKEN not in first.text
        assert (base / "secrets" / "hf-token").stat().st_mode & 0o777 == 0o600
        env["STAGE_HUB"] = "http://127.0.0.1:9"  # the hub is away
        assert stage().changed() == []
    finally:
        shutil.rmtree(base)
