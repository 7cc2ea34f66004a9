"""From a spec to a backend, and where LanceDB lives by default."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from ragfence.errors import UnknownStore, Unsupported
from ragfence.indexes.backends.backend import Shape
from ragfence.indexes.backends.registry import default_lance_location, open_backend
from ragfence.stores.local import LocalObjects
from ragfence.stores.s3 import S3Objects
from ragfence.testing.contracts.backends import rows
from ragfence.testing.memory import MemoryObjects
from tests.servers import S3Server


@pytest.mark.parametrize(
    ("spec", "url"),
    [
        ("lance", "lance:/default/lance"),
        ("lance:/some/where", "lance:/some/where"),
        ("lance+s3://bucket/pre/fix", "lance+s3://bucket/pre/fix"),
        ("qdrant+http://localhost:6333", "qdrant+http://localhost:6333"),
        ("qdrant+https://qdrant.example.org", "qdrant+https://qdrant.example.org"),
        ("qdrant+file:///some/where", "qdrant+file:///some/where"),
    ],
)
def test_a_spec_names_a_backend(spec: str, url: str) -> None:
    assert open_backend(spec, default_lance="/default/lance").url == url


@pytest.mark.parametrize(
    "spec",
    ["", "lance:", "lancedb", "lance+http://x", "lance+s3://", "qdrant", "qdrant+file://", "qdrant+ftp://x", "faiss"],
)
def test_what_names_none_is_answered_with_the_known_forms(spec: str) -> None:
    with pytest.raises(UnknownStore) as refused:
        open_backend(spec, default_lance="/default/lance")
    assert "qdrant+http://host:6333" in refused.value.hint


@pytest.mark.parametrize("folder", ["idx", "./idx", "../idx", "a/b"])
def test_a_relative_folder_is_refused_and_said_how_to_write_it(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownStore) as refused:
        open_backend(f"lance:{folder}", default_lance="/default/lance")
    told = refused.value.hint.removeprefix("use ").partition(",")[0]
    assert told == f"lance:{tmp_path / folder}"
    assert open_backend(told, default_lance="/default/lance").url == told


@pytest.mark.parametrize(
    ("spec", "instead"),
    [
        ("qdrant+https://user:pass-word@host", "QDRANT_API_KEY"),
        ("lance+s3://key:pass-word@bucket/x", "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(spec: str, instead: str) -> None:
    with pytest.raises(UnknownStore) as refused:
        open_backend(spec, default_lance="/default/lance")
    assert instead in refused.value.hint
    assert "pass-word" not in str(refused.value)


def test_beside_local_objects_is_a_folder_that_is_never_listed(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "o b j")
    uri, options = default_lance_location(objects)
    assert uri == str(tmp_path / "o b j" / "lance")
    open_backend("lance", default_lance=uri, storage_options=options).write("rf-a", Shape(8), [rows(3)])
    assert list(objects.list("")) == []


def test_beside_objects_of_an_unknown_kind_one_must_say_where() -> None:
    with pytest.raises(Unsupported):
        default_lance_location(MemoryObjects())


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
def test_beside_s3_objects_no_tenant_ever_sees_it(seaweed_server: S3Server, s3_env: None) -> None:
    objects = S3Objects(seaweed_server.bucket, secrets.token_hex(8), endpoint_url=seaweed_server.url)
    uri, options = default_lance_location(objects)
    assert uri == f"{objects.url}/.lance"
    backend = open_backend("lance", default_lance=uri, storage_options=options)
    assert backend.write("rf-a", Shape(8), [rows(3)]) == 3
    assert {entry.name.partition("/")[0] for entry in objects.list("")} == {".lance"}
    assert seaweed_server.secret_key not in backend.url
    objects.close()


def test_opening_loads_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; from ragfence.indexes.backends.registry import open_backend\n"
        "for spec in ('lance', 'qdrant+http://host:6333'): open_backend(spec, default_lance='x')\n"
        "print([name for name in ('lancedb', 'qdrant_client', 'numpy', 'pyarrow', 'boto3') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"
