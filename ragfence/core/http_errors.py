"""The message in another server's error response, short and printable."""

from __future__ import annotations

import json
from typing import Any

SHOWN_CHARACTERS = 300


def message_in(body: str) -> str:
    """Returns the server's message after a colon, or "". Reads the forms of OpenAI, vLLM, FastAPI, and plain text.

    >>> message_in('{"error": {"message": "no such model"}}')
    ': no such model'
    """
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body
    words = " ".join("".join(each if each.isprintable() else " " for each in message).split())
    return f": {words[:SHOWN_CHARACTERS]}" if words else ""


def _message(answer: Any) -> str:
    for field in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(field):
            return _message(answer[field])
    return answer if isinstance(answer, str) else json.dumps(answer)
