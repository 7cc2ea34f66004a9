"""The Lua scripts, put together: what every script needs, the rules where they are needed, the script itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from ragfence.core.layout import DIGEST_BYTES
from ragfence.stores.redis.connection import packed_parts
from ragfence.stores.redis.lua_layout import fill
from ragfence.stores.redis.replies import Command

_LUA = files("ragfence.stores.redis") / "lua"
_REAL_NOW = "local function now() local t = redis.call('TIME') return t[1] * 1000 + math.floor(t[2] / 1000) end"
_TEST_NOW = "local function now() return tonumber(redis.call('GET', '{}')) end"
# On a cluster a script may touch only its own slot: there every shard has a clock, beside its marker.
_TEST_NOW_IN_SHARD = "local function now() return tonumber(redis.call('GET', string.sub(KEYS[1], 1, -2) .. 't')) end"
# Redis 6 refuses writes after TIME and INFO unless a script replicates its effects; later ones always do.
_EFFECTS = "if redis.replicate_commands then redis.replicate_commands() end"


@dataclass(frozen=True, slots=True)
class Script:
    source: str
    sha: bytes

    @property
    def load(self) -> Command:
        return (b"SCRIPT", b"LOAD", self.source)

    def call(self, keys: Sequence[bytes], args: Sequence[Any]) -> Command:
        return (b"EVALSHA", self.sha, len(keys), *keys, *args)


class Alone(NamedTuple):
    """A call about one record of a shard, packed ahead: only what goes between these pieces differs."""

    to_digest: bytes
    to_run_id: bytes
    to_item: bytes

    @classmethod
    def of(
        cls, script: Script, keys: Sequence[bytes], prefix: bytes, common: Sequence[bytes], args: Sequence[bytes]
    ) -> Alone:
        """`keys` stand before the name of the record, which is `prefix` and its digest; `common` before the run_id,
        `args` between that and the packed item."""
        parts = 3 + len(keys) + 1 + len(common) + 1 + len(args) + 1
        start = packed_parts(b"EVALSHA", script.sha, b"%d" % (len(keys) + 1), *keys)
        name = b"$%d\r\n%b" % (len(prefix) + DIGEST_BYTES, prefix)
        return cls(b"*%d\r\n%b%b" % (parts, start, name), b"\r\n" + packed_parts(*common), packed_parts(*args))


@cache
def scripts(test_clock: str | None, *, clustered: bool) -> Mapping[str, Script]:
    now = _REAL_NOW
    if test_clock:
        now = _TEST_NOW_IN_SHARD if clustered else _TEST_NOW.format(test_clock)
    start, base, records = [_EFFECTS, now, _read("first")], _read("base"), _read("records")
    return {
        "claim": _script(*start, *_settling("claim", base, records)),
        "seal": _script(*start, *_settling("seal", base, records)),
        "lease": _script(*start, base, records, _read("lease")),
        "epoch": _script(*start, base, _read("epoch")),
        "drop_rows": _script(_read("drop_rows")),
    }


def _settling(name: str, base: str, records: str) -> list[str]:
    """What is frequent comes first, and what is rare is made only when it is needed."""
    rules = ["local function rules()", records, _read(f"{name}_rules"), "end"]
    return [_read(f"{name}_cut"), _read(f"{name}_alone"), base, *rules, _read(name)]


def _script(*parts: str) -> Script:
    source = "\n".join(parts)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest().encode())


def _read(name: str) -> str:
    return fill((_LUA / f"{name}.lua").read_text())
