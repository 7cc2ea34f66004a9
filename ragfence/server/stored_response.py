"""Answers as they are kept and replayed: which ones, without which headers, and as what.

A kept answer is the result of a receipt. Its body comes back byte for byte.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Final

from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.wire.messages import Answer, Headers
from ragfence.wire.problems import refusal

VERSION: Final = 1

NEVER_KEPT: Final = frozenset({401, 403, 408, 409, 412, 425, 429})
"""of the 4xx: each may be another one the next time, without the request being another"""

# Of one person, one connection or one moment; and the contract's own, which are made anew.
NOT_KEPT_HEADERS: Final = frozenset(
    """
    set-cookie set-cookie2 authorization www-authenticate authentication-info proxy-authenticate proxy-authorization
    proxy-authentication-info proxy-connection connection keep-alive te trailer trailers transfer-encoding upgrade
    date server content-length idempotency-key idempotency-status idempotency-expires x-idempotency-key
    x-idempotency-status
    """.split()  # noqa: SIM905  # twenty lines of quotes say no more
)


def is_kept(status: int) -> bool:
    """Whether an answer of this status is the outcome of its key. The others give the key back."""
    return 200 <= status < 500 and status not in NEVER_KEPT


def to_result(answer: Answer) -> dict[str, Any]:
    """The answer as the result of a receipt."""
    kept: dict[str, Any] = {"v": VERSION, "status": answer.status, "headers": _kept(answer.headers)}
    try:
        # Text as text: people read receipts. It comes back as the same bytes.
        return kept | {"body": answer.body.decode()}
    except UnicodeDecodeError:
        return kept | {"base64": base64.b64encode(answer.body).decode("ascii")}


def without_body(answer: Answer) -> dict[str, Any]:
    """What is kept of an answer that is too long."""
    return {"v": VERSION, "status": answer.status, "headers": _kept(answer.headers), "too_long": True}


def from_result(result: Any, key: str) -> Answer:
    """The answer to replay. One whose body was not kept is replayed as the problem that says so."""
    if not isinstance(result, dict) or "v" not in result:
        raise FormatCorrupt("the key holds a result that is no HTTP answer")
    if result["v"] != VERSION:
        raise FormatTooNew(f"the stored answer has version {result['v']}, this ragfence knows {VERSION}")
    headers = tuple((str(name), str(value)) for name, value in result["headers"])
    status = int(result["status"])
    if result.get("too_long"):
        detail = f"the answer, of status {status}, was too long to be kept"
        places = {name: value for name, value in headers if name in ("location", "content-location", "etag")}
        return refusal("PROVIDER.duplicate", detail, key=key, original_status=status).answer(places)
    body = base64.b64decode(result["base64"]) if "base64" in result else result["body"].encode()
    return whole(Answer(status, headers, body))


def whole(answer: Answer) -> Answer:
    """With its length, where an answer of this status may tell one."""
    if not answer.complete or answer.status in (204, 304) or answer.status < 200:
        return answer
    kept = tuple(pair for pair in answer.headers if pair[0] not in ("content-length", "transfer-encoding"))
    return replace(answer, headers=(*kept, ("content-length", str(len(answer.body)))))


def _kept(headers: Headers) -> list[list[str]]:
    named_by_connection = {
        part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")
    }
    return [
        [name, value] for name, value in headers if name not in NOT_KEPT_HEADERS and name not in named_by_connection
    ]
