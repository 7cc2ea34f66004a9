"""Makes assets and sensors from functions, and the loggers of their progress."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

SHOWN = 50
"""How many failures, or changes of an alias, are shown. All of them are counted."""
EVERY_S = 10.0
"""How often a step logs its progress. Dagster stores every line as an event."""


def make_asset(
    compute: Callable[..., Any], name: str, resource_key: str, given: Mapping[str, Any], **own: Any
) -> dg.AssetsDefinition:
    named = {} if "key" in given else {"name": name}
    required = {resource_key, *(given.get("required_resource_keys") or ())}
    with warnings.catch_warnings():
        # Backfill policies are in beta, and the user of our asset did not choose one.
        warnings.simplefilter("ignore", dg.BetaWarning)
        made = dg.asset(**{**named, **given, **own, "required_resource_keys": required})(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def make_sensor(
    evaluate: Callable[[dg.SensorEvaluationContext], Any], target: Any, *, running: bool, **own: Any
) -> dg.SensorDefinition:
    """Returns a sensor that requests runs of a job, or of a selection of assets."""
    decide: Callable[..., Any] = dg.sensor(
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        **{"job" if isinstance(target, dg.JobDefinition) else "target": target},
        **own,
    )
    made = decide(evaluate)
    assert isinstance(made, dg.SensorDefinition)
    return made


def asset_key(name: str, asset: Mapping[str, Any]) -> dg.AssetKey:
    """The key of an asset that is given no key of its own."""
    prefix = asset.get("key_prefix") or []
    return dg.AssetKey([*([prefix] if isinstance(prefix, str) else prefix), name])


def progress_logger(context: dg.AssetExecutionContext, what: str) -> Callable[[int], None]:
    """Returns a function that logs the count it is called with, at most once in `EVERY_S` seconds."""
    logged_at = time.monotonic()

    def log_progress(done: int) -> None:
        nonlocal logged_at
        now = time.monotonic()
        if now - logged_at >= EVERY_S:
            logged_at = now
            context.log.info("%d %s so far", done, what)

    return log_progress
