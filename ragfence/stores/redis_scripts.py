"""The Lua scripts, put together: what every script needs, the rules where they are needed, the script itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from ragfence.stores.redis_link import Command

_LUA = files("ragfence.stores") / "lua"
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


@cache
def scripts(test_clock: str | None, *, clustered: bool) -> Mapping[str, Script]:
    now = _REAL_NOW
    if test_clock:
        now = _TEST_NOW_IN_SHARD if clustered else _TEST_NOW.format(test_clock)
    start, records = [_EFFECTS, now, _read("base")], _read("records")
    at_once = [_EFFECTS, now, _read("claim_replay"), _read("base")]
    return {
        "claim": _script(*at_once, "local function rules()", records, _read("claim_rules"), "end", _read("claim")),
        "seal": _script(*start, "local function rules()", records, _read("seal_rules"), "end", _read("seal")),
        "lease": _script(*start, records, _read("lease")),
        "epoch": _script(*start, _read("epoch")),
        "drop_rows": _script(_read("drop_rows")),
    }


def _script(*parts: str) -> Script:
    source = "\n".join(parts)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest().encode())


def _read(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text()
