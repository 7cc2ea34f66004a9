"""`fence.claim`, and what its block seals."""

from __future__ import annotations

from typing import Any, assert_type

from ragfence import Decision, Fence, Operation, Receipt
from ragfence.engine.claim_block import ClaimBlock

OPERATION = Operation(kind="webhook", source_id="event-1")


def blocks(fence: Fence) -> None:
    with fence.claim(OPERATION, payload={"a": 1}) as op:
        if op.is_new:
            assert_type(op.seal(result=7), Receipt[int])
            assert_type(op.seal(effect_id="7").effect_id, str)
            assert_type(op.seal(result=(1, 2)), Receipt[Any])
            op.seal("7")  # type: ignore[call-overload]
    assert_type(op.decision, Decision)
    assert_type(op.receipt, Receipt)
    assert_type(op.receipt.result, Any)


def results_of_any_type(op: ClaimBlock, result: Any) -> Receipt:
    return op.seal(result=result)


async def async_blocks(fence: Fence) -> None:
    async with fence.claim(OPERATION) as op:
        assert_type(op.seal(result=["a"]).result, list[str])


def receipts(receipt: Receipt, counted: Receipt[int]) -> None:
    assert_type(receipt.result, Any)
    assert_type(receipt.key, str)
    broad: Receipt[float] = counted
    assert_type(broad.result, float)
    same: Receipt = counted
    assert_type(same.decision, Decision)
