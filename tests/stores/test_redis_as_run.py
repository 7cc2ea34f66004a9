"""Redis as people run it: URLs, TLS, Sentinel, a cluster whose node goes away, and seals that wait to be confirmed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.core.decisions import Claim
from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.operations import Operation
from ragfence.engine.requests import fingerprint_of
from ragfence.errors import PolicyError, RagfenceError, SealUncertain, StoreUnavailable, StoreUnsafe, TransientError
from ragfence.stores.redis.requirements import Confirmation
from ragfence.stores.redis.server_urls import _parsed
from ragfence.stores.redis.store import RedisFences
from tests import servers

IMPATIENT = {"lease": {"seal_retry_s": 0.3}}


@pytest.mark.parametrize(
    ("url", "hosts", "service", "options"),
    [
        ("redis+cluster://a:7000,b:7001", [("a", 7000), ("b", 7001)], "", {}),
        ("redis+cluster://a", [("a", 6379)], "", {}),
        ("redis+cluster://me:pw%40@a:1,b:2/", [("a", 1), ("b", 2)], "", {"username": "me", "password": "pw@"}),
        ("rediss+cluster://a:1?ssl_ca_certs=ca.pem", [("a", 1)], "", {"ssl": True, "ssl_ca_certs": "ca.pem"}),
        ("redis+sentinel://a,b:5/svc", [("a", 26379), ("b", 5)], "svc", {}),
        ("redis+sentinel://:pw@a/svc/3", [("a", 26379)], "svc", {"password": "pw", "db": 3}),
        ("rediss+sentinel://a/svc?sentinel_password=x", [("a", 26379)], "svc", {"ssl": True, "sentinel_password": "x"}),
    ],
)
def test_urls_of_many_hosts(url: str, hosts: Any, service: str, options: dict[str, Any]) -> None:
    assert _parsed(url) == (hosts, service, options)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:26379",
        "redis+sentinel://a:26379/",
        "redis+cluster://",
        "redis+cluster://a:hunter2",
        "redis+cluster://a:1/3",
        "redis+cluster://a:1,,b:2",
    ],
)
def test_a_url_that_names_nothing_is_a_clear_error(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="is not a valid Redis URL") as refused:
        RedisFences(url)
    assert "redis+sentinel://host:26379" in refused.value.hint


def test_nobody_behind_a_url_of_many_hosts_is_a_clear_error() -> None:
    one, two = servers.free_ports(2)
    for url in (f"redis+cluster://:pw@127.0.0.1:{one},127.0.0.1:{two}", f"redis+sentinel://:pw@127.0.0.1:{one}/svc"):
        with pytest.raises(StoreUnavailable) as refused:
            RedisFences(url, timeout_s=0.5)
        assert "pw" not in str(refused.value)


def test_behind_tls_the_server_must_be_whom_it_says_it_is(
    valkey_tls_server: servers.TlsRedisServer, tmp_path: Path
) -> None:
    _works(valkey_tls_server.url, None)
    stranger = servers.certificates(tmp_path)
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        RedisFences(f"rediss://127.0.0.1:{valkey_tls_server.tls_port}/0?{stranger.query()}")
    with pytest.raises(StoreUnavailable):
        RedisFences(f"redis://127.0.0.1:{valkey_tls_server.tls_port}/0", timeout_s=0.5)


def test_a_client_shows_its_own_certificate() -> None:
    with servers.valkey(tls="mutual", password="secret") as server:
        assert isinstance(server, servers.TlsRedisServer)
        _works(server.url, None)
        without = f"rediss://:secret@127.0.0.1:{server.tls_port}/0?{server.certificates.query()}"
        with pytest.raises(StoreUnavailable):
            RedisFences(without, timeout_s=0.5)


@pytest.mark.parametrize("kind", ["cluster", "pair"])
def test_many_hosts_behind_tls_and_passwords(kind: str) -> None:
    start = servers.valkey_cluster if kind == "cluster" else servers.valkey_pair
    with start(tls="server", password="secret") as server:
        _works(server.url, None)
        assert "secret" not in ragfence.open(server.url).inspector.fences.url


@pytest.fixture(scope="module")
def pair() -> Iterator[servers.SentinelPair]:
    with servers.valkey_pair(sentinel_password="watch") as pair:
        yield pair


def test_after_a_failover_the_promoted_server_is_asked(pair: servers.SentinelPair, tmp_path: Path) -> None:
    performed: list[int] = []
    with ragfence.open(pair.url, objects=tmp_path / "objects", tenant="failover") as fence:

        @fence.once(kind="ticket", key=lambda number: str(number))
        def effect(number: int) -> int:
            performed.append(number)
            return number

        first = [effect(number) for number in range(5)]
        pair.wait_replicating()
        dead = pair.primary()
        dead.kill()
        pair.wait_promoted(dead)
        assert [_patiently(effect, number) for number in range(7)][:5] == first
        assert performed == list(range(7))
        assert fence.audit.check().ok
        dead.start()
        pair.wait_replicating()


def test_a_seal_waits_until_the_replicas_have_it(pair: servers.SentinelPair) -> None:
    rules = {"durability": {"wait_replicas": 1, "wait_timeout_ms": 100}, **IMPATIENT}
    pair.wait_replicating()
    with ragfence.open(pair.url, tenant="confirmed", policy=ragfence.Policy.from_mapping(rules)) as fence:
        effect = fence.once(kind="ticket", key=lambda number: str(number))(lambda number: number)
        assert effect(1).is_new
        with pair.replica().client() as replica:
            assert replica.exists(*replica.keys("rf{confirmed:*k*"))
        cut = pair.cut_replication()
        try:
            with pytest.raises(SealUncertain) as unsure:
                effect(2)
            assert unsure.value.receipt.result == 2
            cause = unsure.value.__cause__
            assert "1 of 1 replicas did not confirm it within 100 ms" in str(cause)
            with pytest.raises(StoreUnavailable, match="did not confirm"):
                effect(2)  # nobody is answered with a seal that may still be lost
            assert [type(answer) for answer in _batch(pair.url, "confirmed", 2)] == [StoreUnavailable]
        finally:
            pair.mend_replication(cut)
        pair.wait_replicating()
        assert effect(2) == unsure.value.receipt
        assert not effect(2).is_new


def test_whoever_opens_during_a_failover_may_try_again(pair: servers.SentinelPair) -> None:
    pair.wait_replicating()
    before = pair.primary()
    with pair.sentinels[0].client(password="watch") as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", pair.service)
    give_up_at, promoted = time.monotonic() + 20, False
    while not promoted and time.monotonic() < give_up_at:
        promoted = pair._primary() not in (before, None)
        with contextlib.suppress(TransientError):  # anything else would tell the caller to give up
            RedisFences(pair.url, solo=True).close()
    pair.wait_replicating()


def test_a_seal_waits_for_the_disk() -> None:
    aof = {"durability": {"wait_aof": True}}
    with servers.valkey(appendonly=True) as server:
        _works(server.url, ragfence.Policy.from_mapping(aof))
        with server.client() as client:
            assert client.info("commandstats")["cmdstat_waitaof"]["calls"] >= 1
    with servers.valkey() as server, pytest.raises(StoreUnsafe, match="no append-only file") as refused:
        ragfence.open(server.url, policy=ragfence.Policy.from_mapping(aof))
    assert "appendonly yes" in refused.value.hint


def test_a_server_that_cannot_wait_for_its_disk_is_refused(redis62_server: servers.RedisServer) -> None:
    with pytest.raises(StoreUnsafe, match="no WAITAOF"):
        RedisFences(redis62_server.url, confirm=Confirmation(aof=True))


def test_sqlite_has_nothing_to_wait_for(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no replicas"):
        ragfence.open(tmp_path, policy=ragfence.Policy.from_mapping({"durability": {"wait_replicas": 1}}))


def test_a_cluster_goes_on_without_one_of_its_nodes(tmp_path: Path) -> None:
    with servers.valkey_cluster() as cluster, ragfence.open(cluster.url, objects=tmp_path, tenant="t") as fence:
        effect = fence.once(kind="ticket", key=lambda name: name)(lambda name: name)
        names = [str(number) for number in range(60)]
        first = [effect(name) for name in names]
        away = cluster.nodes[0]
        there = {name: cluster.owner_of(_prefix(name)) is away for name in names}
        assert set(there.values()) == {True, False}
        away.kill()
        cluster.wait_missed(away)
        for name, receipt in zip(names, first, strict=True):
            if there[name]:
                with pytest.raises(RagfenceError) as gone:
                    effect(name)
                assert gone.value.retryable
            else:
                assert effect(name) == receipt
        away.start()
        cluster.wait_whole()
        assert [_patiently(effect, name) for name in names] == first
        assert fence.audit.check().ok


def test_a_batch_that_a_node_of_the_cluster_cannot_answer_is_told_so() -> None:
    """What the others granted runs out by itself, or is granted again to the same token."""
    from ragfence.core.decisions import Granted, Mode
    from ragfence.testing.contracts.fence_calls import claim

    with servers.valkey_cluster() as cluster:
        store = RedisFences(cluster.url, solo=True)
        batch = [claim(Mode.KEYED, f"{n}", shard=n, source=f"{n}") for n in range(64)]
        cluster.nodes[1].kill()
        cluster.wait_missed(cluster.nodes[1])
        with pytest.raises(StoreUnavailable):
            store.claim(batch)
        cluster.nodes[1].start()
        cluster.wait_whole()
        assert {type(answer) for answer in store.claim(batch)} == {Granted}
        store.close()


def _batch(url: str, tenant: str, *numbers: int) -> list[Any]:
    """The answers to claims in one batch, or the error that all of them got."""
    store = RedisFences(url, tenant, solo=True, confirm=Confirmation(replicas=1, timeout_ms=100))
    operations = [Operation(kind="ticket", source_id=str(number), tenant=tenant) for number in numbers]
    fingerprints = [fingerprint_of(number)[0] for number in numbers]
    claims = [
        Claim(key=operation.key, fingerprint=fingerprint, token=os.urandom(TOKEN_BYTES), position=at)
        for operation, fingerprint in zip(operations, fingerprints, strict=True)
        for at in range(2)  # a batch of one is a single claim
    ]
    try:
        return list(store.claim(claims))
    except RagfenceError as error:
        return [error]
    finally:
        store.close()


def _works(url: str, policy: ragfence.Policy | None) -> None:
    with ragfence.open(url, policy=policy) as fence:
        effect = fence.once(kind="ticket", key=lambda number: str(number))(lambda number: number)
        assert [effect(number) for number in range(3)] == [effect(number) for number in range(3)]
        assert fence.audit.check().ok


def _patiently(effect: Any, argument: Any) -> Any:
    """As a caller does it: again, while the error says so."""
    for _ in range(200):
        try:
            return effect(argument)
        except RagfenceError as error:
            if not error.retryable:
                raise
            last = error
    raise last


def _prefix(name: str) -> bytes:
    key = Operation(kind="ticket", source_id=name, tenant="t").key
    return b"rf{t:%02x}" % key[0]
