"""Operations of the stage host."""

from __future__ import annotations

import shlex

from pyinfra.api import StringCommand, operation
from pyinfra.operations import apt, server

from deploys.common.bundle import Place, files_of
from deploys.common.looks import Ask, ask, ask_json
from deploys.common.operations import Commands, converges, refuse, shown
from deploys.common.send import send
from kvhost.engine.bundle_packages import install_command
from kvhost.onhost.bundle_check import PACKAGES
from kvhost.onhost.pod_start import FIRST_LOGIN_UID


def packages_ask(packages: tuple[str, ...]) -> Ask:
    return ("argv", "dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *packages)


def user_ask(user: str) -> Ask:
    return ("argv", "getent", "passwd", user)


@operation()
@converges
def debian_packages(
    packages: tuple[str, ...],
    note: str,
    bundle: Place | None = None,
    release: str = "",
    around: str = "",
) -> Commands:
    """Installs what is missing of some Debian packages, with a fresh list of packages.

    + packages: names
    + note: file on the host that keeps the names of what was installed, for whoever removes kvhost
    + bundle: where a bundle lies; if it has packages, they come from there and from nowhere else
    + release: the host's ("debian 12")
    + around: directory of root's on the host for the bundle's copy
    """
    answer = ask(packages_ask(packages))
    # dpkg-query(1): 1 = one of the names is not known
    known = answer["out"].splitlines() if answer and answer["exit"] in (0, 1) else []
    missing = [name for name in packages if f"{name} installed" not in known]
    if missing and bundle is not None and (bundle.manifest or {}).get("packages"):
        yield from _of_bundle(missing, bundle, release, around)
    elif missing:
        yield from apt.update._inner()
        yield from apt.packages._inner(packages=missing, no_recommends=True)
    if missing:
        yield StringCommand(f"echo {shlex.quote(' '.join(missing))} >> {shlex.quote(note)}")


def _of_bundle(missing: list[str], bundle: Place, release: str, around: str) -> Commands:
    manifest = bundle.manifest or {}
    if manifest["packages"] != release:
        yield refuse(
            f"the bundle's packages are of {manifest['packages']}, this host is {release}: make "
            f"the bundle on such a machine, or install {', '.join(missing)} by hand"
        )
        return
    source = bundle.source
    if source is not None:
        yield send(
            "the bundle's packages",
            lambda: files_of(source, packages=True),
            bundle.on_host,
            around,
        )
    digest = manifest["files"][f"{PACKAGES}/Packages"]["sha256"]
    yield shown(install_command(f"{bundle.on_host}/{PACKAGES}", digest, missing))


@operation()
@converges
def service_user(user: str, home: str) -> Commands:
    """A system account without a login. One that exists is left as it is (the plan has refused
    an account that people log in to). Where its home is there already, on a volume that outlived
    the system, the account gets the uid that owns it: the cache is that uid's.

    + user: its name
    + home: its home, if it is made
    """
    answer = ask(user_ask(user))
    if answer is None or answer["exit"] not in (0, 2):  # getent(1): 2 = not found
        yield refuse(f"whether there is a user {user} could not be told: {answer}")
        return
    if answer["exit"] == 0:
        return
    owner = ask_json(("stat", "-c", '{"uid": %u, "gid": %g}', home))
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
