"""How a setting is declared: a field with its sentence, group, unit and example."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Flat(BaseModel):
    """Frozen; an unknown key or a wrong type is an error, and nothing is converted."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a value may be a secret that went astray
        protected_namespaces=(),
    )


def setting(
    group: str,
    default: Any,
    sentence: str,
    *,
    example: Any,
    unit: str = "",
    reaches_host: bool = True,
    **bounds: Any,
) -> Any:
    """A field; `bounds` are ge, gt, le, lt, multiple_of, `reaches_host` decides on the digest."""
    return Field(
        default=default,
        description=sentence,
        json_schema_extra={
            "group": group,
            "unit": unit,
            "example": example,
            "reaches_host": reaches_host,
        },
        **bounds,
    )
