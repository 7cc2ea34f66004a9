"""`@fenced_asset`: an asset function that exists already, performed once for what goes into it.

The key is the asset (and its partition); the revision is made of its code version, its config and the DataVersions of
what it depends on, or of whatever `key=` returns. A run for which nothing has changed replays: the function is not
called, and the asset is materialized with the DataVersion, the value, the metadata and the checks of the first time.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from ragfence.core.canonical import canonical_json
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.core.receipts import Receipt
from ragfence.dagster import _metadata
from ragfence.dagster._serialization import kept, remade
from ragfence.dagster.resource import FENCE, FenceResource, opened_in
from ragfence.dagster.versions import recorded_version, recorded_versions
from ragfence.engine.claim_block import is_final
from ragfence.errors import EffectFailed, FencedOut, TerminalError, ValidationError

Key = Callable[[Any], str | tuple[str, str]]
"""made of the context: a revision, or (source_id, revision)"""


def fenced_asset(
    function: Callable[..., Any] | None = None,
    *,
    key: Key | None = None,
    kind: str = "asset",
    resource_key: str = FENCE,
    **asset: Any,
) -> Any:
    """As `@dg.asset`, and performed once per key. What it returns must be JSON: that is what a replay returns.

    >>> @fenced_asset(deps=["orders"], code_version="1")  # doctest: +SKIP
    ... def invoices(context): ...

    Raise `ragfence.errors.TerminalError` for a failure that is final; anything else gives the key back, so that a retry
    of Dagster performs it again.
    """
    if function is None:
        return functools.partial(fenced_asset, key=key, kind=kind, resource_key=resource_key, **asset)
    _refuse_misuse(function)
    return _fenced(function, key, kind, resource_key, asset)


def _refuse_misuse(function: Any) -> None:
    if not inspect.isroutine(function):
        raise ValidationError(
            f"@fenced_asset takes a function, not a {type(function).__name__}",
            hint="use it instead of @dg.asset, not on top of it; for several assets, one function each",
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValidationError(
            f"{function.__name__} is a generator, and what it yields cannot be replayed",
            hint="return a value, or one MaterializeResult with metadata and check_results",
        )


def _fenced(
    function: Callable[..., Any], key: Key | None, kind: str, resource_key: str, asset: dict[str, Any]
) -> dg.AssetsDefinition:
    signature = _signature(function)
    parameters = list(signature.parameters.values())
    takes_context = bool(parameters) and parameters[0].name in ("context", "_context", "_", "__")
    inputs = parameters[1:] if takes_context else parameters
    valueless = signature.return_annotation in (None, dg.MaterializeResult)
    given_as_input = any(each.name == resource_key for each in inputs)

    def compute(context: dg.AssetExecutionContext, **given: Any) -> Any:
        def performed() -> Any:
            outcome = function(context, **given) if takes_context else function(**given)
            outcome = asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome
            return dg.MaterializeResult() if valueless and outcome is None else outcome

        operation = _operation(context, key, kind, asset.get("code_version"))
        resource = given.get(resource_key)
        with resource.opened(context) if resource is not None else opened_in(context, resource_key) as fence:
            try:
                receipt = _answered(fence.claim(operation), performed, operation.revision)
            except EffectFailed as failed:
                raise dg.Failure(description=failed.message, metadata=_why(failed), allow_retries=False) from failed
            except TerminalError as failed:
                if not is_final(failed):
                    raise
                # It is sealed: a retry would be answered with it, and could perform nothing.
                description = f"{type(failed).__name__}: {failed.message}"
                raise dg.Failure(description=description, allow_retries=False) from failed
        return remade(receipt.result, _told(receipt))

    # Dagster finds inputs, config and resources by the signature.
    context_parameter = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    seen = signature.replace(parameters=[context_parameter, *inputs], return_annotation=signature.empty)
    compute.__annotations__ = {each.name: each.annotation for each in inputs if each.annotation is not each.empty}
    if valueless:
        # No value, and so nothing for an IO manager.
        compute.__annotations__["return"] = dg.MaterializeResult
        seen = seen.replace(return_annotation=dg.MaterializeResult)
    compute.__signature__ = seen  # type: ignore[attr-defined]
    compute.__name__, compute.__doc__ = function.__name__, function.__doc__
    compute.__module__ = function.__module__
    required = set(asset.pop("required_resource_keys", None) or ()) | (set() if given_as_input else {resource_key})
    asset.setdefault("kinds", {"ragfence"})
    made = dg.asset(required_resource_keys=required or None, **asset)(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        # Annotations that are text are resolved where they were written: nobody could do so later.
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)


def _answered(claim: Any, performed: Callable[[], Any], revision: str) -> Receipt:
    try:
        with claim as op:
            if op.is_new:
                op.seal(result=kept(performed(), revision))
    except FencedOut as lost:
        # Frozen beyond its lease, and another attempt has finished: that is everybody's answer.
        winner: Receipt | None = lost.receipt
        if winner is None or winner.failed:
            raise
        return winner
    receipt: Receipt = op.receipt
    return receipt


def _told(receipt: Receipt) -> dict[str, Any]:
    return {**_metadata.answer(receipt), "key": receipt.key}


def _why(failed: EffectFailed) -> dict[str, Any]:
    receipt: Receipt | None = failed.receipt
    return _told(receipt) if receipt is not None else {}


def _operation(context: dg.AssetExecutionContext, key: Key | None, kind: str, code_version: str | None) -> Operation:
    name = context.asset_key.to_user_string()
    if partitions := _partitions(context):
        # Several in one run are one operation, since the function is called once for all of them. They have a digest:
        # whatever they could be joined by may stand in the name of one.
        is_short = len(partitions) == 1 and len(partitions[0]) <= 200
        together = digest("ragfence/partitions/1", *(each.encode() for each in partitions)).hex()
        name += f"@{partitions[0] if is_short else together}"
    source_id, revision = name, ""
    if key is not None:
        given: Any = key(context)
        source_id, revision = given if isinstance(given, tuple) and len(given) == 2 else (name, given)
        if not all(isinstance(each, str) and each for each in (source_id, revision)):
            raise ValidationError(f"key= of {name} must return a revision, or (source_id, revision), not {given!r}")
    else:
        revision = _revision(context, code_version)
    return Operation(kind=kind, source_id=source_id, revision=revision, action="materialize")


def _partitions(context: dg.AssetExecutionContext) -> list[str]:
    return list(context.partition_keys) if context.has_partition_key or context.has_partition_key_range else []


def _revision(context: dg.AssetExecutionContext, code_version: str | None) -> str:
    """Of the code version, the config, and the DataVersions of all that the asset depends on."""
    given = context.op_execution_context.op_config
    config = canonical_json(dict(given)) if isinstance(given, Mapping) else b""
    parts = [part.encode() for pair in _versions(context) for part in pair]
    return digest("ragfence/asset/1", (code_version or "").encode(), config, *parts)[:16].hex()


def _versions(context: dg.AssetExecutionContext) -> list[tuple[str, str]]:
    versions: list[tuple[str, str]] = []
    by_input = sorted(context.assets_def.keys_by_input_name.items(), key=lambda each: each[1].to_user_string())
    for input_name, key in by_input:
        name, partitions = key.to_user_string(), _upstream_partitions(context, input_name)
        if partitions is None:
            versions.append((name, recorded_version(context.instance, key) or ""))
        else:
            held = recorded_versions(context.instance, key, partitions)
            versions += [(f"{name}@{partition}", version) for partition, version in held]
    return versions


def _upstream_partitions(context: dg.AssetExecutionContext, input_name: str) -> list[str] | None:
    """Those that this run depends on; None: the other asset has none."""
    try:
        context.asset_partitions_def_for_input(input_name)
    except dg.DagsterInvariantViolationError:
        return None
    return list(context.asset_partition_keys_for_input(input_name))


__all__ = ["FENCE", "FenceResource", "fenced_asset"]
