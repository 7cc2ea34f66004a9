"""Leases: renewed together and in time, lost when the store says so or cannot be asked, and never inherited."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ragfence
from ragfence import Decision, Fence, Operation, Receipt
from ragfence.core.decisions import LeaseRef
from ragfence.core.layout import NO_TOKEN, State
from ragfence.core.operations import FenceNumber
from ragfence.engine import leases
from ragfence.engine.leases import Heartbeat, Lease
from ragfence.errors import FencedOut, LeaseLost, StoreUnavailable
from ragfence.stores.fences import Lookup
from tests.engine.worlds import BACKENDS, PassingClock, World, Wrapped, elsewhere, eventually
from tests.engine.worlds import world as make_world

SHORT = {"lease": {"ttl_s": 0.2}}
JOB = Operation(kind="job", source_id="j1", tenant="default")


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch, clock=PassingClock()) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("memory", tmp_path, monkeypatch, clock=PassingClock()) as made:
        yield made


class Renewals(Wrapped):
    """Remembers which leases were renewed together."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.batches: list[set[bytes]] = []
        self.kept = 0

    def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
        self.batches.append({ref.key for ref in refs})
        kept = self.inner.renew(refs)
        self.kept += sum(kept)
        return kept


def jobs(count: int) -> list[Operation]:
    return [Operation(kind="job", source_id=f"j{n}", tenant="default") for n in range(count)]


def record_of(fence: Fence, operation: Operation = JOB) -> Any:
    (held,) = fence.inspector.fences.read([Lookup(operation.key)])
    return held.record


def a_lease(ttl_ms: int = 300, max_runtime_ms: int = 60_000, granted_at: float = 0.0) -> Lease:
    ref = LeaseRef(key=JOB.key, token=NO_TOKEN, lease_ms=ttl_ms, epoch=1)
    return Lease(
        ref,
        fence=FenceNumber(1, 1),
        attempt=1,
        takeover=False,
        granted_at=granted_at,
        store_ms=0,
        max_runtime_ms=max_runtime_ms,
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the leases, moved by hand."""
    clock = SimpleNamespace(s=0.0)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


def test_all_leases_of_a_store_are_renewed_in_one_call(world: World) -> None:
    fence = world.open(fences=Renewals, **SHORT)
    store: Renewals = fence.inspector.fences  # type: ignore[assignment]
    with ExitStack() as blocks:
        for operation in jobs(5):
            blocks.enter_context(fence.claim(operation))
        everything = {operation.key for operation in jobs(5)}
        eventually(lambda: store.batches.count(everything) >= 3)


def test_every_store_is_asked_for_its_own_leases(memory: World, tmp_path: Path, monkeypatch: Any) -> None:
    with make_world("solo", tmp_path / "other", monkeypatch, clock=PassingClock()) as other:
        fences = [memory.open(fences=Renewals, **SHORT), other.open(fences=Renewals, **SHORT)]
        stores: list[Any] = [fence.inspector.fences for fence in fences]
        one, two = jobs(2)
        with fences[0].claim(one), fences[1].claim(two):
            eventually(lambda: all(store.batches for store in stores))
        assert stores[0].batches[0] == {one.key}
        assert stores[1].batches[0] == {two.key}


def test_a_lease_is_renewed_for_as_long_as_its_effect_takes(world: World) -> None:
    fence = world.open(fences=Renewals, **SHORT)
    store: Renewals = fence.inspector.fences  # type: ignore[assignment]
    with fence.claim(JOB) as op:
        first_expiry = record_of(fence).when_ms
        eventually(lambda: store.kept >= 4)
        assert record_of(fence).when_ms > first_expiry
        assert record_of(fence).token == op.lease.ref.token
        op.seal()
    assert op.receipt.decision is Decision.NEW


def test_a_lease_is_renewed_after_a_third_of_its_length(now: SimpleNamespace) -> None:
    renewed_at: list[float] = []

    class Store:
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            renewed_at.append(now.s)
            return [True] * len(refs)

    beat, lease = Heartbeat(), a_lease(ttl_ms=300)
    beat.add(Store(), lease)
    now.s = 0.1
    eventually(lambda: renewed_at)
    now.s = 0.2
    eventually(lambda: len(renewed_at) == 2)
    beat.remove(lease)
    assert renewed_at == pytest.approx([0.1, 0.2])


def test_a_lease_counts_from_before_its_renewal_was_sent(now: SimpleNamespace) -> None:
    sent, answer = threading.Event(), threading.Event()

    class Slow:
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            if sent.is_set():
                raise StoreUnavailable("the first answer is all it gets")
            sent.set()
            assert answer.wait(20)
            return [True]

    beat, lease = Heartbeat(), a_lease(ttl_ms=300)
    beat.add(Slow(), lease)
    now.s = 0.1
    assert sent.wait(20)
    now.s = 0.299
    answer.set()
    eventually(lambda: lease._valid_until > 0.3)
    now.s = 0.399
    assert not lease.lost
    now.s = 0.401
    assert lease.lost
    beat.remove(lease)


def test_what_is_sealed_or_given_back_is_renewed_no_more(world: World) -> None:
    fence = world.open(**SHORT)
    one, two = jobs(2)
    with fence.claim(one) as sealed, fence.claim(two) as given_back:
        sealed.seal()
        assert sealed.lease not in leases.heartbeat._held
        assert given_back.lease in leases.heartbeat._held
    assert given_back.lease not in leases.heartbeat._held


def test_a_lease_that_was_taken_over_is_lost_at_the_next_check_and_at_the_seal(world: World) -> None:
    slow, other = world.open(**SHORT), world.open(**SHORT)

    def take_over() -> Receipt:
        with other.claim(JOB) as winner:
            assert winner.lease.takeover
            assert winner.lease.fence > op.lease.fence
            return winner.seal(result="winner")

    with slow.claim(JOB) as op:
        op.lease.check()
        with leases.heartbeat._between_renewals:  # frozen for longer than its lease
            world.clock.advance(201)
            taken = elsewhere(take_over)
        eventually(lambda: op.lease.lost)
        with pytest.raises(LeaseLost, match="expired or was taken over") as lost:
            op.lease.check()
        assert lost.value.key == op.key
        with pytest.raises(FencedOut) as late:
            op.seal(result="zombie")
    assert late.value.receipt == op.receipt == taken


def test_a_store_that_is_down_costs_the_lease_after_its_length_and_not_before(now: SimpleNamespace) -> None:
    asked: list[float] = []

    class Down:
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            asked.append(now.s)
            raise StoreUnavailable("down")

    beat, lease = Heartbeat(), a_lease(ttl_ms=300)
    beat.add(Down(), lease)
    for moment in (0.1, 0.125, 0.15, 0.2, 0.299):
        now.s = moment
        eventually(lambda: asked and asked[-1] == now.s)
        assert not lease.lost
        lease.check()
    now.s = 0.301
    assert lease.lost
    beat.remove(lease)


def test_a_lease_that_nobody_took_while_the_store_was_down_is_good_again(now: SimpleNamespace) -> None:
    class Back:
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            if now.s < 1.0:
                raise StoreUnavailable("down")
            return [True]

    beat, lease = Heartbeat(), a_lease(ttl_ms=300)
    beat.add(Back(), lease)
    now.s = 0.9
    assert lease.lost
    now.s = 1.0
    eventually(lambda: not lease.lost)
    beat.remove(lease)


@pytest.mark.parametrize("error", [StoreUnavailable("down"), RuntimeError("a bug in the store")])
def test_whatever_is_wrong_with_one_store_the_leases_of_others_are_renewed(
    memory: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Broken(Wrapped):
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            raise error

    with make_world("solo", tmp_path / "other", monkeypatch, clock=PassingClock()) as other:
        broken, fine = other.open(fences=Broken, **SHORT), memory.open(fences=Renewals, **SHORT)
        store: Renewals = fine.inspector.fences  # type: ignore[assignment]
        one, two = jobs(2)
        with broken.claim(one) as op, fine.claim(two):
            eventually(lambda: op.lease.lost)
            eventually(lambda: store.kept >= 3)


def test_after_max_runtime_a_lease_is_renewed_no_more(now: SimpleNamespace) -> None:
    renewed_at: list[float] = []

    class Store:
        def renew(self, refs: Sequence[LeaseRef]) -> list[bool]:
            renewed_at.append(now.s)
            return [True]

    beat, lease = Heartbeat(), a_lease(ttl_ms=300, max_runtime_ms=500)
    beat.add(Store(), lease)
    for moment in (0.11, 0.22, 0.33, 0.44):
        now.s = moment
        eventually(lambda: renewed_at and renewed_at[-1] == now.s)
    now.s = 0.55
    eventually(lambda: lease not in beat._held)
    assert renewed_at[-1] == 0.44
    assert not lease.lost
    now.s = 0.75
    assert lease.lost


def test_a_hung_effect_is_taken_over_and_answered_with_the_winners_receipt(world: World) -> None:
    hung, go_on, calls = threading.Event(), threading.Event(), []

    def effect() -> int:
        calls.append(1)
        if len(calls) == 1:
            hung.set()
            assert go_on.wait(60)
            return 1
        return 2

    policy = {"lease": {"ttl_s": 0.1, "max_runtime_s": 0.2}}
    one, two = (world.open(**policy).once(kind="job", key=lambda: "j1")(effect) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one)
        assert hung.wait(20)
        second = two()
        go_on.set()
        assert first.result(20) == second
    assert (second.result, second.flags.takeover) == (2, True)
    assert len(calls) == 2
    assert world.opened[0].audit.check().ok, str(world.opened[0].audit.check())


def in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, or the name of what it raises there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork next to threads, which is the very thing that is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = type(error).__name__
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return answer


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("embedded", tmp_path, monkeypatch, clock=PassingClock()) as made:
        yield made


def test_a_forked_child_has_none_of_its_parents_leases(embedded: World) -> None:
    fence = embedded.open()
    with fence.claim(JOB) as op:
        assert in_a_child(op.lease.check) == "LeaseLost"
        assert in_a_child(lambda: ragfence.current_lease().check()) == "LeaseLost"
        assert in_a_child(lambda: op.seal(result="child")) == "LeaseLost"
        assert in_a_child(lambda: op.lease.inherited) is True
        op.lease.check()
        op.seal(result="parent")
    assert fence.claim(JOB).__enter__().receipt.result == "parent"


def test_a_child_that_leaves_its_parents_block_gives_nothing_back(embedded: World) -> None:
    fence = embedded.open()
    with fence.claim(JOB) as op:
        in_a_child(lambda: op.__exit__(None, None, None))
        in_a_child(lambda: op.__exit__(RuntimeError, RuntimeError("x"), None))
        in_a_child(lambda: op.__exit__(ragfence.errors.TerminalError, ragfence.errors.TerminalError("x"), None))
        record = record_of(fence)
        assert (record.state, record.token) == (State.HELD, op.lease.ref.token)
        op.seal()


def test_an_effect_that_forks_is_sealed_by_the_parent_alone(embedded: World) -> None:
    fence = embedded.open()
    parent = os.getpid()
    reader, writer = os.pipe()

    @fence.once(kind="job", key=lambda: "j1")
    def effect() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if child := os.fork():
                os.waitpid(child, 0)
        return "parent" if os.getpid() == parent else "child"

    try:
        answer = str(effect().result)
    except LeaseLost:
        answer = "lost"
    if os.getpid() != parent:
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert (answer, pipe.read()) == ("parent", "lost")


def test_a_forked_child_renews_its_own_leases(embedded: World) -> None:
    fence = embedded.open(fences=Renewals, **SHORT)
    store: Renewals = fence.inspector.fences  # type: ignore[assignment]
    mine, childs = jobs(2)

    def in_child() -> bool:
        store.batches.clear()
        with fence.claim(childs) as op:
            eventually(lambda: len(store.batches) >= 3)
            op.seal(result="child")
        return all(batch == {childs.key} for batch in store.batches)

    with fence.claim(mine):
        eventually(lambda: store.batches)  # the parent's heartbeat is under way
        assert in_a_child(in_child) is True
        batches = len(store.batches)
        eventually(lambda: len(store.batches) > batches)
    assert fence.claim(childs).__enter__().receipt.result == "child"
