"""A request that is repeated while the object store is away is performed once it is back, however often it was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.documents.test_outages import unwritable
from tests.server.processes import served

ATTEMPTS = 5
DOCUMENT = {"doc_id": "a", "text": "Thirty days a year."}
WRITES: dict[str, dict[str, Any]] = {
    "/v1/documents": {"json": DOCUMENT},
    "/v1/documents:batch": {
        "content": json.dumps(DOCUMENT).encode(),
        "headers": {"content-type": "application/x-ndjson"},
    },
    "/v1/builds": {"json": {}},
}


@pytest.mark.parametrize("path", WRITES)
def test_a_request_that_met_an_outage_again_and_again_is_performed_once_it_is_over(tmp_path: Path, path: str) -> None:
    with served(tmp_path, kinds={"http": {"max_attempts": ATTEMPTS}}) as api:
        caller = api.caller("acme")
        assert caller.post("/v1/documents", DOCUMENT | {"doc_id": "before"}).status_code == 201
        with unwritable(tmp_path / "objects"):
            for _ in range(2 * ATTEMPTS):
                answer = caller.ask("POST", path, "k1", **WRITES[path])
                assert answer.status_code == 503, answer.text
                assert answer.json()["retryable"]
        answer = caller.ask("POST", path, "k1", **WRITES[path])
        assert answer.status_code in (200, 201), answer.text
        assert "QUARANTINED" not in answer.text
