"""What every section of a policy has in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class PolicySection(BaseModel):
    """A part of a policy: frozen, without unknown settings, and with a default in place of every null."""

    # Strict: `max_attempts: true` and `include_diff: "no"` are mistakes, not numbers and switches.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_the_default(cls, given: Any) -> Any:
        # `lease:` with all its lines commented out is a null in YAML.
        if isinstance(given, Mapping):
            return {name: value for name, value in given.items() if value is not None}
        return given


# YAML has lists, the models have tuples.
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]
