"""The page that Prometheus scrapes, also where several worker processes share one port.

If `PROMETHEUS_MULTIPROC_DIR` is set, as in prometheus-client, every process keeps its counters in files of that folder,
and the process that is scraped adds them all up. The gauges read the stores, which all workers share, so every worker
reports the same for the tenants it has open. `ragfence_hit_ratio` is per process and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ragfence._extras import needs_extra

with needs_extra("audit", "The exposition of metrics"):
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector

from ragfence.telemetry.metrics import Metrics

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""the format that every Prometheus reads; names are plain ASCII, so newer ones add nothing"""


def exposition(registry: CollectorRegistry | None = None) -> tuple[bytes, str]:
    """Returns the page and its content type.

    >>> page, content_type = exposition()  # doctest: +SKIP
    """
    registry = REGISTRY if registry is None else registry
    if os.environ.get(MULTIPROCESS):
        combined = CollectorRegistry()
        MultiProcessCollector(combined)  # type: ignore[no-untyped-call]  # prometheus-client has no annotations here
        combined.register(_SharedGauges(Metrics(registry).gauges))
        registry = combined
    return generate_latest(registry), CONTENT_TYPE


class _SharedGauges(Collector):
    def __init__(self, gauges: Collector) -> None:
        self._gauges = gauges

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._gauges.collect() if family.name != "ragfence_hit_ratio")
