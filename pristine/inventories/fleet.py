"""All hosts of fleet.yaml (docs/fleets.md): groups, roles, addresses, settings."""

from deploys.common.connecting import fleet_inventory

globals().update(fleet_inventory())
