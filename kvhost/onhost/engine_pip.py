"""What the host's own pip is told, said to uv, for engine.py, which this lies beside.

pip's options: pip.pypa.io/en/stable/cli/pip_install; uv's variables:
docs.astral.sh/uv/reference/environment. Values go by the environment, so that credentials in a
URL are in no process list; whatever is shown to people goes through `mask`.
"""

from __future__ import annotations

import ast
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from kvhost.onhost import bounded
else:  # it lies beside this file on a host, where there is no package kvhost
    import bounded

LIMIT_S = 120
#: the host's own variables that say where uv gets files; all its others would change the result
KEPT = (
    "UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_HTTP_", "UV_CONCURRENT_",
    "UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "UV_INSECURE_HOST", "UV_KEYRING_PROVIDER",
)  # fmt: skip
DROPPED = ("UV_", "PYTHON", "VIRTUAL_ENV", "CONDA_")
#: what uv says (in English whatever the locale) -> what it means, and what to do
HINTS = (
    (("os error 28",), "The disk is full: {free}."),
    (("os error 122",), "The disk quota is used up: {free}."),
    (
        ("hash mismatch",),
        "A file is not the one that was locked: do not work around this; look at the index.",
    ),
    (
        ("invalid peer certificate",),
        "The index's certificate is not trusted: name its authority to pip (pip config set "
        "global.cert FILE).",
    ),
    (
        ("failed to fetch", "error sending request", "failed to download"),
        "No network, a proxy that is not set, or the index is down. Where this host's pip looks "
        "(pip config list): {places}",
    ),
    (
        ("no solution found",),
        "None of the places where this host's pip looks (pip config list) has it: {places}",
    ),
)
SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def read_settings(python: str) -> dict[str, str]:
    """Settings of pip on this host: {"index-url": "…", …}. Raises OSError, ValueError."""
    done = bounded.run([python, "-m", "pip", "config", "list"], LIMIT_S)
    if done.code != 0:
        raise ValueError(f"{python} -m pip config list: {mask(done.err.strip())[-2000:]}")
    return parse_settings(done.out)


def of_bundle(bundle: str) -> dict[str, str]:
    """What takes the place of pip's settings where a bundle is installed from: no index at all."""
    return {"no-index": "1", "find-links": os.path.join(bundle, "wheels")}


def parse_settings(text: str) -> dict[str, str]:
    """From `pip config list`, which names a section in each key.

    The section "install" beats "global", the environment both. Raises ValueError.
    """
    rank = {"global": 0, "install": 1, ":env:": 2}
    best: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        key, sep, value = line.partition("=")
        section, dot, option = key.rpartition(".")
        if not sep or not dot or section not in rank:
            continue  # of another command
        try:
            plain = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            raise ValueError(f"pip's setting {key} cannot be read") from None
        if option not in best or rank[section] >= best[option][0]:
            best[option] = (rank[section], plain)
    return {option: value for option, (_, value) in best.items()}


def is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")


def local_path(link: str) -> str | None:
    """The path that a find-links entry names on this machine, None for a URL."""
    url = urllib.parse.urlsplit(link)
    if url.scheme == "file":
        return urllib.parse.unquote(url.path)
    return None if "://" in link else os.path.abspath(os.path.expanduser(link))


def find_links(pip: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(usable, missing): pip passes over a directory that is not there, uv would fail."""
    usable, missing = [], []
    for link in pip.get("find-links", "").split():
        path = local_path(link)
        if path is None or os.path.exists(path):
            usable.append(link if path is None else path)
        else:
            missing.append(link)
    return usable, missing


def uv_flags(pip: Mapping[str, str]) -> list[str]:
    """What uv takes by no variable."""
    return ["--no-index"] if is_on(pip.get("no-index", "")) else []


def uv_environment(
    pip: Mapping[str, str],
    wheels: str,
    torch_index: str | None,
    cache: str,
    host: Mapping[str, str],
) -> dict[str, str]:
    """Environment of uv: the same places that pip would look at, and the wheels of kvhost."""
    env = {
        key: value
        for key, value in host.items()
        if key.startswith(KEPT) or not key.startswith(DROPPED)
    }
    for option, variable in (
        ("index-url", "UV_DEFAULT_INDEX"),
        ("cert", "SSL_CERT_FILE"),
        ("client-cert", "SSL_CLIENT_CERT"),
        ("trusted-host", "UV_INSECURE_HOST"),
        ("default-timeout", "UV_HTTP_TIMEOUT"),
        ("timeout", "UV_HTTP_TIMEOUT"),
        ("retries", "UV_HTTP_RETRIES"),
    ):
        if pip.get(option):
            env[variable] = " ".join(pip[option].split())
    if os.path.isdir(pip.get("cert", "")):
        env["SSL_CERT_DIR"] = env.pop("SSL_CERT_FILE")
    if not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & set(env) and os.path.exists(SYSTEM_CERTIFICATES):
        env["UV_SYSTEM_CERTS"] = "1"  # what the host trusts, a company's own authority included
    extra = pip.get("extra-index-url", "").split() + ([torch_index] if torch_index else [])
    if extra:
        env["UV_EXTRA_INDEX_URL"] = " ".join(extra)
    if pip.get("proxy"):
        for scheme in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            env[scheme] = env[scheme.lower()] = pip["proxy"]
    links = [*find_links(pip)[0], wheels]
    env["UV_FIND_LINKS"] = ",".join(link for link in links if "://" in link or os.path.exists(link))
    env.update(
        # several indexes may offer a package; which file is right is said by the hash alone
        UV_INDEX_STRATEGY="unsafe-best-match",
        UV_CACHE_DIR=cache,
        UV_NO_PROGRESS="1",
        UV_NO_CONFIG="1",
        UV_PYTHON_DOWNLOADS="never",
        LC_ALL="C.UTF-8",
    )
    return env


def places(pip: Mapping[str, str], torch_index: str | None) -> str:
    """Where uv looks, for people."""
    found = []
    if not uv_flags(pip):
        found.append("index " + pip.get("index-url", "https://pypi.org/simple"))
        found += ["index " + url for url in pip.get("extra-index-url", "").split()]
        found += ["index " + torch_index] if torch_index else []
    found += ["find-links " + link for link in find_links(pip)[0]]
    return mask(", ".join(found) or "nowhere (no-index is set, and no find-links)")


def mask(text: str) -> str:
    """``text`` without user names, passwords and tokens in its URLs."""
    text = re.sub(r"(?<=://)[^\s/]+@", "***@", text)
    return re.sub(r"(://[^\s?]+)\?[^\s)'\"]+", r"\1?***", text)


def hint(said: str, places: str, free: str) -> str:
    """What to do about what uv said, "" when it is clear by itself."""
    lower = said.lower()
    text = next((text for marks, text in HINTS if any(mark in lower for mark in marks)), "")
    return text.replace("{places}", places).replace("{free}", free)
