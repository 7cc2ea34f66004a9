"""Many documents in batches: in their order, in bounded memory, whatever is lost or cut off on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Document, errors
from ragfence.client import ApiRefused, ApiUnavailable, AsyncClient, Client
from ragfence.client.batches import ClientBatches, ingest_many
from ragfence.client.session import make_calls
from ragfence.client.steps import END, Give, Pull, Reply, Send
from ragfence.core.receipts import Decision, Receipt
from ragfence.wire.problems import problem_of
from tests.client.conftest import Asks, Slept
from tests.client.scripted import Asked, Said, Scripted, ndjson, outcome, outcomes, problem


def documents(count: int) -> list[Document]:
    return [Document(f"d{n}", f"text {n}") for n in range(count)]


def ids(receipts: list[Receipt]) -> list[str]:
    return [receipt.effect_id.removeprefix("ef_") for receipt in receipts]


def test_documents_go_out_in_batches_and_receipts_come_back_in_order(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    assert ids(client.ingest_many(documents(1200), batch=500)) == [f"d{n}" for n in range(1200)]
    assert [len(asked.lines()) for asked in server.asked] == [500, 500, 200]
    assert {asked.path for asked in server.asked} == {"/v1/documents:batch"}
    assert {asked.headers["content-type"] for asked in server.asked} == {"application/x-ndjson"}
    assert len({asked.key for asked in server.asked}) == 3


def test_a_batch_is_never_larger_than_told_but_a_large_document_goes_alone(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    sizes = [10, 10, 5000, 10, 400, 400, 400]
    given = [Document(f"d{n}", "x" * size) for n, size in enumerate(sizes)]
    assert ids(client.ingest_many(given, max_batch_bytes=1000)) == [f"d{n}" for n in range(len(sizes))]
    assert [len(asked.lines()) for asked in server.asked] == [2, 1, 3, 1]
    assert all(len(asked.body) <= 1000 or len(asked.lines()) == 1 for asked in server.asked)


def test_no_documents_are_no_request(client: Asks, server: Scripted) -> None:
    assert client.ingest_many([]) == []
    assert not server.asked


def test_failures_are_entries_in_their_places(client: Asks, server: Scripted) -> None:
    stale = problem_of(errors.Stale("older than 7", key="2a", newest=7)).body()
    busy = problem_of(errors.InFlight("busy")).body()
    server.script(
        ndjson(
            [
                outcome(1, "d0"),
                {"line": 2, "doc_id": "d2", "status": 409, "problem": stale},
                {"line": 3, "doc_id": "d3", "status": 409, "problem": busy},
            ]
        )
    )
    first, local, late, held = client.ingest_many([documents(1)[0], Document("", "x"), *documents(4)[2:]])
    assert first.decision is Decision.NEW
    assert not first.failed
    assert local.failure["type"] == "DocumentInvalid"
    assert (local.decision, local.is_new, local.key) == (Decision.REFUSED, False, "")
    assert late.decision is Decision.STALE
    assert (late.failure["type"], late.failure["code"], late.key) == ("Stale", "CONFLICT.sequence.stale", "2a")
    assert late.failure["hint"]
    assert not late.failure["retryable"]
    assert held.decision is Decision.IN_FLIGHT
    assert held.failure["retryable"]
    assert [line["doc_id"] for line in server.asked[0].lines()] == ["d0", "d2", "d3"]


def test_documents_that_cannot_be_sent_need_no_request(client: Asks, server: Scripted) -> None:
    refused = client.ingest_many([Document("", "x"), Document("a", "\0"), "no document"])
    assert [receipt.failure["type"] for receipt in refused] == ["DocumentInvalid"] * 3
    assert [(receipt.decision, receipt.is_new) for receipt in refused] == [(Decision.REFUSED, False)] * 3
    assert not server.asked


def test_a_batch_stops_at_a_document_that_cannot_be_sent(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    with pytest.raises(errors.DocumentInvalid) as stopped:
        client.ingest_many([*documents(2), Document("", "x"), *documents(5)[3:]], on_error="raise")
    assert ids(stopped.value.details["receipts"]) == ["d0", "d1"]
    assert stopped.value.details["position"] == 2
    assert [line["doc_id"] for asked in server.asked for line in asked.lines()] == ["d0", "d1"]


def test_a_batch_stops_at_a_document_that_the_server_refuses(client: Asks, server: Scripted) -> None:
    stale = problem_of(errors.Stale("older than 7", key="2a", newest=7)).body()
    server.script(
        outcomes,
        ndjson([outcome(1, "d2"), {"line": 2, "doc_id": "d3", "status": 409, "problem": stale}]),
    )
    with pytest.raises(errors.Stale, match="older than 7") as stopped:
        client.ingest_many(documents(6), batch=2, on_error="raise")
    assert ids(stopped.value.details["receipts"]) == ["d0", "d1", "d2"]
    assert stopped.value.details["position"] == 3
    assert len(server.asked) == 2


def test_an_unknown_way_with_errors_is_refused(client: Asks) -> None:
    with pytest.raises(errors.ValidationError, match="on_error"):
        client.ingest_many(documents(1), on_error="ignore")


@pytest.mark.parametrize("cut", [0, 1, 200, -2, -1, None])
def test_an_answer_that_is_cut_off_is_asked_for_again_under_the_same_key(
    client: Asks, server: Scripted, cut: int | None
) -> None:
    def cut_off(asked: Asked) -> Said:
        whole = outcomes(asked)
        if cut is None:  # ended in order, but without its last line
            return ndjson([json.loads(line) for line in whole.body.splitlines()[:-1]], done=False)
        return replace(whole, body=whole.body.rstrip()[: cut or None] if cut < 0 else whole.body[:cut])

    server.script(cut_off, Said(lost=True), lambda asked: replace(outcomes(asked), cut=100), outcomes)
    assert ids(client.ingest_many(documents(3))) == ["d0", "d1", "d2"]
    assert len(server.asked) == 4
    assert len({(asked.key, asked.body) for asked in server.asked}) == 1


def test_an_answer_that_does_not_fit_its_batch_is_refused(client: Asks, server: Scripted) -> None:
    for lines in ([outcome(1, "d0")], [outcome(2, "d1"), outcome(1, "d0")], [{"line": 1}, {"line": 2}]):
        server.script(ndjson(lines))
        with pytest.raises(ApiRefused, match="outcome per line"):
            client.ingest_many(documents(2))


def test_a_batch_that_is_refused_as_a_whole_raises(client: Asks, server: Scripted) -> None:
    server.script(outcomes, problem("VALIDATION.body_too_large"))
    with pytest.raises(ApiRefused) as refused:
        client.ingest_many(documents(4), batch=2)
    assert (refused.value.status, refused.value.code) == (413, "VALIDATION.body_too_large")


def test_a_batch_has_a_longer_budget_than_other_calls(client: Asks, server: Scripted, slept: Slept) -> None:
    server.script(*[problem("DEPENDENCY.overloaded", retry_after="5")] * 10, outcomes)
    client.ingest_many(documents(1), wait_s=120)
    assert sum(slept.pauses) >= 50
    server.script(problem("DEPENDENCY.overloaded", retry_after="5"))
    with pytest.raises(ApiUnavailable):
        client.ingest_many(documents(1), wait_s=2)


def test_progress_is_told_after_each_batch(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    told: list[int] = []
    client.ingest_many(documents(5), batch=2, progress=told.append)
    assert told == [2, 4, 5]


def test_a_bar_is_drawn_on_stderr(client: Asks, server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.script(outcomes)
    client.ingest_many(documents(5), progress=True)
    out, err = capsys.readouterr()
    assert not out
    assert "sending" in err


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 10_001}, {"max_batch_bytes": 0}])
def test_batches_of_no_size_are_refused(client: Asks, options: dict[str, int]) -> None:
    with pytest.raises(errors.ValidationError):
        client.ingest_many(documents(1), **options)
    with pytest.raises(errors.ValidationError):
        client.ingest_many(documents(1)[0])


def test_a_stream_reads_no_further_than_it_is_read(server: Scripted) -> None:
    server.script(outcomes)
    taken: list[str] = []

    def endless() -> Iterator[Document]:
        n = 0
        while True:
            taken.append(f"d{n}")
            yield Document(f"d{n}", "x")
            n += 1

    with Client(server.url) as client:
        receipts = client.ingest_many(endless(), batch=3, stream=True)
        assert not taken
        assert ids([next(receipts) for _ in range(4)]) == ["d0", "d1", "d2", "d3"]
        receipts.close()  # type: ignore[attr-defined]  # a generator
    assert len(taken) <= 7
    assert len(server.asked) == 2


def test_documents_may_come_from_an_async_source(server: Scripted) -> None:
    server.script(outcomes)

    async def source() -> AsyncIterator[Document]:
        for document in documents(5):
            await asyncio.sleep(0)
            yield document

    async def sent() -> tuple[list[Receipt], list[Receipt]]:
        async with AsyncClient(server.url) as client:
            listed = await client.ingest_many(source(), batch=2)
            return listed, [receipt async for receipt in client.ingest_many(source(), batch=2, stream=True)]

    listed, streamed = asyncio.run(sent())
    assert ids(listed) == ids(streamed) == [f"d{n}" for n in range(5)]
    with Client(server.url) as client, pytest.raises(errors.ValidationError, match="async for"):
        client.ingest_many(source())  # type: ignore[call-overload]  # that is the point


@dataclass
class Page:
    """As langchain_core.documents.Document."""

    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass
class Node:
    """As llama_index.core.schema.Document."""

    text: str
    id_: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_content(self) -> str:
        return self.text


class LangChainLoader:
    def lazy_load(self) -> Iterator[Page]:
        for number in range(3):
            yield Page(f"page {number}", {"source": "a.pdf", "page": number})


class LlamaReader:
    def load_data(self) -> list[Node]:
        return [Node("one", "n1"), Node("two", "n2", {"url": "https://x/y"})]


def test_langchain_loaders_are_loaded(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    receipts = client.load(LangChainLoader(), doc_id=lambda page: f"{page.metadata['source']}#{page.metadata['page']}")
    assert ids(receipts) == ["a.pdf#0", "a.pdf#1", "a.pdf#2"]
    assert server.asked[0].lines()[1] == {
        "doc_id": "a.pdf#1",
        "text": "page 1",
        "metadata": {"source": "a.pdf", "page": 1},
    }


def test_llama_index_readers_are_loaded(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    assert ids(client.load(LlamaReader())) == ["n1", "n2"]
    assert server.asked[0].lines()[1]["source_url"] == "https://x/y"


def test_iterables_and_folders_are_loaded(client: Asks, server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A")
    server.script(outcomes)
    assert ids(client.load(documents(2))) == ["d0", "d1"]
    assert ids(client.load(tmp_path)) == ["a.md"]


def test_a_document_that_a_loader_spoils_is_an_entry(client: Asks, server: Scripted) -> None:
    server.script(outcomes)
    good, bad = client.load([Page("x", id="a"), Page("x")])
    assert not good.failed
    assert bad.failure["type"] == "DocumentInvalid"
    with pytest.raises(errors.ValidationError):
        client.load(17)


@given(st.lists(st.one_of(st.integers(0, 300), st.none()), max_size=40), st.integers(1, 7), st.integers(1, 900))
def test_every_document_has_its_receipt_whatever_the_batches_are(
    sizes: list[int | None], batch: int, max_bytes: int
) -> None:
    """Receipts are those of a plain loop, in order; each batch keeps its limits. None: a document nobody can send."""
    given = [Document(f"d{n}" if size is not None else "", "x" * (size or 0)) for n, size in enumerate(sizes)]
    core = make_calls("http://localhost:1", "", 10, None, None, lambda: 0.0)
    steps = ingest_many(core, given, ClientBatches(batch=batch, max_batch_bytes=max_bytes))
    came: Any = None
    receipts = []
    while True:
        try:
            step = steps.send(came)
        except StopIteration:
            break
        match step:
            case Pull(source):
                came = next(source, END)  # type: ignore[arg-type]
            case Give(value):
                receipts.append(value)
                came = None
            case Send(body=bytes(body)):
                lines = [json.loads(line) for line in body.splitlines()]
                assert len(lines) <= batch
                assert len(lines) == 1 or len(body) <= max_bytes
                answer = ndjson([outcome(at, line["doc_id"]) for at, line in enumerate(lines, 1)])
                came = Reply(200, {}, answer.body)
    assert ids([receipt for receipt in receipts if not receipt.failed]) == [
        each.doc_id for each in given if each.doc_id
    ]
    assert [receipt.failed for receipt in receipts] == [size is None for size in sizes]
