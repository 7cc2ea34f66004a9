"""The fence as a Dagster resource, which is open while a step runs."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

import ragfence
from ragfence.core.urls import show_url
from ragfence.errors import ValidationError
from ragfence.fence import Fence
from ragfence.steps import Run

FENCE = "fence"
"""The default `resource_key` of assets, checks and jobs."""
CORRELATION_TAG = "ragfence/correlation_id"
"""The tag of a run with the correlation_id of its decision rows; by default the id of the backfill."""
_BACKFILL_TAG = "dagster/backfill"


class FenceResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A fence for assets, ops and checks.

    Empty fields come from the RAGFENCE_* variables. Without any, the fence is embedded. Any number of runs, in any
    processes, may use the same stores: the fence does the coordination, never the executor.
    """

    store: str = Field(default="", description="redis://..., or a folder. Empty: RAGFENCE_STORE, or .ragfence/.")
    objects: str = Field(default="", description="s3://bucket/prefix, or a folder. Empty: RAGFENCE_OBJECTS.")
    tenant: str = Field(default="", description="Empty: RAGFENCE_TENANT, or 'default'.")
    policy: str = Field(default="", description="A ragfence.yml. Empty: RAGFENCE_POLICY, or the defaults.")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return without_passwords(super().__repr_args__())

    @contextmanager
    def open(self, context: Any = None) -> Iterator[Fence]:
        """Opens the fence. With the context of a step, its run and tags are written to the decision rows.

        A thread of this process renews the leases. A run that is cancelled releases its claims at once, a run that is
        killed within one lease.
        """
        with ragfence.open(
            self.store or None,
            objects=self.objects or None,
            tenant=self.tenant or None,
            policy=self.policy or None,
            **_run_fields(context),
        ) as fence:
            yield fence

    @contextmanager
    def run(self, context: Any, *, fresh: bool = False) -> Iterator[Run]:
        """Opens the fence for the steps of this run; see `Fence.run`.

        The steps belong to the *root* run: a re-execution, from failure or of everything, returns the results that its
        parents stored, and executes only what is missing. `fresh=True` starts anew: then the steps belong to this very
        run, and only its own retries find them.

        >>> with fence.run(context) as step:  # doctest: +SKIP
        ...     rows = step("extract", extract, source="s3://bucket/day")
        """
        run_id = _step_run_id(context, fresh)
        with self.open(context) as fence:
            yield fence.run(run_id)


def without_passwords(shown: Iterable[tuple[str | None, Any]]) -> Iterator[tuple[str | None, Any]]:
    """The fields of a repr, with URLs that can be logged."""
    for name, value in shown:
        yield name, show_url(value) if isinstance(value, str) and name in ("store", "objects", "source") else value


def open_fence(context: Any, resource_key: str) -> AbstractContextManager[Fence]:
    """The fence of a step, by the key of its resource."""
    resource = getattr(context.resources, resource_key)
    if not isinstance(resource, FenceResource):
        raise ValidationError(
            f"the resource {resource_key!r} is a {type(resource).__name__}, not a FenceResource",
            hint=f"pass resources={{{resource_key!r}: FenceResource()}}, or another resource_key=",
        )
    return resource.open(context)


def _run_of(context: Any) -> Any:
    try:
        return getattr(context, "run", None)
    except dg.DagsterError:  # a function that a test calls directly has no run
        return None


def _step_run_id(context: Any, fresh: bool) -> str:
    run = _run_of(context)
    if run is None:
        raise ValidationError(
            "there is no Dagster run whose steps these could be",
            hint='execute the job, or use open(context) and fence.run("an id") in a direct call',
        )
    return f"dagster:{run.run_id if fresh else run.root_run_id or run.run_id}"


def _run_fields(context: Any) -> dict[str, str]:
    run = _run_of(context)
    if run is None:
        return {}
    tags = run.tags
    step = getattr(context, "op_execution_context", context)
    return {
        "run_id": run.run_id,
        "correlation_id": tags.get(CORRELATION_TAG) or tags.get(_BACKFILL_TAG, ""),
        "route": f"dagster:{getattr(step, 'op_handle', None) or run.job_name}"[:255],
    }
