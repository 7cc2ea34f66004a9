"""`fence.once`: the arguments of the function, and the type of `receipt.result`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, assert_type

from ragfence import Fence, Receipt, Recovered


@dataclass
class Ticket:
    number: int


def functions(fence: Fence) -> None:
    @fence.once(kind="ticket", key=lambda subject, urgent=False: subject)
    def create(subject: str, urgent: bool = False) -> int:
        return len(subject)

    assert_type(create("printer"), Receipt[int])
    assert_type(create("printer", urgent=True).result, int)
    create(7)  # type: ignore[arg-type]
    create("printer", late=True)  # type: ignore[call-arg]
    create()  # type: ignore[call-arg]
    print(create("printer").resultt)  # type: ignore[attr-defined]

    @fence.once(kind="ticket", key=lambda subject: subject, recover=lambda subject: Recovered({"id": "7"}))
    def describe(subject: str) -> dict[str, str]:
        return {"id": subject}

    assert_type(describe("printer").result, dict[str, str])

    @fence.once(kind="mail", key=lambda address: address)
    def send(address: str) -> None: ...

    assert_type(send("a@example.org"), Receipt[None])
    passed: Callable[[str], Receipt[None]] = send
    passed("a@example.org")


def results_that_come_back_as_json(fence: Fence) -> None:
    @fence.once(kind="ticket", key=lambda subject: subject)
    def create(subject: str) -> Ticket:
        return Ticket(len(subject))

    assert_type(create("printer"), Receipt[Any])
    create(subject=7)  # type: ignore[arg-type]

    @fence.once(kind="ticket", key=lambda subject: subject)
    def pair(subject: str) -> tuple[str, int]:
        return subject, 1

    assert_type(pair("printer").result, Any)


class Desk:
    def __init__(self, fence: Fence) -> None:
        self.create = fence.once(kind="ticket", key=lambda subject: subject)(self.number_of)

    def number_of(self, subject: str) -> int:
        return len(subject)


def methods(desk: Desk) -> None:
    assert_type(desk.create("printer"), Receipt[int])


async def coroutines(fence: Fence) -> None:
    @fence.once(kind="ticket", key=lambda subject: subject)
    async def create(subject: str) -> list[int]:
        return [len(subject)]

    call = assert_type(create("printer"), Coroutine[Any, Any, Receipt[list[int]]])
    assert_type((await call).result, list[int])
    await create(7)  # type: ignore[arg-type]

    @fence.once(kind="ticket", key=lambda subject: subject)
    async def ticket(subject: str) -> Ticket:
        return Ticket(len(subject))

    assert_type((await ticket("printer")).result, Any)
