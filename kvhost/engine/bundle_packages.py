"""The Debian packages of a bundle: fetched by this machine's apt, and laid out as a repository.

With all that they depend on, down to the C library: what a host has already its own apt leaves
alone. apt checks the signatures here; on the host each file has the sha256 of `packages/Packages`,
and that the one of the manifest.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvhost.onhost.bundle_check import PACKAGES, file_digest

#: where apt puts what it fetches, in the draft of a bundle; kept by a run that was killed
PASSING = ".apt"


class PackagesError(Exception):
    """Why there are no packages, for people."""


def this_release() -> str:
    """ "debian 12", as os-release(5) names it. Raises OSError."""
    release = platform.freedesktop_os_release()
    return f"{release.get('ID', '?')} {release.get('VERSION_ID', '?')}"


def fetch_packages(draft: Path, names: Sequence[str], machine: str) -> str:
    """``draft``/packages with these packages and what they depend on; the release they are of.

    Raises PackagesError, OSError.
    """
    if platform.machine() != machine:
        raise PackagesError(
            f"this machine is {platform.machine()} and its apt has no packages for {machine}: make "
            "the bundle on a machine like the hosts, or leave --packages out"
        )
    archives, state = draft / PASSING, draft / f"{PASSING}-status"
    folder = draft / PACKAGES
    if folder.exists():
        return this_release()  # it came to its name as a whole
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    state.write_text("")  # as on a machine that has nothing: all that they depend on
    done = subprocess.run(
        [
            *("apt-get", "-qq", "-y", "-o", f"Dir::State::status={state.resolve()}"),
            *("-o", f"Dir::Cache::archives={archives.resolve()}", "-o", "Debug::NoLocking=1"),
            *("-o", "APT::Sandbox::User=root", "-o", "APT::Install-Recommends=0"),
            *("--download-only", "install", *names),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    state.unlink()
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-4:])
        raise PackagesError(f"apt could not fetch {', '.join(names)} (apt-get update?):\n{said}")
    rows = []
    for path in sorted(archives.glob("*.deb")):
        name = re.sub(r"[^A-Za-z0-9._+-]", "-", path.name)  # 1%3a2.66 and ~deb12u1
        control = subprocess.run(
            ["dpkg-deb", "--field", str(path)], check=True, capture_output=True, text=True
        ).stdout
        rows.append(
            f"{control.rstrip()}\nFilename: {name}\nSize: {path.stat().st_size}\n"
            f"SHA256: {file_digest(str(path))}\n"
        )
        path.rename(archives / name)
    (archives / "Packages").write_text("\n".join(rows), encoding="utf-8")
    (archives / "lock").unlink(missing_ok=True)
    (archives / "partial").rmdir()
    archives.rename(folder)
    return this_release()


def install_command(folder: str, digest: str | None, names: Sequence[str]) -> str:
    """For the shell, as root: the packages from that directory and from nowhere else.

    ``digest``: sha256 of its Packages; None where the directory was not made by this controller.
    """
    proof = f"echo '{digest}  {folder}/Packages' | sha256sum --check --quiet && " if digest else ""
    options = (
        '-o Dir::Etc::sourcelist="$d/list" -o Dir::Etc::sourceparts=- '
        '-o Dir::State::lists="$d/lists" -o APT::Sandbox::User=root -o Acquire::Languages=none'
    )
    return (
        f"{proof}d=$(mktemp -d) && mkdir -p $d/lists/partial && "
        f"echo 'deb [trusted=yes] file:{folder} ./' > $d/list && "
        f"apt-get -qq {options} update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y {options} "
        f'--no-install-recommends install {" ".join(names)}; r=$?; rm -rf "$d"; [ $r = 0 ]'
    )
