"""Where a model lies: its config.json, the bytes of its weights. Reads files, reaches no host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhost.llama.need import PLAIN, config_of, odd_count
from kvhost.onhost import gguf, model_look
from kvhost.sizing.kv_bytes import COMPUTED, SizeError
from kvhost.sizing.weights import weights_in_memory


@dataclass(frozen=True)
class ModelFiles:
    """What was found of a model. ``weights_bytes``: in memory, None where that cannot be told;
    ``missing``: files of the weights that its index names."""

    name: str
    config: Mapping[str, Any]
    weights_bytes: int | None
    missing: tuple[str, ...] = ()


def hub_cache() -> Path:
    """The Hugging Face cache of this machine, as its own library finds it."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def find_model(model: str) -> ModelFiles:
    """A directory, a config.json, or an id (org/name) at hand in the hub's cache.

    Raises SizeError with what was looked for and where.
    """
    try:
        return _find(model)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # a long name, ~ of nobody
        raise SizeError(f"{model[:200]!r} cannot be read: {error}") from error


def _find(model: str) -> ModelFiles:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _gguf(model, path)
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        path = _snapshot(model)
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        raise SizeError(
            f"no config.json at {config_path}: give a model's directory, its config.json, or an id "
            f"(org/name) that lies in {hub_cache()}"
        )
    try:
        config = model_look.config_of(str(config_path))
    except RecursionError:
        raise SizeError(f"{config_path} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise SizeError(f"{config_path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SizeError(f"{config_path} is no JSON object")
    told = model_look.weights_of(str(config_path.parent))
    found = weights_in_memory(told, config, COMPUTED)
    return ModelFiles(model, config, found, tuple(told["missing"]))


def _gguf(model: str, path: Path) -> ModelFiles:
    """A .gguf file of llama.cpp, by its header."""
    try:
        told = gguf.read_model(str(path))
    except gguf.NotGguf as error:
        raise SizeError(f"{path}: {error}") from error
    if (odd := odd_count(told)) is not None:
        raise SizeError(f"{path} says {odd[1]}, and a model has {odd[0]}: it is damaged")
    config = config_of(told)
    if config is None:
        kind = told["keys"].get("general.architecture")
        raise SizeError(
            f"{path}: an architecture ({kind}) whose KV is not known here; known of .gguf files "
            f"are {', '.join(PLAIN)}. Or give the config.json of the model that it was made of"
        )
    return ModelFiles(model, config, int(told["weights_bytes"]))


def _snapshot(model: str) -> Path:
    """The snapshot of a model that the hub's cache holds: that of main, else the only one."""
    home = hub_cache() / f"models--{model.replace('/', '--')}"
    main = home / "refs" / "main"
    if main.is_file():
        commit = main.read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", commit):
            raise SizeError(f"{main} names no snapshot")
        return home / "snapshots" / commit
    found = sorted((home / "snapshots").glob("*"))
    if len(found) > 1:
        raise SizeError(f"{model}: {len(found)} snapshots in {home}, none of them main: name one")
    if not found:
        raise SizeError(f"{model} is no path, and not at hand in {hub_cache()}; nothing is fetched")
    return found[0]
