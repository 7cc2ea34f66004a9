"""The outermost layer of the server: rules for every request and every response, whatever the route. Pure ASGI.

- An address has one reading: a path or query whose percent-encoding is malformed, or is not UTF-8, is refused (400). A
  lenient reading would give two different addresses the same doc_id or source_id.
- Without API keys (`insecure_dev`) only this machine is served, and no website in its browser: `Host` must name
  loopback (a DNS name that was rebound to 127.0.0.1 does not), and `Origin` must be the server itself.
- HEAD is GET without its body, on every address that accepts GET.
- No response may be cached, or be interpreted as a type other than its own.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from ragfence.core.urls import is_loopback
from ragfence.server.asgi import App, Message, Receive, Scope, Send, send_answer
from ragfence.wire.problems import Problem, refusal

ALWAYS_SENT: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
"""Added to every response that has no header of that name."""
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]+)?")
_MALFORMED: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")


class EdgeMiddleware:
    """`local_only`: refuses requests from other machines and from websites."""

    def __init__(self, app: App, *, local_only: bool = False) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (problem := self._refusal(scope)) is not None:
            answer = problem.answer({"connection": "close"})
            await send_answer(_without_body(send) if scope["method"] == "HEAD" else send, answer)
        elif scope["method"] == "HEAD":
            # In a copy: the server has to know that the method was HEAD, to frame the response.
            await self._app({**scope, "method": "GET"}, receive, _with_headers(_without_body(send)))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Problem | None:
        if not _is_readable(scope.get("raw_path")):
            return refusal("VALIDATION.path", "the path is not percent-encoded UTF-8")
        if not _is_readable(scope.get("query_string")):
            hint = "percent-encode the query as UTF-8; % itself is %25"
            return refusal("VALIDATION.path", "the query is not percent-encoded UTF-8", hint=hint)
        return _foreign(scope) if self._local_only else None


def _foreign(scope: Scope) -> Problem | None:
    """Returns why a request may not come from a program on this machine; None if it does."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"host"]
    named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if named is None or not is_loopback(named[1] or named[2]):
        return refusal("AUTH.host", "without API keys, only requests to a loopback address are served")
    own = f"{scope.get('scheme', 'http')}://{hosts[0]}".lower()
    origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == b"origin"]
    if any(origin != own for origin in origins):
        return refusal("AUTH.origin", "without API keys, requests of other websites are refused")
    return None


def _is_readable(raw: bytes | None) -> bool:
    """Returns whether a raw path or query is percent-encoded UTF-8. Servers need not pass it: None is accepted."""
    if raw is None or (b"%" not in raw and raw.isascii()):
        return True
    if _MALFORMED.search(raw) is not None:
        return False
    try:
        unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            message["headers"] = [*headers, *(pair for pair in ALWAYS_SENT if pair[0] not in names)]
        await send(message)

    return send_with_headers


def _without_body(send: Send) -> Send:
    async def send_without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_without_body
