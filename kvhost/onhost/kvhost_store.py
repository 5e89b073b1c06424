"""The store that hosts share KV through: Redis (kvhost_resp.py) or S3 (kvhost_s3.py).

A Connection of either has the methods there, get_into, put, find, forget and close, and says how
many of it a cache server uses at once (``workers``, ``lookers``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost.onhost import kvhost_resp, kvhost_s3
    from kvhost.onhost.kvhost_resp import PREFIX, Said, StoreError, password_in

    Place = kvhost_resp.Place | kvhost_s3.Place
    Connection = kvhost_resp.Connection | kvhost_s3.Connection
else:  # they lie beside this file, in lib/
    import kvhost_resp
    import kvhost_s3
    from kvhost_resp import PREFIX, Said, StoreError, password_in

__all__ = ["PREFIX", "Said", "StoreError", "at_once", "connect", "password_in", "place_of"]


def place_of(params: Any) -> Place:
    """From the JSON that services.py renders. Raises KeyError, TypeError."""
    return kvhost_s3.place_of(params) if "bucket" in params else kvhost_resp.place_of(params)


def at_once(place: Place) -> tuple[int, int]:
    """How many connections for values, and for a look-up."""
    kind = kvhost_s3 if isinstance(place, kvhost_s3.Place) else kvhost_resp
    return kind.Connection.workers, kind.Connection.lookers


def connect(place: Place, password: str | None, timeout: float) -> Connection:
    """Raises StoreError."""
    if isinstance(place, kvhost_s3.Place):
        return kvhost_s3.Connection(place, password, timeout)
    return kvhost_resp.Connection(place, password, timeout)
