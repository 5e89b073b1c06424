"""The tools' environment on a host (uv, supervisord): how it is made, and how it is told whole."""

from __future__ import annotations

import shlex

from kvhost.paths import HostPaths


def tools_commands(paths: HostPaths, digest: str, python: str) -> tuple[str, str]:
    """(check, build) for the shell, as root; the check prints true or false.

    ``digest`` is of the tools' lock, which lies in ``paths.locks``; ``python`` makes it.
    """
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
            f"{here}/bin/python -m pip install -q --disable-pip-version-check --require-hashes "
            f"--only-binary :all: -r {paths.locks}/tools.txt",
            f"chmod -R go+rX,go-w {here}",
            f'echo \'{{"digest": "{digest}"}}\' > {done}',
            f"ln -sfn {here} {current}.new",
            f"mv -T {current}.new {current}",
        )
    )
    return check, build
