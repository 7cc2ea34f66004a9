"""The sensor on the source and the schedules. Switch them on in the UI.

The sensor starts the ingestion. Dagster's `default_automation_condition_sensor` then runs the index when the corpus has
changed, and the alias when the index has changed.
"""

from pipelines.defs.assets import where
from pipelines.defs.jobs import ingest
from ragfence.dagster import build_schedules, build_source_sensor

sensors = [build_source_sensor(where.source, ingest)]
schedules = build_schedules()
