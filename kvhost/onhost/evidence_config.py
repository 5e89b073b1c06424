"""Reads the config of evidence.py, whose --help describes it. Must lie beside evidence.py."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

TIMEOUTS = {
    "request_s": 600,
    "ready_s": 600,
    "restart_s": 180,
    "write_s": 120,
    "stable_s": 2,
    "settle_s": 10,
    "registered_s": 60,
    "flush_s": 900,
}
EVENTS = ("runner", "cache", "both", "kill", "other", "reboot")
#: of these a cache server is a part
WITH_SERVER = ("cache", "both", "other")
REQUIRED = {
    "api_base": str,
    "metrics_url": str,
    "model": str,
    "namespace_dir": str,
    "own_requests": str,
    "services": dict,
    "prompt_tokens": int,
    "chunk_size": int,
    "vocab": list,
}
OPTIONAL: Json = {
    "api_key_file": None,
    "max_tokens": 16,
    "files_per_chunk": 1,
    "warm": True,
    "disrupt": False,
    "timeouts": {},
    "events": ["both"],
    "exact_numerics": True,
    "heartbeat_s": 10,
    "engines": 1,
    "others": [],
    "other": None,
    "pause": None,
}


def load_config(path: str) -> Json:
    """The config with its defaults. Raises ValueError that names everything that is wrong."""
    with open(path, encoding="utf-8") as handle:
        given = json.load(handle)
    if not isinstance(given, dict):
        raise ValueError("the config must be a JSON object")
    known = {*REQUIRED, *OPTIONAL, "cache_http"}
    wrong = [f"{key}: unknown" for key in given if key not in known]
    for key, kind in REQUIRED.items():
        if not isinstance(given.get(key), kind):
            wrong.append(f"{key}: a {kind.__name__} is needed, found {given.get(key)!r}")
    server = given.get("cache_http", "") is not None  # null is said, never a slip of the pen
    if not isinstance(given.get("cache_http", 0), (str, type(None))):
        found = given.get("cache_http")
        wrong.append(f"cache_http: a URL is needed, or null for no cache server, found {found!r}")
    for name in ("cache", "runner") if server else ("runner",):
        service = (given.get("services") or {}).get(name)
        if not isinstance(service, dict) or not isinstance(service.get("record"), str):
            wrong.append(f"services.{name}.record: the path of the service's record is needed")
        elif not service.get("restart") or not isinstance(service["restart"], list):
            wrong.append(f"services.{name}.restart: a command as a list of strings is needed")
    wrong += [
        f"timeouts.{key}: unknown" for key in given.get("timeouts") or {} if key not in TIMEOUTS
    ]
    events = given.get("events", ["both"])
    if not isinstance(events, list) or not events or not set(map(str, events)) <= set(EVENTS):
        wrong.append(f"events: a list of {', '.join(EVENTS)} is needed, found {events!r}")
    elif len(set(events)) < len(events) or "reboot" in events[:-1]:
        wrong.append(f"events: each once, and reboot the last one, found {events}")
    elif not server and set(events) & set(WITH_SERVER):
        wrong.append(f"events: {', '.join(WITH_SERVER)} need a cache_http, found {events}")
    vocab = given.get("vocab")
    if isinstance(vocab, list) and (len(vocab) != 2 or not 0 <= vocab[0] < vocab[1]):
        wrong.append(f"vocab: [first, end) with 0 <= first < end is needed, found {vocab}")
    for key in ("prompt_tokens", "chunk_size"):
        if isinstance(given.get(key), int) and given[key] < 1:
            wrong.append(f"{key}: at least 1 is needed, found {given[key]}")
    if wrong:
        raise ValueError("; ".join(wrong))
    config = {**OPTIONAL, **given}
    config["timeouts"] = {**TIMEOUTS, **(given.get("timeouts") or {})}
    return config
