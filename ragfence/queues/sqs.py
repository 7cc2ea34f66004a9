"""A queue on Amazon SQS, standard or FIFO, or on a server that speaks its protocol.

What SQS does by itself stays with SQS: it counts deliveries, moves a message to the dead-letter queue after
`maxReceiveCount` of them, and keeps the order within a group of a FIFO queue. What it lacks is done here, and never
in a way that can lose a message: whatever moves between two queues is written to the new one before it is deleted
from the old one.

The fields of an envelope travel in one message attribute named `ragfence`, as JSON: SQS allows ten attributes, which
leaves nine for other programs. Attributes are immutable, so a delivery that does not count cannot be noted in the
message: each process remembers the ones that it gave back itself, and other processes count them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cachetools import LRUCache

from ragfence._extras import needs_extra
from ragfence.core.urls import show_url
from ragfence.errors import QueueFull, RagfenceError, StoreAuth, TransportUnavailable, ValidationError
from ragfence.queues.transport import (
    TEXT_FIELDS,
    DeadLetter,
    Depth,
    Envelope,
    Message,
    check_texts,
    decode_body,
    encode_body,
)
from ragfence.stores.object_address import check_endpoint

with needs_extra("sqs", "A queue on SQS"):
    from boto3.session import Session
    from botocore.config import Config
    from botocore.exceptions import ClientError

    from ragfence.stores.s3_errors import BotoError, brief, lacks_credentials

BATCH: Final = 10
"""How many messages one request of SQS takes."""
BATCH_BYTES: Final = 256 << 10
LONGEST_POLL_S: Final = 20
LONGEST_DELAY_S: Final = 15 * 60
LONGEST_HIDDEN_S: Final = 12 * 3600
"""SQS ends a delivery this long after it was received, however often it is extended."""
UNCOUNTED_PAUSE_S: Final = 5.0
"""The shortest pause of a retry that does not count: SQS counts each delivery, and its redrive policy goes by that."""
MAX_SCANNED: Final = 2_000
"""How many dead letters are looked at: reading a queue of SQS means receiving from it."""
SCAN_HIDDEN_S: Final = 30
RETRY_AFTER_MS: Final = 5_000
DEPTH_SECONDS: Final = 1.0
"""How long a count is believed when a message is sent."""
ATTRIBUTE: Final = "ragfence"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,75}(\.fifo)?|[A-Za-z0-9_-]{1,80}")
_DEDUPLICATION_ID = re.compile(r"[!-~]{1,128}")
_NOT_IN_SQS = re.compile("[\ufffe\uffff]")
_GONE = {"ReceiptHandleIsInvalid", "InvalidReceiptHandle", "MessageNotInflight", "InvalidParameterValue"}
_MISSING = {"QueueDoesNotExist", "NonExistentQueue"}
_REFUSED = {
    *("AccessDenied", "AccessDeniedException", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId"),
    *("InvalidAccessKeyId", "MissingAuthenticationToken", "SignatureDoesNotMatch", "UnrecognizedClientException"),
    *("InvalidSignatureException", "IncompleteSignature", "OptInRequired", "AuthFailure"),
}


class QueueAddress(NamedTuple):
    """Where a queue is, as a URL names it."""

    name: str
    account: str = ""
    region: str | None = None
    endpoint_url: str | None = None
    queue_url: str = ""
    dead_letters: str = ""


@dataclass(slots=True)
class _Delivery:
    received_at: float
    hidden_until: float
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Attributes:
    """What SQS says of a queue."""

    visibility_s: float
    max_bytes: int
    dead_url: str
    """empty: it has no redrive policy"""


class SqsTransport:
    """A queue on SQS. Credentials come from where boto3 finds them, never from the URL.

    A queue that is consumed needs a dead-letter queue: that of its redrive policy, or the one named by `dead_letters`.
    Without either the first use as a consumer raises `ValidationError`, before anything is received.

    Args:
        address: A name, `sqs://NAME?region=...&endpoint_url=...`, `sqs://ACCOUNT/NAME`, or the URL of the queue.
        queue: The name, if the address has none.
        visibility_s: How long a delivered message is hidden, in whole seconds; that of the queue, unless given.
        dead_letters: The name of the dead-letter queue; that of the redrive policy, unless given.
        high_water: With more messages than this, by the estimate of SQS, `send` raises `QueueFull`. None: no limit.
        client: A client of boto3 for SQS.

    On a FIFO queue the group of a message is its `group`, or else its `source_id`; its deduplication id is its
    `event_id`. Messages of one group are delivered one at a time. A standard queue ignores groups.

    >>> queue = SqsTransport("sqs://orders?region=eu-west-1")  # doctest: +SKIP
    """

    def __init__(
        self,
        address: str = "sqs://",
        queue: str = "",
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        visibility_s: float | None = None,
        dead_letters: str = "",
        high_water: int | None = None,
        client: Any = None,
    ) -> None:
        place = parse_address(address, queue)
        self._place = place
        self._endpoint_url = endpoint_url or place.endpoint_url
        self._region = region or place.region
        check_endpoint(self._endpoint_url)
        self._fifo = place.name.endswith(".fifo")
        self._dead_name = dead_letters or place.dead_letters
        if self._dead_name and self._dead_name.endswith(".fifo") != self._fifo:
            raise ValidationError(f"the dead-letter queue of {place.name!r} must be FIFO if and only if the queue is")
        if visibility_s is not None and not 1 <= visibility_s <= LONGEST_HIDDEN_S:
            raise ValidationError(f"visibility_s must be from 1 to {LONGEST_HIDDEN_S}, not {visibility_s:g}")
        self._visibility_s = None if visibility_s is None else float(math.ceil(visibility_s))
        self._high_water = high_water
        self._given = client
        self._made: tuple[int, Any] | None = None
        self._urls: dict[str, str] = {}
        self._known: _Attributes | None = None
        self._deliveries: dict[str, _Delivery] = {}
        self._uncounted: LRUCache[str, int] = LRUCache(10_000)
        """deliveries that this process gave back uncounted, by message id"""
        self._counted: tuple[float, int] = (-math.inf, 0)
        self._lock = threading.Lock()
        self._scan_lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        account = f"{self._place.account}/" if self._place.account else ""
        region = f"?region={self._region}" if self._region else ""
        return f"sqs://{account}{self._place.name}{region}"

    @property
    def name(self) -> str:
        return self._place.name

    @property
    def visibility_s(self) -> float:
        return self._attributes().visibility_s if self._visibility_s is None else self._visibility_s

    def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
        """Sends messages, ten to a request.

        Raises:
            TransportUnavailable: SQS did not accept all of them; `.details["unsent"]` holds the event ids that are
                not known to be sent.
        """
        if not 0 <= delay_s <= LONGEST_DELAY_S:
            raise ValidationError(f"SQS delays a message by at most {LONGEST_DELAY_S} s, not {delay_s:g}")
        if delay_s and self._fifo:
            raise ValidationError("a FIFO queue of SQS delays no single message", hint="set DelaySeconds on the queue")
        named = [(envelope.event_id or str(uuid.uuid4()), envelope) for envelope in envelopes]
        entries = [self._entry(str(at), event_id, each, delay_s) for at, (event_id, each) in enumerate(named)]
        self._refuse_above_high_water(len(entries))
        sent: dict[str, str] = {}
        try:
            for batch in _batches(entries):
                sent |= self._send_batch(self._queue_url(), batch)
        except TransportUnavailable as error:
            sent |= error.details.pop("sent", {})
            error.details["unsent"] = [event_id for at, (event_id, _) in enumerate(named) if str(at) not in sent]
            raise
        return [sent[str(at)] for at in range(len(named))]

    def receive(self, limit: int, wait_s: float) -> list[Message]:
        """Receives messages; a wait takes whole seconds.

        On a FIFO queue each message takes a request of its own, since SQS would return several of one group at once.
        """
        if limit < 1:
            raise ValidationError(f"limit must be at least 1, not {limit}")
        self._dead_url()
        give_up_at = time.monotonic() + wait_s
        found: list[Message] = []
        while len(found) < limit:
            left_s = 0.0 if found else max(0.0, give_up_at - time.monotonic())
            poll_s = min(LONGEST_POLL_S, math.ceil(left_s))
            count = 1 if self._fifo else min(BATCH, limit - len(found))
            began = time.monotonic()
            answer = self._call(
                "receive",
                "receive_message",
                QueueUrl=self._queue_url(),
                MaxNumberOfMessages=count,
                WaitTimeSeconds=poll_s,
                VisibilityTimeout=int(self.visibility_s),
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            )
            raw = answer.get("Messages", [])
            found += [self._delivered(each, began) for each in raw]
            if not raw and (found or time.monotonic() >= give_up_at or self._closed.is_set()):
                break
        return found

    def ack(self, messages: Sequence[Message]) -> list[bool]:
        alive = [self._is_current(message) for message in messages]
        # Also what expired: its effect is sealed, and SQS may still take the handle.
        gone = self._each("delete", "delete_message_batch", messages, lambda message: {})
        for message in messages:
            self._forget(message)
        return [current and message.handle in gone for current, message in zip(alive, messages, strict=True)]

    def retry(self, message: Message, delay_s: float, *, counted: bool = True) -> bool:
        if not counted and delay_s > 0:
            delay_s = max(delay_s, UNCOUNTED_PAUSE_S)
        (hidden,) = self._hide([message], delay_s)
        if hidden:
            if not counted:
                with self._lock:
                    self._uncounted[message.message_id] = self._uncounted.get(message.message_id, 0) + 1
            self._forget(message)
        return hidden

    def extend(self, messages: Sequence[Message], visibility_s: float | None = None) -> list[bool]:
        return self._hide(messages, self.visibility_s if visibility_s is None else visibility_s)

    def dead(self, message: Message, reason: str) -> bool:
        """Sends the message to the dead-letter queue with the reason, then deletes it."""
        dead_url = self._dead_url()
        if not all(self._hide([message], self.visibility_s)):
            return False
        with self._lock:
            delivery = self._deliveries.get(message.handle)
        raw = delivery.raw if delivery else {}
        fields = {name: value for name in TEXT_FIELDS if (value := getattr(message, name))}
        fields |= {"reason": reason[:2000], "died_ms": _now_ms(), "from": message.message_id}
        body = raw.get("Body") or _body_text(message.body)
        entry = _with_attributes({"Id": "0", "MessageBody": body}, fields, raw.get("MessageAttributes", {}))
        if self._fifo:  # a group of its own: no letter hides behind another one
            entry |= {"MessageGroupId": message.message_id, "MessageDeduplicationId": message.message_id}
        self._send_batch(dead_url, [entry])
        self.ack([message])
        return True

    def depth(self) -> Depth:
        """By the estimates of SQS, which also count a retry that waits for its time as in flight."""
        visible, in_flight = self._count(self._queue_url())
        dead = sum(self._count(self._dead_url()))
        return Depth(visible, in_flight, dead, None)

    def dead_letters(self, limit: int = 100, after: str = "") -> list[DeadLetter]:
        """Dead letters, oldest first. Receives up to 2,000 of them, and gives them back: meanwhile nobody else sees
        them, and SQS counts the delivery."""
        with self._letters() as found:
            letters = sorted((_letter(raw) for raw in found.values()), key=_letter_order)
        places = [letter.message.message_id for letter in letters]
        start = places.index(after) + 1 if after in places else 0
        return letters[start : start + limit]

    def replay_dead(self, message_ids: Sequence[str]) -> int:
        with self._letters() as found:
            chosen = [found[message_id] for message_id in dict.fromkeys(message_ids) if message_id in found]
            for raw in chosen:
                fields = _fields(raw)
                kept = {name: fields[name] for name in TEXT_FIELDS if fields.get(name)}
                entry = _with_attributes(
                    {"Id": "0", "MessageBody": raw["Body"]}, kept, raw.get("MessageAttributes", {})
                )
                if self._fifo:
                    # Not the event id: SQS would drop what it saw under that within five minutes.
                    group = _group(kept, raw["MessageId"])
                    entry |= {"MessageGroupId": group, "MessageDeduplicationId": f"replay-{raw['MessageId']}"}
                self._send_batch(self._queue_url(), [entry])
                self._delete_letter(raw, found)
            return len(chosen)

    def drop_dead(self, message_ids: Sequence[str]) -> int:
        with self._letters() as found:
            chosen = [found[message_id] for message_id in dict.fromkeys(message_ids) if message_id in found]
            for raw in chosen:
                self._delete_letter(raw, found)
            return len(chosen)

    def close(self) -> None:
        self._closed.set()
        made, self._made = self._made, None
        if made is not None and made[0] == os.getpid():
            made[1].close()

    def _entry(self, entry_id: str, event_id: str, envelope: Envelope, delay_s: float) -> dict[str, Any]:
        check_texts(envelope)
        fields = {name: value for name in TEXT_FIELDS if (value := getattr(envelope, name))} | {"event_id": event_id}
        entry = _with_attributes({"Id": entry_id, "MessageBody": _body_text(envelope.body)}, fields, {})
        limit = self._known.max_bytes if self._known else BATCH_BYTES
        if (size := _size(entry)) > limit:
            raise ValidationError(
                f"a message has {size} bytes with its attributes, more than the {limit} of SQS",
                hint="send a reference, such as the URL of an object, instead of the content",
            )
        if delay_s:
            entry["DelaySeconds"] = math.ceil(delay_s)
        if self._fifo:
            entry |= {
                "MessageGroupId": _group(fields, event_id),
                "MessageDeduplicationId": _deduplication_id(event_id),
            }
        return entry

    def _send_batch(self, url: str, batch: list[dict[str, Any]]) -> dict[str, str]:
        """Sends up to ten messages and returns their ids. What SQS itself failed to take is tried again at once."""
        sent: dict[str, str] = {}
        for tries_left in reversed(range(3)):
            try:
                answer = self._call("send", "send_message_batch", QueueUrl=url, Entries=batch)
            except TransportUnavailable as error:
                error.details["sent"] = sent
                raise
            sent |= {each["Id"]: each["MessageId"] for each in answer.get("Successful", [])}
            failed = {each["Id"]: each for each in answer.get("Failed", [])}
            batch = [entry for entry in batch if entry["Id"] not in sent]
            if not batch:
                return sent
            refused = any(each.get("SenderFault") for each in failed.values())
            if refused or not tries_left:
                break
        codes = ", ".join(sorted({str(each.get("Code", "")) for each in failed.values()})) or "no answer"
        unsent = TransportUnavailable(f"{len(batch)} messages were not sent, {self.url}: {codes}")
        unsent.details["sent"] = sent
        raise unsent

    def _delivered(self, raw: Mapping[str, Any], began: float) -> Message:
        now = time.monotonic()
        with self._lock:
            for handle in [each for each, held in self._deliveries.items() if held.hidden_until < now - 3600]:
                del self._deliveries[handle]
            self._deliveries[raw["ReceiptHandle"]] = _Delivery(began, began + self.visibility_s, raw)
            uncounted = self._uncounted.get(raw["MessageId"], 0)
        return _message(raw, uncounted)

    def _hide(self, messages: Sequence[Message], seconds: float) -> list[bool]:
        """Sets how long from now deliveries stay hidden."""
        now = time.monotonic()
        timeouts: dict[str, int] = {}
        for message in messages:
            with self._lock:
                delivery = self._deliveries.get(message.handle)
            if not self._is_current(message):
                continue
            longest_s = LONGEST_HIDDEN_S - 1 - (now - delivery.received_at if delivery else 0.0)
            if longest_s > 0:
                timeouts[message.handle] = max(0, min(math.ceil(seconds), int(longest_s)))
        current = [message for message in messages if message.handle in timeouts]
        done = self._each(
            "hide",
            "change_message_visibility_batch",
            current,
            lambda message: {"VisibilityTimeout": timeouts[message.handle]},
        )
        with self._lock:
            for handle in done:
                if (delivery := self._deliveries.get(handle)) is not None:
                    delivery.hidden_until = now + timeouts[handle]
        return [message.handle in done for message in messages]

    def _each(self, what: str, method: str, messages: Sequence[Message], more: Any) -> set[str]:
        """Runs a batch request over messages; returns the handles that it was done for.

        Raises:
            TransportUnavailable: SQS failed for some of them, and not because their delivery had expired.
        """
        done: set[str] = set()
        unclear: dict[str, str] = {}
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            entries = [
                {"Id": str(at), "ReceiptHandle": message.handle} | more(message) for at, message in enumerate(batch)
            ]
            answer = self._call(what, method, QueueUrl=self._queue_url(), Entries=entries)
            done.update(batch[int(each["Id"])].handle for each in answer.get("Successful", []))
            for each in answer.get("Failed", []):
                if each.get("Code", "").rpartition(".")[2] not in _GONE:
                    unclear[batch[int(each["Id"])].message_id] = str(each.get("Code", ""))
        if unclear:
            error = TransportUnavailable(
                f"cannot {what} {len(unclear)} of {len(messages)} messages, {self.url}: "
                f"{', '.join(sorted(set(unclear.values())))}"
            )
            error.details["message_ids"] = list(unclear)
            raise error
        return done

    def _is_current(self, message: Message) -> bool:
        """Whether a delivery may still be ours. SQS accepts an older handle of a message now and then."""
        with self._lock:
            delivery = self._deliveries.get(message.handle)
            return delivery is None or time.monotonic() < delivery.hidden_until

    def _forget(self, message: Message) -> None:
        with self._lock:
            if (delivery := self._deliveries.get(message.handle)) is not None:
                delivery.hidden_until = -math.inf

    @contextlib.contextmanager
    def _letters(self) -> Iterator[dict[str, Mapping[str, Any]]]:
        """The dead letters, hidden from others until the end of the block. What is left in the dict is given back."""
        url = self._dead_url()
        found: dict[str, Mapping[str, Any]] = {}
        with self._scan_lock:
            try:
                expected = self._count(url)[0]
                while len(found) < MAX_SCANNED:
                    answer = self._call(
                        "list dead letters",
                        "receive_message",
                        QueueUrl=url,
                        MaxNumberOfMessages=BATCH,
                        WaitTimeSeconds=0 if len(found) >= expected else 1,
                        VisibilityTimeout=SCAN_HIDDEN_S,
                        MessageAttributeNames=["All"],
                        MessageSystemAttributeNames=["All"],
                    )
                    if not (raws := answer.get("Messages", [])):
                        break
                    found |= {raw["MessageId"]: raw for raw in raws}
                yield found
            finally:
                handles = [raw["ReceiptHandle"] for raw in found.values()]
                for start in range(0, len(handles), BATCH):
                    entries = [
                        {"Id": str(at), "ReceiptHandle": handle, "VisibilityTimeout": 0}
                        for at, handle in enumerate(handles[start : start + BATCH])
                    ]
                    with contextlib.suppress(RagfenceError):  # they come back by themselves
                        self._call("list", "change_message_visibility_batch", QueueUrl=url, Entries=entries)

    def _delete_letter(self, raw: Mapping[str, Any], found: dict[str, Mapping[str, Any]]) -> None:
        self._call("delete", "delete_message", QueueUrl=self._dead_url(), ReceiptHandle=raw["ReceiptHandle"])
        found.pop(raw["MessageId"], None)

    def _count(self, url: str) -> tuple[int, int]:
        names = [f"ApproximateNumberOfMessages{each}" for each in ("", "Delayed", "NotVisible")]
        answer = self._call("count", "get_queue_attributes", QueueUrl=url, AttributeNames=names)
        visible, delayed, hidden = (int(answer.get("Attributes", {}).get(name, 0)) for name in names)
        return visible + delayed, hidden

    def _refuse_above_high_water(self, more: int) -> None:
        if self._high_water is None or not more:
            return
        with self._lock:
            counted_at, known = self._counted
        if time.monotonic() - counted_at > DEPTH_SECONDS or known + more > self._high_water:
            counted_at, known = time.monotonic(), sum(self._count(self._queue_url()))
        if known + more > self._high_water:
            raise QueueFull(
                f"queue {self.name!r} holds about {known} messages, its limit is {self._high_water}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        with self._lock:
            self._counted = (counted_at, known + more)

    def _attributes(self) -> _Attributes:
        if self._known is None:
            answer = self._call("open", "get_queue_attributes", QueueUrl=self._queue_url(), AttributeNames=["All"]).get(
                "Attributes", {}
            )
            dead_url = self._url_of(self._dead_name) if self._dead_name else ""
            if not dead_url and (policy := answer.get("RedrivePolicy")):
                account, name = str(json.loads(policy).get("deadLetterTargetArn", "")).split(":")[-2:]
                dead_url = self._url_of(name, account)
            self._known = _Attributes(
                visibility_s=float(answer.get("VisibilityTimeout", 30)),
                max_bytes=int(answer.get("MaximumMessageSize", BATCH_BYTES)),
                dead_url=dead_url,
            )
        return self._known

    def _dead_url(self) -> str:
        if not (url := self._attributes().dead_url):
            raise ValidationError(
                f"queue {self.name!r} has no redrive policy, so there is no place for dead letters",
                hint="set a RedrivePolicy on the queue, or name a queue: dead_letters=NAME (?dead_letters=NAME)",
            )
        return url

    def _queue_url(self) -> str:
        return self._place.queue_url or self._url_of(self.name, self._place.account)

    def _url_of(self, name: str, account: str = "") -> str:
        if name not in self._urls:
            owner = {"QueueOwnerAWSAccountId": account} if account else {}
            self._urls[name] = str(self._call("open", "get_queue_url", name, QueueName=name, **owner)["QueueUrl"])
        return self._urls[name]

    def _client(self) -> Any:
        if self._given is not None:
            return self._given
        made = self._made
        if made is None or made[0] != os.getpid():  # connections must not be shared with a forked child
            config = Config(
                connect_timeout=5.0,
                read_timeout=LONGEST_POLL_S + 10.0,
                max_pool_connections=32,
                retries={"mode": "standard", "total_max_attempts": 3},
            )
            try:
                client = Session().client(
                    "sqs",
                    region_name=self._region or os.environ.get("AWS_REGION"),
                    endpoint_url=self._endpoint_url,
                    config=config,
                )
            except ValueError as error:  # botocore's error for an invalid endpoint URL
                raise ValidationError(f"cannot open {self.url}: its endpoint is not valid") from error
            made = self._made = os.getpid(), client
        return made[1]

    def _call(self, what: str, method: str, queue: str = "", /, **request: Any) -> Any:
        if self._closed.is_set():
            raise TransportUnavailable(f"queue {self.name!r} is closed")
        try:
            return getattr(self._client(), method)(**request)
        except BotoError as error:
            raise self._translate(error, what, queue or self.name) from error

    def _translate(self, error: Exception, what: str, queue: str) -> RagfenceError:
        code = error.response.get("Error", {}).get("Code", "") if isinstance(error, ClientError) else ""
        code = code.rpartition(".")[2]
        said = f"cannot {what}, {self.url}: {brief(error)}"
        if code in _MISSING:
            return ValidationError(
                f"there is no queue {queue!r} ({self.url})",
                hint=f"create it (aws sqs create-queue --queue-name {queue}), or check region and account",
            )
        if code in _REFUSED:
            return StoreAuth(
                said,
                hint="these credentials need sqs:GetQueueUrl, GetQueueAttributes, SendMessage, ReceiveMessage, "
                "DeleteMessage and ChangeMessageVisibility on the queue and its dead-letter queue",
            )
        if lacks_credentials(error):
            return StoreAuth(said, hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role")
        if type(error).__name__ == "NoRegionError":
            return ValidationError(said, hint="set AWS_REGION, or add ?region=NAME to the URL")
        return TransportUnavailable(said)


def parse_address(address: str, queue: str = "") -> QueueAddress:
    """Where the queue is that a name, a URL `sqs://` or the URL of a queue names.

    >>> parse_address("sqs://123456789012/orders?region=eu-west-1")[:3]
    ('orders', '123456789012', 'eu-west-1')
    >>> parse_address("https://sqs.eu-west-1.amazonaws.com/123456789012/orders")[:3]
    ('orders', '123456789012', 'eu-west-1')
    """
    scheme, separator, rest = address.partition("://")
    path, _, parameters = rest.partition("?")
    if not separator:
        scheme, path = "sqs", address
    if "@" in path or ":" in (path if scheme == "sqs" else ""):
        raise ValidationError(
            "the URL of a queue must not hold credentials: it appears in messages",
            hint="boto3 finds them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role",
        )
    query = {name: values[-1] for name, values in parse_qs(parameters, keep_blank_values=True).items()}
    unknown = set(query) - {"region", "endpoint_url", "dead_letters"}
    if unknown:
        raise ValidationError(
            f"{show_url(address)}: unknown {', '.join(sorted(unknown))}",
            hint="known: region, endpoint_url, dead_letters",
        )
    region, endpoint_url, queue_url = query.get("region") or None, query.get("endpoint_url") or None, ""
    if scheme in ("http", "https"):
        host, _, path = path.partition("/")
        queue_url = f"{scheme}://{host}/{path}"
        named = re.fullmatch(
            r"sqs(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?", urlsplit(queue_url).hostname or ""
        )
        region = region or (named[1] if named else None)
        endpoint_url = endpoint_url or (None if named else f"{scheme}://{host}")
        path = "/".join(path.split("/")[-2:])
    account, _, name = path.strip("/").rpartition("/")
    name = name or queue
    if scheme not in ("sqs", "http", "https") or (queue and name != queue) or not _NAME.fullmatch(name):
        raise ValidationError(
            f"{show_url(address) if separator else address!r} does not name a queue of SQS",
            hint="sqs://NAME, sqs://ACCOUNT/NAME or the URL of the queue; a name has letters, digits, - and _",
        )
    if account and not re.fullmatch(r"[0-9]{12}", account):
        raise ValidationError(f"{account!r} is not the number of an AWS account", hint="sqs://123456789012/NAME")
    return QueueAddress(name, account, region, endpoint_url, queue_url, query.get("dead_letters", ""))


def _body_text(body: Any) -> str:
    """JSON text in the characters that SQS takes; the others can only be inside of strings."""
    return _NOT_IN_SQS.sub(lambda found: f"\\u{ord(found[0]):04x}", encode_body(body))


def _with_attributes(entry: dict[str, Any], fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(fields, separators=(",", ":"))  # ASCII: every character is one that SQS takes
    kept = {
        name: {part: value[part] for part in ("DataType", "StringValue", "BinaryValue") if part in value}
        for name, value in others.items()
        if name != ATTRIBUTE
    }
    kept = dict(list(kept.items())[:9])
    return entry | {"MessageAttributes": kept | {ATTRIBUTE: {"DataType": "String", "StringValue": text}}}


def _size(entry: Mapping[str, Any]) -> int:
    size = len(entry["MessageBody"].encode())
    for name, value in entry["MessageAttributes"].items():
        content = value.get("StringValue", "").encode() or value.get("BinaryValue", b"")
        size += len(name.encode()) + len(value["DataType"]) + len(content)
    return size


def _batches(entries: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    total = 0
    for entry in entries:
        size = _size(entry)
        if batch and (len(batch) == BATCH or total + size > BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(entry)
        total += size
    if batch:
        yield batch


def _group(fields: Mapping[str, Any], otherwise: str) -> str:
    return _deduplication_id(str(fields.get("group") or fields.get("source_id") or otherwise))


def _deduplication_id(text: str) -> str:
    """The text, or its digest if SQS would not take it."""
    return text if _DEDUPLICATION_ID.fullmatch(text) else f"sha256-{hashlib.sha256(text.encode()).hexdigest()}"


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of our attribute; none in a message of another program."""
    try:
        fields = json.loads(raw.get("MessageAttributes", {}).get(ATTRIBUTE, {}).get("StringValue", "{}"))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _message(raw: Mapping[str, Any], uncounted: int = 0) -> Message:
    system: Mapping[str, str] = raw.get("Attributes", {})
    fields = _fields(raw)
    known: dict[str, Any] = {name: str(fields.get(name, "")) for name in TEXT_FIELDS}
    known["event_id"] = known["event_id"] or system.get("MessageDeduplicationId", "") or raw["MessageId"]
    known["group"] = known["group"] or system.get("MessageGroupId", "")
    others = {
        name: value["StringValue"]
        for name, value in raw.get("MessageAttributes", {}).items()
        if name != ATTRIBUTE and "StringValue" in value
    }
    return Message(
        body=decode_body(raw["Body"]),
        message_id=raw["MessageId"],
        handle=raw["ReceiptHandle"],
        attempt=max(1, int(system.get("ApproximateReceiveCount", 1)) - uncounted),
        sent_ms=int(system["SentTimestamp"]) if "SentTimestamp" in system else None,
        attributes=others,
        **known,
    )


def _letter(raw: Mapping[str, Any]) -> DeadLetter:
    fields = _fields(raw)
    received = raw.get("Attributes", {}).get("ApproximateReceiveCount", "?")
    reason = str(fields.get("reason") or f"moved by the redrive policy of the queue (received {received} times)")
    died_ms = fields.get("died_ms")
    return DeadLetter(_message(raw), reason, died_ms if isinstance(died_ms, int) else None)


def _letter_order(letter: DeadLetter) -> tuple[int, str]:
    return letter.died_ms or letter.message.sent_ms or 0, letter.message.message_id


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
