"""Scripts that run on the host: standard library only, one file each, usable by hand (`--help`).

They are sent to the host as files and never import each other or the rest of kvhost, so that
they run under any Python from 3.9 on with nothing installed.
"""
