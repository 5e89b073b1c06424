"""The way to a host of fleet.yaml that lies behind others: a login at each, a channel to the next.

pyinfra's own way (ProxyJump in a file) does not follow a jump of a jump host, takes no IPv6 address
with a port, and tells a jump host's faults as the target's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramiko import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    SSHException,
    Transport,
)
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra import logger
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient import SSHClient

from deploys.common.unreached import Place, explained
from kvhost.fleet import known_hosts
from kvhost.fleet.known_hosts import KNOWN_HOSTS

REPO = Path(__file__).resolve().parents[2]
#: ms without an answer after which a connection is lost; TCP alone waits a quarter of an hour
LOST_MS = 60_000


class Unreached(ConnectError):
    """Told already, of the host on the way that it is about."""


@dataclass(frozen=True)
class Login:
    """At one host on the way."""

    place: Place
    user: str | None
    key: Path | None = None
    password: str | None = None
    #: "once", "known" or "any", as in fleet.yaml
    host_key: str = "once"


@dataclass(eq=False)
class Way:
    """Given to paramiko in the place of a socket; `Prompt` opens it, at every attempt anew."""

    host: Any
    logins: Sequence[Login]
    #: of the last attempt; a channel needs the connection that it goes through
    clients: list[SSHClient] = field(default_factory=list)

    def open(self) -> Any:
        """A channel to the host. Raises Unreached."""
        self.close()
        _open.append(self)
        data = self.host.connector.data
        target = (str(data["ssh_hostname"]), int(data["ssh_port"]))
        places = [(one.place.address, one.place.port) for one in self.logins]
        channel = None
        for login, after in zip(self.logins, [*places[1:], target], strict=True):
            client = SSHClient()
            self.clients.append(client)
            try:
                client.connect(login.place.address, sock=channel, **self._arguments(login))
            except (OSError, EOFError, SSHException) as error:
                raise Unreached(explained(login.place, said(error))) from error
            if login.host_key == "any":
                record_any(self.host, client, login.place.address, login.place.port)
            channel = self._channel(client, login.place, after)
        return channel

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, SSHException):  # the link is lost
            while self.clients:
                self.clients.pop().close()

    def _arguments(self, login: Login) -> dict[str, Any]:
        data, state = self.host.connector.data, self.host.state
        more = data["ssh_paramiko_connect_kwargs"] or {}
        known = os.devnull if login.host_key == "any" else str(REPO / KNOWN_HOSTS)
        strict = "yes" if login.host_key == "known" else "accept-new"
        return {
            "port": login.place.port,
            "username": login.user,
            "password": login.password,
            # of the host's own key, opened already if it has a passphrase
            "pkey": more.get("pkey") or state.private_keys.get(data["ssh_key"]),
            "key_filename": str(login.key) if login.key else None,
            "timeout": state.config.CONNECT_TIMEOUT,
            "transport_factory": Prompt,
            "_pyinfra_ssh_config_file": os.devnull,
            "_pyinfra_ssh_known_hosts_file": known,
            "_pyinfra_ssh_strict_host_key_checking": strict,
        }

    def _channel(self, client: SSHClient, place: Place, after: tuple[str, int]) -> Any:
        transport = client.get_transport()
        assert transport is not None
        wait = self.host.state.config.CONNECT_TIMEOUT
        try:
            return transport.open_channel("direct-tcpip", after, ("127.0.0.1", 0), timeout=wait)
        except (OSError, EOFError, SSHException) as error:
            why = error.text if isinstance(error, ChannelException) else said(error)
            raise Unreached(
                f"{after[0]} port {after[1]} cannot be reached from {place}: {why}"
            ) from error


_open: list[Way] = []


@atexit.register  # after the run locks are given back, for it is registered before them
def _end() -> None:
    """The inner connections first: paramiko, in any order, ends one with a traceback."""
    for way in _open:
        client = way.host.connector.client
        with contextlib.suppress(OSError, EOFError, SSHException):
            if client is not None:
                client.close()
        way.close()


def record_any(host: Any, client: SSHClient, address: str, port: int) -> None:
    """host_key any: another key is taken, and recorded with what was there before."""
    transport = client.get_transport()
    assert transport is not None
    key = transport.get_remote_server_key()
    kind, text = key.get_name(), key.get_base64()
    told = known_hosts.record(REPO / KNOWN_HOSTS, address, port, kind, text)
    if told:
        logger.warning(f"{host.print_prefix}{told}")


def said(error: Exception) -> str:
    """In the words that pyinfra has for it."""
    if isinstance(error, BadHostKeyException):
        return f"Host key for {error.hostname} does not match."
    if isinstance(error, AuthenticationException):
        return f"Authentication error ({error})"
    if isinstance(error, socket.gaierror):
        return f"Could not resolve hostname ({error.strerror})"
    if isinstance(error, NoValidConnectionsError):  # of each address; its own number is None
        whys = {getattr(one, "strerror", None) or str(one) for one in error.errors.values()}
        return f"Could not connect ({', '.join(sorted(whys))})"
    if isinstance(error, OSError):
        return f"Could not connect ({error.strerror or error})"
    return f"SSH error ({error or type(error).__name__})"


def _end_when_lost(sock: Any) -> None:
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # no Linux
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 15),
        (socket.TCP_KEEPINTVL, 15),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, LOST_MS),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Prompt(Transport):
    """A connection whose other end is gone is ended, so that the run goes on, and nothing waits
    for an acknowledgement that the kernel of the other end delays, by 40 ms.

    Small packets go out at once (TCP_NODELAY). And what sshd says by itself after the login (its
    other host keys) is answered, with a message that means nothing: until then its kernel would
    hold back what it says next, that there is a channel.
    """

    def __init__(self, sock: Any, **more: Any) -> None:
        if isinstance(sock, Way):
            sock = sock.open()
        if hasattr(sock, "setsockopt"):  # a jump host's channel has none
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _end_when_lost(sock)
        super().__init__(sock, **more)

    def _parse_global_request(self, message: Any) -> None:
        super()._parse_global_request(message)  # type: ignore[misc]  # private to paramiko
        self.send_ignore(1)
