"""The page that Prometheus reads, also where several worker processes share one port.

With `PROMETHEUS_MULTIPROC_DIR` set, as prometheus-client has it, every process keeps its counters in files of that
folder, and whichever is scraped adds up those of all. The gauges ask the stores, which all workers share, so any of
them tells the same of the tenants that are open in it. `ragfence_hit_ratio` is of each process alone and is left out.
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
    """The page and its content type.

    >>> page, content_type = exposition()  # doctest: +SKIP
    """
    registry = REGISTRY if registry is None else registry
    if os.environ.get(MULTIPROCESS):
        of_all = CollectorRegistry()
        MultiProcessCollector(of_all)  # type: ignore[no-untyped-call]  # theirs has no annotations
        of_all.register(_OfTheStores(Metrics(registry).gauges))
        registry = of_all
    return generate_latest(registry), CONTENT_TYPE


class _OfTheStores(Collector):
    def __init__(self, gauges: Collector) -> None:
        self._gauges = gauges

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._gauges.collect() if family.name != "ragfence_hit_ratio")
