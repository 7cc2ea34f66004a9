"""An outage while an index is built uses up no attempts: the build goes on when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ragfence.errors import EmbedderUnavailable, StoreUnavailable
from ragfence.testing import FaultyObjects
from tests.documents.places import Place
from tests.indexes.building import CountingEmbedder, ingested, rows_of, spec_in

ATTEMPTS = 5


class Away(CountingEmbedder):
    away = True

    def embed(self, texts: Sequence[str]) -> Any:
        if self.away:
            raise EmbedderUnavailable("the endpoint did not answer")
        return super().embed(texts)


@pytest.mark.parametrize("what", ["vectors", "builds", "sealed"])
def test_a_build_is_made_once_the_object_store_is_back(near: Place, what: str) -> None:
    objects = FaultyObjects(near.kept)
    fence = near.open(objects=objects)
    ingested(fence, ["a", "b"])
    spec = spec_in(near.folder, CountingEmbedder())
    objects.on("put_new", f"default/{what}/*").fail_before(times=None)
    for _ in range(2 * ATTEMPTS):
        with pytest.raises(StoreUnavailable):
            fence.indexes.build(spec)
    objects.heal()
    build = fence.indexes.build(spec)
    assert len(rows_of(fence, build)) == 6
    near.assert_no_promise_was_broken()


def test_a_build_is_made_once_the_embedder_is_back(near: Place) -> None:
    fence = near.open()
    ingested(fence, ["a", "b"])
    embedder = Away()
    spec = spec_in(near.folder, embedder)
    for _ in range(2 * ATTEMPTS):
        with pytest.raises(EmbedderUnavailable):
            fence.indexes.build(spec)
    embedder.away = False
    assert len(rows_of(fence, fence.indexes.build(spec))) == 6
