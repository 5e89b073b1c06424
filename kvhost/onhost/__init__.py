"""Scripts that run on the host: standard library only, usable by hand (`--help`).

They are sent to the host as files, under any Python from 3.9 on with nothing installed. They may
import each other, which lie beside them there, and never the rest of kvhost.
"""

#: what looks at drives: report_drives.py and all that it imports, sent to the host together
DRIVE_SCRIPTS = ("report_drives.py", "drive_probe.py", "drive_content.py", "drive_magic.py",
                 "drive_sys.py", "drive_journal.py")  # fmt: skip
#: what drift_look.py imports, itself first
DRIFT_SCRIPTS = ("drift_look.py", "report_held.py", "engine.py", "engine_pip.py", "services.py",
                 "services_host.py", "services_supervisor.py", "services_systemd.py", "launch.py",
                 "launch_log.py", "launch_children.py")  # fmt: skip
