"""Handles on a store: names, clocks, formats that are too new, and closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import (
    Claim,
    HeldRecords,
    Mode,
)
from ragfence.core.layout import (
    TOKEN_BYTES,
    RowKind,
    State,
)
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, SourceLease, SourceRecord, park
from ragfence.errors import FormatTooNew, StoreClosed
from ragfence.stores.fences import FenceStore, Lookup, RowEntry
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    SHARD,
    FencesUnderTest,
    claim,
    granted,
    lease,
    read,
    rows_of,
    seal,
    verdict,
)


class HandleContract:
    """What a handle says about its store."""

    def test_the_clock_of_the_store_is_what_it_tells(self, fences: FencesUnderTest) -> None:
        before = fences.store.now_ms()
        fences.clock.advance(1234)
        assert fences.store.now_ms() == before + 1234 == fences.clock()

    def test_the_url_is_for_people(self, fences: FencesUnderTest) -> None:
        assert "://" in fences.store.url
        assert "@" not in fences.store.url


AFTER_CLOSING: dict[str, Callable[[FenceStore, Claim, list[RowEntry]], object]] = {
    "claim": lambda store, held, _: store.claim([held]),
    "claim of many": lambda store, held, _: store.claim([held, claim(Mode.KEYED, "B")]),
    "renew": lambda store, held, _: store.renew([lease(held)]),
    "release": lambda store, held, _: store.release([lease(held)]),
    "read": lambda store, held, _: store.read([Lookup(held.key)]),
    "heads": lambda store, held, _: list(store.heads(SHARD)),
    "scan": lambda store, held, _: list(store.scan()),
    "rows": lambda store, held, _: list(store.rows()),
    "record": lambda store, held, _: store.record(
        [Row(b"t" * TOKEN_BYTES, 0, 1, RowKind.NEW, held.key, held.fingerprint)]
    ),
    "drop_rows": lambda store, held, entries: store.drop_rows(entries),
    "stats": lambda store, held, _: store.stats(),
    "markers": lambda store, held, _: store.markers(),
    "begin_epoch": lambda store, held, _: store.begin_epoch(9),
    "lock": lambda store, held, _: store.lock("name", "token", 1000),
    "unlock": lambda store, held, _: store.unlock("name", "token"),
}


class FormatContract:
    """Stored by a newer ragfence: refused, never guessed at, never touched."""

    @pytest.mark.parametrize("where", ["record", "source", "head", "lease", "parked", "record of a sequence"])
    def test_a_newer_format_is_refused_and_nothing_is_changed(self, fences: FencesUnderTest, where: str) -> None:
        mode = {"record": Mode.KEYED, "record of a sequence": Mode.SEQUENCED}.get(where, Mode.DOCUMENT)
        asked = claim(mode, by="one")
        store = fences.store
        stranger = granted(store, claim(mode, "stranger", source="stranger"))
        before = rows_of(store)
        _plant_newer(fences, asked, where)
        for _ in range(2):
            _refuses(lambda: store.claim([asked]))
            _refuses(lambda: store.seal([seal(asked, stranger)]))
            _refuses(lambda: store.renew([lease(asked, stranger)]))
            _refuses(lambda: store.release([lease(asked, stranger)]))
            _refuses(lambda: store.reset_attempts([lease(asked)]))
            _refuses(lambda: read(store, asked))
            if where in ("source", "head"):
                _refuses(lambda: list(store.heads(SHARD)))
                _refuses(lambda: list(store.marks(SHARD)))
        assert rows_of(store) == before

    @ALL_MODES
    def test_a_batch_with_a_newer_format_in_it_grants_nothing(self, fences: FencesUnderTest, mode: Mode) -> None:
        newer, fine = claim(mode, "A", source="newer"), claim(mode, "A", source="fine", by="one")
        _plant_newer(fences, newer, "record" if mode is Mode.KEYED else "source")
        _refuses(lambda: fences.store.claim([fine, newer]))
        assert read(fences.store, fine) == HeldRecords()
        assert rows_of(fences.store) == []


class ClosingContract:
    """A handle that was closed answers nobody. Others on the same data are not concerned."""

    @pytest.mark.parametrize("call", list(AFTER_CLOSING))
    def test_a_closed_store_refuses_every_call(self, fences: FencesUnderTest, call: str) -> None:
        store = fences.reopen()
        held = claim(Mode.KEYED, by="held")
        granted(store, held)
        entries = store.row_entries()
        store.close()
        store.close()
        with pytest.raises(StoreClosed, match="was closed here"):
            AFTER_CLOSING[call](store, held, entries)
        assert verdict(fences.store, claim(Mode.KEYED, "B")).record.attempt == 1  # type: ignore[union-attr]

    def test_calls_under_way_while_a_store_is_closed_end_or_are_refused(self, fences: FencesUnderTest) -> None:
        """Each is answered as ever, or told that the store is closed; nobody meets an error of what is beneath."""
        for turn in range(5):
            store = fences.reopen()
            outcomes: list[object] = []
            started = threading.Barrier(5)

            def work(
                caller: int, store: FenceStore = store, turn: int = turn, outcomes: list[object] = outcomes
            ) -> None:
                started.wait()  # noqa: B023
                for number in range(200):
                    try:
                        granted(store, claim(Mode.KEYED, f"{turn} {caller} {number}", by=f"{turn} {caller} {number}"))
                    except StoreClosed:
                        outcomes.append("closed")
                        return
                    except BaseException as error:  # noqa: BLE001  # whatever it is, it fails the test
                        outcomes.append(error)
                        return
                outcomes.append("done")

            threads = [threading.Thread(target=work, args=(caller,)) for caller in range(4)]
            for thread in threads:
                thread.start()
            started.wait()
            time.sleep(0.003 * turn)
            store.close()
            for thread in threads:
                thread.join()
            assert set(outcomes) <= {"closed", "done"}
            assert len(outcomes) == len(threads)


def _plant_newer(fences: FencesUnderTest, asked: Claim, where: str) -> None:
    record = KeyRecord(State.SEALED, asked.fingerprint, asked.token, FenceNumber(1, 1), 1, 0, 0)
    newer = b"\x09" + record.encode()[1:]
    match where:
        case "record" | "record of a sequence":
            fences.plant_record(asked.key, newer)
        case "parked":
            fences.plant_record(asked.key, park(1, record).replace(record.encode(), newer))
        case "source":
            fences.plant_source(asked.key[0], asked.source, b"\x09" + SourceRecord(1).encode()[1:])
        case "head":
            data = SourceRecord(1, Head(asked.digest, True, None, record=record)).encode()
            fences.plant_source(asked.key[0], asked.source, data.replace(record.encode(), newer))
        case "lease":
            data = SourceRecord(1, None, SourceLease(asked.digest, record)).encode()
            fences.plant_source(asked.key[0], asked.source, data.replace(record.encode(), newer))


def _refuses(call: Callable[[], object]) -> None:
    with pytest.raises(FormatTooNew):
        call()
