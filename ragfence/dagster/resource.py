"""The fence as a Dagster resource: opened for a step, closed with it."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

import ragfence
from ragfence.core.urls import show_url
from ragfence.errors import ValidationError
from ragfence.fence import Fence

FENCE = "fence"
"""the name under which assets, checks and jobs look for the resource, unless they are told another"""
CORRELATION_TAG = "ragfence/correlation_id"
"""a tag of a run whose value goes into its decision rows; without it, that of the backfill does"""
_BACKFILL_TAG = "dagster/backfill"


class FenceResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A fence for assets, ops and checks. Empty fields come from RAGFENCE_* variables; without any, it is embedded.

    Coordination is in the fence, never in the executor: any number of runs, in any processes, may hold one.
    """

    store: str = Field(default="", description="redis://..., or a folder; empty: RAGFENCE_STORE, or .ragfence/")
    objects: str = Field(default="", description="s3://bucket/prefix, or a folder; empty: RAGFENCE_OBJECTS")
    tenant: str = Field(default="", description="empty: RAGFENCE_TENANT, or 'default'")
    policy: str = Field(default="", description="a ragfence.yml; empty: RAGFENCE_POLICY, or the defaults")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return without_passwords(super().__repr_args__())

    @contextmanager
    def opened(self, context: Any = None) -> Iterator[Fence]:
        """Given the context of a step, its run and tags are in the decision rows.

        Leases are renewed by a thread of this process: a run that is killed frees its claims within one lease, one that
        is cancelled at once.
        """
        with ragfence.open(
            self.store or None,
            objects=self.objects or None,
            tenant=self.tenant or None,
            policy=self.policy or None,
            **_told_of(context),
        ) as fence:
            yield fence


def without_passwords(shown: Iterable[tuple[str | None, Any]]) -> Iterator[tuple[str | None, Any]]:
    """The fields of a repr, with store URLs as they may be logged."""
    for name, value in shown:
        yield name, show_url(value) if isinstance(value, str) and name in ("store", "objects", "source") else value


def opened_in(context: Any, resource_key: str) -> AbstractContextManager[Fence]:
    """The fence of a step, by the name of its resource."""
    resource = getattr(context.resources, resource_key)
    if not isinstance(resource, FenceResource):
        raise ValidationError(
            f"the resource {resource_key!r} is a {type(resource).__name__}, not a FenceResource",
            hint=f"resources={{{resource_key!r}: FenceResource()}}, or another resource_key=",
        )
    return resource.opened(context)


def _told_of(context: Any) -> dict[str, str]:
    try:
        run = getattr(context, "run", None)
    except dg.DagsterError:  # a function that is called directly, in somebody's test, has no run
        run = None
    if run is None:
        return {}
    tags = run.tags
    step = getattr(context, "op_execution_context", context)
    return {
        "run_id": run.run_id,
        "correlation_id": tags.get(CORRELATION_TAG) or tags.get(_BACKFILL_TAG, ""),
        "route": f"dagster:{getattr(step, 'op_handle', None) or run.job_name}"[:255],
    }
