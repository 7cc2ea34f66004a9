"""What a caller gets: a receipt that is the same for every call with the key, and how this call came by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

from ragfence.errors import EffectFailed, RagfenceError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R = TypeVar("R", default=Any, covariant=True)
    """the type of `result`; a `Receipt` without a parameter may hold anything"""
else:  # only type checkers need the default
    from typing import TypeVar

    R = TypeVar("R", covariant=True)

OnError = Literal["return", "raise"]
"""What a call with many documents does with one that fails: returns a receipt with `failure`, or raises."""


class Decision(StrEnum):
    NEW = "new"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    IN_FLIGHT = "in_flight"
    STALE = "stale"
    REFUSED = "refused"
    """a document that was not ingested because of itself: it is invalid, or its chunker failed; never a decision row"""


NEW, DUPLICATE, STALE = Decision.NEW, Decision.DUPLICATE, Decision.STALE
"""as plain names, like those of `decisions.Mode`"""


@dataclass(frozen=True, slots=True)
class Flags:
    """How this one call came by its answer."""

    attempt: int = 1
    takeover: bool = False
    """an earlier owner's lease had run out"""
    healed: bool = False
    """an earlier owner had committed and died before its seal; the effect was found, not repeated"""
    revived: bool = False
    metadata_updated: bool = False
    fenced_out: bool = False
    """this call performed the effect too, but another attempt had committed first"""
    journaled: bool = False
    """the store was down; the effect ran and waits in the local journal to be sealed"""
    waited_ms: int = 0


@lru_cache(maxsize=256)
def flags_of(attempt: int, waited_ms: int, *, takeover: bool = False, journaled: bool = False) -> Flags:
    """Nearly all calls come by their answer in one of a few ways."""
    return Flags(attempt=attempt, takeover=takeover, waited_ms=waited_ms, journaled=journaled)


class Receipt(NamedTuple, Generic[R]):
    """The outcome of a key. Two receipts are equal when key, effect_id, snippet_ids, result and failure are.

    What follows these is particular to one call, and takes no part in equality.
    """

    key: str
    effect_id: str
    snippet_ids: tuple[str, ...] = ()
    result: R = None  # type: ignore[assignment]  # what has no result is a Receipt[None]
    failure: Mapping[str, Any] | None = None
    decision: Decision = Decision.NEW
    flags: Flags = Flags()
    fence: str = ""
    first_seen_ms: int | None = None
    sealed_at_ms: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self[:_COMPARED] == other[:_COMPARED]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # `result` may hold dicts and lists, so equality is by value.
        raise TypeError("receipts are not hashable; receipt.key is")

    def __repr__(self) -> str:
        if self.failure is None:
            return f"Receipt({', '.join(f'{name}={value!r}' for name, value in zip(self._fields, self, strict=True))})"
        code, message = self.failure.get("code", ""), self.failure.get("message", "")
        return f"Receipt({self.decision.value}: {message} [{code}], key={self.key!r})"

    @property
    def is_new(self) -> bool:
        return self.decision is Decision.NEW

    @property
    def failed(self) -> bool:
        return self.failure is not None


_COMPARED = Receipt._fields.index("decision")


def default_effect_id(key: bytes) -> str:
    """The effect_id of an effect that names none: a part of its key, so it needs no room in the stores."""
    return f"ef_{key[1:17].hex()}"


def default_effect_id_of(hex_key: str) -> str:
    """The same, of a key as people see it, for a caller that has it."""
    return "ef_" + hex_key[2:34]


def refused_receipt(error: Exception, key: str = "", decision: Decision = Decision.REFUSED) -> Receipt:
    """What stands in the place of a receipt for a document that was not ingested. One that is invalid has no key."""
    if isinstance(error, RagfenceError):
        code, message = error.code, error.message
    else:
        code, message = EffectFailed.code, f"{type(error).__name__}: {error}"
    return Receipt(
        key, "", failure={"type": type(error).__name__, "code": code, "message": message[:2000]}, decision=decision
    )


def collect(receipts: Iterator[Receipt]) -> list[Receipt]:
    """All of them. An error that one of the documents raised carries the receipts of those before it."""
    collected: list[Receipt] = []
    try:
        collected.extend(receipts)
    except RagfenceError as stopped:
        if "position" in stopped.details:
            stopped.details["receipts"] = tuple(collected)
        raise
    return collected
