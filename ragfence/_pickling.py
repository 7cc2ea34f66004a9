"""How errors with keyword-only details cross process boundaries."""

from __future__ import annotations

from typing import Any


def rebuild(kind: type[Any], message: str, hint: str, details: dict[str, Any]) -> Any:
    return kind(message, hint=hint, **details)
