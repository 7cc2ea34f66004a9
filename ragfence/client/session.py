"""What both clients have in common: the address of the server, the API key, and how httpx is used."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from ragfence._extras import needs_extra
from ragfence._version import __version__
from ragfence.client.calls import ClientCalls
from ragfence.client.errors import without_secret
from ragfence.client.retry import CallSettings, Keys, RetryPolicy
from ragfence.client.steps import Lost, OnAttempt, Send
from ragfence.errors import ApiRefused, InsecureUrl, RagfenceError, ValidationError
from ragfence.wire import SERVE_HOST, SERVE_PORT

TIMEOUT_S: Final = 5.0
"""Half of the default budget: after a lost answer there is time for another attempt."""
URL, API_KEY, ALLOW_HTTP = "RAGFENCE_URL", "RAGFENCE_API_KEY", "RAGFENCE_ALLOW_HTTP"
LOCAL_URL: Final = f"http://{SERVE_HOST}:{SERVE_PORT}"
"""Where `ragfence serve` listens by default."""


def make_calls(
    url: str | None,
    api_key: str | None,
    timeout_s: float,
    retry: RetryPolicy | None,
    run: str | None,
    clock: Callable[[], float] | None,
    on_attempt: OnAttempt | None = None,
) -> ClientCalls:
    if not timeout_s > 0:
        raise ValidationError(f"timeout_s must be above 0, not {timeout_s!r}")
    secret = _checked_key(os.environ.get(API_KEY, "") if api_key is None else api_key)
    return ClientCalls(
        CallSettings(
            url=_checked_url(os.environ.get(URL, "") or LOCAL_URL if url is None else url),
            secret=secret,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            clock=clock or time.monotonic,
            dice=random.Random(),
            on_attempt=on_attempt,
        ),
        Keys(run),
    )


class ClientSession:
    """The parts of httpx that both clients use in the same way."""

    def __init__(self, core: ClientCalls, *, allow_http: bool | None = None) -> None:
        with needs_extra("client", "ragfence.client"):
            self.httpx: Any = import_module("httpx")
        self._settings = core.settings
        self._allow_http = os.environ.get(ALLOW_HTTP, "") == "1" if allow_http is None else allow_http
        httpx = self.httpx
        self._transient = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)

    def options(self, transport: Any) -> dict[str, Any]:
        headers = {"User-Agent": f"ragfence/{__version__}", "Accept": "application/json"}
        if self._settings.secret:
            self._check_secrecy(transport)
            # Only here: httpx hides it in its repr, and a step in a traceback does not contain it.
            headers["Authorization"] = f"Bearer {self._settings.secret}"
        # No redirects: a write would become a GET, and the API key would go to another server.
        options = {"base_url": self._settings.url, "headers": headers, "follow_redirects": False}
        return options if transport is None else options | {"transport": transport}

    def _check_secrecy(self, transport: Any) -> None:
        """Raises `InsecureUrl` if the API key could be read on its way to the server."""
        from ragfence.core.urls import is_loopback

        httpx, url = self.httpx, self._settings.url
        in_this_process = (httpx.ASGITransport, httpx.WSGITransport, httpx.MockTransport)
        parts = urlsplit(url)
        if parts.scheme == "https" or self._allow_http or isinstance(transport, in_this_process):
            return
        if not is_loopback(parts.hostname or ""):
            raise InsecureUrl(f"the API key would be sent to {url} over plain HTTP, where others can read it")

    def arguments(self, send: Send) -> dict[str, Any]:
        return {
            "method": send.method,
            "url": send.url,
            "headers": dict(send.headers),
            "content": send.body,
            "timeout": send.silence_s,
        }

    def lost(self, error: Exception) -> Lost:
        """Returns `Lost` for an error that another attempt may not meet; raises `ApiRefused` for any other."""
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, self._transient):
            return Lost(
                words,
                error,
                timeout=isinstance(error, self.httpx.TimeoutException),
                unconnected=isinstance(error, self.httpx.ConnectError),
            )
        raise self._refused(without_secret(words, self._settings.secret)) from error

    def timed_out(self, send: Send) -> Lost:
        return Lost(f"its answer was not complete after {send.whole_s:.1f} s", timeout=True)

    def _refused(self, words: str) -> RagfenceError:
        return ApiRefused(f"{self._settings.url} could not be called: {words}", hint=f"check the URL ({URL})")


def closed_error() -> ValidationError:
    return ValidationError("this client was closed", hint="make another one; `with` closes a client at its end")


def _checked_url(url: str) -> str:
    if not url:
        raise ValidationError("the client needs the URL of a server", hint=f"pass one, or set {URL}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or address
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValidationError("the URL of a server has the form https://ingest.example, without a query")
    if parts.username is not None:
        raise ValidationError(
            "the URL of a server appears in messages, so it must not contain a password",
            hint=f"pass api_key, or set {API_KEY}",
        )
    return url.rstrip("/").removesuffix("/v1")


def _checked_key(key: str) -> str:
    key = key.strip()  # a key read from a file ends with a newline
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValidationError("the API key contains characters that a header cannot hold", hint=f"check {API_KEY}")
    return key
