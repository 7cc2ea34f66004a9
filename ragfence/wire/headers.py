"""The headers of a request that the contract reads: the key, the client's budget, and others that the policy requires.

A header that cannot be parsed is refused before anything is claimed.
"""

from __future__ import annotations

import math
import re
from typing import Final

from ragfence.core.hashing import digest
from ragfence.wire.messages import Call, Headers, values_of
from ragfence.wire.problems import Problem, RequestRefused, refusal

KEY_HEADER: Final = "idempotency-key"
BUDGET_HEADER: Final = "x-request-timeout"
MAX_KEY_CHARACTERS: Final = 255
MAX_BUDGET_S: Final = 24 * 3600.0

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # a string of RFC 8941
_BARE = re.compile(r"[!#-+\--~](?:[ -+\--~]*[!-+\--~])?")  # printable, no comma, no quote in front
_ESCAPED = re.compile(r"\\(.)")
_BUDGET = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?(ms|s)?")


def key_of(call: Call) -> str | None:
    """Returns the key of a request, or None. The quoted form and the bare one are the same key."""
    given = values_of(call.headers, KEY_HEADER)
    if not given:
        return None
    if len(given) > 1:
        raise RequestRefused(_malformed(f"the header occurs {len(given)} times"))
    return parse_key(given[0])


def parse_key(text: str) -> str:
    """
    >>> parse_key('"refund-17"') == parse_key("refund-17")
    True
    """
    if quoted := _QUOTED.fullmatch(text):
        key = _ESCAPED.sub(r"\1", quoted[1])
    elif _BARE.fullmatch(text):
        key = text
    elif text.startswith('"'):
        raise RequestRefused(_malformed("it starts with a quote, but is not a quoted string"))
    elif "," in text:
        raise RequestRefused(_malformed('a key with a comma must be quoted: "a,b"'))
    else:
        raise RequestRefused(
            _malformed("it is empty" if not text else "it contains characters that are not printable ASCII")
        )
    if not key:
        raise RequestRefused(_malformed("it is empty"))
    if len(key) > MAX_KEY_CHARACTERS:
        raise RequestRefused(_malformed(f"it has {len(key)} characters, {MAX_KEY_CHARACTERS} are allowed"))
    return key


def format_key(key: str) -> str:
    """Returns the key as a header value, bare if possible; `parse_key` returns the same key."""
    if _BARE.fullmatch(key):
        return key
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def missing_key() -> RequestRefused:
    return RequestRefused(refusal("VALIDATION.idempotency.key_missing", "there is no header Idempotency-Key"))


def budget_in(headers: Headers) -> float | None:
    """Returns how many seconds the client will wait: `X-Request-Timeout: 2.5`, `2.5s` or `2500ms`."""
    given = values_of(headers, BUDGET_HEADER)
    if not given:
        return None
    found = _BUDGET.fullmatch(given[0]) if len(given) == 1 else None
    seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else 0.0
    if not math.isfinite(seconds) or seconds <= 0:
        raise RequestRefused(
            refusal(
                "VALIDATION.header",
                "X-Request-Timeout is not a time",
                hint="seconds or milliseconds, once: X-Request-Timeout: 2.5, or 2500ms",
            )
        )
    return min(seconds, MAX_BUDGET_S)


def check_required(call: Call, names: tuple[str, ...]) -> None:
    """Raises `RequestRefused` if a header that the policy requires is missing. The key is checked elsewhere."""
    for name in names:
        if name.lower() != KEY_HEADER and not any(values_of(call.headers, name.lower())):
            raise RequestRefused(
                refusal("VALIDATION.header", f"there is no header {name}", hint=f"send {name} with every write")
            )


def principal_from(authorization: str) -> str:
    """Returns the caller named by the Authorization header, as a digest: credentials are never stored."""
    return (
        digest("ragfence/principal/1", authorization.encode("latin-1", "replace")).hex()[:32] if authorization else ""
    )


def _malformed(why: str) -> Problem:
    return refusal("VALIDATION.idempotency.key_malformed", f"Idempotency-Key: {why}")
