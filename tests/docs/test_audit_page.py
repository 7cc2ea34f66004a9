"""What docs/audit.md says can be run: its SQL counts a real ledger, and every answer once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import ragfence
from ragfence import Document, Operation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text()
(SQL,) = re.findall(r"^```sql\n(.*?)^```", PAGE, re.S | re.M)


def test_the_documented_count_is_the_count_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    told: Counter[str] = Counter()
    with ragfence.open(tmp_path / ".ragfence") as fence:
        for turn in range(3):
            receipts = fence.documents.ingest_many(Document(f"d{n}", f"It rains in town {n}.") for n in range(4))
            told.update(str(receipt.decision) for receipt in receipts)
            with fence.claim(Operation(kind="ticket", source_id=f"t{turn // 2}")) as op:
                if op.is_new:
                    op.seal()
            told[str(op.receipt.decision)] += 1
        fence.audit.drain()
        by_hand = Counter[str]()
        for line in fence.audit.counts().to_pylist():
            by_hand[line["decision"]] += line["count"]
    assert by_hand == told
    monkeypatch.chdir(tmp_path)
    view, count = [each for each in SQL.split(";") if each.strip()]
    connection = duckdb.connect()
    connection.execute(view)
    counted = Counter[str]()
    for *_, decision, number in connection.execute(count).fetchall():
        counted[decision] += number
    assert counted == told == {"new": 6, "duplicate": 9}


def test_the_page_names_every_column_and_every_phase() -> None:
    from ragfence.audit.columns import VERSION, schema
    from ragfence.core.decision_rows import ANSWER_PHASES, Phase

    named = set(re.findall(r"`(\w+)`", "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    assert set(schema().names) <= named
    assert f"ragfence.ledger/{VERSION}" in PAGE
    assert {str(phase) for phase in Phase} <= set(re.findall(r"`(\w+)`", PAGE))
    assert ", ".join(f"'{phase}'" for phase in ANSWER_PHASES) in SQL
