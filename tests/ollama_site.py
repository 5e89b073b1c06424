"""A host on which somebody has installed Ollama, as its installer does: user, program, unit.

The program is the double; account, unit, drop-ins, journal and systemd are real.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.lab.nspawn import Host, until

REPO = Path(__file__).resolve().parents[1]
DOUBLE = REPO / "tests/doubles/ollama.py"
BASE, UNIT = "/var/lib/kvhost", "ollama.service"
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


def install(host: Host, **mode: object) -> None:
    """As the installer leaves a host: the service runs on its own port."""
    home = "/usr/share/ollama"
    host.root("useradd", "-r", "-s", "/bin/false", "-U", "-m", "-d", home, "ollama")
    host.write("/usr/local/bin/ollama", DOUBLE.read_text())
    host.root("chmod", "755", "/usr/local/bin/ollama")
    host.root("mkdir", "-p", "/usr/local/lib/ollama")
    behave(host, **mode)
    host.write(PLACE, UNIT_TEXT)
    host.root("systemctl", "daemon-reload")
    host.root("systemctl", "enable", "--now", "--quiet", UNIT)
    until(lambda: "0.34" in api(host, "version"), 20, "Ollama answers")


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
