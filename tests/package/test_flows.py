"""The trace of `python -m tests.flows` runs, and sees what a flow does; its figures are not enforced."""

from __future__ import annotations

from pathlib import Path

from tests.flows import trace_flows


def test_every_flow_is_traced_through_threads_and_the_application(tmp_path: Path) -> None:
    flows = {flow.name: flow for flow in trace_flows(tmp_path)}
    assert len(flows) == 8
    assert all(flow.functions >= len(flow.modules) > 5 for flow in flows.values())
    new, known = flows["POST /v1/documents, new"], flows["POST /v1/documents, known"]
    assert "server.routes.documents" in new.modules
    assert "stores.sqlite" in known.modules  # claims run in threads
    assert flows["fence.once, replayed"].functions < flows["fence.once, new"].functions
