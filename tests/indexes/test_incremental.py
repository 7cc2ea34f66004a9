"""A build may start from an earlier one; nothing of a base that is not what was sealed is in a build that is."""

from __future__ import annotations

from typing import Any

import pytest

from ragfence import Fence
from ragfence.indexes.build import Build
from tests.documents.places import Place
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in

NAMES = [f"doc-{at}" for at in range(6)]


def built(fence: Fence, place: Place, embedder: CountingEmbedder) -> Build:
    return fence.indexes.build(spec_in(place.folder, embedder))


def test_a_base_that_is_not_what_was_sealed_is_not_used(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    fence.indexes.backend(first.seal.backend).remove(first.physical, [NAMES[3]])
    ingested(fence, NAMES[:1], edition=1)
    second = built(fence, near, embedder)
    assert second.seal.made["base"] is None
    assert shown(rows_of(fence, second)) == live_snippets(fence)


@pytest.mark.parametrize("column", ["text", "vector", "source_url"])
def test_one_spoiled_value_in_a_base_is_found_though_its_rows_were_copied(
    near: Place, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof comes after the writing: the copy is dropped, and nothing of it is in the build that is sealed."""
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    backend: Any = fence.indexes.backend(first.seal.backend)
    sealed, plain, written = rows_of(fence, first), backend.write, []
    value = "[" + ", ".join(["0.5"] * embedder.dimension) + "]" if column == "vector" else "'spoiled'"
    table = backend._open(first.physical).table
    table.update(where=f"doc_id = '{NAMES[3]}' AND ordinal = 0", values_sql={column: value})
    ingested(fence, NAMES[:1], edition=1)

    def watched(physical: str, shape: Any, tables: Any) -> int:
        rows: int = plain(physical, shape, tables)
        written.append(physical)
        return rows

    monkeypatch.setattr(backend, "write", watched)
    second = built(fence, near, embedder)
    assert second.seal.made["base"] is None
    assert written[-1] == second.physical
    assert len(written) == 2, "the base was copied first"
    assert sorted(backend.physicals()) == sorted([first.physical, second.physical])
    rows = rows_of(fence, second)
    assert shown(rows) == live_snippets(fence)
    assert all(rows[each] == sealed[each] for each in rows.keys() & sealed.keys() if rows[each]["doc_id"] != NAMES[0])


def test_a_base_whose_files_are_damaged_is_not_used(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    (data,) = (near.folder / "lance" / f"{first.physical}.lance" / "data").iterdir()
    data.write_bytes(data.read_bytes()[:100])
    ingested(fence, NAMES[:1], edition=1)
    second = built(fence, near, embedder)
    assert second.seal.made["base"] is None
    assert shown(rows_of(fence, second)) == live_snippets(fence)


def test_a_build_that_was_dropped_behind_our_back_is_no_base_either(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = built(fence, near, embedder)
    fence.indexes.backend(first.seal.backend).drop(first.physical)
    ingested(fence, NAMES[:1], edition=1)
    assert shown(rows_of(fence, built(fence, near, embedder))) == live_snippets(fence)
