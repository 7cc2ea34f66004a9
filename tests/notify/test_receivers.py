"""Webhooks: signed, never in the clear, never redirected, and what each answer means."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ragfence.errors import PolicyError, QueueFull, TerminalError, TransportUnavailable, WebhookUnverified
from ragfence.notify import Announcement, WebhookReceiver
from ragfence.notify.announcements import announce
from ragfence.webhooks.signatures import Delivery, StandardSignature

OLD, NEW = "whsec_b2xkIHNlY3JldCBvZiBhIHRlc3Q=", "whsec_bmV3IHNlY3JldCBvZiBhIHRlc3Q="


class Hook:
    """A server that keeps what it was sent and answers as it is told."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self.status, self.pause_s = 204, 0.0
        self.headers: dict[str, str] = {}
        hook: Any = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.got.append(Delivery.of(self.headers.items(), body))
                time.sleep(hook.pause_s)
                self.send_response(hook.status)
                for name, value in hook.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def event() -> Announcement:
    return announce("acme", "document.ingested", "document:ab", 1_700_000_000_123, {"doc_id": "ä"}, "1.1")


def send(hook: Hook, event: Announcement, *secrets: str, **given: Any) -> None:
    receiver = WebhookReceiver(hook.url, *secrets, **given)
    try:
        receiver(event)
    finally:
        receiver.close()


def test_a_delivery_is_signed_with_every_secret(hook: Hook, event: Announcement) -> None:
    send(hook, event, OLD, NEW)
    (delivery,) = hook.got
    for secret in (OLD, NEW):
        assert StandardSignature(secret).verify(delivery, time.time()).event_id == event.event_id
    with pytest.raises(WebhookUnverified):
        StandardSignature("whsec_c29tZWJvZHkgZWxzZQ==").verify(delivery, time.time())
    assert json.loads(delivery.body) == {
        "type": "document.ingested",
        "timestamp": "2023-11-14T22:13:20.123Z",
        "id": event.event_id,
        "tenant": "acme",
        "source": "document:ab",
        "data": {"doc_id": "ä"},
    }


def test_the_library_of_standard_webhooks_verifies_it(hook: Hook, event: Announcement) -> None:
    standardwebhooks = pytest.importorskip("standardwebhooks")
    send(hook, event, NEW)
    (delivery,) = hook.got
    verified = standardwebhooks.Webhook(NEW).verify(delivery.body, dict(delivery.headers))
    assert verified["id"] == event.event_id


@pytest.mark.parametrize(
    ("status", "error"),
    [(200, None), (429, QueueFull), (503, QueueFull), (409, QueueFull), (400, TerminalError), (301, TerminalError)],
)
def test_what_an_answer_means(hook: Hook, event: Announcement, status: int, error: type[Exception] | None) -> None:
    hook.status, hook.headers = status, {"retry-after": "7", "location": "http://127.0.0.1:1/elsewhere"}
    if error is None:
        send(hook, event)
    else:
        with pytest.raises(error) as raised:
            send(hook, event)
        if error is QueueFull:
            assert getattr(raised.value, "retry_after_ms") == 7000  # noqa: B009  # of this subclass
    assert len(hook.got) == 1


def test_a_receiver_that_does_not_answer_is_tried_again_later(hook: Hook, event: Announcement) -> None:
    hook.pause_s = 1.0
    with pytest.raises(TransportUnavailable):
        send(hook, event, timeout_s=0.1)
    with pytest.raises(TransportUnavailable):
        WebhookReceiver("http://127.0.0.1:1/")(event)


@pytest.mark.parametrize("url", ["http://example.com/x", "http://10.0.0.1/", "http://localhost.example.com/"])
def test_plain_http_to_other_machines_is_refused(url: str) -> None:
    with pytest.raises(PolicyError, match="not encrypted"):
        WebhookReceiver(url)
    WebhookReceiver(url, allow_http=True).close()


@pytest.mark.parametrize("url", ["", "ftp://example.com", "https://", "example.com/x", "https://[::1"])
def test_what_is_not_the_url_of_a_webhook_is_refused(url: str) -> None:
    with pytest.raises(PolicyError, match="not the URL"):
        WebhookReceiver(url)


def test_no_password_is_shown() -> None:
    with pytest.raises(PolicyError) as raised:
        WebhookReceiver("http://app:hunter2@example.com/x")
    assert "hunter2" not in str(raised.value)
    assert "hunter2" not in repr(WebhookReceiver("https://app:hunter2@example.com/x"))
