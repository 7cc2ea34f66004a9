"""`@fenced_asset`: an asset function that exists already, performed once for what goes into it.

The key is the asset (and its partition); the revision is made of its code version and the DataVersions of what it
depends on, or of whatever `key=` returns. A run for which nothing has changed replays: the function is not called, and
the asset is materialized with the DataVersion, the value and the metadata of the first time.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from ragfence.core.canonical import canonical_json
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.dagster.resource import FenceResource
from ragfence.dagster.versions import recorded_version
from ragfence.errors import NotJson, ValidationError

Key = Callable[[Any], str | tuple[str, str]]
"""made of the context: a revision, or (source_id, revision)"""
FENCE = "fence"


def fenced_asset(
    function: Callable[..., Any] | None = None, *, key: Key | None = None, kind: str = "asset", **asset: Any
) -> Any:
    """As `@dg.asset`, and performed once per key. What it returns must be JSON: that is what a replay returns.

    >>> @fenced_asset(deps=["orders"], code_version="1")  # doctest: +SKIP
    ... def invoices(context): ...

    Raise `ragfence.errors.TerminalError` for a failure that is final; anything else gives the key back, so that a retry
    of Dagster performs it again.
    """
    if function is None:
        return functools.partial(fenced_asset, key=key, kind=kind, **asset)
    return _fenced(function, key, kind, asset)


def _fenced(function: Callable[..., Any], key: Key | None, kind: str, asset: dict[str, Any]) -> dg.AssetsDefinition:
    parameters = list(inspect.signature(function).parameters.values())
    takes_context = bool(parameters) and parameters[0].name in ("context", "_context", "_")
    inputs = parameters[1:] if takes_context else parameters
    wants_fence = any(each.name == FENCE for each in inputs)

    def compute(context: dg.AssetExecutionContext, **given: Any) -> Any:
        resource = given[FENCE] if wants_fence else getattr(context.resources, FENCE)
        with resource.opened(context) as fence:
            operation = _operation(context, key, kind, asset.get("code_version"))
            with fence.claim(operation) as op:
                if op.is_new:
                    outcome = function(context, **given) if takes_context else function(**given)
                    op.seal(result=_kept(outcome))
        receipt = op.receipt
        value, metadata = receipt.result["value"], receipt.result["metadata"]
        told = {"decision": str(receipt.decision), "key": receipt.key, "attempt": op.lease.attempt if op.is_new else 0}
        return dg.MaterializeResult(
            value=value,
            data_version=dg.DataVersion(receipt.result["data_version"]),
            metadata={**metadata, **told},
        )

    # Dagster finds inputs and resources by the signature.
    context_parameter = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    compute.__signature__ = inspect.Signature([context_parameter, *inputs])  # type: ignore[attr-defined]
    compute.__annotations__ = {each.name: each.annotation for each in inputs if each.annotation is not each.empty}
    compute.__name__, compute.__doc__ = function.__name__, function.__doc__
    compute.__module__ = function.__module__
    required = set(asset.pop("required_resource_keys", ())) | (set() if wants_fence else {FENCE})
    asset.setdefault("kinds", {"ragfence"})
    made = dg.asset(required_resource_keys=required or None, **asset)(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def _operation(context: dg.AssetExecutionContext, key: Key | None, kind: str, code_version: str | None) -> Operation:
    name = context.asset_key.to_user_string()
    if context.has_partition_key:
        name += f"@{context.partition_key}"
    source_id, revision = name, ""
    if key is not None:
        given: Any = key(context)
        source_id, revision = given if isinstance(given, tuple) else (name, given)
        if not isinstance(revision, str) or not revision:
            raise ValidationError(f"key= of {name} must return a revision, or (source_id, revision), not {given!r}")
    else:
        revision = _revision(context, code_version)
    return Operation(kind=kind, source_id=source_id, revision=revision, action="materialize")


def _revision(context: dg.AssetExecutionContext, code_version: str | None) -> str:
    """Of the code version, and the DataVersions of all that the asset depends on."""
    dependencies = sorted(
        context.assets_def.asset_deps.get(context.asset_key, ()), key=lambda each: each.to_user_string()
    )
    versions = [(each.to_user_string(), recorded_version(context.instance, each) or "") for each in dependencies]
    config = canonical_json(dict(context.op_config or {})) if isinstance(context.op_config, Mapping) else b""
    parts = [part.encode() for pair in versions for part in pair]
    return digest("ragfence/asset/1", (code_version or "").encode(), config, *parts)[:16].hex()


def _kept(outcome: Any) -> dict[str, Any]:
    """What a replay needs. Of a MaterializeResult its value, its DataVersion, and the metadata that JSON can hold."""
    value, metadata, version = outcome, {}, None
    if isinstance(outcome, dg.MaterializeResult):
        value = outcome.value if outcome.value is not dg._core.definitions.utils.NoValueSentinel else None
        metadata = {name: _plain(each) for name, each in (outcome.metadata or {}).items()}
        version = outcome.data_version.value if outcome.data_version else None
    try:
        made = canonical_json({"value": value, "metadata": metadata})
    except NotJson as wrong:
        raise ValidationError(
            f"what a fenced asset returns must be JSON, so that it can be replayed: {wrong.message}",
            hint="return where the data is, not the data: a path, an id, counts",
        ) from wrong
    return {
        "value": value,
        "metadata": metadata,
        "data_version": version or digest("ragfence/asset/1", made)[:16].hex(),
    }


def _plain(value: Any) -> Any:
    """Of a metadata value what can be kept; what is richer than JSON is shown as text in a replay."""
    inner = getattr(value, "value", value)
    return inner if isinstance(inner, str | int | float | bool | type(None)) else str(inner)


__all__ = ["FENCE", "FenceResource", "fenced_asset"]
