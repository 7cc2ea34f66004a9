"""Verified, fenced, ordered, handled; and only what is sealed is answered with 2xx."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.errors import FencedOut, PolicyError, StoreUnavailable, TerminalError, ValidationError
from ragfence.webhooks.hooks import WebhookReply, Webhooks
from ragfence.webhooks.providers import (
    GitHub,
    Meta,
    MoMo,
    Provider,
    WebhookEvent,
    payment_confirmation,
    payment_request,
)
from ragfence.webhooks.signatures import HmacSignature


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def hooks(fence: ragfence.Fence) -> Webhooks:
    providers = {
        "cms": Provider(HmacSignature("s", header="X-Signature"), event_id="id"),
        "github": GitHub("s"),
        "whatsapp": Meta("s", verify_token="token"),
    }
    return Webhooks(fence, providers)


def post(hooks: Webhooks, name: str, value: Any, **headers: str) -> WebhookReply:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    signature = hmac.digest(b"s", body, "sha256").hex()
    signed = {"X-Signature": signature, "X-Hub-Signature-256": f"sha256={signature}"} | headers
    return asyncio.run(hooks.receive(name, signed.items(), body))


def decisions(reply: WebhookReply) -> list[str]:
    assert not isinstance(reply.body, str)
    return [event["decision"] for event in reply.body["events"]]


def page(version: int, event_id: str = "", body: str = "text") -> dict[str, Any]:
    changed = {"id": "p", "version": version, "body": f"{body} {version}"}
    return {"id": event_id or f"e{version}", "type": "page.updated", "page": changed}


def test_an_event_is_handled_once_and_answered_with_the_first_receipt(hooks: Webhooks) -> None:
    calls = []

    @hooks.on("cms", "page.*")
    def handle(event: WebhookEvent) -> dict[str, int]:
        calls.append(event.event_id)
        return {"call": len(calls)}

    replies = [post(hooks, "cms", page(1)) for _ in range(5)]
    assert calls == ["e1"]
    assert [reply.status for reply in replies] == [200] * 5
    assert [decisions(reply)[0] for reply in replies] == ["new", *["duplicate"] * 4]
    assert all(reply.body["events"][0]["result"] == {"call": 1} for reply in replies)  # type: ignore[index, call-overload]


def test_what_is_not_verified_is_not_handled(hooks: Webhooks) -> None:
    calls = []
    hooks.on("cms")(calls.append)
    assert post(hooks, "cms", page(1), **{"X-Signature": "00"}).status == 401
    assert asyncio.run(hooks.receive("cms", [], b"{}")).status == 401
    assert not calls


def test_what_is_signed_but_broken_is_refused(hooks: Webhooks) -> None:
    assert post(hooks, "cms", b"{").status == 400
    assert post(hooks, "cms", b"\xff\xfe").status == 400
    assert post(hooks, "cms", b'{"a": 1, "a": 2}').status == 400
    assert post(hooks, "cms", b" " * (hooks.max_body_bytes + 1)).status == 413
    assert post(hooks, "elsewhere", {}).status == 404


def test_an_older_revision_is_stale_and_not_applied(hooks: Webhooks) -> None:
    state: dict[str, int] = {}

    @hooks.on("cms", "page.updated", object_id="page.id", sequence="page.version")
    def handle(event: WebhookEvent) -> None:
        state[event.payload["page"]["id"]] = event.payload["page"]["version"]

    replies = [post(hooks, "cms", page(version)) for version in (1, 3, 2)]
    assert [decisions(reply)[0] for reply in replies] == ["new", "new", "stale"]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert state == {"p": 3}
    assert post(hooks, "cms", page(2)).status == 200  # the provider asks again: known


def test_the_same_id_with_another_payload_is_a_conflict(hooks: Webhooks) -> None:
    calls = []
    hooks.on("cms")(lambda event: calls.append(event.event_id))
    post(hooks, "cms", page(1))
    reply = post(hooks, "cms", page(1, body="other"))
    assert reply.status == 409
    assert decisions(reply) == ["conflict"]
    assert calls == ["e1"]


def test_an_equal_sequence_with_other_content_is_a_conflict_however_often_it_comes(hooks: Webhooks) -> None:
    calls = []
    hooks.on("cms", object_id="page.id", sequence="page.version")(lambda event: calls.append(event.event_id))
    post(hooks, "cms", page(1))
    replies = [post(hooks, "cms", page(1, event_id="e2", body="other")) for _ in range(8)]
    assert [reply.status for reply in replies] == [409] * 8
    assert calls == ["e1"]


def test_a_handler_that_fails_gives_the_key_back(hooks: Webhooks) -> None:
    calls = []

    @hooks.on("cms")
    def handle(event: WebhookEvent) -> str:
        calls.append(event.event_id)
        if len(calls) == 1:
            raise StoreUnavailable("the store is away")
        if len(calls) == 2:
            raise ZeroDivisionError
        return "done"

    assert [post(hooks, "cms", page(1)).status for _ in range(4)] == [503, 500, 200, 200]
    assert len(calls) == 3


def test_a_terminal_failure_is_an_outcome_that_is_replayed(hooks: Webhooks) -> None:
    calls = []

    @hooks.on("cms")
    async def handle(event: WebhookEvent) -> None:
        calls.append(event.event_id)
        raise TerminalError("no such page")

    replies = [post(hooks, "cms", page(1)) for _ in range(3)]
    assert [reply.status for reply in replies] == [200] * 3
    assert len(calls) == 1
    assert "no such page" in json.dumps(replies[2].body)


def test_a_twin_that_arrives_meanwhile_is_never_answered_with_2xx(hooks: Webhooks) -> None:
    async def both() -> list[WebhookReply]:
        entered, go_on = asyncio.Event(), asyncio.Event()

        @hooks.on("cms")
        async def handle(event: WebhookEvent) -> str:
            entered.set()
            await go_on.wait()
            return "done"

        body = json.dumps(page(1)).encode()
        headers = [("x-signature", hmac.digest(b"s", body, "sha256").hex())]
        first = asyncio.create_task(hooks.receive("cms", headers, body))
        await entered.wait()
        twin = await hooks.receive("cms", headers, body)
        go_on.set()
        return [await first, twin, await hooks.receive("cms", headers, body)]

    first, twin, later = asyncio.run(both())
    assert (first.status, twin.status, later.status) == (200, 503, 200)
    assert twin.headers["retry-after"]


def test_each_message_of_a_body_is_fenced_by_its_own_id(hooks: Webhooks) -> None:
    calls = []
    hooks.on("whatsapp", "message.*")(lambda event: calls.append(event.payload["message"]["id"]))

    def body(*ids: str) -> dict[str, Any]:
        messages = [{"id": each, "type": "text"} for each in ids]
        return {"entry": [{"id": "1", "changes": [{"field": "messages", "value": {"messages": messages}}]}]}

    post(hooks, "whatsapp", body("a", "b"))
    assert decisions(post(hooks, "whatsapp", body("b", "c"))) == ["duplicate", "new"]
    assert calls == ["a", "b", "c"]


def test_each_status_of_a_message_is_an_event(hooks: Webhooks) -> None:
    seen = []
    hooks.on("whatsapp", "status.*")(lambda event: seen.append(event.type))
    for status in ("sent", "delivered", "delivered", "read"):
        value = {"statuses": [{"id": "wamid.1", "status": status}]}
        post(hooks, "whatsapp", {"entry": [{"id": "1", "changes": [{"field": "messages", "value": value}]}]})
    assert seen == ["status.sent", "status.delivered", "status.read"]


def test_metas_challenge_is_answered_for_the_token_alone(hooks: Webhooks) -> None:
    query = {"hub.mode": "subscribe", "hub.verify_token": "token", "hub.challenge": "1158201444"}
    assert hooks.challenge("whatsapp", query) == (200, "1158201444", {})
    for wrong in ({"hub.verify_token": "other"}, {"hub.verify_token": ""}, {"hub.mode": "x"}):
        assert hooks.challenge("whatsapp", query | wrong).status == 403
    assert hooks.challenge("cms", query).status == 403


def test_githubs_events_have_name_and_action(hooks: Webhooks) -> None:
    seen = []
    hooks.on("github", "issues.opened")(lambda event: seen.append(event.event_id))
    headers = {"X-GitHub-Event": "issues", "X-GitHub-Delivery": "guid-1"}
    assert decisions(post(hooks, "github", {"action": "opened"}, **headers)) == ["new"]
    assert decisions(post(hooks, "github", {"action": "closed"}, **headers | {"X-GitHub-Delivery": "2"})) == ["ignored"]
    assert seen == ["guid-1"]


def test_an_event_without_an_id_is_fenced_by_a_digest_of_the_delivery(fence: ragfence.Fence) -> None:
    hooks = Webhooks(fence, {"cms": Provider(HmacSignature("s", header="X-Signature"))})
    calls = []
    hooks.on("cms")(lambda event: calls.append(event.event_id))
    for value in ({"a": 1}, {"a": 1}, {"a": 2}):
        post(hooks, "cms", value)
    assert len(calls) == 2
    assert all(event_id.startswith("sha256:") for event_id in calls)


def test_a_result_that_no_receipt_can_hold_does_not_repeat_the_effect(hooks: Webhooks) -> None:
    calls = []

    @hooks.on("cms")
    def handle(event: WebhookEvent) -> object:
        calls.append(event.event_id)
        return object()

    assert [post(hooks, "cms", page(1)).status for _ in range(2)] == [200, 200]
    assert len(calls) == 1


def test_a_handler_for_an_unknown_provider_or_half_an_order_is_refused(hooks: Webhooks) -> None:
    with pytest.raises(PolicyError, match="unknown provider"):
        hooks.on("unknown")
    with pytest.raises(PolicyError, match="go together"):
        hooks.on("cms", sequence="page.version")


def test_an_event_without_its_sequence_is_refused_and_not_handled(hooks: Webhooks) -> None:
    calls = []
    hooks.on("cms", object_id="page.id", sequence="page.version")(calls.append)
    assert post(hooks, "cms", {"id": "e1", "type": "page.updated", "page": {"id": "p"}}).status == 422
    assert not calls


def test_momo_is_fenced_by_the_transaction_or_else_by_the_reference(fence: ragfence.Fence) -> None:
    hooks = Webhooks(fence, {"momo": MoMo(HmacSignature("s", header="X-Signature"))})
    seen = []
    hooks.on("momo", "payment.*")(lambda event: seen.append(event.event_id))
    for value in (
        {"financialTransactionId": "4711", "externalId": "o1", "status": "PENDING"},
        {"financialTransactionId": "4711", "externalId": "o1", "status": "SUCCESSFUL", "sentAt": 1},
        {"referenceId": "r1", "status": "FAILED"},
        {"referenceId": "r1", "status": "FAILED"},
    ):
        assert post(hooks, "momo", value).status == 200
    assert seen == ["tx:4711:pending", "tx:4711:successful", "ref:r1:failed"]


def test_a_refund_has_one_effect_however_many_events_report_it(fence: ragfence.Fence) -> None:
    """The same event sent twice, and another event about the same refund."""
    hooks = Webhooks(fence, {"cms": Provider(HmacSignature("s", header="X-Signature"), event_id="id")})
    ledger = []

    @fence.once(kind="payment_confirmation", key=ragfence.by_payment_confirmation("pay", transaction="refund.id"))
    def book(payload: dict[str, Any]) -> str:
        ledger.append(payload["refund"]["id"])
        return f"entry-{len(ledger)}"

    @hooks.on("cms", "*refund*")
    def refunded(event: WebhookEvent) -> Any:
        return book({"refund": event.payload["refund"]}).result

    refund = {"id": "re_1", "amount": 1000, "phone": "+256700000001"}
    events = [
        {"id": f"evt_{n}", "type": kind, "refund": refund}
        for n, kind in ((1, "refund.created"), (2, "charge.refunded"))
    ]
    replies = [post(hooks, "cms", event) for event in (*events, *events, events[0])]
    assert ledger == ["re_1"]
    assert {reply.body["events"][0]["result"] for reply in replies} == {"entry-1"}  # type: ignore[index, call-overload]
    counted = fence.audit.counts(by=("kind", "decision")).to_pylist()
    counts = {(row["kind"], row["decision"]): row["count"] for row in counted}
    assert counts["payment_confirmation", "new"] == counts["payment_confirmation", "duplicate"] == 1
    assert counts["webhook", "duplicate"] == 3


def test_a_phone_number_is_nowhere_in_the_stores(tmp_path: Path) -> None:
    phone = "256700000001"
    policy = ragfence.Policy.from_mapping({"on_conflict": {"include_diff": True}})
    key = ragfence.by_payment_request("momo", order="order", amount="amount", phone="phone")
    with ragfence.open(tmp_path / "store", policy=policy) as fence:
        asked = fence.once(kind="payment_request", key=key)(lambda payload: "asked")
        payload = {"order": "o1", "amount": "1000.00", "phone": f"+{phone}"}
        assert key(payload) == key(payload | {"phone": "+256 700 000-001"})
        for _ in range(2):
            assert asked(payload).result == "asked"
        hooks = Webhooks(fence, {"momo": MoMo(HmacSignature("s", header="X-Signature"))})
        hooks.on("momo")(lambda event: None)
        post(hooks, "momo", {"transactionId": "1", "status": "ok", "payer": {"partyId": f"+{phone}"}})
        decided = fence.audit.decisions(kind="payment_request").to_pylist()
        assert [row["decision"] for row in decided] == ["new", "new", "duplicate"]
        fence.audit.drain()
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert stored
    assert phone.encode() not in stored


@pytest.mark.parametrize("amount", ["", "x", "-1", "NaN", "1e99", 1.5, None, True])
def test_what_is_not_an_amount_is_refused(amount: Any) -> None:
    key = ragfence.by_payment_request("momo", order="o", amount="a", phone="p")
    with pytest.raises(ValidationError):
        key({"o": "1", "a": amount, "p": "+256"})


def test_equal_amounts_are_one_payment() -> None:
    key = ragfence.by_payment_request("momo", order="o", amount="a", phone="p")
    amounts = (1000, "1000", "1000.0", Decimal("1000.00"), "1E3")
    assert {key({"o": "1", "a": amount, "p": "+256"})[0] for amount in amounts} == {"provider:momo:order:1:amount:1000"}
    assert key({"o": "1", "a": "9.90", "p": "+256"})[0].endswith(":amount:9.9")


def test_payments_have_keys_of_their_own(fence: ragfence.Fence) -> None:
    assert payment_confirmation("momo", "4711").source_id == "provider:momo:tx:4711"
    asked = payment_request("momo", order_id="o1", amount="1000", phone="+256700000001")
    assert asked.source_id == "provider:momo:order:o1:amount:1000"
    assert "256700000001" not in asked.revision
    assert asked.key != payment_request("momo", order_id="o1", amount="1000", phone="+256700000002").key


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_claim_inside_the_handler_raises_is_not_answered_as_a_duplicate(
    fence: ragfence.Fence, hooks: Webhooks, is_async: bool
) -> None:
    other = fence.once(kind="payment", key=lambda order: order)(lambda order: {"paid": order})("o-1")
    errors = iter([FencedOut("taken over", key=other.key, receipt=other)])
    handled: list[str] = []

    def handle(event: WebhookEvent) -> None:
        for error in errors:
            raise error
        handled.append(event.event_id)

    async def handle_async(event: WebhookEvent) -> None:
        handle(event)

    hooks.on("cms", "*")(handle_async if is_async else handle)
    assert post(hooks, "cms", page(1)).status == 503
    assert decisions(post(hooks, "cms", page(1))) == ["new"]
    assert decisions(post(hooks, "cms", page(1))) == ["duplicate"]
    assert handled == ["e1"]


def test_signed_json_is_not_read_as_a_form_by_a_forged_content_type(hooks: Webhooks) -> None:
    seen: list[Any] = []
    hooks.on("cms", "*")(lambda event: seen.append(event.payload))
    body = json.dumps({"id": "e1", "type": "comment", "text": "&payload=%7B%22id%22%3A%22forged%22%7D&"}).encode()
    reply = post(hooks, "cms", body, **{"Content-Type": "application/x-www-form-urlencoded"})
    assert (reply.status, seen) == (400, [])


@pytest.mark.parametrize("change", [{"version": None}, {"version": "²"}, {"version": "--5"}, {"id": None}])
def test_an_event_that_cannot_be_ordered_is_refused_and_not_applied(hooks: Webhooks, change: dict[str, Any]) -> None:
    applied: list[str] = []
    hooks.on("cms", "*", object_id="page.id", sequence="page.version")(lambda event: applied.append(event.event_id))
    event = page(1)
    event["page"] |= change
    assert post(hooks, "cms", event).status == 422
    assert applied == []
