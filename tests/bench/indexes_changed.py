"""A whole build, and one after a hundredth of the documents changed: in every round anew, with a real embedder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragfence.indexes.embedders.registry import open_embedder
from ragfence.indexes.spec import IndexSpec
from tests import servers
from tests.bench.documents_ours import document, ours
from tests.bench.indexes_ours import Counted, Timed, built
from tests.bench.indexes_scale import IndexesScale
from tests.bench.peers.corpus import corpus
from tests.bench.rounds import WARM_UP
from tests.bench.run import Say

EMBEDDER = "wordllama"
WHOLE, CHANGED = "whole", "changed"
_WARM_UP_DOCUMENTS = 200


def measure(server: servers.RedisServer, scale: IndexesScale, say: Say) -> dict[str, Any]:
    embedder = Counted(open_embedder(EMBEDDER))
    embedder.embed(["the model is loaded before the first build, which is not the cheaper for it"])
    _round(server, embedder, WARM_UP, min(scale.documents, _WARM_UP_DOCUMENTS), 1)
    rounds = []
    for number in range(scale.rounds):
        rounds.append(_round(server, embedder, number, scale.documents, scale.changed))
        say(f"{scale.documents:,} documents, {scale.changed:,} of them changed, round {number + 1} of {scale.rounds}")
    return {"embedder": EMBEDDER, **{which: [each[which] for each in rounds] for which in (WHOLE, CHANGED)}}


def _round(
    server: servers.RedisServer, embedder: Counted, number: int, documents: int, changed: int
) -> dict[str, dict[str, Any]]:
    """A tenant of its own has neither documents nor vectors, and its index a folder of its own."""
    tenant = f"changing{number}".replace("-", "w")  # the warm-up's number is below zero
    folder: Path = server.folder / tenant
    spec = IndexSpec(embedder=embedder, backend=f"lance:{folder}")
    with ours(server.url, server.folder, tenant=tenant) as filled:
        filled.ingest(tenant, documents, new=documents)
        before = embedder.texts
        whole = _told(built(filled.fence, spec), embedder.texts - before)
        every = documents // changed
        picked = [each for at, each in enumerate(corpus(tenant, documents)) if at % every == 0][:changed]
        edited = [document(each._replace(text=f"{each.text} and a line more")) for each in picked]
        filled.seconds(edited, new=changed)
        before = embedder.texts
        timed = built(filled.fence, spec)
        if timed.build.seal.made["base"] is None:
            raise RuntimeError("the build did not start from the one before")
        return {WHOLE: whole, CHANGED: _told(timed, embedder.texts - before)}


def _told(timed: Timed, embedded: int) -> dict[str, Any]:
    return {
        "seconds": timed.seconds,
        "verifying": timed.verifying,
        "rows": timed.build.rows,
        "embedded": embedded,
    }
