"""What happens to a host. Only this package knows pyinfra; what is decided lives in kvhost/."""

import os
import sys

# pyinfra turns bytecode off for the whole process, to write none of deploy.py: without it, all that
# a run needs of this repository is compiled anew each time
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
