"""What a sync notes of its source: a log that others may write at the same time, and that may be lost."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ragfence.documents.sync.state import VERSION, ListedIds, NoteChanges, SyncNote, SyncStates, forget
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable
from ragfence.stores.local import LocalObjects
from ragfence.testing import MemoryObjects
from tests.engine.worlds import Crash, Wrapped


def states(objects: Any, **more: Any) -> SyncStates:
    return SyncStates("acme", "folder:handbook", objects, more.get("content_fields", ()))


def note(doc_id: str, state: str = "s") -> SyncNote:
    return SyncNote(doc_id, state, "xxh3:00", 1, 1, bytes(16), "text/plain", None)


def changes(*notes: SyncNote, gone: set[str] | None = None) -> NoteChanges:
    made = NoteChanges()
    for each in notes:
        made.add(each)
    made.gone |= gone or set()
    return made


def test_the_put_that_loses_is_made_again_on_top_of_the_winner() -> None:
    objects = MemoryObjects()

    class Racing(Wrapped):
        raced = False

        def put_new(self, name: str, data: bytes) -> Any:
            if not self.raced:
                self.raced = True
                states(objects).add(states(objects).newest(), changes(note("theirs"), note("both", "theirs")))
            return self.inner.put_new(name, data)

    mine = states(Racing(objects))
    mine.add(mine.newest(), changes(note("ours"), note("both", "ours"), gone={"nobody"}))
    newest = states(objects).newest()
    assert newest.number == 2
    assert newest.of(["ours", "theirs", "both", "nobody"]) == [
        note("ours"),
        note("theirs"),
        note("both", "ours"),
        None,
    ]


def test_notes_deleted_between_listing_and_reading_are_looked_for_again() -> None:
    objects = MemoryObjects()
    states(objects).add(states(objects).newest(), changes(note("a")))

    class Deleting(Wrapped):
        def get(self, name: str) -> bytes | None:
            if name.endswith("8"):
                states(objects).add(states(objects).newest(), changes(note("b")))
                objects.delete([name])
            data: bytes | None = self.inner.get(name)
            return data

    assert list(states(Deleting(objects)).newest()) == ["a", "b"]


def test_a_document_that_had_a_state_and_one_that_gets_one_are_as_they_were_last() -> None:
    objects = MemoryObjects()
    learned = NoteChanges()
    learned.add(note("had"))
    for each in ("had", "gets", "never"):
        learned.add_name(each)
    learned.add(note("gets"))
    states(objects).add(states(objects).newest(), learned)
    newest = states(objects).newest()
    assert newest.of(["had", "gets", "never"]) == [SyncNote("had"), note("gets"), SyncNote("never")]
    assert [newest.without_state(each) for each in ("had", "gets", "never", "nobody")] == [True, False, True, False]


def test_the_last_of_several_notes_counts_and_what_is_gone_goes() -> None:
    objects = MemoryObjects()
    log = states(objects)
    log.add(log.newest(), changes(*(note(f"{number % 7}", f"{number}") for number in range(12_000))))
    assert [found.state for found in log.newest().of(["0", "6"]) if found] == ["11998", "11997"]
    assert len(log.newest()) == 7
    log.add(log.newest(), changes(note("3", "new"), gone={"0", "1"}))
    assert sorted(log.newest()) == ["2", "3", "4", "5", "6"]
    assert log.newest().of(["1", "3"]) == [None, note("3", "new")]


def test_old_notes_that_cannot_be_deleted_are_left_for_the_next_sync() -> None:
    objects = MemoryObjects()

    class Stubborn(Wrapped):
        def delete(self, names: Any) -> None:
            raise StoreUnavailable("not now")

    log = states(Stubborn(objects))
    for number in range(4):
        log.add(log.newest(), changes(note(f"{number}")))
    assert len(list(objects.list(""))) == 4
    states(objects).add(states(objects).newest(), changes(note("4")))
    assert len(list(objects.list(""))) == 2
    assert len(states(objects).newest()) == 5


def test_notes_that_cannot_be_read_are_named_and_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(tmp_path)
    objects.put_new(f"acme/sources/{sha256(b'folder:handbook').hexdigest()}/{10**20 - 2}", b"no parquet")
    with pytest.raises(FormatCorrupt, match=r"acme/sources/.* does not hold the state of a source") as broken:
        states(objects).newest()
    assert "delete this object" in broken.value.hint
    newer = MemoryObjects()
    with monkeypatch.context() as patch:
        patch.setattr("ragfence.documents.sync.state.VERSION", VERSION + 1)
        states(newer).add(states(newer).newest(), changes(note("a")))
    with pytest.raises(FormatTooNew, match="format 2"):
        states(newer).newest()


def test_a_document_can_be_forgotten_in_all_that_sources_have_noted() -> None:
    objects = MemoryObjects()
    for source in ("folder:a", "folder:b", "folder:c"):
        log = SyncStates("acme", source, objects, ["lang"])
        for doc_id in ("x", "y") if source != "folder:c" else ("z",):
            log.add(log.newest(), changes(note(doc_id)))
    SyncStates("other", "folder:a", objects, ()).add(
        SyncStates("other", "folder:a", objects, ()).newest(), changes(note("x"))
    )
    forget("acme", objects, "x")
    assert [list(SyncStates("acme", f"folder:{name}", objects, ["lang"]).newest()) for name in "abc"] == [
        ["y"],
        ["y"],
        ["z"],
    ]
    assert SyncStates("acme", "folder:a", objects, ["lang"]).newest().of(["y"]) == [note("y")]  # with its state
    assert not [entry for entry in objects.list("acme/") if holds(objects, entry.name, "x")]
    assert len(list(objects.list("other/"))) == 1
    before = [entry.name for entry in objects.list("")]
    forget("acme", objects, "x")
    assert [entry.name for entry in objects.list("")] == before


def holds(objects: Any, name: str, doc_id: str) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return doc_id in pq.read_table(pa.BufferReader(objects.get(name))).column("doc_id").to_pylist()


def test_forgetting_that_was_cut_off_is_completed_by_the_next() -> None:
    objects = MemoryObjects()

    class Dying(Wrapped):
        def delete(self, names: Any) -> None:
            if names:
                raise Crash

    log = states(objects)
    log.add(log.newest(), changes(note("x"), note("y")))
    log.add(log.newest(), changes(note("z")))
    with pytest.raises(Crash):
        forget("acme", Dying(objects), "x")
    forget("acme", objects, "x")
    assert sorted(states(objects).newest()) == ["y", "z"]
    assert not [entry for entry in objects.list("") if holds(objects, entry.name, "x")]


def test_notes_of_other_content_are_kept_without_their_state() -> None:
    objects = MemoryObjects()
    log = states(objects)
    log.add(log.newest(), changes(note("a")))
    assert states(objects, content_fields=["lang"]).newest().of(["a"]) == [note("a", "")]
    assert log.newest().of(["a"]) == [note("a")]


def test_a_roll_knows_who_was_named_and_who_is_missing() -> None:
    objects = MemoryObjects()
    states(objects).add(states(objects).newest(), changes(*map(note, "abc")))
    roll = ListedIds(states(objects).newest())
    assert [roll.add(doc_id) for doc_id in "bxbx"] == [True, True, False, False]
    assert [doc_id in roll for doc_id in "abxy"] == [False, True, True, False]
    assert roll.missing() == ["a", "c"]
