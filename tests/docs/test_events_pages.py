"""Every python block of the pages about events runs as it stands there, in one folder, page by page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from ragfence.core.policy import Policy
from tests import servers
from tests.servers.s3 import sqs_client

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def aws(moto_server: servers.S3Server, s3_env: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues and the bucket of the examples, on moto."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto_server.region)
    with closing(sqs_client(moto_server)) as sqs, closing(moto_server.client()) as s3:
        arns: dict[str, str] = {}
        for name in ("dead", "orders", "uploads"):
            target = {"deadLetterTargetArn": arns.get("dead"), "maxReceiveCount": 100}
            policy = {"RedrivePolicy": json.dumps(target)} if arns else {}
            url = sqs.create_queue(QueueName=name, Attributes=policy)["QueueUrl"]
            attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
            arns[name] = attributes["QueueArn"]
        s3.create_bucket(Bucket="handbook")
        notification = {"QueueArn": arns["uploads"], "Events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
        s3.put_bucket_notification_configuration(
            Bucket="handbook", NotificationConfiguration={"QueueConfigurations": [notification]}
        )
        for key in ("docs/leave.md", "docs/old.md", "elsewhere/a.md"):
            s3.put_object(Bucket="handbook", Key=key, Body=b"Thirty days a year.")
        s3.delete_object(Bucket="handbook", Key="docs/old.md")


@pytest.mark.parametrize("page", ["webhooks", "queues", "outbox", "notify"])
def test_the_examples_of_a_page_run_in_their_order(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page == "queues":
        request.getfixturevalue("aws")
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.S | re.M)
    assert snippets
    said = []
    for snippet in snippets:
        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    expected = {
        "webhooks": "1 200 new\n1 200 duplicate\n3 200 new\n2 200 stale\n",
        "queues": "charging order 7\n{'new': 1, 'duplicate': 2}\n",
        "notify": "document.ingested a\n1\ndocument.retracted a\n1\n",
        "outbox": "orders {'id': 1}\nRelayReport(sent=1, failed=0, dead=0)\n",
    }
    assert said[0] == expected[page]
    if page == "queues":
        assert "charging order 8 from SQS\n" in said
        assert "leave.md s3://handbook/docs/leave.md\n" in said
        assert said[1] == "{'dead': 1, 'new': 3, 'stale': 1}\n['VALIDATION.body: /text: Field required']\n"
        assert said[2:4] == ["{'throttled': 2, 'new': 3}\n", "1\n"]
    if page == "webhooks":
        assert said[2:] == [
            "cms event-1 ok 1 1\ncms event-3 ok 1 0\ncms event-2 stale 1 0\n",
            "booked 9.90\nnew duplicate\nnew duplicate\n",
        ]
    if page == "outbox":
        assert said[1] == "applied once\n"


def test_the_policies_of_the_page_about_webhooks_are_accepted() -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "webhooks.md").read_text(), re.S | re.M)
    assert len(examples) == 2
    for example in examples:
        assert Policy.from_mapping(yaml.safe_load(example)).webhooks["cms"].document.doc_id == "$.page.id"
