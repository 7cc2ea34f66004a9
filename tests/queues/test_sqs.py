"""What `SqsTransport` does beyond the contract of transports. Races are not proven here: moto is a stand-in."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from ragfence.errors import QueueFull, RagfenceError, StoreAuth, TransportUnavailable, ValidationError
from ragfence.queues import Envelope, open_transport
from ragfence.queues.sqs import ATTRIBUTE, BATCH_BYTES, SqsTransport, parse_address
from ragfence.queues.transport import Message
from tests import servers
from tests.servers.s3 import sqs_client, sqs_queue

pytestmark = pytest.mark.xdist_group("moto")


@pytest.fixture
def server(moto_server: servers.S3Server, s3_env: None) -> servers.S3Server:
    return moto_server


@pytest.fixture
def client(server: servers.S3Server) -> Iterator[Any]:
    with contextlib.closing(sqs_client(server)) as client:
        yield client


def opened(server: servers.S3Server, name: str, **options: Any) -> SqsTransport:
    return SqsTransport(name, endpoint_url=server.url, **options)


def numbered(count: int, **fields: Any) -> list[Envelope]:
    return [Envelope(body=number, event_id=f"e{number}", **fields) for number in range(count)]


def drop_entries(
    client: Any, operation: str, dropped: set[str], *, code: str = "InternalError", times: int = 99
) -> None:
    """SQS takes a batch without some of its entries, and reports those as failed."""
    left = [times]

    def before(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        body = json.loads(params["body"])
        entries = [each for each in body["Entries"] if left[0] <= 0 or each["Id"] not in dropped]
        context["dropped"] = [each["Id"] for each in body["Entries"] if each not in entries]
        params["body"] = json.dumps({**body, "Entries": entries}).encode()

    def after(parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        left[0] -= 1
        failed = [{"Id": each, "Code": code, "SenderFault": False, "Message": ""} for each in context["dropped"]]
        parsed["Failed"] = [*parsed.get("Failed", []), *failed]

    client.meta.events.register(f"before-call.sqs.{operation}", before)
    client.meta.events.register(f"after-call.sqs.{operation}", after)


def test_messages_that_sqs_did_not_take_are_named_and_the_others_arrive(server: servers.S3Server, client: Any) -> None:
    name = sqs_queue(server)
    drop_entries(client, "SendMessageBatch", {"2", "5"})
    queue = SqsTransport(name, client=client)
    with pytest.raises(TransportUnavailable) as caught:
        queue.send(numbered(8))
    assert caught.value.details["unsent"] == ["e2", "e5"]
    found = opened(server, name).receive(10, 1)
    assert sorted(message.event_id for message in found) == ["e0", "e1", "e3", "e4", "e6", "e7"]


def test_what_sqs_failed_to_take_once_is_sent_again(server: servers.S3Server, client: Any) -> None:
    name = sqs_queue(server)
    drop_entries(client, "SendMessageBatch", {"0"}, times=1)
    ids = SqsTransport(name, client=client).send(numbered(3))
    found = opened(server, name).receive(10, 1)
    assert {message.event_id: message.message_id for message in found} == {f"e{at}": ids[at] for at in range(3)}


def test_batches_after_a_failed_one_are_unsent(server: servers.S3Server, client: Any) -> None:
    drop_entries(client, "SendMessageBatch", {"3"})
    with pytest.raises(TransportUnavailable) as caught:
        SqsTransport(sqs_queue(server), client=client).send(numbered(25))
    assert caught.value.details["unsent"] == ["e3", *(f"e{at}" for at in range(10, 25))]


def test_a_delete_that_failed_in_part_is_an_error_and_the_rest_is_deleted(
    server: servers.S3Server, client: Any
) -> None:
    name = sqs_queue(server)
    drop_entries(client, "DeleteMessageBatch", {"1"})
    queue = SqsTransport(name, client=client, visibility_s=1)
    queue.send(numbered(3))
    found = queue.receive(10, 1)
    with pytest.raises(TransportUnavailable) as caught:
        queue.ack(found)
    assert caught.value.details["message_ids"] == [found[1].message_id]
    (again,) = opened(server, name).receive(10, 3)
    assert again.message_id == found[1].message_id


def test_a_handle_that_sqs_does_not_know_is_an_expired_delivery(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server))
    stranger = Message(body=1, message_id="m", handle="not-a-handle")
    assert queue.extend([stranger]) == [False]
    assert not queue.retry(stranger, 1)
    assert not queue.dead(stranger, "r")
    assert queue.dead_letters() == []


def test_a_large_send_is_split_by_bytes(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server))
    queue.send([Envelope(body="x" * 100_000, source_id=str(at)) for at in range(5)])
    assert sum(len(queue.receive(10, 1)) for _ in range(2)) == 5


def test_attributes_count_against_the_size_of_a_message(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server))
    with pytest.raises(ValidationError, match="with its attributes"):
        queue.send([Envelope(body="x" * (BATCH_BYTES - 100), source_id="s" * 200)])
    assert queue.receive(1, 0) == []


def test_every_field_travels_in_one_attribute_and_those_of_others_are_kept(
    server: servers.S3Server, client: Any
) -> None:
    name = sqs_queue(server)
    queue = opened(server, name)
    url = client.get_queue_url(QueueName=name)["QueueUrl"]
    queue.send([Envelope(body="\uffff", source_id="a\x00b", tenant="t", group="g", route="r", revision="2")])
    (raw,) = client.receive_message(QueueUrl=url, MessageAttributeNames=["All"], VisibilityTimeout=0)["Messages"]
    assert set(raw["MessageAttributes"]) == {ATTRIBUTE}
    (message,) = queue.receive(1, 1)
    assert (message.body, message.source_id, message.tenant, message.group) == ("\uffff", "a\x00b", "t", "g")
    queue.ack([message])

    theirs = {"trace": {"DataType": "String", "StringValue": "1-2"}}
    client.send_message(QueueUrl=url, MessageBody="plain text", MessageAttributes=theirs)
    (message,) = queue.receive(1, 1)
    assert (message.body, message.event_id, message.attributes) == ("plain text", message.message_id, {"trace": "1-2"})
    assert queue.dead(message, "not ours")
    (letter,) = queue.dead_letters()
    assert (letter.message.body, letter.message.attributes, letter.reason) == (
        "plain text",
        {"trace": "1-2"},
        "not ours",
    )
    assert letter.died_ms is not None


def test_the_redrive_policy_buries_what_no_consumer_settles(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server, max_receives=2), visibility_s=1)
    queue.send(numbered(1))
    deliveries = 0
    give_up_at = time.monotonic() + 20
    while not queue.depth().dead:
        deliveries += len(queue.receive(1, 1))
        assert time.monotonic() < give_up_at
    assert deliveries == 2
    (letter,) = queue.dead_letters()
    assert (letter.message.event_id, letter.died_ms) == ("e0", None)
    assert "redrive policy" in letter.reason
    assert queue.replay_dead([letter.message.message_id]) == 1
    (again,) = queue.receive(1, 2)
    assert (again.event_id, again.attempt) == ("e0", 1)


def test_a_queue_without_a_place_for_dead_letters_takes_messages_and_gives_none(server: servers.S3Server) -> None:
    name = sqs_queue(server, dead_letters=False)
    queue = opened(server, name)
    queue.send(numbered(1))
    for use in (lambda: queue.receive(1, 0), queue.depth, queue.dead_letters):
        with pytest.raises(ValidationError, match="no redrive policy"):
            use()
    other = sqs_queue(server, dead_letters=False)
    named = opened(server, name, dead_letters=other)
    (message,) = named.receive(1, 1)
    assert named.dead(message, "r")
    assert [letter.reason for letter in named.dead_letters()] == ["r"]


def test_another_process_counts_the_deliveries_that_this_one_did_not(server: servers.S3Server) -> None:
    """The limit of `retry(counted=False)` on SQS, as documented."""
    name = sqs_queue(server)
    queue, other = opened(server, name), opened(server, name)
    queue.send(numbered(1))
    for _ in range(2):
        (message,) = queue.receive(1, 1)
        assert message.attempt == 1
        assert queue.retry(message, 0, counted=False)
    (message,) = other.receive(1, 1)
    assert message.attempt == 3


def test_a_delivery_cannot_outlive_twelve_hours(server: servers.S3Server, client: Any) -> None:
    asked: list[int] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        asked.extend(each["VisibilityTimeout"] for each in json.loads(params["body"])["Entries"])

    client.meta.events.register("before-call.sqs.ChangeMessageVisibilityBatch", note)
    queue = SqsTransport(sqs_queue(server), client=client, visibility_s=600)
    queue.send(numbered(1))
    (message,) = queue.receive(1, 1)
    delivery = queue._deliveries[message.handle]
    delivery.received_at -= 43_000  # it has been held for almost twelve hours
    assert queue.extend([message]) == [True]
    delivery.received_at -= 200
    assert queue.extend([message]) == [False]
    assert len(asked) == 1
    assert 190 <= asked[0] <= 199


def test_delays_beyond_fifteen_minutes_are_refused_and_nothing_is_sent(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server))
    with pytest.raises(ValidationError, match="at most 900 s"):
        queue.send(numbered(1), delay_s=901)
    assert queue.receive(1, 0) == []
    queue.send(numbered(1))
    (message,) = queue.receive(1, 1)
    assert queue.retry(message, 3600), "a retry may wait longer than a send"


def test_an_event_that_is_sent_twice_to_a_fifo_queue_arrives_once(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server, ".fifo"))
    long = "é" * 200
    for event_id in ("e1", "e1", long, long):
        queue.send([Envelope(body=1, event_id=event_id)])
    assert sorted(message.event_id for message in queue.receive(10, 1)) == ["e1", long]


def test_a_source_is_a_group_of_a_fifo_queue(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server, ".fifo"))
    queue.send([Envelope(body=at, source_id=source) for at, source in enumerate("aab")])
    assert sorted(message.body for message in queue.receive(10, 1)) == [0, 2]


def test_above_the_high_water_mark_nothing_is_sent(server: servers.S3Server) -> None:
    queue = opened(server, sqs_queue(server), high_water=3)
    queue.send(numbered(2))
    with pytest.raises(QueueFull):
        queue.send(numbered(2))
    assert queue.depth().visible == 2


def test_queues_are_opened_by_url(server: servers.S3Server, client: Any) -> None:
    name = sqs_queue(server)
    queue_url = client.get_queue_url(QueueName=name)["QueueUrl"]
    opened(server, name).send(numbered(1))
    urls = [
        f"sqs://{name}?endpoint_url={server.url}",
        f"sqs://?queue={name}&endpoint_url={server.url}",
        f"sqs://123456789012/{name}?region={server.region}&endpoint_url={server.url}",
        queue_url,
    ]
    for url in urls:
        queue = open_transport(url)
        assert (queue.name, queue.visibility_s, queue.depth().visible) == (name, 30.0, 1)
        assert queue.url.startswith("sqs://")
        queue.close()
        with pytest.raises(TransportUnavailable, match="closed"):
            queue.depth()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sqs://key:secret@orders", "must not hold credentials"),
        ("https://key:secret@sqs.eu-west-1.amazonaws.com/123456789012/orders", "must not hold credentials"),
        ("sqs://orders?endpoint_url=http://key:secret@localhost", "credentials do not belong"),
        ("sqs://orders?regoin=eu-west-1", "unknown regoin"),
        ("sqs://", "does not name a queue"),
        ("sqs://a/b/c", "not the number"),
        ("sqs://orders.txt", "does not name a queue"),
        ("sqs://orders?dead_letters=orders-dead.fifo", "must be FIFO if"),
    ],
)
def test_urls_that_name_no_queue_are_refused_without_their_secrets(url: str, text: str) -> None:
    with pytest.raises(ValidationError, match=text) as caught:
        SqsTransport(url)
    assert "secret" not in str(caught.value)


def test_the_url_of_a_queue_names_region_and_endpoint() -> None:
    place = parse_address("http://localhost:4566/queue/us-east-1/000000000000/orders")
    assert place.name == "orders"
    assert place.endpoint_url == "http://localhost:4566"
    assert place.queue_url == "http://localhost:4566/queue/us-east-1/000000000000/orders"
    assert parse_address("https://sqs.eu-west-1.amazonaws.com/123456789012/orders").endpoint_url is None


def test_faults_are_typed_and_show_no_credentials(server: servers.S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(**options: Any) -> RagfenceError:
        with pytest.raises(RagfenceError) as caught:
            SqsTransport(f"missing-{uuid.uuid4().hex}", **options).send(numbered(1))
        assert server.secret_key not in str(caught.value)
        return caught.value

    missing = fault(endpoint_url=server.url)
    assert isinstance(missing, ValidationError)
    assert "there is no queue" in missing.message
    (port,) = servers.free_ports(1)
    assert isinstance(fault(endpoint_url=f"http://127.0.0.1:{port}"), TransportUnavailable)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert isinstance(fault(endpoint_url=server.url), StoreAuth)
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert "region" in fault(endpoint_url=server.url).hint
