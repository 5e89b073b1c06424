"""Whether a file is a private key that a connection can use, and if not, what to write instead.

The kinds of key are those that pyinfra's connector takes: RSA, ECDSA and Ed25519.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paramiko import ECDSAKey, Ed25519Key, PasswordRequiredException, RSAKey, SSHException
from paramiko.agent import Agent, AgentKey

_KINDS = (RSAKey, ECDSAKey, Ed25519Key)
_LONGEST = 1 << 16  # bytes; a key of RSA with 16384 bits has 13 KiB


class KeyFault(Exception):
    """What is wrong with a key, which file it is, and what to write; one line."""


class Encrypted(KeyFault):
    """It has a passphrase, which was not given."""


def there(path: Path) -> bool:
    """Whether a regular file is there: a pipe would be waited for."""
    try:
        return path.is_file()
    except OSError:  # its name is too long, its directory closed
        return False


def check(path: Path, passphrase: str | None = None) -> None:
    """Raises KeyFault; Encrypted where there is a passphrase and none was given."""
    if not there(path):
        raise KeyFault(
            f"no such file on the controller: {path}. Write the private key that this host knows; "
            "ssh-keygen -t ed25519 makes one"
        )
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST)
    except OSError as error:
        raise KeyFault(
            f"{path} cannot be read: {error.strerror}. Write a key of your own"
        ) from None
    if text.startswith((b"ssh-", b"ecdsa-", b"sk-", b"-----BEGIN PUBLIC", b"---- BEGIN SSH2")):
        private = path.with_suffix("") if path.suffix == ".pub" else "the file without .pub"
        raise KeyFault(f"{path} is a public key. Write the private one: {private}")
    if text.startswith(b"PuTTY-User-Key-File"):
        raise KeyFault(
            f"{path} is a key of PuTTY. Write what this makes of it: "
            f"puttygen {path} -O private-openssh -o NEW"
        )
    if not _loads(path, None):
        if passphrase is None:
            raise Encrypted(
                f"{path} has a passphrase, and there is no terminal to ask for it. Write "
                f"ssh-add {path} first, with {path.name}.pub beside it"
            )
        if not _loads(path, passphrase):
            raise KeyFault(f"{path}: the passphrase of ssh_key_password does not open it")


def _loads(path: Path, passphrase: str | None) -> bool:
    """False if it is another passphrase's. Raises KeyFault if it is no key at all."""
    for kind in _KINDS:
        try:
            kind.from_private_key_file(str(path), passphrase)
            return True
        except PasswordRequiredException:
            return False
        except SSHException:  # of another kind
            continue
        except Exception:  # paramiko's parsers raise what they stumble over
            continue
    if passphrase is not None:
        return False
    raise KeyFault(
        f"{path} is not a private key of RSA, ECDSA or Ed25519. Write one; "
        "ssh-keygen -t ed25519 makes one"
    )


def of_agent(path: Path) -> AgentKey | None:
    """The key of ssh-agent (SSH_AUTH_SOCK) whose public part lies beside ``path``, as FILE.pub.

    Each call has a connection to the agent of its own: hosts sign at the same time.
    """
    try:
        words = Path(f"{path}.pub").read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return None
    try:
        held = Agent().get_keys()
    except (OSError, SSHException):  # the agent is gone
        return None
    return next((key for key in held if key.get_base64() in words), None)


def can_ask() -> bool:
    """Whether a passphrase can be asked for, as getpass does: on the terminal of this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return sys.stdin is not None and sys.stdin.isatty()
    return True
