"""Syncs against a plain dict: whatever happens to the source, the stores and the documents in between."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ragfence
from ragfence import Document
from ragfence.documents.documents import Documents
from ragfence.documents.sources import Item
from ragfence.documents.sync.prune_plan import Prune
from ragfence.documents.sync.report import SyncReport
from ragfence.errors import DocumentInvalid, StoreUnavailable
from ragfence.testing import MemoryFences, MemoryObjects
from tests.documents.chunkers import Paragraphs

NAMES = st.sampled_from("abcde")
TEXTS = st.sampled_from(["one", "two", "three"])
PRUNES = st.sampled_from([False, "scoped", "full"])
METADATA = {"from": "the source"}


class Shelf:
    """A source in memory. Each write gives a document another state, as a file gets another mtime."""

    name = "shelf"

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.states: dict[str, int] = {}
        self.locked: set[str] = set()
        self.read: list[str] = []
        self.breaks_after: int | None = None
        self._clock = 0

    def write(self, name: str, text: str) -> None:
        self._clock += 1
        self.texts[name], self.states[name] = text, self._clock

    def items(self) -> Iterator[Item]:
        for number, name in enumerate(sorted(self.texts)):
            if number == self.breaks_after:
                raise StoreUnavailable("the shelf fell down")
            yield Item(name, f"{self.states[name]}", lambda name=name: self._load(name))

    def _load(self, name: str) -> Document:
        self.read.append(name)
        if name in self.locked:
            raise DocumentInvalid(f"{name} is locked", doc_id=name)
        return Document(name, self.texts[name], METADATA)


class Syncs(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fence = ragfence.open(MemoryFences(), objects=MemoryObjects())
        self.shelf = Shelf()
        self.live: dict[str, str] = {}
        self.brought: set[str] = set()
        """what the shelf brought and no prune has taken since"""
        self.owned: set[str] = set()
        """whose content came from the shelf first, and was not retracted since"""
        self.version = "1"

    def teardown(self) -> None:
        if hasattr(self, "fence"):
            self.fence.close()

    @property
    def documents(self) -> Documents:
        return self.fence.documents.using(chunker=Paragraphs(version=self.version))

    @rule(name=NAMES, text=TEXTS)
    def write(self, name: str, text: str) -> None:
        self.shelf.write(name, text)

    @precondition(lambda self: self.shelf.texts)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.shelf.texts)))
        self.shelf.write(name, self.shelf.texts[name])

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.shelf.texts.pop(name, None)

    @rule(name=NAMES)
    def lock_or_unlock(self, name: str) -> None:
        self.shelf.locked ^= {name}

    @rule(name=NAMES, text=TEXTS)
    def ingest_by_hand(self, name: str, text: str) -> None:
        self.documents.ingest(Document(name, text))  # the owner stays
        self.live[name] = text

    @rule(name=NAMES)
    def retract_by_hand(self, name: str) -> None:
        self.documents.retract(name)
        self.live.pop(name, None)
        self.owned.discard(name)

    @rule()
    def hydrate(self) -> None:
        self.fence.hydrate()

    @rule()
    def take_another_chunker(self) -> None:
        self.version = "2" if self.version == "1" else "1"

    @rule(prune=PRUNES)
    def sync(self, prune: Prune) -> None:
        report = self._synced(prune)
        taken = self._ingested(self.shelf.texts)
        doomed = self._doomed(prune)
        for name in doomed:
            del self.live[name]
        if prune:
            assert report.pruned_ids == tuple(sorted(doomed))
            self.owned -= set(doomed)
            self.brought &= set(self.shelf.texts)  # also what somebody else had taken away, or owns
        assert report.listed == len(self.shelf.texts)
        assert sum(report.decisions.values()) == report.listed
        assert report.unread + len(self.shelf.read) == report.listed
        assert report.failed == report.listed - len(taken)
        # And now that all is done, nothing is left to do, and what can be read need not be.
        again = self._synced(prune)
        assert (again.decisions["new"], again.revived, again.metadata_updated, again.pruned) == (0, 0, 0, 0)
        assert set(self.shelf.read) <= self.shelf.locked

    @rule(prune=PRUNES)
    def sync_dry(self, prune: Prune) -> None:
        before = self.documents.corpus_digest()
        report = self.documents.sync(self.shelf, prune, max_prune_share=1.0, dry_run=True)
        assert report.pruned_ids == tuple(sorted(self._doomed(prune)))
        assert self.documents.corpus_digest() == before

    @rule(prune=PRUNES, after=st.integers(0, 4))
    def sync_that_breaks_off(self, prune: Prune, after: int) -> None:
        """What was listed before is ingested, unless that was the look at what would go. Nothing at all is pruned."""
        if after >= len(self.shelf.texts):
            return
        self.shelf.breaks_after = after
        try:
            self._synced(prune)
        except StoreUnavailable:
            pass
        else:
            raise AssertionError("it should have broken off")
        finally:
            self.shelf.breaks_after = None
        if not prune:
            self._ingested({name: self.shelf.texts[name] for name in sorted(self.shelf.texts)[:after]})

    def _synced(self, prune: Prune) -> SyncReport:
        self.shelf.read = []
        return self.documents.sync(self.shelf, prune, max_prune_share=1.0)

    def _ingested(self, texts: dict[str, str]) -> set[str]:
        """Those that are live as the shelf has them: what is locked is so only if it was not to be read."""
        failed = set(self.shelf.read) & self.shelf.locked
        taken = set(texts) - failed
        self.owned |= {name for name in taken if self.live.get(name) != texts[name]}
        self.live |= {name: texts[name] for name in taken}
        self.brought |= taken
        return taken

    def _doomed(self, prune: Prune) -> list[str]:
        gone = [name for name in self.live if name not in self.shelf.texts]
        if not prune or prune == "full":
            return gone if prune else []
        return [name for name in gone if name in self.brought & self.owned]

    @invariant()
    def the_live_documents_are_those_of_the_model(self) -> None:
        if not hasattr(self, "fence"):
            return
        found = {head.doc_id for head in self.documents.heads()}
        assert found == set(self.live)
        for name, text in self.live.items():
            assert [snippet.text for snippet in self.documents.snippets(name)] == [text]


TestSyncs = Syncs.TestCase
TestSyncs.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
