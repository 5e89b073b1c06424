"""Sudo of a host that is connected to, with the password of fleet.yaml where it asks for one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from pyinfra.api import StringCommand
from pyinfra.api.exceptions import ConnectError

if TYPE_CHECKING:  # nothing is loaded before the hosts are connected to that can wait until then
    from kvhost.secrets import Secret

#: what pyinfra takes for sudo's password, so that it asks by the helper; no secret
_BY_HELPER = "asked-by-helper"

#: Run without sudo, the helper on its stdin. Prints free | PATH of the helper | wrong | asks |
#: none | nowhere. The helper holds the password, 0700 of the login, in memory where that can be;
#: pyinfra removes it at the end. access(2), which [ -x ] asks, knows of a mount with noexec.
TRY_SUDO = """
if sudo -n true 2>/dev/null; then cat >/dev/null; echo free; exit 0; fi
command -v sudo >/dev/null || { cat >/dev/null; echo none; exit 0; }
umask 077
f=
for d in "$XDG_RUNTIME_DIR" /dev/shm /tmp; do
  [ -n "$d" ] && [ -d "$d" ] && [ -w "$d" ] || continue
  find "$d" -maxdepth 1 -name 'kvhost-askpass-*' -user "$(id -un)" -mmin +720 -delete 2>/dev/null
  f=$(mktemp "$d/kvhost-askpass-XXXXXXXX") && chmod 700 "$f" && [ -x "$f" ] && break
  [ -z "$f" ] || rm -f "$f"
  f=
done
[ -n "$f" ] || { cat >/dev/null; echo nowhere; exit 0; }
cat >"$f" || { rm -f "$f"; exit 1; }
if [ -s "$f" ] && SUDO_ASKPASS=$f sudo -A -k true 2>/dev/null; then echo "$f"; exit 0; fi
if [ -s "$f" ]; then echo wrong; else echo asks; fi
rm -f "$f"
"""
_WHY = {
    "wrong": "sudo does not take the password of sudo_password",
    "asks": "sudo asks for a password. Write sudo_password: {env: NAME} or {file: …} in "
    "fleet.yaml, or allow this user NOPASSWD",
    "none": "there is no sudo on this host: connect as root, or install it",
    "nowhere": "sudo asks for a password, and the helper that gives it can be executed nowhere: "
    "$XDG_RUNTIME_DIR, /dev/shm and /tmp are each not there, closed to this user, or mounted "
    "noexec. Mount one of them with exec (mount -o remount,exec /dev/shm), or allow this user "
    "NOPASSWD",
}


def with_sudo(host: Any, secret: Secret | None) -> None:
    """Without a password first; with it only where sudo asks. Raises ConnectError."""
    given = secret.get_secret_value() if secret else ""
    # the password is the helper's text, handed over on stdin: no process has it as an argument
    helper = f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(given)}\n" if given else ""
    _, output = host.run_shell_command(
        StringCommand("sh", "-c", shlex.quote(TRY_SUDO)),
        _sudo=False,
        _stdin=[helper] if helper else "",
    )
    said = output.stdout_lines[-1].strip() if output.stdout_lines else ""
    if said == "free":
        return
    if said.startswith("/"):
        for folder in {host.get_temp_dir_config(), host.data.get("_temp_dir") or "/tmp"}:
            host.connector_data[f"sudo_askpass_path__{folder}"] = said
        host.host_data["_sudo_password"] = _BY_HELPER
        return
    if said == "nowhere" and not helper:  # what is missing first
        said = "asks"
    other = f"sudo could not be tried: {output.stderr or output.stdout or 'no answer'}"
    raise ConnectError(_WHY.get(said, other))
