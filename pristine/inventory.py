"""The embedded default: the machine that kvhost is started on. Others are in inventories/."""

import os
import shutil
import subprocess

# A user who is not root needs sudo without a password; without it the plan refuses, plainly.
_sudo = (
    os.geteuid() != 0
    and shutil.which("sudo") is not None
    and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
)
hosts = [("@local", {"_sudo": _sudo})]
