"""A namespace of llama-server with a double of the server and a keeper of its slots, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhost.onhost import slots_files
from kvhost.onhost.slots import Keeper, Server
from kvhost.onhost.slots_files import Store
from tests.doubles.llama_server import LlamaDouble

ONHOST = Path(__file__).resolve().parents[1] / "kvhost" / "onhost"
ENGINE = {
    "model_digest": "m" * 64,
    "build": "b11434-double",
    "cache_type_k": "f16",
    "cache_type_v": "f16",
}


class Site:
    """A namespace, its server and a keeper."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "tier" / "ns-00"
        self.folder.mkdir(parents=True)
        self.engine(ENGINE)
        self.server = LlamaDouble(self.folder)
        self.record = root / "runner.json"
        self.starts = 0
        self.start()

    def engine(self, fields: dict[str, str]) -> None:
        text = json.dumps({"schema": 1, "chunk_bytes": None, "engine_config": fields})
        (self.folder / slots_files.NAMESPACE).write_text(text)

    def start(self) -> None:
        """The server starts anew."""
        self.starts += 1
        self.server.forget()
        told = {"pid": 100 + self.starts, "start_ticks": 7, "boot_id": "b"}
        self.record.write_text(json.dumps(told))

    @property
    def keeper(self) -> Keeper:
        return Keeper(Store(str(self.folder)), Server(self.server.url, str(self.record), None))

    def save(self) -> list[str]:
        return self.keeper.save_changed("test", 30, busy_too=True)

    def note(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / f".{name}.json").read_text())
        return loaded

    def file(self, name: str) -> Path:
        return self.folder / str(self.note(name)["file"])

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.suffix in (".kv", ".tmp"))


def made(root: Path) -> Iterator[Site]:
    """For a fixture."""
    site = Site(root)
    yield site
    site.server.close()


def where(site: Site) -> tuple[str, ...]:
    """What the services tell slots.py."""
    return ("--dir", str(site.folder), "--api", site.server.url, "--record", str(site.record))


def program(site: Site, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ONHOST / "slots.py", *where(site), *words],
        capture_output=True, text=True, check=False, **more,
    )  # fmt: skip
