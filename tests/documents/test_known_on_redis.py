"""Documents that are known already, on a real server: nobody is answered whose decision row is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

import ragfence
from ragfence import Document
from ragfence.errors import StoreUnavailable

TENANT = "known"


@pytest.mark.parametrize("stream", [False, True])
def test_documents_whose_rows_are_refused_are_not_answered(valkey_server: Any, tmp_path: Path, stream: bool) -> None:
    documents = [Document(f"{number}.txt", f"text {number}") for number in range(200)]
    with (
        redis.Redis.from_url(valkey_server.url) as admin,
        ragfence.open(valkey_server.url, objects=tmp_path / "objects", tenant=TENANT) as fence,
    ):
        admin.flushall()
        first = fence.documents.ingest_many(documents)
        streams = list(admin.scan_iter("rf{known:*}r", _type="stream"))
        admin.delete(*streams)
        for name in streams:
            admin.set(name, "no stream")
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            list(
                fence.documents.ingest_many(documents, stream=True)
                if stream
                else fence.documents.ingest_many(documents)
            )
        admin.delete(*streams)
        again = fence.documents.ingest_many(documents)
    assert [receipt.snippet_ids for receipt in again] == [receipt.snippet_ids for receipt in first]
    assert {receipt.decision for receipt in again} == {ragfence.Decision.DUPLICATE}
