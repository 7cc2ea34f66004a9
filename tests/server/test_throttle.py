"""Wrong credentials are counted, logged and slowed down; who has a key is served all the while."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from starlette.testclient import TestClient

from ragfence import Policy
from ragfence.server import app as app_module
from ragfence.server.apikeys import ApiKeys, _packed, _token
from ragfence.server.app import create_app
from ragfence.server.auth import AuthMiddleware
from ragfence.server.throttle import BURST, LOG_LINES, FailureThrottle, address_of
from ragfence.server.webhooks import WebhookGate
from ragfence.stores.local import LocalObjects
from ragfence.testing.memory import FaultyObjects
from tests.server.processes import Caller, served


class Hands:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wrong_token(tenant: str = "acme") -> str:
    """Well formed, with a right checksum: anybody can make one."""
    return _token(tenant, _packed(secrets.token_bytes(10)), secrets.token_bytes(32))


def counted(reason: str) -> float:
    return REGISTRY.get_sample_value("ragfence_auth_failures_total", {"reason": reason}) or 0.0


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    """The object store of the server, with its calls counted."""
    made = FaultyObjects(LocalObjects(tmp_path / "objects"))
    monkeypatch.setattr(app_module, "open_objects_of", lambda *_: made)
    yield made
    made.close()


def test_many_wrong_tokens_leave_a_trace_and_cost_the_store_little(
    tmp_path: Path, objects: FaultyObjects, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(tmp_path / "fence", objects=tmp_path / "objects", policy=Policy())
    made = ApiKeys(objects.inner).create("acme")
    before = {reason: counted(reason) for reason in ("invalid", "throttled")}
    with TestClient(app, base_url="http://app") as client, caplog.at_level(logging.WARNING, "ragfence.server"):
        good = Caller(client, made.token)
        assert good.get("/v1/aliases").status_code == 200
        objects.calls.clear()
        tokens = [wrong_token() for _ in range(1500)]
        answers = [Caller(client, token).get("/v1/aliases") for token in tokens]
        asked = objects.calls["get"]
        # Known before: served, whatever comes from its address.
        assert good.get("/v1/aliases").status_code == 200
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {401, 429}
    assert statuses[:BURST] == [401] * BURST
    slowed = [answer for answer in answers if answer.status_code == 429]
    assert {answer.json()["code"] for answer in slowed} == {"RATE_LIMIT.credentials"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in slowed)
    assert asked == 2 * statuses.count(401)  # a refused one asks nothing
    assert counted("invalid") - before["invalid"] == statuses.count(401)
    assert counted("throttled") - before["throttled"] == len(slowed)
    lines = [record.getMessage() for record in caplog.records if record.name == "ragfence.server"]
    assert 1 <= len(lines) <= 2
    assert "refused credentials from" in lines[0]
    assert not [token for token in tokens if any(token.rpartition("_")[2] in line for line in lines)]


def test_a_key_made_meanwhile_works_and_one_that_was_let_in_is_checked_again_under_attack(
    tmp_path: Path, objects: FaultyObjects
) -> None:
    keys = ApiKeys(objects.inner)
    with served(tmp_path) as api:
        gate: Any = api.app.front  # type: ignore[attr-defined]
        while not isinstance(gate, AuthMiddleware):
            gate = gate._others if isinstance(gate, WebhookGate) else gate._app
        gate._throttle = FailureThrottle(burst=1, per_s=0.0001)
        gate._keys._fresh_s = 0.0  # everything known is too old at once
        old = Caller(api.client, keys.create("acme").token)
        assert old.get("/v1/aliases").status_code == 200
        assert Caller(api.client, wrong_token()).get("/v1/aliases").status_code == 401
        assert Caller(api.client, wrong_token()).get("/v1/aliases").status_code == 429
        assert old.get("/v1/aliases").status_code == 200
        ended = keys.create("acme")
        keys.revoke("acme", ended.key_id)
        assert Caller(api.client, ended.token).get("/v1/aliases").status_code == 429  # nobody knows it here
        gate._throttle = FailureThrottle()
        assert Caller(api.client, keys.create("acme").token).get("/v1/aliases").status_code == 200


def test_a_missing_scope_and_an_expired_key_are_counted_and_not_slowed_down(tmp_path: Path) -> None:
    before = {reason: counted(reason) for reason in ("forbidden", "expired", "missing")}
    with served(tmp_path) as api:
        ended = Caller(api.client, api.keys.create("acme", ttl_s=0.001).token)
        narrow = api.scoped("search")
        for _ in range(BURST + 10):
            assert ended.get("/v1/stats").json()["code"] == "AUTH.expired"
            assert narrow.get("/v1/stats").json()["code"] == "AUTH.forbidden"
            assert api.client.get("/v1/stats").json()["code"] == "AUTH.missing"
    for reason, earlier in before.items():
        assert counted(reason) - earlier == BURST + 10


def test_a_budget_refills_and_is_of_one_address() -> None:
    clock = Hands()
    throttle = FailureThrottle(burst=3, per_s=0.5, clock=clock)
    for _ in range(3):
        assert throttle.wait_s("a") == 0
        throttle.fail("a", "invalid")
    assert (throttle.wait_s("a"), throttle.wait_s("b")) == (2, 0)
    clock.now += 1.9
    assert throttle.wait_s("a") == 1
    clock.now += 0.1
    assert throttle.wait_s("a") == 0
    clock.now += 1000
    for _ in range(3):
        assert throttle.wait_s("a") == 0
        throttle.fail("a", "invalid")
    assert throttle.wait_s("a") == 2


def test_memory_and_log_are_bounded_however_many_addresses_there_are(caplog: pytest.LogCaptureFixture) -> None:
    clock = Hands()
    throttle = FailureThrottle(burst=1, max_addresses=100, clock=clock)
    with caplog.at_level(logging.WARNING, "ragfence.server"):
        for number in range(5000):
            throttle.fail(f"address-{number}", "invalid")
        assert len(throttle._sources) == 100
        assert len(caplog.records) == LOG_LINES
        clock.now += 61
        for _ in range(7):
            throttle.fail("one", "invalid", "abcdefghij234567")
        clock.now += 61
        throttle.fail("one", "invalid", "abcdefghij234567")
    assert len(caplog.records) == LOG_LINES + 2
    assert "API key abcdefghij234567 (7 since" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1:ffff::9", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_one_host_is_one_address(host: str, address: str) -> None:
    assert address_of((host, 1)) == address
