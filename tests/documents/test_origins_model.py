"""Two sources that share doc_ids, against plain dicts: who owns a document, replaces it, prunes it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ragfence
from ragfence import Document
from ragfence.documents.log import stored_in
from ragfence.documents.origins import origin_digest
from ragfence.documents.sources import DocumentsSource
from ragfence.documents.sync.prune_plan import Prune
from ragfence.testing import MemoryFences, MemoryObjects

ORIGINS = st.sampled_from(["one", "two"])
NAMES = st.sampled_from("abcd")
TEXTS = st.sampled_from(["red", "green"])
PRUNES = st.sampled_from([False, "scoped", "full"])
NO_TOKEN = ""


class TwoOrigins(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.objects = MemoryObjects()
        self.fence = ragfence.open(MemoryFences(), objects=self.objects)
        self.texts: dict[str, dict[str, str]] = {"one": {}, "two": {}}
        self.noted: dict[str, set[str]] = {"one": set(), "two": set()}
        self.live: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.sealed: set[tuple[str, str]] = set()
        """what was live once: when it comes back it is a duplicate, revived"""

    def teardown(self) -> None:
        if hasattr(self, "fence"):
            self.fence.close()

    @rule(origin=ORIGINS, name=NAMES, text=TEXTS)
    def write(self, origin: str, name: str, text: str) -> None:
        self.texts[origin][name] = text

    @rule(origin=ORIGINS, name=NAMES)
    def remove(self, origin: str, name: str) -> None:
        self.texts[origin].pop(name, None)

    @rule(name=NAMES, text=TEXTS)
    def ingest_by_hand(self, name: str, text: str) -> None:
        self.fence.documents.ingest(Document(name, text))
        self.owners.setdefault(name, NO_TOKEN)
        self.live[name] = text
        self.sealed.add((name, text))

    @rule(name=NAMES)
    def retract_by_hand(self, name: str) -> None:
        self.fence.documents.retract(name)
        self.live.pop(name, None)
        self.owners.pop(name, None)

    @rule()
    def lose_the_fence_store(self) -> None:
        self.fence.close()
        self.fence = ragfence.open(MemoryFences(), objects=self.objects)
        self.fence.hydrate()

    @rule()
    def compact(self) -> None:
        self.fence.documents.compact()

    @rule(origin=ORIGINS, prune=PRUNES, take_over=st.booleans())
    def sync(self, origin: str, prune: Prune, take_over: bool) -> None:
        given = DocumentsSource([Document(*each) for each in sorted(self.texts[origin].items())], name=origin)
        foreseen = self.fence.documents.sync(given, prune, max_prune_share=1.0, take_over=take_over, dry_run=True)
        report = self.fence.documents.sync(given, prune, max_prune_share=1.0, take_over=take_over)
        doomed, kept = self._pruned(origin, prune, take_over)
        decisions = {"new": 0, "duplicate": 0, "conflict": 0}
        for name, text in self.texts[origin].items():
            decisions[self._ingested(origin, name, text, take_over)] += 1
        for name in doomed:
            del self.live[name], self.owners[name]
        for told in (foreseen, report):
            assert {kind: told.decisions[kind] for kind in decisions} == decisions
            assert sum(told.decisions.values()) == told.listed == len(self.texts[origin])
            assert (told.failed, told.pruned_ids, told.kept) == (decisions["conflict"], tuple(sorted(doomed)), kept)

    def _pruned(self, origin: str, prune: Prune, take_over: bool) -> tuple[set[str], int]:
        """What goes, and how many stay because they are not, or not only, this origin's."""
        if not prune:
            return set(), 0
        missing = self.noted[origin] - self.texts[origin].keys()
        outside = self.live.keys() - self.texts[origin].keys()
        if prune == "scoped":
            considered = outside & missing
            doomed = {name for name in considered if self.owners[name] == origin}
        else:
            considered = outside
            doomed = {name for name in considered if take_over or self.owners[name] in (NO_TOKEN, origin)}
        other = "two" if origin == "one" else "one"
        shared = set() if take_over else doomed & self.noted[other]
        self.noted[origin] -= missing - shared
        return doomed - shared, len(considered) - len(doomed - shared)

    def _ingested(self, origin: str, name: str, text: str, take_over: bool) -> str:
        if self.live.get(name) == text:
            self.noted[origin].add(name)
            return "duplicate"
        if self.owners.get(name, NO_TOKEN) not in (NO_TOKEN, origin) and not take_over:
            return "conflict"
        self.noted[origin].add(name)
        self.live[name], self.owners[name] = text, origin
        known = (name, text) in self.sealed
        self.sealed.add((name, text))
        return "duplicate" if known else "new"

    @invariant()
    def the_documents_and_their_owners_are_those_of_the_model(self) -> None:
        if not hasattr(self, "fence"):
            return
        documents = self.fence.documents
        assert {head.doc_id for head in documents.heads()} == self.live.keys()
        for name, text in self.live.items():
            assert [snippet.text for snippet in documents.snippets(name)] == [text]
            head = documents.internals.reads.head(name)
            assert head is not None
            assert head.record is not None
            expected = origin_digest(self.owners[name]) if self.owners[name] else b""
            assert stored_in(head.record).owner == expected


TestTwoOrigins = TwoOrigins.TestCase
TestTwoOrigins.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
