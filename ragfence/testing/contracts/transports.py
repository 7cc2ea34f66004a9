"""What every `Transport` must do, as tests. A transport of your own proves itself with a few lines:

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def transport(self):
            yield MyTransport(visibility_s=self.VISIBILITY_S)       # empty

Call `pytest.register_assert_rewrite("ragfence.testing.contracts.transports")` in your conftest for readable failures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ragfence.errors import QueueFull, ValidationError
from ragfence.queues.transport import MAX_BODY_BYTES, Envelope, Message, Transport


def note(number: int, **fields: Any) -> Envelope:
    return Envelope(body={"number": number}, **fields)


def numbers(messages: list[Message]) -> list[int]:
    return [message.body["number"] for message in messages]


class TransportContract:
    VISIBILITY_S: ClassVar[float] = 2.0
    """of the fixture: the tests wait for it to pass"""
    ORDERS_GROUPS: ClassVar[bool] = True
    """Messages of one group are delivered in order, one at a time."""
    SERVES_TENANTS_IN_TURN: ClassVar[bool] = True
    PROVES_RACES: ClassVar[bool] = True
    """False for a stand-in of a service that is not atomic itself."""
    KEEPS_ATTEMPTS: ClassVar[bool] = True
    """`retry(counted=False)` can take an attempt back."""
    DELAYS_EACH_MESSAGE: ClassVar[bool] = True
    """`send` takes a delay; without this it refuses one, and sends nothing."""

    @pytest.fixture
    def transport(self) -> Any:
        raise NotImplementedError("override the fixture `transport` in the subclass")

    @pytest.fixture
    def small_transport(self) -> Any:
        """The same transport, empty, with a high-water mark of 3 messages."""
        pytest.skip("this transport has no high-water mark")

    @staticmethod
    def all_of(transport: Transport, count: int, within_s: float = 20.0) -> list[Message]:
        found: list[Message] = []
        give_up_at = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < give_up_at:
            found += transport.receive(10, 0.2)
        return found

    @staticmethod
    def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up_at, "did not become true"
            time.sleep(0.05)

    def test_a_message_arrives_as_it_was_sent(self, transport: Transport) -> None:
        sent = Envelope(
            body={"text": 'é "quoted" \n \U0001f600', "list": [1, 2.5, None, True], "empty": {}},
            event_id="event-1",
            source_id="doc/7",
            revision="3",
            index_hash="abc",
            dedupe_key="key-1",
            tenant="acme",
            route="webhooks/cms",
        )
        (message_id,) = transport.send([sent])
        (message,) = self.all_of(transport, 1)
        assert message.message_id == message_id
        assert message.attempt == 1
        for name in ("body", "event_id", "source_id", "revision", "index_hash", "dedupe_key", "tenant", "route"):
            assert getattr(message, name) == getattr(sent, name), name
        assert message.sent_ms is not None

    @pytest.mark.parametrize("body", ["text", 7, None, [], {"a": []}, "", "{", " "])
    def test_any_json_value_is_a_body(self, transport: Transport, body: Any) -> None:
        transport.send([Envelope(body=body)])
        (message,) = self.all_of(transport, 1)
        assert message.body == body

    def test_every_message_has_an_event_id(self, transport: Transport) -> None:
        transport.send([note(1), note(2)])
        found = self.all_of(transport, 2)
        assert len({message.event_id for message in found} - {""}) == 2

    @pytest.mark.parametrize("body", [object(), float("nan"), {"x" * MAX_BODY_BYTES: 1}])
    def test_a_body_that_no_queue_carries_is_refused_and_nothing_is_sent(self, transport: Transport, body: Any) -> None:
        with pytest.raises(ValidationError):
            transport.send([note(1), Envelope(body=body)])
        assert transport.receive(10, 0.3) == []

    @pytest.mark.parametrize("text", ["a\0", "\ud800"])
    @pytest.mark.parametrize("name", ["event_id", "source_id", "tenant", "group"])
    def test_text_that_no_queue_carries_is_refused_and_nothing_is_sent(
        self, transport: Transport, name: str, text: str
    ) -> None:
        """As a mistake of the sender: `TransportUnavailable` would have it sent again forever."""
        wrong: dict[str, str] = {name: text}
        with pytest.raises(ValidationError):
            transport.send([Envelope(body=1), Envelope(body=2, **wrong)])  # type: ignore[arg-type]
        assert transport.receive(10, 0) == []

    def test_nothing_is_nothing(self, transport: Transport) -> None:
        assert transport.send([]) == []
        assert transport.ack([]) == []
        assert transport.extend([]) == []
        assert transport.receive(10, 0) == []

    def test_a_message_that_was_acknowledged_is_gone(self, transport: Transport) -> None:
        transport.send([note(number) for number in range(25)])
        found = self.all_of(transport, 25)
        assert sorted(numbers(found)) == list(range(25))
        for at in range(0, 25, 10):
            assert all(transport.ack(found[at : at + 10]))
        time.sleep(self.VISIBILITY_S + 0.3)
        assert transport.receive(10, 0.3) == []

    def test_a_delivered_message_is_hidden_and_comes_again(self, transport: Transport) -> None:
        transport.send([note(1)])
        (first,) = self.all_of(transport, 1)
        assert transport.receive(10, 0.3) == []
        (again,) = self.all_of(transport, 1)
        assert again.message_id == first.message_id
        assert again.event_id == first.event_id
        assert again.handle != first.handle
        assert again.attempt == 2

    def test_a_delivery_that_expired_can_no_longer_retry_or_bury(self, transport: Transport) -> None:
        transport.send([note(1)])
        (first,) = self.all_of(transport, 1)
        (again,) = self.all_of(transport, 1)
        assert not transport.dead(first, "too late")
        assert not transport.retry(first, 0)
        assert transport.ack([again]) == [True]

    def test_an_extended_message_stays_hidden(self, transport: Transport) -> None:
        transport.send([note(1)])
        (message,) = self.all_of(transport, 1)
        give_up_at = time.monotonic() + 2 * self.VISIBILITY_S
        while time.monotonic() < give_up_at:
            assert transport.extend([message]) == [True]
            assert transport.receive(10, self.VISIBILITY_S / 4) == []
        assert transport.ack([message]) == [True]

    def test_a_message_that_is_retried_comes_again_after_its_delay(self, transport: Transport) -> None:
        transport.send([note(1)])
        (message,) = self.all_of(transport, 1)
        began = time.monotonic()
        assert transport.retry(message, 1.0)
        (again,) = self.all_of(transport, 1)
        assert time.monotonic() - began >= 0.8
        assert (again.message_id, again.attempt) == (message.message_id, 2)
        assert again.body == message.body

    def test_a_retry_without_delay_comes_at_once(self, transport: Transport) -> None:
        transport.send([note(1)])
        (message,) = self.all_of(transport, 1)
        assert transport.retry(message, 0)
        assert numbers(self.all_of(transport, 1, within_s=self.VISIBILITY_S * 0.9)) == [1]

    def test_a_retry_that_does_not_count_leaves_the_attempts_as_they_were(self, transport: Transport) -> None:
        if not self.KEEPS_ATTEMPTS:
            pytest.skip("the service counts deliveries itself")
        transport.send([note(1)])
        for _ in range(4):
            (message,) = self.all_of(transport, 1)
            assert message.attempt == 1
            assert transport.retry(message, 0, counted=False)

    def test_a_delayed_message_comes_later(self, transport: Transport) -> None:
        if not self.DELAYS_EACH_MESSAGE:
            with pytest.raises(ValidationError):
                transport.send([note(1)], delay_s=1.0)
            assert transport.receive(10, 0.3) == []
            return
        began = time.monotonic()
        transport.send([note(1)], delay_s=1.0)
        self.all_of(transport, 1)
        assert time.monotonic() - began >= 0.8

    def test_dead_letters_are_kept_with_their_reason_until_somebody_decides(self, transport: Transport) -> None:
        transport.send([note(number) for number in range(3)])
        for message in self.all_of(transport, 3):
            assert transport.dead(message, f"reason {message.body['number']}")
        assert transport.receive(10, 0.3) == []
        self.until(lambda: len(transport.dead_letters()) == 3)
        letters = transport.dead_letters()
        assert {letter.message.body["number"]: letter.reason for letter in letters} == {
            number: f"reason {number}" for number in range(3)
        }
        first, second, third = (letter.message.message_id for letter in letters)
        assert transport.replay_dead([second]) == 1
        (again,) = self.all_of(transport, 1)
        assert again.event_id == letters[1].message.event_id
        assert again.attempt == 1
        assert transport.ack([again]) == [True]
        assert transport.drop_dead([first, "unknown"]) == 1
        self.until(lambda: [letter.message.message_id for letter in transport.dead_letters()] == [third])

    def test_dead_letters_are_listed_page_by_page(self, transport: Transport) -> None:
        transport.send([note(number) for number in range(5)])
        for message in self.all_of(transport, 5):
            transport.dead(message, "r")
        self.until(lambda: len(transport.dead_letters()) == 5)
        seen: list[str] = []
        while page := transport.dead_letters(limit=2, after=seen[-1] if seen else ""):
            seen += [letter.message.message_id for letter in page]
            assert len(seen) <= 5
        assert len(set(seen)) == 5

    def test_the_depth_counts_what_waits_what_is_delivered_and_what_is_dead(self, transport: Transport) -> None:
        transport.send([note(number) for number in range(6)])
        found = self.all_of(transport, 6)
        transport.ack(found[:1])
        transport.dead(found[1], "r")
        transport.retry(found[2], 0)
        for message in found[3:]:
            transport.extend([message], 30)
        self.until(lambda: (lambda d: (d.visible, d.in_flight, d.dead) == (1, 3, 1))(transport.depth()))

    def test_messages_of_one_group_come_in_their_order_and_one_at_a_time(self, transport: Transport) -> None:
        if not self.ORDERS_GROUPS:
            pytest.skip("this transport does not order groups")
        transport.send([note(number, group="doc-1") for number in range(4)])
        order: list[int] = []
        while len(order) < 4:
            found = self.all_of(transport, 1)
            assert len(found) == 1
            assert transport.receive(10, 0.1) == []
            order += numbers(found)
            assert transport.ack(found) == [True]
        assert order == [0, 1, 2, 3]

    def test_a_retried_message_holds_up_its_group_and_no_other(self, transport: Transport) -> None:
        if not self.ORDERS_GROUPS:
            pytest.skip("this transport does not order groups")
        transport.send([note(1, group="a"), note(2, group="a"), note(3, group="b")])
        first = {message.body["number"]: message for message in self.all_of(transport, 2)}
        assert set(first) == {1, 3}
        assert transport.retry(first[1], 0.5)
        (again,) = self.all_of(transport, 1)
        assert again.body["number"] == 1

    def test_a_tenant_with_many_messages_does_not_hold_up_another(self, transport: Transport) -> None:
        if not self.SERVES_TENANTS_IN_TURN:
            pytest.skip("this transport has one lane")
        transport.send([note(number, tenant="many") for number in range(100)])
        transport.send([note(1000, tenant="few")])
        seen: list[int] = []
        for _ in range(3):
            found = transport.receive(10, 1)
            seen += numbers(found)
            transport.ack(found)
        assert 1000 in seen
        assert len(seen) == 30

    def test_a_flood_of_one_tenant_leaves_every_round_room_for_the_others(self, transport: Transport) -> None:
        if not self.SERVES_TENANTS_IN_TURN:
            pytest.skip("this transport has one lane")
        for at in range(0, 200, 50):
            transport.send([note(number, tenant="many") for number in range(at, at + 50)])
        others = [f"few-{number}" for number in range(4)]
        for tenant in others:
            transport.send([note(1000 + number, tenant=tenant) for number in range(3)])
        seen: list[str] = []
        for _ in range(4):
            found = transport.receive(10, 1)
            transport.ack(found)
            seen += [message.tenant for message in found]
        assert all(seen.count(tenant) == 3 for tenant in others)
        assert len(seen) == 40, "what one tenant does not use is left to the others"

    def test_above_its_high_water_mark_a_queue_takes_nothing_and_says_when_to_try_again(
        self, small_transport: Transport
    ) -> None:
        small_transport.send([note(1), note(2)])
        with pytest.raises(QueueFull) as full:
            small_transport.send([note(3), note(4)])
        assert full.value.retry_after_ms
        assert small_transport.depth().visible == 2
        found = self.all_of(small_transport, 2)
        small_transport.ack(found)
        small_transport.send([note(3), note(4)])
        assert sorted(numbers(self.all_of(small_transport, 2))) == [3, 4]

    def test_two_consumers_never_hold_the_same_message(self, transport: Transport) -> None:
        if not self.PROVES_RACES:
            pytest.skip("a stand-in: no race is proven on it")
        count = 200
        for at in range(0, count, 10):
            transport.send([note(number) for number in range(at, at + 10)])
        seen: list[int] = []
        lock = threading.Lock()
        failures: list[BaseException] = []

        def consume() -> None:
            try:
                while found := transport.receive(7, 0.5):
                    assert all(transport.ack(found))
                    with lock:
                        seen.extend(numbers(found))
            except BaseException as error:  # noqa: BLE001  # shown below
                failures.append(error)

        threads = [threading.Thread(target=consume) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sorted(seen) == list(range(count))
