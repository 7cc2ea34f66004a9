"""Quotas on real servers: who may pass, what the others are told, and what happens when nobody can be asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Policy
from ragfence.errors import PolicyError, StoreUnavailable, Unsupported
from ragfence.server.quotas import Quotas, Spent, Window, parsed_quotas, wait_s
from tests import servers
from tests.server.processes import served


def policy(*quotas: str, **tenants: list[str]) -> Policy:
    return Policy.from_mapping({"http": {"quotas": list(quotas), "tenant_quotas": tenants}})


def spending(rules: Policy, store: object, story: Callable[[Quotas], Awaitable[Any]]) -> Any:
    async def session() -> Any:
        quotas = Quotas(rules, store)
        try:
            return await story(quotas)
        finally:
            await quotas.close()

    return asyncio.run(session())


@pytest.fixture(params=["memory", "valkey", "redis62", "cluster", "tls"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    if request.param == "memory":
        return tmp_path / "fence"
    fixture = {
        "valkey": "valkey_server",
        "redis62": "redis62_server",
        "cluster": "valkey_cluster_server",
        "tls": "valkey_tls_server",
    }[request.param]
    return request.getfixturevalue(fixture).url


@pytest.fixture
def tenant() -> str:
    """With what a Redis key must not take literally."""
    return f"{{a}}/b c:{uuid.uuid4().hex}"


def body(spent: Spent) -> Any:
    assert spent.refused is not None
    return json.loads(spent.refused.body)


def test_a_tenant_is_refused_when_its_quota_is_spent_and_others_are_not(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        for _ in range(3):
            assert (await quotas.spend(tenant)).refused is None
        refused = await quotas.spend(tenant)
        told = body(refused)
        assert (told["status"], told["code"], told["retryable"]) == (429, "RATE_LIMIT.exceeded", True)
        # The window began at most a moment ago: it has to end, and then enough of it to fade for one more.
        assert refused.refused is not None
        seconds = int(refused.refused.header("retry-after"))
        assert 1 <= seconds <= 3600 + 1200 + 1
        assert told["retry_after"] == seconds
        assert refused.refused.header("ratelimit") == f'"3-per-1-hour";r=0;t={seconds}'
        assert refused.refused.header("ratelimit-policy") == '"3-per-1-hour";q=3;w=3600'
        assert (await quotas.spend(f"{tenant}2")).refused is None

    spending(policy("3/hour"), store, story)


def test_what_is_refused_is_not_counted(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        assert (await quotas.spend(tenant, cost=6)).refused is None
        for _ in range(5):
            assert body(await quotas.spend(tenant, cost=5))["status"] == 429
        assert (await quotas.spend(tenant, cost=4)).refused is None
        assert body(await quotas.spend(tenant))["status"] == 429

    spending(policy("10/day"), store, story)


def test_no_more_than_the_quota_pass_at_once(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> list[Spent]:
        return await asyncio.gather(*(quotas.spend(tenant) for _ in range(60)))

    answers = spending(policy("20/day", "1000/day"), store, story)
    assert sum(spent.refused is None for spent in answers) == 20


@pytest.mark.parametrize("store", ["memory", "valkey"], indirect=True)
def test_who_waits_as_long_as_told_passes(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        while (spent := await quotas.spend(tenant)).refused is None:
            pass
        await asyncio.sleep(int(spent.refused.header("retry-after")))
        assert (await quotas.spend(tenant)).refused is None

    spending(policy("2/second"), store, story)


def test_a_cost_above_the_quota_is_never_worth_waiting_for(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        told = body(await quotas.spend(tenant, cost=11))
        assert (told["status"], told["retryable"]) == (413, False)
        assert "retry_after" not in told
        assert (await quotas.spend(tenant, cost=10)).refused is None

    spending(policy("10/minute", "100/day"), store, story)


def test_what_was_paid_before_counts_for_what_is_never_worth_waiting_for(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        assert (await quotas.spend(tenant)).refused is None
        told = body(await quotas.spend(tenant, cost=10, paid=1))
        assert (told["status"], told["retryable"]) == (413, False)
        assert told["detail"].startswith("this request costs 11, ")
        assert (await quotas.spend(tenant, cost=9, paid=1)).refused is None

    spending(policy("10/minute", "100/day"), store, story)


@pytest.mark.parametrize("store", ["memory", "valkey"], indirect=True)
def test_who_pays_in_two_parts_and_waits_as_long_as_told_passes(store: object, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        for _ in range(2):
            assert (await quotas.spend(tenant)).refused is None
        refused = (await quotas.spend(tenant, cost=9, paid=1)).refused
        assert refused is not None
        await asyncio.sleep(int(refused.header("retry-after")))
        assert (await quotas.spend(tenant)).refused is None
        assert (await quotas.spend(tenant, cost=9, paid=1)).refused is None

    spending(policy("10/2 seconds"), store, story)


def test_a_batch_of_one_line_more_than_the_quota_is_refused_for_good(tmp_path: Path) -> None:
    with served(tmp_path, http={"quotas": ["10/hour"]}) as api:
        told = []
        for lines in (12, 11, 8):
            batch = "".join(f'{{"doc_id":"d{number}","text":"x"}}\n' for number in range(lines))
            headers = {"Content-Type": "application/x-ndjson"}
            told.append(api.caller().ask("POST", "/v1/documents:batch", content=batch, headers=headers).status_code)
    assert told == [413, 413, 200]  # each of the first two has cost 1


def test_a_tenant_may_have_quotas_of_its_own_or_none(tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        assert [(await quotas.spend("big")).refused is None for _ in range(5)] == [True] * 5
        assert (await quotas.spend("free")) == Spent(None, ())
        assert (await quotas.spend(tenant)).headers == (("ratelimit-policy", '"1-per-1-minute";q=1;w=60'),)
        assert (await quotas.spend(tenant)).refused is not None

    spending(policy("1/minute", big=["5/minute; 6/day"], free=[]), None, story)


def test_the_shortest_window_is_asked_first_and_the_long_one_is_spared(tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        assert [(await quotas.spend(tenant)).refused is None for _ in range(4)] == [True, True, False, False]
        # 98 are left of the day: those that the hour refused were not taken out of it.
        assert body(await quotas.spend(tenant, cost=2))["status"] == 429

    spending(policy("100/day", "2/hour"), None, story)


def test_the_keys_are_namespaced_and_hold_the_encoded_tenant(valkey_server: servers.RedisServer, tenant: str) -> None:
    async def story(quotas: Quotas) -> None:
        await quotas.spend(tenant)

    spending(policy("5/minute"), valkey_server.url, story)
    with valkey_server.client() as client:
        mine = [key.decode() for key in client.scan_iter("ragfence:*") if tenant[-32:].encode() in key]
        assert mine == [f"ragfence:{{ragfence/%7Ba%7D%2Fb%20c%3A{tenant[-32:]}/5/1/minute}}"]
        assert client.ttl(mine[0]) > 0


def test_all_processes_of_a_redis_count_together(valkey_server: servers.RedisServer, tenant: str) -> None:
    async def story(quotas: Quotas) -> bool:
        return (await quotas.spend(tenant)).refused is None

    passed = [spending(policy("2/hour"), valkey_server.url, story) for _ in range(3)]
    assert passed == [True, True, False]


def test_the_primary_is_found_through_sentinels(tenant: str) -> None:
    async def story(quotas: Quotas) -> list[bool]:
        return [(await quotas.spend(tenant)).refused is None for _ in range(3)]

    with servers.valkey_pair() as pair:
        assert spending(policy("2/hour"), pair.url, story) == [True, True, False]


def test_a_redis_that_is_down_lets_nobody_pass_and_is_used_again_afterwards(tenant: str) -> None:
    with servers.valkey() as server:

        async def story(quotas: Quotas) -> None:
            assert (await quotas.spend(tenant)).refused is None
            server.kill()
            told = body(await quotas.spend(tenant))
            assert (told["status"], told["code"]) == (503, "DEPENDENCY.unavailable")
            assert told["retry_after"] >= 1
            server.start()
            assert (await quotas.spend(tenant)).refused is None

        spending(policy("2/hour"), server.url, story)


def test_a_password_is_not_told(tenant: str) -> None:
    async def story(quotas: Quotas) -> bytes:
        refused = (await quotas.spend(tenant)).refused
        assert refused is not None
        return refused.body

    with servers.valkey(password="right") as server:
        url = server.url.replace("right", "geheim")
        told = spending(policy("2/hour"), url, story)
    assert b"geheim" not in told
    assert json.loads(told)["code"] == "AUTH.store"


def test_without_quotas_nothing_is_opened_asked_or_imported() -> None:
    code = """
import asyncio, sys
from ragfence import Policy
from ragfence.server.quotas import Quotas
quotas = Quotas(Policy(), "redis://nobody.invalid:1/0")
assert asyncio.run(quotas.spend("acme", cost=10**9)) == (None, ())
asyncio.run(quotas.close())
assert not {"limits", "redis"} & set(sys.modules), "loaded"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_costs_nothing_is_not_asked_for() -> None:
    async def story(quotas: Quotas) -> None:
        assert await quotas.spend("acme", cost=0) == Spent(None, ())

    spending(policy("1/minute"), "redis://127.0.0.1:1/0", story)


def test_all_that_is_wrong_with_quotas_is_told_at_once() -> None:
    with pytest.raises(PolicyError) as refused:
        parsed_quotas(policy("600/minute", "many/day", acme=["0/hour"], beta=["5/fortnight"]))
    problems = refused.value.details["problems"]
    assert [problem.partition(":")[0] for problem in problems] == [
        "http.quotas",
        "http.tenant_quotas.acme",
        "http.tenant_quotas.beta",
    ]
    assert "600/minute" in refused.value.hint


def test_a_url_that_names_no_redis_is_refused_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as refused:
        Quotas(policy("1/minute"), "redis+sentinel://:geheim@host:26379/")
    assert "geheim" not in str(refused.value)


def test_a_missing_package_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "limits", None)
    with pytest.raises(Unsupported) as refused:
        Quotas(policy("1/minute"))
    assert refused.value.hint == "pip install 'ragfence[api]'"


@given(
    limit=st.integers(1, 50),
    before=st.integers(0, 50),
    now=st.integers(0, 50),
    share=st.floats(0, 1),
    cost=st.integers(1, 50),
)
def test_the_wait_is_exact(limit: int, before: int, now: int, share: float, cost: int) -> None:
    """At the end of the wait there is room, and a moment before there is none; as limits weighs it."""
    window_s = 60
    if cost > limit:
        return
    left_s = share * window_s
    window = Window(before, left_s if before else 0.0, now, left_s)
    seconds = wait_s(window, limit=limit, cost=cost, window_s=window_s)

    def fits(after_s: float) -> bool:
        counts, fading = (before, now), left_s - after_s
        if fading < 0:  # this window is over, and is the one before now
            counts, fading = (now, 0), window_s + fading
        return int(counts[0] * max(fading, 0) / window_s) + counts[1] + cost <= limit

    assert fits(seconds + 1e-6)
    assert seconds < 1e-6 or not fits(seconds - 1e-6)
