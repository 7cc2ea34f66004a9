"""The ingestion API (`create_app`), and its contract for routes of your own (`IdempotencyMiddleware`).

`Contract` knows no framework; the others need `pip install 'ragfence[api]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.server.app import create_app as create_app
    from ragfence.server.contract import Contract as Contract
    from ragfence.server.middleware import IdempotencyMiddleware as IdempotencyMiddleware
    from ragfence.wire.messages import Answer as Answer
    from ragfence.wire.messages import Call as Call
    from ragfence.wire.problems import Problem as Problem
    from ragfence.wire.problems import problem_of as problem_of

_WHERE = {
    "Answer": "ragfence.wire.messages",
    "Call": "ragfence.wire.messages",
    "Contract": "ragfence.server.contract",
    "IdempotencyMiddleware": "ragfence.server.middleware",
    "Problem": "ragfence.wire.problems",
    "create_app": "ragfence.server.app",
    "problem_of": "ragfence.wire.problems",
}

__all__ = ["Answer", "Call", "Contract", "IdempotencyMiddleware", "Problem", "create_app", "problem_of"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.server' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
