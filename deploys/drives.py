"""`kvhost drives`: every drive of every host, and what kvhost thinks of it; changes nothing."""

from deploys.common.drives import look_at_drives

look_at_drives()
