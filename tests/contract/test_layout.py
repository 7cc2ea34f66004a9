"""Offsets, sizes and tags of records and rows are in core/layout.py alone, and everything agrees with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragfence
from ragfence.core import layout
from ragfence.core.layout import Fields
from ragfence.stores.redis import codec
from ragfence.stores.redis.lua_layout import fill

PACKAGE = Path(ragfence.__file__).parent
LUA = sorted((PACKAGE / "stores/redis/lua").glob("*.lua"))
MAY_BUILD_TUPLES = {"core/layout.py", "stores/redis/codec.py"}
MAY_PACK = {"core/layout.py", "stores/redis/codec.py", "documents/identity.py"}
BYTES = ("core", "stores", "documents", "engine", "testing")
MESSAGES = 40
"""a longer slice, from the start, cuts a text off that an error shows"""
STORED_BYTES = {"data", "record", "source", "head", "result", "stored"}
"""the names that they have"""
TUPLES_OR_BYTES = {"row", "raw", "value"}
"""of which an index may be that of a column in SQL, and a slice may not"""
LITERAL_OFFSETS = re.compile(
    r"""
    \bsub\(\s*\w+,\s*(?!1,\s*[-a-z])-?\d  # sub(data, 19, 30), but not all before a place
    | \bbyte\(\s*\w+,\s*\d           # byte(data, 2)
    | \b(?:un)?pack\(\s*'>           # struct.unpack('>I6', ...
    | %\s*\d                         # flags % 32
    | '(?:\\\d+){3,}'                # as many zeros as a field is long
    | '\\[2-9]\d*'                   # a tag
    | \b(?:version|state|flags|position|kind)\s*[=~]=\s*[1-9]
    """,
    re.VERBOSE,
)


def _literal_slices(tree: ast.AST) -> Iterator[int]:
    """The lines that cut stored bytes at numbers; the first byte is the tag, and may be cut off."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id not in (STORED_BYTES | TUPLES_OR_BYTES if isinstance(node.slice, ast.Slice) else STORED_BYTES):
            continue
        if isinstance(node.slice, ast.Slice) and node.slice.lower is None and _shows_text(node.slice.upper):
            continue
        bounds = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
        for each in ast.walk(ast.Module([ast.Expr(bound) for bound in bounds if bound], [])):
            if isinstance(each, ast.Constant) and isinstance(each.value, int) and each.value > 1:
                yield node.lineno


def _shows_text(upper: ast.expr | None) -> bool:
    return isinstance(upper, ast.Constant) and isinstance(upper.value, int) and upper.value >= MESSAGES


def _packs(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "struct" and node.attr != "error":
            yield node.lineno


def _built_past_the_constructor(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__new__" and ast.unparse(node.value) == "tuple":
            yield node.lineno


def _modules(*under: str) -> dict[str, ast.AST]:
    paths = (
        path for place in under for path in ([PACKAGE / place] if "." in place else (PACKAGE / place).rglob("*.py"))
    )
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def _code(lua: str) -> str:
    return re.sub(r"--.*", "", lua)


def test_no_other_module_cuts_stored_bytes_at_literal_offsets() -> None:
    found = {name: [*_literal_slices(tree)] for name, tree in _modules(*BYTES).items()}
    assert {name: lines for name, lines in found.items() if lines and "/readers/" not in name} == {}


def test_no_other_module_of_the_stores_packs_bytes() -> None:
    found = {name: [*_packs(tree)] for name, tree in _modules("core", "stores", "documents", "engine").items()}
    assert {name for name, lines in found.items() if lines} == MAY_PACK


def test_tuples_are_built_past_their_constructors_only_where_records_are_decoded() -> None:
    found = {name: [*_built_past_the_constructor(tree)] for name, tree in _modules("").items()}
    assert {name for name, lines in found.items() if lines} == MAY_BUILD_TUPLES


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_lua_has_no_offsets_of_its_own(path: Path) -> None:
    assert LITERAL_OFFSETS.findall(_code(path.read_text())) == []


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_everything_in_lua_is_filled_in(path: Path) -> None:
    assert "$" not in fill(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "local token = sub(data, 19, 30)",
        "local run = sub(marker, -40)",
        "local flags = byte(data, 2)",
        "local when = struct.unpack('>I6', data, 51)",
        "if flags % 32 >= 16 then return end",
        "if state == 4 then return end",
        r"local row = '\250' .. token",
        r"local none = '\0\0\0\0\0\0'",
    ],
)
def test_an_offset_in_lua_would_be_found(line: str) -> None:
    assert LITERAL_OFFSETS.search(line)


@pytest.mark.parametrize("line", ["data[19:31]", "data[70:]", "record[2]", "head[1:33]", "data[at + 4 : end]"])
def test_an_offset_in_python_would_be_found(line: str) -> None:
    assert [*_literal_slices(ast.parse(line))]


def test_packing_and_building_elsewhere_would_be_found() -> None:
    assert [*_packs(ast.parse("size = struct.Struct('>I')"))]
    assert [*_built_past_the_constructor(ast.parse("_tuple = tuple.__new__"))]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        (layout.RECORD, 56),
        (layout.SOURCE, 10),
        (layout.HEAD, 60),
        (layout.LEASE, 36),
        (layout.HEADED_SOURCE, 70),
        (layout.ROW, 119),
        (layout.ADDRESS, 16),
        (codec.CLAIM, 111),
        (codec.SEAL, 111),
        (codec.LEASE_CALL, 70),
    ],
)
def test_tables_have_the_sizes_that_are_stored(fields: Fields, size: int) -> None:
    assert fields.size == size == fields.struct(raw=("epoch",) if fields is codec.LEASE_CALL else ()).size


def test_the_second_half_of_a_row_is_the_header_of_a_record() -> None:
    row, record = layout.ROW.part("fingerprint"), layout.RECORD.part("fingerprint")
    assert row.lua_format("fingerprint", "sealed_at") == record.lua_format("fingerprint", "when")


@pytest.mark.parametrize(
    ("source", "filled"),
    [
        ("sub(data, $record.token)", "sub(data, 19, 30)"),
        ("sub(data, $record.fingerprint:when)", "sub(data, 3, 56)"),
        ("byte(data, $record.state.at)", "byte(data, 2)"),
        ("$record.rest", "57"),
        ("$char(ROW_VERSION, DUPLICATE, 0)", r"'\1\2\0'"),
        ("$zeros(row.expires)", r"'\0\0\0\0\0\0'"),
        ("$zeros(row.expires, 2)", r"'\0\0\0\0\0\0\0\0'"),
        ("$has(flags, HAS_ERROR)", "(flags % 64 >= 32)"),
        ("not $has(byte(claim, $claim.flags.at), CLAIM_RETRACT)", "not (byte(claim, 2) % 4 >= 2)"),
        ("$pack(record.epoch:attempt, a, f(b, c), 1)", "struct.pack('>I7I5I2', a, f(b, c), 1)"),
        ("$unpack(record.when, data)", "struct.unpack('>I6', data, 51)"),
        ("$unpack(head.digest:metadata_hash, data, at)", "struct.unpack('>c32c8c16', data, at)"),
        ("$short(data, $record.rest)", "sub(data, 58, 57 + byte(data, 57))"),
        ("$skip_short(data, at)", "at + 1 + byte(data, at)"),
        ("$skip_long(data, at)", "at + 4 + struct.unpack('>I4', data, at)"),
    ],
)
def test_lua_is_filled_in_from_the_tables(source: str, filled: str) -> None:
    assert fill(source) == filled


@pytest.mark.parametrize("source", ["$record.nothing", "$nothing.token", "$NOTHING", "$has(flags, HAS_ERROR", "$ 5"])
def test_what_the_tables_do_not_have_is_refused(source: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        fill(source)
