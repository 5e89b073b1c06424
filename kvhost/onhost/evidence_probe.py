#!/usr/bin/env python3
"""What evidence.py reads: metrics, /proc, mounts, files of the namespace, the page cache.

Pure look-ups except drop_pages and write_json. A part that cannot be read is None, never 0. Must
lie beside evidence.py. By hand: evidence_probe.py DIR prints what a directory of KV files holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import math
import mmap
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Files = dict[str, tuple[int, int, int]]  # relative name -> (inode, bytes, mtime_ns)

# field -> (metric, labels that a sample must have); vLLM 0.32, all engines and models summed up
VLLM = {
    "requests_finished": ("vllm:request_success_total", {}),
    "running": ("vllm:num_requests_running", {}),
    "waiting": ("vllm:num_requests_waiting", {}),
    "prefix_hits": ("vllm:prefix_cache_hits_total", {}),
    "external_queries": ("vllm:external_prefix_cache_queries_total", {}),
    "external_hits": ("vllm:external_prefix_cache_hits_total", {}),
    "from_compute": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "from_device": ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    "from_external": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
}
# lmcache 0.5.6; these appear with the first lookup or store, not at the start of the server
CACHE = {
    "lookups": ("lmcache_mp_lookups_requests_total", {}),
    "requested_tokens": ("lmcache_mp_lookup_requested_tokens_total", {}),
    "hit_tokens": ("lmcache_mp_lookup_hit_tokens_total", {}),
    "hit_l1_tokens": ("lmcache_mp_lookup_hit_l1_tokens_total", {}),
    "hit_l2_tokens": ("lmcache_mp_lookup_hit_l2_tokens_total", {}),
    "l2_loads": ("lmcache_mp_l2_load_completed_requests_total", {}),
    "l2_stored_chunks": ("lmcache_mp_l2_store_completed_objects_chunks_total", {}),
    "l2_adapters": ("lmcache_mp_l2_prefetch_adapters", {"state": "active"}),
}

# vLLM's own tiering: chunks, by the tier that was asked; these appear with the first lookup
_TIER = "vllm:kv_offload_tiering_"
TIERS = {
    "l1_queries": (_TIER + "chunk_queries_total", {"tier": "0:primary"}),
    "l1_hits": (_TIER + "chunk_hits_total", {"tier": "0:primary"}),
    "l2_hits": (_TIER + "chunk_hits_total", {"tier": "1:fs"}),
    "l2_tier": (_TIER + "active_promotion_jobs", {"tier": "1:fs"}),
}


def tier_counters(text: str, chunk_size: int) -> Json:
    """vLLM's page in the fields of a cache server's, chunks as tokens. A tier that found nothing
    has no sample of hits; that a tier is there at all is seen by its gauge."""
    found = parse_metrics(text, TIERS)
    page: Json = dict.fromkeys(CACHE)
    page["l2_adapters"] = None if found["l2_tier"] is None else 1.0
    if found["l1_queries"] is None:
        return page
    l1, l2 = ((found[name] or 0.0) * chunk_size for name in ("l1_hits", "l2_hits"))
    asked = found["l1_queries"]
    page |= {"lookups": asked, "requested_tokens": asked * chunk_size}
    return {**page, "hit_tokens": l1 + l2, "hit_l1_tokens": l1, "hit_l2_tokens": l2}


def scrub(text: str, secret: str | None = None, limit: int = 300, *, last: bool = False) -> str:
    """One line for the evidence: no colours, key or list of token ids, then cut at ``limit``, of
    which with ``last`` the end is kept. Give the whole text: half a key is not known again."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    if secret:
        text = text.replace(secret, "***")
    text = re.sub(r"(?:\d+\s*,\s*){3,}\d*", "(ids) ", text)
    return text[-limit:] if last else text[:limit]


def parse_metrics(text: str, wanted: Json) -> Json:
    """Prometheus text to {field: sum of the samples; None: no sample, or no number}."""
    found: Json = dict.fromkeys(wanted)
    for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})?\s+(\S+)", text, re.M):
        for field, (metric, needed) in wanted.items():
            if name == metric and all(f'{k}="{v}"' in labels for k, v in needed.items()):
                found[field] = (found[field] or 0.0) + float(value)
    for field, total in found.items():
        if total is not None and not math.isfinite(total):
            found[field] = None
    return found


def labels_of(text: str, metric: str) -> Json:
    """Labels of the first sample of a metric; {} without one."""
    found = re.search(rf"^{re.escape(metric)}\{{(.*)\}}\s", text, re.M)
    return dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}


def first_logprobs(choice: Any) -> Json | None:
    """{token id: log probability} of the likeliest first tokens, of an event with logprobs."""
    top = ((choice.get("logprobs") or {}).get("top_logprobs") or [None])[0]
    if not isinstance(top, dict):
        return None
    return {token.rpartition(":")[2]: float(value) for token, value in top.items()}


def read_stream(lines: Iterable[bytes], started: float, limit_s: float) -> Json:
    """A streamed completion of vLLM to tokens, usage and seconds since ``started`` (monotonic).

    Raises ValueError for an error event, an answer that ended early or took longer than limit_s.
    """
    fields = ("ttft_s", "total_s", "output_tokens", "usage_prompt_tokens", "usage_cached_tokens")
    result: Json = dict.fromkeys((*fields, "first_logprobs"))
    tokens: list[int] = []
    done = False
    for line in lines:
        if time.monotonic() - started > limit_s:
            raise ValueError(f"no complete answer within {limit_s} s")
        data = line.decode(errors="replace").strip()
        done = done or data == "data: [DONE]"
        if not data.startswith("data:") or done:
            continue
        event = json.loads(data[5:])
        if event.get("error"):
            raise ValueError("the server says: " + str(event["error"].get("message")))
        choice = (event.get("choices") or [{}])[0]
        if result["ttft_s"] is None and (choice.get("token_ids") or choice.get("text")):
            result["ttft_s"] = time.monotonic() - started
            result["first_logprobs"] = first_logprobs(choice)
        tokens += choice.get("token_ids") or []
        if event.get("usage"):
            details = event["usage"].get("prompt_tokens_details") or {}
            result["usage_prompt_tokens"] = event["usage"].get("prompt_tokens")
            result["usage_cached_tokens"] = details.get("cached_tokens")
    if result["ttft_s"] is None or not done:
        raise ValueError("the answer ended too early")
    result["total_s"] = time.monotonic() - started
    result["output_tokens"] = tokens or None
    return result


def own_requests(path: str, proc: Json) -> int:
    """The count of the file at ``path``; 0 where it is missing, unusable or of another process."""
    own: Any = None
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as handle:
        own = json.load(handle)
    if not isinstance(own, dict) or any(own.get(k) != proc[k] for k in ("pid", "start_ticks")):
        return 0
    count = own.get("count")
    return count if type(count) is int and count >= 0 else 0  # a bool is no count


def read_log(path: str, start: int | None = None) -> tuple[int, str] | None:
    """(size in bytes, text from ``start``): no text without it, the end where it is negative.

    From the beginning where the log is shorter than ``start`` (rotated). None: no regular file,
    or not readable. The directory is the service user's: no link is followed, no pipe waited for.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as handle:  # a directory is refused here
            info = os.fstat(handle.fileno())
            if not stat.S_ISREG(info.st_mode):
                return None
            size = info.st_size
            if start is None:
                return size, ""
            begin = max(0, size + start) if start < 0 else start if start <= size else 0
            handle.seek(begin)
            return size, handle.read(size - begin).decode(errors="replace")
    except OSError:
        return None


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


def process(pid: int) -> Json | None:
    """What /proc says of a process, None when there is none (or only its zombie)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return {"pid": pid, "start_ticks": int(fields[19]), "boot_id": boot_id()}  # field 22 of proc(5)


def pid1_ticks() -> int:
    """Start time of the first process here: another one after a reboot, also of a container."""
    first = process(1)
    return int(first["start_ticks"]) if first else 0


def tree(pid: int) -> list[int]:
    """A process and its descendants, children first found last."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop(0)
        found.append(one)
        for children in glob.glob(f"/proc/{one}/task/*/children"):
            with contextlib.suppress(OSError), open(children) as handle:
                todo += [int(child) for child in handle.read().split()]
    return found


def listens(pid: int, port: int) -> bool | None:
    """Whether the process or a descendant holds the listening socket; None: unreadable."""
    try:
        inodes = set()
        for table in ("tcp", "tcp6"):
            if table == "tcp6" and not os.path.exists(f"/proc/{pid}/net/tcp6"):
                continue  # a kernel without IPv6
            with open(f"/proc/{pid}/net/{table}", encoding="ascii") as handle:
                rows = [line.split() for line in handle.readlines()[1:]]
            inodes |= {r[9] for r in rows if r[3] == "0A" and int(r[1].split(":")[1], 16) == port}
        todo = [pid]
        while todo:
            one = todo.pop()
            for number in os.listdir(f"/proc/{one}/fd"):  # only its user and root may
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    target = os.readlink(f"/proc/{one}/fd/{number}")
                    if target.startswith("socket:[") and target[8:-1] in inodes:
                        return True
            for children in glob.glob(f"/proc/{one}/task/*/children"):
                with contextlib.suppress(FileNotFoundError), open(children) as handle:
                    todo += [int(child) for child in handle.read().split()]
        return False
    except (OSError, ValueError, IndexError):
        return None


def process_reads(pid: int) -> Json | None:
    """rchar (all reads) and read_bytes (from storage) of a process, in bytes; see proc(5)."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as handle:
            rows = dict(line.strip().split(": ") for line in handle)
        return {"rchar": int(rows["rchar"]), "read_bytes": int(rows["read_bytes"])}
    except (OSError, ValueError, KeyError):
        return None


def tree_reads(pid: int) -> Json | None:
    """The same of a process and its descendants; None where one cannot be read."""
    found = [process_reads(one) for one in tree(pid)]
    if None in found:
        return None
    return {key: sum(row[key] for row in found if row) for key in ("rchar", "read_bytes")}


def mount_of(path: str) -> Json:
    """Filesystem type and block device of a path: {"fstype", "device": "8:1" or None}."""
    real = os.path.realpath(path)
    best: Json = {"fstype": None, "device": None}
    longest = -1
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            left, _, right = line.partition(" - ")
            device, point = left.split()[2], left.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                longest = len(point)
                fstype, source = right.split()[:2]
                known: str | None = device
                if device.startswith("0:"):  # btrfs and others with an anonymous device
                    known = None
                    with contextlib.suppress(OSError):
                        rdev = os.stat(source).st_rdev if source.startswith("/dev/") else 0
                        known = f"{os.major(rdev)}:{os.minor(rdev)}" if rdev else None
                best = {"fstype": fstype, "device": known}
    return best


def device_reads(device: str | None) -> int | None:
    """Bytes read from a block device since boot; /proc/diskstats counts sectors of 512 bytes."""
    with contextlib.suppress(OSError), open("/proc/diskstats", encoding="ascii") as handle:
        for row in (line.split() for line in handle):
            if f"{row[0]}:{row[1]}" == device:
                return int(row[5]) * 512
    return None


def scan(root: str) -> tuple[Files, int]:
    """(files, number of temporary files) below root, links not followed."""
    files: Files = {}
    temporary = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # renamed or pruned meanwhile
                info = os.lstat(path)
                if ".tmp" in name or info.st_size == 0:
                    temporary += 1
                else:
                    key = os.path.relpath(path, root)
                    files[key] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return files, temporary


def resident_pages(path: str, size: int) -> int:
    """Pages of a file that are in the page cache (mincore(2)); raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with (
        open(path, "rb") as handle,
        mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_COPY) as area,
    ):
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(area)
        try:
            failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), vector)
        finally:
            del start  # else the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", path)
        return sum(byte & 1 for byte in vector)


def drop_pages(root: str, files: Files) -> Json:
    """Flushes files and drops them from the page cache, which needs no privilege.

    Files that are gone or replaced are left out. Returns counts of files and of pages, and how
    many of these were in the page cache before and after. Raises OSError.
    """
    found = {"files": 0, "pages": 0, "resident_before": 0, "resident_after": 0}
    for name, (inode, _, _) in files.items():
        path = os.path.join(root, name)
        try:
            handle = os.open(path, os.O_RDWR)  # NFS flushes for a writable descriptor only
        except FileNotFoundError:
            continue
        try:
            info = os.fstat(handle)
            if info.st_ino != inode or not info.st_size:
                continue
            size = info.st_size  # it may have been truncated
            found["resident_before"] += resident_pages(path, size)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        found["resident_after"] += resident_pages(path, size)
        found["files"] += 1
        found["pages"] += (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    return found


def filled(given: Any, ports: dict[str, int]) -> Any:
    """``given`` with every "{api_port}", "{cache_port}" and "{cache_http_port}" in its texts."""
    text = json.dumps(given)
    for name, port in ports.items():
        text = text.replace("{" + name + "}", str(port))
    return json.loads(text)


def write_json(path: str, content: Json, mode: int) -> None:
    """Atomically; raises OSError."""
    handle, name = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        os.fchmod(file.fileno(), mode)
    os.replace(name, path)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if sys.argv[1:] == ["--help"] else 1
    files, temporary = scan(sys.argv[1])
    size = sum(info[1] for info in files.values())
    found = {"files": len(files), "bytes": size, "temporary": temporary, **mount_of(sys.argv[1])}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
