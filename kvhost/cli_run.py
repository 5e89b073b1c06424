"""How commands run pyinfra: from the working copy, with a log, with the hosts' progress shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from kvhost import running
from kvhost.run_log import secrets_of_env
from kvhost.working_copy import CopyError, check_version, root

FLEET_INVENTORY = "inventories/fleet.py"


def copy_root() -> Path:
    """The working copy, of this version. Raises click.ClickException."""
    try:
        top = root()
        check_version(top)
    except CopyError as error:
        raise click.ClickException(str(error)) from error
    return top


def default_inventory() -> str:
    """The fleet where fleet.yaml names hosts, else this machine."""
    path = copy_root() / "fleet.yaml"
    if not os.path.lexists(path):  # a link to nowhere is a fault of the fleet, not this machine
        return "inventory.py"
    from kvhost.fleet_yaml import FleetError, read_yaml

    try:
        return FLEET_INVENTORY if read_yaml(path).get("hosts") else "inventory.py"
    except FleetError:
        return FLEET_INVENTORY  # which says what is wrong with it


def fleet_secrets(top: Path) -> list[str]:
    """What is to be masked in logs; none where fleet.yaml is not usable, and so no host reached."""
    path = top / os.environ.get("KVHOST_FLEET", "fleet.yaml")
    if not os.path.lexists(path):
        return []
    from kvhost.fleet import load_fleet, secrets_of
    from kvhost.fleet_yaml import FleetError

    try:
        found = secrets_of(load_fleet(path, folder=top), os.environ)
    except FleetError:
        return []
    return [secret.get_secret_value() for one in found.values() for secret in one.values()]


def pyinfra(inventory: str, deploy: str, args: tuple[str, ...]) -> int:
    """Runs a deploy file from the root of the working copy; pyinfra's own exit code, or 130."""
    top = copy_root()
    if inventory.endswith(".py") and not (top / inventory).exists():
        raise click.ClickException(f"no such inventory: {top / inventory}")
    program = Path(sys.executable).with_name("pyinfra")
    if not program.exists():
        raise click.ClickException(
            f"no pyinfra beside {sys.executable}: bin/up sets up the environment"
        )
    argv = [str(program), inventory, deploy, *args]
    secrets = [*secrets_of_env(os.environ), *fleet_secrets(top)]
    try:
        return running.run(argv, top, top / "logs", Path(deploy).stem, secrets)
    except OSError as error:
        raise click.ClickException(f"no log can be written: {error}") from error
