"""What starts by itself, once it is switched on in the UI: the sensor on the source, and the schedules.

The sensor has the documents ingested; the index follows when the corpus has changed, the alias when the index has (that
is Dagster's own `default_automation_condition_sensor`).
"""

from pipelines.defs.assets import where
from pipelines.defs.jobs import ingest
from ragfence.dagster import build_schedules, build_source_sensor

sensors = [build_source_sensor(where.source, ingest)]
schedules = build_schedules()
