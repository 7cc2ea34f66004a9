"""Where events go: a webhook, a queue, or a function. Each takes one event at a time; the notifier tries again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from ragfence.core.backoff import may_pass, retry_after_s
from ragfence.core.urls import is_loopback, show_url
from ragfence.errors import Hint, PolicyError, QueueFull, TerminalError, TransportUnavailable
from ragfence.notify.announcements import Announcement
from ragfence.queues.transport import Envelope, Transport
from ragfence.webhooks.signatures import StandardSignature

TIMEOUT_S: Final = 10.0
REFUSALS_THAT_PASS: Final = (408, 409, 425)


Receiver: TypeAlias = Callable[[Announcement], Any]
"""Takes one event. An error of ragfence that is not transient refuses it; after any other it is tried again."""


class WebhookReceiver:
    """Sends each event as an HTTP POST.

    Args:
        url: Where to. Plain http is only for this machine, unless `allow_http`.
        secrets: `whsec_` and base64; each event is signed with every one of them, so that they can be rotated.
        timeout_s: How long the receiver may stay silent before an attempt fails.
        allow_http: Also send over plain http to other machines, where everybody on the way can read it.

    >>> Notifier(fence, to=WebhookReceiver("https://example.com/hooks", "whsec_...")).run()  # doctest: +SKIP
    """

    def __init__(self, url: str, *secrets: str, timeout_s: float = TIMEOUT_S, allow_http: bool = False) -> None:
        from ragfence._extras import needs_extra

        with needs_extra("client", "Sending events by HTTP"):
            import httpx
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError:
            host = ""
        if not host or parts.scheme not in ("http", "https"):
            raise PolicyError(f"{show_url(url)} is not the URL of a webhook", hint="https://host/path")
        if parts.scheme == "http" and not allow_http and not is_loopback(host):
            raise PolicyError(
                f"{show_url(url)} is not encrypted: everybody on the way could read the events",
                hint=Hint(
                    "use https, or allow_http=True inside a network that you trust",
                    cli="use https, or --allow-http inside a network that you trust",
                ),
            )
        self._url, self._httpx = url, httpx
        self._signature = StandardSignature(*secrets) if secrets else None
        # No redirects: the events would go where nobody decided to send them.
        self._http = httpx.Client(timeout=timeout_s, follow_redirects=False, headers={"user-agent": "ragfence"})

    def __repr__(self) -> str:
        return f"WebhookReceiver({show_url(self._url)!r})"

    def __call__(self, announcement: Announcement) -> None:
        body = json.dumps(announcement.payload(), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"content-type": "application/json", "webhook-id": announcement.event_id}
        if self._signature is not None:
            headers |= self._signature.sign(announcement.event_id, int(time.time()), body)
        try:
            with self._http.stream("POST", self._url, content=body, headers=headers) as response:
                status, wait_s = response.status_code, response.headers.get("retry-after")
        except self._httpx.HTTPError as error:
            raise TransportUnavailable(f"{show_url(self._url)}: {type(error).__name__}") from None
        if 200 <= status < 300:
            return
        if may_pass(status) or status in REFUSALS_THAT_PASS:
            asked_s = retry_after_s(wait_s, datetime.now(UTC))
            after_ms = None if asked_s is None else int(1000 * asked_s)
            raise QueueFull(f"{show_url(self._url)} answered {status}", retry_after_ms=after_ms)
        raise TerminalError(f"{show_url(self._url)} answered {status}")

    def close(self) -> None:
        self._http.close()


def receiver_of(to: Transport | Callable[[Announcement], Any]) -> Receiver:
    """A function as it is, or one that sends to a queue."""
    if callable(to):
        return to
    queue = to

    def send(announcement: Announcement) -> None:
        envelope = Envelope(
            body=announcement.payload(),
            event_id=announcement.event_id,
            source_id=str(announcement.data.get("doc_id", announcement.source)),
            dedupe_key=announcement.event_id,
            route=f"notify:{announcement.type}",
            group=announcement.source[:128],
        )
        queue.send([envelope])

    return send
