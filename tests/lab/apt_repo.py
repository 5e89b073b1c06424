"""A small apt repository, signed with a key made here, served to the hosts of the lab by HTTP."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from tests.lab.nspawn import NETWORK, Lab, until
from tests.lab.nspawn_image import sh


@dataclass(frozen=True)
class Deb:
    """A package; `files`: path -> content, programs below bin/ and sbin/ are 0755."""

    name: str
    version: str
    depends: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    postinst: str = ""
    conflicts: str = ""

    def build(self, folder: Path) -> Path:
        tree = folder / f".{self.name}-{self.version}"
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        rows = {"Package": self.name, "Version": self.version, "Architecture": "amd64",
                "Maintainer": "kvhost lab <lab@example.org>", "Depends": self.depends,
                "Conflicts": self.conflicts, "Description": "a double"}  # fmt: skip
        (control / "control").write_text("".join(f"{k}: {v}\n" for k, v in rows.items() if v))
        for path, content in self.files.items():
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            target.chmod(0o755 if target.parent.name in ("bin", "sbin") else 0o644)
        if self.postinst:
            script = control / "postinst"
            script.write_text("#!/bin/sh\nset -e\n" + self.postinst)
            script.chmod(0o755)
        made = folder / f"{self.name}_{self.version}_amd64.deb"
        sh("dpkg-deb", "--build", "--root-owner-group", "-Znone", str(tree), str(made))
        shutil.rmtree(tree)
        return made


class Repo:
    """A flat repository in a folder of this machine, with a key of its own."""

    def __init__(self, folder: Path, debs: tuple[Deb, ...]) -> None:
        self.folder = folder / "files"
        self.home = folder / "gnupg"
        self.folder.mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        try:
            self.gpg("--passphrase", "", "--quick-gen-key", "lab", "ed25519", "sign", "never")
            self.key = self.gpg("--armor", "--export")
            self.rows: list[str] = []
            self.add(*debs)
        finally:
            sh("gpgconf", "--homedir", str(self.home), "--kill", "all")

    def gpg(self, *words: str) -> str:
        return sh("gpg", "--batch", "--quiet", "--homedir", str(self.home), *words)

    def add(self, *debs: Deb) -> None:
        """Packages beside those that are there; the index is signed anew."""
        for deb in debs:
            file = deb.build(self.folder)
            content = file.read_bytes()
            self.rows.append(
                sh("dpkg-deb", "--field", str(file))
                + f"Filename: ./{file.name}\nSize: {len(content)}\n"
                + f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
            )
        index = "\n".join(self.rows).encode()
        (self.folder / "Packages").write_bytes(index)
        (self.folder / "Release").write_text(
            f"Origin: lab\nDate: {formatdate(usegmt=True)}\nArchitectures: amd64\nSHA256:\n"
            f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
        )
        signed = self.folder / "InRelease"
        signed.unlink(missing_ok=True)
        self.gpg("--clearsign", "--output", str(signed), str(self.folder / "Release"))
        sh("gpgconf", "--homedir", str(self.home), "--kill", "all")


@contextmanager
def served(lab: Lab, folder: Path, port: int = 8080) -> Iterator[str]:
    """The address of ``folder`` for the hosts of the lab."""
    words = ("-m", "http.server", str(port), "--bind", f"{NETWORK}.1", "--directory", str(folder))
    server = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *lab.argv(sys.executable, *words)],  # never outlives us
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://{NETWORK}.1:{port}/"
    try:
        until(lambda: lab.run("curl", "-s", address).returncode == 0, 20, "the repository answers")
        yield address
    finally:
        server.kill()
        server.wait()
