"""What runs and stores say is what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

import ragfence
from ragfence.errors import FormatCorrupt
from tests.dagster.world import World


def test_the_log_of_a_duplicate_build_says_that_nothing_was_embedded(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.write_all()
    world.run(world.documents(), world.index())
    assert ": new, 9 rows, 9 embedded" in "".join(capfd.readouterr())
    world.run(world.documents(), world.index())
    assert ": duplicate, 9 rows, 0 embedded" in "".join(capfd.readouterr())


@pytest.mark.parametrize("damage", ["not a database", "a page"])
def test_a_damaged_fence_file_is_a_terminal_error_that_says_what_to_do(tmp_path: Path, damage: str) -> None:
    with ragfence.open(tmp_path) as fence:
        fence.documents.ingest(ragfence.Document("a", "some text"))
    file = tmp_path / "fences.db"
    for more in ("-wal", "-shm"):
        (tmp_path / f"fences.db{more}").unlink(missing_ok=True)
    data = file.read_bytes()
    file.write_bytes(
        b"no database " * 1000 if damage == "not a database" else data[:4096] + b"\xff" * (len(data) - 4096)
    )
    with pytest.raises(FormatCorrupt, match="is damaged") as raised, ragfence.open(tmp_path) as fence:
        fence.documents.ingest(ragfence.Document("a", "some text"))
    assert not raised.value.retryable
    assert "ragfence hydrate" in raised.value.hint
