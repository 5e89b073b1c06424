"""What kvhost adds to pyinfra's connecting: errors with the next step, sudo's password, no sftp.

pyinfra itself fails one host where its connector raises ConnectError, so all of it happens inside
of the connector's own `connect`.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramiko import BadHostKeyException, SFTPClient, SSHException
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
from deploys.common.unreached import Place, explained
from deploys.common.way import Login, Prompt, Unreached, Way, record_any, said
from kvhost.basics import lenient_output
from kvhost.fleet import known_hosts, ssh_key
from kvhost.fleet.known_hosts import KNOWN_HOSTS
from kvhost.records import journal
from kvhost.records.progress import tell

if TYPE_CHECKING:  # nothing is loaded before the hosts are connected to that can wait until then
    from kvhost.fleet.read import Fleet
    from kvhost.secrets import Secret

REPO = Path(__file__).resolve().parents[2]

#: host -> "password" | "sudo_password" -> secret; never among the hosts' data, which are shown
_given: dict[str, Mapping[str, Secret]] = {}
#: where the hosts of this run come of it
_fleet: Fleet | None = None


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
    global _fleet
    from kvhost.fleet.read import FLEET_VARIABLE, load_fleet, pyinfra_hosts, secrets_of
    from kvhost.fleet.yaml import FleetError

    given = path or REPO / os.environ.get(FLEET_VARIABLE, "fleet.yaml")
    try:
        fleet = load_fleet(given, folder=REPO if path is None else None, env=os.environ)
        _fleet, hosts = fleet, pyinfra_hosts(fleet)
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
        data = host.connector.data
        secret = _given.get(host.name, {}).get("password")
        password = secret.get_secret_value() if secret else data["ssh_password"]
        if password:
            data["ssh_password"] = Hidden(password)
        given = data["ssh_paramiko_connect_kwargs"] or {}
        way = given.get("sock") or _way(host)  # it is there after a reboot
        by_way = {"sock": way} if way else {}
        data["ssh_paramiko_connect_kwargs"] = {"transport_factory": Prompt, **given, **by_way}
        try:
            _key(host)
            connect()
        except Exception as error:
            if way:
                way.close()
            raise ConnectError(_why(host, error)) from error
        if data["ssh_known_hosts_file"] == "/dev/null":
            record_any(host, host.connector.client, *_address(host))
        if not early.begin(host) and host.data.get("_sudo"):
            with_sudo(host, _given.get(host.name, {}).get("sudo_password"))

    return connected


def _why(host: Any, error: Exception) -> str:
    """What pyinfra would stop all hosts for is told of this one too: a port that is no number, …"""
    below = error.__context__
    if isinstance(error, Unreached):
        return str(error)
    if isinstance(error, ConnectError):
        return explained(_place(host, below), _plain(error))
    if isinstance(error, ssh_key.KeyFault):
        return f"ssh_key (in fleet.yaml: key): {error}"
    if isinstance(error, PyinfraError):  # all else that it says of a key is told by _key
        why = f"{error}; the passphrase that was typed does not open it"
        return f"ssh_key (in fleet.yaml: key): {why}"
    if isinstance(below, BadHostKeyException):  # of a hop, of which pyinfra does not know the port
        return explained(_place(host, below), said(below))
    return f"cannot be connected to with what is set: {type(error).__name__}: {error}"


class Hidden(str):
    """A password for paramiko, whose arguments pyinfra shows with --debug."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


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


def _address(host: Any) -> tuple[str, int]:
    data = host.connector.data
    return str(data["ssh_hostname"] or host.name), int(data["ssh_port"] or 22)


def _place(host: Any, error: BaseException | None) -> Place:
    """The host as an error tells of it; `error`: what lies below it, which may be a hop's."""
    address, port = _address(host)
    if _fleet is not None and host.name in _fleet.file.hosts:
        from kvhost.fleet.read import FLEET_VARIABLE

        again = f"kvhost inventory new-key {shlex.quote(host.name)}"
        if FLEET_VARIABLE in os.environ:  # `inventory add`: fleet.yaml has not this address yet
            again = "the same command with --new-key"
        return Place(address, port, KNOWN_HOSTS, again)
    client = host.connector.client
    named = error.hostname if isinstance(error, BadHostKeyException) else address
    ask = f"`ssh {shlex.quote(named)}` says which line of which file it is"
    place = Place(
        address, port, "your known_hosts", ask,
        login="Is ssh_user right, and is the key (ssh_key) among the machine's authorized_keys?",
        once='ssh_strict_host_key_checking to "accept-new"',
        strict='ssh_strict_host_key_checking is "yes"',
    )  # fmt: skip
    if client is not None and not hasattr(client, "_ssh_config"):  # set once the way is open
        return replace(place, role="a jump host (ProxyJump of your SSH configuration) before ")
    kept = getattr(client, "_host_keys_filename", None)
    if not kept:
        return place
    file = str(Path(kept).absolute())
    entry = known_hosts.entry_name(named, int(client._ssh_config.get("port", port)))
    forget = f"ssh-keygen -R {shlex.quote(entry)} -f {shlex.quote(file)}"
    return replace(place, known=file, forget=forget)


def _way(host: Any) -> Way | None:
    """The way to a host of the fleet that lies behind others."""
    if _fleet is None or host.name not in _fleet.file.hosts:
        return None
    from kvhost.fleet.read import key_path
    from kvhost.fleet.ways import way_to

    logins = []
    for hop in way_to(_fleet.file, host.name):
        entry = _fleet.file.hosts[hop.host] if hop.host else None
        at = f"[{hop.address}]:{hop.port}" if ":" in hop.address else f"{hop.address}:{hop.port}"
        place = Place(
            hop.address, hop.port, KNOWN_HOSTS, f"kvhost inventory new-key {shlex.quote(at)}",
            login="Is the user right (jump: USER@HOST), and is the key (key: FILE of "
            f"{hop.host or host.name}) among its authorized_keys?",
            role=f"the jump host {hop.host + ', ' if hop.host else ''}",
        )  # fmt: skip
        password = _given.get(hop.host or "", {}).get("password")
        logins.append(
            Login(
                place,
                hop.user,
                key_path(_fleet.folder, entry.key) if entry and entry.key else None,
                Hidden(password.get_secret_value()) if password else None,
                entry.host_key if entry else "once",
            )
        )
    return Way(host, logins) if logins else None


def _plain(error: ConnectError) -> str:
    """What pyinfra says of it; of a connection that did not come about what the system says."""
    cause = error.__context__
    return said(cause) if isinstance(cause, NoValidConnectionsError) else str(error)


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
