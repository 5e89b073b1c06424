#!/usr/bin/env python3
"""Writes the figures of this host into a file for the textfile collector of node_exporter.

    metrics.py --base DIR --tier DIR --out DIR [--cache URL] [--runner NAME=URL …] [--loop S]

The tier and its limit, the pruner's last run, the last verdict, which services answer, the drive's
health, and of the pages of the runners and of the cache server the few series that alerts and
dashboard use: the ports of kvhost stay closed to all others. Nothing of it is a prompt, a key or
the name of a file. What cannot be read is left out, and kvhost_source_readable says so: no number
is made up. The file is replaced whole; whoever reads it sees an old one or a new one.

One JSON object on standard output (not with --loop), what went wrong on standard error. Exit: 0
written, 1 not. Root reads a drive's health; the service's user does all the rest.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import http.client
import json
import math
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import drive_sys
    from kvhost.onhost.drive_health import look_at, read_smartctl
    from kvhost.onhost.drive_measure import disks_below, mount_of
    from kvhost.onhost.launch_children import boot_id
    from kvhost.onhost.services_host import alive
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import drive_sys
    from drive_health import look_at, read_smartctl
    from drive_measure import disks_below, mount_of
    from launch_children import boot_id
    from services_host import alive

FILE = "kvhost.prom"
#: series of vLLM 0.32 that are passed on, each with the name of its runner
VLLM = (
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_success_total",
)
#: and of its own tiering, where there is no cache server: chunks, and loads that failed
TIERING = (
    "vllm:kv_offload_tiering_chunk_hits_total",
    "vllm:kv_offload_tiering_chunk_queries_total",
    "vllm:kv_offload_tiering_promotion_job_failures_total",
)
#: and of LMCache 0.5.6; these begin with the first lookup or store
LMCACHE = (
    "lmcache_mp_lookup_hit_l1_tokens_total",
    "lmcache_mp_lookup_hit_l2_tokens_total",
    "lmcache_mp_lookup_hit_tokens_total",
    "lmcache_mp_lookup_requested_tokens_total",
    "lmcache_mp_l2_load_completed_requests_total",
    "lmcache_mp_l2_store_completed_objects_chunks_total",
)
#: labels of vLLM's that are kept; series that differ in others only are added up. None of
#: LMCache's: one is a tenant's cache_salt, one the path of the model
LABELS = ("finished_reason", "model_name", "source", "tier")
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.M)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PAGE_BYTES = 8 << 20
PAGE_S = 5.0
#: passes between two looks at a drive's health
DRIVE_EVERY = 10
#: what a source that cannot be read, or is damaged, raises
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Sample(NamedTuple):
    """One line of the file; ``labels`` are written as they are, escaped already."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def number(value: Any) -> float:
    """Raises ValueError for what is none, is not finite, or is a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"not a number: {str(value)[:40]!r}")
    return float(value)


def reason(error: BaseException) -> str:
    """Why, for the log: what a damaged file holds is nobody's business there."""
    return str(error) if isinstance(error, OSError) else type(error).__name__


def escaped(text: str) -> str:
    """A label's value (Prometheus, text-based format)."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def tier(base: str) -> Iterator[Sample]:
    """What the pruner wrote of its last pass. Raises OSError, ValueError, KeyError, TypeError."""
    told = drive_sys.json_file(os.path.join(base, "log", "pruner-status.json"))
    for name, key in (
        ("kvhost_tier_bytes", "usage_bytes"),
        ("kvhost_tier_files", "files"),
        ("kvhost_tier_limit_bytes", "limit_bytes"),
        ("kvhost_tier_free_bytes", "free_bytes"),
        ("kvhost_tier_free_floor_bytes", "free_floor_bytes"),
        ("kvhost_pruner_last_run_timestamp_seconds", "time_unix"),
        ("kvhost_pruner_interval_seconds", "interval"),
    ):
        yield Sample(name, number(told[key]))
    yield Sample("kvhost_pruner_ok", float(told["state"] == "ok"))
    removed = sum(number(row["bytes"]) for row in told["removed"].values())
    yield Sample("kvhost_pruner_removed_bytes_total", removed)


def verdict(base: str) -> Iterator[Sample]:
    """The last verdict, whole and for each event. Raises as tier() does; no file, no verdict."""
    told = drive_sys.json_file(os.path.join(base, "state", "verified.json"))
    if told["persisted"] == "NO_BY_DESIGN":
        return  # of a runner that keeps nothing: no verdict, and no alert about one
    moment = time.strptime(told["time"], "%Y-%m-%dT%H%M%SZ")
    yield Sample("kvhost_verdict_timestamp_seconds", float(calendar.timegm(moment)))
    for event, state in {"all": told["persisted"], **told.get("events", {})}.items():
        if state not in VERDICTS or not re.fullmatch("[a-z]+", event):
            raise ValueError(f"no verdict: {str(state)[:40]!r}")
        for one in VERDICTS:
            labels = (("event", event), ("state", one))
            yield Sample("kvhost_verdict", float(state == one), labels)


def fetch(url: str) -> str:
    """A page of this host. Raises OSError, ValueError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page, until = b"", time.monotonic() + PAGE_S
    try:
        with opener.open(url, timeout=PAGE_S) as answer:  # of each wait
            while len(page) < PAGE_BYTES and (part := answer.read1(1 << 16)):
                page += part
                if time.monotonic() > until:
                    raise OSError(f"no whole page within {PAGE_S:g} s")
    except http.client.HTTPException as error:  # what answers speaks no HTTP
        raise OSError(f"no page: {type(error).__name__}") from None
    return page.decode()


def passed_on(page: str, runner: str | None) -> list[Sample]:
    """Series of the page of a runner, with its name as a label, or of the cache server's."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    names, allowed = (LMCACHE, ()) if runner is None else ((*VLLM, *TIERING), LABELS)
    more = () if runner is None else (("runner", runner),)
    for name, labels, value in SAMPLE.findall(page):
        if name not in names:
            continue
        kept = tuple(pair for pair in LABEL.findall(labels) if pair[0] in allowed)
        found[name, kept] = found.get((name, kept), 0.0) + number(float(value))
    return [Sample(name, value, (*more, *kept)) for (name, kept), value in found.items()]


def service(base: str, name: str, *, answers: bool) -> Iterator[Sample]:
    """Whether it runs and ``answers``, and since when. Raises OSError without /proc."""
    record: Any = {}
    # without a record, or with one that makes no sense, it does not run
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = drive_sys.json_file(os.path.join(base, "run", f"{name}.json"))
    record = record if isinstance(record, dict) else {}
    ticks = record.get("start_ticks")
    runs = record.get("boot_id") == boot_id() and alive(record.get("pid"), ticks)
    labels = (("service", name),)
    yield Sample("kvhost_service_up", float(runs and answers), labels)
    if runs and ticks is not None:
        began = booted() + float(ticks) / os.sysconf("SC_CLK_TCK")
        yield Sample("kvhost_service_start_timestamp_seconds", began, labels)


def booted() -> float:
    """Unix time of the boot, as the kernel tells it (proc(5), btime)."""
    with open("/proc/stat", encoding="ascii") as lines:
        return float(next(line.split()[1] for line in lines if line.startswith("btime ")))


def names_below(where: str) -> list[str]:
    """The drives that a directory lies on, by their kernel names. Raises OSError without one."""
    mount = mount_of(where)
    names = sorted({disk for one in drive_sys.devices_of(mount) for disk in disks_below(one)})
    if not names:
        raise OSError(f"no drive is seen below {where} ({mount.fs})")
    return names


class Partly(OSError):
    """A part of a source could not be read; ``samples`` are those of the rest."""

    def __init__(self, why: str, samples: list[Sample]) -> None:
        super().__init__(why)
        self.samples = samples


def drives(where: str) -> list[Sample]:
    """Health of every drive below the tier. Raises OSError where nothing is told, Partly where one
    drive's is not: alerts about the others must come all the same."""
    found: list[Sample] = []
    unread = []
    for name in names_below(where):
        try:
            told = list(drive(name))
        except UNREADABLE as error:
            told = []
            unread.append(f"{name}: {reason(error)}")
        readable = Sample("kvhost_drive_readable", float(bool(told)), (("device", name),))
        found += [readable, *told]
    if unread:
        raise Partly("; ".join(unread), found)
    return found


def drive(name: str) -> Iterator[Sample]:
    """Health of one. Raises those of UNREADABLE."""
    told = look_at(name)
    if told["why"]:
        raise OSError(told["why"])
    health = told["health"] or of_smartctl(told.get("smartctl"))
    if health is None and told.get("smartctl") is None:
        raise OSError("its health needs smartctl (package smartmontools)")
    if health is None:
        raise OSError("smartctl says nothing of its health")
    for metric, key in (
        ("kvhost_drive_wear_percent", "percentage_used"),
        ("kvhost_drive_media_errors_total", "media_errors"),
        ("kvhost_drive_temperature_celsius", "temperature_c"),
        ("kvhost_drive_spare_percent", "available_spare_percent"),
        ("kvhost_drive_spare_threshold_percent", "spare_threshold_percent"),
        ("kvhost_drive_critical_warning", "critical_warning"),
        ("kvhost_drive_written_bytes_total", "bytes_written"),
        ("kvhost_drive_power_on_hours_total", "power_on_hours"),
    ):
        if health.get(key) is not None:
            yield Sample(metric, number(health[key]), (("device", name),))


def of_smartctl(told: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a drive that is not NVMe tells of itself through smartctl; None without it."""
    if not told or "smart_status" not in told:
        return None
    written, hours, percent = read_smartctl(told)
    used = told.get("endurance_used", {}).get("current_percent")  # since smartctl 7.3
    return {
        "critical_warning": int(told["smart_status"].get("passed") is False),
        "temperature_c": told.get("temperature", {}).get("current"),
        "percentage_used": percent if used is None else used,
        "bytes_written": written,
        "power_on_hours": hours,
    }


class Collector:
    """The passes of one process; ``told`` are the sources that could not be read, and why."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.passes = args, 0
        self.told: dict[str, str] = {}
        self.health: list[Sample] = []

    def read(self, source: str, samples: Callable[[], Iterable[Sample]]) -> list[Sample]:
        """All of a source or nothing of it, but for Partly; said once when it changes."""
        try:
            found = list(samples())
        except UNREADABLE as error:
            why = reason(error)
            if self.told.get(source) != why:
                print(f"metrics: {source} cannot be read: {why}", file=sys.stderr, flush=True)
            self.told[source] = why
            found = error.samples if isinstance(error, Partly) else []
        else:
            self.told.pop(source, None)
        return [*found, self.readable(source)]

    def readable(self, source: str) -> Sample:
        labels = (("source", source),)
        return Sample("kvhost_source_readable", float(source not in self.told), labels)

    def page(self, name: str, url: str) -> tuple[bool, list[Sample]]:
        """Whether a page could be had, and what of it is passed on."""
        got: list[str] = []

        def samples() -> Iterator[Sample]:
            got.append(fetch(url.rstrip("/") + "/metrics"))
            yield from passed_on(got[0], None if name == "cache" else name)

        found = self.read(name, samples)
        return bool(got), found

    def collect(self) -> list[Sample]:
        args = self.args
        found = self.read("pruner", lambda: tier(args.base))
        found += self.read("verdict", lambda: verdict(args.base))
        server = (("cache", args.cache),) if args.cache else ()
        for name, url in (*server, *args.runner):
            answers, samples = self.page(name, url)
            found += samples + list(service(args.base, name, answers=answers))
        found += service(args.base, "pruner", answers=True)
        if self.passes % DRIVE_EVERY == 0:
            self.health = self.read("drive", lambda: drives(args.tier))
        self.passes += 1
        now = Sample("kvhost_metrics_last_run_timestamp_seconds", time.time())
        return [*found, *self.health, now]


def rendered(samples: Iterable[Sample], base: str) -> str:
    """The text format of Prometheus: the lines of one name lie together, below its type. By the
    first line kvhost tells its own file from another's."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = [f"# Written by kvhost for {base}."]
    for name, same in sorted(by_name.items()):
        lines.append(f"# HELP {name} See docs/monitoring.md of kvhost.")
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        for one in same:
            labels = ",".join(f'{key}="{value}"' for key, value in one.labels)
            lines.append(f"{name}{'{' + labels + '}' if labels else ''} {one.value!r}")
    return "\n".join(lines) + "\n"


def write(folder: str, text: str) -> str:
    """Replaces the file; a link at its place is replaced, not followed. Raises OSError."""
    handle, new = tempfile.mkstemp(dir=folder, prefix=".kvhost.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)  # node_exporter is another user
        path = os.path.join(folder, FILE)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise
    return path


def runner(text: str) -> tuple[str, str]:
    """NAME=URL. Raises argparse.ArgumentTypeError."""
    name, _, url = text.partition("=")
    if not re.fullmatch(r"runner(-[a-z0-9]+)?", name) or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r}: not like runner=http://127.0.0.1:8000")
    return name, url


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, help="kvhost's directory")
    parser.add_argument("--tier", required=True, help="the tier's directory")
    parser.add_argument("--out", required=True, help=f"directory for {FILE}")
    parser.add_argument("--cache", help="URL of the cache server, if there is one")
    parser.add_argument("--runner", action="append", type=runner, default=[], metavar="NAME=URL")
    parser.add_argument("--loop", type=float, help="seconds from pass to pass; without it, one")
    args = parser.parse_args()
    collector = Collector(args)
    while True:
        samples, path = collector.collect(), None
        try:
            path = write(args.out, rendered(samples, args.base))
        except OSError as error:  # of a loop, the next pass may be able to
            print(f"metrics: not written: {error}", file=sys.stderr, flush=True)
        if args.loop is None:
            print(json.dumps({"written": path, "unreadable": collector.told}))
            return 0 if path else 1
        time.sleep(args.loop)


if __name__ == "__main__":
    sys.exit(main())
