"""What a fenced asset returned, in a form that is sealed with its receipt and made into the same result again."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from ragfence.core.canonical import canonical_json
from ragfence.core.hashing import digest
from ragfence.errors import NotJson, ValidationError

NO_VALUE: Any = dg.MaterializeResult().value
"""what Dagster takes for "no value was given": not None, which is one"""


def kept(outcome: Any, revision: str) -> dict[str, Any]:
    """Of whatever an asset function may return. Without a value, the version is that of what went into it."""
    result = outcome if isinstance(outcome, dg.MaterializeResult) else _result_of(outcome)
    value = None if result.value is NO_VALUE else result.value
    try:
        made = canonical_json(value)
    except NotJson as wrong:
        raise ValidationError(
            f"what a fenced asset returns must be JSON, so that it can be replayed: {wrong.message}",
            hint="return where the data is, not the data: a path, an id, counts",
        ) from wrong
    version = result.data_version.value if result.data_version else None
    # Metadata takes no part: it may tell of times.
    unnamed = revision.encode() if value is None else made
    return {
        "value": value,
        "has_value": result.value is not NO_VALUE,
        "data_version": version or digest("ragfence/asset/1", unnamed)[:16].hex(),
        "metadata": _metadata(result.metadata or {}),
        "tags": dict(result.tags or {}),
        "checks": [
            {
                "name": check.check_name,
                "passed": check.passed,
                "severity": check.severity.value,
                "description": check.description,
                "metadata": _metadata(check.metadata or {}),
            }
            for check in result.check_results or ()
        ],
    }


def remade(sealed: Mapping[str, Any], told: Mapping[str, Any]) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """What was kept, as a materialization; `told`: what this run has to say about it."""
    return dg.MaterializeResult(
        value=sealed["value"] if sealed["has_value"] else NO_VALUE,
        data_version=dg.DataVersion(sealed["data_version"]),
        metadata={**_shown(sealed["metadata"]), **told},
        tags=sealed["tags"] or None,
        check_results=[
            dg.AssetCheckResult(
                check_name=check["name"],
                passed=check["passed"],
                severity=dg.AssetCheckSeverity(check["severity"]),
                description=check["description"],
                metadata=_shown(check["metadata"]),
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


def _metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _kept_value(value) for name, value in given.items()}


def _kept_value(value: Any) -> dict[str, Any]:
    """JSON as it is, Dagster's own values as Dagster writes them; what is neither is shown as text in a replay."""
    if isinstance(value, dg.MetadataValue):
        own: Any = value
        return {"dagster": dg.serialize_value(own)}
    try:
        canonical_json(value)
    except NotJson:
        return {"json": str(value)}
    return {"json": value}


def _shown(sealed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dg.deserialize_value(value["dagster"]) if "dagster" in value else value["json"]
        for name, value in sealed.items()
    }
