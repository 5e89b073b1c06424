"""Operations of the stage host."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import operation
from pyinfra.facts.deb import DebPackages
from pyinfra.operations import apt

from deploys.common.operations import Commands


@operation()
def debian_packages(packages: tuple[str, ...]) -> Commands:
    """Installs what is missing of some Debian packages, with a fresh list of packages.

    + packages: names
    """
    there = host.get_fact(DebPackages) or {}
    missing = [name for name in packages if name not in there]
    if missing:
        yield from apt.update._inner()
        yield from apt.packages._inner(packages=missing, no_recommends=True)
