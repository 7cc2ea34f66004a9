"""`ragfence drain`: decision rows from the fence store into the ledger, once or again and again."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, opened
from ragfence.errors import TransientError

if TYPE_CHECKING:
    from ragfence.audit.drain import Drained

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600}


def _seconds(text: str | None) -> str | None:
    if text is not None and not (_SPAN.fullmatch(text) and _as_seconds(text) > 0):
        raise typer.BadParameter(f"{text!r} is no span: 60s, 5m, 1h")
    return text


def drain(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="SPAN", callback=_seconds, help="Again and again, until Ctrl-C: 60s, 5m."),
    ] = None,
    every_day: Annotated[
        bool, typer.Option("--every-day", help="Compact the days, too, that were left alone for a week.")
    ] = False,
) -> None:
    """Moves the decision rows into the ledger: Parquet in the object store, by day. Compacts it; old days expire."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        audit = fence.audit
        while True:
            try:
                with output.progress("draining"):
                    done = audit.drain(every_day=every_day)
                _tell(done, as_json)
            except TransientError as error:
                # Nothing was lost: what is not in the ledger is still in the fence store.
                if every is None:
                    raise
                output.error(error, as_json=as_json)
            if every is None:
                return
            time.sleep(_as_seconds(every))


def _tell(done: Drained, as_json: bool) -> None:
    if as_json:
        output.document(asdict(done))
        return
    if done.busy:
        output.say("somebody else is draining; nothing was done")
        return
    told = [f"{output.many(done.rows, 'row')} into {output.many(done.objects, 'object')}"]
    if done.rows:
        told.append(f"the oldest was {output.span(done.lag_ms)} old")
    if done.compacted:
        told.append(f"{output.many(done.compacted, 'small object')} made into {done.packed:,}")
    if done.expired:
        told.append(f"{output.many(done.expired, 'object')} of expired days removed")
    output.say(", ".join(told))


def _as_seconds(text: str) -> float:
    matched = _SPAN.fullmatch(text)
    assert matched is not None
    return float(matched[1]) * _UNIT_S[matched[2]]
