"""What is particular to Redis: servers that are away, closed, unsafe, full, restarted or forgetful of scripts."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection

from ragfence.core.decisions import Fenced, Granted, HeldRecords, Mode, NotReadyVerdict, Replay, Sealed
from ragfence.core.layout import NO_TOKEN, RowKind, State
from ragfence.core.operations import FenceNumber
from ragfence.core.records import KeyRecord
from ragfence.errors import RagfenceError, StoreAuth, StoreUnavailable, StoreUnsafe
from ragfence.stores.fences import LoadedReceipt, Marker
from ragfence.stores.redis.bulk import PART
from ragfence.stores.redis.requirements import refuse_unsafe
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    OPERATIONS,
    SHARD,
    ask,
    claim,
    granted,
    lease,
    read,
    rows_of,
    seal,
    sealed,
    start_epoch,
    verdict,
)
from tests import servers

SECRET = "hunter2"
RECEIPT = KeyRecord(State.SEALED, b"f" * 16, NO_TOKEN, FenceNumber(1, 1), 1, 0, 0)


@pytest.fixture(params=["valkey", "redis-6.2"])
def server(request: pytest.FixtureRequest) -> servers.RedisServer:
    found = request.getfixturevalue("valkey_server" if request.param == "valkey" else "redis62_server")
    with redis.Redis.from_url(found.url) as client:
        client.flushall()
    return found


@pytest.fixture
def client(server: servers.RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def store(server: servers.RedisServer) -> Iterator[RedisFences]:
    store = RedisFences(server.url)
    start_epoch(store, 1)
    yield store
    store.close()


@pytest.fixture(params=[servers.valkey, servers.redis62], ids=["valkey", "redis-6.2"])
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """For tests that need a server of their own: how to start one."""
    return request.param


def test_a_server_that_is_away_is_a_clear_error() -> None:
    (port,) = servers.free_ports(1)
    with pytest.raises(StoreUnavailable, match=f"redis://127.0.0.1:{port}/0 did not answer") as refused:
        RedisFences(f"redis://127.0.0.1:{port}/0")
    assert "running and reachable" in refused.value.hint
    assert refused.value.retryable


def test_a_host_that_does_not_exist_is_a_clear_error() -> None:
    with pytest.raises(StoreUnavailable, match="did not answer"):
        RedisFences("redis://no-such-host.invalid:6379/0")


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@127.0.0.1:PORT/0",
        f"redis://user:{SECRET}@127.0.0.1:PORT/0",
        f"redis://user:more@{SECRET}@127.0.0.1:PORT/0",
        f"redis://127.0.0.1:PORT/0?username=user&password={SECRET}",
        f"redis://:{SECRET}/slash@127.0.0.1:PORT/0",
        f"redis://:{SECRET}?question@127.0.0.1:PORT/0",
        f"redis://:a:{SECRET}@127.0.0.1:PORT/not-a-number",
        f"unix://user:{SECRET}@/no/such/socket.sock?db=1",
    ],
)
def test_credentials_are_in_no_error(url: str) -> None:
    (port,) = servers.free_ports(1)
    with pytest.raises(RagfenceError) as refused:
        RedisFences(url.replace("PORT", f"{port}"))
    _holds_no_secret(refused.value)


def test_a_wrong_password_is_a_clear_error_without_it(kind: Callable[..., Any]) -> None:
    with kind(password="correct") as server:
        for credentials in (f":{SECRET}@", f"user:{SECRET}@", ""):
            with pytest.raises(StoreAuth, match="refused the login") as refused:
                RedisFences(f"redis://{credentials}127.0.0.1:{server.port}/0")
            assert "password" in refused.value.hint
            assert not refused.value.retryable
            _holds_no_secret(refused.value)


def test_the_right_password_opens_and_is_not_in_the_url(kind: Callable[..., Any]) -> None:
    with kind(password=SECRET) as server:
        store = RedisFences(server.url)
        start_epoch(store, 1)
        assert store.url == f"redis://127.0.0.1:{server.port}/0"
        assert isinstance(verdict(store, claim(Mode.KEYED)), Granted)
        server.kill()
        with pytest.raises(StoreUnavailable) as gone:
            verdict(store, claim(Mode.KEYED))
        _holds_no_secret(gone.value)
        store.close()


def test_a_command_that_the_user_may_not_use_is_a_clear_error(server: servers.RedisServer, client: Any) -> None:
    client.acl_setuser("narrow", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+info", "+ping"])
    try:
        store = RedisFences(f"redis://narrow:{SECRET}@127.0.0.1:{server.port}/0")
        with pytest.raises(StoreAuth) as refused:
            store.begin_epoch(1)
        assert "ACL" in refused.value.hint
        _holds_no_secret(refused.value)
        store.close()
    finally:
        client.acl_deluser("narrow")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_is_refused(server: servers.RedisServer, client: Any, policy: str) -> None:
    client.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(StoreUnsafe, match=policy) as refused:
            RedisFences(server.url)
        assert "noeviction" in refused.value.hint
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def test_a_replica_is_refused(server: servers.RedisServer, kind: Callable[..., Any]) -> None:
    with kind(args=("--replicaof", server.host, f"{server.port}")) as replica:
        with pytest.raises(StoreUnsafe, match="replica") as refused:
            RedisFences(replica.url)
        assert "primary" in refused.value.hint


def test_a_server_that_is_too_old_is_refused() -> None:
    info = {"redis_version": "6.0.20", "maxmemory_policy": "noeviction", "role": "master"}
    with pytest.raises(StoreUnsafe, match=r"Redis 6\.0\.20"):
        refuse_unsafe("redis://host:6379/0", info)


@ALL_MODES
def test_scripts_that_the_server_forgot_are_sent_again(store: RedisFences, client: Any, mode: Mode) -> None:
    asked = claim(mode)
    for call in (
        lambda: isinstance(verdict(store, asked), Granted),
        lambda: store.renew([lease(asked, granted(store, asked))]) == [True],
        lambda: isinstance(store.seal([seal(asked, granted(store, asked))])[0], Sealed),
        lambda: isinstance(verdict(store, claim(mode, by="two")), Replay),
        lambda: store.begin_epoch(2),
        lambda: store.load(2, [LoadedReceipt(asked.key, RECEIPT)]),
        lambda: store.finish_epoch(2),
    ):
        client.script_flush()
        assert call()


def test_scripts_that_the_server_forgot_within_a_batch_are_sent_again(
    store: RedisFences, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = sealed(store, claim(Mode.KEYED, "0"))
    snapshot = store._snapshot

    def forgetful(asked: Any) -> Any:
        found = snapshot(asked)
        client.script_flush()  # after the MGET, before the script
        return found

    monkeypatch.setattr(store, "_snapshot", forgetful)
    batch = [claim(Mode.KEYED, f"{n}", by=f"two {n}", shard=SHARD + n) for n in range(3)]
    first, *others = store.claim(batch)
    assert first == Replay(receipt)
    assert [type(answer) for answer in others] == [Granted, Granted]
    assert {row.token for row in rows_of(store)} >= {each.token for each in batch}


@ALL_MODES
def test_a_server_without_memory_is_a_clear_error_and_nothing_is_half_written(
    store: RedisFences, client: Any, mode: Mode
) -> None:
    held, done = claim(mode, "held", source="held"), claim(mode, "done", source="done")
    lost = granted(store, held)
    sealed(store, done)
    granted(store, claim(mode, "expired", source="expired", lease_ms=0))
    batch = [claim(mode, "new", by=f"{n}", source=f"{n}", shard=n) for n in range(5)]
    replays = [claim(mode, "done", by=f"{n}", source="done") for n in range(2)]
    before = _everything(client)
    client.config_set("maxmemory", "1")
    try:
        for call in (
            lambda: store.claim([claim(mode, "new", by="two", source="new")]),
            lambda: store.claim([claim(mode, "next", by="two", source="expired", sequence=_next(mode))]),
            lambda: store.claim(batch),
            lambda: store.claim(replays),  # answered, but their rows cannot be written
            lambda: store.seal([seal(held, lost)]),
            lambda: store.renew([lease(held, lost)]),
            lambda: store.release([lease(held, lost)]),
            lambda: store.reset_attempts([lease(held)]),
            lambda: store.record(rows_of(store)),
            lambda: store.begin_epoch(2),
            lambda: store.lock("hydration", "token", 1000),
        ):
            with pytest.raises(StoreUnavailable, match="out of memory") as refused:
                call()
            assert "maxmemory" in refused.value.hint
        assert read(store, held) != HeldRecords()  # reading goes on
    finally:
        client.config_set("maxmemory", "0")
    assert _everything(client) == before
    assert isinstance(store.seal([seal(held, lost)])[0], Sealed)


def test_a_document_is_moved_as_a_whole_or_not_at_all_without_memory(store: RedisFences, client: Any) -> None:
    """Sealing a revival starts with a DEL, which needs no memory: what has begun to write must end."""
    receipts = {name: sealed(store, claim(Mode.DOCUMENT, name)) for name in ("A", "B")}
    asked = claim(Mode.DOCUMENT, "A", by="two")
    move = granted(store, asked)
    before = _everything(client)
    client.config_set("maxmemory", "1")
    try:
        outcome = store.seal([seal(asked, move)])[0]
    except StoreUnavailable:
        outcome = None
    finally:
        client.config_set("maxmemory", "0")
    if outcome is None:
        assert _everything(client) == before
        outcome = store.seal([seal(asked, move)])[0]
    assert isinstance(outcome, Sealed)
    assert verdict(store, claim(Mode.DOCUMENT, "A", by="three")) == Replay(outcome.record)
    assert granted(store, claim(Mode.DOCUMENT, "B", by="three")).prior == receipts["B"]
    assert [row.row_id for row in rows_of(store)].count(f"{asked.token.hex()}fa") == 1


def test_a_restarted_server_is_another_run(kind: Callable[..., Any]) -> None:
    with kind(appendonly=True, args=("--appendfsync", "always")) as server:
        store = RedisFences(server.url)
        start_epoch(store, 1)
        receipt = sealed(store, claim(Mode.KEYED))
        asked = claim(Mode.DOCUMENT, by="one")
        first = granted(store, asked)
        server.restart()
        assert set(store.markers()) == {Marker(1, ready=True, usable=False)}
        assert store.claim([claim(Mode.KEYED, by="two"), claim(Mode.DOCUMENT, by="two")]) == [
            NotReadyVerdict(),
            NotReadyVerdict(),
        ]
        assert verdict(store, claim(Mode.KEYED, by="two")) == NotReadyVerdict()
        assert store.seal([seal(asked, first)]) == [NotReadyVerdict()]
        assert store.renew([lease(asked, first)]) == [False]
        start_epoch(store, 2)
        assert verdict(store, claim(Mode.KEYED, by="two")) == Replay(receipt)
        assert granted(store, claim(Mode.DOCUMENT, by="two")).record.fence > first.record.fence
        store.close()


def test_a_restarted_server_without_objects_behind_it_starts_a_new_epoch_by_itself(kind: Callable[..., Any]) -> None:
    with kind(appendonly=True, args=("--appendfsync", "always")) as server:
        store = RedisFences(server.url, solo=True)
        receipt = sealed(store, claim(Mode.KEYED, "A"))
        asked = claim(Mode.KEYED, "B", by="one")
        first = granted(store, asked)
        server.restart()
        assert verdict(store, claim(Mode.KEYED, "A", by="two")) == Replay(receipt)
        assert isinstance(store.seal([seal(asked, first)])[0], Fenced)
        assert granted(store, claim(Mode.KEYED, "C")).record.fence.epoch > first.record.fence.epoch
        store.close()


def test_a_flushed_server_is_not_ready(store: RedisFences, client: Any) -> None:
    sealed(store, claim(Mode.KEYED))
    client.flushall()
    assert verdict(store, claim(Mode.KEYED, by="two")) == NotReadyVerdict()
    assert store.claim([claim(Mode.KEYED, by="two")] * 2) == [NotReadyVerdict(), NotReadyVerdict()]


def test_a_connection_that_was_cut_is_made_again(store: RedisFences, client: Any) -> None:
    for number in range(3):
        client.client_kill_filter(_type="normal", skipme=True)
        assert isinstance(verdict(store, claim(Mode.KEYED, f"{number}")), Granted)


def test_rows_whose_connection_was_cut_are_sent_again(store: RedisFences, client: Any) -> None:
    asked = claim(Mode.DOCUMENT)
    sealed(store, asked)
    known = store.replays([ask(asked)])
    client.client_kill_filter(_type="normal", skipme=True)
    (record,) = known.settled()
    assert record is not None
    assert [row.kind for row in rows_of(store)][-1] is RowKind.DUPLICATE


def test_a_batch_whose_connection_is_cut_in_the_middle_is_granted_once(
    store: RedisFences, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It travels in parts: some were answered by then, and some were not."""
    batch = [claim(Mode.KEYED, by=f"{n}", source=f"{n}", shard=n % 64) for n in range(2 * PART)]
    read, told = AbstractConnection.read_response, 0

    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        reply = read(self, *args, **kwargs)
        told += type(reply) is list and len(reply) >= PART // 2 and reply[0][:1] == b"G"
        if told == 1:
            told += 1
            self.disconnect()  # with whatever had arrived already
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "read_response", cut)
        answers = store.claim(batch)
    assert told >= 2
    assert all(isinstance(answer, Granted) for answer in answers)
    assert [answer.record.token for answer in answers if isinstance(answer, Granted)] == [c.token for c in batch]
    assert len(rows_of(store)) == len(batch)


def test_nobody_reads_the_replies_to_rows_that_were_given_up(store: RedisFences, client: Any) -> None:
    asked = claim(Mode.DOCUMENT)
    sealed(store, asked)
    connected = client.info("clients")["connected_clients"]  # others of this server's tests may be among them
    for _ in range(3):
        store.replays([ask(asked)]).discard()
        assert store.stats().documents == 1
        assert isinstance(verdict(store, claim(Mode.KEYED, by="two")), Granted)
    # One that was dropped may not have been missed yet.
    assert client.info("clients")["connected_clients"] <= connected + 1


def test_rows_that_a_server_refuses_refuse_the_answer(store: RedisFences, client: Any) -> None:
    asked = claim(Mode.DOCUMENT)
    sealed(store, asked)
    client.set(store._names.rows[SHARD], "no stream")
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        store.replays([ask(asked)]).settled()


def test_a_lease_expires_by_the_clock_of_the_server(store: RedisFences, client: Any) -> None:
    seconds, micros = client.time()
    first = granted(store, claim(Mode.KEYED, lease_ms=0))
    assert first.record.when_ms >= seconds * 1000 + micros // 1000
    assert granted(store, claim(Mode.KEYED, by="two", lease_ms=60_000)).takeover
    before = seconds * 1000 + micros // 1000
    assert before <= store.now_ms() < before + 3_600_000


def test_a_single_claim_is_one_call_of_a_script(
    store: RedisFences, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(store, claim(Mode.KEYED, "sealed"))
    granted(store, claim(Mode.KEYED, "held"))
    for name in ("sealed", "held", "new"):
        trips, commands = _counted(
            client, monkeypatch, lambda name=name: verdict(store, claim(Mode.KEYED, name, by="2"))
        )
        assert trips == 1
        assert commands["evalsha"] == 1
        assert not set(commands) & {"mget", "eval", "script|load", "multi"}


@ALL_MODES
@pytest.mark.parametrize("state", ["sealed", "new"])
def test_a_batch_is_two_round_trips_however_large(
    store: RedisFences, client: Any, monkeypatch: pytest.MonkeyPatch, mode: Mode, state: str
) -> None:
    store.claim([claim(mode, by="warm", source="warm")])  # the very first call also loads the script
    first = [claim(mode, by=f"1 {n}", source=f"{n}", shard=n % 64) for n in range(500)]
    if state == "sealed":
        answers = store.claim(first)
        store.seal([seal(each, answer) for each, answer in zip(first, answers, strict=True)])
    batch = [claim(mode, by=f"2 {n}", source=f"{n}", shard=n % 64) for n in range(500)]
    answers = []
    trips, commands = _counted(client, monkeypatch, lambda: answers.extend(store.claim(batch)))
    assert {type(answer) for answer in answers} == {Replay if state == "sealed" else Granted}
    assert trips == 2
    # The first trip is an MGET. The second decides by a script, or only writes rows; documents are decided in any case.
    answered = state == "sealed" and mode is not Mode.DOCUMENT
    assert commands["evalsha"] == (0 if answered else 500 // PART)  # all sent before any is read
    assert commands["xadd"] == 64
    assert len({row.row_id for row in store.rows() if row.token in {each.token for each in batch}}) == 500


def test_everything_of_a_shard_lives_in_one_slot(store: RedisFences, client: Any) -> None:
    client.flushall()
    start_epoch(store, 1)
    markers = set(client.keys("*"))
    granted(store, claim(Mode.LOCK, "lock"))
    for mode in OPERATIONS:
        sealed(store, claim(mode, "A", source=f"{mode}"))
        if mode is not Mode.KEYED:
            sealed(store, claim(mode, "B", by="two", source=f"{mode}", sequence=2))
    tags = {re.match(rb"rf(\{[^{}]+\})", name)[1] for name in client.keys("*") if name not in markers}  # type: ignore[index]
    assert tags == {b"{default:07}"}


def _next(mode: Mode) -> int | None:
    return None if mode is Mode.KEYED else 2


def _holds_no_secret(error: BaseException) -> None:
    told = "".join(traceback.format_exception(error)) + repr(error) + str(getattr(error, "details", ""))
    # The lines of this test file quote the URL; what ragfence and redis-py say must not.
    assert SECRET not in "\n".join(line for line in told.splitlines() if "SECRET" not in line)


def _everything(client: Any) -> dict[bytes, Any]:
    return {name: client.dump(name) for name in client.keys("*")}


def _counted(client: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> tuple[int, Counter[str]]:
    """How often the call sent something and waited, and which commands the server ran for it."""
    trips, sent = 0, False
    send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

    def sending(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent = True
        return send(self, *args, **kwargs)

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal trips, sent
        trips, sent = trips + sent, False
        return read(self, *args, **kwargs)

    client.config_resetstat()
    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", sending)
        patch.setattr(AbstractConnection, "read_response", reading)
        call()
    stats = client.info("commandstats")
    return trips, Counter({name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()})


def test_a_store_that_was_written_without_counts_is_counted_once(
    store: RedisFences, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As by an older ragfence, whose scripts move heads and count nothing."""
    for number in range(3):
        sealed(store, claim(Mode.DOCUMENT, source=f"{number}", by=f"{number}"))
    assert isinstance(verdict(store, claim(Mode.KEYED, by="held")), Granted)
    assert isinstance(verdict(store, claim(Mode.DOCUMENT, source="held", by="lease")), Granted)
    for kind in "cpq":
        client.delete(*client.scan_iter(f"rf{{*}}{kind}"))
    with caplog.at_level("INFO", logger="ragfence"):
        stats = store.stats()
        assert (stats.documents, stats.pending.count) == (3, 2)
        assert store.stats().documents == 3
    assert [record.message for record in caplog.records if "counting" in record.message] == [
        f"{store.url}: counting what 64 shards hold, once"
    ]
