"""gc on a real S3 server that keeps folders whose objects were deleted: it reaches a fixed point."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragfence
from ragfence.indexes.backends.backend import Shape
from ragfence.indexes.backends.lance import LanceBackend
from ragfence.indexes.backends.registry import default_lance_location
from ragfence.indexes.spec import IndexSpec
from ragfence.stores.s3 import S3Objects
from ragfence.testing.contracts.backends import rows
from tests.indexes.building import CountingEmbedder, ingested
from tests.servers import S3Server

pytestmark = pytest.mark.xdist_group("seaweedfs")


@pytest.fixture
def objects(seaweed_server: S3Server, s3_env: None) -> Iterator[S3Objects]:
    opened = S3Objects(seaweed_server.bucket, secrets.token_hex(8), endpoint_url=seaweed_server.url)
    yield opened
    opened.close()


def everything(objects: S3Objects) -> list[str]:
    """Every object of the tenant, under its name: gc that does nothing neither adds nor deletes one."""
    return [entry.name for entry in objects.list("default/")]


def test_gc_does_nothing_the_second_time_although_emptied_folders_are_listed(
    objects: S3Objects, tmp_path: Path
) -> None:
    with ragfence.open(tmp_path / "fence", objects=objects, journal=tmp_path / "journal") as fence:
        spec = IndexSpec(embedder=CountingEmbedder())
        for edition in range(3):
            ingested(fence, ["a", "b"], edition)
            fence.indexes.build(spec)
        first = fence.indexes.gc(dry_run=False, min_age_s=0)
        assert len(first.retired) == len(first.dropped) == 3
        before = everything(objects)
        for dry_run in (False, True, False):
            again = fence.indexes.gc(dry_run=dry_run, min_age_s=0)
            assert (again.retired, again.dropped, again.unknown, again.failed) == ([], [], [], [])
        assert everything(objects) == before


def test_a_folder_without_objects_is_no_index_and_half_a_table_is_one(objects: S3Objects) -> None:
    uri, options = default_lance_location(objects)
    backend = LanceBackend(uri, options)
    backend.write("rf-a", Shape(8), [rows(3)])
    backend.write("rf-b", Shape(8), [rows(3)])
    backend.drop("rf-a")
    assert backend.physicals() == ["rf-b"]
    # A drop that was cut off: its manifests are gone, its rows are not.
    left = [entry.name for entry in objects.list(".lance/rf-b.lance/")]
    objects.delete([name for name in left if "/data/" not in name])
    assert not backend.exists("rf-b")
    assert backend.physicals() == ["rf-b"]
    backend.drop("rf-b")
    assert backend.physicals() == []
    assert list(objects.list(".lance/")) == []
