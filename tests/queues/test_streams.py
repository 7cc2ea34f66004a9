"""What `RedisStreamTransport` does beyond the contract of transports."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ragfence.errors import QueueFull, TransportUnavailable, ValidationError
from ragfence.queues import Envelope, open_transport
from ragfence.queues.streams import RedisStreamTransport
from ragfence.stores.checkups.check import Level
from tests import servers


@pytest.fixture
def client(valkey_server: servers.RedisServer) -> Iterator[Any]:
    with valkey_server.client() as client:
        yield client


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def numbered(count: int, **fields: Any) -> list[Envelope]:
    return [Envelope(body=number, **fields) for number in range(count)]


def test_another_consumer_with_the_same_entry_cannot_settle_a_delivery(client: Any, name: str) -> None:
    first = RedisStreamTransport(client, name, consumer="a", visibility_s=0.2)
    second = RedisStreamTransport(client, name, consumer="b", visibility_s=0.2)
    first.send(numbered(1))
    (old,) = first.receive(1, 1)
    time.sleep(0.3)
    (new,) = second.receive(1, 1)
    assert first.ack([old]) == [False]
    assert first.extend([old]) == [False]
    assert second.ack([new]) == [True]


def test_the_same_consumer_cannot_settle_its_own_earlier_delivery(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name, consumer="a", visibility_s=0.2)
    queue.send(numbered(1))
    (old,) = queue.receive(1, 1)
    time.sleep(0.3)
    (new,) = queue.receive(1, 1)
    assert queue.ack([old]) == [False]
    assert queue.ack([new]) == [True]


def test_a_delivery_may_be_extended_beyond_the_visibility_of_the_queue(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name, visibility_s=0.2)
    queue.send(numbered(1))
    (message,) = queue.receive(1, 1)
    assert queue.extend([message], 1.5) == [True]
    assert queue.receive(1, 0.8) == []
    assert queue.extend([message], 0.0) == [True]
    (again,) = queue.receive(1, 1)
    assert again.attempt == 2


def test_a_delayed_message_enters_its_lane_once(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name)
    queue.send(numbered(1), delay_s=0.1)
    (message,) = queue.receive(1, 2)
    assert queue.retry(message, 0.1)
    (message,) = queue.receive(1, 2)
    assert queue.receive(10, 0.3) == []
    assert queue.ack([message]) == [True]
    assert queue.receive(10, 0.3) == []


def test_above_the_high_water_mark_nothing_is_sent(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name, high_water=3)
    queue.send(numbered(2))
    with pytest.raises(QueueFull) as refused:
        queue.send(numbered(2))
    assert refused.value.retry_after_ms
    assert queue.depth().visible == 2


def test_a_lane_without_messages_leaves_no_key_behind(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name)
    for tenant in ("a", "b"):
        queue.send(numbered(1, tenant=tenant))
    assert queue.ack(queue.receive(10, 1)) == [True, True]
    assert queue.receive(1, 0) == []
    assert client.keys(f"rfq{{{name}}}:lane*") == []


def test_scripts_that_the_server_forgot_are_loaded_again(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name)
    queue.send(numbered(1))
    client.script_flush()
    assert len(queue.receive(1, 1)) == 1


def test_a_queue_has_one_consumer_group(client: Any, name: str) -> None:
    RedisStreamTransport(client, name).send(numbered(1))
    with pytest.raises(ValidationError, match="another consumer group"):
        RedisStreamTransport(client, name, group="other").receive(1, 0)


def test_a_queue_is_durable_only_if_its_redis_is(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name)
    check = queue.check_durability()
    assert check.level is Level.FAIL
    assert "appendfsync always" in check.advice


def test_a_queue_is_durable_if_every_write_reaches_the_disk(name: str) -> None:
    with servers.valkey(appendonly=True, args=("--appendfsync", "always")) as server:
        assert RedisStreamTransport(server.url, name).check_durability().level is Level.OK


def test_replicas_that_do_not_answer_leave_the_outcome_open(client: Any, name: str) -> None:
    queue = RedisStreamTransport(client, name, wait_replicas=1)
    with pytest.raises(TransportUnavailable, match="0 of 1 replicas"):
        queue.send(numbered(1))


def test_a_url_is_shown_without_its_password(valkey_server: servers.RedisServer) -> None:
    assert "secret" not in RedisStreamTransport("redis://:secret@127.0.0.1:1/0").url


@pytest.mark.parametrize("name", ["", "a{b", "a}b", "x" * 129])
def test_a_name_that_would_leave_its_slot_is_refused(client: Any, name: str) -> None:
    with pytest.raises(ValidationError):
        RedisStreamTransport(client, name)


def test_a_url_opens_its_queue(valkey_server: servers.RedisServer, name: str) -> None:
    queue = open_transport(f"{valkey_server.url}?queue={name}", visibility_s=7)
    assert isinstance(queue, RedisStreamTransport)
    assert (queue.name, queue.visibility_s) == (name, 7)


@pytest.mark.parametrize("url", ["kafka://host/topic", "queue.db", ""])
def test_an_unknown_kind_of_queue_is_refused_with_those_that_are_known(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        open_transport(url)
    assert "redis://" in str(refused.value)


def test_the_documented_rights_are_those_of_the_commands_that_are_used() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
    (rights,) = re.findall(r"^ACL SETUSER ragfence-queue (.+)$", page, re.M)
    scripts = files("ragfence.queues") / "lua"
    used = {"evalsha", "script|load", "ping", "xread", "config|get"}
    for name in ("base", "send", "receive", "settle", "dead", "depth"):
        used.update(
            command.lower() for command in re.findall(r"call\('([A-Z]+)'", (scripts / f"{name}.lua").read_text())
        )
    assert {right[1:] for right in rights.split() if right.startswith("+")} == (used - {"xgroup"}) | {"xgroup|create"}


def test_a_url_may_ask_for_replicas(valkey_server: servers.RedisServer, name: str) -> None:
    with pytest.raises(ValidationError, match="is not a number"):
        open_transport(f"{valkey_server.url}?queue={name}&wait_replicas=all")
    queue = open_transport(f"{valkey_server.url}?queue={name}&wait_replicas=1")
    with pytest.raises(TransportUnavailable, match="0 of 1 replicas"):
        queue.send(numbered(1))
    queue.close()
