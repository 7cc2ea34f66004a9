"""Epochs that replace segments, and delete the old ones, while everything else goes on.

Compactions run among writers, kills, lost replies, flushes, restarts, failovers to servers that lag behind and writes
that land late. The promises are those of `tests.machine`: nothing acknowledged is lost, nobody is answered with other
ids, and what happened has an order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ragfence.core.operations import FenceNumber
from ragfence.documents.log import Detail, Positions
from ragfence.documents.parquet import ParquetCodec
from ragfence.documents.rewrite import LogRewrite, Plan, new_batch
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import LOCK_MS, Hydrator, Keep, TenantStores
from ragfence.engine.segment_log import LogRow, PlainCodec, SegmentLoader
from ragfence.errors import NotReady, StoreUnavailable
from ragfence.testing.memory import MemoryFences, MemoryObjects
from tests.machine.documents import DocumentWorld
from tests.machine.drive import _ask_again, _drive
from tests.machine.lineages import MemoryLineages
from tests.machine.test_scenarios import finish, run_until
from tests.machine.world import TENANT, Worker

EXAMPLES = int(os.environ.get("RAGFENCE_EXAMPLES", "2000")) // 8


class RewritingWorld(DocumentWorld):
    """One source whose log is compacted now and then."""

    def compact(self) -> Worker:
        def work(worker: Worker) -> None:
            stores = self.stores_of(worker)
            rewriting = LogRewrite(stores, sleep=lambda _: self._breathe(worker))
            try:
                rewriting.run(lambda: self._plan(stores.objects, stores.epochs), "compacted")
                rewriting.collect_void()
            except (StoreUnavailable, NotReady):
                pass  # somebody tries again some day

        return self.spawn(work)

    def _plan(self, objects: Any, epochs: Epochs) -> Plan | None:
        def rewrite(epoch: int, segments: list[str], keep: Keep) -> list[str]:
            rows = survivors(SegmentLoader(objects, PlainCodec()).rows(segments))
            keep()
            name = epochs.segment_name(epoch, new_batch().hex())
            objects.put_new(name, PlainCodec().encode(rows))
            return [name]

        return rewrite if len(epochs.truth()) > 1 else None


def survivors(rows: Any) -> list[LogRow]:
    """The newest row of every key."""
    newest: dict[bytes, LogRow] = {}
    for row in sorted(rows, key=lambda row: row.fence):
        newest[row.key] = row
    return list(newest.values())


def drive(seed: int) -> None:
    dice = random.Random(seed)
    sequenced = dice.random() < 0.5
    world = RewritingWorld(MemoryLineages(), sequenced=sequenced)
    wanted: list[Callable[[], Any]] = []
    for _ in range(dice.randint(4, 8)):
        if dice.random() < 0.35:
            wanted.append(world.compact)
        elif sequenced:
            value, sequence = dice.choice("ABC"), dice.randint(1, 5)
            wanted.append(lambda value=value, sequence=sequence: world.ingest(value, sequence))
        else:
            value = dice.choice(["A", "A", "B", "B", None])  # type: ignore[assignment]
            wanted.append(lambda value=value: world.ingest(value, None))
    try:
        _drive(world, dice, wanted, read=None if sequenced else world.read_head)
        _ask_again(world)
        world.check()
    except AssertionError as broken:
        raise AssertionError(f"rewriting, seed {seed}: {broken}") from broken


def test_whatever_is_compacted_killed_forgotten_and_raced_nothing_acknowledged_is_lost() -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def explore(seed: int) -> None:
        drive(seed)

    explore()


def of(world: RewritingWorld) -> LogRewrite:
    """Of somebody who looks on."""
    worker = Worker(0, world.lineages.primary)
    stores = replace(world.stores_of(worker), objects=world.objects, epochs=Epochs(TENANT, world.objects))
    return LogRewrite(stores)


def ended(world: RewritingWorld, worker: Worker) -> None:
    for _ in range(5_000):
        if worker.done:
            return
        world.step(worker)
    raise AssertionError("stuck")


def readable(world: RewritingWorld) -> bool:
    """Every segment that counts is there: `truth` reads them all."""
    return world.truth() is not None


def world_with_a_log() -> RewritingWorld:
    world = RewritingWorld(MemoryLineages(), sequenced=False)
    for value in "CB":
        assert finish(world, world.ingest(value, None)) == "sealed"
    return world


def test_a_move_that_was_compacted_is_not_made_again_after_a_newer_one() -> None:
    """Readers saw A, then B was acknowledged: the slow writer of A must not bring it back."""
    world = world_with_a_log()
    slow = world.ingest("A", None)
    run_until(world, slow, "seal")
    ended(world, world.compact())
    assert world.truth()[0] == "A"
    newer = world.ingest("B", None)
    ended(world, newer)
    ended(world, slow)
    assert world.truth()[0] == "B"
    world.check()


def test_nothing_is_deleted_that_an_epoch_begun_elsewhere_may_go_back_to() -> None:
    """Two servers, both believed to be the primary: the compaction ends on the old one, while a hydration on the new
    one has read the list that the compaction replaces, and is about to write it down again."""
    world = world_with_a_log()
    replica = world.lineages.snapshot()
    compaction = world.compact()
    run_until(world, compaction, "put_new", times=3)  # begun, the new segment, and now the list
    world.lineages.fail_over(replica)
    world.observe()
    hydration = world.ingest("A", None)
    run_until(world, hydration, "put_new", times=2)  # begun, and now a list of the old segments
    old = Epochs(TENANT, world.objects).truth()
    for _ in range(60):
        world.step(compaction)
    assert Epochs(TENANT, world.objects).truth() != old, "the compaction is complete, for those who do not know better"
    assert of(world).collect_void().objects == 0
    ended(world, hydration)
    assert readable(world)
    assert world.truth()[0] == "A"
    ended(world, compaction)
    assert len(Epochs(TENANT, world.objects).truth()) == 1, "it saw that its work was lost, and did it again"
    assert readable(world)
    assert world.truth()[0] == "A"
    world.lineages.flush()
    again = world.ingest("A", None)
    ended(world, again)
    assert world.events[-1].outcome == "duplicate"
    world.check()


def test_segments_of_an_epoch_that_was_abandoned_are_void_and_collected() -> None:
    world = world_with_a_log()
    compaction = world.compact()
    run_until(world, compaction, "put_new", times=3)
    written = {entry.name for entry in world.objects.list(f"{TENANT}/segments/{2:020d}/")}
    world.kill(compaction)
    world.late.clear()
    assert len(written) == 1
    assert of(world).collect_void().objects == 0, "it may still be completed"
    world.lineages.flush()
    ended(world, world.ingest("A", None))
    assert of(world).collect_void().objects == 1
    assert world.truth()[0] == "A"
    assert not written & {entry.name for entry in world.objects.list(f"{TENANT}/segments/")}
    world.check()


def test_a_slow_hydration_whose_segments_were_rewritten_and_deleted_gives_way() -> None:
    world = world_with_a_log()
    world.lineages.flush()
    slow = world.ingest("A", None)
    run_until(world, slow, "get", times=3)  # the list it starts from, and now the second of two segments
    world.lineages.clock.advance(LOCK_MS + 1)
    ended(world, world.compact())
    assert finish(world, slow) == "sealed"
    assert world.truth()[0] == "A"
    world.check()


def test_a_list_that_lands_late_changes_nothing() -> None:
    world = world_with_a_log()
    compaction = world.compact()
    run_until(world, compaction, "put_new", times=3)
    world.kill(compaction)  # its list is on its way
    world.lineages.flush()
    ended(world, world.ingest("A", None))
    of(world).collect_void()
    world.land_late_writes()
    world.lineages.flush()
    ended(world, world.ingest("A", None))
    assert world.events[-1].outcome == "duplicate"
    assert world.truth()[0] == "A"
    world.check()


def test_a_segment_is_known_to_have_counted_however_many_rewritings_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragfence.engine.epochs.LOOKED_BACK", 2)
    epochs = Epochs(TENANT, MemoryObjects())
    names = [epochs.segment_name(epoch, "x") for epoch in range(1, 8)]
    for epoch in range(1, 8):
        base = epochs.base(epoch)
        epochs.begin(epoch, "")
        rewritten = epochs.segment_name(epoch, "x")
        # Epochs 1 and 5 hydrate only, all others replace the one segment there is.
        epochs.complete(epoch, base.segments if epoch == 5 else [rewritten], base)
    assert epochs.named_in(7) == [names[6]]
    assert set(epochs.listed(7, since=1)) == {*names[:4], *names[5:]}
    assert set(epochs.listed(7, since=3)) == {names[6], names[5], names[3], names[2]}
    assert set(epochs.listed(7)) == {names[6], names[5], names[3], names[2]}
    assert set(epochs.listed(5, since=5)) == {names[3]}


def test_a_batch_of_which_two_epochs_have_a_part_each_becomes_one_segment() -> None:
    objects = MemoryObjects()
    fences = MemoryFences()
    epochs = Epochs(TENANT, objects)
    hydrator = Hydrator(fences, epochs, SegmentLoader(objects, ParquetCodec()))
    rewriting = LogRewrite(TenantStores(TENANT, fences, objects, epochs, hydrator))
    batch = b"12345678"
    for epoch, doc_id in ((1, "a"), (2, "b")):
        hydrator.try_hydrate()
        rewriting.write(epoch, batch, [row_of(doc_id, FenceNumber(epoch, 1)), row_of("x", FenceNumber(epoch, 2))])
    hydrator.try_hydrate()
    segments = epochs.truth()

    def plan(epoch: int, segments: list[str], keep: Keep) -> list[str]:
        return rewriting.take_out(epoch, segments, {"x": [row_of("x", FenceNumber(2, 2))]}, segments, keep)

    assert len(segments) == 2
    epoch = rewriting.run(lambda: plan, "tried")  # type: ignore[assignment]
    assert epoch == 4
    rewriting.collect_void()
    names = [entry.name for entry in objects.list(f"{TENANT}/segments/")]
    assert names == epochs.truth()
    found = {name: [row.detail.doc_id for row in rewriting.rows(name)] for name in names}
    assert sorted(found.values()) == [["a", "b"], ["x"]]
    assert found[f"{TENANT}/segments/{4:020d}/{batch.hex()}"] == ["a", "b"]
    texts = {snippet.text for name in names for snippet in rewriting.snippets(name)}
    assert texts == {"a", "b", "x"}


def row_of(doc_id: str, fence: FenceNumber) -> LogRow:
    made = doc_id.encode().ljust(16, b".")
    detail = Detail(
        doc_id,
        "ingest",
        "xxh3:0",
        1,
        "{}",
        "",
        "text/plain",
        "{}",
        0,
        made,
        Positions([0], [1], [""]),
        fresh=[(made, doc_id)],
    )
    key = bytes((7,)) + doc_id.encode().ljust(32, b".")
    return LogRow(key, doc_id.encode().ljust(20, b"."), fence, bytes(16), True, None, bytes(16), "", b"", detail=detail)
