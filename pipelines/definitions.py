"""The code location: `dagster dev -m pipelines.definitions`.

Steps run in the process of their run, which is cheapest. The fence does all coordination.
"""

import dagster as dg

from pipelines.defs import assets, automation, checks, jobs
from ragfence.dagster import FenceResource

defs = dg.Definitions(
    assets=[assets.documents, assets.snippets_by_folder, assets.vector_index, assets.live_alias],
    asset_checks=checks.checks,
    jobs=jobs.jobs,
    sensors=automation.sensors,
    schedules=automation.schedules,
    resources={"fence": FenceResource()},
    executor=dg.in_process_executor,
)
