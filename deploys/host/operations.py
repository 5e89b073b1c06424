"""Operations of the stage host."""

from __future__ import annotations

import shlex

from pyinfra import host
from pyinfra.api import StringCommand, operation
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Users
from pyinfra.operations import apt, server

from deploys.common.facts import CommandJson
from deploys.common.operations import Commands
from kvhost.onhost.pod_start import FIRST_LOGIN_UID


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
    an account that people log in to). Where its home is there already, on a volume that outlived
    the system, the account gets the uid that owns it: the cache is that uid's.

    + user: its name
    + home: its home, if it is made
    """
    if user in (host.get_fact(Users) or {}):
        return
    owner = host.get_fact(CommandJson, argv=("stat", "-c", '{"uid": %u, "gid": %g}', home))
    uid = owner["data"]["uid"] if owner["status"] == "ok" else 0
    if 0 < uid < FIRST_LOGIN_UID:
        gid = owner["data"]["gid"]
        yield StringCommand(
            f"getent group {gid} >/dev/null || groupadd --system --gid {gid} {user}"
        )
        yield StringCommand(
            f"useradd --system --uid {uid} --gid {gid} --home-dir {shlex.quote(home)} "
            f"--no-create-home --shell /usr/sbin/nologin {user}"
        )
        return
    yield from server.user._inner(
        user=user, home=home, shell="/usr/sbin/nologin", system=True, ensure_home=False
    )
