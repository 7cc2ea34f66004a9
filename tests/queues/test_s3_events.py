"""S3 notifications: one key per record, claimed before the object is read. Only one test has the events of moto."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.core.policy import Policy
from ragfence.errors import StoreUnavailable, ValidationError
from ragfence.queues import Consumer, Envelope
from ragfence.queues.s3_events import MAX_RECORDS, changes_of, s3_consumer, sequence_of
from ragfence.queues.sql import SqlTransport
from ragfence.queues.sqs import SqsTransport
from tests import servers
from tests.servers.s3 import sqs_client, sqs_queue

pytestmark = pytest.mark.xdist_group("moto")

AT_ONCE = Backoff(attempts=100, first_s=0.0, longest_s=0.0)
POLICY = Policy.from_mapping({"lease": {"ttl_s": 1.0}})
SEQUENCERS = [f"0055AED6DCD9028{at:X}E5" for at in range(10)]


class Bucket:
    """A bucket of its own, a queue, and what a consumer made of the events."""

    def __init__(self, server: servers.S3Server, fence: ragfence.Fence, queue: SqlTransport) -> None:
        self.client = server.client()
        self.name = f"b-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=self.name)
        self.fence, self.queue = fence, queue
        self.reads: list[str] = []
        self.results: list[tuple[str, Any]] = []
        self.client.meta.events.register("before-call.s3.GetObject", self._note)

    def _note(self, params: dict[str, Any], **_: Any) -> None:
        self.reads.append(params["url_path"].rpartition("/")[2])

    def put(self, key: str, text: str) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def record(self, key: str, at: int | None, event: str = "ObjectCreated:Put", **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"key": quote_plus(key, safe="/"), "size": 1, "eTag": f"etag-{at}", **more}
        if at is not None:
            found["sequencer"] = SEQUENCERS[at]
        return {
            "eventSource": "aws:s3",
            "eventName": event,
            "eventTime": "2026-11-18T12:00:00.000Z",
            "s3": {"bucket": {"name": self.name}, "object": found},
        }

    def send(self, *records: dict[str, Any]) -> None:
        self.queue.send([Envelope(body={"Records": list(records)})])

    def consumer(self, **options: Any) -> Consumer:
        def note(message: Any, result: str, receipt: Any) -> None:
            self.results.append((result, receipt.result if receipt else None))

        options = {"client": self.client, "retry": AT_ONCE, "on_result": note, "max_attempts": 3} | options
        return s3_consumer(self.fence, self.queue, **options)

    def consume(self, **options: Any) -> list[tuple[str, Any]]:
        """Consumes until nothing comes any more, and returns what became of the messages."""
        self.results.clear()
        consumer = self.consumer(**options)
        while consumer.run_once(0.05):
            pass
        return list(self.results)

    def texts(self) -> dict[str, str]:
        documents = self.fence.documents
        return {each.doc_id: documents.snippets(each.doc_id)[0].text for each in documents.heads()}

    def doc_id(self, key: str) -> str:
        return f"s3://{self.name}/{key}"


@pytest.fixture
def bucket(moto_server: servers.S3Server, s3_env: None, tmp_path: Path) -> Iterator[Bucket]:
    with ragfence.open(tmp_path / "store", policy=POLICY) as fence:
        queue = SqlTransport(f"sqlite:///{tmp_path / 'queue.db'}", visibility_s=2.0)
        made = Bucket(moto_server, fence, queue)
        yield made
        made.client.close()
        queue.close()


def test_created_objects_are_ingested_and_removed_ones_retracted(bucket: Bucket) -> None:
    bucket.put("a.md", "first")
    bucket.send(bucket.record("a.md", 0))
    (result,) = bucket.consume()
    doc_id = bucket.doc_id("a.md")
    assert result == ("new", {"outcome": "ingested", "doc_id": doc_id, "decision": "new"})
    assert bucket.texts() == {doc_id: "first"}
    bucket.remove("a.md")
    bucket.send(bucket.record("a.md", 1, "ObjectRemoved:Delete"))
    (result,) = bucket.consume()
    assert result == ("new", {"outcome": "retracted", "doc_id": doc_id, "decision": "new"})
    assert bucket.texts() == {}
    assert bucket.reads == ["a.md"], "a removal that is ordered needs no read"


def test_a_redelivered_event_is_fenced_before_the_object_is_read(bucket: Bucket) -> None:
    bucket.put("a.md", "first")
    bucket.send(bucket.record("a.md", 0))
    bucket.consume()
    bucket.put("a.md", "newer, and its event is not here yet")
    bucket.send(bucket.record("a.md", 0))
    assert [result for result, _ in bucket.consume()] == ["duplicate"]
    assert bucket.reads == ["a.md"]
    assert list(bucket.texts().values()) == ["first"]


def test_an_older_event_that_comes_late_reads_nothing_and_changes_nothing(bucket: Bucket) -> None:
    bucket.put("a.md", "third")
    bucket.send(bucket.record("a.md", 2))
    bucket.consume()
    bucket.send(bucket.record("a.md", 1, "ObjectRemoved:Delete"))
    bucket.send(bucket.record("a.md", 0))
    assert [result for result, _ in bucket.consume()] == ["stale", "stale"]
    assert bucket.reads == ["a.md"]
    assert list(bucket.texts().values()) == ["third"]


def test_each_record_of_a_message_is_fenced_on_its_own(bucket: Bucket) -> None:
    for key in ("a.md", "b.md", "c.md"):
        bucket.put(key, key)
    bucket.send(bucket.record("a.md", 0))
    bucket.consume()
    bucket.send(*(bucket.record(key, 0) for key in ("a.md", "b.md", "c.md")))
    ((result, sealed),) = bucket.consume()
    assert result == "new"
    assert [each["outcome"] for each in sealed["records"]] == ["duplicate", "ingested", "ingested"]
    bucket.send(bucket.record("c.md", 0), bucket.record("b.md", 0))
    ((_, sealed),) = bucket.consume()
    assert [each["outcome"] for each in sealed["records"]] == ["duplicate", "duplicate"]
    assert bucket.reads == ["a.md", "b.md", "c.md"]


def test_a_record_that_fails_does_not_keep_the_others_of_its_message(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a.md", "b.md"):
        bucket.put(key, key)
    ingest, left = ragfence.documents.documents.Documents.ingest, [2]

    def fail(self: Any, document: Any, **options: Any) -> Any:
        if document.doc_id.endswith("a.md") and left[0]:
            left[0] -= 1
            raise StoreUnavailable("not now")
        return ingest(self, document, **options)

    monkeypatch.setattr(ragfence.documents.documents.Documents, "ingest", fail)
    bucket.send(bucket.record("a.md", 0), bucket.record("b.md", 0))
    results = bucket.consume(max_attempts=5)
    assert [result for result, _ in results] == ["retried", "retried", "new"]
    assert [each["outcome"] for each in results[-1][1]["records"]] == ["ingested", "duplicate"]
    assert bucket.reads == ["a.md", "b.md", "a.md", "a.md"]


def test_an_object_that_is_gone_is_sealed_as_gone(bucket: Bucket) -> None:
    bucket.send(bucket.record("a.md", 0))
    assert bucket.consume() == [("new", {"outcome": "gone", "doc_id": bucket.doc_id("a.md")})]
    assert bucket.queue.depth().visible == 0
    rows = bucket.fence.audit.decisions().to_pylist()
    assert {row["source_id"] for row in rows} == {bucket.doc_id("a.md")}


def test_what_has_no_reader_is_sealed_as_skipped_with_the_reason(bucket: Bucket) -> None:
    for key in ("a.zip", "folder/", ".git/config.md", "b.md"):
        bucket.put(key, "x")
        bucket.send(bucket.record(key, 0))
    bucket.send(bucket.record("b.md", 1, "ObjectTagging:Put"))
    sealed = {result["reason"] for _, result in bucket.consume() if result["outcome"] == "skipped"}
    assert sealed == {
        *("no reader for .zip", "a folder, or not below the prefix", "ignored by a pattern"),
        "ObjectTagging:Put changes no content",
    }
    assert list(bucket.texts()) == [bucket.doc_id("b.md")]


def test_content_that_cannot_be_read_is_a_dead_letter_at_once(bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="a.md", Body=b"\xff\xfe\x00binary\x00\x00")
    bucket.put("b.md", "x" * 1000)
    bucket.send(bucket.record("a.md", 0))
    bucket.send(bucket.record("b.md", 0))
    assert [result for result, _ in bucket.consume(limit_bytes=100)] == ["dead", "dead"]
    reasons = sorted(letter.reason for letter in bucket.queue.dead_letters())
    assert "a.md" in reasons[0]
    assert "1,000 bytes, and the limit is 100" in reasons[1]
    assert bucket.reads == ["a.md", "b.md"], "not retried"


def test_the_test_event_of_s3_is_acknowledged_and_other_messages_are_dead_letters(bucket: Bucket) -> None:
    test_event = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": bucket.name, "RequestId": "1"}
    bucket.queue.send([Envelope(body=test_event)])
    assert bucket.consume() == [("new", {"outcome": "skipped", "reason": "a test event of S3"})]
    strange: list[Any] = ["text", 7, None, [], {}, {"Records": []}, {"Records": [{}]}, {"Records": [bucket.name]}]
    strange += [{"Type": "Notification", "Message": "{"}, {"source": "aws.s3"}]
    bucket.queue.send([Envelope(body=body) for body in strange])
    assert {result for result, _ in bucket.consume()} == {"dead"}
    assert {letter.reason for letter in bucket.queue.dead_letters()} == {
        "the key of the message cannot be made: the message is not a notification of S3 [VALIDATION]",
        "the key of the message cannot be made: the message that SNS passed on is not JSON [VALIDATION]",
        f"the key of the message cannot be made: a notification of S3 holds 1 to {MAX_RECORDS} records [VALIDATION]",
    }


def by_sns(body: dict[str, Any]) -> dict[str, Any]:
    return {"Type": "Notification", "MessageId": "1", "TopicArn": "arn", "Message": json.dumps(body)}


def by_event_bridge(body: dict[str, Any]) -> dict[str, Any]:
    (record,) = body["Records"]
    found = record["s3"]["object"]
    key = {**found, "etag": found["eTag"], "key": found["key"].replace("%2B", "+").replace("+", " ", 1)}
    removed = record["eventName"].startswith("ObjectRemoved")
    return {
        "version": "0",
        "source": "aws.s3",
        "detail-type": "Object Deleted" if removed else "Object Created",
        "time": "2026-11-18T12:00:01Z",
        "detail": {"bucket": record["s3"]["bucket"], "object": key, "reason": "PutObject"},
    }


@pytest.mark.parametrize("wrap", [by_sns, by_event_bridge, lambda body: by_sns(by_event_bridge(body))])
def test_an_event_that_comes_by_another_route_is_the_same_event(bucket: Bucket, wrap: Callable[[Any], Any]) -> None:
    key = "a b.md"
    bucket.put(key, "text")
    body = {"Records": [bucket.record(key, 0)]}
    bucket.queue.send([Envelope(body=wrap(body))])
    assert [result for result, _ in bucket.consume()] == ["new"]
    assert list(bucket.texts()) == [bucket.doc_id(key)]
    bucket.queue.send([Envelope(body=body)])
    assert [result for result, _ in bucket.consume()] == ["duplicate"]
    bucket.remove(key)
    removed = {"Records": [bucket.record(key, 1, "ObjectRemoved:Delete")]}
    bucket.queue.send([Envelope(body=wrap(removed)), Envelope(body=removed)])
    assert [result for result, _ in bucket.consume()] == ["new", "duplicate"]
    assert bucket.texts() == {}


@pytest.mark.parametrize("key", ["a b+c.md", "käse/%41 100%.md", "a%2Fb.md", "日本.md"])
def test_keys_are_decoded_as_s3_encodes_them(bucket: Bucket, key: str) -> None:
    bucket.put(key, key)
    bucket.send(bucket.record(key, 0))
    bucket.consume()
    assert bucket.texts() == {bucket.doc_id(key): key}


def test_events_and_a_sync_of_the_same_place_meet_on_the_same_documents(
    bucket: Bucket, moto_server: servers.S3Server
) -> None:
    place = f"s3://{bucket.name}/docs?endpoint_url={moto_server.url}"
    for key in ("docs/a.md", "docs-old/a.md"):
        bucket.put(key, key)
        bucket.send(bucket.record(key, 0))
    outcomes = [result["outcome"] for _, result in bucket.consume(source=place)]
    assert outcomes == ["ingested", "skipped"]
    assert bucket.texts() == {"a.md": "docs/a.md"}
    before = bucket.fence.documents.get("a.md")
    assert bucket.fence.documents.sync(place, prune="scoped").decisions["duplicate"] == 1
    assert bucket.fence.documents.get("a.md") == before, "metadata and source_url are the same, too"

    bucket.put("docs/a.md", "changed")
    bucket.send(bucket.record("docs/a.md", 1))
    bucket.consume(source=place)
    assert bucket.texts() == {"a.md": "changed"}
    bucket.put("docs/a.md", "changed again, and synced first")
    bucket.fence.documents.sync(place, prune="scoped")
    bucket.send(bucket.record("docs/a.md", 2))
    bucket.consume(source=place)
    bucket.remove("docs/a.md")
    bucket.send(bucket.record("docs/a.md", 3, "ObjectRemoved:Delete"))
    bucket.consume(source=place)
    assert bucket.texts() == {}

    bucket.put("docs/b.md", "b")
    bucket.send(bucket.record("docs/b.md", 0))
    bucket.consume(source=place, prefix="x/")
    assert list(bucket.texts()) == ["x/b.md"]


def test_an_attempt_that_died_after_the_document_does_not_conflict_with_a_newer_object(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest, deaths = ragfence.documents.documents.Documents.ingest, [1]

    def die(self: Any, document: Any, **options: Any) -> Any:
        receipt = ingest(self, document, **options)
        if deaths[0]:
            deaths[0] -= 1
            bucket.put("a.md", "newer")
            raise StoreUnavailable("the process dies here")
        return receipt

    bucket.put("a.md", "older")
    bucket.send(bucket.record("a.md", 0))
    monkeypatch.setattr(ragfence.documents.documents.Documents, "ingest", die)
    assert bucket.consume()[-1] == ("new", {"outcome": "superseded", "doc_id": bucket.doc_id("a.md")})
    bucket.send(bucket.record("a.md", 1))
    assert bucket.consume()[-1][1]["outcome"] == "ingested"
    assert list(bucket.texts().values()) == ["newer"]


def test_a_version_that_is_deleted_leaves_the_object_that_is_there(bucket: Bucket) -> None:
    versioning = {"Status": "Enabled"}
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration=versioning)
    bucket.put("a.md", "first")
    second = bucket.client.put_object(Bucket=bucket.name, Key="a.md", Body=b"second")["VersionId"]
    bucket.send(bucket.record("a.md", 1, versionId=second))
    bucket.consume()
    assert list(bucket.texts().values()) == ["second"]
    bucket.client.delete_object(Bucket=bucket.name, Key="a.md", VersionId=second)
    bucket.send(bucket.record("a.md", 2, "ObjectRemoved:Delete", versionId=second))
    bucket.consume()
    assert list(bucket.texts().values()) == ["first"]
    marker = bucket.client.delete_object(Bucket=bucket.name, Key="a.md")["VersionId"]
    bucket.send(bucket.record("a.md", 3, "ObjectRemoved:DeleteMarkerCreated", versionId=marker))
    bucket.consume()
    assert bucket.texts() == {}


def test_notifications_of_a_real_bucket_travel_through_sqs_into_documents(
    bucket: Bucket, moto_server: servers.S3Server
) -> None:
    name = sqs_queue(moto_server)
    with contextlib.closing(sqs_client(moto_server)) as sqs:
        url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events = ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]
    bucket.client.put_bucket_notification_configuration(
        Bucket=bucket.name,
        NotificationConfiguration={"QueueConfigurations": [{"QueueArn": arn, "Events": events}]},
    )
    queue = SqsTransport(name, endpoint_url=moto_server.url)
    consumer = s3_consumer(bucket.fence, queue, client=bucket.client)

    def consume_until(expected: dict[str, str]) -> None:
        give_up_at = time.monotonic() + 20
        while bucket.texts() != expected:
            consumer.run_once(1)
            assert time.monotonic() < give_up_at, (bucket.texts(), consumer.counts, queue.dead_letters())

    bucket.put("a b.md", "one")
    bucket.put("c.md", "two")
    consume_until({bucket.doc_id("a b.md"): "one", bucket.doc_id("c.md"): "two"})
    bucket.put("a b.md", "one, changed")
    consume_until({bucket.doc_id("a b.md"): "one, changed", bucket.doc_id("c.md"): "two"})
    bucket.remove("c.md")
    consume_until({bucket.doc_id("a b.md"): "one, changed"})
    assert consumer.counts["dead"] == 0
    queue.close()


def test_sequencers_of_different_lengths_are_compared_as_text_padded_with_zeros() -> None:
    ordered = ["0055AED6DCD90281E5", "0055AED6DCD90282", "0055AED6DD", "0056", "00FF", "01", "617f08299329d189", "f"]
    assert sorted(set(ordered), key=sequence_of) == ordered
    assert sequence_of("0056") == sequence_of("005600") == sequence_of("0056" + "0" * 14)
    assert sequence_of("00ab") == sequence_of("00AB")
    for bad in ("", "xyz", "0x12", "1" * 17, "0" * 17 + "11", "00" + "1" * 17, "１２"):
        with pytest.raises(ValidationError):
            sequence_of(bad)


hexadecimal = st.text("0123456789abcdefABCDEF", min_size=1, max_size=16)


@given(st.one_of(hexadecimal, hexadecimal.map("00".__add__)), st.one_of(hexadecimal, hexadecimal.map("00".__add__)))
def test_the_order_of_sequences_is_that_of_padded_text(one: str, other: str) -> None:
    """The sequences of two sequencers are never in the opposite order of their padded texts."""
    first, second = sorted([one, other], key=lambda text: text.lower().ljust(18, "0"))
    assert -(2**63) <= sequence_of(first) <= sequence_of(second) < 2**63
    far_apart = int(second.ljust(18, "0"), 16) - int(first.ljust(18, "0"), 16) >= 1 << 9
    assert sequence_of(first) < sequence_of(second) or not far_apart


def test_a_record_with_a_sequencer_that_cannot_be_ordered_is_a_dead_letter(bucket: Bucket) -> None:
    record = bucket.record("a.md", 0)
    record["s3"]["object"]["sequencer"] = "1" * 17
    bucket.send(record)
    assert [result for result, _ in bucket.consume()] == ["dead"]
    (letter,) = bucket.queue.dead_letters()
    assert "does not fit into 64 bits" in letter.reason


def test_records_are_bounded(bucket: Bucket) -> None:
    with pytest.raises(ValidationError, match="1 to 1000 records"):
        changes_of({"Records": [bucket.record("a", 0)] * (MAX_RECORDS + 1)})
    with pytest.raises(ValidationError, match="at most 1024 bytes"):
        changes_of({"Records": [bucket.record("a" * 2000, 0)]})
