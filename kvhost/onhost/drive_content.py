"""What is on a block device, as far as headers tell: tables, signatures, leftovers. Reads only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING or __package__:
    from kvhost.onhost import drive_magic, drive_sys
else:  # they lie beside this file on a host, where there is no package kvhost
    import drive_magic
    import drive_sys

Data = dict[str, Any]
Found = Iterator[tuple[str, str]]  # kind, detail
TOOL_LIMIT_S = 30


def _tool(argv: list[str], fine: tuple[int, ...]) -> tuple[int, str]:
    """Exit code and stdout. Raises OSError if it is missing, fails, or does not end."""
    env = {**os.environ, "LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    try:
        got = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_LIMIT_S, check=False,
            env=env,
        )  # fmt: skip
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not installed (package util-linux)") from None
    if got.returncode not in fine:
        last = got.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise OSError(f"{' '.join(argv)} exits {got.returncode}: {last[0]}")
    return got.returncode, got.stdout.decode(errors="replace")


def blkid(path: str) -> dict[str, str]:
    """What blkid -p reads from a device itself; {} when it finds nothing.

    Exit 2 is "nothing found" and also "could not be read" (blkid(8)): it is only asked of what
    this process itself could read. Exit 8 is several contradicting formats.
    """
    code, out = _tool(["blkid", "-p", "-o", "export", path], (0, 2, 8))
    if code == 8:
        return {"TYPE": "several formats that contradict each other"}
    pairs = [line.split("=", 1) for line in out.splitlines() if "=" in line]
    found = {key: re.sub(r"\\(.)", r"\1", value) for key, value in pairs if key != "DEVNAME"}
    if code == 0 and not found:
        raise OSError(f"blkid says nothing that can be read of {path}")
    return found


def _can_read(path: str, size: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in (0, size - 512):
            if len(os.pread(fd, 512, at)) != 512:
                raise OSError(f"{path} cannot be read at byte {at}")
    finally:
        os.close(fd)


def tables(name: str, device: Data) -> Found:
    """The partition table, and what each partition is and holds. Fills device["contents"]."""
    _can_read(device["path"], device["size_bytes"])
    found = blkid(device["path"])
    if found.get("PTTYPE"):
        yield "partition_table", f"{found['PTTYPE']} {found.get('PTUUID', '')}".strip()
    if found.get("TYPE"):
        device["contents"].append(_content(name, found))
    for part in device["partitions"]:
        if not found.get("PTTYPE"):
            yield "partition_table", f"none on the drive, but the kernel knows {_nth(part)}"
        path = f"/dev/{part}"
        if (size := drive_sys.size_of(part)) < 4096:  # an extended partition shows 1 KiB
            yield "signature", f"{_nth(part)}: extended"
            continue
        _can_read(path, size)
        inside = blkid(path)
        device["contents"].append(_content(part, inside))
        yield "signature", f"{_nth(part)}: {_described(inside)}"


def _content(name: str, found: dict[str, str]) -> Data:
    keys = ("TYPE", "LABEL", "UUID", "PART_ENTRY_NAME", "PART_ENTRY_UUID")
    names = ("type", "label", "uuid", "partlabel", "partuuid")
    return {"name": name, **{names[n]: found.get(key) or None for n, key in enumerate(keys)}}


def _nth(part: str) -> str:
    """Without the drive's name: a name is another one after the next boot."""
    return f"partition {drive_sys.number(drive_sys.block(part, 'partition'))}"


def _described(found: dict[str, str]) -> str:
    words = [found.get("TYPE", "no known format")]
    for key, word in (("LABEL", "label"), ("UUID", ""), ("PART_ENTRY_NAME", "partition name"),
                      ("PART_ENTRY_UUID", "partition")):  # fmt: skip
        if found.get(key):
            words.append(f"{word} {found[key]}".strip())
    return shown(", ".join(words))


def kvhosts_own(device: Data, mounted: dict[str, list[drive_sys.Mount]]) -> Data | None:
    """What says that kvhost formatted the drive: one partition, by name and label kvhost.

    `marker` is read where the filesystem is mounted: {"status", "why", "data"}.
    """
    rows = [row for row in device["contents"] if row["name"] in device["partitions"]]
    if len(rows) != 1 or rows[0]["partlabel"] != "kvhost":
        return None
    label, member = rows[0]["label"] or "", rows[0]["type"] == "linux_raid_member"
    # mdadm puts the name of a host before that of an array
    if (label.rpartition(":")[2] if member else label) != "kvhost":
        return None
    row = rows[0]
    tree = drive_sys.above(row["name"])
    at = [mount for one in tree for mount in mounted.get(one, ())]
    marker: Data = {"status": "absent", "why": "it is not mounted", "data": None}
    if at:
        path = os.path.join(at[0].point, ".kvhost-drive.json")
        try:
            marker = {"status": "ok", "why": None, "data": drive_sys.json_file(path)}
        except FileNotFoundError:
            marker["why"] = f"there is no {path}"
        except (OSError, ValueError) as why:
            marker.update(status="unreadable", why=f"{path}: {why}")
    return {
        "partition": f"/dev/{row['name']}",
        "filesystem": at[0].fs if at else row["type"],
        "encrypted": _is_encrypted(row["type"], tree, bool(at)),
        "uuid": row["uuid"],
        "mounted_at": sorted({mount.point for mount in at}),
        "marker": marker,
    }


def _is_encrypted(kind: str | None, tree: list[str], mounted: bool) -> bool | None:
    """None of a member of an array in which nothing is mounted: it may hold either."""
    ids = [drive_sys.text(drive_sys.block(one, "dm/uuid")) or "" for one in tree]
    if kind == "crypto_LUKS" or any(one.startswith("CRYPT-") for one in ids):
        return True
    return None if kind == "linux_raid_member" and not mounted else False


def shown(words: str) -> str:
    """Labels are what anyone wrote on the drive: on one line and without control characters."""
    return "".join(c if c.isprintable() else "?" for c in words)


def signatures(name: str, device: Data) -> Found:
    """All signatures that wipefs lists (it is called with -n and writes nothing), those that blkid
    alone knows, and marks of the table in drive_magic at other places than these."""
    path = device["path"]
    _, out = _tool(["wipefs", "-n", "--json", path], (0,))
    rows = json.loads(out)["signatures"] if out.strip() else []
    for row in rows:
        more = [row[key] for key in ("label", "uuid") if row.get(key)]
        words = " ".join([str(row["type"]), *more])
        yield "signature", shown(f"{words} at {int(str(row['offset']), 0)}")
    for inside in (one for one in device["contents"] if one["name"] == name):
        if inside["type"] not in [row["type"] for row in rows]:
            yield "signature", shown(f"{inside['type']} {inside['uuid'] or ''}".strip())
    known = {f" at {int(str(row['offset']), 0)}" for row in rows}
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for found in drive_magic.leftovers(fd, device["size_bytes"]):
            if not found.endswith(tuple(known)):
                yield "leftover", found
    finally:
        os.close(fd)
