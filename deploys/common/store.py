"""The store of the shared tier on a host: what it is made of, for the stage and for drift."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyinfra import host
from pyinfra.api import FactBase
from typing_extensions import override

from deploys.common.context import Visit
from deploys.common.reasons import end_of, hide
from deploys.common.sent import ONHOST, sent
from kvhost.records.drift import Drift
from kvhost.report import ReportError
from kvhost.secrets import Secret, SecretError, certificates, private_key, shared_password
from kvhost.services.store import (
    CERT,
    CONFIG,
    KEY,
    START,
    USERS,
    Kind,
    config_text,
    drop_in_text,
    kind_of,
    start_text,
    store_drift,
    users_text,
)
from kvhost.settings import Settings


class StoreText(FactBase[str]):
    """What onhost/shared_store.py prints, in one round trip; it travels along."""

    @override
    def command(self, argv: tuple[str, ...]) -> str:
        return sent(("shared_store.py",), shlex.join(argv))

    @staticmethod
    @override
    def default() -> str:
        return ""


def store_argv(*words: str) -> tuple[str, ...]:
    """The script travels with the command: on a host with nothing but a store it lies nowhere."""
    text = (ONHOST / "shared_store.py").read_text(encoding="utf-8")
    return ("sh", "-c", f"python3 - {shlex.join(words)} <<'KVHOST-END'\n{text}\nKVHOST-END")


def answer(argv: tuple[str, ...]) -> dict[str, Any]:
    """Raises ReportError."""
    said = host.get_fact(StoreText, argv=argv)
    try:
        loaded = json.loads(said.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ReportError(f"the look at the store gave no answer: {end_of(said)}") from None
    if not isinstance(loaded, dict):
        raise ReportError(f"the look at the store gave no answer: {end_of(said)}")
    return loaded


def look(settings: Settings) -> dict[str, Any]:
    """What a store could be made of on this host. Raises ReportError."""
    place = ("--address", str(settings.shared_store_address))
    port = ("--port", str(settings.shared_store_port))
    return answer(("look", "--base", settings.base_dir, *place, *port))


@dataclass(frozen=True)
class Store:
    """One store as it should be."""

    at: Visit
    kind: Kind
    password: Secret
    cert: str | None
    key: Secret | None

    @property
    def plain(self) -> dict[str, str]:
        """Path -> content of root's files that hold no secret, 0644."""
        settings = self.at.settings
        texts = {
            CONFIG: config_text(settings, self.kind),
            self.kind.drop_in: drop_in_text(settings, self.kind),
        }
        return texts | ({CERT: self.cert} if self.cert is not None else {})

    @property
    def secret(self) -> dict[str, tuple[Secret, str]]:
        """Path -> content without its last newline, and owner of those that do, 0600."""
        users = Secret(users_text(self.password))
        files = {USERS: (users, self.kind.user)}
        if self.key is not None:
            files[KEY] = (self.key, self.kind.user)
        texts = (one.get_secret_value() for one, _ in files.values())
        start = start_text(*self.plain.values(), *texts)
        return {**files, START: (Secret(start), "root")}

    def state_words(self, verb: str) -> tuple[str, ...]:
        settings = self.at.settings
        place = ("--address", str(settings.shared_store_address))
        port = ("--port", str(settings.shared_store_port))
        tls = ("--tls",) if self.cert is not None else ()
        return (verb, "--kind", self.kind.name, *place, *port, *tls)


@dataclass(frozen=True)
class Secrets:
    """What of a store lies on the controller; certificate and key are None without TLS."""

    password: Secret
    cert: str | None = None
    key: Secret | None = None


def secrets_of(settings: Settings) -> Secrets:
    """Raises SecretError, which is this host's alone: the others go on."""
    password = shared_password(settings, os.environ)
    hide((password,))
    if password is None:
        raise SecretError("the store has no password: set shared_tier_password_file")
    if settings.shared_store_cert_file is None or settings.shared_store_key_file is None:
        return Secrets(password)
    cert = certificates("shared_store_cert_file", settings.shared_store_cert_file)
    key = private_key("shared_store_key_file", settings.shared_store_key_file)
    return Secrets(password, cert, key)


def drift_rows(at: Visit) -> list[Drift]:
    """What of this host's store is not as its settings say. Raises ReportError, SecretError."""
    settings = at.settings
    place = ("--address", str(settings.shared_store_address))
    port = ("--port", str(settings.shared_store_port))
    tls = ("--tls",) if settings.shared_store_cert_file is not None else ()
    seen = answer(("drift", *place, *port, *tls))
    store = store_of(at, {"packages": {seen["kind"]: "installed"}}, secrets_of(settings))
    return store_drift(store.plain, store.secret, seen)


def store_of(at: Visit, found: Mapping[str, Any], secrets: Secrets) -> Store:
    """By what look() found."""
    kind = kind_of(found["packages"])
    return Store(at, kind, secrets.password, secrets.cert, secrets.key)
