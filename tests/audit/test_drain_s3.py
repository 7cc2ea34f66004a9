"""S3 fails while rows are drained into it, as servers and networks do: none is lost, none is told twice."""

from __future__ import annotations

import contextlib
import secrets

import pytest

from ragfence.audit.audit import Audit
from ragfence.core.policy import Policy
from ragfence.errors import TransientError
from ragfence.stores.s3 import S3Objects
from ragfence.testing.memory import MemoryFences
from tests.audit.made import row
from tests.faulty_http import Fault, FaultyProxy
from tests.servers import S3Server

FAULTS = [
    Fault.answer(503),
    Fault.act_then_answer(500),
    Fault.act_then_answer(412),
    Fault.drop_request(),
    Fault.drop_reply(),
    Fault.answer(409),
]


@pytest.mark.usefixtures("s3_env")
@pytest.mark.parametrize(("method", "path"), [("PUT", "*/ledger/*"), ("GET", "*"), ("POST", "*")])
def test_s3_that_fails_while_draining_loses_and_doubles_nothing(moto_server: S3Server, method: str, path: str) -> None:
    prefix, fences = secrets.token_hex(8), MemoryFences()
    with FaultyProxy(moto_server.url) as proxy:
        options = {"endpoint_url": proxy.url, "probe": False, "sleep": lambda seconds: None}
        with contextlib.closing(S3Objects(moto_server.bucket, prefix, **options)) as objects:
            audit = Audit(fences, objects, Policy(audit={"drain_batch_rows": 10, "min_files": 2}))
            rows = [row(n) for n in range(30)]
            for fault, start in zip(FAULTS, range(0, 30, 5), strict=True):
                fences.record(rows[start : start + 5])
                # So often that the store's own patience ends now and then.
                proxy.script(*[fault] * (1 + start % 4), method=method, path=path)
                with contextlib.suppress(TransientError):
                    audit.drain()
            proxy.heal()
            assert list(audit.rows()) == rows
            audit.drain()
            assert list(fences.rows()) == []
            assert list(audit.rows()) == rows
            assert audit.decisions().num_rows == 30
