"""Whether an engine environment is whole: its marker is there, and the tree is as it was then.

Scripts that lie beside this import it; engine.py writes the marker once the environment is proven.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import Any

MARKER = ".kvhost-complete.json"


def is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def tree_manifest(env: str) -> dict[str, Any]:
    """Digest over path, size, mode, owner and mtime of all in it, so that a later edit is seen.

    Bytecode is left out: root runs the environment's Python by hand, and it appears.
    Raises OSError.
    """

    digest, files, size = hashlib.sha256(), 0, 0
    modes: dict[int, str] = {}  # few differ, and an environment has 40,000 files

    def look(folder: str, below: str) -> None:
        """One directory and all in it, in an order that depends on names alone."""
        nonlocal files, size
        folders: list[str] = []
        links: list[tuple[str, os.stat_result, Any]] = []
        names: list[tuple[str, os.stat_result, Any]] = []
        # by the open directory: the kernel need not walk to it again for each file
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    is_link = entry.is_symlink()
                    if not is_directory(entry):
                        kind = names
                    elif entry.name == "__pycache__":
                        continue
                    elif is_link:
                        kind = links
                    else:
                        folders.append(entry.name)
                        continue
                    target = os.readlink(entry.name, dir_fd=here) if is_link else None
                    kind.append((entry.name, entry.stat(follow_symlinks=False), target))
            st = os.fstat(here)
        finally:
            os.close(here)
        for some in (links, names):
            some.sort(key=lambda one: one[0])
        lines = [repr((below or ".", oct(st.st_mode), st.st_uid))]
        inside = below + "/" if below else ""
        for name, st, target in (*links, *names):
            if name == MARKER and not below:
                continue
            mode = modes.get(st.st_mode) or modes.setdefault(st.st_mode, oct(st.st_mode))
            # as repr() of these six in a tuple
            lines.append(
                f"({inside + name!r}, '{mode}', {st.st_uid}, {st.st_size}, {st.st_mtime_ns}, "
                f"{target!r})"
            )
            files += 1
            size += st.st_size
        digest.update("".join(lines).encode())
        for name in sorted(folders):
            look(os.path.join(folder, name), inside + name)

    look(env, "")
    return {"manifest": digest.hexdigest(), "files": files, "bytes": size}


def read_marker(env: str) -> dict[str, Any] | None:
    """None without one. Raises OSError, ValueError."""
    try:
        with open(os.path.join(env, MARKER), encoding="utf-8") as handle:
            marker = json.load(handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(marker, dict):
        raise ValueError("not a JSON object")
    return marker


def is_complete(env: str) -> dict[str, Any]:
    """{"complete": bool, "why": str|None}: the marker is there and the tree is as it was."""
    try:
        marker = read_marker(env)
        if marker is None:
            return {"complete": False, "why": "not built"}
        if os.path.islink(env):
            return {"complete": False, "why": "a link, not a directory"}
        now = tree_manifest(env)
    except (OSError, ValueError) as error:
        return {"complete": False, "why": f"unreadable: {error}"}
    if now["manifest"] != marker.get("manifest"):
        then = marker.get("files")
        why = f"changed since it was built ({then} files then, {now['files']} now)"
        return {"complete": False, "why": why}
    if os.path.lexists(damaged(env)):
        return {"complete": False, "why": f"built, but {damaged(env)} is not removed yet"}
    # one for a GPU is proven with one driver
    proven = not marker.get("cuda") or marker.get("driver") == gpu_driver()
    told = {"complete": True, "why": None, "lock": marker.get("lock"), "bytes": now["bytes"]}
    return {**told, "proven": proven}


def gpu_driver() -> str | None:
    """What the loaded driver of NVIDIA's says of itself."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as handle:
            return handle.readline().strip()
    except OSError:
        return None


def damaged(env: str) -> str:
    """Where a changed environment waits until the new one is proven."""
    return env + ".damaged"


def has_marker(env: str) -> bool:
    return not os.path.islink(env) and os.path.lexists(os.path.join(env, MARKER))


def write_marker(env: str, marker: dict[str, Any]) -> None:
    # the marker must not outlive, through a loss of power, what it vouches for
    subprocess.run(["sync", "-f", env], check=True)
    temporary = os.path.join(env, MARKER + ".new")
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(marker, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, os.path.join(env, MARKER))
