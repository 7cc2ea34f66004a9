"""Lua and `core/decisions.py` are the same protocol: any sequence of calls gives equal answers, records and rows."""

from __future__ import annotations

import os

import redis
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from ragfence.core.decisions import Claim, LeaseRef, Mode, Seal
from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.operations import FenceNumber
from ragfence.stores.fences import Lookup
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.clock import VirtualClock
from ragfence.testing.memory import MemoryFences

CLOCK_KEY = "test-clock"
KEYS = [bytes((7,)) + bytes((i,)) * 32 for i in range(3)]
TOKENS = [bytes((i,)) * TOKEN_BYTES for i in range(1, 5)]
FINGERPRINTS = [b"p" * 16, b"q" * 16]
SEQUENCES = [None, -(2**63), -1, 3, 4, 5, 2**53, 2**53 + 1, 2**63 - 1]
HASHES = [b"m" * 16, b"n" * 16]

modes = st.sampled_from(list(Mode))
claims = st.fixed_dictionaries(
    {
        "key": st.sampled_from(KEYS),
        "fingerprint": st.sampled_from(FINGERPRINTS),
        "token": st.sampled_from(TOKENS),
        "sequence": st.sampled_from(SEQUENCES),
        "metadata_hash": st.sampled_from(HASHES),
        "retract": st.booleans(),
        "max_attempts": st.integers(1, 3),
        "payload": st.sampled_from([b"", b'{"a":1}']),
        "owner": st.sampled_from(["", "host:1"]),
        "kind": st.sampled_from(["ticket", "é"]),
        "waited_ms": st.integers(0, 10),
        "row_on_conflict": st.booleans(),
    }
)
seals = st.fixed_dictionaries(
    {
        "key": st.sampled_from(KEYS),
        "token": st.sampled_from(TOKENS),
        "sequence": st.sampled_from(SEQUENCES),
        "metadata_hash": st.sampled_from(HASHES),
        "failed": st.booleans(),
        "live": st.booleans(),
        "duplicate": st.booleans(),
        "effect_id": st.sampled_from(["", "ef_1"]),
        "result": st.sampled_from([b"", b"j{}", b"x" * 300]),
        "error": st.sampled_from(["", "E.1"]),
        "flags": st.sampled_from([0, 2]),
        "ttl_ms": st.sampled_from([0, 3_600_000]),
    }
)
steps = st.one_of(
    st.tuples(st.just("claim"), claims),
    st.tuples(st.just("seal"), seals, st.booleans()),
    st.tuples(st.just("renew"), st.sampled_from(KEYS), st.sampled_from(TOKENS)),
    st.tuples(
        st.just("release"),
        st.sampled_from(KEYS),
        st.sampled_from(TOKENS),
        *(st.booleans(), st.booleans(), st.booleans()),
    ),
    st.tuples(st.just("reset_attempts"), st.sampled_from(KEYS), st.sampled_from(TOKENS)),
    st.tuples(st.just("pass"), st.sampled_from([1, 29_999, 30_000])),
    st.tuples(st.just("epoch"), st.booleans()),
    st.tuples(st.just("batch"), st.lists(claims, min_size=2, max_size=4)),
)


@settings(
    max_examples=int(os.environ.get("RAGFENCE_EXAMPLES", "600")) // 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    mode=modes,
    solo=st.booleans(),
    script=st.lists(steps, max_size=25),
    locks=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_lua_decides_as_python_does(any_redis, mode, solo, script, locks):
    """Equal answers, equal bytes under every key, equal rows, whatever the sequence of calls."""
    with redis.Redis.from_url(any_redis.url) as server:
        server.flushall()
        clock = VirtualClock(on_change=lambda now: server.set(CLOCK_KEY, now))
        theirs = RedisFences(any_redis.url, solo=solo, test_clock=CLOCK_KEY)
        ours = MemoryFences(solo=solo, clock=clock)
        source = b"s" * 20
        epoch = 1

        def both(call):
            note(f"{call}")
            answers = [call(store) for store in (ours, theirs)]
            assert answers[0] == answers[1]
            return answers[0]

        def new_epoch():
            for store in (ours, theirs):
                assert store.begin_epoch(epoch)
                assert store.finish_epoch(epoch)

        if not solo:
            new_epoch()
        for position, step in enumerate(script, start=1):
            # Locks and plain operations have keys of their own, but must not harm each other on a shared one.
            own = Mode.LOCK if mode is Mode.KEYED and locks[position % len(locks)] else mode
            where = {"mode": own, "source": source if own in (Mode.SEQUENCED, Mode.DOCUMENT) else b""}
            ttls = {"pending_ttl_ms": 9_000_000, "source_ttl_ms": 9_000_000}
            match step:
                case ("claim", fields):
                    claim = Claim(**fields, **where, **ttls, position=position, context=b'{"kind":"t"}')
                    both(lambda store, claim=claim: store.claim([claim]))
                case ("batch", many):
                    batch = [
                        Claim(**fields, **where, **ttls, position=position + 100 + at, context=b"{}")
                        for at, fields in enumerate(many)
                    ]
                    both(lambda store, batch=batch: store.claim(batch))
                case ("seal", fields, current):
                    marker = ours.markers()[7]
                    fence = FenceNumber(marker.epoch if marker and current else 99, 1)
                    seal = Seal(**fields, **where, fence=fence, source_ttl_ms=9_000_000, context=b"{}")
                    both(lambda store, seal=seal: store.seal([seal]))
                case ("renew", key, token):
                    marker = ours.markers()[7]
                    lease = LeaseRef(key=key, token=token, **where, **ttls, epoch=marker.epoch if marker else 0)
                    both(lambda store, lease=lease: store.renew([lease]))
                case ("release", key, token, expire, refund, withdraw):
                    lease = LeaseRef(key=key, token=token, **where, **ttls, context=b"{}")
                    how = {"expire": expire, "refund": refund, "withdraw": withdraw}
                    both(lambda store, lease=lease, how=how: store.release([lease], "E.2", **how))
                case ("reset_attempts", key, token):
                    lease = LeaseRef(key=key, token=token, **where, **ttls)
                    both(lambda store, lease=lease: store.reset_attempts([lease]))
                case ("pass", ms):
                    clock.advance(ms)
                case ("epoch", _) if not solo:
                    epoch += 1
                    new_epoch()
            lookups = [Lookup(key, mode, source) for key in KEYS]
            both(lambda store, lookups=lookups: store.read(lookups))
        for store in (ours, theirs):
            assert [row for row in store.rows() if row.key[0] != 7] == []
        by_id = [{row.row_id: row for row in reversed(list(store.rows()))} for store in (ours, theirs)]
        assert by_id[0] == by_id[1]
        assert ours.tallies() == theirs.tallies()
        counted = [store.stats() for store in (ours, theirs)]
        assert counted[0].documents == counted[1].documents
        assert counted[0].records == counted[1].records
        pending = [{each.key: each.record for each in each.pending.seen} for each in counted]
        assert (counted[0].pending.count, pending[0]) == (counted[1].pending.count, pending[1])
        theirs.close()
