"""Maintenance jobs and their schedules: verify, purge_expired, gc and drain."""

from collections.abc import Sequence

import dagster as dg

from ragfence.dagster.resource import FENCE, open_fence

SHOWN = 20


def build_jobs(*, resource_key: str = FENCE, prefix: str = "") -> tuple[dg.JobDefinition, ...]:
    """The jobs verify, purge_expired, gc and drain of a fence. Give each of several fences a prefix."""

    @dg.op(
        name=f"{prefix}verify_documents",
        required_resource_keys={resource_key},
        description="Compares fence store, log, snippets and live indexes. Fails with the findings.",
    )
    def verify_documents(context: dg.OpExecutionContext) -> None:
        with open_fence(context, resource_key) as fence:
            report = fence.documents.verify()
        context.log.info("%d documents, %d rows, %d snippets", report.documents, report.rows, report.snippets)
        for finding in report.findings[:SHOWN]:
            context.log.warning("%s: %s -> %s", finding.trouble, finding.what, finding.to_do)
        if not report.ok:
            raise dg.Failure(
                description=f"{len(report.findings)} {'finding' if len(report.findings) == 1 else 'findings'}",
                allow_retries=False,
            )

    @dg.op(
        name=f"{prefix}audit_decisions",
        required_resource_keys={resource_key},
        description="Checks every guarantee with the decision rows and the log of aliases. Fails with the findings.",
    )
    def audit_decisions(context: dg.OpExecutionContext) -> None:
        with open_fence(context, resource_key) as fence:
            report = fence.audit.check()
        context.log.info("%s", report)
        if not report.ok:
            raise dg.Failure(description=str(report), allow_retries=False)

    @dg.op(
        name=f"{prefix}purge_expired_keys",
        required_resource_keys={resource_key},
        description="Deletes expired records and their commits, in bounded steps.",
    )
    def purge_expired_keys(context: dg.OpExecutionContext) -> None:
        with open_fence(context, resource_key) as fence:
            purged = fence.purge_expired()
            deleted = purged.records + purged.objects
            while purged.after:
                purged = fence.purge_expired(after=purged.after)
                deleted += purged.records + purged.objects
        context.log.info("deleted %d records and commits", deleted)

    @dg.op(
        name=f"{prefix}collect_builds",
        required_resource_keys={resource_key},
        description="Retires and drops builds that no alias can reach.",
    )
    def collect_builds(context: dg.OpExecutionContext) -> None:
        with open_fence(context, resource_key) as fence:
            report = fence.indexes.gc(dry_run=False)
            fence.aliases.reconcile()
        context.log.info("retired %d builds, dropped %d indexes", len(report.retired), len(report.dropped))
        for each in report.failed:
            context.log.warning("%s", each)

    @dg.op(
        name=f"{prefix}drain_decisions",
        required_resource_keys={resource_key},
        description="Moves decision rows into the ledger: Parquet files in the object store, by day.",
    )
    def drain_decisions(context: dg.OpExecutionContext) -> None:
        with open_fence(context, resource_key) as fence:
            drained = fence.audit.drain()
        context.log.info("%s", drained)

    @dg.job(name=f"{prefix}verify")
    def verify() -> None:
        verify_documents()
        audit_decisions()

    @dg.job(name=f"{prefix}purge_expired")
    def purge_expired() -> None:
        purge_expired_keys()

    @dg.job(name=f"{prefix}gc")
    def gc() -> None:
        collect_builds()

    @dg.job(name=f"{prefix}drain")
    def drain() -> None:
        drain_decisions()

    return verify, purge_expired, gc, drain


JOBS = build_jobs()
verify_job, purge_expired_job, gc_job, drain_job = JOBS


def build_schedules(
    *,
    verify: str = "17 3 * * *",
    purge_expired: str = "0 * * * *",
    gc: str = "47 3 * * *",
    drain: str = "*/15 * * * *",
    running: bool = False,
    jobs: Sequence[dg.JobDefinition] = JOBS,
) -> list[dg.ScheduleDefinition]:
    """The schedules of the maintenance jobs.

    Args:
        verify, purge_expired, gc, drain: When to run each job, as a cron string; an empty one omits the schedule.
        running: Start all schedules with the code location. Otherwise only that of purge_expired starts.
        jobs: The jobs of `build_jobs`, if not `JOBS`.
    """
    always = (False, True, False, False)
    return [
        dg.ScheduleDefinition(
            name=f"{job.name}_schedule",
            job=job,
            cron_schedule=cron,
            default_status=(dg.DefaultScheduleStatus.RUNNING if running or on else dg.DefaultScheduleStatus.STOPPED),
        )
        for job, cron, on in zip(jobs, (verify, purge_expired, gc, drain), always, strict=True)
        if cron
    ]
