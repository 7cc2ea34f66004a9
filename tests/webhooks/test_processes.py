"""A CMS, `ragfence serve`, an inbox and its worker as processes of their own: the whole way, and killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import ragfence
from ragfence import Policy
from tests.server.webhook_calls import DOCUMENT, SECRET, page, signed

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 1.0


@dataclass
class Place:
    """A folder with stores and a policy, and the processes that work in it."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def write_policy(self, mode: str) -> None:
        hook = {"scheme": "github", "secret_env": "CMS_SECRET", "mode": mode, "document": DOCUMENT}
        policy = {"webhooks": {"cms": hook}, "lease": {"ttl_s": LEASE_S}, "content_hash": "sha256"}
        (self.folder / "ragfence.yml").write_text(yaml.safe_dump(policy))

    def start(self, *argv: str, point: str = "none") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.webhooks.struck", point, *argv]
        environ = {**os.environ, **self.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=self.folder, env=environ, text=True, stdout=subprocess.PIPE)

    @contextmanager
    def server(self, point: str = "none") -> Iterator[str]:
        """A server; ends by SIGKILL, always."""
        process = self.start("serve", "--port", "0", "--json", point=point)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def run(self, *argv: str, point: str = "none") -> tuple[int, str]:
        process = self.start(*argv, point=point)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def consume(self, point: str = "none") -> tuple[int, str]:
        return self.run("webhooks", "consume", "--until-empty", "--json", "--visibility", "2", point=point)

    @contextmanager
    def fence(self) -> Iterator[ragfence.Fence]:
        with ragfence.open(self.folder / ".ragfence", policy=Policy(content_hash="sha256")) as opened:
            yield opened


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        tmp_path,
        {"CMS_SECRET": SECRET, "RAGFENCE_INBOX": f"sqlite:///{tmp_path / 'inbox.db'}?queue=inbox"},
    )


def send(url: str, event: dict[str, Any]) -> httpx.Response:
    headers, body = signed("github", event)
    return httpx.post(f"{url}/webhooks/cms", headers=headers, content=body, timeout=60)


def effects(fence: ragfence.Fence, kind: str) -> int:
    rows = fence.audit.decisions(kind=kind, decision="new", phase="seal")
    return int(rows.num_rows)


@pytest.mark.timeout(600)
def test_from_the_cms_through_the_inbox_to_a_search(place: Place) -> None:
    place.write_policy("inbox")
    with place.server() as url:
        for version in (1, 1, 3, 2, 3):
            answer = send(url, page(version, doc_id="handbook/leave"))
            assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
        assert send(url, page(1, doc_id="handbook/pay", event_id="p1", body="Pay day is Friday.")).status_code == 202
        assert httpx.post(f"{url}/webhooks/cms", content=b"{}").status_code == 401
    code, said = place.consume()
    assert (code, json.loads(said)["events"]) == (0, {"new": 4, "duplicate": 2})
    for argv in (("build",), ("swap", "docs", "latest")):
        code, said = place.run(*argv)
        assert code == 0, said
    code, said = place.run("search", "docs", "how many days of leave", "--json")
    assert code == 0
    (first, *_) = json.loads(said)["hits"]
    assert (first["doc_id"], first["text"]) == ("handbook/leave", "Leave is 3 days.")
    code, said = place.run("inbox", "--json")
    events = {event["event_id"]: event for event in json.loads(said)["events"]}
    assert {event_id: event["result"] for event_id, event in events.items()} == {
        "e1": "ok",
        "e2": "stale",
        "e3": "ok",
        "p1": "ok",
    }
    assert (events["e1"]["duplicates"], events["e1"]["attempts"], events["e1"]["source"]) == (1, 1, "cms")


@pytest.mark.timeout(600)
def test_a_server_that_is_killed_after_its_202_has_lost_nothing(place: Place) -> None:
    place.write_policy("inbox")
    with place.server() as url:
        assert send(url, page(1)).status_code == 202
    # The provider has its answer and does not send again; the server is dead.
    with place.fence() as fence:
        assert fence.documents.snippets("p") == []
    code, said = place.consume()
    assert (code, json.loads(said)["events"]) == (0, {"new": 1})
    code, said = place.consume()
    assert (code, json.loads(said)["events"]) == (0, {})
    with place.fence() as fence:
        assert [snippet.text for snippet in fence.documents.snippets("p")] == ["Leave is 1 days."]
        assert (effects(fence, "webhook"), effects(fence, "document")) == (1, 1)
        assert fence.audit.check().ok


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("point", "answer"), [("before_effect", "new"), ("after_effect", "new"), ("after_seal", "duplicate")]
)
def test_a_worker_that_is_killed_leaves_the_event_to_the_next_one(place: Place, point: str, answer: str) -> None:
    place.write_policy("inbox")
    with place.server() as url:
        assert send(url, page(1)).status_code == 202
    code, _ = place.consume(point)
    assert code == -9
    time.sleep(2.2)  # until the message is visible again, and the lease of the dead worker has expired
    code, said = place.consume()
    assert (code, json.loads(said)["events"]) == (0, {answer: 1})
    with place.fence() as fence:
        assert [snippet.text for snippet in fence.documents.snippets("p")] == ["Leave is 1 days."]
        assert (effects(fence, "webhook"), effects(fence, "document")) == (1, 1)
        assert fence.audit.check().ok


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("point", "answer"), [("before_effect", "new"), ("after_effect", "new"), ("after_seal", "duplicate")]
)
def test_inline_the_provider_that_sends_again_finds_it_done_or_has_it_done(
    place: Place, point: str, answer: str
) -> None:
    place.write_policy("inline")
    with place.server(point) as url, pytest.raises(httpx.TransportError):
        send(url, page(1))
    with place.server() as url:
        statuses = []
        for _ in range(60):
            reply = send(url, page(1))
            statuses.append(reply.status_code)
            if reply.status_code == 200:
                break
            assert reply.status_code == 503  # the lease of the dead server has not expired yet
            assert reply.headers["retry-after"]
            time.sleep(0.2)
        assert reply.json()["events"][0]["decision"] == answer, statuses
    with place.fence() as fence:
        assert [snippet.text for snippet in fence.documents.snippets("p")] == ["Leave is 1 days."]
        assert (effects(fence, "webhook"), effects(fence, "document")) == (1, 1)
        assert fence.audit.check().ok


def test_a_server_or_a_worker_without_the_secret_ends_at_once(place: Place) -> None:
    place.write_policy("inbox")
    place.environ["CMS_SECRET"] = ""
    for argv in (("serve", "--port", "0"), ("webhooks", "consume")):
        process = place.start(*argv)
        process.communicate(timeout=60)
        assert process.returncode == 1
