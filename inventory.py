"""The embedded default: the machine that kvhost is started on. Others are in inventories/."""

import os

# a user who is not root needs sudo without a password; the plan says so if it is missing
hosts = [("@local", {"_sudo": os.geteuid() != 0})]
