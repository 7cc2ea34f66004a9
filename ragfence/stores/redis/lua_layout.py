"""Fills the offsets, sizes and tags of `core/layout.py` into the Lua scripts, which have none of their own.

They are filled in as text: locals would have to be made anew at every call, and Lua allows few of them.

    $record.token               19, 30, the first and the last byte, as string.sub takes them
    $record.token:when          from the first byte of one field to the last of another
    $record.token.at            19
    $record.rest                57, the first byte behind the fixed fields
    $SEALED                     a constant
    $code(R)                    the number of a letter
    $char(RECORD_VERSION, 0)    a string of these bytes
    $zeros(row.expires)         a string of as many zeros as the field is long
    $state(flags)               the state in the state byte of a record
    $has(flags, HAS_OWNER)      whether a flag is set
    $pack(record.epoch:attempt, a, b, c)    struct.pack with the format of these fields
    $unpack(record, data)       struct.unpack of these fields where they are; with a third argument, at that byte
    $short(data, at)            the text behind its length in one byte; `$whole_short` with the length in front
    $skip_short(data, at)       where a short text ends; `$skip_long` of one with a length of four bytes
    $LONG                       how many bytes the length of a long text takes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ragfence.core import layout
from ragfence.core.decisions import Mode
from ragfence.core.layout import MARKER_HYDRATING, MARKER_READY, RUN_ID_CHARACTERS, Fields, RowKind, State
from ragfence.core.tallies import HOUR_MS, KEPT_DAYS, MAX_LABELS, MAX_ROUTE_BYTES
from ragfence.stores.redis import codec

_TABLES: Mapping[str, Fields] = {
    "record": layout.RECORD,
    "source": layout.SOURCE,
    "head": layout.HEAD,
    "source_lease": layout.LEASE,
    "leased": layout.LEASED_SOURCE,
    "parked": layout.STAMP,
    "row": layout.ROW,
    "claim": codec.CLAIM,
    "seal": codec.SEAL,
    "lease": codec.LEASE_CALL,
    "halves": layout.SEQUENCE_HALVES,
}
_LONG = Fields(size="I4").size
_MARKER_STATE = len(MARKER_READY) + 1
CONSTANTS: Mapping[str, int | str] = {
    **{state.name: int(state) for state in State},
    **{kind.name: int(kind) for kind in RowKind},
    **{
        name: value
        for module in (layout, codec)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int)
    },
    **{mode.name: int(mode) for mode in Mode},
    "ANSWER_FORMAT": codec.ANSWER.lua_format("count", "size") + "c0",
    "LONG": _LONG,
    "READY": f"'{MARKER_READY}'",
    "HYDRATING": f"'{MARKER_HYDRATING}'",
    "RUN_ID_CHARACTERS": RUN_ID_CHARACTERS,
    "MARKER_EPOCH": f"{_MARKER_STATE + 1}, -{RUN_ID_CHARACTERS + 2}",
    "MARKER_RUN": f"-{RUN_ID_CHARACTERS}",
    "HOUR_MS": HOUR_MS,
    "DAY_MS": 24 * HOUR_MS,
    "KEPT_MS": f"{KEPT_DAYS + 1} * {24 * HOUR_MS}",
    "MAX_LABELS": MAX_LABELS,
    "MAX_ROUTE_BYTES": MAX_ROUTE_BYTES,
}
_CALL = re.compile(r"\$([a-z_]+)\(")
_PART = re.compile(r"([a-z_]+)(?:\.([a-z_]+)(?::([a-z_]+))?)?")
_FIELD = re.compile(r"\$([a-z_]+)\.([a-z_]+)(?::([a-z_]+))?(\.at)?")
_CONSTANT = re.compile(r"\$([A-Z_]+)\b")


def fill(source: str) -> str:
    """The script as Redis gets it."""
    source = _fill_calls(source)
    source = _FIELD.sub(lambda found: _field(*found.groups()), source)
    filled = _CONSTANT.sub(lambda found: str(CONSTANTS[found[1]]), source)
    if "$" in filled:
        raise ValueError(f"not filled in: {filled[filled.index('$') :][:60]!r}")
    return filled


def _fill_calls(source: str) -> str:
    done = []
    while found := _CALL.search(source):
        inside, end = _inside(source, found.end())
        arguments = [_fill_calls(each).strip() for each in _split(inside)]
        done += [source[: found.start()], _CALLS[found[1]](*arguments)]
        source = source[end:]
    return "".join((*done, source))


def _inside(text: str, start: int) -> tuple[str, int]:
    """What is inside of the parentheses, and where they are closed."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return text[start:at], at + 1
    raise ValueError(f"never closed: {text[start : start + 60]!r}")


def _split(arguments: str) -> list[str]:
    parts, depth = [""], 0
    for letter in arguments:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _field(table: str, first: str, last: str | None, at: str | None) -> str:
    fields = _TABLES[table]
    if first == "rest":
        return str(fields.size + 1)
    span = fields.span(first, last or first)
    return str(span.start + 1) if at else f"{span.start + 1}, {span.stop}"


def _fields(text: str) -> tuple[str, int]:
    """The format of a table or of a part of it, and its first byte."""
    found = _PART.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} does not name fields")
    fields = _TABLES[found[1]]
    names = list(fields)
    first = found[2] or names[0]
    last = found[3] or found[2] or names[-1]
    return fields.lua_format(first, last), fields.span(first, last).start + 1


def _bytes(text: str) -> int:
    return int(CONSTANTS[text]) if text in CONSTANTS else int(text)


def _char(*numbers: str) -> str:
    return "'" + "".join(f"\\{_bytes(number)}" for number in numbers) + "'"


def _zeros(field: str, more: str = "0") -> str:
    table, _, name = field.partition(".")
    size: int = _TABLES[table].part(name, name).size
    return "'" + r"\0" * (size + int(more)) + "'"


def _has(flags: str, name: str) -> str:
    bit = CONSTANTS[name]
    return f"({flags} % {2 * int(bit)} >= {bit})"


def _pack(fields: str, *values: str) -> str:
    return f"struct.pack('{_fields(fields)[0]}', {', '.join(values)})"


def _unpack(fields: str, data: str, at: str = "") -> str:
    lua_format, first = _fields(fields)
    at = at or (str(first) if first > 1 else "")
    return f"struct.unpack('{lua_format}', {data}{', ' + at if at else ''})"


def _plus(at: str, more: int) -> str:
    """`at` is a variable, or a field whose place is known."""
    at = fill(at)
    return str(int(at) + more) if at.isdigit() else f"{at} + {more}"


def _short(data: str, at: str) -> str:
    return f"sub({data}, {_plus(at, 1)}, {fill(at)} + byte({data}, {fill(at)}))"


def _whole_short(data: str, at: str) -> str:
    return f"sub({data}, {fill(at)}, {fill(at)} + byte({data}, {fill(at)}))"


def _skip_short(data: str, at: str) -> str:
    return f"{_plus(at, 1)} + byte({data}, {fill(at)})"


def _skip_long(data: str, at: str) -> str:
    return f"{_plus(at, _LONG)} + struct.unpack('>I{_LONG}', {data}, {fill(at)})"


def _code(letter: str) -> str:
    return str(ord(letter))


def _state(flags: str) -> str:
    return f"{flags} % {layout.STATE_MASK + 1}"


_CALLS: Mapping[str, Callable[..., str]] = {
    "code": _code,
    "char": _char,
    "zeros": _zeros,
    "state": _state,
    "has": _has,
    "pack": _pack,
    "unpack": _unpack,
    "short": _short,
    "whole_short": _whole_short,
    "skip_short": _skip_short,
    "skip_long": _skip_long,
}
