"""How much of the package a flow walks through: modules and functions, counted with `sys.setprofile`.

`python -m tests.flows` prints a table, `--json` the same as JSON. The figures are reported, not enforced. Every flow
runs once unmeasured, so that what is imported or opened on first use does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import httpx
from rich.console import Console
from rich.table import Table

import ragfence
from ragfence import Document, Policy
from ragfence.server import create_app

PACKAGE = Path(ragfence.__file__).parent
COMPREHENSIONS = frozenset(("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
"""not functions of their own: Python 3.12 inlines most of them, and a module's body runs at import"""

Step = Callable[[], object]
R = TypeVar("R")


class Flow(NamedTuple):
    """What one call walked through."""

    name: str
    modules: dict[str, list[str]]
    """the functions of each module, both in alphabetical order"""

    @property
    def functions(self) -> int:
        return sum(map(len, self.modules.values()))


class Trace:
    """Records the functions of the package that are called while it is recording, in every thread."""

    def __init__(self) -> None:
        self._recording = False
        self._called: set[CodeType] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Threads are traced if they are started inside, so open fences and applications inside, too."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def measure(self, name: str, step: Step) -> Flow:
        self._called, self._recording = set(), True
        try:
            step()
        finally:
            self._recording = False
        modules: dict[str, set[str]] = {}
        for code in list(self._called):
            file = Path(code.co_filename)
            if file.is_relative_to(PACKAGE) and code.co_name not in COMPREHENSIONS:
                module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
                modules.setdefault(module, set()).add(f"{code.co_qualname}:{code.co_firstlineno}")
        return Flow(name, {module: sorted(modules[module]) for module in sorted(modules)})

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if self._recording and event == "call":
            self._called.add(frame.f_code)


def trace_flows(folder: Path) -> list[Flow]:
    """Traces every flow on embedded stores in `folder`."""
    trace = Trace()
    with trace.installed():
        return [*_http_flows(trace, folder / "http"), *_fence_flows(trace, folder / "fence")]


def _http_flows(trace: Trace, folder: Path) -> Iterator[Flow]:
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        # However busy the machine is: a 202 would be another flow.
        policy = Policy.from_mapping({"http": {"wait_s": 600, "answer_within_s": 600}})
        app = create_app(folder, policy=policy, insecure_dev=True)

        def run(work: Coroutine[Any, Any, R]) -> R:
            return runner.run(work)

        lifespan = app.router.lifespan_context(app)
        run(lifespan.__aenter__())
        stack.callback(lambda: run(lifespan.__aexit__(None, None, None)))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1")
        stack.callback(lambda: run(client.aclose()))

        def post(number: int, key: str) -> None:
            body = {"doc_id": f"page-{number}", "text": f"Page {number}. A lease expires."}
            answer = run(client.post("/v1/documents", json=body, headers={"Idempotency-Key": key}))
            assert answer.status_code in (200, 201), answer.text

        post(1, "key-1")
        post(1, "key-1")
        post(1, "key-1-again")
        yield trace.measure("POST /v1/documents, new", lambda: post(2, "key-2"))
        yield trace.measure("POST /v1/documents, known", lambda: post(2, "key-2-again"))
        yield trace.measure("POST /v1/documents, same Idempotency-Key", lambda: post(2, "key-2"))


def _fence_flows(trace: Trace, folder: Path) -> Iterator[Flow]:
    with ragfence.open(folder) as fence:

        @fence.once(kind="ticket", key=lambda ticket: ticket["id"])
        def create(ticket: dict[str, int]) -> int:
            return ticket["id"]

        create({"id": 1})
        create({"id": 1})
        yield trace.measure("fence.once, new", lambda: create({"id": 2}))
        yield trace.measure("fence.once, replayed", lambda: create({"id": 2}))

        first, second = (
            [Document(doc_id=f"page-{n}", text=f"Page {n}. A lease expires.") for n in range(start, start + 10)]
            for start in (0, 10)
        )
        ingest_many = fence.documents.ingest_many
        ingest_many(first)
        ingest_many(first)
        yield trace.measure("ingest_many, 10 new", lambda: ingest_many(second))
        yield trace.measure("ingest_many, 10 known", lambda: ingest_many(second))

        fence.aliases.swap("pages", fence.indexes.build().index_hash)
        fence.search("pages", "lease")
        yield trace.measure("fence.search", lambda: fence.search("pages", "When does a lease expire?"))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.flows", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print every module with its functions, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        flows = trace_flows(Path(folder))
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "flow": flow.name,
                        "modules": len(flow.modules),
                        "functions": flow.functions,
                        "called": flow.modules,
                    }
                    for flow in flows
                ],
                indent=2,
            )
        )
        return
    table = Table("flow", title="What a flow walks through, in ragfence")
    for column in ("modules", "functions"):
        table.add_column(column, justify="right")
    for flow in flows:
        table.add_row(flow.name, str(len(flow.modules)), str(flow.functions))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
