"""A configuration that the installed supervisord does not take, or would pass over, is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from kvhost.services.describe import services
from kvhost.settings import Settings

REPO = Path(__file__).parent.parent
SCRIPT = REPO / "kvhost" / "onhost" / "supervisor_check.py"

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("supervisord").exists(),
    reason="the package supervisor is not installed",
)


def rendered(folder: Path) -> str:
    """The template as a host gets it; its directories are there."""
    for name in ("run", "log", "home", "etc"):
        (folder / name).mkdir(exist_ok=True)
    settings = Settings()
    loader = jinja2.FileSystemLoader(REPO / "templates")
    template = jinja2.Environment(loader=loader).get_template("supervisord.conf.j2")
    described = services(settings, settings.paths, "/tier/ns-0", with_key=True)
    text = template.render(paths=settings.paths, services=described)
    return text.replace(settings.paths.base_dir, str(folder))


def check(folder: Path, text: str) -> tuple[int, str]:
    path = folder / "supervisord.conf"
    path.write_text(text)
    argv = [sys.executable, str(SCRIPT), str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_the_template_is_taken(tmp_path: Path) -> None:
    assert check(tmp_path, rendered(tmp_path)) == (0, "")


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("startsecs=2", "startsecz=2", "startsecz is not known to the installed version"),
        ("umask=", "umsk=", "[supervisord] umsk is not known"),
        ("startsecs=2", "startsecs=two", "invalid literal for int"),
        ("stopsignal=TERM", "stopsignal=TERMM", "not a valid signal"),
        ("[supervisord]", "[supervisord", "supervisord.conf"),
        ("/log\n", "/nowhere\n", "nowhere"),
    ],
)
def test_a_broken_one_is_refused_with_the_place(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = rendered(tmp_path)
    assert old in text
    code, told = check(tmp_path, text.replace(old, new, 1))
    assert code == 1
    assert said in told


def test_all_unknown_keys_are_told_together(tmp_path: Path) -> None:
    text = rendered(tmp_path).replace("startsecs=", "startsecz=").replace("umask=", "umsk=")
    assert check(tmp_path, text)[1].count("not known") == 4  # of three services and of its own
