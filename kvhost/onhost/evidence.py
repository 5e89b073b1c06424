#!/usr/bin/env python3
"""Collects the evidence whether a KV cache survives what happens to it. It gives no verdict.

    evidence.py --config FILE --out FILE        (as root, on the host)

For each event: identity of the services; is the server in use?; cold requests with fresh random
prompts; wait until their KV is in L2; the same request warm; the event; flush this test's files and
drop them from the page cache; the same request again, with controls; remove this test's own files.
Around each request: counters of both servers, reads of the cache process and of the drive, files of
the namespace, identity of both processes. The other evidence_*.py must lie beside this file.

Events: runner (vLLM is restarted), cache (the cache server; the engine's own memory is emptied),
both, kill (kill -9 of both in the middle of a write), other (a second pair of services is started
and asked), reboot (the last one: exit 4 asks for it; run again within an hour, the test goes on).

The config is one JSON object. All URLs are plain HTTP on this host; paths are absolute.
  api_base       str    URL of the runner; /health and /v1/completions are below it
  metrics_url    str    Prometheus page of the runner (vLLM)
  cache_http     str|null   URL of the cache server; /healthcheck, /metrics, /version are below it.
                 null: vLLM keeps its cache itself, and its own page counts what its tiers found;
                 "services" is the runner alone then, events are runner, kill, reboot
  model          str    served model name
  api_key_file   str|null   file that holds the API key
  namespace_dir  str    directory that L2 writes to
  own_requests   str    file {"pid", "start_ticks", "count"}: kvhost's own requests to this runner;
                 its directory is root's, the journal of a reboot lies there too
  services       {"cache": S, "runner": S}, S = {"record": str, "restart": [str, ...],
                 "log": str|null}; record is the file {"pid", "start_ticks", "boot_id", ...} that
                 the launcher writes
  prompt_tokens  int    tokens of a prompt
  chunk_size     int    tokens of a chunk of the cache
  vocab          [int, int]   prompts are drawn from these token ids, the second one excluded
  Optional, with defaults: events ["both"]; max_tokens 16; files_per_chunk 1 (tensor parallel ranks
  times object groups); warm true; disrupt false (true: run although the server is in use);
  exact_numerics true (false: on a GPU, where arithmetic may differ from run to run);
  heartbeat_s 10 (of the engine at the cache server); engines 1 (workers that register with
  the cache server: ranks times runners); others [] (further
  runners at that server, {"metrics_url", "record", "own_requests"}: if one is in use, none of the
  events but runner is begun); other null: how a second pair is started,
  {"start": [str, ...], "services": {"cache": SPEC, "runner": SPEC}, "api_base", "metrics_url",
  "cache_http", "user": str|null, who may read their secrets}, SPEC as launch.py reads it,
  "start" gets its path as last argument, "{api_port}", "{cache_port}" and "{cache_http_port}"
  are filled in;
  pause null (file in a directory of root's: while the test runs, the cache server leaves the tier
  that it shares with other hosts alone, so that nothing but this host's own answers);
  timeouts {"request_s": 600, "ready_s": 600, "restart_s": 180, "write_s": 120, "stable_s": 2,
  "settle_s": 10, "registered_s": 60, "flush_s": 900}, seconds.

--out is written 0600. It holds no prompt, no key, no name of a KV file: a prompt appears as its
digest. Exit: 0 evidence is written (also of a failure), 3 refused because in use (evidence says
so), 4 reboot now, then run this again, 1 bad config or journal, or no evidence could be written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

sys.dont_write_bytecode = True  # bin/ stays as it was installed
if TYPE_CHECKING:
    from kvhost.onhost import evidence_probe as probe
    from kvhost.onhost.evidence_collect import SCHEMA, stop
    from kvhost.onhost.evidence_config import load_config
    from kvhost.onhost.evidence_events import RebootNow, Test
    from kvhost.onhost.evidence_steps import SIGNALS
else:  # on the host the files lie beside each other, in no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import evidence_probe as probe
    from evidence_collect import SCHEMA, stop
    from evidence_config import load_config
    from evidence_events import RebootNow, Test
    from evidence_steps import SIGNALS

Json = dict[str, Any]
REBOOT = 4
JOURNAL_S = 3600


def journal_path(config: Json) -> str:
    return os.path.join(os.path.dirname(config["own_requests"]), "verify-journal.json")


def finish(test: Test, done: list[Json]) -> None:
    test.evidence["finished_unix"] = time.time()
    done.append(test.evidence)


def run_events(config: Json, done: list[Json]) -> int:
    """Every event in order, evidence of each to ``done``; the exit code so far."""
    test = waiting(config, done)
    if test is not None:
        for number in SIGNALS:
            signal.signal(number, stop)
        test.run(resumed=True)
        finish(test, done)
        return 0
    for event in config["events"]:
        test = Test(config, event)
        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            test.run()
        except RebootNow:
            journal = {"schema": SCHEMA, "config": config, "done": done, "test": test.journal()}
            probe.write_json(journal_path(config), journal, 0o600)
            print("reboot this host now, then run this again", file=sys.stderr, flush=True)
            return REBOOT
        finish(test, done)
        if test.evidence["refused"]:
            return 3
        if test.evidence["interrupted"]:
            break
    return 0


@contextlib.contextmanager
def alone(config: Json) -> Iterator[None]:
    """Only this host's own tier answers meanwhile: kvhost_shared.py looks for that process."""
    path, here = config["pause"], probe.process(os.getpid())
    if path is None or here is None:
        yield
        return
    probe.write_json(path, {key: here[key] for key in ("pid", "start_ticks")}, 0o644)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def waiting(config: Json, done: list[Json]) -> Test | None:
    """The test that was to go on after a reboot, if there was one. Any other journal is forgotten,
    and the files of its test are removed. Raises ValueError, OSError."""
    path = journal_path(config)
    try:
        age = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return None
    test, before = read_journal(config)
    os.unlink(path)  # once: a second try would find the files gone
    if test.rebooted() and age < JOURNAL_S:
        done += before
        return test
    print("a test that was to go on after a reboot is forgotten", file=sys.stderr)
    test.clean_up()
    return None


def read_journal(config: Json) -> tuple[Test, list[Json]]:
    """The interrupted test, and evidence of the events before it. Raises ValueError, OSError."""
    path = journal_path(config)
    with open(path, encoding="utf-8") as handle:
        journal = json.load(handle)
    try:
        if journal["schema"] != SCHEMA:
            raise ValueError(f"schema {journal['schema']}")
        if journal["config"]["namespace_dir"] != config["namespace_dir"]:
            raise ValueError("of another namespace")
        return Test.after_reboot(journal["config"], journal["test"]), list(journal["done"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no journal of this test: {error!r}") from error


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON, see above")
    parser.add_argument("--out", required=True, help="where the evidence is written")
    args = parser.parse_args()
    done: list[Json] = []
    try:
        config = load_config(args.config)
        with alone(config):
            code = run_events(config, done)
    except (OSError, ValueError) as error:
        print(f"{args.config}: {error}", file=sys.stderr)
        return 1
    if code == REBOOT:
        return code
    try:
        probe.write_json(args.out, {"schema": SCHEMA, "events": done}, 0o600)
    except OSError as error:
        print(f"the evidence cannot be written: {error}", file=sys.stderr)
        return 1
    if code == 3:
        with contextlib.suppress(OSError):
            print("refused: in use; set disrupt to run the test anyway", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
