"""What has to be done now and then: verify, purge-expired (hourly), gc, drain. Jobs, and schedules for them."""

from collections.abc import Sequence

import dagster as dg

from ragfence.dagster.resource import FENCE, opened_in

SHOWN = 20


def build_jobs(*, resource_key: str = FENCE, prefix: str = "") -> tuple[dg.JobDefinition, ...]:
    """verify, purge_expired, gc and drain of one fence; the prefix tells those of several apart."""

    @dg.op(
        name=f"{prefix}verify_documents",
        required_resource_keys={resource_key},
        description="Compares fence store, log, snippets and live indexes; fails with the findings.",
    )
    def verify_documents(context: dg.OpExecutionContext) -> None:
        with opened_in(context, resource_key) as opened:
            report = opened.documents.verify()
        context.log.info("%d documents, %d rows, %d snippets", report.documents, report.rows, report.snippets)
        for finding in report.findings[:SHOWN]:
            context.log.warning("%s: %s -> %s", finding.trouble, finding.what, finding.to_do)
        if not report.ok:
            raise dg.Failure(description=f"{len(report.findings)} findings", allow_retries=False)

    @dg.op(
        name=f"{prefix}audit_decisions",
        required_resource_keys={resource_key},
        description="Proves the promises out of the decision rows and the log of aliases; fails with what breaks them.",
    )
    def audit_decisions(context: dg.OpExecutionContext) -> None:
        with opened_in(context, resource_key) as opened:
            report = opened.audit.check()
        context.log.info("%s", report)
        if not report.ok:
            raise dg.Failure(description=str(report), allow_retries=False)

    @dg.op(
        name=f"{prefix}purge_expired_keys",
        required_resource_keys={resource_key},
        description="Removes records and commits that have outlived their lifetime, in bounded steps.",
    )
    def purge_expired_keys(context: dg.OpExecutionContext) -> None:
        with opened_in(context, resource_key) as opened:
            purged = opened.purge_expired()
            removed = purged.records + purged.objects
            while purged.after:
                purged = opened.purge_expired(after=purged.after)
                removed += purged.records + purged.objects
        context.log.info("%d removed", removed)

    @dg.op(
        name=f"{prefix}collect_builds",
        required_resource_keys={resource_key},
        description="Retires and drops builds that no alias can reach.",
    )
    def collect_builds(context: dg.OpExecutionContext) -> None:
        with opened_in(context, resource_key) as opened:
            report = opened.indexes.gc(dry_run=False)
            opened.aliases.reconcile()
        context.log.info("retired %d builds, dropped %d indexes", len(report.retired), len(report.dropped))
        for each in report.failed:
            context.log.warning("%s", each)

    @dg.op(
        name=f"{prefix}drain_decisions",
        required_resource_keys={resource_key},
        description="Moves the decision rows into the ledger: Parquet in the object store, by day.",
    )
    def drain_decisions(context: dg.OpExecutionContext) -> None:
        with opened_in(context, resource_key) as opened:
            drained = opened.audit.drain()
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
    """Cron times; an empty one leaves its schedule out. `jobs`: those of `build_jobs`, if not the usual ones.

    The schedule of purge_expired runs from the start; the others do with `running`.
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
