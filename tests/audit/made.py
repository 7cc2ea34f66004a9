"""Rows for the tests of the ledger: by hypothesis, whatever a store may hold; by hand, small honest histories."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from ragfence.core.decision_rows import NO_FENCE, Row, context_of
from ragfence.core.layout import FINGERPRINT_BYTES, SEAL_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.operations import KEY_BYTES, FenceNumber, Operation
from ragfence.documents.claims import Caller
from ragfence.testing.clock import START_MS

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

_SIX = st.integers(0, 2**47)
_TEXT = st.text(max_size=20)
_NAME = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
_LONG = st.integers(-(2**63), 2**63 - 1)


def _operation_context() -> st.SearchStrategy[bytes]:
    operations = st.builds(Operation, kind=_NAME, source_id=_NAME, revision=_NAME, action=st.sampled_from(["", "x"]))
    known = dict.fromkeys(("owner", "run_id", "event_id", "correlation_id", "route"), _TEXT)
    return st.builds(context_of, operations, **known, sequence=st.one_of(st.just(""), _LONG.map(str)))


def _document_context() -> st.SearchStrategy[bytes]:
    callers = st.builds(Caller, _TEXT, _TEXT, _TEXT, _TEXT)
    return st.builds(
        lambda caller, *args, action: caller.context(*args, action=action),
        callers,
        _NAME,
        st.sampled_from(["xxh3:ab", ""]),
        st.sampled_from(["recipe", ""]),
        st.one_of(st.none(), _LONG),
        st.integers(0, 2**40),
        action=st.sampled_from(["ingest", "retract"]),
    )


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT | st.text("\ud800a"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
_FIELDS = ["kind", "source_id", "owner", "sequence", "saved", "characters", "diff_size", "other", "action"]
_ODD_CONTEXTS = st.one_of(
    st.dictionaries(st.sampled_from(_FIELDS), _JSON).map(
        lambda value: json.dumps(value, separators=(",", ":")).encode()
    ),
    st.sampled_from([b"", b"{}", b"[]", b"{", b'{"sequence":"007"}', b'{"characters":3,"source_id":"a"}']),
)

ANY_ROW = st.builds(
    Row,
    token=st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES),
    position=st.integers(0, 255),
    ts_ms=_SIX,
    kind=st.sampled_from(RowKind),
    key=st.builds(
        lambda shard, rest: bytes((shard,)) + rest,
        st.integers(0, 63),
        st.binary(min_size=KEY_BYTES - 1, max_size=KEY_BYTES - 1),
    ),
    fingerprint=st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES),
    flags=st.integers(0, 255),
    attempt=st.integers(0, 65_535),
    fence=st.one_of(st.just(NO_FENCE), st.builds(FenceNumber, st.integers(0, 2**50), st.integers(0, 2**40 - 1))),
    first_seen_ms=_SIX,
    sealed_at_ms=_SIX,
    expires_ms=_SIX,
    waited_ms=st.integers(0, 2**32 - 1),
    winner=st.one_of(st.just(bytes(TOKEN_BYTES)), st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES)),
    effect_id=st.text(max_size=30).filter(lambda text: len(text.encode()) < 255),
    error_code=_TEXT,
    context=st.one_of(_operation_context(), _document_context(), _ODD_CONTEXTS),
)


def row(number: int, *, ts_ms: int = START_MS, shard: int | None = None, **more: Any) -> Row:
    """Row number so-and-so; equal numbers make equal rows."""
    operation = Operation(kind="ticket", source_id=f"s{number}", tenant="default")
    key = operation.key if shard is None else bytes((shard,)) + operation.key[1:]
    token = number.to_bytes(TOKEN_BYTES, "big")
    values: dict[str, Any] = {
        "position": SEAL_POSITION,
        "kind": RowKind.NEW,
        "key": key,
        "fingerprint": bytes(FINGERPRINT_BYTES),
        "attempt": 1,
        "fence": FenceNumber(1, number + 1),
        "first_seen_ms": ts_ms,
        "sealed_at_ms": ts_ms,
        "winner": token,
        "context": context_of(operation, owner="worker"),
    }
    return Row(token=token, ts_ms=ts_ms, **{**values, **more})
