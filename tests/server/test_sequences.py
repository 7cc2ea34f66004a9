"""Random sequences of requests against a model: at most one effect per key, equal answers for equal requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import ragfence
from ragfence.server import IdempotencyMiddleware
from tests.server.calls import asking

KEYS = st.sampled_from(["a", '"a"', "b"])
BODIES = st.sampled_from([{"n": 1}, {"n": 2}])
WHO = st.sampled_from(["", "Bearer one"])
OUTCOMES = st.sampled_from([201, 404, 500, 429, "raise"])
REQUESTS = st.tuples(KEYS, BODIES, WHO, OUTCOMES, st.integers(1, 3))
STORED = (201, 404)


def application(fence: ragfence.Fence, effects: Counter[str], outcome: list[Any]) -> Starlette:
    async def endpoint(request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep(0)
        if outcome[0] == "raise":
            raise RuntimeError("as asked for")
        if outcome[0] in STORED:
            effects[ragfence.current_lease().key] += 1
        return JSONResponse({"n": body["n"], "effect": sum(effects.values())}, status_code=outcome[0])

    return Starlette(
        routes=[Route("/do", endpoint, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware, fence=fence)],
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8))
def test_one_effect_per_key_and_equal_answers_for_equal_requests(sequence: list[Any]) -> None:
    """The model: the first answer that is kept is the answer of its key for ever; the first body is its body."""
    with TemporaryDirectory() as folder:
        policy = ragfence.Policy.from_mapping({"http": {"wait_s": 30}})
        fence = ragfence.open(Path(folder) / "fence", policy=policy)
        with fence:
            effects: Counter[str] = Counter()
            outcome: list[Any] = [None]
            app = application(fence, effects, outcome)

            async def story(client: httpx.AsyncClient) -> None:
                bodies: dict[Any, Any] = {}
                kept: dict[Any, tuple[int, bytes]] = {}
                for key, body, who, wanted, twins in sequence:
                    outcome[0] = wanted
                    scope = (key.strip('"'), who)
                    headers = {"Idempotency-Key": key, **({"Authorization": who} if who else {})}
                    sent = [client.post("/do", content=json.dumps(body), headers=headers | JSON) for _ in range(twins)]
                    answers = [(each.status_code, each.content) for each in await asyncio.gather(*sent)]
                    if bodies.setdefault(scope, body) != body:
                        assert {status for status, _ in answers} == {409}
                        continue
                    if scope not in kept and wanted in STORED:
                        kept[scope] = answers[0]
                    if scope in kept:
                        assert set(answers) == {kept[scope]}
                    else:
                        assert {status for status, _ in answers} == {500 if wanted == "raise" else wanted}
                assert len(effects) == len(kept)

            asking(app, story)
            assert set(effects.values()) <= {1}


JSON = {"Content-Type": "application/json"}
