"""How commands run pyinfra: from the working copy, with a log, with the hosts' progress shown."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from kvhost.commands import running
from kvhost.commands.run_log import secrets_of_env
from kvhost.working_copy import MARK, CopyError, check_version, root

FLEET_INVENTORY = "inventories/fleet.py"
#: of pyinfra and deploys/common/asked.py: arguments that cannot be meant, nothing was done
WRONG_USAGE = 2


def copy_root() -> Path:
    """The working copy, of this version. Raises click.ClickException."""
    try:
        top = root()
        check_version(top)
    except CopyError as error:
        raise click.ClickException(str(error)) from error
    if not Path.cwd().resolve().is_relative_to(top):  # nobody asked for that copy, or its hosts
        raise click.UsageError(
            f"no working copy in {Path.cwd()} or above it: cd {top}, which is one, or kvhost init "
            "DIR makes one"
        )
    return top


def program() -> str:
    """How this command is typed: its name where PATH has it, else its path."""
    own, known = Path(sys.argv[0]), shutil.which("kvhost")
    if own.name != "kvhost" or (known is not None and Path(known).resolve() == own.resolve()):
        return "kvhost"
    return str(own.absolute())


def default_inventory() -> str:
    """The fleet where fleet.yaml names hosts. Else in a clone this machine, as README.md begins.

    Raises click.UsageError in a copy that `kvhost init` made: there nobody asked for this machine.
    """
    from kvhost.fleet.yaml import FleetError

    top = copy_root()
    try:
        hosts = fleet_hosts(top)
    except FleetError:
        return FLEET_INVENTORY  # which says what is wrong with it
    made = (top / MARK).is_file()
    if not hosts and made:
        raise click.UsageError(
            f'no host yet in {top / "fleet.yaml"}: kvhost inventory add "ssh root@…", or '
            "--inventory inventory.py for this machine"
        )
    if not hosts:
        return "inventory.py"
    if not made and "@local" not in hosts:
        count = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        click.echo(f"fleet.yaml: {count}; this machine is not among them", err=True)
    return FLEET_INVENTORY


def fleet_hosts(top: Path) -> list[str]:
    """Names of the hosts in fleet.yaml; none where there is no such file. Raises FleetError."""
    path = top / "fleet.yaml"
    if not os.path.lexists(path):  # a link to nowhere is a fault of the fleet, not no fleet
        return []
    from kvhost.fleet.yaml import Fault, FleetError, read_yaml

    hosts = read_yaml(path).get("hosts") or {}
    if not isinstance(hosts, dict):
        raise FleetError(path, [Fault(1, "hosts", "must be keys with values", "hosts: {}")])
    return [str(name) for name in hosts]


def fleet_secrets(top: Path) -> list[str]:
    """What is to be masked in logs; none where fleet.yaml is not usable, and so no host reached."""
    path = top / os.environ.get("KVHOST_FLEET", "fleet.yaml")
    if not os.path.lexists(path):
        return []
    from kvhost.fleet.read import load_fleet, secrets_of
    from kvhost.fleet.yaml import FleetError

    try:
        found = secrets_of(load_fleet(path, folder=top), os.environ)
    except FleetError:
        return []
    return [secret.get_secret_value() for one in found.values() for secret in one.values()]


def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
    """Runs a deploy file from the root of the working copy; pyinfra's own exit code, or 130.

    Raises click.exceptions.Exit where pyinfra, or deploys/common/asked.py, refuses the arguments.
    """
    top = copy_root()
    if inventory.endswith(".py") and not (top / inventory).exists():
        raise click.ClickException(f"no such inventory: {top / inventory}")
    program = Path(sys.executable).with_name("pyinfra")
    if not program.exists():
        raise click.ClickException(
            f"no pyinfra beside {sys.executable}: bin/up sets up the environment"
        )
    # -m puts the working copy first on its path
    argv = [sys.executable, "-m", "deploys.start", inventory, deploy, *args]

    def secrets() -> list[str]:
        return [*secrets_of_env(os.environ), *fleet_secrets(top)]

    try:
        code = running.run(argv, top, top / "logs", Path(deploy).stem, secrets)
    except OSError as error:
        raise click.ClickException(f"no log can be written: {error}") from error
    if code == WRONG_USAGE:  # said already, and nothing was done: there is nothing to tell of
        raise click.exceptions.Exit(WRONG_USAGE)
    return code
