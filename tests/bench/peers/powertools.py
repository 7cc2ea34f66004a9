"""AWS Lambda Powertools' idempotency on the same Redis. Runs in `.venv-bench`, which has no ragfence.

    argv[1]  the server's URL
    stdout   {"aws-lambda-powertools": "3.37.0", ...} when it is ready
    stdin    {"run": "replay" | "new", "count": 200, "round": 3}
    stdout   {"seconds": 0.04}

Set up for speed: hiredis, the default MD5 of the whole payload as key (no JMESPath), no payload validation, no Lambda
context (so a record has no in-progress expiry), decoded replies as in its documentation. Its cache inside the process
stays off, as it is by default: the server is asked every time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

KEY_PREFIX = "powertools"
PACKAGES = ("aws-lambda-powertools", "redis", "hiredis")


class Worker:
    def __init__(self, url: str) -> None:
        self.effects = 0
        self._layer = CachePersistenceLayer(client=redis.Redis.from_url(url, decode_responses=True))
        self._fresh = 0
        self._call = self._idempotent()
        self._call(request=self._request("replayed"))

    def run(self, run: str, count: int, number: int) -> float:
        requests = [self._request("replayed" if run == "replay" else self._next_id()) for _ in range(count)]
        call, before = self._call, self.effects
        gc.collect()
        started = time.perf_counter()
        for request in requests:
            call(request=request)
        taken = time.perf_counter() - started
        expected = 0 if run == "replay" else count
        if self.effects - before != expected:
            raise RuntimeError(f"{run}, round {number}: {self.effects - before} effects, not {expected}")
        return taken

    def _idempotent(self) -> Callable[..., str]:
        @idempotent_function(
            data_keyword_argument="request",
            persistence_store=self._layer,
            config=IdempotencyConfig(expires_after_seconds=3_600),
            key_prefix=KEY_PREFIX,  # shorter than the name it would make up
        )
        def effect(request: dict[str, Any]) -> str:
            self.effects += 1
            return "r" * 36

        return effect

    def _next_id(self) -> str:
        self._fresh += 1
        return f"{self._fresh:012d}"

    def _request(self, name: str) -> dict[str, Any]:
        return {"id": name, "amount": 12}


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    warnings.simplefilter("ignore")  # it warns of the missing Lambda context at every call; not on its time
    worker = Worker(sys.argv[1])
    say({name: importlib.metadata.version(name) for name in PACKAGES})
    for line in sys.stdin:
        asked = json.loads(line)
        say({"seconds": worker.run(asked["run"], asked["count"], asked["round"])})


if __name__ == "__main__":
    main()
