"""Ingest, edit, revert, retract, describe, order, crash at a point, take over, flush, fail over, compact, purge and
verify, in any order, against a dict.

After every quiet step each live document is answered as a duplicate, with the ids it first got for that content and
recipe; retracted ones are none; the corpus digest is equal if, and only if, the model is; snippets are text[start:end].
`RAGFENCE_EXAMPLES` scales the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ragfence import Document, Receipt
from ragfence.documents.findings import IN_THE_FENCE_STORE, Trouble
from ragfence.engine.crash_points import HYDRATION_POINTS
from ragfence.engine.hydration import LOCK_MS
from ragfence.errors import Conflict, InFlight, Stale
from ragfence.testing.contracts.fence_calls import DAY_MS
from tests.documents.attack.corpus import Paragraphs
from tests.documents.attack.model import (
    CONFLICT,
    DONE,
    IN_FLIGHT,
    NOTHING,
    STALE,
    Content,
    State,
    Wanted,
    after,
    after_any_of,
    apply,
    interleaved,
    perhaps_twice,
)
from tests.documents.attack.places import Crash, Place, Writer, in_folder, in_memory
from tests.documents.attack.strikes import STRIKES
from tests.machine.lineages import RedisLineages, SqliteLineages

IN_MEMORY = max(int(os.environ.get("RAGFENCE_EXAMPLES", "2000")) // 50, 1)
ON_REAL_STORES = max(IN_MEMORY // 10, 1)

DOCS = ("a", "b", "ç")
DOC_IDS = st.sampled_from(DOCS)
PARAGRAPHS = st.lists(st.sampled_from(["one", "two, é", "three 🦊", "four"]), max_size=4)
# Texts that differ in blank lines alone have the same snippets in other places.
TEXTS = st.builds(lambda blank, paragraphs: blank.join(paragraphs), st.sampled_from(["\n\n", "\n\n\n\n"]), PARAGRAPHS)
CONTENTS = st.builds(Content, TEXTS, st.integers(0, 1), st.sampled_from(["1", "1", "1", "2"]))
SEQUENCES = st.none() | st.none() | st.integers(1, 4)
INGESTS = st.builds(Wanted, DOC_IDS, CONTENTS, SEQUENCES)
BATCHES = st.lists(INGESTS, min_size=1, max_size=4)
RETRACTS = st.builds(Wanted, DOC_IDS, st.none(), SEQUENCES)
POINTS = st.sampled_from([*STRIKES, *HYDRATION_POINTS])

Calls = list[tuple[Wanted, str]]


class DocumentsMachine(RuleBasedStateMachine):
    def __init__(self, make_place: Callable[[], Place]) -> None:
        super().__init__()
        self.place = make_place()
        self.open_writers()
        self.possible: dict[str, set[State]] = {doc_id: {NOTHING} for doc_id in DOCS}
        self.unsettled: set[str] = set()
        """of which somebody died who may have committed: what is seen of them may change"""
        self.first: dict[tuple[str, str, str], tuple[str, ...]] = {}
        self.answered: set[tuple[str, str, str]] = set()
        """keys that somebody has a receipt of"""
        self.tried: set[tuple[str, str, str]] = set()
        self.history: list[Wanted] = []
        self.last: dict[str, Wanted] = {}
        self.texts: dict[str, str] = {}
        """by their content hash"""
        self.digests: dict[tuple[State, ...], str] = {}
        self.snapshot: Any = None

    def open_writers(self) -> None:
        self.one, self.other = self.place.writer(), self.place.writer()

    @rule(wanted=INGESTS)
    def ingest(self, wanted: Wanted) -> None:
        self.quietly([wanted])

    @rule(batch=BATCHES)
    def ingest_many(self, batch: list[Wanted]) -> None:
        self.quietly(_of_one_recipe(batch))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), views=st.integers(0, 1))
    def revert(self, data: st.DataObject, views: int) -> None:
        wanted = data.draw(st.sampled_from(self.history))
        assert wanted.content is not None
        self.quietly([Wanted(wanted.doc_id, wanted.content._replace(views=views))])

    @rule(doc_id=DOC_IDS, views=st.integers(0, 3))
    def describe(self, doc_id: str, views: int) -> None:
        for state in sorted(self.possible[doc_id], key=repr)[:1]:
            if state.content is not None:
                self.quietly([Wanted(doc_id, state.content._replace(views=views))])

    @rule(wanted=RETRACTS)
    def retract(self, wanted: Wanted) -> None:
        self.quietly([wanted])

    @rule(batch=BATCHES | RETRACTS.map(lambda wanted: [wanted]), point=POINTS, flushed=st.booleans())
    def crash(self, batch: list[Wanted], point: str, flushed: bool) -> None:
        """A process dies at the point. Its leases stay, until time passes."""
        wanted = _of_one_recipe(batch)
        if flushed:
            self.forget()
        victim = self.place.writer()
        try:
            with victim.at(point, victim.die):
                outcomes = self.send(victim, wanted)
        except Crash:
            self.remember(wanted)
            for doc_id in {each.doc_id for each in wanted}:
                mine = [each for each in wanted if each.doc_id == doc_id]
                self.possible[doc_id] = after_any_of(self.possible[doc_id], mine)
                self.unsettled.add(doc_id)
            self.place.lineages.clock.advance(LOCK_MS + 1)  # whoever hydrates next would wait for the dead one's lock
        else:  # it never came by the point
            self.told(wanted, outcomes)

    @rule(
        batch=BATCHES | RETRACTS.map(lambda wanted: [wanted]),
        taker=INGESTS | RETRACTS,
        point=POINTS,
        runs_out=st.booleans(),
        first=st.sampled_from(["", "", "flush", "compact"]),
    )
    def overtaken(self, batch: list[Wanted], taker: Wanted, point: str, runs_out: bool, first: str) -> None:
        """One writer stands still at the point while another one does its work, perhaps in another epoch."""
        wanted = _of_one_recipe(batch)
        meanwhile: list[str] = []

        def act() -> None:
            if runs_out or point in HYDRATION_POINTS:
                self.place.let_leases_run_out()
            if first == "flush":
                self.place.forget()
            elif first == "compact":
                self.other.documents.compact()
            meanwhile.extend(self.send(self.other, [taker], checked=False))

        with self.one.at(point, act):
            outcomes = self.send(self.one, wanted, checked=False)
        self.remember([*wanted, taker])
        flushed = first == "flush" and bool(meanwhile)
        if flushed:  # what was committed counts now, and what was not is void
            self.unsettled.clear()
        taken = list(zip([taker], meanwhile, strict=False))
        for doc_id in {each.doc_id for each in (*wanted, taker)}:
            mine: Calls = [call for call in zip(wanted, outcomes, strict=True) if call[0].doc_id == doc_id]
            theirs: Calls = [call for call in taken if call[0].doc_id == doc_id]
            orders = [order for calls in perhaps_twice(mine) for order in interleaved(calls, theirs)]
            ends = set().union(*[after(self.possible[doc_id], order) for order in orders])
            self.ended(doc_id, mine + theirs, ends)
        self.look(DOCS if flushed else {each.doc_id for each in (*wanted, taker)})

    @rule()
    def time_passes(self) -> None:
        self.place.let_leases_run_out()

    @rule()
    def flush(self) -> None:
        self.forget()
        self.look(DOCS)

    @rule(aged=st.booleans())
    def compact(self, aged: bool) -> None:
        """What was superseded a month ago goes, and is new again when it comes back."""
        if aged:
            self.place.lineages.clock.advance(31 * DAY_MS)
        done = self.one.documents.compact()
        if done.epoch:
            self.unsettled.clear()
        self.look(DOCS)
        if aged:
            self.answered = {key for key in self.answered if self.is_live(key)}

    @rule(repair=st.booleans())
    def verify(self, repair: bool) -> None:
        """What crashes left behind is no trouble: it is void, or whoever comes next settles it."""
        report = self.one.documents.verify(repair=repair)
        harmless = {Trouble.VOID, Trouble.UNSETTLED} if self.unsettled else {Trouble.VOID}
        assert {finding.trouble for finding in (*report.findings, *report.repaired)} <= harmless
        if repair:
            assert not [finding for finding in report.findings if finding.trouble is Trouble.VOID]
            if any(finding.trouble in IN_THE_FENCE_STORE for finding in report.repaired):
                self.unsettled.clear()
        self.look(DOCS)

    @rule(doc_id=DOC_IDS)
    def purge(self, doc_id: str) -> None:
        try:
            purged = self.other.documents.purge(doc_id)
        except InFlight:
            assert doc_id in self.unsettled
            return
        if purged.epoch:
            self.unsettled.clear()
        self.unsettled.discard(doc_id)
        known = {State(None, state.top, purged=True) for state in self.possible[doc_id] if state != NOTHING}
        self.possible[doc_id] = known or {NOTHING}
        assert purged.known or not known or NOTHING in self.possible[doc_id]
        for keys in (self.answered, self.tried):
            keys -= {key for key in keys if key[0] == doc_id}
        self.look(DOCS)

    @rule()
    def replicate(self) -> None:
        self.snapshot = self.place.lineages.snapshot()

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def fail_over(self) -> None:
        """To a replica that lags behind: what was acknowledged since is only in the log."""
        self.place.lineages.fail_over(self.snapshot)
        self.snapshot = None
        self.open_writers()
        self.unsettled.clear()
        self.look(DOCS)

    @invariant()
    def the_corpus_has_one_digest_per_model(self) -> None:
        if self.unsettled:
            return
        model = tuple(State(self.state_of(doc_id).content, None) for doc_id in DOCS)
        digest = self.one.documents.corpus_digest()
        assert self.digests.setdefault(model, digest) == digest
        assert len(set(self.digests.values())) == len(self.digests)

    @invariant()
    def every_live_document_is_a_duplicate_with_its_first_ids(self) -> None:
        for doc_id in DOCS:
            if doc_id in self.unsettled:
                continue
            content = self.state_of(doc_id).content
            if content is None:
                continue
            wanted = Wanted(doc_id, content)
            (receipt,) = self.using(self.other, content.recipe).ingest_many([_document(wanted)])
            assert (receipt.decision, receipt.flags.revived, receipt.flags.metadata_updated) == (
                "duplicate",
                False,
                False,
            )
            # Of what was committed by somebody who died nobody has an answer yet.
            first = self.first.setdefault((doc_id, content.text, content.recipe), receipt.snippet_ids)
            assert receipt.snippet_ids == first

    def teardown(self) -> None:
        try:
            self.place.let_leases_run_out()
            self.rerun()
            for _ in range(2):
                self.look(DOCS)
                self.the_corpus_has_one_digest_per_model()
                self.every_live_document_is_a_duplicate_with_its_first_ids()
                self.forget()
        finally:
            self.place.close()

    def rerun(self) -> None:
        """Whoever was killed is run again: the last that each document was asked to be, it is."""
        for doc_id in sorted(self.unsettled):
            last = self.last[doc_id]._replace(sequence=None)
            self.quietly([last])
            assert self.state_of(doc_id).content == last.content

    def quietly(self, wanted: Sequence[Wanted]) -> None:
        self.told(wanted, self.send(self.one, wanted))

    def told(self, wanted: Sequence[Wanted], outcomes: Sequence[str]) -> None:
        self.remember(wanted)
        for call in zip(wanted, outcomes, strict=True):
            doc_id = call[0].doc_id
            self.ended(doc_id, [call], after(self.possible[doc_id], [call]))
        self.look({each.doc_id for each in wanted})

    def ended(self, doc_id: str, calls: Calls, ends: set[State]) -> None:
        assert ends, f"no order explains {calls}, after {self.possible[doc_id]}"
        if any(outcome == DONE for _, outcome in calls):
            # Whoever moved the head has written a row above all others of the document.
            self.unsettled.discard(doc_id)
        # Who was refused was told of the head as it stood then: what a dead one has committed may still come.
        self.possible[doc_id] = ends | self.possible[doc_id] if doc_id in self.unsettled else ends

    def remember(self, wanted: Sequence[Wanted]) -> None:
        self.last |= {each.doc_id: each for each in wanted}
        self.history += [each for each in wanted if each.content is not None]
        self.tried |= {each.key for each in wanted if each.key}

    def send(self, writer: Writer, wanted: Sequence[Wanted], *, checked: bool = True) -> list[str]:
        """`checked`: nobody else is at work, so each answer must be the one that the model gives."""
        content = wanted[0].content
        if content is None:
            (retracted,) = wanted
            return [_retracted(writer, retracted)]
        self.texts |= {_content_hash(each.content.text): each.content.text for each in wanted if each.content}
        documents, known = self.using(writer, content.recipe), set(self.answered)
        receipts = documents.ingest_many([_document(each) for each in wanted])
        tried = set(self.tried)
        states = {doc_id: self.certain(doc_id) for doc_id in DOCS}
        for each, receipt in zip(wanted, receipts, strict=True):
            assert each.key is not None
            if receipt.failure is None:
                self.check_receipt(each, receipt, states[each.doc_id] if checked else None)
                if each.key in known:
                    assert receipt.decision == "duplicate"
                elif checked and each.key not in tried:
                    assert receipt.decision == "new"
            tried.add(each.key)
            state = states[each.doc_id]
            states[each.doc_id] = apply(state, each).state if state else None
        return [_outcome(receipt) for receipt in receipts]

    def check_receipt(self, wanted: Wanted, receipt: Receipt, before: State | None) -> None:
        key, content = wanted.key, wanted.content
        assert key is not None
        assert content is not None
        ids = self.first.setdefault(key, receipt.snippet_ids)
        assert receipt.snippet_ids == ids
        assert len(ids) == len([part for part in content.text.split("\n\n") if part])
        if before is not None and receipt.decision == "duplicate":
            live = before.content
            stands = live is not None and (live.text, live.recipe) == (content.text, content.recipe)
            assert receipt.flags.revived == (not stands)
            assert receipt.flags.metadata_updated == (stands and live is not None and live.views != content.views)
        self.answered.add(key)

    def certain(self, doc_id: str) -> State | None:
        states = self.possible[doc_id]
        return next(iter(states)) if len(states) == 1 and doc_id not in self.unsettled else None

    def state_of(self, doc_id: str) -> State:
        (state, *_) = self.possible[doc_id]
        assert len({each[:2] for each in self.possible[doc_id]}) == 1
        return state

    def is_live(self, key: tuple[str, str, str]) -> bool:
        doc_id, text, recipe = key
        return all(
            state.content is not None and (state.content.text, state.content.recipe) == (text, recipe)
            for state in self.possible[doc_id]
        )

    def forget(self) -> None:
        self.place.forget()
        self.unsettled.clear()  # what was committed counts from now on, and what was not never will
        self.look(DOCS)

    def look(self, doc_ids: Collection[str]) -> None:
        """What is read is one of the states that can be; and the only one from now on, unless it is unsettled."""
        for doc_id in sorted(doc_ids):
            seen = self.seen(doc_id)
            fitting = {state for state in self.possible[doc_id] if state[:2] == seen[:2]}
            assert fitting, f"{doc_id} is {seen}, and can only be {self.possible[doc_id]}"
            if doc_id not in self.unsettled:
                self.possible[doc_id] = fitting

    def seen(self, doc_id: str) -> State:
        documents = self.one.documents
        head = documents._reads.head(doc_id)
        described = documents.get(doc_id)
        if described is None:
            assert documents.snippets(doc_id) == []
            return State(None, head.sequence if head else None)
        assert head is not None
        assert described.sequence == head.sequence
        snippets = documents.snippets(doc_id)
        assert [each.snippet_id for each in snippets] == list(described.snippet_ids)
        text = self.texts[described.content_hash]
        assert [each.text for each in snippets] == [text[each.start : each.end] for each in snippets]
        assert "".join(each.text for each in snippets) == text.replace("\n", "")
        recipe = "2" if '"version":"2"' in described.recipe else "1"
        return State(Content(text, described.metadata["views"], recipe), described.sequence)

    def using(self, writer: Writer, recipe: str) -> Any:
        # A document without a paragraph has no snippets, and is moved like any other.
        return writer.documents.using(chunker=Paragraphs(self.place.trace, version=recipe), allow_empty_text=True)


def _document(wanted: Wanted) -> Document:
    assert wanted.content is not None
    return Document(wanted.doc_id, wanted.content.text, {"views": wanted.content.views}, sequence=wanted.sequence)


def _content_hash(text: str) -> str:
    return f"xxh3:{xxhash.xxh3_128_hexdigest(text.encode())}"


def _outcome(receipt: Receipt) -> str:
    if receipt.failure is None:
        return DONE
    assert receipt.decision in (STALE, CONFLICT, IN_FLIGHT), receipt.failure
    return receipt.decision.value


def _retracted(writer: Writer, wanted: Wanted) -> str:
    try:
        writer.documents.retract(wanted.doc_id, sequence=wanted.sequence)
    except Stale:
        return STALE
    except Conflict:
        return CONFLICT
    except InFlight:
        return IN_FLIGHT
    return DONE


def _of_one_recipe(batch: Sequence[Wanted]) -> list[Wanted]:
    """A batch is cut by one chunker."""
    first = batch[0].content
    if first is None:
        return list(batch)
    return [each._replace(content=each.content._replace(recipe=first.recipe)) for each in batch if each.content]


def _explore(make_place: Callable[[], Place], examples: int) -> None:
    run_state_machine_as_test(
        lambda: DocumentsMachine(make_place),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],  # to shrink a story takes minutes, and twenty steps can be read
            database=None,
        ),
    )


def test_on_memory() -> None:
    _explore(in_memory, IN_MEMORY)


def test_on_sqlite(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def fresh() -> Place:
        folder = tmp_path_factory.mktemp("machine")
        return in_folder(SqliteLineages(folder), folder)

    _explore(fresh, ON_REAL_STORES)


def test_on_valkey(valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    _explore(lambda: in_folder(RedisLineages(valkey_server.url), tmp_path_factory.mktemp("machine")), ON_REAL_STORES)
