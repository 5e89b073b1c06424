"""pyinfra reads this before every run, whatever the inventory: what kvhost adds to connecting."""

from deploys.common.connecting import watch

watch()
