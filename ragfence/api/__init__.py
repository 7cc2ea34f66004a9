"""The ingestion API (`create_app`), and its contract for routes of your own (`IdempotencyMiddleware`).

`Contract` knows no framework; the others need `pip install 'ragfence[api]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.api.app import create_app as create_app
    from ragfence.api.contract import Contract as Contract
    from ragfence.api.messages import Answer as Answer
    from ragfence.api.messages import Call as Call
    from ragfence.api.middleware import IdempotencyMiddleware as IdempotencyMiddleware
    from ragfence.api.problems import Problem as Problem
    from ragfence.api.problems import problem_of as problem_of

_WHERE = {
    "Answer": "ragfence.api.messages",
    "Call": "ragfence.api.messages",
    "Contract": "ragfence.api.contract",
    "IdempotencyMiddleware": "ragfence.api.middleware",
    "Problem": "ragfence.api.problems",
    "create_app": "ragfence.api.app",
    "problem_of": "ragfence.api.problems",
}

__all__ = ["Answer", "Call", "Contract", "IdempotencyMiddleware", "Problem", "create_app", "problem_of"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
