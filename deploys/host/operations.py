"""Operations of the stage host."""

from __future__ import annotations

import shlex

from pyinfra import host
from pyinfra.api import StringCommand, operation
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Users
from pyinfra.operations import apt, server

from deploys.common.operations import Commands


@operation()
def debian_packages(packages: tuple[str, ...], note: str) -> Commands:
    """Installs what is missing of some Debian packages, with a fresh list of packages.

    + packages: names
    + note: file on the host that keeps the names of what was installed, for whoever removes kvhost
    """
    there = host.get_fact(DebPackages) or {}
    missing = [name for name in packages if name not in there]
    if missing:
        yield from apt.update._inner()
        yield from apt.packages._inner(packages=missing, no_recommends=True)
        yield StringCommand(f"echo {shlex.quote(' '.join(missing))} >> {shlex.quote(note)}")


@operation()
def service_user(user: str, home: str) -> Commands:
    """A system account without a login. One that exists is left as it is (the plan has refused
    an account that people log in to).

    + user: its name
    + home: its home, if it is made
    """
    if user in (host.get_fact(Users) or {}):
        return
    yield from server.user._inner(
        user=user, home=home, shell="/usr/sbin/nologin", system=True, ensure_home=False
    )
