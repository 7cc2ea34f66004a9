"""The router of FastAPI, and the way from a delivery through the inbox to a document that is found."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import ragfence
from ragfence.queues.sql import SqlTransport
from ragfence.webhooks.hooks import Webhooks
from ragfence.webhooks.providers import Meta, Provider, WebhookEvent
from ragfence.webhooks.signatures import HmacSignature


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[SqlTransport]:
    opened = SqlTransport(f"sqlite:///{tmp_path / 'inbox.db'}", "inbox")
    yield opened
    opened.close()


def client_of(hooks: Webhooks) -> TestClient:
    app = FastAPI()
    app.include_router(hooks.router())
    return TestClient(app)


def post(client: TestClient, name: str, value: Any) -> Any:
    body = json.dumps(value).encode()
    return client.post(
        f"/webhooks/{name}", content=body, headers={"X-Signature": hmac.digest(b"s", body, "sha256").hex()}
    )


def test_a_delivery_is_answered_over_http(fence: ragfence.Fence) -> None:
    hooks = Webhooks(fence, {"cms": Provider(HmacSignature("s", header="X-Signature"), event_id="id")})
    hooks.on("cms")(lambda event: {"seen": event.event_id})
    client = client_of(hooks)
    first, again = (post(client, "cms", {"id": "e1", "type": "t"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["events"][0]["result"] == again.json()["events"][0]["result"] == {"seen": "e1"}
    assert client.post("/webhooks/cms", content=b"{}").status_code == 401
    assert post(client, "other", {}).status_code == 404
    assert client.post("/webhooks/cms", content=b" " * (hooks.max_body_bytes + 1)).status_code == 413


def test_the_challenge_is_answered_as_text(fence: ragfence.Fence) -> None:
    client = client_of(Webhooks(fence, {"whatsapp": Meta("s", verify_token="token")}))
    query = {"hub.mode": "subscribe", "hub.verify_token": "token", "hub.challenge": "<b>1</b>"}
    reply = client.get("/webhooks/whatsapp", params=query)
    assert (reply.status_code, reply.text) == (200, "<b>1</b>")
    assert reply.headers["content-type"].startswith("text/plain")
    assert client.get("/webhooks/whatsapp", params=query | {"hub.verify_token": "x"}).status_code == 403


def test_with_an_inbox_the_event_is_durable_before_it_is_accepted_and_handled_once(
    fence: ragfence.Fence, inbox: SqlTransport
) -> None:
    hooks = Webhooks(fence, {"cms": Provider(HmacSignature("s", header="X-Signature"), event_id="id")}, inbox=inbox)

    @hooks.on("cms", "page.updated", object_id="page.id", sequence="page.version")
    def page(event: WebhookEvent) -> Any:
        changed = event.payload["page"]
        return fence.documents.ingest(ragfence.Document(changed["id"], changed["body"], sequence=changed["version"]))

    client = client_of(hooks)
    for version in (1, 1, 3, 2, 3):
        changed = {"id": "page-7", "version": version, "body": f"Leave is {version} days."}
        reply = post(client, "cms", {"id": f"e{version}", "type": "page.updated", "page": changed})
        assert (reply.status_code, reply.json()) == (202, {"accepted": 1})
    assert post(client, "cms", {"id": "e9", "type": "user.created"}).json() == {"accepted": 0}
    assert inbox.depth().visible == 5
    consumer = hooks.consumer(batch=1)
    while consumer.run_once():
        pass
    assert consumer.counts == {"new": 3, "duplicate": 2}
    assert [snippet.text for snippet in fence.documents.snippets("page-7")] == ["Leave is 3 days."]


def test_a_full_inbox_asks_the_provider_to_come_again(fence: ragfence.Fence, tmp_path: Path) -> None:
    full = SqlTransport(f"sqlite:///{tmp_path / 'full.db'}", high_water=1)
    hooks = Webhooks(fence, {"cms": Provider(HmacSignature("s", header="X-Signature"), event_id="id")}, inbox=full)
    hooks.on("cms")(lambda event: None)
    client = client_of(hooks)
    assert post(client, "cms", {"id": "e1"}).status_code == 202
    refused = post(client, "cms", {"id": "e2"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    full.close()
