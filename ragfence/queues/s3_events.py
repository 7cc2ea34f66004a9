"""Documents that follow S3 notifications: what is created in a bucket is ingested, what is removed is retracted.

    record    one object, one change; a message may hold several, and each is claimed on its own
    claim     the record's key, before the object is read: what is read on a redelivery may be newer than the event
    read      the object as it is now, by the readers of `S3Source`
    ingest    the document, with the record's sequence, so that an older change never replaces a newer one

S3 delivers notifications at least once and in any order. The order of the changes of one object is in `sequencer`,
and only there. A record without one (some servers send none) is not ordered: what the bucket holds now decides.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote_plus

from cachetools import LRUCache

from ragfence.core.operations import SEQUENCE_MIN, Operation
from ragfence.documents.readers.content import LIMIT_BYTES
from ragfence.errors import Conflict, DocumentInvalid, FencedOut, Stale, TerminalError, TransientError, ValidationError
from ragfence.queues.consumer import KIND, Claims, Consumer, seal
from ragfence.queues.transport import Message, Transport

if TYPE_CHECKING:
    from ragfence.documents.documents import Documents
    from ragfence.documents.sources.s3 import S3Source

MAX_RECORDS: Final = 1_000
MAX_BUCKETS: Final = 100
MAX_KEY_BYTES: Final = 1_024
"""The longest key of S3."""
_DIGITS: Final = 18
"""The longest sequencer of S3 that is known."""
_HEX = re.compile(r"[0-9A-Fa-f]+")
_DETAIL_TYPES = {"Object Created": "ObjectCreated", "Object Deleted": "ObjectRemoved"}


class ObjectFence(Claims, Protocol):
    """A fence with documents."""

    @property
    def documents(self) -> Documents: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Change:
    """One record of a notification: what happened to one object."""

    bucket: str
    key: str
    event: str
    """`ObjectCreated:Put`, `ObjectRemoved:Delete`, ..."""
    sequencer: str = ""
    etag: str = ""
    version_id: str = ""
    time: str = ""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def creates(self) -> bool:
        return self.event.startswith("ObjectCreated")

    @property
    def removes(self) -> bool:
        return self.event.startswith(("ObjectRemoved", "LifecycleExpiration"))

    @property
    def leaves_nothing(self) -> bool:
        """Whether the event alone says that the object was gone. Deleting one version may bring back an older one."""
        return bool(self.sequencer) and (not self.version_id or self.event.endswith("DeleteMarkerCreated"))

    def operation(self) -> Operation:
        """What is claimed: the same in every delivery of the record, and by every route that it takes."""
        sequence = sequence_of(self.sequencer) if self.sequencer else None
        order = self.sequencer.lower().rstrip("0") if self.sequencer else f"{self.time}/{self.version_id}/{self.etag}"
        action = "created" if self.creates else "removed" if self.removes else self.event
        return Operation(
            kind=KIND, source_type="s3", source_id=self.url, revision=f"{action}/{order}", sequence=sequence
        )

    def payload(self) -> dict[str, str]:
        return {"object": self.url, "etag": self.etag}


def s3_consumer(
    fence: ObjectFence,
    transport: Transport,
    *,
    client: Any = None,
    prefix: str = "",
    source: str = "",
    extensions: Mapping[str, str] | Iterable[str] | None = None,
    ignore: Iterable[str] = (),
    encoding: str = "utf-8",
    limit_bytes: int = LIMIT_BYTES,
    **options: Any,
) -> Consumer:
    """Makes a consumer of S3 notifications: from S3 itself, or through SNS or EventBridge.

    Args:
        fence: Where records are claimed and documents are ingested.
        transport: The queue that the bucket notifies.
        client: A client of boto3 for S3; made from the environment if it is missing.
        prefix: Put in front of every doc_id, as in `sync`.
        source: The `s3://bucket/prefix` that is also passed to `sync`. Objects elsewhere are skipped, and a document
            has the doc_id that `sync` gives it: its key below the prefix. Without it objects of every bucket are
            read, and a doc_id is `s3://bucket/key`.
        extensions, ignore, encoding, limit_bytes: How objects are read, as in `S3Source`.
        options: Passed to `Consumer`, for example `workers` and `max_attempts`.

    An object without a reader is sealed as skipped, one that no longer exists as gone. One whose content cannot be
    read becomes a dead letter.

    >>> s3_consumer(fence, open_transport("sqs://uploads"), source="s3://docs").run()  # doctest: +SKIP
    """
    objects = _Objects(fence, client, prefix, source, (extensions, tuple(ignore), encoding, limit_bytes))

    def handle(message: Message) -> dict[str, Any]:
        changes = changes_of(message.body)
        if not changes:
            return {"outcome": "skipped", "reason": "a test event of S3"}
        if len(changes) == 1:
            return objects.apply(changes[0], message.event_id)
        return objects.apply_each(changes, message)

    return Consumer(fence, transport, handle, key=_operation, payload=_payload, **options)


def sequence_of(sequencer: str) -> int:
    """Returns a sequencer of S3 as an integer of 64 bits that has the order of AWS.

    AWS compares sequencers of one object as text, after the shorter one was padded with zeros on the right. Up to 16
    digits fit, and 18 if the first two are zeros, as they are at AWS. The lowest of the 64 bits is dropped: it stands
    for less than a nanosecond.

    Raises:
        ValidationError: The sequencer is longer, or is not hexadecimal.

    >>> sequence_of("0055AED6DCD90281E5") < sequence_of("0055AED6DCD90282") < sequence_of("0055AED6DD")
    True
    """
    padded = sequencer.rstrip("0").ljust(_DIGITS, "0")[: _DIGITS + 1]
    if not _HEX.fullmatch(sequencer):
        raise ValidationError(f"sequencer {sequencer[:40]!r} is not a hexadecimal number")
    value = int(padded, 16)
    short = not value >> 64
    if len(padded) > _DIGITS or not (short or value & 0xFF == 0):
        raise ValidationError(
            f"sequencer {sequencer[:40]!r} does not fit into 64 bits",
            hint="at most 16 hexadecimal digits, or 18 of which the first two are zeros",
        )
    # The short ones fill the lower half of all sequences, the others (of at least 2 ** 64) the upper half.
    return SEQUENCE_MIN + (value >> 1) if short else value >> 9


def changes_of(body: Any) -> list[S3Change]:
    """Returns the records of a notification, in their order; none if it is a test event.

    Raises:
        ValidationError: It is not a notification of S3.
    """
    if isinstance(body, Mapping) and body.get("Type") == "Notification" and isinstance(body.get("Message"), str):
        try:
            body = json.loads(body["Message"])
        except ValueError as error:
            raise ValidationError("the message that SNS passed on is not JSON") from error
    if not isinstance(body, Mapping):
        raise ValidationError("the message is not a notification of S3")
    if body.get("Event") == "s3:TestEvent":
        return []
    try:
        if body.get("source") == "aws.s3":
            return [_change_of_event_bridge(body)]
        records = body["Records"]
        if not isinstance(records, list) or not 1 <= len(records) <= MAX_RECORDS:
            raise ValidationError(f"a notification of S3 holds 1 to {MAX_RECORDS} records")
        return [_change_of(record) for record in records]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValidationError("the message is not a notification of S3") from error


class _Objects:
    """Applies changes of objects to documents."""

    def __init__(self, fence: ObjectFence, client: Any, prefix: str, source: str, reading: tuple[Any, ...]) -> None:
        from ragfence.documents.sources.s3 import parse_url

        self._fence, self._client, self._prefix, self._reading = fence, client, prefix, reading
        self._sources: LRUCache[str, S3Source] = LRUCache(MAX_BUCKETS)
        self._lock = threading.Lock()
        self._place = parse_url(source) if source else None
        self._source_of(self._place.bucket if self._place else "any")  # refuses wrong options now
        self._sources.pop("any", None)

    def apply_each(self, changes: Sequence[S3Change], message: Message) -> dict[str, Any]:
        """Claims and applies each change. One that fails does not keep the others from being applied."""
        outcomes: list[dict[str, Any]] = []
        failures: list[Exception] = []
        for change in changes:
            try:
                outcomes.append(self._apply_claimed(change, message))
            except Exception as error:  # noqa: BLE001  # raised below, after the others had their turn
                failures.append(error)
        if failures:
            # One that may succeed later decides: the others are answered from their seals then.
            raise next((each for each in failures if not isinstance(each, TerminalError)), failures[0])
        return {"records": outcomes[:100]}

    def _apply_claimed(self, change: S3Change, message: Message) -> dict[str, Any]:
        route = f"s3:{change.event}"
        try:
            with self._fence.claim(
                change.operation(), payload=change.payload(), verdict=True, event_id=message.event_id, route=route
            ) as claim:
                if claim.is_new:
                    result = self.apply(change, message.event_id)
                    seal(claim, result)
                    return result
        except FencedOut as lost:
            # Not the claim of the message: its consumer must not take this for its own.
            raise TransientError(f"{change.url}: {lost.message}") from lost
        if isinstance(claim.error, Stale):
            return {"outcome": "stale"}
        if claim.error is not None:
            raise claim.error if isinstance(claim.error, TransientError) else TerminalError(claim.error.message)
        if claim.receipt.failed:
            raise TerminalError(f"failed before: {(claim.receipt.failure or {}).get('message', '')}")
        return {"outcome": "duplicate"}

    def apply(self, change: S3Change, event_id: str) -> dict[str, Any]:
        """Ingests or retracts the document of a change whose key is claimed; returns what is sealed."""
        source = self._source_of(change.bucket)
        path = source.doc_id(change.key) if source else None
        if source is None or path is None:
            return {"outcome": "skipped", "reason": "a folder, or not below the prefix"}
        if not change.creates and not change.removes:
            return {"outcome": "skipped", "reason": f"{change.event} changes no content"}
        if reason := source.skip_reason(path):
            return {"outcome": "skipped", "reason": reason}
        doc_id = self._prefix + (path if self._place else f"s3://{change.bucket}/{path}")
        sequence = sequence_of(change.sequencer) if change.sequencer else None
        try:
            document = None
            if not (change.removes and change.leaves_nothing):
                document = source.load(change.key, path)
            if document is not None:
                named = document._replace(doc_id=doc_id, sequence=sequence)
                receipt = self._fence.documents.ingest(named, event_id=event_id)
            elif change.removes:
                receipt = self._fence.documents.retract(doc_id, sequence=sequence, event_id=event_id)
            else:
                # Its removal is an event of its own, if this queue gets those.
                return {"outcome": "gone", "doc_id": doc_id}
        except DocumentInvalid as invalid:
            raise TerminalError(invalid.message) from invalid
        except Stale:
            return {"outcome": "stale", "doc_id": doc_id}
        except Conflict:
            # An earlier attempt got as far as the document, and the object was replaced since: that is an event, too.
            return {"outcome": "superseded", "doc_id": doc_id}
        except FencedOut as lost:
            raise TransientError(f"{doc_id}: {lost.message}") from lost
        outcome = "ingested" if document is not None else "retracted"
        return {"outcome": outcome, "doc_id": doc_id, "decision": str(receipt.decision)}

    def _source_of(self, bucket: str) -> S3Source | None:
        from ragfence.documents.sources.s3 import S3Source

        place = self._place
        if place is not None and bucket != place.bucket:
            return None
        with self._lock:
            if bucket not in self._sources:
                extensions, ignore, encoding, limit_bytes = self._reading
                self._sources[bucket] = S3Source(
                    bucket,
                    place.prefix if place else "",
                    endpoint_url=place.endpoint_url if place else None,
                    region=place.region if place else None,
                    client=self._client,
                    extensions=extensions,
                    ignore=ignore,
                    encoding=encoding,
                    limit_bytes=limit_bytes,
                )
            return self._sources[bucket]


def _operation(message: Message) -> Operation:
    """The record's operation; of several records, one that is named by all of them."""
    changes = changes_of(message.body)
    if len(changes) == 1:
        return changes[0].operation()
    named = [[each.source_id, each.revision] for each in (change.operation() for change in changes)]
    text = json.dumps(named or message.body, sort_keys=True)
    return Operation(kind=KIND, source_type="s3-message", source_id=hashlib.sha256(text.encode()).hexdigest())


def _payload(message: Message) -> Any:
    changes = changes_of(message.body)
    return [change.payload() for change in changes] if len(changes) != 1 else changes[0].payload()


def _change_of(record: Mapping[str, Any]) -> S3Change:
    found = record["s3"]["object"]
    return _checked(
        bucket=record["s3"]["bucket"]["name"],
        key=unquote_plus(found["key"], errors="strict"),
        event=record["eventName"].removeprefix("s3:"),
        sequencer=found.get("sequencer"),
        etag=found.get("eTag"),
        version_id=found.get("versionId"),
        time=record.get("eventTime"),
    )


def _change_of_event_bridge(event: Mapping[str, Any]) -> S3Change:
    """EventBridge names the same things in another way, and does not encode the key."""
    detail, kind = event["detail"], str(event["detail-type"])
    found = detail["object"]
    marker = detail.get("deletion-type") == "Delete Marker Created"
    return _checked(
        bucket=detail["bucket"]["name"],
        key=found["key"],
        event=f"{_DETAIL_TYPES.get(kind, kind)}:{'DeleteMarkerCreated' if marker else detail.get('reason', '')}",
        sequencer=found.get("sequencer"),
        etag=found.get("etag", found.get("eTag")),
        version_id=found.get("version-id"),
        time=str(event.get("time", "")),
    )


def _checked(**fields: Any) -> S3Change:
    texts = {name: "" if value is None else value for name, value in fields.items()}
    for name, value in texts.items():
        if not isinstance(value, str) or len(value.encode(errors="replace")) > MAX_KEY_BYTES:
            raise ValidationError(f"{name} of a record of S3 is not a text of at most {MAX_KEY_BYTES} bytes")
    if not texts["bucket"] or not texts["key"] or "/" in texts["bucket"]:
        raise ValidationError("a record of S3 names no object")
    if texts["sequencer"]:
        sequence_of(texts["sequencer"])
    return S3Change(**texts)
