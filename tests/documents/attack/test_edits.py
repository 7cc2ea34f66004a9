"""What an edit, a change of metadata and a change of the chunker cost: counted in the snippets objects themselves."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ragfence import Document
from ragfence.documents.chunking.chunker import Chunker, MarkdownChunker, TextChunker
from ragfence.documents.documents import Documents
from tests.documents.attack.corpus import Paragraphs, chunkings, parts
from tests.documents.attack.judge import snippets_written
from tests.documents.attack.places import Place, in_folder, in_memory
from tests.machine.lineages import MemoryLineages

WORDS = ("lease", "fence", "epoch", "batch", "shard", "commit", "seal", "claim", "token", "owner", "record", "segment")


def prose(dice: random.Random, sentences: int) -> str:
    told = [" ".join(dice.choices(WORDS, k=dice.randint(6, 14))).capitalize() + "." for _ in range(sentences)]
    return " ".join(told)


def paragraphs(dice: random.Random, count: int, *, headings: bool) -> list[str]:
    """Of a document that is cut into at least 100 snippets."""
    made = []
    for number in range(count):
        if headings and number % 7 == 0:
            made.append(f"## {' '.join(dice.choices(WORDS, k=3)).capitalize()} {number}")
        made.append(prose(dice, dice.randint(3, 9)))
    return made


def changed(dice: random.Random, before: list[str], how: str) -> list[str]:
    """One paragraph near the top, which is no heading."""
    at = next(at for at in range(3, len(before)) if not before[at].startswith("#"))
    match how:
        case "shorter":
            return [*before[:at], prose(dice, 1), *before[at + 1 :]]
        case "longer":
            return [*before[:at], prose(dice, 12), *before[at + 1 :]]
        case "a word":
            return [*before[:at], before[at].replace(".", ", indeed.", 1), *before[at + 1 :]]
        case "inserted":
            return [*before[:at], prose(dice, 5), *before[at:]]
    return [*before[:at], *before[at + 1 :]]


def assert_in_place(documents: Documents, doc_id: str, text: str) -> int:
    """Every snippet is `text[start:end]`, in order, and all that is no white space is in one of them."""
    snippets = documents.snippets(doc_id)
    covered = bytearray(len(text))
    for ordinal, snippet in enumerate(snippets):
        assert (snippet.ordinal, snippet.text) == (ordinal, text[snippet.start : snippet.end])
        covered[snippet.start : snippet.end] = b"\1" * (snippet.end - snippet.start)
    assert [snippet.start for snippet in snippets] == sorted(snippet.start for snippet in snippets)
    assert not [mark for mark, known in zip(text, covered, strict=True) if not known and not mark.isspace()]
    return len(snippets)


@pytest.mark.parametrize("chunker", [TextChunker(), MarkdownChunker()], ids=["text", "markdown"])
def test_an_edit_near_the_top_of_a_hundred_snippets_writes_three_at_most_but_for_one_in_a_hundred(
    chunker: Chunker,
) -> None:
    """Of 3,000 such edits 21 wrote four, and none more: cuts depend on the words around them, so no bound is strict.

    What is strict: the snippets that are written are those that the edit changed, and no others.
    """
    costs: Counter[int] = Counter()
    for seed in range(6):
        for how in ("a word", "shorter", "longer", "inserted", "removed"):
            dice = random.Random(f"{seed}/{how}")
            before = paragraphs(dice, 230, headings=chunker.name == "markdown")
            costs[edited(chunker, "\n\n".join(before), "\n\n".join(changed(dice, before, how)))] += 1
    assert max(costs) <= 4
    assert costs[4] <= 1


def edited(chunker: Chunker, first: str, second: str) -> int:
    """How many snippets the edit writes. Going back writes none."""
    place = in_memory()
    documents = place.writer(chunker=chunker).documents
    before = documents.ingest(Document("long", first)).snippet_ids
    written = snippets_written(place.objects)
    assert assert_in_place(documents, "long", first) == written >= 100

    after = documents.ingest(Document("long", second)).snippet_ids
    cost = snippets_written(place.objects) - written
    assert cost == len(set(after) - set(before))
    assert_in_place(documents, "long", second)

    documents.ingest(Document("long", first))
    assert snippets_written(place.objects) == written + cost
    assert_in_place(documents, "long", first)
    return cost


def test_offsets_are_right_for_every_revision_of_a_long_life() -> None:
    """Twelve edits in a row, each keeping what it can from the head before; then back through all of them."""
    dice = random.Random(7)
    place = in_memory()
    documents = place.writer(chunker=MarkdownChunker(size=300)).documents
    life = [paragraphs(dice, 20, headings=True)]
    for number in range(12):
        life.append(changed(dice, life[-1], ["longer", "inserted", "shorter", "removed"][number % 4]))
    texts = ["\n\n".join(revision) for revision in life]
    first = [documents.ingest(Document("long", text)).snippet_ids for text in texts]
    for text, ids in [*zip(texts, first, strict=True)][::-1]:
        receipt = documents.ingest(Document("long", text))
        assert receipt.snippet_ids == ids
        assert_in_place(documents, "long", text)
    place.forget()
    for text, ids in zip(texts, first, strict=True):
        assert documents.ingest(Document("long", text)).snippet_ids == ids
        assert_in_place(documents, "long", text)


@pytest.fixture
def counted(tmp_path: Path) -> Place:
    return in_folder(MemoryLineages(), tmp_path)


def test_volatile_metadata_of_a_thousand_documents_chunks_nothing_and_a_changed_chunker_all(counted: Place) -> None:
    assert counted.trace is not None
    (part,) = parts(1000, batch=1000)
    documents = counted.writer().documents
    first = documents.ingest_many(part.documents())
    written = snippets_written(counted.objects)
    once = chunkings(counted.trace)
    assert set(once.values()) == {1}

    described = documents.ingest_many([each._replace(metadata={"views": 7}) for each in part.documents()])
    assert list(described) == list(first)
    assert Counter((each.decision, each.flags.metadata_updated) for each in described) == {("duplicate", True): 1000}
    assert (chunkings(counted.trace), snippets_written(counted.objects)) == (once, written)
    assert {str(head.metadata) for head in documents.heads()} == {"{'views': 7}"}
    counted.forget()
    assert list(documents.ingest_many([each._replace(metadata={"views": 7}) for each in part.documents()])) == list(
        first
    )
    assert (chunkings(counted.trace), snippets_written(counted.objects)) == (once, written)

    other = documents.using(chunker=Paragraphs(counted.trace, version="2"))
    again = other.ingest_many(part.documents())
    assert Counter(each.decision for each in again) == {"new": 1000}
    assert not {each for receipt in again for each in receipt.snippet_ids} & {
        each for receipt in first for each in receipt.snippet_ids
    }
    assert set(chunkings(counted.trace).values()) == {2}
    assert snippets_written(counted.objects) == 2 * written
