"""The tools' environment on a host (uv, supervisord): how it is made, and how it is told whole."""

from __future__ import annotations

import shlex

from kvhost.paths import HostPaths


def tools_commands(
    paths: HostPaths, digest: str, python: str, bundle: str | None = None
) -> tuple[str, str]:
    """(check, build) for the shell, as root; the check prints true or false.

    ``digest`` is of the tools' lock, which lies in ``paths.locks``; ``python`` makes it.
    ``bundle``: directory of a bundle on the host; then nothing else is looked at, no network too.
    """
    env, more = "", ""
    if bundle is not None:
        # neither the host's configuration files nor its variables may name another place
        env = "PIP_CONFIG_FILE=/dev/null "
        more = f"--isolated --no-index --find-links {shlex.quote(bundle)}/tools "
    here, current = f"{paths.tools}/{digest[:16]}", f"{paths.tools}/current"
    done = f"{here}/.kvhost-complete.json"
    check = (
        f'[ -f {done} ] && [ "$(readlink {current})" = {here} ] '
        f"&& [ -x {here}/bin/supervisord ] && [ -x {here}/bin/uv ] && echo true || echo false"
    )
    build = " && ".join(
        (
            f"rm -rf {here}",
            f"{shlex.quote(python)} -m venv {here}",
            f"{env}{here}/bin/python -m pip install -q --disable-pip-version-check "
            f"--require-hashes --only-binary :all: {more}-r {paths.locks}/tools.txt",
            f"chmod -R go+rX,go-w {here}",
            f'echo \'{{"digest": "{digest}"}}\' > {done}',
            f"ln -sfn {here} {current}.new",
            f"mv -T {current}.new {current}",
        )
    )
    return check, build
