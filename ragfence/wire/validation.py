"""JSON values that strangers send, checked against a model of `schemas`: bodies of requests, and of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from pydantic import ValidationError as PydanticValidationError

from ragfence.wire.problems import Problem, RequestRefused, refusal

Body = TypeVar("Body", bound=BaseModel)

MAX_FIELDS: Final = 32
"""More than any model has."""
MAX_ERRORS: Final = 50
MAX_PLACE_CHARACTERS: Final = 200


def validated(given: Any, model: type[Body]) -> Body:
    """Returns the value as a model. Raises `RequestRefused` with all mistakes."""
    if isinstance(given, dict) and len(given) > MAX_FIELDS:
        raise RequestRefused(invalid([{"loc": (), "msg": f"{len(given):,} fields, and {MAX_FIELDS} are accepted"}]))
    try:
        return model.model_validate(given)
    except PydanticValidationError as wrong:
        raise RequestRefused(invalid(wrong.errors(include_url=False, include_input=False))) from None


def invalid(errors: Any, *, code: str = "VALIDATION.body") -> Problem:
    """Returns the problem with all mistakes, but without the input: it may contain a secret in the wrong place."""
    found = [{"at": _place(each["loc"]), "problem": str(each["msg"])[:500]} for each in errors[:MAX_ERRORS]]
    detail = "; ".join(f"{each['at']}: {each['problem']}" for each in found[:5])
    return refusal(code, detail, errors=found)


def _place(parts: Sequence[Any]) -> str:
    text = "/" + "/".join(str(part)[:MAX_PLACE_CHARACTERS] for part in parts[:MAX_FIELDS])
    return text if len(text) <= MAX_PLACE_CHARACTERS else f"{text[:MAX_PLACE_CHARACTERS]}..."
