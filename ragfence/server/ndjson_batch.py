"""`POST /v1/documents:batch`, without the framework: NDJSON in, one outcome per line out, in their order.

    {"line":1,"doc_id":"a","status":201,"decision":"new","receipt":{...}}
    {"line":2,"doc_id":"b","status":422,"decision":"refused","problem":{...}}
    {"done":true,"lines":2,"new":1,"duplicate":0,"failed":1,"refused":1}

A line that is not a document, or is invalid, stale, or in conflict has a problem as its outcome; the other lines are
ingested. Blank lines have no outcome: they count in the numbers of lines, which are those of an editor, but not in
`lines`, which is new + duplicate + failed. Of the failed ones, `refused` were invalid or could not be chunked. If a
store does not answer, the answer ends before its last line and the key is released: a client that sends the batch again
gets `duplicate` for the documents that were ingested.

Memory is bounded: the body is in a file, and a slice of it is in memory at a time. The files are bounded as well: each
tenant has a share of the bytes of all unfinished batches.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ragfence.core.document import Document
from ragfence.core.hashing import digest_part
from ragfence.core.policy import Http
from ragfence.core.receipts import Decision, Receipt
from ragfence.documents.claims import GivenDocument
from ragfence.engine.leases import innermost_lease
from ragfence.errors import Conflict, InFlight, Quarantined, RagfenceError, Stale, TransientError
from ragfence.server.contract import Contract
from ragfence.server.dependencies import parse_bounded
from ragfence.server.fair_shares import UnfinishedBatch, run_in_turn
from ragfence.server.streams import Spool, Streamed, Write
from ragfence.wire.messages import Answer, Call
from ragfence.wire.problems import Problem, RequestRefused, problem_of, refusal
from ragfence.wire.schemas import DocumentIn, receipt_out
from ragfence.wire.validation import validated

if TYPE_CHECKING:
    from ragfence.fence import Fence

NDJSON: Final = "application/x-ndjson"
SLICE_LINES: Final = 500
SLICE_BYTES: Final = 8 << 20
MIN_STORED_BYTES: Final = 16 << 20
"""The answer to a batch has a line per document, so more of it is stored than of other answers."""

_log = logging.getLogger("ragfence.server")


class Body(NamedTuple):
    """The complete body of a batch."""

    spool: Spool
    digest: bytes
    lines: int


async def read_body(pieces: AsyncIterable[bytes], limits: Http, unfinished: UnfinishedBatch) -> Body:
    """Raises `RequestRefused` as soon as the body is too long, or there is no room for it."""
    # The answer starts after the end of the body. Answering earlier would be faster, but would block with every client
    # that does not read while it sends: both sides would wait for the other one to empty a full buffer.
    spool, sha256, lines, last = Spool(closed=unfinished.end), hashlib.sha256(), 0, b"\n"
    async for piece in pieces:
        lines += piece.count(b"\n")
        last = piece[-1:] or last
        if spool.size + len(piece) > limits.max_batch_bytes:
            raise _too_large(f"at most {limits.max_batch_bytes:,} bytes are accepted")
        if lines + (last != b"\n") > limits.max_batch_lines:
            raise _too_large(f"at most {limits.max_batch_lines:,} lines are accepted")
        unfinished.take(len(piece))
        spool.append(piece)
        sha256.update(piece)
    return Body(spool, sha256.digest(), lines + (last != b"\n"))


class NdjsonBatches:
    """The batches of one tenant."""

    def __init__(self, fence: Fence, contract: Contract) -> None:
        self._documents = fence.documents
        self._contract = contract
        rules = fence.policy.documents
        # Escaped in JSON, a letter with an accent takes three times its bytes.
        self._longest = 3 * (rules.max_text_bytes + rules.max_metadata_bytes) + (1 << 16)
        self._max_values = rules.max_metadata_bytes
        self._limit = max(fence.policy.http.max_stored_bytes, MIN_STORED_BYTES)

    async def answer(self, call: Call, principal: str, body: Body) -> Answer | Streamed:
        """Returns the answer to a batch. `call` is the request without its body, which is compared by its digest."""
        key = self._contract.content_key()
        compared = {"body": body.digest.hex() if key is None else digest_part(body.digest, key)}
        fenced = Call(call.method, call.path, call.route, call.query, call.headers, root=call.root, compared=compared)
        head = Answer(200, (("content-type", NDJSON), ("cache-control", "no-store")))

        async def produce(write: Write) -> bytes:
            work = _BatchWork(self, body.spool)
            while piece := await run_in_turn(work.next_slice):
                write(piece)
            return work.last_line()

        return await self._contract.stream(fenced, principal, head, produce, limit=self._limit)

    def lines(self, spool: Spool) -> Iterator[tuple[int, Document | Problem, str | None, int]]:
        """Yields (number, document or problem, doc_id if known, bytes) of every line that is not blank."""
        for number, line in enumerate(spool.lines(self._longest), start=1):
            if line is None:
                yield (
                    number,
                    refusal("VALIDATION.body_too_large", f"a line has at most {self._longest:,} bytes"),
                    None,
                    0,
                )
            elif line.strip():
                parsed, doc_id = _document_in(line, self._max_values)
                yield number, parsed, doc_id, len(line)

    def ingest(self, documents: list[Document], event_id: str = "") -> list[Receipt | Exception]:
        try:
            return self._documents.ingest_each([GivenDocument(each, event_id=event_id) for each in documents])
        except TransientError:
            raise
        except Exception:  # noqa: BLE001  # the error of one document: each is ingested alone, so that only its line gets it
            return [self._alone(each, event_id) for each in documents]

    def _alone(self, document: Document, event_id: str) -> Receipt | Exception:
        try:
            return self._documents.ingest(document, event_id=event_id)
        except InFlight as busy:
            return busy
        except TransientError:
            raise
        except Exception as error:  # noqa: BLE001  # any error is the outcome of this line
            return error


class _BatchWork:
    """Ingests one batch, slice by slice, in threads."""

    def __init__(self, batches: NdjsonBatches, spool: Spool) -> None:
        lease = innermost_lease()
        self._event_id = lease.key if lease else ""
        """The request: decision rows of its documents name it, so that a purge finds the stored answer."""
        self._batches = batches
        self._lines = batches.lines(spool)
        self._counted = {"new": 0, "duplicate": 0, "failed": 0}
        self._refused = 0

    def next_slice(self) -> bytes:
        """Ingests the next lines of the batch, and returns their lines of the answer; empty at the end."""
        entries: list[tuple[int, Document | Problem, str | None]] = []
        size = 0
        for number, parsed, doc_id, length in self._lines:
            entries.append((number, parsed, doc_id))
            size += length
            if len(entries) == SLICE_LINES or size >= SLICE_BYTES:
                break
        documents = [parsed for _, parsed, _ in entries if isinstance(parsed, Document)]
        outcomes = iter(self._batches.ingest(documents, self._event_id) if documents else [])
        return b"".join(
            self._line(number, doc_id, next(outcomes) if isinstance(parsed, Document) else parsed)
            for number, parsed, doc_id in entries
        )

    def last_line(self) -> bytes:
        counted = {"lines": sum(self._counted.values())} | self._counted | {"refused": self._refused}
        return _line({"done": True, **counted})

    def _line(self, number: int, doc_id: str | None, outcome: Receipt | Exception | Problem) -> bytes:
        values: dict[str, Any] = {"line": number, "doc_id": doc_id}
        if isinstance(outcome, Receipt):
            self._counted["new" if outcome.is_new else "duplicate"] += 1
            values |= {"status": 201 if outcome.is_new else 200, "decision": outcome.decision.value}
            return _line(values | {"receipt": receipt_out(outcome, doc_id)})
        self._counted["failed"] += 1
        problem = outcome if isinstance(outcome, Problem) else _problem_of(outcome)
        decision = _decision_of(outcome)
        self._refused += decision is Decision.REFUSED
        return _line(values | {"status": problem.status, "decision": decision.value, "problem": problem.body()})


def _document_in(line: bytes, max_values: int) -> tuple[Document | Problem, str | None]:
    doc_id = None
    try:
        given = parse_bounded(line, max_values)
        if isinstance(given, dict) and isinstance(given.get("doc_id"), str):
            doc_id = given["doc_id"]
        body = validated(given, DocumentIn)
        return body.document(body.doc_id), doc_id
    except RequestRefused as refused:
        return refused.problem, doc_id
    except RagfenceError as error:
        return problem_of(error), doc_id


def _decision_of(outcome: Exception | Problem) -> Decision:
    match outcome:
        case Conflict():
            return Decision.CONFLICT
        case Stale():
            return Decision.STALE
        case InFlight() | Quarantined():
            return Decision.IN_FLIGHT
    return Decision.REFUSED


def _problem_of(error: Exception) -> Problem:
    if isinstance(error, RagfenceError):
        return problem_of(error)
    _log.error("a document of a batch could not be ingested", exc_info=error)
    return refusal("TRANSIENT.unexpected")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str).encode() + b"\n"


def _too_large(detail: str) -> RequestRefused:
    return RequestRefused(refusal("VALIDATION.body_too_large", detail, hint="send it as several batches"))
