"""The wrapper: it changes nothing, tells everything, and a broken listener harms nobody."""

from __future__ import annotations

import io
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import ragfence
from ragfence import Operation, Policy
from ragfence.errors import StoreUnavailable, ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.sqlite import SqliteFences
from ragfence.telemetry import InstrumentedStore, Listener, Logs, Metrics, Traces
from ragfence.telemetry.events import CallFailed, ClaimsAnswered, Event, KeyGenerated, SealsAnswered
from ragfence.telemetry.logs import json_lines
from ragfence.testing import FaultyFences, MemoryFences, MemoryObjects
from ragfence.testing.contracts.batches import BatchContract
from ragfence.testing.contracts.fences import FencesUnderTest, SealContract
from ragfence.testing.contracts.replays import ReplayContract
from ragfence.testing.contracts.row_drain import DrainContract
from tests.contract.conftest import SqliteUnderTest

MEMBERS = {name for part in FenceStore.__mro__[:5] for name in vars(part) if not name.startswith("_")}


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Broken:
    """Fails wherever a listener can."""

    def handle(self, event: Event) -> None:
        raise RuntimeError("a listener of somebody else")

    @contextmanager
    def span(self, method: str):
        if method == "seal":
            raise RuntimeError("before the call")
        yield
        raise RuntimeError("after the call")


class TestObservedSqlite(SealContract, BatchContract, ReplayContract, DrainContract):
    """A part of the contract, with all three listeners: answers come through the wrapper unchanged."""

    @pytest.fixture
    def fences(self, tmp_path: Path):
        under_test = SqliteUnderTest(tmp_path)
        yield _Watched(under_test)
        under_test.close()


class _Watched:
    def __init__(self, inner: FencesUnderTest) -> None:
        self._inner = inner
        policy = Policy()
        self._listeners: list[Listener] = [
            Metrics(CollectorRegistry()),
            Logs(policy, logger=json_lines(io.StringIO())),
            Traces(policy),
        ]

    @property
    def store(self) -> FenceStore:
        return InstrumentedStore(self._inner.store, self._listeners)

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> FenceStore:
        return InstrumentedStore(self._inner.reopen(tenant, solo=solo), self._listeners)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(autouse=True)
def no_complaints(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture):
    """A listener of ours that fails would only be complained of."""
    yield
    if "broken" not in request.node.name:
        assert not [record for record in caplog.records if record.name == "ragfence.telemetry"]


def test_every_member_of_the_protocol_is_forwarded_by_name():
    assert {"claim", "seal", "row_entries", "close", "url"} <= MEMBERS
    assert set(vars(InstrumentedStore)) >= MEMBERS


def test_what_a_store_has_besides_is_found_as_well(tmp_path):
    store = InstrumentedStore(SqliteFences(tmp_path / "fences.db", solo=True), [])
    assert (store.path, store.solo, store.tenant) == (tmp_path / "fences.db", True, "default")
    with pytest.raises(AttributeError):
        _ = store.infos
    store.close()


def test_without_listeners_there_is_no_wrapper(open_fence):
    assert isinstance(open_fence(observe=()).inspector.fences, SqliteFences)
    assert isinstance(open_fence().inspector.fences, SqliteFences)


def test_a_listener_sees_claims_seals_keys_and_failures(open_fence):
    seen, fences = Seen(), FaultyFences(MemoryFences())
    fence = open_fence(fences, objects=MemoryObjects(), observe=seen)
    double = fence.once(kind="double", key=lambda n: str(n))(lambda n: 2 * n)
    assert double(2).result == 4
    (claimed,) = seen.of(ClaimsAnswered)[-1:]
    assert [claim.kind for claim in claimed.claims] == ["double"]
    assert claimed.call.method == "claim"
    assert claimed.call.tenant == "default"
    assert len(seen.of(SealsAnswered)) == 1
    assert seen.of(KeyGenerated)[0].kind == "double"
    fences.on("claim").fail_before()
    with pytest.raises(StoreUnavailable):
        double(2)
    (failed,) = seen.of(CallFailed)
    assert isinstance(failed.error, StoreUnavailable)
    assert failed.call.method == "claim"


def test_a_broken_listener_changes_no_answer_and_is_complained_of_once(open_fence, caplog):
    seen = Seen()
    fence = open_fence(observe=(Broken(), seen))
    double = fence.once(kind="double", key=lambda n: str(n))(lambda n: 2 * n)
    assert [double(2).decision, double(2).decision] == ["new", "duplicate"]
    with fence.claim(Operation(kind="double", source_id="3")) as op:
        assert op.is_new
    assert len(seen.of(ClaimsAnswered)) >= 3
    complaints = [record for record in caplog.records if record.name == "ragfence.telemetry"]
    assert len(complaints) == 1
    assert "Broken" in complaints[0].getMessage()


def test_the_environment_names_listeners_and_an_argument_overrules_it(open_fence, monkeypatch, capsys):
    monkeypatch.setenv("RAGFENCE_OBSERVE", " logs , traces, logs")
    fence = open_fence()
    assert [type(listener).__name__ for listener in fence.inspector.fences._listeners] == ["Logs", "Traces"]
    with fence.claim(Operation(kind="double", source_id="3")) as op:
        op.seal()
    assert '"event": "sealed"' in capsys.readouterr().err
    assert isinstance(open_fence(observe=()).inspector.fences, SqliteFences)


@pytest.mark.parametrize("wrong", ["metric", ("logs", 7), 7.5])
def test_an_unknown_name_is_refused_before_anything_is_opened(tmp_path, wrong):
    with pytest.raises((ValidationError, TypeError)):
        ragfence.open(tmp_path / "fence", observe=wrong)
    assert not (tmp_path / "fence").exists()
