"""Qdrant: what the contract does not ask for. One process per folder, bytes in files, answers of a server."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ragfence.errors import BuildMissing, StoreAuth, StoreUnavailable, Unsupported, ValidationError
from ragfence.indexes.backends.backend import Shape
from ragfence.indexes.backends.qdrant import QdrantBackend
from ragfence.testing.contracts.backends import rows, vectors_of


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[QdrantBackend]:
    backend = QdrantBackend(path=tmp_path / "qdrant")
    yield backend
    backend.close()


def test_a_second_client_of_a_folder_is_refused(backend: QdrantBackend, tmp_path: Path) -> None:
    backend.write("rf-a", Shape(8), [rows(3)])
    with pytest.raises(StoreUnavailable) as refused:
        QdrantBackend(path=tmp_path / "qdrant").count("rf-a")
    assert "qdrant+http" in refused.value.hint
    code = (
        "import sys; from ragfence.indexes.backends.qdrant import QdrantBackend; from ragfence.errors import *\n"
        "try: QdrantBackend(path=sys.argv[1]).count('rf-a')\n"
        "except StoreUnavailable: print('refused')"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "qdrant")], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == "refused"
    backend.close()
    assert QdrantBackend(path=tmp_path / "qdrant").count("rf-a") == 3


def test_a_forked_child_is_told_to_open_its_own(backend: QdrantBackend) -> None:
    backend.write("rf-a", Shape(8), [rows(3)])
    child = os.fork()
    if not child:
        try:
            backend.count("rf-a")
        except Unsupported:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_many_points_are_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here. The real limit takes a minute to reach."""
    from qdrant_client.local.local_collection import LocalCollection
    from qdrant_client.local.qdrant_local import QdrantLocal

    monkeypatch.setattr(LocalCollection, "LARGE_DATA_THRESHOLD", 10)
    monkeypatch.setattr(QdrantLocal, "LARGE_DATA_THRESHOLD", 10)
    for turn in range(2):
        backend = QdrantBackend(path=tmp_path)
        backend.write(f"rf-{turn}", Shape(8), [rows(30)])
        assert backend.physicals() == [f"rf-{each}" for each in range(turn + 1)]
        backend.close()


def test_no_file_keeps_the_text_of_a_removed_document(backend: QdrantBackend, tmp_path: Path) -> None:
    secret = secrets.token_hex(20)
    table = rows(40)
    texts = pa.array([secret if number % 5 == 1 else "other" for number in range(40)])
    backend.write("rf-a", Shape(8), [table.set_column(table.schema.get_field_index("text"), "text", texts)])
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(secret.encode() in file.read_bytes() for file in files)
    backend.remove("rf-a", ["doc-1"])
    assert not any(secret.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_an_hnsw_shape_has_its_parameters_checked(backend: QdrantBackend) -> None:
    shape = Shape(8, "dot", "hnsw", {"m": 16, "ef_construct": 64, "ef": 32})
    backend.write("rf-a", shape, [rows(30)])
    backend.finish("rf-a", shape)
    assert len(backend.search("rf-a", vectors_of(rows(1))[0], 5)) == 5
    with pytest.raises(ValidationError) as refused:
        backend.check(Shape(8, index="hnsw", parameters={"ef_construction": 64}))
    assert "ef, ef_construct, m" in refused.value.hint


def test_an_id_that_is_no_uuid_is_refused(backend: QdrantBackend) -> None:
    table = rows(1)
    with pytest.raises(ValidationError):
        backend.write("rf-a", Shape(8), [table.set_column(0, "snippet_id", pa.array(["one"]))])


def test_an_alias_of_what_is_missing_is_refused(backend: QdrantBackend) -> None:
    with pytest.raises(BuildMissing):
        backend.point("docs", "rf-never", 1)
    assert backend.pointer("docs") is None


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable):
        QdrantBackend("http://127.0.0.1:9").count("rf-a")


@pytest.mark.parametrize(
    ("status", "error"), [(401, StoreAuth), (403, StoreAuth), (404, BuildMissing), (500, StoreUnavailable)]
)
def test_the_answers_of_a_server_are_told_apart(
    status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["api-key"])
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("QDRANT_API_KEY", "of-the-environment")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        backend = QdrantBackend(f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.warns(UserWarning, match="insecure"), pytest.raises(error) as told:
                backend.search("rf-a", np.ones(8, np.float32), 3)
        finally:
            backend.close()
            server.shutdown()
    assert keys == ["of-the-environment"]
    assert "of-the-environment" not in str(told.value)
