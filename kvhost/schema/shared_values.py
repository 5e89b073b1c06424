"""What a single setting of the shared tier may be, and which of them fit together."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from kvhost.basics import SHARED_PASSWORD_VARIABLE
from kvhost.schema.problems import Problem, Refusal, short
from kvhost.schema.values import one_line

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings

#: Networks that no router of the internet passes on (RFC 1918, RFC 4193). 100.64.0.0/10 is not
#: among them: behind a provider it is shared with its other customers.
_PRIVATE = tuple(
    ipaddress.ip_network(net)
    for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
_EXAMPLES = {"redis": "redis://10.0.0.5:6379", "s3": "s3+https://s3.example.org/kv-cache"}
_KINDS = {
    "s3": ("does not say by which server and whether with TLS", "s3"),
    "mooncake": (
        "Mooncake is not in this version: LMCache's wheel is built without it, and Mooncake itself "
        "is in no lock", "redis",
    ),
    "unix": ("a store behind a socket cannot be shared by several hosts", "redis"),
}  # fmt: skip
#: scheme -> that with TLS, and the port of a URL that names none
_TLS_OF = {"redis": "rediss", "s3+http": "s3+https"}
_PORTS = {"s3+http": 80, "s3+https": 443}
#: what every S3 takes (AWS: General purpose bucket naming rules)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_ACCESS = re.compile(r"[A-Za-z0-9._:+=@/-]{1,128}")
_SERVER_WIDE = (
    "of an eviction that works on keys with an expiry alone (volatile-…) the cache's keys, which "
    "have none, are never removed: a full store takes nothing more"
)
_EVICTIONS = {
    "noeviction": "a store that evicts nothing refuses every write once it is full, and the oldest "
    "prompts would stay for ever",
    "allkeys-random": "it removes what is used as readily as what is not",
    **dict.fromkeys(("volatile-lru", "volatile-lfu", "volatile-ttl", "volatile-random"),
                    _SERVER_WIDE),
}  # fmt: skip


#: a label of a host's name (RFC 1123); with _, which container networks have in theirs
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_USER = re.compile(r"[A-Za-z0-9._-]+")


def is_private(host: str) -> bool:
    """Whether a host is localhost, or an IP address that only its own network reaches."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(address in net for net in _PRIVATE)


def _is_host(host: str) -> bool:
    """Whether something can be reached by it: the IP address of one host, or a host's name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.removesuffix(".").split(".")
        numeric = re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1])  # 10.5: an address, in short
        return len(host) <= 253 and not numeric and all(map(_LABEL.fullmatch, labels))
    return not address.is_unspecified and not address.is_multicast


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def shared_tier(value: str) -> str:
    """redis://HOST:PORT or rediss://HOST:PORT, USER@ before it where the store has users;
    s3+http://HOST[:PORT]/BUCKET or s3+https://. Never repeats the value: it may hold a password."""
    one_line(value)
    scheme = value.split(":", 1)[0].lower()
    if scheme in _KINDS:
        what, kind = _KINDS[scheme]
        raise Refusal(what, _EXAMPLES[kind])
    s3 = scheme.startswith("s3+")
    example = _EXAMPLES["s3" if s3 else "redis"]
    try:
        url, port = urlsplit(value), urlsplit(value).port
    except ValueError:
        raise Refusal("is not a URL that can be read", example) from None
    if url.scheme not in (*_TLS_OF, *_TLS_OF.values()) or not url.hostname or not (s3 or port):
        if port == 0:
            raise Refusal("has port 0, which nothing listens on", example)
        raise Refusal("must be redis://HOST:PORT, or rediss://HOST:PORT with TLS; of S3 "
                      "s3+https://HOST/BUCKET", example)  # fmt: skip
    if url.password is not None:
        raise Refusal(
            "has a password in it (not shown), and settings are not secret: put it into the file "
            f"of shared_tier_password_file, or {SHARED_PASSWORD_VARIABLE}", example
        )  # fmt: skip
    if url.query or url.fragment or (url.path and not s3):
        raise Refusal("has something behind the port; keys are told apart by their names, not by "
                      "a database", example)  # fmt: skip
    if not value.isascii() or any(c in value for c in " '\"\\%"):
        raise Refusal("has a character in it that would need quoting", example)
    if port == 0:
        raise Refusal("has port 0, which nothing listens on", example)
    if s3:
        _bucket(url, example)
    elif url.username is not None and not _USER.fullmatch(url.username):
        raise Refusal("has a user (not shown) of other characters than A-Z a-z 0-9 . _ -", example)
    if not _is_host(url.hostname):
        raise Refusal("names no host that could be reached: write its name or its IP address",
                      example)  # fmt: skip
    return value


def _bucket(url: SplitResult, example: str) -> None:
    """Raises Refusal for what names no one bucket of an S3 server."""
    if url.username is not None:
        raise Refusal("has a user (not shown) in it: of S3 that is shared_tier_access_key", example)
    bucket, _, rest = url.path[1:].partition("/")
    if not bucket:
        raise Refusal("names no bucket", example)
    if rest or url.path.endswith("/"):
        raise Refusal("has something behind the bucket; kvhost's keys begin with kvhost/ in it",
                      example)  # fmt: skip
    fine = _BUCKET.fullmatch(bucket) and ".." not in bucket and not bucket.startswith("xn--")
    if not fine or re.fullmatch(r"[\d.]+", bucket):
        raise Refusal("names a bucket that no S3 takes: 3 to 63 of a-z 0-9 . - with a letter or "
                      "digit at both ends, and no IP address", example)  # fmt: skip


def region(value: str) -> str:
    if not _REGION.fullmatch(value):
        raise Refusal(f"is no name of a region: {short(value)}", "us-east-1")
    return value


def access_key(value: str) -> str:
    """An access key id. Never repeats it: it may be the secret one."""
    if not _ACCESS.fullmatch(value):
        raise Refusal("is none (not shown): one word of A-Z a-z 0-9 . _ : + = @ / -", "kvhost")
    return value


def parts_of(value: str) -> SplitResult:
    """Of an accepted `shared_tier`."""
    return urlsplit(value)


def port_of(url: SplitResult) -> int:
    return url.port or _PORTS[url.scheme]


def has_tls(url: SplitResult) -> bool:
    return url.scheme in _TLS_OF.values()


def is_s3(value: str | None) -> bool:
    """Of an accepted `shared_tier`, or of none."""
    return value is not None and urlsplit(value).scheme.startswith("s3+")


def store_address(value: str) -> str:
    """The one address that the store listens on; never all of the host's."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise Refusal(f"must be an IP address of the host, not {short(value)}") from None
    if address.is_unspecified or address.is_multicast or "%" in value:
        raise Refusal(f"is {short(value)}: name the one address that the other hosts reach it by")
    return value


def store_eviction(value: object) -> object:
    """Refuse, with the reason, what Redis has and a cache cannot use."""
    if isinstance(value, str) and value in _EVICTIONS:
        raise Refusal(f"must not be {value}: {_EVICTIONS[value]}", "allkeys-lru")
    return value


def shared_problems(s: Settings, password_in_env: bool) -> Iterator[tuple[frozenset[str], Problem]]:
    """Yield the keys that a rule looks at, and what is wrong with them together."""

    def found(keys: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
        return frozenset(keys), Problem(", ".join(keys), what, write)

    has_password = s.shared_tier_password_file is not None or password_in_env
    password = (
        "shared_tier_password_file = 'secrets/shared' (a file on the controller), or "
        f"{SHARED_PASSWORD_VARIABLE} in the controller's environment"
    )
    if s.shared_tier is not None:
        url = parts_of(s.shared_tier)
        host = url.hostname or ""
        if not has_password:
            yield found(
                ("shared_tier", "shared_tier_password_file"),
                "no password is set: whoever reaches the store reads all prompts in it, and can "
                "put wrong KV under them",
                password,
            )
        if not has_tls(url):
            port = "" if url.port is None else f":{url.port}"
            better = f"shared_tier = '{_TLS_OF[url.scheme]}://{_in_url(host)}{port}{url.path}'"
            if not is_private(host):
                yield found(
                    ("shared_tier",),
                    f"{host} is no private address, and without TLS password and prompts cross the "
                    "network in clear text",
                    f"{better}, or a private IP address",
                )
            if s.shared_tier_ca_file is not None:
                yield found(
                    ("shared_tier", "shared_tier_ca_file"),
                    "certificates mean something only with TLS",
                    f"{better}, or shared_tier_ca_file left out",
                )
        yield from _s3_problems(s)
    else:
        for key, what in _without_a_tier(s):
            uses_one = s.runner == "vllm" and not s.native
            named = "shared_tier" if uses_one else "shared_store_address"
            value = "rediss://store.example.org:6379" if uses_one else "10.0.0.5"
            write = f"{named} = '{value}', or {key} left out"
            yield found((key, named), f"{what}, and none is named", write)
    yield from _store_problems(s, has_password, password)


def _s3_problems(s: Settings) -> Iterator[tuple[frozenset[str], Problem]]:
    """What only S3 has, and what S3 cannot have."""

    def found(key: str, what: str, write: str) -> tuple[frozenset[str], Problem]:
        return frozenset(("shared_tier", key)), Problem(f"shared_tier, {key}", what, write)

    if is_s3(s.shared_tier):
        if s.shared_tier_access_key is None:
            yield found(
                "shared_tier_access_key",
                "an S3 store knows a secret key by its access key",
                "shared_tier_access_key = 'kvhost' (as the store names it)",
            )
        if s.shared_store_address is not None:
            yield found(
                "shared_store_address",
                "kvhost shared makes a Redis or Valkey, which the hosts would not use, and its "
                "password would be the secret key of the bucket",
                "one of the two left out",
            )
        return
    for key in ("shared_tier_access_key", "shared_tier_region"):
        if getattr(s, key) != type(s).model_fields[key].default:
            yield found(key, "is of S3 alone", f"{key} left out, or shared_tier = "
                        f"'{_EXAMPLES['s3']}'")  # fmt: skip


def _without_a_tier(s: Settings) -> Iterator[tuple[str, str]]:
    """What was given for a store that no setting names, and what it says of one."""
    no_store = s.shared_store_address is None and s.runner != "ollama"  # it has its own reason
    if s.shared_tier_password_file is not None and no_store:
        yield "shared_tier_password_file", "is the password of a store"
    if s.runner != "vllm" or s.native:
        return  # the others are refused with the reason of the runner, or of the kind of cache
    if s.shared_tier_ca_file is not None:
        yield "shared_tier_ca_file", "says how a store is recognised"
    for key, what in (
        ("shared_tier_timeout_s", "says how long a store is waited for"),
        ("shared_tier_access_key", "is the user of a store"),
        ("shared_tier_region", "says where a store is"),
    ):
        if getattr(s, key) != type(s).model_fields[key].default:
            yield key, what


def _store_problems(
    s: Settings, has_password: bool, password: str
) -> Iterator[tuple[frozenset[str], Problem]]:
    both = ("shared_store_cert_file", "shared_store_key_file")
    if (s.shared_store_cert_file is None) != (s.shared_store_key_file is None):
        yield (
            frozenset(both),
            Problem(", ".join(both), "a certificate is used only with its key", "both, or neither"),
        )
    if s.shared_store_address is None:
        return

    def found(more: tuple[str, ...], what: str, write: str) -> tuple[frozenset[str], Problem]:
        keys = ("shared_store_address", *more)
        return frozenset(keys), Problem(", ".join(keys), what, write)

    if not has_password:
        what = "a store without a password is never made, on loopback neither"
        yield found(("shared_tier_password_file",), what, password)
    if not is_private(s.shared_store_address) and s.shared_store_cert_file is None:
        what = f"{s.shared_store_address} is no private address, and TLS is not set"
        write = "both files for TLS, or an address of 10/8, 172.16/12, 192.168/16, fc00::/7"
        yield found(both, what, write)
    if s.shared_store_memory_gib is None:
        what = "how much memory the store may take is not guessed"
        yield found(("shared_store_memory_gib",), what, "shared_store_memory_gib = 16.0")
