"""The Idempotency-Key of a write: one for each call, the same for all its attempts.

A key that were made of the content alone would be wrong: after "A, then B, then A" the third call would be answered
with what was stored for the first, and B would stay; a second retraction would not happen. So each call has a key of
its own. What makes the repetition of a whole run cheap is the fence of the documents behind it, which needs no key.

With `run`, a name for one pass of a loader, keys are made from content: run, position of the call in the run, method,
path and body. A loader that crashed and starts *from the beginning* under the same name sends the same keys, and is
answered with what was stored. Where its calls differ from those of the first time, so do the keys, and they are
performed.
"""

from __future__ import annotations

import uuid
from itertools import count
from typing import Final

from ragfence.core.hashing import digest
from ragfence.core.operations import checked_text
from ragfence.errors import ValidationError
from ragfence.server.request_headers import format_key, parse_key
from ragfence.wire.problems import RequestRefused

KEY_HEADER: Final = "Idempotency-Key"


class Keys:
    def __init__(self, run: str | None = None) -> None:
        if run == "":
            raise ValidationError("a run needs a name", hint="one for each pass, such as nightly-2026-03-01")
        self._run = None if run is None else checked_text("run", run)
        self._positions = count()

    def header(self, given: str | None, method: str, path: str, body: bytes | None) -> dict[str, str]:
        """`given`: the caller's own, if any. Counted all the same: the calls after it keep their positions."""
        position = next(self._positions)
        if given is not None:
            return {KEY_HEADER: _checked(given)}
        if self._run is None:
            return {KEY_HEADER: str(uuid.uuid4())}
        return {KEY_HEADER: content_key(self._run, position, method, path, body or b"")}


def content_key(run: str, position: int, method: str, path: str, body: bytes) -> str:
    """
    >>> content_key("monday", 0, "POST", "/v1/documents", b"{}")[:8]
    '56dd8c22'
    """
    parts = (run.encode(), position.to_bytes(8, "big"), method.encode(), path.encode(), body)
    return digest("ragfence/client-key/1", *parts).hex()


def _checked(key: object) -> str:
    if not isinstance(key, str):
        raise ValidationError(f"an idempotency_key is text, not {type(key).__name__}")
    try:
        header = format_key(key)
        parse_key(header)
    except RequestRefused as refused:
        raise ValidationError(refused.problem.detail, hint=refused.problem.hint) from None
    return header
