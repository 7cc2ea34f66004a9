"""Part 2, one run: everything that is measured of documents, as one mapping that JSON can hold."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import documents_cost, documents_growth, documents_race, documents_rates, documents_streaming, machine
from tests.bench.documents_goals import verdicts
from tests.bench.documents_ours import OBJECTS
from tests.bench.documents_scale import DocumentsScale
from tests.bench.machine import redis_server
from tests.bench.peers.process import IngestingPeer, ingesting
from tests.bench.rounds import interleave
from tests.bench.run import Say, as_told


def measure(scale: DocumentsScale, python: Path | None, say: Say = lambda _: None) -> dict[str, Any]:
    """`python`: the interpreter of the environment that has LangChain and LlamaIndex, if there is one."""
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}, "objects": OBJECTS}
    say(f"documents on Redis and a {OBJECTS}, audit on")
    measured |= _beside_peers(scale, python, say)
    measured["growth"] = documents_growth.measure(scale, say)
    say(f"weighing {scale.weighed:,} documents")
    measured["bytes"] = documents_cost.weighed(scale.weighed)
    say(f"counting requests to {documents_cost.S3}")
    measured["requests"] = documents_cost.requests(scale.requested)
    say(f"streaming {scale.streamed:,} documents")
    measured["memory"] = documents_streaming.measure(scale.streamed)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured


def _beside_peers(scale: DocumentsScale, python: Path | None, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server())
        facts = machine.facts(server.url)
        # One process of each peer is timed; in the race it has a twin, which sleeps until then.
        sets: list[dict[str, IngestingPeer]] = []
        if python is not None:
            say("starting the peers")
            folder = server.folder / "peers"
            sets = [stack.enter_context(ingesting(python, server.url, folder)) for _ in range(documents_race.PROCESSES)]
        versions = [{who: peer.versions for who, peer in one.items()} for one in sets]
        others = sets[0] if sets else {}
        say(f"{scale.documents:,} documents are made known to everybody")
        with documents_rates.subjects(server, scale, others) as subjects:
            rates = interleave(subjects, scale.rounds, lambda text: say(f"first and again, {text}"))
        say(f"{documents_race.PROCESSES} processes ingest the same {scale.raced:,} documents")
        race = documents_race.measure(server, scale, {who: [one[who] for one in sets] for who in others})
        return {"machine": facts, "peers": versions[0] if versions else {}, "rates": rates, "race": race}
