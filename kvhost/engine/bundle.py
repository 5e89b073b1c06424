"""Bundles: everything that an engine is installed from, for a host without a network.

    NAME-pyX.Y/
      manifest.json   lock, Python, machine; sha256 and size of every file
      lock.txt        the lock's own text            wheels/  its wheels
      tools.txt       the lock of uv and supervisord tools/   theirs
      packages/       Debian packages, where they were asked for

pip fetches, from where this controller's pip is told to look, one group of packages after the
other, against the hashes of the lock. What is fetched stays: a run that was killed is completed by
the next. The directory gets its name only when everything is in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvhost.engine.bundle_packages import PackagesError, fetch_packages
from kvhost.engine.lock_make import GLIBC
from kvhost.engine.locks import EngineLock
from kvhost.onhost import engine_pip
from kvhost.onhost.bundle_check import (
    FOLDERS,
    MANIFEST,
    SCHEMA,
    file_digest,
    find_faults,
    form_faults,
    listing,
    pins,
    read_manifest,
)
from kvhost.plan.types import Refusal, size

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: packages that pip is asked for at once; what a killed run had of a group is lost
GROUP = 8


class BundleError(Exception):
    """Why there is no bundle, for people."""


@dataclass(frozen=True)
class Bundle:
    """A whole bundle: where it lies, how many files and bytes."""

    path: Path
    files: int
    bytes: int


def bundle_name(lock: EngineLock) -> str:
    return f"{lock.name}-py{lock.python}"


def find_bundle(path: Path, lock: EngineLock) -> Path:
    """The bundle itself, or the one for this lock in a directory of bundles."""
    inside = path / bundle_name(lock)
    return inside if (inside / MANIFEST).exists() and not (path / MANIFEST).exists() else path


def bundle_refusals(where: str, lock: EngineLock, tools_text: str) -> Iterator[Refusal]:
    """What stands against installing this lock from a bundle on the controller. Names and sizes
    are looked at here; every byte is on the host, before anything is installed."""
    path = find_bundle(Path(where).expanduser(), lock)
    make = f"kvhost bundle {lock.name} --python {lock.python}"
    try:
        manifest = read_manifest(str(path))
        faults = form_faults(str(path), manifest)
        if re.search(r"[\s,]", str(path.resolve())):
            faults.append("its path has a space or a comma, which a list of places cannot hold")
    except (OSError, ValueError) as error:
        manifest, faults = {}, [str(error)]
    if faults:
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        yield Refusal(
            "engine",
            "bundle_unusable",
            f"the bundle {path} cannot be used",
            "a directory that kvhost bundle has made, as it was made",
            "; ".join(faults[:4]) + more,
            f"{make}, or leave engine_bundle out",
        )
        return
    wanted = {"lock.txt": lock.text, "tools.txt": tools_text}
    other = [
        name for name, text in wanted.items() if manifest["files"][name]["sha256"] != _sha(text)
    ]
    if other:
        yield Refusal(
            "engine",
            "bundle_of_another_lock",
            f"the bundle {path} was made for another engine than this host gets",
            f"a bundle of {lock.name} for Python {lock.python}, of the locks as they are now",
            f"one of {manifest['lock']} for Python {manifest['python']}; "
            f"{' and '.join(other)} differ from this host's",
            f"{make}, and engine_bundle = the directory that it names",
        )


def make_bundle(
    out: Path, lock: EngineLock, tools_text: str, packages: Sequence[str] = ()
) -> Bundle:
    """The bundle of a lock at ``out``, made or completed. ``packages``: of Debian, to be in it too.

    Raises BundleError; then what was fetched so far is kept in ``out``.partial.
    """
    if out.exists():
        return _already(out, lock, tools_text, bool(packages))
    draft = out.with_name(out.name + ".partial")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        with _alone(draft):
            return _make(draft, out, lock, tools_text, packages)
    except PackagesError as error:
        raise BundleError(str(error)) from error
    except OSError as error:
        raise BundleError(_os_error(error, draft)) from error


def _make(
    draft: Path, out: Path, lock: EngineLock, tools_text: str, packages: Sequence[str]
) -> Bundle:
    texts = {"wheels": lock.text, "tools": tools_text}
    for folder, text in texts.items():
        (draft / folder).mkdir(exist_ok=True)
        (draft / FOLDERS[folder]).write_text(text, encoding="utf-8")
    for name, content in lock.wheels.items():
        (draft / "wheels" / name).write_bytes(content)
    known = {folder: _known(draft / folder, pins(text)) for folder, text in texts.items()}
    _room(draft, lock)
    with _progress(draft, lock):
        for folder, text in texts.items():
            _fetch(draft, folder, pins(text), known[folder], lock)
    shutil.rmtree(_passing(draft), ignore_errors=True)
    of = {"packages": fetch_packages(draft, packages, lock.machine)} if packages else {}
    files = {name: _row(draft / name) for name in sorted(listing(str(draft))) if name != ".lock"}
    manifest: dict[str, Any] = {
        "schema": SCHEMA, "lock": lock.name, "python": lock.python, "machine": lock.machine,
        "files": files, **of,
    }  # fmt: skip
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    (draft / ".lock").unlink()
    faults, _ = find_faults(str(draft), lock.text, tools_text)
    if faults:
        raise BundleError("\n".join((f"{draft} is not whole:", *faults)))
    subprocess.run(["sync", "-f", str(draft)], check=True)  # whole through a loss of power
    draft.rename(out)
    return Bundle(out, len(files), sum(row["bytes"] for row in files.values()))


def _row(path: Path) -> dict[str, Any]:
    return {"sha256": file_digest(str(path)), "bytes": path.stat().st_size}


def _already(out: Path, lock: EngineLock, tools_text: str, packages: bool) -> Bundle:
    try:
        faults, manifest = find_faults(str(out), lock.text, tools_text)
        if packages and "packages" not in manifest:
            faults.append("packages/: it was made without Debian packages")
    except (OSError, ValueError) as error:
        faults, manifest = [str(error)], {}
    if faults:
        lines = (f"{out} is there, and is not the bundle of {bundle_name(lock)}:", *faults[:20])
        raise BundleError("\n".join((*lines, "Remove it, or give another place with --out.")))
    rows = manifest["files"].values()
    return Bundle(out, len(rows), sum(row["bytes"] for row in rows))


def _known(folder: Path, wanted: dict[str, frozenset[str]]) -> set[str]:
    """Requirements whose wheel is there already; a file that is none of them is removed."""
    owner = {digest: head for head, hashes in wanted.items() for digest in hashes}
    found = set()
    for path in folder.iterdir():
        head = owner.get(file_digest(str(path)))
        if head is None or head in found:
            path.unlink()
        else:
            found.add(head)
    return found


def _fetch(
    draft: Path, folder: str, wanted: dict[str, frozenset[str]], known: set[str], lock: EngineLock
) -> None:
    missing = [head for head in wanted if head not in known]
    torch = [head for head in missing if head.startswith("torch==") and lock.cuda is None]
    rest = [head for head in missing if head not in torch]
    groups = [rest[at : at + GROUP] for at in range(0, len(rest), GROUP)]
    for group in (*groups, *([torch] if torch else [])):
        passing = _passing(draft)
        shutil.rmtree(passing, ignore_errors=True)
        (passing / "tmp").mkdir(parents=True)
        lines = [
            f"{head} {' '.join(f'--hash=sha256:{one}' for one in wanted[head])}" for head in group
        ]
        (passing / "wanted.txt").write_text("\n".join(lines) + "\n")
        done = _pip(passing, lock, [])
        if done.returncode != 0 and group == torch and "No matching distribution" in done.stderr:
            # PyPI has torch for CUDA; its CPU builds are in an index of their own
            done = _pip(passing, lock, ["--extra-index-url", TORCH_INDEX])
        if done.returncode != 0:
            raise BundleError(_why(done.stderr, group, draft))
        for path in (passing / "got").iterdir():
            path.replace(draft / folder / path.name)


def _pip(passing: Path, lock: EngineLock, more: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", "got"),
            *(word for one in platforms(lock.machine) for word in ("--platform", one)),
            *("--implementation", "cp", "--python-version", lock.python),
            *("--abi", "cp" + lock.python.replace(".", ""), "--abi", "abi3", "--abi", "none"),
            *more, "--requirement", "wanted.txt",
        ],
        # a temporary directory that may hold gigabytes, and whose growth can be watched
        cwd=passing,
        env={**os.environ, "TMPDIR": str(passing.resolve() / "tmp"), "LC_ALL": "C.UTF-8"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def platforms(machine: str) -> list[str]:
    """Tags of wheels that run on the oldest glibc that kvhost supports, the best first
    (packaging.python.org/specifications/platform-compatibility-tags)."""
    newest = int(GLIBC.partition("_")[2])
    oldest = 5 if machine == "x86_64" else 17
    old = ("manylinux2014", *(("manylinux2010", "manylinux1") if machine == "x86_64" else ()))
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, oldest - 1, -1)]
    return [*tags, *(f"{name}_{machine}" for name in old), f"linux_{machine}"]


def _why(said: str, group: list[str], draft: Path) -> str:
    """One clear error of what pip said."""
    said = engine_pip.mask(said)
    if "DO NOT MATCH THE HASHES" in said:
        hit = [head for head in group if head in said]
        return (
            f"the file of {', '.join(hit or group)} is not the one that was locked: do not work "
            "around this; look at the index"
        )
    if "No space left on device" in said or "Errno 28" in said:
        return _full(draft)
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    reason = "\n".join(errors[-4:] or [said[-800:]])
    return (
        f"pip could not fetch {', '.join(group)}:\n{reason}\n"
        "It looks where pip config list says. What was fetched is kept; the next run goes on."
    )


def _os_error(error: OSError, draft: Path) -> str:
    return _full(draft) if error.errno == 28 else f"{error.filename or draft}: {error.strerror}"


def _full(draft: Path) -> str:
    free = size(shutil.disk_usage(draft).free)
    return f"the disk is full: {free} are free at {draft}; what was fetched is kept there"


def _room(draft: Path, lock: EngineLock) -> None:
    """Refused before the first byte where the disk is too small."""
    needed = lock.download_bytes - _tree_bytes(draft)
    free = shutil.disk_usage(draft).free
    if needed > free:
        raise BundleError(f"{size(needed)} are to be fetched, and {size(free)} are free at {draft}")


def _passing(draft: Path) -> Path:
    return draft / ".passing"


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(root, name).lstat().st_size
            except OSError:
                continue  # pip renames files while we look
    return total


@contextmanager
def _alone(draft: Path) -> Iterator[None]:
    with (draft / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"another run is at work in {draft}") from None
        yield


@contextmanager
def _progress(draft: Path, lock: EngineLock) -> Iterator[None]:
    """Bytes on disk against what the matrix says of the lock, which is rounded up."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with Progress(*columns) as progress:
        task = progress.add_task(bundle_name(lock), total=lock.download_bytes)

        def watch() -> None:
            while not stop.wait(0.5):
                progress.update(task, completed=min(_tree_bytes(draft), lock.download_bytes))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            progress.update(task, completed=lock.download_bytes)
        finally:
            stop.set()
            watcher.join()


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files_to_send(bundle: Path) -> list[tuple[Path, str, dict[str, Any]]]:
    """(file here, path in the bundle, {"sha256", "bytes"}) of a bundle, the manifest first.

    Raises OSError, ValueError.
    """
    manifest = bundle / MANIFEST
    row = {"sha256": file_digest(str(manifest)), "bytes": manifest.stat().st_size}
    files = read_manifest(str(bundle))["files"]
    return [
        (manifest, MANIFEST, row),
        *((bundle / path, path, files[path]) for path in sorted(files)),
    ]
