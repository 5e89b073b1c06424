"""What a single setting of the driver may be, and which of them fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvhost.schema.problems import Problem, Refusal, short
from kvhost.schema.values import one_line

if TYPE_CHECKING:
    from kvhost.schema.settings import Settings


def version(value: str) -> str:
    """A whole version of NVIDIA's driver: 580.95.05."""
    if not re.fullmatch(r"\d{3}\.\d{2,3}(\.\d{2})?", value):
        raise Refusal(f"must be a whole version of the driver, as 580.95.05, not {short(value)}")
    return value


def repository(value: str) -> str:
    """The address of a flat apt repository. Its value is not repeated where it holds a password."""
    one_line(value)
    try:
        url = urlsplit(value)
        credentials = url.username is not None or url.password is not None
    except ValueError:
        raise Refusal("is no address") from None
    if credentials:
        raise Refusal("holds a user or a password; put them in /etc/apt/auth.conf.d on the host")
    where = url.netloc if url.scheme in ("http", "https") else url.path.startswith("/")
    if url.scheme not in ("http", "https", "file") or not where or url.query or url.fragment:
        raise Refusal(
            f"must be the address of a flat apt repository (https://, http:// or file:/), not "
            f"{short(value)}"
        )
    if re.search(r"[\s'\"\\\[\]]", value):
        raise Refusal("has a space, a quote, a bracket or a backslash in it")
    return value


def driver_problems(s: Settings) -> Iterator[tuple[frozenset[str], Problem]]:
    """Yield the keys that a rule looks at, and what is wrong with them together."""
    both = ("driver_repository", "driver_repository_key")
    if (s.driver_repository is None) != (s.driver_repository_key is None):
        yield (
            frozenset(both),
            Problem(
                ", ".join(both),
                "a repository is used only with the key that it is signed with",
                "both, or neither",
            ),
        )
    for key in ("driver_reboot", "driver_version", "driver_repository"):
        if getattr(s, key) and not s.driver_install:
            yield (
                frozenset({key, "driver_install"}),
                Problem(
                    f"{key}, driver_install",
                    "says how a driver is installed, and none may be",
                    f"driver_install = true, or {key} left out",
                ),
            )
    if s.driver_install and s.accelerator == "cpu":
        yield (
            frozenset({"driver_install", "accelerator"}),
            Problem(
                "driver_install, accelerator",
                "with accelerator = cpu the GPU is left alone, and its driver too",
                "driver_install left out, or accelerator = 'auto'",
            ),
        )
