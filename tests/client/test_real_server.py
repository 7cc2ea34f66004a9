"""Both clients against the real application on a real socket: what is lost on the way happens once all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragfence import Document, errors
from ragfence.client import ApiRefused
from tests.client.conftest import Opening
from tests.client.real_server import RealServer, real_server
from tests.faulty_http import Fault


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("real") / ".ragfence") as server:
        yield server


@pytest.fixture
def named(request: pytest.FixtureRequest) -> str:
    """A prefix for the documents of one test: they share a server."""
    return str(request.node.name)


def test_a_document_is_new_once_and_then_answered_with_the_first_receipt(
    opened: Opening, real: RealServer, named: str
) -> None:
    client = opened(real.url, real.acme)
    document = Document(f"{named}/leave", "Thirty days a year.", {"team": "people"}, sequence=1)
    first, again = client.ingest(document), client.ingest(document)
    assert (first.decision, again.decision) == ("new", "duplicate")
    assert first == again
    assert first.snippet_ids
    found = client.get(document.doc_id)
    assert found.snippet_ids == list(first.snippet_ids)
    assert found.etag == first.fence
    (snippet,) = client.snippets(document.doc_id)
    assert (snippet.snippet_id, snippet.text) == (first.snippet_ids[0], document.text)
    outcome = client.receipt(first.key)
    assert (outcome.state, outcome.snippet_ids) == ("sealed", list(first.snippet_ids))


def test_what_was_left_comes_back_and_what_came_back_can_be_left_again(
    opened: Opening, real: RealServer, named: str
) -> None:
    """A, B, A and retract, ingest, retract: keys of the content alone would leave the third undone."""
    for run in (None, f"{named}-run"):
        client = opened(real.url, real.acme, run=run)
        a, b = Document(f"{named}/{run}", "A"), Document(f"{named}/{run}", "B")
        first = client.ingest(a)
        client.ingest(b)
        assert client.ingest(a).flags.revived
        assert client.get(a.doc_id).snippet_ids == list(first.snippet_ids)
        client.retract(a.doc_id)
        assert client.get(a.doc_id) is None
        client.ingest(a)
        assert client.get(a.doc_id) is not None
        client.retract(a.doc_id)
        assert client.get(a.doc_id) is None


def test_a_run_that_starts_again_is_answered_with_what_was_stored(
    opened: Opening, real: RealServer, named: str
) -> None:
    document = Document(f"{named}/a", "A")
    receipts = [opened(real.url, real.acme, run=named).ingest(document) for _ in range(2)]
    assert [receipt.decision for receipt in receipts] == ["new", "new"]  # the stored answer, byte for byte
    assert opened(real.url, real.acme).ingest(document).decision == "duplicate"


@pytest.mark.parametrize(
    "fault",
    [Fault.drop_reply(), Fault.cut_reply(), Fault.drop_request(), Fault.answer(503), Fault.act_then_answer(502)],
    ids=lambda fault: fault.name,
)
def test_a_connection_that_breaks_leaves_one_effect(
    opened: Opening, real: RealServer, named: str, fault: Fault
) -> None:
    client = opened(real.proxy.url, real.acme)
    real.proxy.script(fault, fault, method="POST")
    document = Document(f"{named}/a", "A")
    receipt = client.ingest(document)
    assert receipt.decision == "new"  # of the first attempt that arrived, whoever heard of it
    rows = client.decisions(kind="document", source_id=document.doc_id)
    assert [row["decision"] for row in rows if row["effect_id"]] == ["new"]


def test_a_document_that_somebody_has_changed_is_not_overwritten(opened: Opening, real: RealServer, named: str) -> None:
    client = opened(real.url, real.acme)
    first = client.put(Document(f"{named}/a", "A"), if_absent=True)
    second = client.put(Document(f"{named}/a", "B"), if_match=first.fence)
    with pytest.raises(errors.RagfenceError) as refused:
        client.put(Document(f"{named}/a", "C"), if_match=first.fence)
    assert refused.value.details["status"] == 412
    with pytest.raises(errors.RagfenceError):
        client.put(Document(f"{named}/a", "C"), if_absent=True)
    assert client.get(f"{named}/a").etag == second.fence


def test_a_stale_document_is_a_stale_error(opened: Opening, real: RealServer, named: str) -> None:
    client = opened(real.url, real.acme)
    client.ingest(Document(f"{named}/a", "new", sequence=5))
    with pytest.raises(errors.Stale):
        client.ingest(Document(f"{named}/a", "old", sequence=4))


@pytest.mark.parametrize("doc_id", ["a/b c", "..", ".", "../x", "a?b#c", "50%", "ü/ß", "/lead", "x//y", "a:batch"])
def test_every_doc_id_has_an_address(opened: Opening, real: RealServer, doc_id: str) -> None:
    client = opened(real.url, real.acme)
    client.put(Document(doc_id, "text"))
    assert client.get(doc_id).doc_id == doc_id
    client.retract(doc_id)
    assert client.get(doc_id) is None


def test_batches_of_many_documents(opened: Opening, real: RealServer, named: str) -> None:
    client = opened(real.proxy.url, real.acme)
    documents = [Document(f"{named}/{n}", f"Text number {n}.") for n in range(1200)]
    documents[700] = Document(f"{named}/0", "older", sequence=-5)
    documents[0] = documents[0]._replace(sequence=1)
    sent = len(real.proxy.requests("POST"))
    real.proxy.script(Fault.drop_reply(), Fault.none(), Fault.cut_reply(), path="*:batch")
    receipts = client.ingest_many(documents, batch=500)
    assert len(real.proxy.requests("POST")) == sent + 5
    assert [at for at, receipt in enumerate(receipts) if receipt.failed] == [700]
    assert receipts[700].failure["code"] == "CONFLICT.sequence.stale"
    assert {receipt.decision for receipt in receipts} == {"new", "stale"}
    again = client.ingest_many(documents, batch=400)
    assert {receipt.decision for receipt in again} == {"duplicate", "stale"}
    good = [at for at in range(1200) if at != 700]
    assert [again[at] for at in good] == [receipts[at] for at in good]


def test_a_tenant_knows_nothing_of_another(opened: Opening, real: RealServer, named: str) -> None:
    acme, globex = opened(real.url, real.acme), opened(real.url, real.globex)
    document = Document(f"{named}/a", "A")
    mine = acme.ingest(document, idempotency_key=named)
    assert globex.get(document.doc_id) is None
    theirs = globex.ingest(Document(f"{named}/a", "B"), idempotency_key=named)
    assert (mine.decision, theirs.decision) == ("new", "new")
    assert mine.key != theirs.key
    assert acme.get(document.doc_id).snippet_ids == list(mine.snippet_ids)
    with pytest.raises(errors.RagfenceError) as unknown:
        globex.receipt(mine.key)
    assert unknown.value.details["status"] in (400, 404)
    assert all(named not in row["source_id"] for row in globex.decisions(kind="document", source_id=f"{named}/b"))


@pytest.mark.parametrize(
    ("key", "code"), [("", "AUTH.missing"), ("rf_nobody", "AUTH.invalid"), (None, "AUTH.forbidden")]
)
def test_who_may_not_is_told_so_once(opened: Opening, real: RealServer, key: str | None, code: str) -> None:
    client = opened(real.url, real.acme_reader if key is None else key)
    with pytest.raises(ApiRefused) as refused:
        client.ingest(Document("a", "x"))
    assert refused.value.code == code


def test_figures_and_keys_are_read(opened: Opening, real: RealServer, named: str) -> None:
    client = opened(real.url, real.acme)
    client.ingest(Document(f"{named}/a", "A"))
    assert client.stats().tenant == "acme"
    assert len(client.keys(page=50)) == len(client.keys())
    rows = client.decisions(kind="document", source_id=f"{named}/a", page=1)
    assert [row["decision"] for row in rows] == ["new", "new"]  # the claim, and its seal
    assert client.purge(f"{named}/a").found
    assert client.get(f"{named}/a") is None
    assert client.purge_expired().after == ""


def test_an_index_is_built_once_named_searched_and_rolled_back(opened: Opening, real: RealServer, named: str) -> None:
    client = opened(real.url, real.globex, timeout_s=2)
    client.ingest(Document(f"{named}/leave", "Employees have thirty days of leave a year."))
    first = client.build(wait_s=120)
    assert client.build(wait_s=120).decision == "duplicate"
    client.ingest(Document(f"{named}/pay", "Salaries are paid on the first of the month."))
    second = client.build(wait_s=120)
    assert first.index_hash != second.index_hash
    client.swap("docs", first.index_hash)
    client.swap("docs", second.index_hash, expect=first.index_hash)
    with pytest.raises(errors.AliasMoved):
        client.swap("docs", second.index_hash, expect=first.index_hash)
    hits = client.search("docs", "when is the salary paid?", k=2)
    assert hits[0].doc_id == f"{named}/pay"
    assert hits[0].index_hash == client.resolve("docs").index_hash == second.index_hash
    client.rollback("docs", reason="a test")
    assert client.resolve("docs").index_hash == first.index_hash
    assert [entry["change"] for entry in client.history("docs", limit=3)] == ["rollback", "swap", "swap"]
    assert {each["index_hash"] for each in client.builds()} >= {first.index_hash, second.index_hash}
    assert [each["alias"] for each in client.aliases()] == ["docs"]
