"""The guard of documents in the world of `DocumentWorld`: what is moved are documents that are cut and stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ragfence
from ragfence import Document
from ragfence.core.decisions import Mode
from ragfence.core.layout import ids_in
from ragfence.documents.chunking.chunker import Recipe
from ragfence.documents.documents import Documents
from ragfence.documents.head_moves import effect_of
from ragfence.documents.identity import Identity, operation_of, snippet_texts
from ragfence.documents.parquet import ParquetCodec, decode_snippets
from ragfence.engine.batch_commit import Move, MovedHead, batch_tokens
from ragfence.engine.epochs import Epochs
from ragfence.engine.segment_log import SegmentLoader
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import Lookup
from tests.documents.attack.corpus import Paragraphs
from tests.machine.documents import DocumentWorld, outcome
from tests.machine.history import Event
from tests.machine.world import FOREVER_S, LEASE_MS, TENANT, Worker

DOC_ID = "doc"
POLICY = ragfence.Policy.from_mapping({"lease": {"ttl_s": LEASE_MS / 1000, "max_attempts": 10_000}})


def text_of(value: str) -> str:
    """Each value has snippets that others have, and one of its own."""
    return "\n\n".join(["the same beginning", *(f"of {each}" for each in "ABCZ" if each <= value), f"only {value}"])


def key_of(value: str) -> bytes:
    content = Identity(TENANT, "xxh3").content(text_of(value).encode())
    return bytes(operation_of(TENANT, DOC_ID, content.hash, Recipe.of(Paragraphs()).digest.hex()).key)


class _NoWatch:
    def start(self) -> None: ...
    def stop(self) -> None: ...


KEYS = {value: key_of(value) for value in "ABCZ"}


class GuardWorld(DocumentWorld):
    spot = Lookup(KEYS["A"], Mode.DOCUMENT, Identity(TENANT, "xxh3").place(DOC_ID.encode()).source)
    names = {key[1:]: value for value, key in KEYS.items()}  # noqa: RUF012
    codec = ParquetCodec()

    def ingest(self, value: str | None, sequence: int | None) -> Worker:
        event = Event("write", value, sequence, self.now)
        self.events.append(event)

        def work(worker: Worker) -> None:
            documents = self.documents_of(worker)
            try:
                answer = self._answer(documents, value, sequence)
            except StoreUnavailable:
                event.outcome = "error"
                return
            event.ended, event.outcome = self.now, "duplicate" if isinstance(answer, bytes) else outcome(answer)

        return self.spawn(work)

    def _answer(self, documents: Documents, value: str | None, sequence: int | None) -> Any:
        """As `ingest_many` does it: live as it was sent, or else a move."""
        builder, caller, tokens = documents._claim_builder, documents._caller(), batch_tokens()
        if value is None:
            prepared = builder.retract(DOC_ID, sequence, next(tokens), caller)
        else:
            document = Document(DOC_ID, text_of(value), sequence=sequence)
            (known,) = documents._engine.fences.replays([builder.query(document, next(tokens), caller)[0]]).settled()
            if known is not None:
                return known
            prepared = builder.ingest(document, next(batch_tokens()), caller)
        move = Move(prepared.claim, effect_of(prepared), prepared)
        (answer,) = documents._writer.move([move], wait_s=FOREVER_S)
        if isinstance(answer, MovedHead) and value is not None:
            assert len(ids_in(answer.record.result)) // 16 == len(text_of(value).split("\n\n"))
        return answer

    def documents_of(self, worker: Worker) -> Documents:
        fences, objects = self.fences_of(worker), self.objects_of(worker)
        fence = ragfence.open(fences, objects=objects, policy=POLICY)
        engine = fence._engine
        assert engine.backing is not None
        # Whoever waits hands control back, instead of sleeping for real; who watches is the driver's matter.
        hydrator = self.hydrator_of(worker, self.codec)
        engine.backing = replace(engine.backing, hydrator=hydrator, watch=_NoWatch())  # type: ignore[arg-type]
        documents = fence.documents.using(chunker=Paragraphs())
        documents._writer._sleep = lambda _: self._breathe(worker)
        return documents

    def check(self) -> None:
        super().check()
        self._check_snippets()
        self._check_reading()

    def _check_snippets(self) -> None:
        """No row that counts names a snippet that is not stored, whoever died, and whatever landed late."""
        stored = {
            snippet.snippet_id
            for entry in self.objects.list(f"{TENANT}/snippets/")
            for snippet in decode_snippets(entry.name, self.objects.get(entry.name) or b"")
        }
        rows = SegmentLoader(self.objects, self.codec).rows(Epochs(TENANT, self.objects).truth())
        for row in rows:
            missing = set(snippet_texts(ids_in(row.result))) - stored
            assert not missing, f"the row {row.fence} names {missing}, which nobody has written"

    def _check_reading(self) -> None:
        """A reader, when all is quiet: what is live is whole, and what it was sent as."""
        with ragfence.open(self.lineages.primary.store, objects=self.objects, policy=POLICY) as fence:
            documents = fence.documents
            truth, _ = self.truth()
            seen = [snippet.text for snippet in documents.snippets(DOC_ID)]
            described = documents.get(DOC_ID)
            value = self.names.get(bytes.fromhex(described.key)[1:]) if described else None
            assert seen == (text_of(value).split("\n\n") if value else [])
            if self.live_head() is not None:
                assert value == truth, f"a reader sees {value}, and the truth is {truth}"
