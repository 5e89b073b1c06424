"""The settings of monitoring: whether a host writes its figures for Prometheus, and where."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from kvhost.schema import values as _values
from kvhost.schema.field import Flat, setting

_MONITORING = "Monitoring"

_Folder = Annotated[str, AfterValidator(_values.host_path)]


class MonitoringSettings(Flat):
    """Off unless asked for. No port is opened, no Prometheus installed (docs/monitoring.md)."""

    monitoring: bool = setting(
        _MONITORING,
        False,
        "Whether the host writes its figures (tier, verdict, services, drive) into a file for the "
        "textfile collector of Prometheus's node_exporter.",
        example=True,
        reaches_host=False,
    )
    monitoring_textfile_dir: _Folder = setting(
        _MONITORING,
        "/var/lib/prometheus/node-exporter",
        "Directory that this file is written to, as node_exporter was given it; made where it is "
        "missing.",
        example="/var/lib/node_exporter",
        reaches_host=False,
    )
