"""The dashboard and the alert rules ask only for metrics and labels that really exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

import ragfence
from ragfence import Document, Operation, Policy
from ragfence.errors import FencedOut, InFlight, Quarantined, StoreUnavailable
from ragfence.outbox import Outbox, Relay
from ragfence.queues import DocumentConsumer, Envelope
from ragfence.queues.loop import QueueStarted
from ragfence.queues.sql import SqlTransport
from ragfence.stores.redis.store import RedisFences
from ragfence.stores.sqlite import SqliteFences
from ragfence.telemetry import Metrics
from ragfence.testing import FaultyFences, VirtualClock
from tests.engine.worlds import abandon, elsewhere

GRAFANA = Path(__file__).resolve().parents[2] / "docs" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())
ALERTS = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
RECORDED = yaml.safe_load((GRAFANA / "recording.yml").read_text())["groups"][0]["rules"]
DOCS = (GRAFANA.parent / "observability.md").read_text()

PANELS = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]}
RULES = {rule.get("alert") or rule["record"]: [rule["expr"]] for rule in (*ALERTS, *RECORDED)}

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[A-Za-z_:$][\w:$]*|[\d.]+[smhd]?|[{}()<>=!~+\-*/,]')
_GROUPING = ("by", "without", "on", "ignoring", "group_left", "group_right")
_LABELS_OF_PROMETHEUS = {"le", "job", "instance"}


def asked_for(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels of a PromQL expression."""
    tokens = _TOKEN.findall(expression)
    assert "".join(tokens) == re.sub(r"\s+(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", "", expression), "an unknown character"
    metrics, labels = set(), set()
    inside = ""
    for at, token in enumerate(tokens):
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        if token == "{" or (token == "(" and at and tokens[at - 1] in _GROUPING):
            inside = token
        elif token in "})" and inside:
            inside = ""
        elif inside and re.match(r"[A-Za-z_]", token):
            labels.add(token)
        elif token.startswith("ragfence_"):
            assert following != "(", token
            metrics.add(token)
    return metrics, labels


@pytest.fixture(scope="module")
def exposed(tmp_path_factory, valkey_server):
    """Every metric after a short run in which everything happens: name -> labels."""
    registry, folder, clock = CollectorRegistry(), tmp_path_factory.mktemp("run"), VirtualClock()
    policy = Policy(lease={"max_attempts": 1, "seal_retry_s": 0}, wait={"mode": "raise"})
    fences = FaultyFences(SqliteFences(folder / "fences.db", clock=clock))
    metrics = Metrics(registry)

    def perform(name, **more):
        with fence.claim(Operation(kind="ticket", source_id=name, **more)) as op:
            if op.is_new:
                op.seal()

    with ragfence.open(fences, objects=folder / "objects", policy=policy, observe=metrics) as fence:
        perform("a")
        perform("a")
        with fence.claim(Operation(kind="ticket", source_id="b")), pytest.raises(InFlight):
            elsewhere(lambda: perform("b"))
        with pytest.raises(Quarantined):
            perform("b")
        fences.on("claim").fail_before()
        with pytest.raises(StoreUnavailable):
            perform("c")
        fence.documents.ingest_many([Document("d", "text"), Document("", "refused")])
        fence.documents.ingest_many([Document("d", "text")])
        queue = SqlTransport(f"sqlite:///{folder / 'queue.db'}", "docs")
        queue.send([Envelope(body={"doc_id": "e", "text": "text"}), Envelope(body="refused")])
        DocumentConsumer(fence, queue).run_once(1.0)
        metrics.handle(QueueStarted(queue))
        brief = Policy(lease={"ttl_s": 0.2})
        store = RedisFences(valkey_server.url, "grafana", solo=True)
        with ragfence.open(store, tenant="grafana", policy=brief, observe=metrics) as other:
            late = abandon(other, Operation(kind="ticket", source_id="w"))
            with other.claim(Operation(kind="ticket", source_id="w")) as op:  # waits until the lease has run out
                op.seal()
            with pytest.raises(FencedOut):
                late.seal()
            assert other.inspector.fences.renew([late.lease.ref]) == [False]
            metrics.count_refusal("invalid")
            metrics.count_request("grafana", "abcdefghij234567")
            outbox = Outbox(f"sqlite:///{folder / 'app.db'}")
            with outbox.engine.begin() as tx:
                outbox.add(tx, topic="t", key="k", payload=1)
            Relay(outbox, to=lambda row: None, on_round=metrics.watch_outbox(outbox, "shop")).run_once()
            metrics.count_webhook("grafana", "cms", "new")
            families = list(registry.collect())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("name", [*PANELS, *RULES])
def test_every_expression_asks_for_what_exists(name, exposed):
    for expression in PANELS.get(name) or RULES[name]:
        metrics, labels = asked_for(expression)
        assert metrics, expression
        assert metrics <= set(exposed), expression
        known = set.union(*(exposed[metric] for metric in metrics)) | _LABELS_OF_PROMETHEUS
        assert labels <= known, expression


def test_the_tokenizer_finds_what_is_asked_for():
    metrics, labels = asked_for('sum by (le, kind) (rate(ragfence_x_bucket{tenant=~"$t"}[5m])) / 2 > on (a) ragfence_y')
    assert (metrics, labels) == ({"ragfence_x_bucket", "ragfence_y"}, {"le", "kind", "tenant", "a"})


def test_legends_name_labels_that_the_expression_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                by = re.search(r"by \(([^)]*)\)", target["expr"])
                assert by is None or label in by[1], panel["title"]


def test_every_metric_is_in_the_documentation_and_the_other_way_round(exposed):
    ours = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in exposed}
    written = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in re.findall(r"`(ragfence_\w+)", DOCS)}
    assert written == ours


def test_every_alert_and_every_record_is_explained():
    assert all(
        rule["annotations"]["summary"] and rule["labels"]["severity"]
        for rule in (*ALERTS, *RECORDED)
        if "alert" in rule
    )
    for name in RULES:
        assert name in DOCS


def test_panels_have_their_own_places():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
