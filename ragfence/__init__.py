"""ragfence: one effect per key, and every later call gets the receipt of the first."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence import errors as errors
    from ragfence._open import open as open
    from ragfence._version import __version__ as __version__
    from ragfence.core.document import Document as Document
    from ragfence.core.key_comparison import compare_keys as compare_keys
    from ragfence.core.key_strategies import by_fields as by_fields
    from ragfence.core.key_strategies import by_id as by_id
    from ragfence.core.key_strategies import by_id_and_fields as by_id_and_fields
    from ragfence.core.operations import Operation as Operation
    from ragfence.core.payments import by_payment_confirmation as by_payment_confirmation
    from ragfence.core.payments import by_payment_request as by_payment_request
    from ragfence.core.policy import Policy as Policy
    from ragfence.core.receipts import Decision as Decision
    from ragfence.core.receipts import Flags as Flags
    from ragfence.core.receipts import Receipt as Receipt
    from ragfence.engine.leases import current_lease as current_lease
    from ragfence.engine.once import Recovered as Recovered
    from ragfence.fence import Fence as Fence
    from ragfence.indexes.spec import IndexSpec as IndexSpec

_WHERE = {
    "Decision": "ragfence.core.receipts",
    "Document": "ragfence.core.document",
    "Fence": "ragfence.fence",
    "Flags": "ragfence.core.receipts",
    "IndexSpec": "ragfence.indexes.spec",
    "Operation": "ragfence.core.operations",
    "Policy": "ragfence.core.policy",
    "Receipt": "ragfence.core.receipts",
    "Recovered": "ragfence.engine.once",
    "__version__": "ragfence._version",
    "by_fields": "ragfence.core.key_strategies",
    "by_id": "ragfence.core.key_strategies",
    "by_id_and_fields": "ragfence.core.key_strategies",
    "compare_keys": "ragfence.core.key_comparison",
    "by_payment_confirmation": "ragfence.core.payments",
    "by_payment_request": "ragfence.core.payments",
    "current_lease": "ragfence.engine.leases",
    "open": "ragfence._open",
}

__all__ = [
    "Decision",
    "Document",
    "Fence",
    "Flags",
    "IndexSpec",
    "Operation",
    "Policy",
    "Receipt",
    "Recovered",
    "__version__",
    "by_fields",
    "by_id",
    "by_id_and_fields",
    "by_payment_confirmation",
    "by_payment_request",
    "compare_keys",
    "current_lease",
    "errors",
    "open",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ragfence.errors")
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
