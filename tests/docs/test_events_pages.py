"""Every python block of the pages about events runs as it stands there, in one folder, page by page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ragfence.core.policy import Policy

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["webhooks", "queues", "outbox"])
def test_the_examples_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
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
        "outbox": "orders {'id': 1}\nRelayReport(sent=1, failed=0, dead=0)\n",
    }
    assert said[0] == expected[page]
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
