"""A folder as a source: what is listed, in which order, under which id and state, and what cannot be read."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragfence.core.document import Document, DocumentLimits, checked
from ragfence.documents.sources import FileSource, FolderSource, Item, Source
from ragfence.documents.sources.folder import IGNORE_FILE_BYTES
from ragfence.errors import DocumentInvalid, StoreUnavailable, ValidationError, hint_on

LONG_AGO_NS = 1_600_000_000 * 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "handbook"
    folder.mkdir()
    return folder


def write(root: Path, path: str, content: str | bytes = "text", *, mtime_ns: int = LONG_AGO_NS) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(file, ns=(mtime_ns, mtime_ns))
    return file


def ids(source: Source) -> list[str]:
    return [item.doc_id for item in source.items()]


def one(source: Source) -> Item:
    (item,) = source.items()
    return item


def test_text_markdown_and_html_are_listed_at_any_depth_and_nothing_else(root: Path) -> None:
    for path in ("a.txt", "b.MD", "c/d.markdown", "c/e/f.html", "c/e/g.htm", "h.pdf", "c/i.py", "README", "j.md.bak"):
        write(root, path)
    assert ids(FolderSource(root)) == ["a.txt", "b.MD", "c/d.markdown", "c/e/f.html", "c/e/g.htm"]


def test_paths_come_sorted_across_folders(root: Path) -> None:
    paths = [
        "a-b.md",
        "a.md",
        "a/b.md",
        "a/b/c.md",
        "a/b-c.md",
        "ab.md",
        "B.md",
        "ä.md",
        "z/a.md",
        "😀.md",
        "\uffee.md",
    ]
    for path in paths:
        write(root, path)
    assert ids(FolderSource(root)) == sorted(paths)


def test_a_document_has_its_text_its_type_and_its_path_and_no_path_of_the_machine(root: Path) -> None:
    write(root, "guide/how to.md", "# Hello\r\n")
    document = one(FolderSource(root)).load()
    assert document == Document(
        "guide/how to.md",
        "# Hello\r\n",
        {"path": "guide/how to.md"},
        source_url="guide/how%20to.md",
        content_type="text/markdown",
    )
    assert str(root.parent) not in repr(document)


def test_a_base_url_makes_the_source_url_a_link(root: Path) -> None:
    write(root, "guide/a:b#c.txt")
    for base_url in ("https://docs.example.com/v2/", "https://docs.example.com/v2"):
        source = FolderSource(root, base_url=base_url)
        assert one(source).load().source_url == "https://docs.example.com/v2/guide/a%3Ab%23c.txt"


def test_html_becomes_text_and_its_title_metadata(root: Path) -> None:
    write(root, "a.html", "<title>Leases &amp; fences</title><h1>Leases</h1><p>They expire.")
    document = one(FolderSource(root)).load()
    assert document.text == "# Leases\n\nThey expire."
    assert document.metadata == {"path": "a.html", "title": "Leases & fences"}
    assert document.content_type == "text/html"


def test_what_is_read_passes_the_check_of_a_document(root: Path) -> None:
    write(root, "a/\u65e5\u672c.html", "<title>T</title><p>\u65e5\u672c&nbsp;x</p>\r\n")
    write(root, "empty.txt", "")
    page, empty = (checked(item.load(), DocumentLimits(allow_empty_text=True)) for item in FolderSource(root).items())
    assert (page.text, page.metadata.decode()) == ("\u65e5\u672c x", '{"path":"a/\u65e5\u672c.html","title":"T"}')
    assert empty.text == ""


def test_other_extensions_can_be_asked_for(root: Path) -> None:
    for path in ("a.md", "b.rst", "LICENSE"):
        write(root, path)
    assert ids(FolderSource(root, extensions=["rst", ""])) == ["LICENSE", "b.rst"]
    source = FolderSource(root, extensions={".rst": "text/x-rst"})
    assert one(source).load().content_type == "text/x-rst"


def test_the_name_is_the_path_of_the_folder_unless_it_is_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FolderSource(root).name == FolderSource(f"{root}/").name == f"folder:{root}"
    assert FolderSource(root, name="manual").name == "folder:manual"
    monkeypatch.chdir(root)
    assert FolderSource(".").name == f"folder:{root}"
    assert FolderSource("/").name == "folder:/"


def test_a_source_still_finds_its_files_when_the_process_changes_its_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, "a.md", "hello")
    monkeypatch.chdir(root)
    item = one(FolderSource("."))
    monkeypatch.chdir("/")
    assert item.load().text == "hello"


# States


def test_the_state_is_size_and_mtime(root: Path) -> None:
    write(root, "a.md", "four", mtime_ns=LONG_AGO_NS + 7)
    assert one(FolderSource(root)).state == f"4:{LONG_AGO_NS + 7}"


def test_an_unchanged_file_keeps_its_state_and_a_changed_one_does_not(root: Path) -> None:
    file = write(root, "a.md", "four")
    first = one(FolderSource(root)).state
    assert one(FolderSource(root)).state == first
    write(root, "a.md", "five!")
    assert one(FolderSource(root)).state != first
    write(root, "a.md", "four", mtime_ns=LONG_AGO_NS + 1)
    assert one(FolderSource(root)).state not in ("", first)
    os.utime(file, ns=(0, LONG_AGO_NS))
    assert one(FolderSource(root)).state == first


def test_a_file_that_was_changed_just_now_has_no_state_yet(root: Path) -> None:
    write(root, "a.md")
    states = {
        age_ms: one(FolderSource(root, now_ns=lambda age_ms=age_ms: LONG_AGO_NS + age_ms * 10**6)).state
        for age_ms in (-3_600_000, -1, 0, 1, 1999, 2000, 2001, 3_600_000)
    }
    assert {age_ms for age_ms, state in states.items() if state} == {2001, 3_600_000}


# What is passed over


def test_hidden_files_and_folders_and_those_of_tools_are_ignored(root: Path) -> None:
    for path in (".a.md", ".git/b.md", "x/.c/d.md", "node_modules/e.md", "x/node_modules/f.md", "__pycache__/g.md"):
        write(root, path)
    write(root, "x/h.md")
    assert ids(FolderSource(root)) == ["x/h.md"]


def test_patterns_are_those_of_gitignore_and_the_last_one_decides(root: Path) -> None:
    paths = ("a.md", "a.draft.md", "keep.draft.md", "old/b.md", "x/old/c.md", "x/d.md", "x/y/d.md", ".well-known/e.md")
    for path in paths:
        write(root, path)
    source = FolderSource(root, ignore=["*.draft.md", "!keep.draft.md", "/old/", "x/*.md", "!.well-known"])
    assert ids(source) == [".well-known/e.md", "a.md", "keep.draft.md", "x/old/c.md", "x/y/d.md"]


def test_a_ragfenceignore_file_at_the_root_is_obeyed_and_the_argument_stands_above_it(root: Path) -> None:
    write(root, ".ragfenceignore", "\ufeff# what is not ready\r\n\r\ndrafts/\r\n*.tmp.md\r\n")
    for path in ("a.md", "b.tmp.md", "c.tmp.md", "drafts/d.md", "x/drafts/e.md"):
        write(root, path)
    write(root, "x/.ragfenceignore", "*.md")
    assert ids(FolderSource(root)) == ["a.md"]
    assert ids(FolderSource(root, ignore=["!b.tmp.md"])) == ["a.md", "b.tmp.md"]


def test_a_ragfenceignore_file_that_cannot_be_read_stops_everything(root: Path) -> None:
    write(root, "secret.md")
    write(root, ".ragfenceignore", b"secret\xff.md")
    with pytest.raises(ValidationError, match=r"\.ragfenceignore .* cannot be read: it is not UTF-8"):
        ids(FolderSource(root))
    (root / ".ragfenceignore").unlink()
    (root / ".ragfenceignore").mkdir()
    with pytest.raises(ValidationError, match="cannot be read"):
        ids(FolderSource(root))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "socket"])
def test_a_ragfenceignore_that_is_not_a_regular_file_is_refused_and_never_waited_for(root: Path, kind: str) -> None:
    write(root, "secret.md")
    file = root / ".ragfenceignore"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        file.symlink_to(write(root.parent, "patterns", "*.txt"))
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(file))
    with pytest.raises(ValidationError, match=rf"\.ragfenceignore \(folder:{root}\) cannot be read: it is ") as told:
        ids(FolderSource(root))
    assert "remove it" in told.value.hint


def test_a_ragfenceignore_is_read_up_to_a_limit_and_refused_above_it(root: Path) -> None:
    write(root, "a.md")
    write(root, ".ragfenceignore", "a.md\n" + "#" * (IGNORE_FILE_BYTES - 5))
    assert ids(FolderSource(root)) == []
    write(root, ".ragfenceignore", "a.md\n" + "#" * (IGNORE_FILE_BYTES - 4))
    with pytest.raises(ValidationError, match="larger than 262,144 bytes"):
        ids(FolderSource(root))


# Links and other things that are no files


def test_a_link_to_a_file_is_followed_only_inside_the_folder(root: Path) -> None:
    write(root, "a.md", "inside")
    outside = write(root.parent, "secret.md", "outside")
    twin = write(root.parent, "handbook-private/b.md", "outside, and its path begins like the folder's")
    (root / "link.md").symlink_to("a.md")
    (root / "out.md").symlink_to(outside)
    (root / "twin.md").symlink_to(twin)
    (root / "via.md").symlink_to("link.md")
    assert ids(FolderSource(root)) == ["a.md", "link.md", "via.md"]
    for item in FolderSource(root).items():
        assert (item.state, item.load().text) == (f"6:{LONG_AGO_NS}", "inside")


def test_a_link_that_is_bent_to_the_outside_after_it_was_listed_is_not_read(root: Path) -> None:
    write(root, "a.md", "inside")
    outside = write(root.parent, "secret.md", "outside")
    (root / "link.md").symlink_to("a.md")
    plain, link = FolderSource(root).items()
    for name in ("a.md", "link.md"):
        (root / name).unlink()
        (root / name).symlink_to(outside)
    with pytest.raises(DocumentInvalid, match="leads out of the folder"):
        link.load()
    with pytest.raises(DocumentInvalid, match="cannot be read"):
        plain.load()


def test_links_to_folders_are_not_followed_so_no_loop_can_catch_the_walk(root: Path) -> None:
    write(root, "a/b.md")
    (root / "a" / "loop").symlink_to("..")
    (root / "self").symlink_to("self")
    (root / "self.md").symlink_to("self.md")
    (root / "again").symlink_to("a")
    assert ids(FolderSource(root)) == ["a/b.md"]


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    write(root, "a.md", "hello")
    (root / "link.md").symlink_to("a.md")
    (root.parent / "current").symlink_to("handbook")
    source = FolderSource(root.parent / "current")
    assert source.name == f"folder:{root.parent}/current"
    assert [item.load().text for item in source.items()] == ["hello", "hello"]


def test_what_is_no_file_is_passed_over(root: Path) -> None:
    os.mkfifo(root / "pipe.md")
    (root / "folder.md").mkdir()
    (root / "nowhere.md").symlink_to("gone.md")
    (root / "linked-pipe.md").symlink_to("pipe.md")
    assert ids(FolderSource(root)) == []


def test_a_pipe_in_the_place_of_a_listed_file_does_not_hang_the_read(root: Path) -> None:
    file = write(root, "a.md")
    item = one(FolderSource(root))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DocumentInvalid, match="is a named pipe, not a regular file"):
        item.load()


def swap_for_link(folder: Path, target: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-moved"))
    folder.symlink_to(target)


@pytest.mark.parametrize("swapped", ["x", "x/y"])
def test_a_folder_swapped_for_a_link_after_the_listing_is_not_followed(root: Path, swapped: str) -> None:
    write(root, "x/y/a.md", "inside")
    write(root, "b.md", "still here")
    for path in ("y/a.md", "a.md"):
        write(root.parent / "foreign", path, "foreign")
    b, a = FolderSource(root).items()
    swap_for_link(root / swapped, root.parent / "foreign")
    with pytest.raises(DocumentInvalid, match="a folder of its path was replaced by a link") as told:
        a.load()
    assert told.value.doc_id == "x/y/a.md"
    assert b.load().text == "still here"


def test_a_folder_swapped_for_a_link_during_the_walk_is_not_followed_and_not_taken_for_removed(root: Path) -> None:
    for path in ("a.md", "x/b.md", "x/c.md", "z/d.md"):
        write(root, path)
    for path in ("b.md", "c.md", "d.md", "e.md"):
        write(root.parent / "foreign", path, "foreign")
    items = FolderSource(root).items()
    assert [next(items).doc_id for _ in range(2)] == ["a.md", "x/b.md"]
    swap_for_link(root / "x", root.parent / "foreign")
    swap_for_link(root / "z", root.parent / "foreign")
    rest = list(items)
    assert [(item.doc_id, item.state) for item in rest] == [("x/c.md", ""), ("z/", "")]
    told = []
    for item in rest:
        with pytest.raises(DocumentInvalid) as error:
            item.load()
        told.append(error.value.doc_id)
    assert told == ["x/c.md", None]


def test_a_link_whose_target_lies_behind_a_swapped_folder_is_not_followed(root: Path) -> None:
    write(root, "x/a.md", "inside")
    write(root.parent / "foreign", "a.md", "foreign")
    (root / "link.md").symlink_to("x/a.md")
    link = next(FolderSource(root).items())
    swap_for_link(root / "x", root.parent / "foreign")
    with pytest.raises(DocumentInvalid, match="leads out of the folder"):
        link.load()


def test_a_root_that_is_replaced_after_the_listing_is_not_read(root: Path) -> None:
    write(root, "a.md", "inside")
    write(root.parent / "foreign", "a.md", "foreign")
    item = one(FolderSource(root))
    swap_for_link(root, root.parent / "foreign")
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        item.load()


# Names


def test_a_name_has_the_same_id_in_whatever_unicode_form_the_disk_keeps_it(root: Path) -> None:
    write(root, "re\u0301sume\u0301/u\u0308ber.md", "text")
    item = one(FolderSource(root))
    assert item.doc_id == "r\u00e9sum\u00e9/\u00fcber.md"
    assert item.load().text == "text"
    assert ids(FolderSource(root, ignore=["r\u00e9sum\u00e9/"])) == []
    assert ids(FolderSource(root, ignore=["re\u0301sume\u0301/"])) == []


def test_two_names_that_differ_only_in_their_unicode_form_are_both_yielded(root: Path) -> None:
    write(root, "\u00e9.md", "composed")
    write(root, "e\u0301.md", "decomposed")
    assert [(item.doc_id, item.load().text) for item in FolderSource(root).items()] == [
        ("\u00e9.md", "decomposed"),
        ("\u00e9.md", "composed"),
    ]


def test_a_name_that_is_not_utf8_is_an_item_that_says_so(root: Path) -> None:
    write(root, "a.md")
    write(root, os.fsdecode(b"caf\xe9.md"))
    good, bad = FolderSource(root).items()
    assert (good.doc_id, bad.doc_id) == ("a.md", "caf\\xe9.md")
    with pytest.raises(DocumentInvalid, match=rf"the name of caf\\xe9.md \(folder:{root}\) is not UTF-8") as told:
        bad.load()
    assert told.value.doc_id == "caf\\xe9.md"


# Decoding


def test_a_byte_order_mark_is_dropped(root: Path) -> None:
    write(root, "a.md", b"\xef\xbb\xbf# Hello")
    assert one(FolderSource(root)).load().text == "# Hello"


def test_a_file_in_another_encoding_is_refused_by_name_with_a_way_out(root: Path) -> None:
    write(root, "old/caf\u00e9.txt", "caf\u00e9".encode("cp1252"))
    write(root, "old/wide.txt", "wide".encode("utf-16"))
    write(root, "plain.txt", "plain")
    cafe, wide, plain = FolderSource(root).items()
    with pytest.raises(DocumentInvalid) as told:
        cafe.load()
    assert f"old/caf\u00e9.txt (folder:{root}) is not utf-8 text" in told.value.message
    assert "at byte 3" in told.value.message
    assert "encoding='cp1252'" in told.value.hint
    assert told.value.doc_id == "old/caf\u00e9.txt"
    with pytest.raises(DocumentInvalid) as told:
        wide.load()
    assert "encoding='utf-16'" in told.value.hint
    assert plain.load().text == "plain"


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)),
        b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + bytes(range(1, 32)) * 4,
        b"PK\x03\x04\x14\x00\x08\x08" + bytes(range(255, 0, -1)),
        b"\xff\xd8\xff\xe0\x00\x10JFIF",
        b"\xff\xfe\x00\xd8\x00\x00\x01\x02",
    ],
    ids=["png", "pdf", "zip", "jpeg", "no utf-16"],
)
def test_binary_data_is_called_so_and_nobody_is_told_to_decode_it(root: Path, data: bytes) -> None:
    write(root, "a.txt", data)
    with pytest.raises(DocumentInvalid) as told:
        one(FolderSource(root)).load()
    assert told.value.message == f"a.txt (folder:{root}) is binary data, not text"
    assert "encoding" not in told.value.hint


def test_an_encoding_is_proposed_only_where_the_bytes_are_plausibly_text_in_it(root: Path) -> None:
    texts = {
        "koi8-r": "\u043a\u043d\u0438\u0433\u0430",
        "shift-jis": "\u65e5\u672c\u8a9e",
        "utf-16-le": "caf\u00e9 au lait",
    }
    for encoding, text in texts.items():
        write(root, f"{encoding}.txt", text.encode(encoding))
    hints = {}
    for item in FolderSource(root).items():
        with pytest.raises(DocumentInvalid, match="is not utf-8 text") as told:
            item.load()
        hints[item.doc_id] = told.value.hint.rpartition(": ")[2]
        assert " --encoding " in hint_on("cli", told.value.hint)
    assert hints == {
        "koi8-r.txt": "encoding=...",
        "shift-jis.txt": "encoding=...",
        "utf-16-le.txt": "encoding='utf-16-le'",
    }


def test_what_is_left_out_is_counted_anew_by_every_listing(root: Path) -> None:
    for path in ("a.md", "b.PDF", "x/c.pdf", "x/d", "x/e.png", "node_modules/f.pdf", ".g.pdf", "drafts/h.pdf"):
        write(root, path)
    write(root.parent, "outside.md")
    (root / "out.md").symlink_to(root.parent / "outside.md")
    (root / "nothing.md").symlink_to("gone.md")
    (root / "folder").symlink_to("x")
    (root / "inside.md").symlink_to("a.md")
    os.mkfifo(root / "pipe.md")
    source = FolderSource(root, ignore=["drafts/"])
    for _ in range(2):
        assert ids(source) == ["a.md", "inside.md"]
        assert source.skipped.extensions == {".pdf": 2, "(none)": 1, ".png": 1}
        assert (source.skipped.special, source.skipped.total) == (4, 8)
    (root / "b.PDF").unlink()
    ids(source)
    assert source.skipped.extensions[".pdf"] == 1


def test_extensions_are_told_apart_up_to_a_limit(root: Path) -> None:
    for number in range(120):
        write(root, f"a.{number}")
    write(root, f"a.{'x' * 200}")
    (root / os.fsdecode(b"a.\xff")).touch()
    source = FolderSource(root)
    assert ids(source) == []
    assert source.skipped.total == 122
    assert len(source.skipped.extensions) <= 101
    assert source.skipped.extensions["(other)"] >= 21
    "".join(source.skipped.extensions).encode()


def test_the_encoding_can_be_given(root: Path) -> None:
    write(root, "a.txt", "caf\u00e9".encode("cp1252"))
    assert one(FolderSource(root, encoding="cp1252")).load().text == "caf\u00e9"
    write(root, "a.txt", "caf\u00e9".encode("utf-16"))
    assert one(FolderSource(root, encoding="utf-16")).load().text == "caf\u00e9"


@pytest.mark.parametrize("encoding", ["klingon", "base64", None])
def test_an_encoding_nobody_knows_is_refused_at_once(root: Path, encoding: str) -> None:
    with pytest.raises(ValidationError, match="not a text encoding"):
        FolderSource(root, encoding=encoding)


def test_a_file_above_the_limit_is_refused_without_being_read(root: Path) -> None:
    write(root, "a.txt", "x" * 10)
    write(root, "b.txt", "x" * 11)
    fits, too_big = FolderSource(root, limit_bytes=10).items()
    assert fits.load().text == "x" * 10
    with pytest.raises(DocumentInvalid, match=rf"b.txt \(folder:{root}\) has 11 bytes, and the limit is 10"):
        too_big.load()


# What changes or cannot be read while the walk goes on


def test_a_file_that_vanishes_before_it_is_read_says_so(root: Path) -> None:
    file = write(root, "a.md")
    write(root, "b.md", "still here")
    a, b = FolderSource(root).items()
    file.unlink()
    with pytest.raises(DocumentInvalid, match="was removed before it was read"):
        a.load()
    assert b.load().text == "still here"


def test_a_file_or_folder_that_vanishes_during_the_walk_is_not_listed(root: Path) -> None:
    for path in ("a.md", "b.md", "c/d.md", "e.md"):
        write(root, path)
    items = FolderSource(root).items()
    assert next(items).doc_id == "a.md"
    (root / "b.md").unlink()
    (root / "c" / "d.md").unlink()
    (root / "c").rmdir()
    assert [item.doc_id for item in items] == ["e.md"]


def test_folders_are_listed_only_when_the_walk_gets_there(root: Path) -> None:
    write(root, "a/b.md")
    (root / "c").mkdir()
    items = FolderSource(root).items()
    assert next(items).doc_id == "a/b.md"
    write(root, "c/late.md")
    assert [item.doc_id for item in items] == ["c/late.md"]


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_a_root_that_is_taken_away_during_the_walk_is_an_error_and_not_the_end_of_it(root: Path, how: str) -> None:
    for path in ("a/b.md", "c/d.md"):
        write(root, path)
    items = FolderSource(root).items()
    assert next(items).doc_id == "a/b.md"
    root.rename(root.parent / "elsewhere")
    if how == "replaced":
        root.mkdir()
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        next(items)


def test_a_tree_deeper_than_python_can_recurse_is_walked(root: Path) -> None:
    folders, folder = [], root
    for _ in range(1050):
        folder = folder / "d"
        folders.append(str(folder))
        os.mkdir(folders[-1])
    file = os.path.join(folders[-1], "deep.md")
    try:
        Path(file).write_text("deep")
        item = one(FolderSource(root))
        assert item.doc_id == "d/" * 1050 + "deep.md"
        assert item.load().text == "deep"
    finally:  # here, since what removes temporary folders does recurse
        os.unlink(file)
        for made in reversed(folders):
            os.rmdir(made)


def test_a_path_longer_than_the_system_takes_at_once_is_walked_and_read(root: Path) -> None:
    write(root, "z.md")
    name = "x" * 250
    folder = os.open(root, os.O_RDONLY)
    for _ in range(17):
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    with open(os.open("deep.md", os.O_WRONLY | os.O_CREAT, dir_fd=folder), "w") as file:
        file.write("deep")
    os.close(folder)
    deep, last = FolderSource(root).items()
    assert deep.doc_id == f"{name}/" * 17 + "deep.md"
    assert deep.load().text == "deep"
    assert last.doc_id == "z.md"


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read everything, so it must be somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_told_and_the_walk_goes_on() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which nobody else may enter
        root = Path(folder)
        root.chmod(0o755)
        write(root, "a.md").chmod(0)
        write(root, "b/c.md")
        (root / "b").chmod(0)
        write(root, "d/e.md")
        (root / "d").chmod(0o644)  # its names can be listed, and nothing more
        write(root, "f.md", "fine")
        with without_rights():
            items = list(FolderSource(root, name="r").items())
            assert [item.doc_id for item in items] == ["a.md", "b/", "d/e.md", "f.md"]
            told = []
            for item in items[:3]:
                with pytest.raises(DocumentInvalid, match="Permission denied") as error:
                    item.load()
                told.append((error.value.message.partition(" cannot")[0], error.value.doc_id))
            assert items[3].load().text == "fine"
        for name in ("b", "d"):
            (root / name).chmod(0o755)
    assert told == [
        ("a.md (folder:r)", "a.md"),
        ("the folder b/ (folder:r)", None),
        ("d/e.md (folder:r)", "d/e.md"),
    ]
    assert items[2].state == ""


def test_a_root_that_is_not_there_or_no_folder_is_an_error_and_not_an_empty_source(root: Path) -> None:
    write(root, "a.md")
    with pytest.raises(ValidationError, match="No such file"):
        next(FolderSource(root / "nowhere").items())
    with pytest.raises(ValidationError, match="Not a directory"):
        next(FolderSource(root / "a.md").items())


@pytest.mark.parametrize(
    ("options", "told"),
    [({"ignore": "*.md"}, "ignore=['*.md']"), ({"extensions": "md"}, "extensions=['md']")],
    ids=["ignore", "extensions"],
)
def test_one_text_where_several_are_wanted_is_refused(root: Path, options: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        FolderSource(root, **options)
    assert told in error.value.hint


# A single file


def test_a_single_file_is_a_source_of_one_document(root: Path) -> None:
    file = write(root, "sub/a.html", "<p>hello")
    source = FileSource(file)
    item = one(source)
    assert (source.name, item.doc_id, item.state) == (f"file:{file}", "a.html", f"8:{LONG_AGO_NS}")
    assert item.load() == Document("a.html", "hello", {"path": "a.html"}, "a.html", content_type="text/html")
    assert FileSource(file, name="start page").name == "file:start page"


def test_a_single_file_may_be_a_link_to_anywhere(root: Path) -> None:
    write(root.parent, "elsewhere.md", "hello")
    (root / "a.md").symlink_to(root.parent / "elsewhere.md")
    item = one(FileSource(root / "a.md"))
    assert (item.doc_id, item.load().text) == ("a.md", "hello")


def test_a_single_file_of_an_unknown_kind_is_refused_unless_its_extension_is_given(root: Path) -> None:
    file = write(root, "a.rst", "hello")
    with pytest.raises(ValidationError, match=r"no reader for 'a.rst'") as told:
        FileSource(file)
    assert "extensions=['.rst']" in told.value.hint
    assert one(FileSource(file, extensions=[".rst"])).load().text == "hello"


def test_a_single_file_that_is_gone_is_an_error_and_not_an_empty_source(root: Path) -> None:
    source = FileSource(root / "a.md")
    with pytest.raises(ValidationError, match="No such file"):
        next(source.items())


@pytest.mark.parametrize(
    "how",
    [{"encoding": "cp1252"}, {"base_url": "https://docs.example"}, {"extensions": {".txt": "text/markdown"}}],
    ids=["encoding", "URL", "type"],
)
def test_a_file_that_is_read_in_another_way_has_another_state(root: Path, how: dict[str, Any]) -> None:
    write(root, "a.txt", "text")
    for source in (FolderSource, FileSource):
        place = root if source is FolderSource else root / "a.txt"
        usual = one(source(place)).state
        assert one(source(place, encoding="UTF8", extensions=["txt", "md"])).state == usual
        assert one(source(place, **how)).state not in ("", usual)
