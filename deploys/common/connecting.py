"""What kvhost adds to pyinfra's connecting: errors with the next step, sudo's password, no sftp.

pyinfra itself fails one host where its connector raises ConnectError, so all of it happens inside
of the connector's own `connect`.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramiko import SFTPClient, SSHException, Transport
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra import context, logger
from pyinfra.api import StringCommand
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.state import BaseStateCallback
from pyinfra.connectors.scp import SCPClient

from deploys.common import asked, early
from deploys.common.journal import heed_interrupts
from deploys.common.reasons import hide
from deploys.common.sudo import with_sudo
from kvhost.basics import lenient_output
from kvhost.fleet import known_hosts, ssh_key
from kvhost.fleet.known_hosts import KNOWN_HOSTS
from kvhost.records import journal
from kvhost.records.progress import tell

if TYPE_CHECKING:  # nothing is loaded before the hosts are connected to that can wait until then
    from kvhost.secrets import Secret

REPO = Path(__file__).resolve().parents[2]

#: host -> "password" | "sudo_password" -> secret; never among the hosts' data, which are shown
_given: dict[str, Mapping[str, Secret]] = {}


def watch() -> None:
    """Called by config.py, before there is an inventory."""
    heed_interrupts()
    lenient_output()
    # its thread tells what it then raises, with a traceback; --debug-all still shows it
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    options = asked.given()
    asked.check_data(options)
    asked.check_ways(options)
    early.watch(options)
    state = context.ctx_state.get()
    init = state.init

    def with_watch(inventory: Any, *args: Any, **kwargs: Any) -> None:
        asked.check_hosts(inventory, options, kwargs.get("initial_limit"))
        init(
            inventory, *args, **kwargs
        )  # makes the list of the handlers, so that none can be added before
        state.add_callback_handler(Watch())

    state.init = with_watch


def fleet_inventory(path: Path | None = None) -> dict[str, list[Any]]:
    """Group -> hosts of fleet.yaml, for an inventory file. Raises PyinfraError."""
    from kvhost.fleet.read import FLEET_VARIABLE, load_fleet, pyinfra_hosts, secrets_of
    from kvhost.fleet.yaml import FleetError

    given = path or REPO / os.environ.get(FLEET_VARIABLE, "fleet.yaml")
    try:
        fleet = load_fleet(given, folder=REPO if path is None else None, env=os.environ)
        hosts = pyinfra_hosts(fleet)
        _given.update(secrets_of(fleet, os.environ))
        hide(secret for given in _given.values() for secret in given.values())
        (REPO / KNOWN_HOSTS).touch()
    except FleetError as error:
        raise PyinfraError(str(error)) from None
    except OSError as error:
        what = f"the working copy must be one that can be written: {error}. No host was reached."
        raise PyinfraError(what) from None
    return hosts


class Watch(BaseStateCallback):
    """Each host as it connects, and each of its operations, for who shows the progress."""

    @staticmethod
    def host_before_connect(state: Any, host: Any) -> None:
        connector = host.connector
        if hasattr(connector, "make_paramiko_kwargs") and not hasattr(connector, "kvhost"):
            connector.kvhost = True
            connector.connect = _connecting(host, connector.connect)
            connector.get_file_transfer_connection = _transfer(host)
        tell(host.name, "connecting")

    @staticmethod
    def host_connect(state: Any, host: Any) -> None:
        tell(host.name, "connected")
        if not hasattr(host.connector, "kvhost"):
            early.begin(host)

    @staticmethod
    def host_connect_error(state: Any, host: Any, error: Exception) -> None:
        tell(host.name, "unreachable", str(error))
        # now: where nobody is reached, no deploy begins that could tell it
        journal.tell("unreachable", host=host.name, why=str(error))

    @staticmethod
    def operation_host_start(state: Any, host: Any, op_hash: str) -> None:
        tell(host.name, "step", _names(state, op_hash), len(host.op_hash_order))

    @staticmethod
    def operation_host_success(state: Any, host: Any, op_hash: str, retry_count: int = 0) -> None:
        tell(host.name, "done", _names(state, op_hash))

    @staticmethod
    def operation_host_error(
        state: Any, host: Any, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        tell(host.name, "failed", _names(state, op_hash))


def _names(state: Any, op_hash: str) -> str:
    return ", ".join(sorted(state.get_op_meta(op_hash).names))


def _connecting(host: Any, connect: Callable[[], None]) -> Callable[[], None]:
    def connected() -> None:
        secret = _given.get(host.name, {}).get("password")
        password = secret.get_secret_value() if secret else host.connector.data["ssh_password"]
        if password:
            host.connector.data["ssh_password"] = Hidden(password)
        given = host.connector.data["ssh_paramiko_connect_kwargs"] or {}
        host.connector.data["ssh_paramiko_connect_kwargs"] = {
            "transport_factory": Prompt,
            **given,
        }
        try:
            _key(host)
            connect()
        except ConnectError as error:
            raise ConnectError(_explained(host, _plain(error))) from error
        except ssh_key.KeyFault as error:
            raise ConnectError(f"ssh_key (in fleet.yaml: key): {error}") from error
        except PyinfraError as error:  # all else that it says of a key is told by _key
            why = f"{error}; the passphrase that was typed does not open it"
            raise ConnectError(f"ssh_key (in fleet.yaml: key): {why}") from error
        except Exception as error:  # pyinfra would stop all hosts: a port that is no number, …
            said = f"{type(error).__name__}: {error}"
            raise ConnectError(f"cannot be connected to with what is set: {said}") from error
        if host.connector.data["ssh_known_hosts_file"] == "/dev/null":
            _any_key(host)
        if not early.begin(host) and host.data.get("_sudo"):
            with_sudo(host, _given.get(host.name, {}).get("sudo_password"))

    return connected


class Hidden(str):
    """A password for paramiko, whose arguments pyinfra shows with --debug."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


class Prompt(Transport):
    """Nothing waits for an acknowledgement that the kernel of the other end delays, by 40 ms.

    Small packets go out at once (TCP_NODELAY). And what sshd says by itself after the login (its
    other host keys) is answered, with a message that means nothing: until then its kernel would
    hold back what it says next, that there is a channel.
    """

    def __init__(self, sock: Any, **more: Any) -> None:
        if hasattr(sock, "setsockopt"):  # a jump host's channel has none
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(sock, **more)

    def _parse_global_request(self, message: Any) -> None:
        super()._parse_global_request(message)  # type: ignore[misc]  # private to paramiko
        self.send_ignore(1)


def _key(host: Any) -> None:
    """Its key is one; with a passphrase, the one that ssh-agent holds. Raises KeyFault."""
    data = host.connector.data
    if not data["ssh_key"] or data["ssh_key"] in host.state.private_keys:
        return
    path = Path(data["ssh_key"]).expanduser()
    if not path.is_absolute() and not ssh_key.there(path):
        path = Path(host.state.cwd or ".", path)  # where pyinfra looks next
    try:
        ssh_key.check(path, data["ssh_key_password"] or None)
    except ssh_key.Encrypted:
        held = ssh_key.of_agent(path)
        if held is not None:  # of a host with ssh_key, pyinfra does not ask the agent
            more = {**(data["ssh_paramiko_connect_kwargs"] or {}), "pkey": held}
            data["ssh_paramiko_connect_kwargs"] = more
            data["ssh_key"] = None
            data["ssh_allow_agent"] = data["ssh_look_for_keys"] = False
        elif not ssh_key.can_ask():
            raise


def _place(host: Any) -> tuple[str, int]:
    data = host.connector.data
    return str(data["ssh_hostname"] or host.name), int(data["ssh_port"] or 22)


def _plain(error: ConnectError) -> str:
    """What pyinfra says of it; of a connection that did not come about what the system says."""
    cause = error.__context__
    if isinstance(cause, NoValidConnectionsError):  # of each address; its own number is None
        whys = {getattr(one, "strerror", None) or str(one) for one in cause.errors.values()}
        return f"Could not connect ({', '.join(sorted(whys))})"
    return str(error)


#: paramiko's words where what answers begins as no sshd does
_NO_SSH = ("SSH protocol banner", "Indecipherable protocol version", "Invalid SSH banner")


def _explained(host: Any, said: str) -> str:
    """The error with what to do about it."""
    address, port = _place(host)
    if "does not match" in said:
        return (
            f"{address} port {port} shows another host key than the one kept in {KNOWN_HOSTS}. "
            "Either the machine is another one (a provider gave the address to a new one), or "
            "somebody stands in between. If you know that it is new: "
            f"kvhost inventory new-key {shlex.quote(host.name)}"
        )
    if "StrictPolicy" in said:
        return (
            f"{address} port {port} is not in {KNOWN_HOSTS}, and host_key is known. Put its key "
            "there, from the provider's page or the machine's console, or set host_key: once"
        )
    if "Authentication error" in said:
        return (
            f"{address} port {port} lets nobody in with this login and key: {said}. Is user right, "
            "and is the key (key: FILE) among the machine's authorized_keys?"
        )
    if any(words in said for words in _NO_SSH):
        return (
            f"{address} port {port} cannot be reached by SSH: it takes the connection, and then "
            "closes it or says what is no SSH. Is it sshd's port? A provider's proxy does so too "
            "while the machine still starts, and sshd where too many log in at once"
        )
    if "resolve" in said:
        return f"{address}: no such name: {said}"
    if "Could not connect" in said or "timed out" in said or "SSH error" in said:
        return f"{address} port {port} cannot be reached: {said}"
    return said


def _any_key(host: Any) -> None:
    """host_key any: another key is taken, and recorded with what was there before."""
    key = host.connector.client.get_transport().get_remote_server_key()
    address, port = _place(host)
    told = known_hosts.record(REPO / KNOWN_HOSTS, address, port, key.get_name(), key.get_base64())
    if told:
        logger.warning(f"{host.print_prefix}{told}")


def _transfer(host: Any) -> Callable[[], Any]:
    """Files by SFTP; by SCP where the host's sshd has none. Raises OSError where it has neither."""
    kept: dict[Any, Any] = {}  # one a connection: a host that was rebooted has another

    def transfer() -> Any:
        transport = host.connector.client.get_transport()
        if transport not in kept:
            kept.clear()
            kept[transport] = _client(host, transport)
        return kept[transport]

    transfer.cache = kept  # type: ignore[attr-defined]  # pyinfra clears it when it disconnects
    return transfer


def _client(host: Any, transport: Any) -> Any:
    if host.connector.data["ssh_file_transfer_protocol"] == "scp":
        return SCPClient(transport)
    try:
        return SFTPClient.from_transport(transport)
    except (SSHException, EOFError):
        ok, _ = host.run_shell_command(StringCommand("command -v scp"), _sudo=False)
        if not ok:
            raise OSError(
                "sshd has no sftp and there is no scp: on the host, apt-get install "
                "openssh-sftp-server, or openssh-client for scp"
            ) from None
        logger.info(f"{host.print_prefix}sshd has no sftp: files go by scp")
        return SCPClient(transport)
