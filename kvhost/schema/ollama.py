"""The settings of the runner Ollama: where it comes from, and how its server is set."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from kvhost.schema import values
from kvhost.schema.field import Flat, setting
from kvhost.schema.problems import Refusal, short

_OLLAMA = "Ollama"
_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}")
_DURATION = re.compile(r"-1|0|[1-9][0-9]{0,4}(?:s|m|h)")


def archive(value: str) -> str:
    """A path on the host, controller: and a path, or a URL, with the digest. Never repeats it."""
    values.one_line(value)
    target, _, digest = value.rpartition("#")
    if not _SHA256.fullmatch(digest):
        raise Refusal("must end in #sha256= and the 64 digits (0-9 a-f) of the archive's digest")
    if values.is_sent(target):
        if not target.removeprefix(values.SENT).strip():
            raise Refusal("names no file after controller:")
    elif target.startswith("/"):
        values.host_path(target)
    else:
        values.path_of_url(target)
    return value


def model_digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise Refusal("must be the 12 digits that `ollama list` shows, or all 64 (0-9 a-f)")
    return value


def keep_alive(value: str) -> str:
    if not _DURATION.fullmatch(value):
        raise Refusal(f"must be a time such as 30m, or -1 for ever, not {short(value)}")
    return value


def archive_parts(value: str) -> tuple[str, str]:
    """Where an accepted `ollama_archive` is, and its sha256."""
    target, _, digest = value.rpartition("#sha256=")
    return target, digest


_Archive = Annotated[str, AfterValidator(archive)]
_ModelDigest = Annotated[str, AfterValidator(model_digest)]
_KeepAlive = Annotated[str, AfterValidator(keep_alive)]


class OllamaSettings(Flat):
    """Used with runner = 'ollama' alone; given with another runner they are refused."""

    ollama_archive: _Archive | None = setting(
        _OLLAMA,
        None,
        "Archive of Ollama's for Linux (.tgz or .tar.zst) with its digest: an absolute path on the "
        "host, a path on the controller after controller:, or a URL; without it, the "
        "ollama.service that is on the host is adopted by a drop-in.",
        example=f"/srv/ollama-linux-amd64.tgz#sha256={'0' * 64}",
    )
    ollama_kv_cache_type: Literal["f16", "q8_0", "q4_0"] = setting(
        _OLLAMA,
        "f16",
        "Type that Ollama keeps KV in (OLLAMA_KV_CACHE_TYPE); the run fails where another one is "
        "in force once the model is loaded.",
        example="q8_0",
    )
    ollama_flash_attention: Literal["auto", "on", "off"] = setting(
        _OLLAMA,
        "auto",
        "Whether Ollama uses flash attention (OLLAMA_FLASH_ATTENTION); auto is on with a quantised "
        "KV type, which needs it, and else Ollama's own choice.",
        example="on",
    )
    ollama_num_parallel: int | None = setting(
        _OLLAMA,
        None,
        "Requests that a model answers at once, each with a KV of its own (OLLAMA_NUM_PARALLEL); "
        "without it, Ollama's own choice.",
        unit="requests",
        example=2,
        ge=1,
        le=256,
    )
    ollama_keep_alive: _KeepAlive | None = setting(
        _OLLAMA,
        None,
        "How long a model, and all KV with it, stays in memory after its last request "
        "(OLLAMA_KEEP_ALIVE); -1 is for ever, and without it Ollama's own 5m.",
        example="24h",
    )
    ollama_model_digest: _ModelDigest | None = setting(
        _OLLAMA,
        None,
        "Digest of the model as `ollama list` shows it; one of another digest is refused.",
        example="a80c4f17acd5",
    )
    ollama_open: bool = setting(
        _OLLAMA,
        False,
        "Whether api_host may be beyond loopback, where everybody who reaches it may use, pull and "
        "delete models: Ollama asks for no key.",
        example=True,
    )
