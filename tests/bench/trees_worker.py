"""Runs the workloads of `tests.bench.trees` in one tree, one batch per line of standard input.

Started as a file, with the tree that is measured in PYTHONPATH: it must import nothing from `tests`, and of ragfence
public names only, so that it runs in trees from before and after a move of modules. The bulk claim is the exception: it
has no public name, so the store's class is looked up in each place where it has been.

CPU time is what the whole process used (`getrusage`), background threads included. The server's is what `INFO cpu`
says it used meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import redis

import ragfence

Batch = Callable[[], None]
TEXT = (
    "A lease that has expired can be taken over by another process. The new owner gets a higher fence number, so that "
    "whatever the old owner still writes is refused. Paragraph {n} of page {page} says so once more.\n\n"
)
STORES = ("ragfence.stores.redis.store", "ragfence.stores.redis", "ragfence.stores.fences_redis")
HEADERS = {"host": "127.0.0.1", "content-type": "application/json", "user-agent": "bench"}


def document(page: str) -> ragfence.Document:
    text = "".join(TEXT.format(n=n, page=page) for n in range(8))
    return ragfence.Document(doc_id=page, text=text, metadata={"page": page})


class Workloads:
    """Each method that yields sets up once, then yields (items per batch, prepare): `prepare()` returns a batch."""

    def __init__(self, folder: Path, url: str, tree: str) -> None:
        self._folder, self._url, self._tree = folder, url, tree
        self._stack = ExitStack()
        self._numbers = count()

    def close(self) -> None:
        self._stack.close()

    def embedded(self, name: str) -> ragfence.Fence:
        return self._stack.enter_context(ragfence.open(self._folder / name))

    def on_valkey(self, name: str) -> ragfence.Fence:
        """Tenants of their own for each tree: both use the same server."""
        tenant = f"{self._tree}-{name}"
        return self._stack.enter_context(ragfence.open(self._url, objects=self._folder / name, tenant=tenant))

    def names(self, many: int) -> list[str]:
        return [f"page-{next(self._numbers):08d}" for _ in range(many)]

    def all(self) -> dict[str, Callable[[], tuple[int, Callable[[], Batch]]]]:
        return {
            "ingest_many new, embedded": lambda: self.ingest_new(self.embedded("ingest-new")),
            "ingest_many known, embedded": lambda: self.ingest_known(self.embedded("ingest-known")),
            "ingest_many new, Valkey": lambda: self.ingest_new(self.on_valkey("ingest-new")),
            "ingest_many known, Valkey": lambda: self.ingest_known(self.on_valkey("ingest-known")),
            "once new, embedded": lambda: self.once(self.embedded("once-new"), new=True),
            "once replay, embedded": lambda: self.once(self.embedded("once-replay"), new=False),
            "once new, Valkey": lambda: self.once(self.on_valkey("once-new"), new=True),
            "once replay, Valkey": lambda: self.once(self.on_valkey("once-replay"), new=False),
            "bulk claim and seal, Valkey": lambda: self.bulk(new=True),
            "bulk replay, Valkey": lambda: self.bulk(new=False),
            "POST /v1/documents new": lambda: self.post("new"),
            "POST /v1/documents known": lambda: self.post("known"),
            "POST /v1/documents replay": lambda: self.post("replay"),
            "build": self.build,
            "search": self.search,
        }

    def ingest_new(self, fence: ragfence.Fence) -> tuple[int, Callable[[], Batch]]:
        many = 300

        def prepare() -> Batch:
            documents = [document(page) for page in self.names(many)]
            return lambda: _expect("new", fence.documents.ingest_many(documents), many)

        return many, prepare

    def ingest_known(self, fence: ragfence.Fence) -> tuple[int, Callable[[], Batch]]:
        many = 2000
        pages = self.names(many)
        fence.documents.ingest_many([document(page) for page in pages])

        def prepare() -> Batch:
            documents = [document(page) for page in pages]
            return lambda: _expect("duplicate", fence.documents.ingest_many(documents), many)

        return many, prepare

    def once(self, fence: ragfence.Fence, *, new: bool) -> tuple[int, Callable[[], Batch]]:
        many = 100 if new else 1000
        ran = 0

        @fence.once(kind="bench", key=lambda request: request["id"])
        def effect(request: dict[str, Any]) -> str:
            nonlocal ran
            ran += 1
            return "r" * 36

        known = [{"id": name, "amount": 12} for name in self.names(many)]
        for request in known:
            effect(request)

        def prepare() -> Batch:
            requests = [{"id": name, "amount": 12} for name in self.names(many)] if new else known

            def batch() -> None:
                before = ran
                for request in requests:
                    effect(request)
                _check(ran - before == (many if new else 0), "effects")

            return batch

        return many, prepare

    def bulk(self, *, new: bool) -> tuple[int, Callable[[], Batch]]:
        from ragfence.core import decisions

        many, calls = 500, 10
        store = _redis_fences()(self._url, f"{self._tree}-bulk-{new}", solo=True)
        self._stack.callback(store.close)

        def keys() -> list[bytes]:
            return [bytes((os.urandom(1)[0] % 64,)) + os.urandom(32) for _ in range(many)]

        def claims(of: list[bytes]) -> list[Any]:
            return [
                decisions.Claim(
                    key=key,
                    fingerprint=b"f" * 16,
                    token=os.urandom(12),
                    pending_ttl_ms=3_600_000,
                    kind="bench",
                    owner="bench:1",
                    context=b'{"kind":"bench","source_id":"0"}',
                )
                for key in of
            ]

        def claim_and_seal(ready: list[Any]) -> None:
            verdicts = store.claim(ready)
            seals = [
                decisions.Seal(
                    key=claim.key,
                    token=claim.token,
                    fence=verdict.record.fence,
                    result=b"r" * 40,
                    ttl_ms=3_600_000,
                    context=claim.context,
                )
                for claim, verdict in zip(ready, verdicts, strict=True)
            ]
            _check(all(isinstance(one, decisions.Sealed) for one in store.seal(seals)), "seals")

        sealed = keys()
        claim_and_seal(claims(sealed))

        def replay(ready: list[Any]) -> None:
            _check(all(isinstance(one, decisions.Replay) for one in store.claim(ready)), "replays")

        def prepare() -> Batch:
            batches = [claims(keys() if new else sealed) for _ in range(calls)]

            def batch() -> None:
                for ready in batches:
                    claim_and_seal(ready) if new else replay(ready)

            return batch

        return many * calls, prepare

    def post(self, kind: str) -> tuple[int, Callable[[], Batch]]:
        """In process, without a server or an HTTP client: the application is called as a server would call it."""
        many = 60 if kind == "new" else 100
        app = _create_app()(self._folder / f"post-{kind}", insecure_dev=True)
        runner = self._stack.enter_context(asyncio.Runner())
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())
        self._stack.callback(lambda: runner.run(lifespan.__aexit__(None, None, None)))

        async def send_all(requests: list[tuple[bytes, str]]) -> list[int]:
            return [await _post(app, "/v1/documents", body, key) for body, key in requests]

        def made(pages: list[str], suffix: str) -> list[tuple[bytes, str]]:
            bodies = [json.dumps({"doc_id": page, "text": document(page).text}).encode() for page in pages]
            return [(body, f"{page}{suffix}") for page, body in zip(pages, bodies, strict=True)]

        known = self.names(many)
        runner.run(send_all(made(known, "")))
        again = count()

        def prepare() -> Batch:
            if kind == "new":
                requests = made(self.names(many), "")
            elif kind == "known":
                requests = made(known, f"-{next(again)}")
            else:
                requests = made(known, "")
            return lambda: _check(set(runner.run(send_all(requests))) <= {200, 201}, "statuses")

        return many, prepare

    def build(self) -> tuple[int, Callable[[], Batch]]:
        many = 20
        fence = self.embedded("build")
        fence.documents.ingest_many([document(page) for page in self.names(100)])
        fence.indexes.build()

        def prepare() -> Batch:
            fence.documents.ingest_many([document(page) for page in self.names(many)])
            return lambda: _check(fence.indexes.build().decision == "new", "a build of a changed corpus")

        return 1, prepare

    def search(self) -> tuple[int, Callable[[], Batch]]:
        many = 30
        fence = self.embedded("search")
        fence.documents.ingest_many([document(page) for page in self.names(100)])
        fence.aliases.swap("pages", fence.indexes.build().index_hash)
        fence.search("pages", "lease")

        def batch() -> None:
            for number in range(many):
                _check(len(fence.search("pages", f"how does lease {number} expire?")) == 5, "hits")

        return many, lambda: batch


def _redis_fences() -> Any:
    for name in STORES:
        try:
            return import_module(name).RedisFences
        except (ImportError, AttributeError):
            continue
    raise RuntimeError(f"RedisFences is in none of {', '.join(STORES)}")


def _create_app() -> Any:
    try:
        return import_module("ragfence.server").create_app
    except ModuleNotFoundError:
        return import_module("ragfence.api").create_app


async def _post(app: Any, path: str, body: bytes, key: str) -> int:
    headers = HEADERS | {"content-length": str(len(body)), "idempotency-key": key}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    sent = False
    status = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # a client that stays connected
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    await app(scope, receive, send)
    return status


def _expect(decision: str, receipts: Any, many: int) -> None:
    decisions = [str(receipt.decision) for receipt in receipts]
    _check(decisions == [decision] * many, f"decisions: {set(decisions)}")


def _check(right: bool, what: str) -> None:
    if not right:
        raise RuntimeError(f"a batch did not do what it should: {what}")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _server_cpu_s(client: redis.Redis) -> float:
    used: Any = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _measure(many: int, batch: Batch, client: redis.Redis) -> dict[str, float]:
    gc.collect()
    server = _server_cpu_s(client)
    before = _cpu_s()
    batch()
    after = _cpu_s()
    return {"items": many, "cpu_s": after - before, "server_cpu_s": _server_cpu_s(client) - server}


def serve(lines: Iterator[str], reply: Callable[[dict[str, Any]], None], folder: Path, url: str, tree: Path) -> None:
    """Answers each line, the name of a workload, with the CPU time of one batch of it."""
    loaded = Path(ragfence.__file__).parent.parent.resolve()
    if loaded != tree.resolve():
        raise RuntimeError(f"{loaded} would be measured instead of {tree}")
    workloads = Workloads(folder, url, folder.name)
    offered = workloads.all()
    client = redis.Redis.from_url(url)
    ready: dict[str, tuple[int, Callable[[], Batch]]] = {}
    reply({"workloads": list(offered)})
    for line in lines:
        name = line.strip()
        try:
            if name not in ready:
                ready[name] = offered[name]()
                many, prepare = ready[name]
                prepare()()  # what is imported or opened on first use is not measured
            many, prepare = ready[name]
            reply(_measure(many, prepare(), client))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
    client.close()
    workloads.close()


if __name__ == "__main__":
    # What the package prints must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    serve(iter(sys.stdin.readline, ""), write, Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
