"""Webhooks by policy alone: verified without an API key, bounded, handled once; what was forged leaves nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

import ragfence
from ragfence import Policy
from ragfence.errors import PolicyError
from ragfence.server.app import create_app
from tests.server.processes import Served, served
from tests.server.webhook_calls import (
    DOCUMENT,
    SCHEMES,
    WITHOUT_TIMESTAMP,
    delivery_of,
    meta_body,
    page,
    policy_of,
    policy_of_all,
    secret_of,
    signed,
)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SCHEMES:
        monkeypatch.setenv(f"SECRET_{name.upper()}", secret_of(name))
    monkeypatch.setenv("VERIFY_TOKEN", "token")
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, webhooks=policy_of_all()) as made:
        yield made


@pytest.fixture
def fence(api: Served) -> Iterator[ragfence.Fence]:
    policy = Policy(content_hash="sha256")  # that of a server
    with ragfence.open(api.place / "fence", objects=api.place / "objects", tenant="acme", policy=policy) as opened:
        yield opened


def post(api: Served, scheme: str, event: dict[str, Any], **more: Any) -> httpx.Response:
    headers, body = delivery_of(scheme, event, **more)
    return deliver(api, scheme, headers, body)


def deliver(api: Served, name: str, headers: dict[str, str], body: bytes) -> httpx.Response:
    answer: httpx.Response = api.client.post(f"/webhooks/{name}", content=body, headers=headers)  # type: ignore[assignment]
    return answer


def decisions(answer: httpx.Response) -> list[str]:
    return [event["decision"] for event in answer.json()["events"]]


def texts(fence: ragfence.Fence, doc_id: str = "p") -> list[str]:
    return [snippet.text for snippet in fence.documents.snippets(doc_id)]


def rows(fence: ragfence.Fence) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fence.audit.decisions().to_pylist()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_event_of_each_scheme_becomes_a_document_once(api: Served, fence: ragfence.Fence, scheme: str) -> None:
    answers = [post(api, scheme, page(1)) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5, answers[0].text
    assert [decisions(answer)[0] for answer in answers] == ["new", *["duplicate"] * 4]
    assert len({answer.json()["events"][0]["result"]["snippet_ids"][0] for answer in answers}) == 1
    assert texts(fence) == ["Leave is 1 days."]
    assert [row["kind"] for row in rows(fence) if row["decision"] == "new" and row["phase"] == "seal"] == [
        "document",
        "webhook",
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_revisions_1_3_2_end_at_state_3(api: Served, fence: ragfence.Fence, scheme: str) -> None:
    answers = [post(api, scheme, page(version)) for version in (1, 3, 2)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [decisions(answer)[0] for answer in answers] == ["new", "new", "stale"]
    assert texts(fence) == ["Leave is 3 days."]


def forged(scheme: str) -> dict[str, tuple[dict[str, str], bytes]]:
    """Deliveries that must not be accepted, by what is wrong with them."""
    headers, body = delivery_of(scheme, page(1))
    other = {"standard": "whsec_" + "QUJD" * 8}.get(scheme, "the secret of somebody else")
    made = {
        "another secret": delivery_of(scheme, page(1), secret=other),
        "another body": (headers, body.replace(b"Leave", b"Loave")),
        "truncated": (headers, body[:-1]),
        "extended": (headers, body + b" "),
        "empty": (headers, b""),
        "unsigned": ({"content-type": "application/json"}, body),
    }
    if scheme not in WITHOUT_TIMESTAMP:
        made["old"] = delivery_of(scheme, page(1), at=time.time() - 400)
        made["from the future"] = delivery_of(scheme, page(1), at=time.time() + 400)
        old = delivery_of(scheme, page(1), at=time.time() - 400)[0]
        for name in ("webhook-timestamp", "x-time"):
            if name in old:
                made["replayed as if it were new"] = ({**old, name: str(int(time.time()))}, body)
        if scheme == "stripe":
            signature = old["stripe-signature"].partition(",")[2]
            made["replayed as if it were new"] = (
                {**old, "stripe-signature": f"t={int(time.time())},{signature}"},
                body,
            )
    if scheme == "standard":
        made["another id"] = ({**headers, "webhook-id": "msg_2"}, body)
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_verified_leaves_no_row_and_no_document(api: Served, fence: ragfence.Fence, scheme: str) -> None:
    before = REGISTRY.get_sample_value("ragfence_auth_failures_total", {"reason": "webhook"}) or 0
    cases = forged(scheme)
    for case, (headers, body) in cases.items():
        answer = deliver(api, scheme, headers, body)
        assert answer.status_code == 401, case
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "AUTH.webhook", case
    assert rows(fence) == []
    assert fence.documents.snippets("p") == []
    after = REGISTRY.get_sample_value("ragfence_auth_failures_total", {"reason": "webhook"}) or 0
    assert after - before == len(cases)
    stored = b"".join(file.read_bytes() for file in api.place.rglob("*") if file.is_file())
    assert b"Loave" not in stored
    assert b"Leave" not in stored


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_too_long_is_refused_by_its_length_or_as_soon_as_it_is(tmp_path: Path, scheme: str) -> None:
    with served(tmp_path, webhooks={scheme: policy_of_all(max_body_bytes=1000)[scheme]}) as api:
        headers, body = delivery_of(scheme, page(1, body="x" * 1000))
        assert deliver(api, scheme, headers, body).status_code == 413

        def pieces() -> Iterator[bytes]:  # without a Content-Length
            yield body[:600]
            yield body[600:]

        streamed = api.client.post(f"/webhooks/{scheme}", content=pieces(), headers=headers)
        assert streamed.status_code == 413
        assert post(api, scheme, page(1)).status_code == 200


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_secret_is_rotated_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    new, file = ("whsec_" + "QUJD" * 8 if scheme == "standard" else "the next secret"), tmp_path / "secret"
    file.write_text(f"{new}\n")
    old = policy_of_all()[scheme]
    with served(tmp_path, webhooks={scheme: {**old, "secret_file": str(file)}}) as api:
        assert post(api, scheme, page(1)).status_code == 200
        assert post(api, scheme, page(2), secret=new).status_code == 200
    del old["secret_env"]
    with served(tmp_path, webhooks={scheme: {**old, "secret_file": str(file)}}) as api:
        assert post(api, scheme, page(3)).status_code == 401
        assert post(api, scheme, page(3), secret=new).status_code == 200


def test_the_same_id_with_another_payload_is_a_conflict_with_a_diff_and_not_applied(
    api: Served, fence: ragfence.Fence
) -> None:
    assert post(api, "standard", page(1)).status_code == 200
    answer = post(api, "standard", page(2, event_id="e1"))
    assert answer.status_code == 409
    assert {change["path"] for change in answer.json()["diff"]} == {"/content", "/sequence"}
    assert decisions(answer) == ["conflict"]
    assert texts(fence) == ["Leave is 1 days."]
    assert "Leave" not in answer.text


def test_an_equal_sequence_with_other_content_is_a_conflict_however_often_it_comes(
    api: Served, fence: ragfence.Fence
) -> None:
    assert post(api, "standard", page(1)).status_code == 200
    answers = [post(api, "standard", page(1, event_id="e2", body="Other")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [409] * 3
    assert texts(fence) == ["Leave is 1 days."]


def test_a_deletion_retracts_the_document_and_an_older_update_does_not_bring_it_back(
    api: Served, fence: ragfence.Fence
) -> None:
    post(api, "standard", page(1))
    assert decisions(post(api, "standard", page(3, deleted=True))) == ["new"]
    assert texts(fence) == []
    assert decisions(post(api, "standard", page(2))) == ["stale"]
    assert texts(fence) == []
    post(api, "standard", page(4))
    assert texts(fence) == ["Leave is 4 days."]


def test_each_message_of_a_body_has_a_key_of_its_own(api: Served, fence: ragfence.Fence) -> None:
    def body(*ids: str) -> dict[str, Any]:
        return meta_body(*(page(1, event_id=each, doc_id=each, body=f"Text of {each}") for each in ids))

    first = deliver(api, "meta", *signed("meta", body("a", "b")))
    second = deliver(api, "meta", *signed("meta", body("b", "c")))
    assert decisions(first) == ["new", "new"]
    assert decisions(second) == ["duplicate", "new"]
    assert [texts(fence, doc_id) for doc_id in "abc"] == [["Text of a"], ["Text of b"], ["Text of c"]]


def test_the_challenge_of_meta_is_answered_for_the_token_alone(api: Served) -> None:
    query = {"hub.mode": "subscribe", "hub.verify_token": "token", "hub.challenge": "1158201444"}
    answer = api.client.get("/webhooks/meta", params=query)
    assert (answer.status_code, answer.text) == (200, "1158201444")
    assert answer.headers["content-type"].startswith("text/plain")
    assert api.client.get("/webhooks/meta", params=query | {"hub.verify_token": "x"}).status_code == 403
    assert api.client.get("/webhooks/github", params=query).status_code == 403


def test_addresses_of_no_webhook_are_those_of_any_unknown_path(api: Served) -> None:
    assert api.client.post("/webhooks/unknown", content=b"{}").status_code == 401
    assert api.client.post("/webhooks/cms/more", content=b"{}").status_code == 401
    assert api.caller().post("/webhooks/unknown", {}).status_code == 404
    wrong = api.client.put("/webhooks/standard", content=b"{}")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")
    assert api.client.options("/webhooks/standard").status_code == 204


def test_without_webhooks_in_the_policy_the_server_has_no_such_address(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        assert deliver(api, "standard", *delivery_of("standard", page(1))).status_code == 401
        assert not [path for path in api.client.get("/openapi.json").json()["paths"] if "webhooks" in path]


def test_an_event_that_is_not_what_the_policy_expects_is_refused_before_it_is_claimed(
    api: Served, fence: ragfence.Fence
) -> None:
    broken = page(1)
    del broken["page"]["version"]
    for _ in range(8):  # more often than a key may be tried
        answer = post(api, "standard", broken)
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION")
        assert "$.page.version is missing" in answer.json()["detail"]
    assert post(api, "standard", page(1, body=" ")).status_code == 422
    assert rows(fence) == []
    assert post(api, "standard", page(1)).status_code == 200


def test_only_the_events_of_the_policy_are_handled(tmp_path: Path) -> None:
    with served(tmp_path, webhooks={"standard": policy_of("standard", events=["page.*"])}) as api:
        assert decisions(post(api, "standard", {"id": "u", "type": "user.created"})) == ["ignored"]
        assert decisions(post(api, "standard", page(1))) == ["new"]


def test_each_webhook_belongs_to_its_tenant(tmp_path: Path) -> None:
    hooks = {"standard": policy_of("standard", tenant="other"), "github": policy_of("github")}
    with served(tmp_path, webhooks=hooks) as api:
        post(api, "standard", page(1, doc_id="a"))
        post(api, "github", page(1, doc_id="b"))
        assert api.caller("other").get("/v1/documents/a").status_code == 200
        assert api.caller("acme").get("/v1/documents/a").status_code == 404
        assert api.caller("acme").get("/v1/documents/b").status_code == 200


def test_a_verified_delivery_counts_against_the_quota_of_its_tenant(tmp_path: Path) -> None:
    with served(tmp_path, webhooks={"standard": policy_of("standard")}, http={"quotas": ["2/hour"]}) as api:
        unsigned = [deliver(api, "standard", {}, b"{}").status_code for _ in range(3)]
        answers = [post(api, "standard", page(version)) for version in (1, 2, 3)]
    assert unsigned == [401] * 3
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) > 0


def test_an_address_that_forges_is_slowed_down_and_logged_and_a_provider_that_was_verified_is_not(
    api: Served, caplog: pytest.LogCaptureFixture
) -> None:
    headers, body = delivery_of("github", page(1), secret="wrong")
    with caplog.at_level(logging.WARNING, "ragfence.server"):
        statuses = {deliver(api, "github", headers, body).status_code for _ in range(80)}
    assert statuses == {401, 429}
    lines = [record.getMessage() for record in caplog.records if "webhook github" in record.getMessage()]
    assert len(lines) == 1
    assert "Leave" not in caplog.text
    refused = deliver(api, "standard", *delivery_of("standard", page(1)))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    time.sleep(0.3)  # some budget comes back
    assert post(api, "standard", page(1)).status_code == 200
    for _ in range(80):
        deliver(api, "github", headers, body)
    assert post(api, "standard", page(1)).status_code == 200


def test_a_store_that_is_away_asks_the_provider_to_come_again(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from ragfence.errors import StoreUnavailable
    from ragfence.stores.sqlite import SqliteFences

    assert post(api, "standard", page(1)).status_code == 200

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(SqliteFences, "claim", away)
        answer = post(api, "standard", page(2))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
    assert decisions(post(api, "standard", page(2))) == ["new"]


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_server_without_the_secret_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("SECRET_STANDARD")
    else:
        monkeypatch.setenv("SECRET_STANDARD", value)
    policy = Policy.from_mapping({"webhooks": {"standard": policy_of("standard")}})
    with pytest.raises(PolicyError, match="SECRET_STANDARD is not set"):
        create_app(tmp_path / "fence", objects=tmp_path / "objects", policy=policy)


def test_every_secret_that_is_missing_is_named_at_once_and_none_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_STANDARD", "whsec_notbase64***")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    hooks = {
        "standard": policy_of("standard"),
        "github": {**policy_of("github"), "secret_env": ["SECRET_GITHUB", "MISSING"]},
        "stripe": {"scheme": "stripe", "secret_file": str(empty), "document": DOCUMENT},
        "hmac": policy_of("hmac", mode="inbox", inbox_env="NO_INBOX"),
    }
    policy = Policy.from_mapping({"webhooks": hooks})
    with pytest.raises(PolicyError) as refused:
        create_app(tmp_path / "fence", objects=tmp_path / "objects", policy=policy)
    assert len(refused.value.details["problems"]) == 4
    for part in ("MISSING", str(empty), "NO_INBOX", "base64"):
        assert part in refused.value.message
    assert "notbase64" not in str(refused.value)


def test_with_an_inbox_an_event_is_durable_before_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragfence.queues import open_transport

    url = f"sqlite:///{tmp_path / 'inbox.db'}?queue=inbox"
    monkeypatch.setenv("RAGFENCE_INBOX", url)
    with served(tmp_path, webhooks={"standard": policy_of("standard", mode="inbox")}) as api:
        answer = post(api, "standard", page(1))
        assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
        assert deliver(api, "standard", {}, b"{}").status_code == 401
        broken = page(2)
        del broken["page"]
        assert post(api, "standard", broken).status_code == 422
        long = post(api, "standard", page(2, body="x" * 300_000))
        assert (long.status_code, long.json()["code"]) == (413, "VALIDATION")
        (message,) = open_transport(url).receive(10, 0)
        assert message.body["payload"] == page(1)
        assert (message.tenant, message.route) == ("acme", "webhooks/standard")


def test_events_are_counted_by_what_became_of_them(api: Served) -> None:
    def counted(result: str) -> float:
        labels = {"tenant": "acme", "webhook": "stripe", "result": result}
        return REGISTRY.get_sample_value("ragfence_webhook_events_total", labels) or 0

    before = {result: counted(result) for result in ("new", "duplicate", "stale", "conflict")}
    for event in (page(1), page(3), page(1), page(2), page(3, event_id="e9", body="Other")):
        post(api, "stripe", event)
    after = {result: counted(result) for result in before}
    assert {result: after[result] - before[result] for result in before} == {
        "new": 2,
        "duplicate": 1,
        "stale": 1,
        "conflict": 1,
    }


def test_the_description_lists_the_routes_without_an_api_key(api: Served) -> None:
    described = api.client.get("/openapi.json").json()["paths"]["/webhooks/{name}"]
    assert described["post"]["security"] == described["get"]["security"] == []
    assert {"200", "202", "401", "409", "413", "422", "429", "503"} <= described["post"]["responses"].keys()
    assert json.dumps(described).count("SECRET") == 0
