"""What the installed vLLM and LMCache take: their own parsers and readers are asked.

Imported by resolve.py, beside which it lies, in the engine's environment. LMCache only warns of a
key that it does not know, or says nothing at all, so a mistyped one would silently be its default.
Every function returns what is wrong, for people; an empty list when nothing is.
"""

# the engine is not there where types are checked
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any


def unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """One line for each name that is not known, with the nearest that is."""
    names = sorted(known)
    found = []
    for name in given:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, 1, 0.6)
        meant = f"; the nearest that there is: {near[0]}" if near else ""
        found.append(f"{kind} {name!r} is not known to the installed version{meant}")
    return found


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[Any, list[str]]:
    """(arguments, problems): what a parser says instead of ending the program."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(argv), []
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if "error: " in line]
        return None, [line.partition("error: ")[2] for line in lines] or [said.getvalue().strip()]


def runner_keys(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> list[str]:
    """Keys of vLLM's YAML configuration that its parser has no option for."""
    options = {name[2:] for name in parser._option_string_actions if name.startswith("--")}
    given = [key.replace("_", "-") for key in config]
    return unknown("vllm.yaml: option", given, options)


def connector_keys(transfer: Any) -> list[str]:
    """Keys of the connector that LMCache's integration, or vLLM's own tiering, never reads: they
    would be ignored. ``transfer``: the value of --kv-transfer-config."""
    extra = transfer.get("kv_connector_extra_config") if isinstance(transfer, dict) else None
    if not isinstance(extra, dict):
        return []
    if transfer.get("kv_connector") == "OffloadingConnector":
        return offloading_keys(extra)
    known = words_of("lmcache.integration.vllm", r"lmcache\.mp\.[a-z0-9_]+")
    return unknown("vllm.yaml: kv_connector_extra_config:", extra, known)


def offloading_keys(extra: Mapping[str, Any]) -> list[str]:
    """The same of vLLM's OffloadingConnector and the file tiers below it."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    known: set[str] = set()
    for package in ("vllm.v1.kv_offload", "vllm.distributed.kv_transfer.kv_connector.v1"):
        asked = words_of(package, r"extra_config(?:\.get\(|\[)\s*\"\w+\"")
        known |= {word.split('"')[1] for word in asked}
    found = unknown("--kv-transfer-config: kv_connector_extra_config:", extra, known)
    takes = {"type", *inspect.signature(FileSystemTierManager.__init__).parameters}
    for tier in extra.get("secondary_tiers", ()):
        found += unknown("--kv-transfer-config: secondary_tiers:", tier, takes)
    return found


def adapter_keys(spec: Mapping[str, Any]) -> list[str]:
    """Keys of a file tier's description that its class in LMCache never reads."""
    from lmcache.v1.distributed.l2_adapters import config as adapters

    adapters._ensure_config_loaded(spec["type"])
    kind = adapters._L2_ADAPTER_CONFIG_REGISTRY[spec["type"]]
    read = inspect.getsource(adapters) + inspect.getsource(kind)
    known = set(re.findall(r"\bd(?:\.get\(|\[)\s*\"(\w+)\"", read))
    return unknown("lmcache server: --l2-adapter: key", spec, known)


def cache_arguments(argv: list[str]) -> list[str]:
    """What `lmcache server` would refuse, ignore or fail on, in the arguments after `server`."""
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.distributed.config import parse_args_to_config
    from lmcache.v1.mp_observability.config import parse_args_to_observability_config
    from lmcache.v1.multiprocess import config as server

    parser = argparse.ArgumentParser(prog="lmcache server", allow_abbrev=False)
    ServerCommand().add_arguments(parser)
    args, problems = parse(parser, argv)
    if args is None:
        return [f"lmcache server: {problem}" for problem in problems]
    found: list[str] = []
    for text in args.l2_adapter:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # said below, in its words
            found += adapter_keys(json.loads(text))
    for read in (
        server.parse_args_to_mp_server_config,
        server.parse_args_to_http_frontend_config,
        server.parse_args_to_coordinator_config,
        parse_args_to_config,
        parse_args_to_observability_config,
    ):
        try:
            read(args)
        except Exception as error:  # of any kind: it is LMCache's answer
            found.append(f"lmcache server: {type(error).__name__}: {error}")
    return found


def environment_names(env: Mapping[str, str]) -> list[str]:
    """Variables named as vLLM's or LMCache's own that these do not know."""
    from vllm import envs

    given = [name for name in env if name.startswith("VLLM_")]
    found = unknown("environment variable", given, envs.environment_variables)
    given = [name for name in env if name.startswith("LMCACHE_")]
    return found + unknown(
        "environment variable", given, words_of("lmcache", r"LMCACHE_[A-Z0-9_]+")
    )


def words_of(package: str, pattern: str) -> set[str]:
    """All words of that form in a package's Python files: what its code can ask for."""
    found: set[str] = set()
    for place in importlib.import_module(package).__path__:
        for folder, _, names in os.walk(place):
            for name in (name for name in names if name.endswith(".py")):
                with open(os.path.join(folder, name), encoding="utf-8") as handle:
                    found |= set(re.findall(r"\b" + pattern, handle.read()))
    return found
