"""looks.py answers as the commands would; a run asks once, until it changes something."""

from __future__ import annotations

import gzip
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhost.onhost import looks, runlock

pytestmark = pytest.mark.fleet
SCRIPT, REPO = Path(looks.__file__), Path(__file__).resolve().parents[1]


def answer(folder: Path, asks: list[list[str]], take: list[str] | None = None) -> Any:
    request = {"asks": asks, "lock": str(folder / "state/run.lock"), "take": take}
    (folder / "request").write_bytes(gzip.compress(json.dumps(request).encode()))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "request")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_answers_are_those_of_the_commands_in_their_order(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "sibling.py").write_text("WORD = 'from the sibling'\n")
    script.write_text(
        "import sys\nimport sibling\nprint(sibling.WORD, sys.argv[1:])\n"
        "print('told', file=sys.stderr)\n"
        "if sys.argv[1] == 'exit':\n    sys.exit(3)\n"
        "if sys.argv[1] == 'text':\n    sys.exit('why')\n"
        "if sys.argv[1] == 'raise':\n    raise ValueError('broken')\n"
    )
    commands = [
        ["python3", str(script), "well"],
        ["python3", str(script), "exit"],
        ["python3", str(script), "text"],
        ["python3", str(script), "raise"],
        ["python3", str(tmp_path / "absent.py")],
        ["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"],
        ["sh", "-c", "sleep 0.3; echo late; exit 5"],
        ["sh", "-c", "cat; kill -9 $$"],
        ["no-such-program"],
    ]
    told = answer(tmp_path, [["argv", *words] for words in commands])["answers"]
    for words, got in zip(commands[:8], told, strict=False):
        real = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert got["exit"] == real.returncode, words
        if "Traceback" in real.stdout:  # a fork's has its own first lines
            assert got["out"].splitlines()[-1] == real.stdout.splitlines()[-1]
        elif "script.py" in words[1]:
            assert sorted(got["out"].splitlines()) == sorted(real.stdout.splitlines())
        elif words[0] == "sh":
            assert got["out"] == real.stdout
    assert told[8]["exit"] == 127


def test_a_look_as_another_user_has_its_rights_and_nothing_of_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for above in tmp_path.parents[:2]:
        above.chmod(0o755)
    script = tmp_path / "who.py"
    script.write_text(
        "import json, os\n"
        "print(json.dumps([os.getresuid(), os.getresgid(), os.getgroups(), dict(os.environ)]))\n"
    )
    entry = pwd.getpwnam("nobody")
    asks = [["user", "nobody", "python3", str(script)], ["user", "nobody", "id", "-u"]]
    asks += [["user", "nobody", "cat", "/etc/shadow"], ["user", "no-such-user", "id"]]
    asks += [["argv", "id", "-u"]]
    forked, by_program, closed, unknown, ours = answer(tmp_path, asks)["answers"]
    ids, groups, _, env = json.loads(forked["out"])
    assert (ids, groups, env) == ([entry.pw_uid] * 3, [entry.pw_gid] * 3, {})
    assert by_program == {"exit": 0, "out": f"{entry.pw_uid}\n"}
    assert closed["exit"] == 1
    assert (unknown["exit"], "no-such-user" in unknown["out"]) == (127, True)
    assert ours["out"] == f"{os.getuid()}\n"


def test_what_was_sent_along_can_run_before_all_else(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("looks.py", "forked.py"):
        shutil.copy(SCRIPT.with_name(name), tmp_path / name)
    (tmp_path / "slow.py").write_text(
        f"import time\ntime.sleep(0.5)\nopen({str(mark)!r}, 'w').close()\nprint('slow')\n"
    )
    asks = [["argv", "ls", str(mark)], ["sent", "slow.py"]]
    for apart, code in ((True, 0), (False, 2)):
        mark.unlink(missing_ok=True)
        request = {"asks": asks, "lock": None, "take": None, "apart": apart}
        (tmp_path / "request").write_bytes(gzip.compress(json.dumps(request).encode()))
        argv = [sys.executable, str(tmp_path / "looks.py"), str(tmp_path / "request")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        listed, slow = json.loads(done.stdout)["answers"]
        assert (listed["exit"], slow) == (code, {"exit": 0, "out": "slow\n"})


def test_files_and_texts_say_what_lies_there(tmp_path: Path) -> None:
    plain, link, gone = tmp_path / "plain", tmp_path / "link", tmp_path / "gone"
    plain.write_text("text")
    plain.chmod(0o640)
    link.symlink_to(plain)
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    asks = [["file", str(path)] for path in (plain, link, gone, tmp_path)]
    asks += [["text", str(path)] for path in (plain, gone, tmp_path, tmp_path / "odd")]
    file, points, none, folder, *texts = answer(tmp_path, asks)["answers"]
    assert (file["kind"], file["mode"], file["sha256"][:8]) == ("file", "640", "982d9e3e")
    assert (points["kind"], points["target"]) == ("link", str(plain))
    assert (none, folder["kind"]) == (None, "directory")
    assert texts[0] == {"status": "ok", "text": "text"}
    assert [text["status"] for text in texts[1:]] == ["absent", "unreadable", "unreadable"]


def test_with_the_lock_of_another_nothing_is_looked_at(tmp_path: Path) -> None:
    words = ["--file", str(tmp_path / "state/run.lock"), "--owner"]
    mark = ["argv", "touch", str(tmp_path / "looked")]
    first = answer(tmp_path, [], [*words, '{"run_id": "a"}'])
    assert json.loads(first["lock"]["held"])["run_id"] == "a"
    other = answer(tmp_path, [mark], [*words, '{"run_id": "b"}'])
    assert json.loads(other["refused"])["run_id"] == "a"
    assert not (tmp_path / "looked").exists()


def test_a_lock_is_not_taken_when_another_run_was_here_since(tmp_path: Path) -> None:
    lock = ["--file", str(tmp_path / "run.lock")]

    def rc(verb: str, run: str, *more: str) -> int:
        argv = [sys.executable, runlock.__file__, verb, *lock, "--owner", f'{{"run_id": "{run}"}}']
        return subprocess.run([*argv, *more], check=False, capture_output=True).returncode

    assert rc("take", "a", "--last", "") == 0
    assert rc("take", "a", "--last", "other") == 0  # it is ours already
    assert rc("drop", "a") == 0
    assert rc("take", "b", "--last", "") == 1
    assert rc("take", "b", "--last", "a") == 0


DEPLOY = """
import json
from pyinfra.api import StringCommand, operation
from deploys.common.looks import Looks, ask_file, expect
from deploys.common.operations import converges

PATHS = {paths!r}

@operation()
def begin():
    known = Looks(
        lock_path={lock!r},
        asks=tuple(("file", path) for path in PATHS),
        take=("--file", {lock!r}, "--owner", json.dumps({{"run_id": "mine"}}), "--last", "before"),
    )
    expect(known)
    known.gather(known.asks)
    {between}
    yield from ()

@operation()
@converges
def there(path):
    if ask_file(path) is None:
        yield StringCommand(f"touch {{path}}")

begin(name="begin")
for path in PATHS:
    there(name=path, path=path)
"""


def run(folder: Path, between: str = "") -> tuple[int, int]:
    """Exit code and number of commands of a run that wants three files."""
    (folder / "state").mkdir(exist_ok=True)
    guard = folder / "state/run.lock.guard"
    guard.write_text("before")
    (folder / "state/run.lock").unlink(missing_ok=True)
    paths, lock = [str(folder / name) for name in "abc"], str(folder / "state/run.lock")
    text = DEPLOY.format(paths=paths, lock=lock, between=between.format(guard=str(guard)))
    (folder / "run.py").write_text(text)
    done = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "@local", str(folder / "run.py"), "-y",
         "--debug"],
        cwd=REPO, capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).count("Running command on")


def test_one_trip_without_a_change_and_the_truth_after_one(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    assert run(tmp_path) == (0, 1)
    assert (tmp_path / "state/run.lock.guard").read_text() == "before"  # no lock was taken
    (tmp_path / "b").unlink()
    # the look; the lock, with a look at b and c; touch; what came after it is looked at anew
    assert run(tmp_path) == (0, 4)
    assert (tmp_path / "b").exists()
    assert (tmp_path / "state/run.lock.guard").read_text() == "mine"
    # what an operation does is seen by those after it: c is gone when b is made
    (tmp_path / "b").unlink()
    (tmp_path / "c").unlink()
    assert run(tmp_path) == (0, 5)


def test_a_run_of_another_in_between_stops_the_first_change(tmp_path: Path) -> None:
    assert run(tmp_path, "open({guard!r}, 'w').write('another')") == (1, 2)
    assert not (tmp_path / "a").exists()


def test_what_makes_a_host_looks_at_all_of_it_at_once() -> None:
    """Without the list each of a hundred scripts is asked for by a command of its own."""
    deploys = [path for path in REPO.glob("*.py") if "host_stage.deploy(" in path.read_text()]
    assert {path.name for path in deploys} >= {"deploy.py", "storage.py", "release.py", "grow.py"}
    assert [path.name for path in deploys if "host_stage.asks(run)" not in path.read_text()] == []
