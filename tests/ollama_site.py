"""A host on which somebody has installed Ollama, as its installer does: user, program, unit.

The program is the double; account, unit, drop-ins, journal and systemd are real.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.e2e_tools import Done, make_site
from tests.lab.nspawn import Host, Lab, until

REPO = Path(__file__).resolve().parents[1]
DOUBLE = REPO / "tests/doubles/ollama.py"
BASE, UNIT = "/var/lib/kvhost", "ollama.service"
MODEL = "qwen3:0.6b"
PLACE, FOLDER = f"/etc/systemd/system/{UNIT}", f"/etc/systemd/system/{UNIT}.d"
DROP_IN = f"{FOLDER}/kvhost.conf"
#: the lines that Ollama's installer writes (its page on Linux); one variable, as people add it
UNIT_TEXT = """\
[Unit]
Description=Ollama Service
After=network-online.target

[Service]
ExecStart=/usr/local/bin/ollama serve
User=ollama
Group=ollama
Restart=always
RestartSec=3
Environment="PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Environment="OLLAMA_KEEP_ALIVE=10m"

[Install]
WantedBy=default.target
"""


def install(host: Host, port: int = 11434, **mode: object) -> None:
    """As the installer leaves a host: the service runs on its own port, or on another."""
    home = "/usr/share/ollama"
    host.root("useradd", "-r", "-s", "/bin/false", "-U", "-m", "-d", home, "ollama")
    host.write("/usr/local/bin/ollama", DOUBLE.read_text())
    host.root("chmod", "755", "/usr/local/bin/ollama")
    host.root("mkdir", "-p", "/usr/local/lib/ollama")
    behave(host, **mode)
    more = f'Environment="OLLAMA_HOST=127.0.0.1:{port}"\n\n[Install]'
    host.write(PLACE, UNIT_TEXT if port == 11434 else UNIT_TEXT.replace("\n[Install]", more))
    host.root("systemctl", "daemon-reload")
    host.root("systemctl", "enable", "--now", "--quiet", UNIT)
    until(lambda: "0.34" in api(host, "version", port=port), 20, "Ollama answers")


def behave(host: Host, **mode: object) -> None:
    """What the double does from its next start on."""
    host.write("/usr/local/lib/ollama/double.json", json.dumps(mode))


def api(host: Host, what: str, body: dict[str, Any] | None = None, port: int = 11434) -> str:
    """The answer of Ollama's API, "" without one."""
    sent = f"json.dumps({body!r}).encode()" if body is not None else "None"
    code = (
        "import json,urllib.request as u;"
        f"print(u.urlopen('http://127.0.0.1:{port}/api/{what}',{sent},10).read().decode())"
    )
    return host.root("python3", "-c", code, ok=False) if port else ""


def show(host: Host, name: str) -> str:
    return host.root("systemctl", "show", "-p", name, "--value", UNIT).strip()


class Site:
    """A copy of the repository as the controller, and a host that it reaches over SSH."""

    def __init__(self, lab: Lab, folder: Path, host: Host) -> None:
        self.lab, self.folder, self.host = lab, folder, host
        self.copy = make_site(folder / "controller")
        self.inventory = lab.inventory(folder / "hosts.py")

    def pyinfra(self, *words: str, **data: str) -> Done:
        """`pyinfra hosts.py deploy.py`, from the copy, as an unprivileged user with sudo."""
        program = str(Path(sys.executable).with_name("pyinfra"))
        return self.run(program, str(self.inventory), *(words or ("deploy.py", "-y")), **data)

    def kvhost(self, command: str, *words: str, **data: str) -> Done:
        """A command of kvhost's over all hosts of the lab."""
        argv = (sys.executable, "-m", "kvhost.cli", command, "--inventory", str(self.inventory))
        return self.run(*argv, *words, **data)

    def run(self, *words: str, **data: str) -> Done:
        given = {"model_source": MODEL, **data, "runner": data.get("runner", "ollama")}
        extra = [w for key, value in given.items() for w in ("--data", f"{key}={value}")]
        argv = self.lab.argv(*words)
        done = subprocess.run(
            [*argv, *extra], cwd=self.copy.repo, text=True, timeout=300, check=False,
            env=self.copy.own_env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)

    def report(self) -> dict[str, Any]:
        """The newest report on the controller."""
        newest = max((self.copy.repo / "reports").rglob("*.json"))
        return dict(json.loads(newest.read_text()))


def packed(path: Path, library: bytes = b"no library") -> tuple[Path, str]:
    """An archive of the form of Ollama's for Linux, with the double in it; and its sha256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, mode in (
            ("bin/ollama", DOUBLE.read_bytes(), 0o755),
            ("lib/ollama/libggml-base.so", library, 0o644),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
