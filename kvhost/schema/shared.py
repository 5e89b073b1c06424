"""The settings of the tier that several hosts share: which store a host uses, and the store itself.

A store is made by `kvhost shared` (docs/shared-tier.md), on the hosts that have an address for it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from kvhost.schema import shared_values as _shared_values
from kvhost.schema import values as _values
from kvhost.schema.field import Flat, setting

_SHARED, _STORE = "Shared tier", "Store of the shared tier"

_Url = Annotated[str, AfterValidator(_shared_values.shared_tier)]
_File = Annotated[str, AfterValidator(_values.controller_path)]
_Address = Annotated[str, AfterValidator(_shared_values.store_address)]
_Region = Annotated[str, AfterValidator(_shared_values.region)]
_AccessKey = Annotated[str, AfterValidator(_shared_values.access_key)]
_Eviction = Annotated[
    Literal["allkeys-lru", "allkeys-lfu"], BeforeValidator(_shared_values.store_eviction)
]
_Port = Annotated[int, AfterValidator(_values.port)]


class SharedSettings(Flat):
    """Off unless a store is named: a host then has its own tier alone."""

    shared_tier: _Url | None = setting(
        _SHARED,
        None,
        "Store that hosts share KV through: of Redis or Valkey rediss://HOST:PORT with TLS, or "
        "redis:// on a private address; of S3 s3+https://HOST[:PORT]/BUCKET, or s3+http:// on a "
        "private address.",
        example="redis://10.0.0.5:6379",
    )
    shared_tier_password_file: _File | None = setting(
        _SHARED,
        None,
        "File on the controller, readable by its owner alone, with the store's password (of S3 the "
        "secret key), for the store and for the hosts that use it; without it, "
        "KVHOST_SHARED_PASSWORD in the controller's environment.",
        example="secrets/shared",
        reaches_host=False,
    )
    shared_tier_ca_file: _File | None = setting(
        _SHARED,
        None,
        "File on the controller with the certificates, as PEM, that the store's own must come "
        "from; without it, those that the host trusts.",
        example="secrets/shared-ca.pem",
        reaches_host=False,
    )
    shared_tier_access_key: _AccessKey | None = setting(
        _SHARED,
        None,
        "Access key id that an S3 store knows the hosts by; no secret.",
        example="kvhost",
    )
    shared_tier_region: _Region = setting(
        _SHARED,
        "us-east-1",
        "Region of the bucket; a store of your own has mostly this one.",
        example="eu-central-1",
    )
    shared_tier_timeout_s: float = setting(
        _SHARED,
        2.0,
        "How long the cache server waits for one answer of the store; then it goes on without it.",
        unit="seconds",
        example=0.5,
        ge=0.05,
        le=60,
    )

    shared_store_address: _Address | None = setting(
        _STORE,
        None,
        "Address of this host that kvhost shared makes a store on; without it, this host has none.",
        example="10.0.0.5",
        reaches_host=False,
    )
    shared_store_port: _Port = setting(
        _STORE,
        6379,
        "Port of the store.",
        unit="port",
        example=6380,
        reaches_host=False,
    )
    shared_store_memory_gib: float | None = setting(
        _STORE,
        None,
        "Memory that the store's data may take; what is beyond it is evicted.",
        unit="GiB",
        example=16.0,
        gt=0,
        le=65_536,
        reaches_host=False,
    )
    shared_store_eviction: _Eviction = setting(
        _STORE,
        "allkeys-lru",
        "What goes when it is full: what was used longest ago, or least often.",
        example="allkeys-lfu",
        reaches_host=False,
    )
    shared_store_persistence: Literal["none", "rdb", "aof"] = setting(
        _STORE,
        "none",
        "What of the store outlives its restart: nothing, a snapshot of the last minutes (rdb), or "
        "all but the last second (aof).",
        example="rdb",
        reaches_host=False,
    )
    shared_store_cert_file: _File | None = setting(
        _STORE,
        None,
        "File on the controller with the store's certificate, as PEM: with it the store speaks TLS "
        "alone.",
        example="secrets/store.pem",
        reaches_host=False,
    )
    shared_store_key_file: _File | None = setting(
        _STORE,
        None,
        "File on the controller, readable by its owner alone, with the key of that certificate.",
        example="secrets/store.key",
        reaches_host=False,
    )
