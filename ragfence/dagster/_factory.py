"""What the assets have in common: how one is made of a function, and how it says how far it is."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

SHOWN = 50
"""as many failures, or changes of an alias, are shown; all are counted"""
EVERY_S = 10.0
"""so often a step says how far it is: every line is an event that Dagster stores"""


def asset_made(
    compute: Callable[..., Any], name: str, resource_key: str, given: Mapping[str, Any], **own: Any
) -> dg.AssetsDefinition:
    named = {} if "key" in given else {"name": name}
    required = {resource_key, *(given.get("required_resource_keys") or ())}
    with warnings.catch_warnings():
        # Backfill policies are in beta; whoever uses an asset of ours has not chosen to use one.
        warnings.simplefilter("ignore", dg.BetaWarning)
        made = dg.asset(**{**named, **given, **own, "required_resource_keys": required})(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def said_now_and_then(context: dg.AssetExecutionContext, what: str) -> Callable[[int], None]:
    """For whoever counts: what it is called with is said in the log of the step, every few seconds."""
    said_at = time.monotonic()

    def told(done: int) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= EVERY_S:
            said_at = now
            context.log.info("%d %s", done, what)

    return told
