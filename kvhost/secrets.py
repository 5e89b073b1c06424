"""Secrets, read on the controller from a file or the environment, never from data of a host.

No error here ever has a secret in it, and a path only where a file was found: a path that leads
nowhere may be a key that was written into the wrong setting.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from kvhost.basics import (
    API_KEY_VARIABLE,
    HF_TOKEN_VARIABLE,
    SHARED_PASSWORD_VARIABLE,
    text_of,
)
from kvhost.schema.settings import Settings
from kvhost.schema.values import is_hub_id

_LARGEST = 4096  # bytes; more is some other file
_LARGEST_KEY = 16384  # the same of a private key; of RSA with 8192 bits it has 6500


class Secret(SecretStr):
    """Text that is shown as asterisks; `get_secret_value()` is the one way to it."""


class SecretError(ValueError):
    """A secret cannot be read or cannot be one; the message names the setting, never the value."""


def api_key(settings: Settings, env: Mapping[str, str]) -> Secret | None:
    """The key that clients must send: from api_key_file, else KVHOST_API_KEY of `env`, else None.

    Raises `SecretError` where a file is named, or the variable is set, and holds no usable key.
    """
    key = read_secret("api_key_file", settings.api_key_file, API_KEY_VARIABLE, env)
    if key is not None and settings.runner == "llama_server" and "," in key.get_secret_value():
        # it would take each part for a key of its own, and of a comma alone none at all
        raise SecretError(
            "the API key (api_key_file or KVHOST_API_KEY) has a comma in it, at which llama-server "
            "would part it into several keys: take one without"
        )
    if key is not None and settings.runner == "llama_server" and '"' in key.get_secret_value():
        raise SecretError(
            "the API key (api_key_file or KVHOST_API_KEY) has a double quote in it, which "
            "llama-server would take away: take one without"
        )
    return key


def hf_token(settings: Settings, env: Mapping[str, str]) -> Secret | None:
    """The token for the hub: from hf_token_file, else HF_TOKEN of `env`, else None.

    None too where model_source is not on the hub: a host gets no token that it has no use for.
    Raises `SecretError` like `api_key`.
    """
    if not is_hub_id(settings.model_source):
        return None
    return read_secret("hf_token_file", settings.hf_token_file, HF_TOKEN_VARIABLE, env)


def shared_password(settings: Settings, env: Mapping[str, str]) -> Secret | None:
    """The store's password: from shared_tier_password_file, else KVHOST_SHARED_PASSWORD of `env`.

    None where a host neither has a store nor uses one. Raises `SecretError` like `api_key`.
    """
    if settings.shared_tier is None and settings.shared_store_address is None:
        return None
    key, path = "shared_tier_password_file", settings.shared_tier_password_file
    return read_secret(key, path, SHARED_PASSWORD_VARIABLE, env)


def read_secret(
    key: str, path: str | None, variable: str, env: Mapping[str, str], *, word: bool = True
) -> Secret | None:
    """From a file, else from a variable of `env`, else None; not a `word`: it may have spaces, as
    passwords do. Raises `SecretError`."""
    if path is not None:
        try:
            file = Path(path).expanduser()
        except RuntimeError:
            raise SecretError(f"{key}: ~ leads to no home directory on the controller") from None
        return _usable(_file_text(key, file), f"{key}: {file}", word)
    if variable in env:
        return _usable(env[variable], f"{variable} in the controller's environment", word)
    return None


def certificates(key: str, path: str) -> str:
    """The text of a file on the controller with certificates, which are no secret. Raises
    `SecretError`."""
    try:
        file = Path(path).expanduser()
        text = text_of(file)
    except (RuntimeError, OSError, UnicodeDecodeError) as error:
        raise SecretError(f"{key}: the file cannot be read on the controller: {error}") from None
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY-----" in text:
        raise SecretError(f"{key}: {file} must hold certificates as PEM, and no private key")
    return text


def private_key(key: str, path: str) -> Secret:
    """A private key as PEM, from a file on the controller that its owner alone reads; without its
    last newline. Raises `SecretError`."""
    try:
        file = Path(path).expanduser()
    except RuntimeError:
        raise SecretError(f"{key}: ~ leads to no home directory on the controller") from None
    text = _file_text(key, file, _LARGEST_KEY)
    if "PRIVATE KEY-----" not in text or "ENCRYPTED" in text:
        raise SecretError(f"{key}: {file} must hold a private key as PEM, without a passphrase")
    return Secret(text.rstrip("\n"))


def _file_text(key: str, file: Path, largest: int = _LARGEST) -> str:
    """The text of a regular file that nobody but its owner can read or write."""
    try:
        # O_NONBLOCK: a pipe without a writer must be refused, not waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretError(
            f"{key}: the file cannot be opened on the controller ({error.strerror}); its path is "
            f"not shown, as it may be the secret itself; a relative one begins at {Path.cwd()}"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SecretError(f"{key}: {file} is not a regular file")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise SecretError(
                f"{key}: {file} has mode {mode:04o}, so that others than its owner can use it; "
                f"write: chmod 600 {file}"
            )
        content = os.read(descriptor, largest + 1)
    finally:
        os.close(descriptor)
    if len(content) > largest:
        raise SecretError(f"{key}: {file} has more than {largest} bytes, too long for a secret")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise SecretError(f"{key}: {file} has bytes in it that are not ASCII") from None


def _usable(text: str, where: str, one_word: bool) -> Secret:
    """One word of visible ASCII, as it is sent in a header; a newline at its end is dropped."""
    word = text.removesuffix("\n").removesuffix("\r")
    if not word:
        raise SecretError(f"{where} is empty; put the secret into it, or take it away")
    if not one_word:
        if not word.isprintable():
            raise SecretError(f"{where} has a newline or another control character inside")
        return Secret(word)
    if not (word.isascii() and word.isprintable() and " " not in word):
        raise SecretError(
            f"{where} has a space, a newline, a control character or one beyond ASCII inside; it "
            "must be a single word"
        )
    return Secret(word)
