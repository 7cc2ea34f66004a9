"""Diffs of conflicting payloads: right, and never too big."""

from __future__ import annotations

from typing import Any

import jsonpatch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.canonical import canonical_json
from ragfence.core.diffs import MAX_INPUT_BYTES, payload_diff

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab/~é", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab/~é", max_size=2), inner, max_size=4),
    max_leaves=10,
)


def test_a_diff_is_an_rfc_6902_patch() -> None:
    diff = payload_diff({"amount": 10, "a/b": 1}, {"amount": 12, "note": "x", "a/b": 1}, max_bytes=16384)
    assert diff.patch == (
        {"op": "add", "path": "/note", "value": "x"},
        {"op": "replace", "path": "/amount", "value": 12},
    )
    assert not diff.truncated
    assert diff.size == len(canonical_json(list(diff.patch)))


@given(values, values)
@settings(max_examples=200, deadline=None)
def test_applying_the_patch_gives_the_other_payload(old: Any, new: Any) -> None:
    diff = payload_diff(old, new, max_bytes=1 << 20)
    assert not diff.truncated
    assert canonical_json(jsonpatch.apply_patch(old, list(diff.patch))) == canonical_json(new)
    assert (diff.patch == ()) == (canonical_json(old) == canonical_json(new))


@given(values, values, st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_a_patch_never_takes_more_than_it_may(old: Any, new: Any, max_bytes: int) -> None:
    """The kept operations fit, are the first ones of the whole patch, and no further one would fit."""
    whole = payload_diff(old, new, max_bytes=1 << 20)
    diff = payload_diff(old, new, max_bytes=max_bytes)
    kept = len(diff.patch)
    assert diff.size == whole.size
    assert diff.patch == whole.patch[:kept]
    assert diff.truncated == (kept < len(whole.patch))
    assert not diff.patch or len(canonical_json(list(diff.patch))) <= max_bytes
    if diff.truncated:
        assert len(canonical_json(list(whole.patch[: kept + 1]))) > max_bytes


def test_numbers_that_are_equal_in_json_do_not_differ() -> None:
    assert payload_diff({"a": 1}, {"a": 1.0}, max_bytes=100).patch == ()
    assert payload_diff({"a": 1}, {"a": True}, max_bytes=100).patch != ()


def test_a_huge_payload_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonpatch, "make_patch", lambda *_: pytest.fail("compared"))
    diff = payload_diff({"a": 1}, {"a": "x" * MAX_INPUT_BYTES}, max_bytes=16384)
    assert diff.patch == ()
    assert diff.truncated
    assert diff.size > MAX_INPUT_BYTES
