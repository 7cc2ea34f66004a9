"""`@fenced_asset`: an asset whose function runs once for the same inputs.

The key is the asset and its partition. The revision is derived from its code version, its config and the DataVersions
of its dependencies, or it is what `key=` returns. If nothing has changed, a run replays: the function is not called,
and the asset is materialized with the DataVersion, value, metadata and checks of the first run.
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
from ragfence.dagster._event_log import recorded_version, recorded_versions
from ragfence.dagster.resource import FENCE, open_fence
from ragfence.engine.claim_block import is_final
from ragfence.errors import EffectFailed, FencedOut, NotJson, TerminalError, ValidationError

Key = Callable[[Any], str | tuple[str, str]]
"""Called with the context; returns a revision, or (source_id, revision)."""
NO_VALUE: Any = dg.MaterializeResult().value
"""Dagster's marker for "no value". None is a value."""


def fenced_asset(
    function: Callable[..., Any] | None = None,
    *,
    key: Key | None = None,
    kind: str = "asset",
    resource_key: str = FENCE,
    **asset: Any,
) -> Any:
    """Like `@dg.asset`, but the function runs once per key. Its return value must be JSON, so that it can be replayed.

    >>> @fenced_asset(deps=["orders"], code_version="1")  # doctest: +SKIP
    ... def invoices(context): ...

    Raise `ragfence.errors.TerminalError` for a final failure. Any other exception releases the key, so that a retry of
    Dagster runs the function again.

    Args:
        function: The function of the asset.
        key: Called with the context; returns the revision, or (source_id, revision).
        kind: The kind of the operation, for policies and the audit.
        resource_key: The FenceResource to use, if there are several.
        asset: Any other argument of `@dg.asset`.
    """
    if function is None:
        return functools.partial(fenced_asset, key=key, kind=kind, resource_key=resource_key, **asset)
    _refuse_misuse(function)
    return _fenced(function, key, kind, resource_key, asset)


def _refuse_misuse(function: Any) -> None:
    if not inspect.isroutine(function):
        raise ValidationError(
            f"@fenced_asset takes a function, not a {type(function).__name__}",
            hint="use it instead of @dg.asset, not on top of it; for several assets, write one function each",
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValidationError(
            f"{function.__name__} is a generator, whose values cannot be replayed",
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
        def execute() -> Any:
            outcome = function(context, **given) if takes_context else function(**given)
            outcome = asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome
            return dg.MaterializeResult() if valueless and outcome is None else outcome

        operation = _operation(context, key, kind, asset.get("code_version"))
        resource = given.get(resource_key)
        with resource.open(context) if resource is not None else open_fence(context, resource_key) as fence:
            try:
                receipt = _claim_and_run(fence.claim(operation), execute, operation.revision)
            except EffectFailed as failed:
                raise dg.Failure(
                    description=failed.message, metadata=_failure_metadata(failed), allow_retries=False
                ) from failed
            except TerminalError as failed:
                if not is_final(failed):
                    raise
                # The failure is sealed: a retry would get the same failure without running anything.
                description = f"{type(failed).__name__}: {failed.message}"
                raise dg.Failure(description=description, allow_retries=False) from failed
        return _deserialize(receipt.result, _receipt_metadata(receipt))

    # Dagster reads inputs, config and resources from the signature.
    context_parameter = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    seen = signature.replace(parameters=[context_parameter, *inputs], return_annotation=signature.empty)
    compute.__annotations__ = {each.name: each.annotation for each in inputs if each.annotation is not each.empty}
    if valueless:
        # Without a value there is nothing for an IO manager to store.
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
        # Annotations that are strings can only be resolved in the module of the function.
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)


def _claim_and_run(claim: Any, execute: Callable[[], Any], revision: str) -> Receipt:
    try:
        with claim as op:
            if op.is_new:
                op.seal(result=_serialize(execute(), revision))
    except FencedOut as lost:
        # This process was frozen past its lease and another attempt has finished: its receipt is the answer.
        winner: Receipt | None = lost.receipt
        if winner is None or winner.failed:
            raise
        return winner
    receipt: Receipt = op.receipt
    return receipt


def _receipt_metadata(receipt: Receipt) -> dict[str, Any]:
    return {**_metadata.decision(receipt), "key": receipt.key}


def _failure_metadata(failed: EffectFailed) -> dict[str, Any]:
    receipt: Receipt | None = failed.receipt
    return _receipt_metadata(receipt) if receipt is not None else {}


def _operation(context: dg.AssetExecutionContext, key: Key | None, kind: str, code_version: str | None) -> Operation:
    name = context.asset_key.to_user_string()
    if partitions := _partitions(context):
        # Several partitions in one run are one operation, because the function is called once for all of them. They are
        # digested rather than joined, because any separator may occur in the name of a partition.
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
    """A digest of the code version, the config and the DataVersions of the dependencies."""
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
    """The partitions that this run depends on, or None if the upstream asset has no partitions."""
    try:
        context.asset_partitions_def_for_input(input_name)
    except dg.DagsterInvariantViolationError:
        return None
    return list(context.asset_partition_keys_for_input(input_name))


def _serialize(outcome: Any, revision: str) -> dict[str, Any]:
    """What an asset function returned, as JSON. Without a value, the DataVersion is derived from the revision."""
    result = outcome if isinstance(outcome, dg.MaterializeResult) else _result_of(outcome)
    value = None if result.value is NO_VALUE else result.value
    try:
        made = canonical_json(value)
    except NotJson as wrong:
        raise ValidationError(
            f"the return value of a fenced asset must be JSON, so that it can be replayed: {wrong.message}",
            hint="return where the data is, not the data: a path, an id, counts",
        ) from wrong
    version = result.data_version.value if result.data_version else None
    # Metadata is not part of the DataVersion, because it may contain times.
    content = revision.encode() if value is None else made
    return {
        "value": value,
        "has_value": result.value is not NO_VALUE,
        "data_version": version or digest("ragfence/asset/1", content)[:16].hex(),
        "metadata": _serialize_metadata(result.metadata or {}),
        "tags": dict(result.tags or {}),
        "checks": [
            {
                "name": check.check_name,
                "passed": check.passed,
                "severity": check.severity.value,
                "description": check.description,
                "metadata": _serialize_metadata(check.metadata or {}),
            }
            for check in result.check_results or ()
        ],
    }


def _deserialize(sealed: Mapping[str, Any], metadata: Mapping[str, Any]) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """The sealed result as a materialization, with the metadata of this run added."""
    return dg.MaterializeResult(
        value=sealed["value"] if sealed["has_value"] else NO_VALUE,
        data_version=dg.DataVersion(sealed["data_version"]),
        metadata={**_deserialize_metadata(sealed["metadata"]), **metadata},
        tags=sealed["tags"] or None,
        check_results=[
            dg.AssetCheckResult(
                check_name=check["name"],
                passed=check["passed"],
                severity=dg.AssetCheckSeverity(check["severity"]),
                description=check["description"],
                metadata=_deserialize_metadata(check["metadata"]),
            )
            for check in sealed["checks"]
        ],
    )


def _result_of(outcome: Any) -> dg.MaterializeResult:  # type: ignore[type-arg]
    if isinstance(outcome, dg.Output):
        return dg.MaterializeResult(
            value=outcome.value, metadata=outcome.metadata, data_version=outcome.data_version, tags=outcome.tags
        )
    return dg.MaterializeResult(value=outcome)


def _serialize_metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _serialize_value(value) for name, value in given.items()}


def _serialize_value(value: Any) -> dict[str, Any]:
    """JSON as it is, and Dagster's own values as Dagster serializes them. Anything else becomes text in a replay."""
    if isinstance(value, dg.MetadataValue):
        own: Any = value
        return {"dagster": dg.serialize_value(own)}
    try:
        canonical_json(value)
    except NotJson:
        return {"json": str(value)}
    return {"json": value}


def _deserialize_metadata(sealed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dg.deserialize_value(value["dagster"]) if "dagster" in value else value["json"]
        for name, value in sealed.items()
    }
