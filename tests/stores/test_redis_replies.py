"""Replies that are not what was asked for: a proxy in front of a real server makes them short, long or broken.

Whoever reads them as answers answers wrongly. The connection is out of step, so it is dropped and the call repeated;
a server that goes on like that is one that is not available.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import ragfence
from ragfence import Document, Fence
from ragfence.core.decisions import Mode, NotReadyVerdict, Replay, Sealed
from ragfence.errors import EmbedderInvalid, StoreUnavailable, ValidationError
from ragfence.stores.redis import connection as redis_link
from ragfence.stores.redis.bulk import PART
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.contracts.fence_calls import claim, granted, seal, sealed, start_epoch, verdict
from tests import servers
from tests.servers.resp_proxy import RespProxy, array, elements, resp_proxy

_tenants = itertools.count()


def _of_arrays(change: Callable[[list[bytes]], bytes]) -> Callable[[bytes, bytes], bytes]:
    """Of lists of several values: those of MGET and of the scripts. What TIME answers is two of them."""

    def alter(sent: bytes, reply: bytes) -> bytes:
        parts = elements(reply) if reply[:1] == b"*" else []
        return change(parts) if len(parts) > 2 else reply

    return alter


FAULTS = {
    "one value too few": _of_arrays(lambda parts: array(parts[:-1])),
    "one value too many": _of_arrays(lambda parts: array([*parts, parts[-1]])),
    "the first is missing": _of_arrays(lambda parts: array(parts[1:])),
    "nothing in it": _of_arrays(lambda parts: array([])),
    "null": _of_arrays(lambda parts: b"*-1\r\n"),
    "a number": _of_arrays(lambda parts: b":1\r\n"),
    "a text": _of_arrays(lambda parts: b"$2\r\nOK\r\n"),
    "a list among the values": _of_arrays(lambda parts: array([array([parts[0]]), *parts[1:]])),
    "not the protocol": _of_arrays(lambda parts: b"what?\r\n"),
}


@pytest.fixture
def proxy(valkey_server: servers.RedisServer) -> Iterator[RespProxy]:
    at = urlsplit(valkey_server.url)
    assert at.hostname
    assert at.port
    with resp_proxy(at.hostname, at.port) as made:
        yield made


@pytest.fixture
def fence(proxy: RespProxy, tmp_path: Path) -> Iterator[Fence]:
    with ragfence.open(proxy.url, objects=tmp_path / "objects", tenant=f"replies{next(_tenants)}") as opened:
        opened.documents.ingest(Document("first", "It rains."))
        yield opened


def documents(count: int = 2 * PART + 20) -> list[Document]:
    return [Document(f"d{n}", f"It rains in town {n}.") for n in range(count)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_is_no_answer_is_asked_for_again(fence: Fence, proxy: RespProxy, fault: str) -> None:
    for turn in ("new", "duplicate"):
        proxy.once(FAULTS[fault])
        receipts = fence.documents.ingest_many(documents())
        assert proxy.altered == 1
        assert {str(receipt.decision) for receipt in receipts} == {turn}
        assert all(receipt.snippet_ids for receipt in receipts)
    assert fence.audit.check().ok
    assert fence.documents.verify().ok


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_never_answers_rightly_is_not_available(fence: Fence, proxy: RespProxy, fault: str) -> None:
    proxy.alter = FAULTS[fault]
    with pytest.raises(StoreUnavailable):
        fence.documents.ingest_many(documents())
    proxy.alter = None
    assert {str(each.decision) for each in fence.documents.ingest_many(documents())} <= {"new", "duplicate"}
    assert fence.documents.verify().ok


@pytest.mark.parametrize("script", range(1, 8))
def test_every_batched_reply_of_a_call_is_checked(fence: Fence, proxy: RespProxy, script: int) -> None:
    """Whichever of them comes short: that of the MGET, of a part of the claims, of the seals, of the rows."""
    seen = itertools.count(1)

    def alter(sent: bytes, reply: bytes) -> bytes:
        parts = elements(reply) if reply[:1] == b"*" else []
        return array(parts[:-1]) if len(parts) > 2 and next(seen) == script else reply

    proxy.altered, proxy.alter = 0, alter
    first = fence.documents.ingest_many(documents())
    proxy.alter = None
    assert {str(receipt.decision) for receipt in first} == {"new"}
    assert [receipt.snippet_ids for receipt in fence.documents.ingest_many(documents())] == [
        receipt.snippet_ids for receipt in first
    ]
    assert fence.audit.check().ok


@pytest.mark.parametrize("fault", [b"*0\r\n", b":7\r\n", b"$-1\r\n", b"*2\r\n$1\r\nR\r\n$1\r\nR\r\n", b"!!\r\n"])
def test_a_single_claim_is_asked_again_too(proxy: RespProxy, fault: bytes) -> None:
    store = RedisFences(proxy.url, f"replies{next(_tenants)}")
    start_epoch(store, 1)
    first = claim(Mode.KEYED)
    answer = granted(store, first)
    proxy.once(lambda sent, reply: fault if b"EVALSHA" in sent and reply[:1] in b"$*" else reply)
    (outcome,) = store.seal([seal(first, answer)])
    assert isinstance(outcome, Sealed)
    assert proxy.altered == 1
    proxy.once(lambda sent, reply: fault if b"EVALSHA" in sent and reply[:1] in b"$*" else reply)
    replayed = verdict(store, first)
    assert isinstance(replayed, Replay)
    assert replayed.record == outcome.record
    assert proxy.altered == 1
    store.close()


def test_a_reply_that_comes_twice_is_not_taken_for_the_next_answer(fence: Fence, proxy: RespProxy) -> None:
    before = {each.doc_id: fence.documents.ingest(each) for each in documents(3)}
    for n in range(3):
        proxy.once(lambda sent, reply: reply * 2 if reply[:1] in b"$*" and b"EVALSHA" in sent else reply)
        fence.documents.ingest(Document(f"other{n}", "It snows."))
        assert proxy.altered == 1
        for doc_id, receipt in before.items():
            again = fence.documents.ingest(Document(doc_id, f"It rains in town {doc_id[1:]}."))
            assert (again.key, again.snippet_ids) == (receipt.key, receipt.snippet_ids)


def test_parts_on_their_way_are_not_lost_to_a_health_check(
    fence: Fence, proxy: RespProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py's PING, due between two parts, reads the reply to the first as its own, and connects again silently.

    Then each part is answered with the replies to the next one.
    """
    send_to = redis_link.send_to

    def due_afterwards(connection: Any, commands: Any) -> None:
        send_to(connection, commands)
        connection.next_health_check = 0.001

    monkeypatch.setattr(redis_link, "send_to", due_afterwards)
    opened = proxy.connections
    for turn in ("new", "duplicate"):
        receipts = fence.documents.ingest_many(documents())
        assert [receipt.key for receipt in receipts] == [each.key for each in fence.documents.ingest_many(documents())]
        assert {str(receipt.decision) for receipt in receipts} == {turn}
    assert fence.audit.check().ok
    assert fence.documents.verify().ok
    assert proxy.connections - opened <= 2, "nobody connected again"


def test_a_connection_is_never_made_again_behind_the_back_of_its_run_id(tmp_path: Path) -> None:
    """A replay trusts the run_id that was read when the connection was opened: a new one must read it anew."""
    with servers.valkey(data_dir=tmp_path) as server:
        store = RedisFences(server.url, "default")
        start_epoch(store, 1)
        first = claim(Mode.KEYED)
        sealed(store, first)
        verdict(store, first)
        with server.client() as admin:
            admin.save()
        (line,) = store._server.lines._free  # type: ignore[union-attr]
        server.kill()
        server.start()  # with the marker of the process before
        line.connection.next_health_check = 0.001
        assert isinstance(verdict(store, first), NotReadyVerdict)
        store.close()


def test_a_connection_that_rested_too_long_is_not_used_again(
    valkey_server: servers.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisFences(valkey_server.url, f"replies{next(_tenants)}")
    start_epoch(store, 1)
    verdict(store, claim(Mode.KEYED))
    (line,) = store._server.lines._free  # type: ignore[union-attr]
    line.used_at -= redis_link.IDLE_S + 1
    verdict(store, claim(Mode.KEYED))
    assert line not in store._server.lines._free  # type: ignore[union-attr]
    store.close()


@pytest.mark.parametrize("page", [b":1\r\n", b"*1\r\n$1\r\nx\r\n", b"*1\r\n*2\r\n$3\r\n1-1\r\n*1\r\n$1\r\nd\r\n"])
def test_a_page_of_rows_that_is_none_is_read_again(fence: Fence, proxy: RespProxy, page: bytes) -> None:
    fence.documents.ingest_many(documents(10))
    rows = {row.row_id for row in fence.audit.rows()}
    proxy.once(lambda sent, reply: page if b"XRANGE" in sent and reply != b"*0\r\n" else reply)
    assert {row.row_id for row in fence.audit.rows()} == rows
    assert proxy.altered == 1


class Stopping:
    """A chunker and an embedder that raise what only an iterator may."""

    name, version, parameters = "stopping", "1", {}
    revision, dimension, normalised = "1", 3, False

    def split(self, text: str) -> Any:
        raise StopIteration

    def embed(self, texts: Any) -> Any:
        raise StopIteration


def test_a_stop_iteration_of_a_chunker_is_an_error_that_names_it(tmp_path: Path) -> None:
    with ragfence.open(tmp_path) as fence:
        documents = fence.documents.using(chunker=Stopping())
        (receipt,) = documents.ingest_many([Document("a", "It rains.")])
        assert receipt.failure is not None
        assert "split() raised StopIteration" in receipt.failure["message"]
        with pytest.raises(ValidationError, match=r"split\(\) raised StopIteration"):
            documents.ingest(Document("b", "It rains."))


def test_a_stop_iteration_of_an_embedder_is_an_error_that_names_it() -> None:
    from ragfence.indexes.embedders.embedder import EmbedderId, embed_texts

    with pytest.raises(EmbedderInvalid, match="raised StopIteration"):
        embed_texts(Stopping(), EmbedderId.of(Stopping()), ["It rains."])  # type: ignore[arg-type]
