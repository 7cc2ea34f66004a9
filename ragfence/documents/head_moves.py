"""Head moves of documents: the rows each one writes into the log, and the receipt of its caller."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ragfence.core.decision_rows import row_for_answer
from ragfence.core.decisions import Claim, ConflictVerdict, Granted, InFlightVerdict, Replay, StaleVerdict
from ragfence.core.layout import METADATA_UPDATED, REVIVED, TOKEN_BYTES, RowKind, ending_in, ids_in, ids_in_record
from ragfence.core.receipts import Decision, Flags, Receipt, default_effect_id, default_effect_id_of, refused_receipt
from ragfence.core.records import Head, KeyRecord
from ragfence.documents.chunking.chunker import pieces_of
from ragfence.documents.claims import OtherHash, PreparedDocument, require_version
from ragfence.documents.identity import SNIPPET_BYTES, snippet_ids, snippet_texts
from ragfence.documents.log import (
    INGEST,
    METADATA,
    NO_POSITIONS,
    RETRACT,
    REVIVE,
    Detail,
    Layout,
    Positions,
    StoredResult,
    address_in,
    result_of,
    stored_in,
)
from ragfence.documents.origins import ContentUnchanged, next_owner
from ragfence.documents.parquet import encode_snippets
from ragfence.engine import crash_points
from ragfence.engine.batch_commit import (
    Answer,
    BatchCommitter,
    CommitHooks,
    Failed,
    FinishedEffect,
    Move,
    MovedHead,
    NoCommitHooks,
    batch_tokens,
)
from ragfence.engine.segment_log import LogRow
from ragfence.errors import CommitUncertain, EffectFailed, OriginConflict, Quarantined
from ragfence.errors import Conflict as ConflictError
from ragfence.errors import InFlight as InFlightError
from ragfence.errors import Stale as StaleError
from ragfence.stores.fences import FenceStore, Lookup
from ragfence.stores.objects import ObjectStore

AFTER_SNIPPETS = "after_snippets"
DOCUMENT_POINTS = (
    crash_points.AFTER_CLAIM,
    AFTER_SNIPPETS,
    crash_points.AFTER_COMMIT,
    crash_points.BEFORE_SEAL,
    crash_points.AFTER_SEAL,
)

_DUPLICATE = Flags()


def ingest_effect(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
    """Chunks the document, unless its key was sealed before: then only its head moves."""
    doc, _, cut, claim, source, *_ = subject
    head, prior = grant.head, grant.prior
    replaced = stored_in(head.record) if head and head.live and head.record else None
    owner = next_owner(doc.doc_id, _as_compared(subject, head), source, grant, replaced)
    if prior is not None:
        _, origin, ids, _ = stored_in(prior)
        stands = head is not None and head.live and head.digest == claim.digest
        action = METADATA if stands else REVIVE
        detail = _detail(subject, grant, action, ids, replaced, owner, origin=origin.text)
        return FinishedEffect(result_of(ids, origin, owner=owner), detail)
    pieces = pieces_of(cut.chunker, doc.text, doc.doc_id)
    texts = [doc.text[start:end] for start, end, _ in pieces]
    made = snippet_ids(doc.doc_id, cut.recipe.digest, texts, cut.content_key)
    ids = b"".join(made)
    fresh = list(zip(made, texts, strict=True))
    if replaced:
        known = frozenset(_each(replaced.ids))
        fresh = [each for each in fresh if each[0] not in known]
    positions = Positions(*zip(*pieces, strict=True)) if pieces else NO_POSITIONS
    detail = _detail(subject, grant, INGEST, ids, replaced, owner, positions=positions, fresh=fresh)
    return FinishedEffect(result_of(ids, owner=owner), detail)


def _as_compared(subject: PreparedDocument, head: Head | None) -> Claim:
    """The claim by the content hash of the live head, if their contents are equal: then only the chunker changed."""
    claim = subject.claim
    if subject.under_other_hash is None or head is None or head.record is None:
        return claim
    other = subject.under_other_hash(subject).claim
    return claim._replace(fingerprint=other.fingerprint) if head.record.fingerprint == other.fingerprint else claim


def _detail(
    subject: PreparedDocument,
    grant: Granted,
    action: str,
    ids: bytes,
    replaced: StoredResult | None,
    owner: bytes,
    *,
    positions: Positions = NO_POSITIONS,
    origin: str = "",
    fresh: Sequence[tuple[bytes, str]] = (),
) -> Detail:
    (doc_id, _, text, metadata, source_url, _, content_type), content, cut, claim, *_ = subject
    return Detail(
        doc_id,
        action,
        content.hash,
        len(text),  # not `content.size`, which counts what else is hashed
        metadata.decode(),
        source_url,
        content_type,
        cut.recipe.text,
        grant.record.when_ms - claim.lease_ms,
        ids,
        positions,
        _without(replaced.ids, ids) if replaced else b"",
        origin,
        replaced.row.text if replaced else _retracted_at(grant),
        fresh,
        owner.hex(),
    )


def _retracted_at(grant: Granted) -> str:
    """The segment of the retraction that this move follows and that leads to earlier revisions, or empty."""
    head = grant.head
    return stored_in(head.record).row.text if head and head.record and not head.live else ""


def retract_effect(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
    head = grant.head
    replaced = stored_in(head.record) if head and head.live and head.record else None
    return FinishedEffect(
        b"",
        Detail(
            doc_id=subject.doc.doc_id,
            action=RETRACT,
            content_hash="",
            size=0,
            metadata="{}",
            source_url="",
            content_type="",
            recipe="",
            at_ms=grant.record.when_ms - subject.claim.lease_ms,
            ids=b"",
            dead=replaced.ids if replaced else b"",
            before=replaced.row.text if replaced else "",
        ),
    )


def effect_of(subject: PreparedDocument) -> Callable[[PreparedDocument, Granted], FinishedEffect]:
    effect = require_version(retract_effect if subject.claim.retract else ingest_effect, subject.expected)
    return effect if subject.under_other_hash is None else _suited(effect)


def _suited(effect: Callable[[PreparedDocument, Granted], FinishedEffect]) -> Callable[..., FinishedEffect]:
    """Returns the effect with a check that it is claimed by the content hash that the document is known by.

    Another process may have ingested the document since that was looked up, or while this one waited for it.
    """

    def checked_first(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
        suited = subject.suited_to(grant.head)
        if suited.claim.digest != subject.claim.digest:
            raise OtherHash(suited)
        return effect(subject, grant)

    return checked_first


class SnippetHook:
    """Makes the snippets of a batch durable before its rows name them, then calls the sink, if there is one.

    `settle` runs before both, with the epoch: it makes the settings durable that a tenant's documents fix for all.
    """

    def __init__(
        self, layout: Layout, objects: ObjectStore, settle: Callable[[int], None], then: CommitHooks | None = None
    ) -> None:
        self._layout = layout
        self._objects = objects
        self._settle = settle
        self._then = then or NoCommitHooks()

    def before_commit(self, name: str, rows: Sequence[LogRow]) -> None:
        self._settle(address_in(name).epoch)
        data = encode_snippets(rows)
        if data is not None:
            place = self._layout.snippets_at(address_in(name))
            if not self._objects.put_new(place, data).won:
                raise CommitUncertain(f"the snippets {place} were written by another process", hint="try again")
        crash_points.reach(AFTER_SNIPPETS)
        self._then.before_commit(name, rows)

    def after_seal(self, rows: Sequence[LogRow], sealed: Sequence[bool]) -> None:
        self._then.after_seal(rows, sealed)


class HeadMover:
    """Moves batches of prepared documents."""

    def __init__(
        self,
        writer: BatchCommitter,
        fences: FenceStore,
        *,
        wait_ms: int,
        begin_hash: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin_hash` is called before the first document by a content hash that is new to the tenant."""
        self._writer = writer
        self._begin_hash = begin_hash
        self._fences = fences
        self._wait_s = wait_ms / 1000

    def answers(
        self, waves: Sequence[Mapping[int, PreparedDocument]], *, wait_s: float | None = None
    ) -> Iterator[tuple[int, PreparedDocument, Answer, float]]:
        """Yields position, document, answer, and the seconds waited."""
        wait_s = self._wait_s if wait_s is None else wait_s
        for number, wave in enumerate(waves):
            if any(each.under_other_hash is not None and not each.is_second for each in wave.values()):
                self._begin_hash()
            moves = [Move(each.claim, effect_of(each), each) for each in wave.values()]
            if number:  # another batch needs another name for its segment
                tokens = batch_tokens()
                moves = [move._replace(claim=move.claim._replace(token=next(tokens))) for move in moves]
            started = time.monotonic()
            try:
                answers = self._writer.move(moves, wait_s=wait_s)
                wave, answers = self._move_suited(dict(wave), answers, wait_s)
            except StopIteration as stopped:  # in a generator it would look like its own end
                raise EffectFailed(
                    "a sink or an embedder raised StopIteration while documents were moved",
                    hint="let it raise another error; nothing was acknowledged, so the documents can be sent again",
                ) from stopped
            waited_s = time.monotonic() - started
            self._settle_declined(moves, answers)
            for (at, each), answer in zip(wave.items(), answers, strict=True):
                yield at, each, as_replay(answer), waited_s

    def _move_suited(
        self, wave: dict[int, PreparedDocument], answers: Sequence[Answer], wait_s: float
    ) -> tuple[dict[int, PreparedDocument], list[Answer]]:
        """Moves those again that turned out to be known by the other content hash, until none is left.

        A document is moved again only if another process has moved it in between.
        """
        answered = dict(zip(wave, answers, strict=True))
        while again := self._under_other_hash(wave, answered):
            tokens = batch_tokens()
            wave |= again
            moves = [Move(each.claim._replace(token=next(tokens)), effect_of(each), each) for each in again.values()]
            answered |= zip(again, self._writer.move(moves, wait_s=wait_s), strict=True)
        return wave, list(answered.values())

    def _under_other_hash(
        self, wave: Mapping[int, PreparedDocument], answered: Mapping[int, Answer]
    ) -> dict[int, PreparedDocument]:
        again, conflicts = {}, {}
        for at, answer in answered.items():
            if isinstance(answer, Failed) and isinstance(answer.error, OtherHash):
                again[at] = answer.error.subject
            elif isinstance(answer, ConflictVerdict) and wave[at].under_other_hash is not None:
                conflicts[at] = wave[at]
        if conflicts:  # with a head at this sequence: it may have the same content by the other hash
            claims = [each.claim for each in conflicts.values()]
            held = self._fences.read([Lookup(claim.key, claim.mode, claim.source) for claim in claims])
            for (at, each), found in zip(conflicts.items(), held, strict=True):
                suited = each.suited_to(found.source.head if found.source else None)
                if suited.claim.digest != each.claim.digest:
                    again[at] = suited
        return again

    def _settle_declined(self, moves: Sequence[Move], answers: Sequence[Answer]) -> None:
        """Writes the rows of moves that were granted and then declined, because another origin owns the document."""
        declined = [
            (move, answer.error)
            for move, answer in zip(moves, answers, strict=True)
            if isinstance(answer, Failed) and isinstance(answer.error, _DECLINED)
        ]
        if not declined:
            return
        now_ms = self._fences.now_ms()
        rows = []
        for move, error in declined:
            claim = move.claim._replace(token=os.urandom(TOKEN_BYTES))
            if isinstance(error, ContentUnchanged):
                rows.append(row_for_answer(claim, RowKind.DUPLICATE, error.record, now_ms))
            else:
                rows.append(row_for_answer(claim, RowKind.CONFLICT, None, now_ms, error=error.code))
        self._fences.record(rows)


_DECLINED = (OriginConflict, ContentUnchanged)


def as_replay(answer: Answer) -> Answer:
    """Answers unchanged content as any duplicate."""
    if isinstance(answer, Failed) and isinstance(answer.error, ContentUnchanged):
        return Replay(answer.error.record)
    return answer


def receipt_of(subject: PreparedDocument, answer: Answer, waited_s: float = 0.0) -> Receipt:
    key = subject.claim.key
    if isinstance(answer, Replay):
        return _answered(key, answer.record, Decision.DUPLICATE, _DUPLICATE)
    if isinstance(answer, MovedHead):
        decision = Decision.DUPLICATE if answer.again else Decision.NEW
        return _answered(key, answer.record, decision, _flags(answer.record.attempt, answer.takeover, answer.flags))
    error = error_of(subject, answer, waited_s)
    decision = _DECISIONS.get(type(answer), Decision.REFUSED)
    return refused_receipt(error, key.hex(), Decision.CONFLICT if isinstance(error, OriginConflict) else decision)


@lru_cache(maxsize=256)
def _flags(attempt: int, takeover: bool, how: int) -> Flags:
    """Shared, since most documents have the same flags and they are immutable."""
    return Flags(
        attempt=attempt,
        takeover=takeover,
        revived=bool(how & REVIVED),
        metadata_updated=bool(how & METADATA_UPDATED),
    )


_DECISIONS: dict[type[Any], Decision] = {
    ConflictVerdict: Decision.CONFLICT,
    StaleVerdict: Decision.STALE,
    InFlightVerdict: Decision.IN_FLIGHT,
}


def _answered(key: bytes, record: KeyRecord | None, decision: Decision, flags: Flags) -> Receipt:
    if record is None:  # there was nothing to retract
        return Receipt(key.hex(), default_effect_id(key), decision=decision, flags=flags)
    _, _, _, (epoch, counter), _, first_seen_ms, sealed_at_ms, _, _, _, _, _, stored = record
    return Receipt(
        key.hex(),
        default_effect_id(key),
        snippet_texts(ids_in(stored)),
        None,
        None,
        decision,
        flags,
        f"{epoch}.{counter}",
        first_seen_ms,
        sealed_at_ms,
    )


_ANSWERED = Decision.DUPLICATE


def replay_receipt(key: bytes, record: bytes) -> Receipt:
    """The receipt of a document that is live as it was sent, read from its record's bytes: the usual case."""
    epoch, counter, first_seen_ms, sealed_at_ms = ending_in(record)
    hex_key = key.hex()
    return Receipt(
        hex_key,
        default_effect_id_of(hex_key),
        snippet_texts(ids_in_record(record)),
        None,
        None,
        _ANSWERED,
        _DUPLICATE,
        f"{epoch}.{counter}",
        first_seen_ms,
        sealed_at_ms,
    )


def error_of(subject: PreparedDocument, answer: Answer, waited_s: float = 0.0) -> Exception:
    """The error for a document that was not ingested."""
    doc_id, key = subject.doc.doc_id, subject.claim.key.hex()
    match answer:
        case ConflictVerdict(record):
            why = "is known with another length" if record else f"has other content at sequence {subject.doc.sequence}"
            return ConflictError(
                f"document {doc_id!r} {why}", hint="give the changed document a higher sequence", key=key
            )
        case StaleVerdict(newest):
            return StaleError(
                f"document {doc_id!r}: sequence {subject.doc.sequence} is older than {newest}, which is live", key=key
            )
        case InFlightVerdict(_, record, True):
            return Quarantined(
                f"document {doc_id!r} failed {record.attempt} times, last with {record.error or 'an unknown error'}",
                hint=f"fix the cause, then run: ragfence release {key}",
                key=key,
            )
        case InFlightVerdict(_, record):
            who = record.owner or "another process"
            return InFlightError(
                f"document {doc_id!r} is being ingested by {who}; waited {int(waited_s * 1000)} ms", key=key
            )
        case Failed(error):
            return error
    raise AssertionError(answer)


def _each(ids: bytes) -> list[bytes]:
    return [ids[at : at + SNIPPET_BYTES] for at in range(0, len(ids), SNIPPET_BYTES)]


def _without(ids: bytes, kept: bytes) -> bytes:
    stay = frozenset(_each(kept))
    return b"".join(each for each in _each(ids) if each not in stay)
