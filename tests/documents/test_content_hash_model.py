"""Two processes, one of them a stage behind, change the content hash of a tenant: against plain dicts."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ragfence
from ragfence import Document, Policy
from ragfence.documents.documents import Documents
from ragfence.testing import MemoryFences, MemoryObjects
from tests.documents.chunkers import Paragraphs

OLD, NEW = "xxh3", "sha256"
STAGES: list[dict[str, Any]] = [
    {"content_hash": OLD},
    {"content_hash": OLD, "content_hash_also": NEW},
    {"content_hash": NEW, "content_hash_also": OLD},
    {"content_hash": NEW},
]
WHO = st.sampled_from([0, 1])
NAMES = st.sampled_from("abc")
TEXTS = st.sampled_from(["red", "green\n\nyellow", "blue"])


class TwoStages(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.objects, self.store = MemoryObjects(), MemoryFences()
        self.chunker = Paragraphs()
        self.stages = [0, 0]
        self.opened: list[ragfence.Fence] = []
        self.processes = [self._process(0), self._process(0)]
        self.live: dict[str, str] = {}
        self.made: dict[tuple[str, str], tuple[str, ...]] = {}
        """the snippet_ids of the first time"""
        self.under: dict[str, str] = {}
        """the hash that a live document is known by"""
        self.revisions: set[tuple[str, str, str]] = set()
        """(name, text, hash) that was live once"""

    def teardown(self) -> None:
        for fence in getattr(self, "opened", []):
            fence.close()

    def _process(self, stage: int) -> Documents:
        fence = ragfence.open(self.store, objects=self.objects, policy=Policy(**STAGES[stage]))
        self.opened.append(fence)
        return fence.documents.using(chunker=self.chunker)

    @rule(who=WHO)
    def move_on(self, who: int) -> None:
        """To the next stage, while the other process is at most one behind."""
        stage = self.stages[who] + 1
        if stage > 3 or stage - min(stage, self.stages[1 - who]) > 1:
            return
        if stage == 3 and not self._finish(who):
            return
        self.stages[who] = stage
        self.processes[who] = self._process(stage)

    def _finish(self, who: int) -> bool:
        if self.stages[1 - who] < 2:  # it would be refused from now on
            return False
        counted = self.processes[who].finish_content_hash()
        assert counted == {name: n for name in (NEW, OLD) if (n := list(self.under.values()).count(name))}
        return OLD not in counted

    @rule(who=WHO, name=NAMES, text=TEXTS, many=st.booleans(), number=st.integers(0, 1))
    def ingest(self, who: int, name: str, text: str, many: bool, number: int) -> None:
        document = Document(name, text, {"number": number})
        stage, documents = self.stages[who], self.processes[who]
        before = len(self.chunker.cut)
        foreseen = documents.ingest(document, dry_run=True)
        del self.chunker.cut[before:]
        receipt = documents.ingest_many([document])[0] if many else documents.ingest(document)
        if self.live.get(name) == text:
            expected, cut = "duplicate", 0
        else:
            under = STAGES[stage]["content_hash"]
            known = (name, text, under) in self.revisions
            expected, cut = ("duplicate", 0) if known else ("new", 1)
            self.live[name], self.under[name] = text, under
            self.revisions.add((name, text, under))
        assert (receipt.decision, foreseen.decision) == (expected, expected)
        assert len(self.chunker.cut) - before == cut
        assert receipt.snippet_ids == foreseen.snippet_ids == self.made.setdefault((name, text), receipt.snippet_ids)

    @rule(who=WHO, name=NAMES)
    def retract(self, who: int, name: str) -> None:
        receipt = self.processes[who].retract(name)
        assert receipt.is_new == (name in self.live)
        self.live.pop(name, None)
        self.under.pop(name, None)

    @rule(who=WHO)
    def send_everything_again(self, who: int) -> None:
        documents, before = self.processes[who], len(self.chunker.cut)
        given = [Document(*each) for each in sorted(self.live.items())]
        for receipt, document in zip(documents.ingest_many(given), given, strict=True):
            assert receipt.decision == "duplicate"
            assert receipt.snippet_ids == self.made[document.doc_id, document.text]
        assert len(self.chunker.cut) == before

    @invariant()
    def the_documents_are_those_of_the_model(self) -> None:
        if not hasattr(self, "processes"):
            return
        heads = {head.doc_id: head.content_hash.partition(":")[0] for head in self.processes[0].heads()}
        assert heads == self.under


TestTwoStages = TwoStages.TestCase
TestTwoStages.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
