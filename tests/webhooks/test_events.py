"""An event as handlers see it."""

from __future__ import annotations

import pytest

from ragfence.webhooks.providers import WebhookEvent


def test_the_fields_of_an_event_are_those_of_its_payload() -> None:
    event = WebhookEvent("cms", "e1", "page.updated", {"page": {"id": "p7"}})
    assert event["page"]["id"] == "p7"
    with pytest.raises(KeyError):
        event["author"]
