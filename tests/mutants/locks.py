"""Mutants of locks, in every package that has a part of them."""

from tests.mutants.mutant import Mutant

CONTRACT = ("tests/contract/test_fences.py", "-k", "TestMemory and lock")
REDIS = ("tests/contract/test_fences.py", "-k", "TestRedis and valkey and lock")
SQLITE = ("tests/contract/test_fences.py", "-k", "TestSqlite and lock")
BLOCK = ("tests/engine/test_fence_lock.py", "-k", "embedded or epoch or sense")

MUTANTS = [
    Mutant(
        "a lock is released by a stranger",
        "ragfence/core/decisions.py",
        "record.state is LOCKED and record.token == lease.token else None",
        "record.state is LOCKED else None",
        CONTRACT,
    ),
    Mutant(
        "Redis: a lock is released by a stranger",
        "ragfence/stores/redis/lua/lease.lua",
        "(lease.mode == LOCK and LOCKED or HELD) or record.token ~= lease.token then",
        "(lease.mode == LOCK and LOCKED or HELD) or (lease.mode ~= LOCK and record.token ~= lease.token) then",
        REDIS,
    ),
    Mutant(
        "a lock counts attempts",
        "ragfence/core/decisions.py",
        '    return _Grant(1, now_ms, True, None, "")\n\n\ndef _decide_keyed',
        "    return _next_attempt(known, claim, takeover=True, prior=None)\n\n\ndef _decide_keyed",
        CONTRACT,
    ),
    Mutant(
        "Redis: a lock counts attempts",
        "ragfence/stores/redis/lua/claim_rules.lua",
        "  return { code = 'G', attempt = 1, first_seen = now_ms, takeover = true, error = '' }",
        "  return next_attempt(known, claim, true, nil)",
        REDIS,
    ),
    Mutant(
        "the counter restarts after the release of a lock",
        "ragfence/testing/memory.py",
        "        self._content.records.pop(key, None)\n",
        "        self._content.records.pop(key, None)\n        self._content.counters.clear()\n",
        CONTRACT,
    ),
    Mutant(
        "Redis: the counter restarts after the release of a lock",
        "ragfence/stores/redis/lua/lease.lua",
        "  redis.call('DEL', lease.record_key)\n  redis.call('ZREM', lease.prefix .. 'p', lease.digest)\n  return 1",
        "  redis.call('DEL', lease.record_key, lease.prefix .. 'n')\n"
        "  redis.call('ZREM', lease.prefix .. 'p', lease.digest)\n  return 1",
        REDIS,
    ),
    Mutant(
        "a released lock leaves its record",
        "ragfence/core/decisions.py",
        "    if lease.mode is LOCK:\n        return record, Change(drop_record=True)\n",
        "    if lease.mode is LOCK:\n        return record, Change(record=record._replace(when_ms=now_ms))\n",
        CONTRACT,
    ),
    Mutant(
        "Redis: a released lock is still counted",
        "ragfence/stores/redis/lua/lease.lua",
        "  redis.call('ZREM', lease.prefix .. 'p', lease.digest)\n  return 1",
        "  redis.call('ZADD', lease.prefix .. 'p', score(lease.now_ms, 0), lease.digest)\n  return 1",
        ("tests/contract/test_lua_agrees.py",),
    ),
    Mutant(
        "a held lock is granted",
        "ragfence/core/decisions.py",
        "    if known.held_at(now_ms):\n        return InFlightVerdict(known.when_ms, known)\n"
        "    return _Grant(1, now_ms, True",
        "    return _Grant(1, now_ms, True",
        CONTRACT,
    ),
    Mutant(
        "a lock is sealed",
        "ragfence/core/decisions.py",
        "    if seal.mode is LOCK:\n        return Fenced(held.record), None\n",
        "    if seal.mode is LOCK:\n        return _seal_keyed(held.record, seal._replace(mode=KEYED), now_ms)\n",
        CONTRACT,
    ),
    Mutant(
        "an operation takes the key of a lock",
        "ragfence/core/decisions.py",
        "    if known and known.state is LOCKED:\n        return ConflictVerdict(known)\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "a lock takes the key of an operation",
        "ragfence/core/decisions.py",
        "    if known.state is not LOCKED:\n        return ConflictVerdict(known)\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "SQLite: a lock is not pending",
        "ragfence/stores/sqlite.py",
        "return State.HELD if record.state is State.LOCKED else record.state",
        "return record.state",
        SQLITE,
    ),
    Mutant(
        "a lock that was lost is not reported at the end of its block",
        "ragfence/engine/lock.py",
        "        if not self._leave(error) and error is None:",
        "        if not self._leave(error) and error is None and False:",
        BLOCK,
    ),
    Mutant(
        "a lock is renewed past the timeout of its function",
        "ragfence/engine/lock.py",
        "        runtime_ms = round((until_s - ttl_s) * 1000)",
        "        runtime_ms = round(timeout_s * 1_000_000)",
        BLOCK,
    ),
    Mutant(
        "a lock outlives its function",
        "ragfence/engine/lock.py",
        "        if ttl_s > until_s:",
        "        if ttl_s > 2 * timeout_s:",
        BLOCK,
    ),
]
