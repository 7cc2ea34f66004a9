"""Where every byte of the stored records and decision rows is: offsets, sizes and tags, and nothing else has them.

    key record      RECORD, then kind (length:1 + bytes)
                    [owner] [error] [effect_id] (each length:1 + bytes) [payload (length:4 + bytes)]
                    result, to the end
    source record   SOURCE
                    [head   HEAD, then a key record of the given size]
                    [lease  LEASE, then a key record of the given size]
    parked record   STAMP, then a key record: a document's superseded revision
    decision row    ROW, then effect_id and error_code (each length:1 + bytes), context (length:4 + bytes)
    result          of a document: a tag, [owner:8], [row: ADDRESS], [origin: ADDRESS], then the ids of its snippets
    marker          R:<epoch>:<run_id> of a shard that is ready, H:<epoch>:<run_id> of one that is being hydrated

The fields in brackets are stored only if they are not empty, which the upper bits of the state (HAS_*) and the flags of
a source (SOURCE_*) announce. Most sealed records have none of them: a Redis that stores millions of records pays for
every byte. All numbers are big-endian.

`stamp` is the epoch in which the record was written. After a hydration, records of earlier epochs that the log did not
bring back are void.

The second half of a row is the header of the record that was the answer, byte for byte from its fingerprint on. A row
is therefore cut and joined instead of decoded and encoded.

The Lua scripts are filled in from these tables (see `stores/redis/scripts.py`). Functions here work on bytes alone:
they answer a document that was sent before without decoding its record. Values are made in `records.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

from ragfence.core.operations import KEY_BYTES, FenceNumber
from ragfence.errors import REHYDRATE, FormatCorrupt, FormatTooNew, StoreUnsafe

_CODE = re.compile(r"(B|Q|q)|([Iic])(\d+)")
_PYTHON = {"i4": "i", "I2": "H", "I4": "I", "I5": "I", "I6": "HI", "I7": "Q"}
_LUA = {"Q": "I8", "q": "c8"}


class Fields:
    """Fields of fixed size, in the order in which they are stored.

    Each has a code: `B` is a byte, `I6` a number of six bytes, `c16` a text of sixteen, `Q` and `q` are numbers of
    eight bytes without and with a sign.

    >>> table = Fields(version="B", token="c12", when="I6")
    >>> table["token"], table.size, table.lua_format("token", "when")
    (slice(1, 13, None), 19, '>c12I6')
    """

    def __init__(self, **codes: str) -> None:
        self._codes = codes
        self._slices: dict[str, slice] = {}
        self.size = 0
        for name, code in codes.items():
            size = _size_of(code)
            self._slices[name] = slice(self.size, self.size + size)
            self.size += size

    def __getitem__(self, name: str) -> slice:
        return self._slices[name]

    def __add__(self, other: Fields) -> Fields:
        return Fields(**self._codes, **other._codes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes)

    def part(self, first: str = "", last: str = "") -> Fields:
        """From one field to another, both included, as a table of its own."""
        names = list(self)
        start, end = names.index(first) if first else 0, names.index(last) if last else len(names) - 1
        return Fields(**{name: self._codes[name] for name in names[start : end + 1]})

    def span(self, first: str, last: str) -> slice:
        return slice(self._slices[first].start, self._slices[last].stop)

    def lua_format(self, first: str, last: str) -> str:
        """For Lua's struct.pack and struct.unpack, which have numbers of any size."""
        return ">" + "".join(_LUA.get(code, code) for code in self.part(first, last)._codes.values())

    def python_format(self, *, raw: Collection[str] = (), blank: Collection[str] = ()) -> str:
        """For Python's struct, without the byte order. It has no numbers of five, six and seven bytes.

        `I6` is two fields, see `six_bytes`; `I7` and `I5`, which stand together, are two others, see `fence_fields`.
        Numbers that are `raw` are bytes, and those that are `blank` are zero and no field.
        """
        return "".join(
            f"{_size_of(code)}{'x' if name in blank else 's'}"
            if name in raw or name in blank or code[0] == "c"
            else _PYTHON.get(code, code)
            for name, code in self._codes.items()
        )

    def struct(self, *, raw: Collection[str] = (), blank: Collection[str] = ()) -> struct.Struct:
        made = struct.Struct(">" + self.python_format(raw=raw, blank=blank))
        if made.size != self.size:
            raise ValueError(f"{made.format} has {made.size} bytes, the fields have {self.size}")
        return made


def _size_of(code: str) -> int:
    found = _CODE.fullmatch(code)
    if found is None:
        raise ValueError(f"{code!r} is not the code of a field")
    return int(found[3]) if found[3] else 1 if code == "B" else 8


RECORD_VERSION = 1
ROW_VERSION = 1
DIGEST_BYTES = KEY_BYTES - 1
FINGERPRINT_BYTES = 16
TOKEN_BYTES = 12
METADATA_HASH_BYTES = 16
NO_METADATA = bytes(METADATA_HASH_BYTES)
NO_TOKEN = bytes(TOKEN_BYTES)
MAX_EPOCH = 2**53 - 1
"""The highest that Lua can count; seven bytes hold it. Solo epochs are microseconds: it lasts until the year 2255."""
MAX_COUNTER = 2**40 - 1
MAX_SHORT_BYTES = 255

KEY = Fields(shard="c1", digest=f"c{DIGEST_BYTES}")
RECORD = Fields(
    version="B",
    state="B",
    fingerprint=f"c{FINGERPRINT_BYTES}",
    token=f"c{TOKEN_BYTES}",
    epoch="I7",
    counter="I5",
    attempt="I2",
    first_seen="I6",
    when="I6",
)
"""`when` is the expiry of the lease while the record is pending, and the time of the seal afterwards."""
STAMP = Fields(stamp="Q")
SOURCE = Fields(version="B", flags="B") + STAMP
_RECORD_SIZE = Fields(size="I4")
HEAD = Fields(digest=f"c{DIGEST_BYTES}", sequence="q", metadata_hash=f"c{METADATA_HASH_BYTES}") + _RECORD_SIZE
LEASE = Fields(digest=f"c{DIGEST_BYTES}") + _RECORD_SIZE
HEADED_SOURCE = SOURCE + HEAD
LEASED_SOURCE = SOURCE + LEASE
"""a source without a head, whose first revision is being ingested"""
BATCH_BYTES = 8
"""How much of a token names its batch, and so, with the epoch, the segment in which its move was committed."""
ADDRESS = Fields(epoch="Q", batch=f"c{BATCH_BYTES}")
"""of a segment of the log"""
OWNER_BYTES = 8
HERE, ELSEWHERE, MOVED = b"d", b"e", b"x"
"""Tags of a document's result. HERE: its row and its positions are in the segment that the epoch and the token of the
record name. ELSEWHERE: the positions are in another segment, whose address follows. MOVED, after a compaction: the
addresses of both follow. In upper case, the owner comes first: the source that owns the document."""
SEQUENCE_HALVES = Fields(high="i4", low="I4")
"""of a sequence, of which a number in Lua cannot hold more"""
ROW = Fields(
    version="B",
    token=f"c{TOKEN_BYTES}",
    position="B",
    ts="I6",
    kind="B",
    flags="B",
    waited="I4",
    expires="I6",
    key=f"c{KEY_BYTES}",
    fingerprint=f"c{FINGERPRINT_BYTES}",
    winner=f"c{TOKEN_BYTES}",
    epoch="I7",
    counter="I5",
    attempt="I2",
    first_seen="I6",
    sealed_at="I6",
)


class State(IntEnum):
    HELD = 1
    """leased now or before; the lease counts until `when_ms`, and the record outlives it"""
    RELEASED = 2
    """without an owner; attempts and the last error are remembered"""
    QUARANTINED = 3
    """too many attempts; waits until it is released by hand"""
    SEALED = 4
    FAILED = 5
    """sealed as a failure, which is replayed"""
    LOCKED = 6
    """a lock, which is all that its record can be: it seals nothing, and a released lock has no record"""


class RowKind(IntEnum):
    NEW = 1
    DUPLICATE = 2
    CONFLICT = 3
    IN_FLIGHT = 4
    STALE = 5
    ENDED = 6
    """not an answer to a caller: the life of a sealed key ended (expired, purged, released), and it may be new again"""


STATE_MASK = 15
"""The state proper is in the lower bits of its byte."""
HAS_OWNER, HAS_ERROR, HAS_EFFECT_ID, HAS_PAYLOAD = 16, 32, 64, 128
SOURCE_HEAD, SOURCE_LEASE, SOURCE_LIVE, SOURCE_SEQUENCE, SOURCE_UNSETTLED = 1, 2, 4, 8, 16
TAKEOVER, HEALED, REVIVED, METADATA_UPDATED, FENCED_OUT, JOURNALED = 1, 2, 4, 8, 16, 32
"""flags of a decision row"""

FENCED_POSITION = 249
"""of a seal that came too late. Its sender is answered with what is stored, or what its commit decided: another row"""
SEAL_POSITION = 250
RELEASE_POSITION = 251
CONFLICT_POSITION = 252
END_POSITION = 253

MARKER_READY, MARKER_HYDRATING = "R", "H"
RUN_ID_CHARACTERS = 40

_LIVE_HEAD = SOURCE_HEAD | SOURCE_LIVE
_NO_RECORD, _THIS_VERSION = bytes(_RECORD_SIZE.size), bytes((RECORD_VERSION,))
_FREE_HEADS = frozenset(bytes((RECORD_VERSION, _LIVE_HEAD | more)) for more in (0, SOURCE_SEQUENCE))
"""How the record of a source starts that has a live head and no lease."""
_JUST_SEALED = bytes((RECORD_VERSION, State.SEALED))
_STATES = {int(state): state for state in State}
_ENDED = frozenset((int(State.SEALED), int(State.FAILED)))

HELD, FAILED, LOCKED = State.HELD, State.FAILED, State.LOCKED
"""as plain names, like those of `decisions.Mode`"""

source_header = SOURCE.struct()
head_fields = HEAD.struct()
lease_fields = LEASE.struct()
row_header = ROW.struct()
replay_row_start = ROW.part(last="key").struct(raw=("ts",), blank=("expires",))
_stamp = STAMP.struct()
_signed = struct.Struct(">q")
_key = KEY.struct()
_pack_record = RECORD.struct().pack
_read_record = (RECORD + Fields(kind_size="B")).struct(raw=("epoch", "counter", "first_seen", "when")).unpack_from
_read_ending = RECORD.part("epoch").struct().unpack_from
_sealed_head = struct.Struct(f">B{HEAD.python_format()}{RECORD.python_format()}")
_tuple = tuple.__new__
_number = int.from_bytes


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


KIND_SIZE, KIND = RECORD.size, RECORD.size + 1
"""where the length of the kind is, and where the kind starts, in a key record"""
ROW_ID = ROW.span("token", "position")
ANSWERED = RECORD.span("fingerprint", "when")
"""the part of a record's header that is the second half of a row"""
SOURCE_FLAGS, SOURCE_STAMP = SOURCE["flags"].start, SOURCE["stamp"]
_STATE, _FINGERPRINT = RECORD["state"].start, RECORD["fingerprint"]
_RECORD_AT, _ENDING = HEADED_SOURCE.size, RECORD["epoch"].start
_DIGEST, _SEQUENCE = HEADED_SOURCE["digest"], HEADED_SOURCE["sequence"]
_METADATA_HASH, _HEAD_SIZE = HEADED_SOURCE["metadata_hash"], HEADED_SOURCE["size"]
_START = SOURCE.span("version", "flags")
_HEAD_VERSION = _shifted(RECORD["version"], _RECORD_AT)
_HEAD_STATE = _shifted(RECORD.span("version", "state"), _RECORD_AT)
_HEAD_FINGERPRINT = _shifted(RECORD["fingerprint"], _RECORD_AT)
_ENCODED_DIGEST, _ENCODED_RECORD = _shifted(HEAD["digest"], 1), HEAD.size + 1
"""in an encoded head, which starts with the flags of its source"""


# Texts and numbers


@lru_cache(maxsize=4096)
def short(text: str) -> bytes:
    """length:1 + bytes; what does not fit is cut off between two characters."""
    if not text:  # as most texts are but kinds and owners
        return b"\0"
    data = text.encode()
    if len(data) > MAX_SHORT_BYTES:
        data = data[:MAX_SHORT_BYTES].decode(errors="ignore").encode()
    return bytes((len(data),)) + data


def short_at(data: bytes, at: int) -> tuple[bytes, int]:
    """The bytes of a short text, and where it ends."""
    end = at + 1 + data[at]
    return data[at + 1 : end], end


long_size = struct.Struct(">I").pack


def long_at(data: bytes, at: int) -> tuple[bytes, int]:
    """The bytes behind their length in four bytes, and where they end."""
    start = at + 4
    end = start + int.from_bytes(data[at:start], "big")
    return data[start:end], end


def six_bytes(number: int) -> tuple[int, int]:
    """A number as two fields of a struct, `HI`: Python has no six-byte format, Lua has."""
    return number >> 32, number & 0xFFFFFFFF


def from_six_bytes(high: int, low: int) -> int:
    return high << 32 | low


def pack_ms(ms: int) -> bytes:
    """A time as it is in records and rows."""
    return ms.to_bytes(6, "big")


def pack_header(state: int, fingerprint: bytes, token: bytes, fence: FenceNumber, attempt: int, *times: int) -> bytes:
    """The header of a key record; `times`: when it was first seen, and `when`."""
    seen, when = times
    high, low = fence_fields(fence)
    return _pack_record(
        RECORD_VERSION,
        state,
        fingerprint,
        token,
        high,
        low,
        attempt,
        seen >> 32,
        seen & 0xFFFFFFFF,
        when >> 32,
        when & 0xFFFFFFFF,
    )


def fence_fields(fence: FenceNumber) -> tuple[int, int]:
    """Epoch and counter as two fields of a struct, `QI`: Python has no formats of seven and five bytes, Lua has."""
    epoch, counter = fence
    if epoch >> 53 | counter >> 40:  # a number cut off would let a stale owner in
        checked_epoch(epoch)
        raise StoreUnsafe(
            f"the counter of fence {fence} is out of range: the highest is {MAX_COUNTER}",
            hint="a shard has made that many claims, or its counter was changed by hand; use a new fence store",
        )
    return epoch << 8 | counter >> 32, counter & 0xFFFFFFFF


def fence_from_fields(high: int, low: int) -> FenceNumber:
    return FenceNumber(high >> 8, (high & 0xFF) << 32 | low)


def pack_epoch(epoch: int) -> bytes:
    return checked_epoch(epoch).to_bytes(7, "big")


def checked_epoch(epoch: int) -> int:
    """The epoch, if records can hold it."""
    if 0 <= epoch <= MAX_EPOCH:
        return epoch
    raise StoreUnsafe(
        f"epoch {epoch} is out of range: the highest is {MAX_EPOCH}",
        hint="check the clock of the fence store, its markers, and the names under <tenant>/epochs/ in its objects",
    )


def stamp_of(epoch: int | None) -> bytes:
    """The stamp of an epoch; for None, a shard that may not answer, an empty one, which no record has."""
    return b"" if epoch is None else _stamp.pack(epoch)


def split_keys(data: bytes | memoryview) -> Iterator[tuple[bytes, bytes]]:
    """(shard, digest) of each of the keys, which follow one another."""
    return _key.iter_unpack(data)


def refuse_newer(version: int, what: str) -> None:
    if version > RECORD_VERSION:
        raise FormatTooNew(f"a {what} in the fence store has format {version}; this ragfence knows {RECORD_VERSION}")
    if version == 0:
        raise FormatCorrupt(f"a {what} in the fence store has format 0", hint=REHYDRATE)


# Key records

_R = TypeVar("_R", bound=tuple[object, ...])


def record_decoder(record: type[_R]) -> Callable[[bytes], _R]:
    """Decodes the bytes of a key record into a named tuple that has the fields of `KeyRecord`."""

    def decode_record(data: bytes) -> _R:
        try:
            if data[0] != RECORD_VERSION:
                refuse_newer(data[0], "record")
            _, state, fingerprint, token, epoch, counter, attempt, first_seen, when, size = _read_record(data)
            at = KIND + size
            kind = _text(data[KIND:at])
            owner, error, effect_id, payload = "", "", "", b""
            if state > STATE_MASK:
                if state & HAS_OWNER:
                    owner, at = _text_at(data, at)
                if state & HAS_ERROR:
                    error, at = _text_at(data, at)
                if state & HAS_EFFECT_ID:
                    effect_id, at = _text_at(data, at)
                if state & HAS_PAYLOAD:
                    payload, at = long_at(data, at)
            if at > len(data):
                raise IndexError("cut off")
            # As tuples, past the constructors: a batch of replays decodes one for each document.
            return _tuple(
                record,
                (
                    _STATES[state & STATE_MASK],
                    fingerprint,
                    token,
                    _tuple(FenceNumber, (_number(epoch), _number(counter))),
                    attempt,
                    _number(first_seen),
                    _number(when),
                    kind,
                    owner,
                    error,
                    effect_id,
                    payload,
                    data[at:],
                ),
            )
        except KeyError as unknown:
            raise _unknown_state(data[_STATE] & STATE_MASK) from unknown
        except (struct.error, IndexError, ValueError) as broken:
            raise FormatCorrupt(
                f"{len(data)} bytes in the fence store are not a valid key record: {broken}", hint=REHYDRATE
            ) from broken

    return decode_record


def _unknown_state(state: int) -> FormatTooNew | FormatCorrupt:
    if state:
        return FormatTooNew(f"a record in the fence store is in state {state}, which this ragfence does not know")
    return FormatCorrupt("a record in the fence store is in state 0", hint=REHYDRATE)


@lru_cache(maxsize=4096)
def _text(data: bytes) -> str:
    return data.decode()


def _text_at(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def is_ended(data: bytes, fingerprint: bytes) -> bool:
    """Whether these bytes are an ended record with this fingerprint."""
    return data[_STATE] & STATE_MASK in _ENDED and data[_FINGERPRINT] == fingerprint


def short_effect_id(data: bytes) -> bytes:
    """The effect_id in a key record, with its length in front of it."""
    state = data[_STATE]
    if not state & HAS_EFFECT_ID:
        return b"\0"
    at = KIND + data[KIND_SIZE]
    if state & HAS_OWNER:
        at += 1 + data[at]
    if state & HAS_ERROR:
        at += 1 + data[at]
    return data[at : at + 1 + data[at]]


def ending_in(record: bytes) -> tuple[int, int, int, int]:
    """Epoch, counter, when it was first seen and when it was sealed, of a sealed record."""
    high, low, _, seen, seen_low, sealed, sealed_low = _read_ending(record, _ENDING)
    return high >> 8, (high & 0xFF) << 32 | low, seen << 32 | seen_low, sealed << 32 | sealed_low


# Parked records


def parked(epoch: int, record: bytes) -> bytes:
    return _stamp.pack(epoch) + record


def parked_in(data: bytes, epoch: int | None) -> bytes | None:
    """The parked record, or None if it was parked before this epoch (None: any epoch will do)."""
    if len(data) <= STAMP.size:
        raise FormatCorrupt(f"{len(data)} bytes in the fence store are not a valid parked record", hint=REHYDRATE)
    if epoch is not None and _stamp.unpack_from(data)[0] != epoch:
        return None
    return data[STAMP.size :]


def is_parked(data: bytes) -> bool:
    """A parked record starts with its stamp, whose first byte is 0; any other record with its version."""
    return not data[0]


def is_parked_below(data: bytes, epoch: int) -> bool:
    """Whether a stored record is parked, and was so before this epoch."""
    stamp: int = _stamp.unpack_from(data)[0]
    return not data[0] and stamp < epoch


# Records of sources


def mark_of_source(data: bytes, stamp: bytes | None) -> bytes | None:
    """The digest of a live document's key and its metadata hash, which tell it from any other head; None: not live.

    The head of an operation with a sequence is not a document's: it has no record. Nothing is decoded, because a
    corpus digest reads one for every document. `stamp`: that of the epoch (see `stamp_of`); None: any will do.
    """
    if data[0] != RECORD_VERSION:
        refuse_newer(data[0], "source")
    if data[SOURCE_FLAGS] & _LIVE_HEAD != _LIVE_HEAD or (stamp is not None and data[SOURCE_STAMP] != stamp):
        return None
    if len(data) < _RECORD_AT:
        raise FormatCorrupt(
            f"{len(data)} bytes in the fence store are not a valid source record: cut off", hint=REHYDRATE
        )
    if data[_HEAD_SIZE] == _NO_RECORD:
        return None
    version = data[_HEAD_VERSION]
    if version != _THIS_VERSION:
        refuse_newer(_number(version), "record")
    return data[_DIGEST] + data[_METADATA_HASH]


def free_head(
    data: bytes, stamp: bytes | None, digest: bytes, fingerprint: bytes, metadata_hash: bytes, sequence: int | None
) -> bytes | None:
    """The record of a source's live head, cut out of the source's, if it is this one and has no lease on it.

    None decides nothing: the document has to be claimed. `stamp`: as above. Every document that is sent again
    passes through here, so nothing is decoded.
    """
    if (
        data[_START] not in _FREE_HEADS
        or data[_DIGEST] != digest
        or data[_METADATA_HASH] != metadata_hash
        or data[_HEAD_FINGERPRINT] != fingerprint
        or (stamp is not None and data[SOURCE_STAMP] != stamp)
        or data[_HEAD_STATE] != _JUST_SEALED
    ):
        refuse_newer(data[0], "source")
        return None
    if sequence is not None and (not data[SOURCE_FLAGS] & SOURCE_SEQUENCE or data[_SEQUENCE] != _signed.pack(sequence)):
        return None
    return data[_RECORD_AT:]


def may_be_newer(data: bytes) -> bool:
    """Whether only a newer ragfence can read this record of a source, or perhaps the one inside."""
    return data[0] != RECORD_VERSION or (
        bool(data[SOURCE_FLAGS] & SOURCE_HEAD) and data[_HEAD_VERSION] not in (b"", _THIS_VERSION)
    )


# Encoded heads: the flags of the source, then the head


def sealed_head(
    digest: bytes,
    live: bool,
    sequence: int | None,
    metadata_hash: bytes,
    fingerprint: bytes,
    token: bytes,
    fence: tuple[int, int],
    at_ms: int,
    tail: bytes,
) -> bytes:
    """`Head.encode` of what the log says, at once: it is made for every document when a store is hydrated.

    `fence`: as `fence_fields` returns it. `tail`: the kind (see `short`), then the result.
    """
    seen, seen_low = at_ms >> 32, at_ms & 0xFFFFFFFF
    return (
        _sealed_head.pack(
            SOURCE_HEAD | (SOURCE_LIVE if live else 0) | (SOURCE_SEQUENCE if sequence is not None else 0),
            digest,
            sequence or 0,
            metadata_hash,
            RECORD.size + len(tail),
            RECORD_VERSION,
            State.SEALED,
            fingerprint,
            token,
            *fence,
            1,
            seen,
            seen_low,
            seen,
            seen_low,
        )
        + tail
    )


def is_live_head(head: bytes) -> bool:
    return bool(head[0] & SOURCE_LIVE)


def digest_in(head: bytes) -> bytes:
    return head[_ENCODED_DIGEST]


def record_in(head: bytes) -> bytes:
    return head[_ENCODED_RECORD:]


def source_with(epoch: int, head: bytes) -> bytes:
    """The record of a source that has this encoded head and no lease."""
    return b"%c%b%b%b" % (RECORD_VERSION, head[:1], _stamp.pack(epoch), head[1:])


# Results of documents

_address = ADDRESS.struct()
_IDS_AT = {HERE: 1, ELSEWHERE: 1 + ADDRESS.size, MOVED: 1 + 2 * ADDRESS.size, b"": 0}
_IDS_AT |= {tag.upper(): at + OWNER_BYTES for tag, at in _IDS_AT.items() if tag}


def ids_in(result: bytes) -> bytes:
    """The ids of the snippets alone, which every replay needs."""
    at = _IDS_AT.get(result[:1])
    if at is None:
        raise FormatCorrupt(f"the record of a document starts with {result[:1]!r}")
    return result[at:]


def ids_in_record(record: bytes) -> bytes:
    """The ids of the snippets in the record of a document, which has no texts but its kind."""
    start = KIND + record[KIND_SIZE]
    at = _IDS_AT.get(record[start : start + 1])
    if at is None:
        raise FormatCorrupt(f"the record of a document starts with {record[start : start + 1]!r}")
    return record[start + at :]


def owner_and_addresses(result: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The owner, or nothing, and (epoch, batch) of each address in the result of a document."""
    at = 1 + OWNER_BYTES if result[:1].isupper() else 1
    end = len(result) - len(ids_in(result))
    try:
        return result[1:at], list(_address.iter_unpack(result[at:end]))
    except struct.error as broken:
        raise FormatCorrupt(f"the record of a document is cut off: {broken}") from broken


def pack_address(epoch: int, batch: bytes) -> bytes:
    return _address.pack(epoch, batch)
