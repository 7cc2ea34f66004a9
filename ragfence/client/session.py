"""What both clients are opened with: where the server is, who asks, and how httpx is asked."""

from __future__ import annotations

import ipaddress
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
from ragfence.client.errors import cleaned
from ragfence.client.keys import Keys
from ragfence.client.retry import RetryLoop, RetryPolicy
from ragfence.client.steps import Lost, Send
from ragfence.core.settings import SERVE_HOST, SERVE_PORT
from ragfence.errors import ApiRefused, InsecureUrl, RagfenceError, ValidationError

TIMEOUT_S: Final = 5.0
"""half of the usual budget: an answer that is lost without a word leaves time to ask again"""
URL, API_KEY, ALLOW_HTTP = "RAGFENCE_URL", "RAGFENCE_API_KEY", "RAGFENCE_ALLOW_HTTP"
LOCAL_URL: Final = f"http://{SERVE_HOST}:{SERVE_PORT}"
"""where `ragfence serve` listens unless it is told otherwise"""


def core_of(
    url: str | None,
    api_key: str | None,
    timeout_s: float,
    retry: RetryPolicy | None,
    run: str | None,
    clock: Callable[[], float] | None,
) -> ClientCalls:
    if not timeout_s > 0:
        raise ValidationError(f"timeout_s is above 0, not {timeout_s!r}")
    secret = _checked_key(os.environ.get(API_KEY, "") if api_key is None else api_key)
    return ClientCalls(
        RetryLoop(
            url=_checked_url(os.environ.get(URL, "") or LOCAL_URL if url is None else url),
            secret=secret,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            clock=clock or time.monotonic,
            dice=random.Random(),
        ),
        Keys(run),
    )


class ClientSession:
    """The parts of httpx that both clients use in the same way."""

    def __init__(self, core: ClientCalls, *, allow_http: bool | None = None) -> None:
        with needs_extra("client", "ragfence.client"):
            self.httpx: Any = import_module("httpx")
        self._conduct = core.conduct
        self._allow_http = os.environ.get(ALLOW_HTTP, "") == "1" if allow_http is None else allow_http
        httpx = self.httpx
        self._passing = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)

    def options(self, transport: Any) -> dict[str, Any]:
        headers = {"User-Agent": f"ragfence/{__version__}", "Accept": "application/json"}
        if self._conduct.secret:
            self._check_secrecy(transport)
            # Only here: httpx hides it in what it shows, and a step that stands in a traceback has none.
            headers["Authorization"] = f"Bearer {self._conduct.secret}"
        # No redirects: a write would become a GET, and the API key would go to another server.
        options = {"base_url": self._conduct.url, "headers": headers, "follow_redirects": False}
        return options if transport is None else options | {"transport": transport}

    def _check_secrecy(self, transport: Any) -> None:
        """Raises `InsecureUrl` where the API key could be read on its way."""
        httpx, url = self.httpx, self._conduct.url
        in_this_process = (httpx.ASGITransport, httpx.WSGITransport, httpx.MockTransport)
        parts = urlsplit(url)
        if parts.scheme == "https" or self._allow_http or isinstance(transport, in_this_process):
            return
        if not _is_loopback(parts.hostname or ""):
            raise InsecureUrl(f"the API key would be sent to {url} over plain HTTP, where others can read it")

    def arguments(self, send: Send) -> dict[str, Any]:
        return {
            "method": send.method,
            "url": send.url,
            "headers": dict(send.headers),
            "content": send.body,
            "timeout": send.silence_s,
        }

    def trouble(self, error: Exception) -> Lost:
        """What may pass, as `Lost`; raises what will not."""
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, self._passing):
            return Lost(
                words,
                error,
                timeout=isinstance(error, self.httpx.TimeoutException),
                unconnected=isinstance(error, self.httpx.ConnectError),
            )
        raise self._refused(cleaned(words, self._conduct.secret)) from error

    def too_slow(self, send: Send) -> Lost:
        return Lost(f"its answer was not complete after {send.whole_s:.1f} s", timeout=True)

    def _refused(self, words: str) -> RagfenceError:
        return ApiRefused(f"{self._conduct.url} could not be asked: {words}", hint=f"look at the URL ({URL})")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _checked_url(url: str) -> str:
    if not url:
        raise ValidationError("the client needs the URL of a server", hint=f"pass one, or set {URL}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an address that is none
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValidationError("the URL of a server is such as https://ingest.example, without a query")
    if parts.username is not None:
        raise ValidationError(
            "the URL of a server is shown in messages, so it holds no password",
            hint=f"give an api_key, or set {API_KEY}",
        )
    return url.rstrip("/").removesuffix("/v1")


def _checked_key(key: str) -> str:
    key = key.strip()  # a key read from a file ends with a newline
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValidationError("the API key has characters that no header can hold", hint=f"look at {API_KEY}")
    return key
