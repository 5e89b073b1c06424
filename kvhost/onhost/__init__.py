"""Scripts that run on the host: standard library only, usable by hand (`--help`).

They are sent to the host as files, under any Python from 3.9 on with nothing installed. They may
import each other, which lie beside them there, and never the rest of kvhost.
"""

#: report.py and what it imports or runs in every case, sent to the host together
REPORT_SCRIPTS = ("report.py", "bounded.py", "forked.py", "report_parts.py",
                  "report_machine.py", "report_held.py", "report_kvhost.py",
                  "report_processes.py", "masking.py", "report_gpu.py",
                  "model_look.py")  # fmt: skip
#: what looks at drives: report_drives.py and all that it imports, sent to the host together
DRIVE_SCRIPTS = ("report_drives.py", "drive_probe.py", "drive_content.py", "drive_magic.py",
                 "drive_sys.py", "drive_journal.py")  # fmt: skip
