"""What has to be done now and then: verify, purge-expired (hourly), gc. Jobs, and schedules for them."""

from typing import Any

import dagster as dg

from ragfence.dagster.resource import FenceResource

SHOWN = 20


@dg.op(description="Compares fence store, log, snippets and live indexes; fails with the findings.")
def verify_documents(context: dg.OpExecutionContext, fence: FenceResource) -> None:
    with fence.opened(context) as opened:
        report = opened.documents.verify()
    context.log.info("%d documents, %d rows, %d snippets", report.documents, report.rows, report.snippets)
    for finding in report.findings[:SHOWN]:
        context.log.warning("%s: %s -> %s", finding.trouble, finding.what, finding.to_do)
    if not report.ok:
        raise dg.Failure(description=f"{len(report.findings)} findings", allow_retries=False)


@dg.op(description="Proves the promises out of the decision rows and the log of aliases; fails with what breaks them.")
def audit_decisions(context: dg.OpExecutionContext, fence: FenceResource) -> None:
    with fence.opened(context) as opened:
        report = opened.audit.check()
    context.log.info("%s", report)
    if not report.ok:
        raise dg.Failure(description=str(report), allow_retries=False)


@dg.op(description="Removes records and commits that have outlived their lifetime, in bounded steps.")
def purge_expired_keys(context: dg.OpExecutionContext, fence: FenceResource) -> None:
    with fence.opened(context) as opened:
        purged = opened.purge_expired()
        removed = purged.records + purged.objects
        while purged.after:
            purged = opened.purge_expired(after=purged.after)
            removed += purged.records + purged.objects
    context.log.info("%d removed", removed)


@dg.op(description="Retires and drops builds that no alias can reach.")
def collect_builds(context: dg.OpExecutionContext, fence: FenceResource) -> None:
    with fence.opened(context) as opened:
        report = opened.indexes.gc(dry_run=False)
        opened.aliases.reconcile()
    context.log.info("retired %d builds, dropped %d indexes", len(report.retired), len(report.dropped))
    for each in report.failed:
        context.log.warning("%s", each)


@dg.job(name="verify")
def verify_job() -> None:
    verify_documents()
    audit_decisions()


@dg.job(name="purge_expired")
def purge_expired_job() -> None:
    purge_expired_keys()


@dg.job(name="gc")
def gc_job() -> None:
    collect_builds()


JOBS = (verify_job, purge_expired_job, gc_job)


def build_schedules(
    *, verify: str = "17 3 * * *", purge_expired: str = "0 * * * *", gc: str = "47 3 * * *", running: bool = False
) -> list[dg.ScheduleDefinition]:
    """Cron times; an empty one leaves its schedule out."""
    status = dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
    wanted: list[tuple[Any, str]] = [(verify_job, verify), (purge_expired_job, purge_expired), (gc_job, gc)]
    return [
        dg.ScheduleDefinition(name=f"{job.name}_schedule", job=job, cron_schedule=cron, default_status=status)
        for job, cron in wanted
        if cron
    ]
