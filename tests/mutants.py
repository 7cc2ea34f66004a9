"""Deliberately broken variants of ragfence: the suite must catch every one.

Each mutant changes one rule of the protocol in a copy of the package and runs the tests that should notice. A mutant
that survives is a rule nobody tests. `python -m tests.mutants [word ...]` runs those whose name holds a word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

DECISIONS = "ragfence/core/decisions.py"
SETTLING = "ragfence/stores/settling.py"
SEGMENTS = "ragfence/engine/segments.py"
EARLIER = "ragfence/engine/earlier.py"
LEASES = "ragfence/engine/leases.py"
S3 = "ragfence/stores/objects_s3.py"
LOCAL = "ragfence/stores/objects_local.py"
REDIS = "ragfence/stores/fences_redis.py"
LINK = "ragfence/stores/redis_link.py"
REPLAYS = "ragfence/stores/redis_replays.py"
BATCHES = "ragfence/documents/batches.py"
SAFETY = "ragfence/stores/redis_safety.py"
SCRIPTS = "ragfence/stores/redis_scripts.py"
EXPIRY = "ragfence/engine/expiry.py"
SEGMENT_LOG = "ragfence/engine/segment_log.py"
GUARD = "ragfence/documents/guard.py"
MOVING = "ragfence/documents/moving.py"
PREPARING = "ragfence/documents/preparing.py"
READING = "ragfence/documents/reading.py"
PARQUET = "ragfence/documents/parquet.py"
FORESIGHT = "ragfence/documents/foresight.py"
IDENTITY = "ragfence/documents/identity.py"
CONTENT_HASH = "ragfence/documents/settings.py"
RECORDS = "ragfence/core/records.py"
ROWS_OF_SEALS = "ragfence/core/ledger.py"
PERFORMING = "ragfence/engine/performing.py"
LUA = "ragfence/stores/lua"

CONTRACT = ("tests/contract/test_fences.py", "-k", "TestMemory")
ON_REDIS = ("tests/contract/test_fences.py", "-k", "TestRedis and valkey")
STORIES = ("tests/machine/test_scenarios.py",)
DICE = ("tests/machine/test_machine.py", "-k", "memory")
FAILURES = ("tests/unit/test_failures.py",)
HEARTBEAT = ("tests/unit/test_leases.py",)
S3_FAULTS = ("tests/unit/test_objects_s3.py",)
FOLDER = ("tests/contract/test_objects.py", "tests/unit/test_objects_local.py", "-k", "ocal")
AS_RUN = ("tests/unit/test_redis_as_run.py", "-k", "failover or replicas")
EXPIRING = ("tests/unit/test_expiry.py", "tests/unit/test_expiry_races.py")
REDIS_TIME = ("tests/unit/test_redis_time.py",)
HEADS = ("tests/documents/attack/test_heads.py", "-k", "not valkey")
HEADS_ON_REDIS = ("tests/documents/attack/test_heads.py", "-k", "valkey")
KNOWN_ON_REDIS = ("tests/documents/test_known_on_redis.py",)
IN_PARTS = ("tests/unit/test_fences_redis.py", "-k", "batch")


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "a pardon leaves the owner its token",
        DECISIONS,
        "            token=NOBODY,\n            when_ms=now_ms,\n            attempt=0,\n",
        "            when_ms=now_ms,\n            attempt=0,\n",
        CONTRACT,
    ),
    Mutant(
        "a late seal is told as performed twice whatever stands there",
        ROWS_OF_SEALS,
        "return standing is not None and standing.token != own and (solo or standing.ended)",
        "return standing is not None",
        CONTRACT,
    ),
    Mutant(
        "the row of a late seal has the id of the answer",
        ROWS_OF_SEALS,
        "position=FENCED_POSITION if fenced else SEAL_POSITION,",
        "position=SEAL_POSITION,",
        CONTRACT,
    ),
    Mutant(
        "a healer that could not seal keeps its lease",
        PERFORMING,
        "            self._unsealed(won, sealed, found.record(), RowKind.DUPLICATE, flags=HEALED)\n",
        "            pass\n",
        FAILURES,
    ),
    Mutant(
        "no token check at the seal",
        DECISIONS,
        "return record.state is State.HELD and record.token == token",
        "return record.state is State.HELD",
        CONTRACT,
    ),
    Mutant(
        "no token check at the seal, in Lua",
        f"{LUA}/seal_rules.lua",
        "return record.state == HELD and record.token == token end",
        "return record.state == HELD end",
        ON_REDIS,
    ),
    Mutant(
        "no token check at the seal, in Lua's short path",
        f"{LUA}/seal_cut.lua",
        "flags % 16 == 1 and sub(data, 19, 30) == sub(seal, 3, 14)",
        "flags % 16 == 1",
        ON_REDIS,
    ),
    Mutant(
        "no epoch check at the seal, in Lua's short path",
        f"{LUA}/seal.lua",
        "elseif mode ~= SEQUENCED and sub(seal, 47, 53) == epoch_bytes then",
        "elseif mode ~= SEQUENCED then",
        ON_REDIS,
    ),
    Mutant(
        "fingerprint ignored, in Lua's short path",
        f"{LUA}/claim_cut.lua",
        "(state == 4 or state == 5) and sub(data, 3, 18) == sub(claim, 52, 67)",
        "(state == 4 or state == 5)",
        ON_REDIS,
    ),
    Mutant(
        "run_id not compared for a single first claim, in Lua",
        f"{LUA}/claim_alone.lua",
        "elseif sub(marker, -40) == run_id() then",
        "else",
        ON_REDIS,
    ),
    Mutant(
        "no epoch check at a single seal, in Lua",
        f"{LUA}/seal_alone.lua",
        "owned(data, seal) and\n    struct.pack('>I7', tonumber(sub(marker, 3, -42))) == sub(seal, 47, 53) then",
        "owned(data, seal) then",
        ON_REDIS,
    ),
    Mutant(
        "a batch that is read ahead counts nothing, in Lua",
        f"{LUA}/claim.lua",
        "redis.call('INCRBY', counter_key, grants)",
        "redis.call('INCRBY', counter_key, 0) + grants",
        ON_REDIS,
    ),
    Mutant(
        "the replays of a batch are answered by any server",
        REPLAYS,
        "if data is not None and epochs[shard] is not None:",
        "if data is not None:",
        ON_REDIS,
    ),
    Mutant(
        "too few confirmations are enough",
        SAFETY,
        'return f"{self.replicas - replicas} of {self.replicas} replicas" if replicas < self.replicas else ""',
        'return ""',
        AS_RUN,
    ),
    Mutant(
        "after a failover the old server is asked",
        LINK,
        "        self._drop(line.connection)\n",
        "        line.connection.disconnect()\n        self._free.append(line)\n",
        AS_RUN,
    ),
    Mutant(
        "expired commits are deleted without a claim",
        EXPIRY,
        "        if not isinstance(granted, Granted):\n            return 0\n",
        "        if not isinstance(granted, Granted):\n            return self._drop(aged)\n",
        EXPIRING,
    ),
    Mutant(
        "lease per key instead of per source",
        DECISIONS,
        "        if lease.record.held_at(now_ms):\n            return InFlight",
        "        if lease.record.held_at(now_ms) and lease.digest == claim.digest:\n            return InFlight",
        CONTRACT,
    ),
    Mutant(
        "leases run out by the client's clock",
        SCRIPTS,
        "local t = redis.call('TIME') return t[1] * 1000 + math.floor(t[2] / 1000) end\"",
        'return %d end" % (__import__("time").time_ns() // 1_000_000)',
        REDIS_TIME,
    ),
    Mutant(
        "run_id not compared",
        SETTLING,
        "return marker[1] if marker and marker[0] and marker[2] == shelf.run_id else None",
        "return marker[1] if marker and marker[0] else None",
        CONTRACT,
    ),
    Mutant(
        "run_id not compared, in Lua",
        f"{LUA}/base.lua",
        "byte(text) == 82 and sub(text, -40) == run then",
        "byte(text) == 82 then",
        ON_REDIS,
    ),
    Mutant(
        "run_id not compared while hydrating",
        SETTLING,
        "return shelf.get_marker(shard) == (False, epoch, shelf.run_id)",
        "return (shelf.get_marker(shard) or ())[:2] == (False, epoch)",
        CONTRACT,
    ),
    Mutant(
        "hydration writes unguarded",
        SETTLING,
        "        if not hydrating(shelf, shard, epoch):\n            return False\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "hydration writes unguarded, in Lua",
        f"{LUA}/epoch.lua",
        "  if not hydrating(KEYS[1]) then return 0 end\n",
        "",
        ON_REDIS,
    ),
    Mutant(
        "no epoch check after the commit",
        SEGMENTS,
        "superseded = self._epochs.newer_than(epoch)",
        "superseded = False",
        STORIES,
    ),
    Mutant(
        "own segment not looked for",
        SEGMENTS,
        "return bool(self.segments) and self.move.claim.sequence is None",
        "return False",
        STORIES,
    ),
    Mutant(
        "an epoch completed since the question is not asked about",
        SEGMENTS,
        "case Granted(record) if wanted[at].open_question and record.fence.epoch != asked:",
        "case Granted(record) if False:",
        STORIES,
    ),
    Mutant("commit sent, but released as if not", SEGMENTS, "expire=sent)", "expire=False)", STORIES),
    Mutant(
        "unsettled sources answered from the head",
        DECISIONS,
        "unsettled = lease is not None and lease.may_hide_a_commit",
        "unsettled = False",
        STORIES,
    ),
    Mutant(
        "fence counter restarted after a flush",
        SETTLING,
        "return Fence(epoch, shelf.next_counter(shard))",
        "return Fence(1, shelf.next_counter(shard))",
        DICE,
    ),
    Mutant("seal does not compare the epoch", DECISIONS, "if seal.fence.epoch != epoch:", "if False:", CONTRACT),
    Mutant(
        "records of an older epoch still count",
        SETTLING,
        "if source and stamp is not None and source.stamp != stamp:",
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "412 taken as theirs",
        S3,
        "return Put(won=True) if theirs == nonce else Put(won=False, existing=existing)",
        "return Put(won=False, existing=existing)",
        S3_FAULTS,
    ),
    Mutant(
        "404 at the read-back taken as lost",
        S3,
        "            if found is not None:\n                existing, theirs = found",
        '            found = found or (b"", None)\n'
        "            if found is not None:\n                existing, theirs = found",
        S3_FAULTS,
    ),
    Mutant(
        "409 taken as exists",
        S3,
        "                cause = error\n                if self._given is None and never_sent(error):",
        "                cause = error\n                if '409' in brief(error):\n"
        "                    return Put(won=False, existing=b'')\n"
        "                if self._given is None and never_sent(error):",
        S3_FAULTS,
    ),
    Mutant(
        "the local folder overwrites",
        LOCAL,
        "os.link(temp, target)",
        "shutil.copy(temp, target)",
        FOLDER,
    ),
    Mutant(
        "fingerprint ignored",
        DECISIONS,
        "if (known and known.fingerprint != claim.fingerprint) or (mine and mine.fingerprint != claim.fingerprint):",
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "pending record expires with its lease",
        SETTLING,
        "write(shelf, claim, change, epoch, claim.pending_ttl_ms, claim.source_ttl_ms)",
        "write(shelf, claim, change, epoch, claim.lease_ms, claim.lease_ms)",
        CONTRACT,
    ),
    Mutant(
        "a stale owner's release counts",
        DECISIONS,
        "return record if record and _holds(record, lease.token) else None",
        "return record",
        CONTRACT,
    ),
    Mutant(
        "heartbeat never renews",
        LEASES,
        "kept = iter(store.renew(list(chain.from_iterable(refs))))",
        "kept = iter([True for _ in chain.from_iterable(refs)])",
        HEARTBEAT,
    ),
    Mutant(
        "stale decided after duplicate",
        DECISIONS,
        "    if _older(claim.sequence, head):\n",
        "    if _older(claim.sequence, head) and not (held.record and held.record.ended):\n",
        CONTRACT,
    ),
    Mutant(
        "a replay with a higher sequence does not move the head",
        DECISIONS,
        "return head is None or head.sequence is None or sequence > head.sequence",
        "return False",
        CONTRACT,
    ),
    Mutant(
        "a lost reply is answered with in flight",
        DECISIONS,
        "if known.state is State.HELD and known.token == claim.token:",
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "a seal creates an absent record",
        DECISIONS,
        "        return Fenced(None), None\n    if record.ended:",
        "        made = KeyRecord(State.SEALED, bytes(16), seal.token, seal.fence, 1, now_ms, now_ms)\n"
        "        return Sealed(made), Change(record=made)\n    if record.ended:",
        CONTRACT,
    ),
    Mutant(
        "sequences compared as floating point, in Lua",
        f"{LUA}/records.lua",
        "  if al ~= bl then return al < bl and -1 or 1 end\n  return 0\n",
        "  local a2, b2 = ah * 4294967296 + al, bh * 4294967296 + bl\n"
        "  if a2 ~= b2 then return a2 < b2 and -1 or 1 end\n  return 0\n",
        ON_REDIS,
    ),
    Mutant(
        "a commit of a dead owner is not looked for",
        EARLIER,
        "        if request.mode is Mode.KEYED:\n            found = self._commits.find(request.operation)",
        "        if request.mode is Mode.KEYED:\n            found = None",
        FAILURES,
    ),
    Mutant(
        "snippets written after the rows",
        SEGMENTS,
        "                self._neighbours.before_commit(name, rows)\n"
        "                data = encoded()\n"
        "            sent = True\n"
        "            if not self._objects.put_new(name, data).won:\n",
        "                data = encoded()\n"
        "            sent = True\n"
        "            put = self._objects.put_new(name, data)\n"
        "            self._neighbours.before_commit(name, rows)\n"
        "            if not put.won:\n",
        HEADS,
    ),
    Mutant(
        "dead ids not computed",
        MOVING,
        '_without(replaced.ids, ids) if replaced else b""',
        'b""',
        HEADS,
    ),
    Mutant(
        "dead ids not computed by a retraction",
        MOVING,
        'dead=replaced.ids if replaced else b"",',
        'dead=b"",',
        HEADS,
    ),
    Mutant(
        "unchanged snippets looked up in the revision itself",
        READING,
        "made, address = self._followed(made, doc_id)",
        "made, _ = self._followed(made, doc_id)",
        HEADS,
    ),
    Mutant(
        "a row does not name the head that it replaced",
        MOVING,
        '            replaced.row.text if replaced else "",\n            fresh,\n',
        '            "",\n            fresh,\n',
        HEADS,
    ),
    Mutant(
        "unchanged snippets written again",
        MOVING,
        "fresh = [each for each in fresh if each[0] not in known]",
        "fresh = list(fresh)",
        HEADS,
    ),
    Mutant(
        "positions found by the snippets, not by the key",
        READING,
        "if row.detail.action == INGEST and row.key == key:",
        "if row.detail.action == INGEST:",
        HEADS,
    ),
    Mutant(
        "metadata and revive rows without origin",
        MOVING,
        "origin=origin.text))",
        'origin=""))',
        HEADS,
    ),
    Mutant(
        "result without origin after a revive",
        MOVING,
        "return Effected(result_of(ids, origin), ",
        "return Effected(result_of(ids), ",
        HEADS,
    ),
    Mutant(
        "effective sequence not stored",
        SEGMENTS,
        "            seal.sequence if seal.sequence is not None else kept,\n",
        "            seal.sequence,\n",
        HEADS,
    ),
    Mutant(
        "the token of hydrated rows lost",
        PARQUET,
        'metadata_hash, "", result, token, None, KIND, at_ms',
        'metadata_hash, "", result, bytes(12), None, KIND, at_ms',
        HEADS,
    ),
    Mutant(
        "hydration takes the row listed last, not that with the highest fence",
        SEGMENT_LOG,
        "heads[at] = max(known, (fence, head))",
        "heads[at] = (fence, head)",
        HEADS,
    ),
    Mutant(
        "receipts of superseded revisions not hydrated",
        SEGMENT_LOG,
        "receipts[key] = max(older, receipts.get(key, older))",
        "pass",
        HEADS,
    ),
    Mutant(
        "hydration brings the retracted back",
        PARQUET,
        "sealed_head(digest, live, sequence,",
        "sealed_head(digest, True, sequence,",
        HEADS,
    ),
    Mutant(
        "waves not separated",
        PREPARING,
        "wave = seen[place] = seen.get(place, -1) + 1",
        "wave = seen[place] = 0",
        HEADS,
    ),
    Mutant(
        "a replay in a batch overtakes an earlier move of its document",
        SETTLING,
        "            unclear.add(ask.source)\n",
        "",
        HEADS,
    ),
    Mutant(
        "a replay in a batch overtakes an earlier move of its document, on Redis",
        REPLAYS,
        "                unclear.add(source)\n",
        "",
        HEADS_ON_REDIS,
    ),
    Mutant(
        "known documents are answered before their rows are written",
        BATCHES,
        "            known.settle()\n",
        "",
        KNOWN_ON_REDIS,
    ),
    Mutant(
        "a line is given back while replies are on their way",
        LINK,
        "                if not self._waiting:\n",
        "                if True:\n",
        IN_PARTS,
    ),
    Mutant(
        "dry_run claims",
        FORESIGHT,
        "        held = self._fences.read(",
        "        self._fences.claim(claims)\n        held = self._fences.read(",
        HEADS,
    ),
    Mutant(
        "documents do not look for newer epochs",
        GUARD,
        "        self._backing.watch.start()\n        engine = self._engine\n",
        "        engine = self._engine\n",
        HEADS,
    ),
    Mutant("content hash not pinned", CONTENT_HASH, "if fixed != wanted:", "if False:", HEADS),
    Mutant(
        "the recipe is no part of the key",
        PREPARING,
        "return cls(chunker, recipe, name, key_tail(name))",
        'return cls(chunker, recipe, name, key_tail(""))',
        HEADS,
    ),
    Mutant(
        "equal snippets of a document share an id",
        IDENTITY,
        "number = seen[text] = seen.get(text, -1) + 1",
        "number = seen[text] = 0",
        HEADS,
    ),
    Mutant(
        "the description is no part of the corpus digest",
        SETTLING,
        "yield each, source + head.digest + head.metadata_hash",
        "yield each, source + head.digest",
        HEADS,
    ),
    Mutant(
        "Redis: the description is no part of the corpus digest",
        RECORDS,
        "return data[10:42] + data[50:66]",
        "return data[10:42]",
        ON_REDIS,
    ),
]


def main(words: list[str]) -> int:
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    console = Console()
    table = Table("mutant", "caught by", "verdict", title="deliberately broken variants")
    caught = 0
    for tests in dict.fromkeys(mutant.tests for mutant in wanted):
        verdict = run(Mutant("nothing", DECISIONS, "", "", tests))
        if verdict != "SURVIVED":
            console.print(f"without any mutant, {' '.join(tests)} must pass, but: {verdict}")
            return 2
    for mutant in wanted:
        verdict = run(mutant)
        caught += verdict == "caught"
        console.print(f"{verdict:>9}  {mutant.name}", highlight=False)
        table.add_row(mutant.name, " ".join(mutant.tests), verdict)
    console.print(table)
    console.print(f"{caught} of {len(wanted)}")
    return 0 if caught == len(wanted) else 1


def run(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory(prefix="ragfence-mutant-") as folder:
        for part in ("ragfence", "tests", "pipelines"):
            shutil.copytree(ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        file = Path(folder) / mutant.file
        source = file.read_text()
        if mutant.old and source.count(mutant.old) != 1:
            return f"not applied: {source.count(mutant.old)} places hold the text"
        if mutant.old:
            file.write_text(source.replace(mutant.old, mutant.new))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *mutant.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        # 1 is "tests failed"; anything else would be a mutant that does not even run.
        if done.returncode == 1 and "error during collection" not in done.stdout:
            return "caught"
        return "SURVIVED" if done.returncode == 0 else f"broken (exit {done.returncode}): {done.stdout[-300:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
