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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

DECISIONS = "ragfence/core/decisions.py"
SETTLING = "ragfence/stores/transactional.py"
SEGMENTS = "ragfence/engine/batch_commit.py"
EARLIER = "ragfence/engine/commits.py"
LEASES = "ragfence/engine/leases.py"
S3 = "ragfence/stores/s3.py"
LOCAL = "ragfence/stores/local.py"
REDIS = "ragfence/stores/redis/store.py"
LINK = "ragfence/stores/redis/connection.py"
REPLAYS = "ragfence/stores/redis/bulk.py"
BATCHES = "ragfence/documents/ingest.py"
SAFETY = "ragfence/stores/redis/requirements.py"
SCRIPTS = "ragfence/stores/redis/scripts.py"
EXPIRY = "ragfence/engine/expiry.py"
SEGMENT_LOG = "ragfence/engine/segment_log.py"
GUARD = "ragfence/documents/documents.py"
MOVING = "ragfence/documents/head_moves.py"
ORIGINS = "ragfence/documents/origins.py"
SYNC = "ragfence/documents/sync/sync.py"
PRUNE_PLAN = "ragfence/documents/sync/prune_plan.py"
PREPARING = "ragfence/documents/claims.py"
READING = "ragfence/documents/reads.py"
PARQUET = "ragfence/documents/parquet.py"
FORESIGHT = "ragfence/documents/dry_run.py"
IDENTITY = "ragfence/documents/identity.py"
CONTENT_HASH = "ragfence/engine/content_hash.py"
HASHING = "ragfence/core/hashing.py"
SETTINGS = "ragfence/core/settings.py"
FILE_MODES = "ragfence/stores/file_modes.py"
YAML_FILES = "ragfence/core/yaml_files.py"
RECORDS = "ragfence/core/records.py"
ROWS_OF_SEALS = "ragfence/core/decision_rows.py"
PERFORMING = "ragfence/engine/runner.py"
LUA = "ragfence/stores/redis/lua"
COLLECTING = "ragfence/indexes/gc.py"
LANCE = "ragfence/indexes/backends/lance.py"
VERIFYING = "ragfence/indexes/verification.py"
GATES = "ragfence/indexes/gates.py"
SPEC = "ragfence/indexes/spec.py"
HYDRATION = "ragfence/engine/hydration.py"
REPAIRING = "ragfence/documents/repair.py"
SEARCHING = "ragfence/indexes/search.py"
SCOPES = "ragfence/server/scopes.py"
SECRET_PATTERNS = "ragfence/core/secret_patterns.py"
API_INDEXES = "ragfence/server/routes/indexes.py"
GATE = "ragfence/server/auth.py"
GROUPING = "ragfence/server/group_commit.py"
API_READING = "ragfence/server/http_claims.py"
APIKEYS = "ragfence/server/apikeys.py"
TOMBSTONES = "ragfence/audit/tombstones.py"
MESSAGES = "ragfence/wire/messages.py"
SHARES = "ragfence/server/fair_shares.py"
SHEDDING = "ragfence/server/load_shedding.py"
ASKING = "ragfence/server/dependencies.py"
COMPOSED = "ragfence/core/normalization.py"
REGULAR_FILES = "ragfence/documents/sources/regular_files.py"
IGNORING = "ragfence/documents/sources/ignore_rules.py"
VECTORS = "ragfence/indexes/vectors.py"
DELIVERING = "ragfence/documents/sinks/delivery.py"
SINK_VECTORS = "ragfence/indexes/sink_vectors.py"

CONTRACT = ("tests/contract/test_fences.py", "-k", "TestMemory")
ON_REDIS = ("tests/contract/test_fences.py", "-k", "TestRedis and valkey")
STORIES = ("tests/machine/test_scenarios.py",)
DICE = ("tests/machine/test_machine.py", "-k", "memory")
MODES = ("tests/privacy/test_file_modes.py",)
WORDS = ("tests/cli/test_words.py",)
BOUNDED = ("tests/core/test_settings.py",)
FAILURES = ("tests/engine/test_failures.py",)
SECRETS = ("tests/documents/test_content_secret.py",)
KEYED = ("tests/privacy/test_keyed.py", "-k", "who_guesses and False-embedded")
BURIED = ("tests/privacy/test_purged.py", "-k", "embedded")
SCOPED = ("tests/server/test_scopes.py",)
KEY_LOG = ("tests/server/test_key_log.py",)
THROTTLED = ("tests/server/test_throttle.py",)
KEYS_OF_THE_API = ("tests/server/test_apikeys.py",)
HEARTBEAT = ("tests/engine/test_leases.py",)
S3_FAULTS = ("tests/stores/test_s3.py",)
FOLDER = ("tests/contract/test_objects.py", "tests/stores/test_local.py", "-k", "ocal")
AS_RUN = ("tests/stores/test_redis_as_run.py", "-k", "failover or replicas")
EXPIRING = ("tests/engine/test_expiry.py", "tests/engine/test_expiry_races.py")
REDIS_TIME = ("tests/stores/test_redis_time.py",)
HEADS = ("tests/documents/attack/test_heads.py", "-k", "not valkey")
HEADS_ON_REDIS = ("tests/documents/attack/test_heads.py", "-k", "valkey")
KNOWN_ON_REDIS = ("tests/documents/test_known_on_redis.py",)
OVER_HTTP = ("tests/server/test_http.py",)
FAIRNESS = ("tests/server/test_fairness.py",)
NOTES = ("tests/engine/test_notes.py",)
OUTAGES = ("tests/engine/test_outages.py", "tests/documents/test_outages.py", "-k", "not valkey")
SHARED_VECTORS = ("tests/indexes/test_sink_vectors.py", "-k", "memory")
IN_PARTS = ("tests/stores/test_redis_store.py", "-k", "batch")


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


COUNTED = ("tests/contract/test_fences.py", "-k", "TestMemory and (count or estimated)")
COUNTED_ON_REDIS = (
    "tests/contract/test_fences.py",
    "-k",
    "TestRedis and valkey and (counted or counts) and not full_scan",
)

MUTANTS = [
    Mutant(
        "the terminal is told what Python is told",
        "ragfence/cli/output.py",
        """hint = hint_on("cli", error.hint)""",
        """hint = error.hint""",
        WORDS,
    ),
    Mutant(
        "a caller over HTTP is told what Python is told",
        "ragfence/wire/problems.py",
        """hint=hint_on("http", error.hint)""",
        """hint=error.hint""",
        WORDS,
    ),
    Mutant("files follow the umask", FILE_MODES, "file: int = 0o600", "file: int = 0o666", MODES),
    Mutant("folders follow the umask", FILE_MODES, "folder: int = 0o700", "folder: int = 0o777", MODES),
    Mutant(
        "a folder that everybody may write to is a team's", FILE_MODES, " & (_TEAM | stat.S_IWOTH)", " & _TEAM", MODES
    ),
    Mutant("a team's folder needs no setgid", FILE_MODES, "_TEAM = stat.S_ISGID | ", "_TEAM = ", MODES),
    Mutant("the umask takes from a team what it needs", FILE_MODES, "os.fchmod(descriptor, modes.file)", "pass", MODES),
    Mutant(
        "SQLite makes its file itself",
        "ragfence/stores/sqlite_connections.py",
        "            make_empty_file(self._path)",
        "            pass",
        MODES,
    ),
    Mutant(
        "the tables of LanceDB are open to everybody",
        LANCE,
        "            if not self._is_remote:\n                make_folders",
        "            if False:\n                make_folders",
        MODES,
    ),
    Mutant(
        "an alias counts as one value",
        YAML_FILES,
        "self._count(self._sizes.get(anchor, 0), event)",
        "self._count(1, event)",
        BOUNDED,
    ),
    Mutant("an anchor may contain itself", YAML_FILES, "anchor not in self._sizes", "False", BOUNDED),
    Mutant("a policy is as deep as it likes", YAML_FILES, "if self._depth > MAX_DEPTH:", "if False:", BOUNDED),
    Mutant(
        "a number is as long as it likes",
        YAML_FILES,
        "len(node.value) > MAX_NUMBER_CHARS",
        "False",
        BOUNDED,
    ),
    Mutant(
        "a policy that is no regular file is the default policy",
        SETTINGS,
        "not os.path.lexists(POLICY_FILE)",
        "not Path(POLICY_FILE).is_file()",
        BOUNDED,
    ),
    Mutant(
        "one address may have all connections",
        "ragfence/server/connections.py",
        "        while not self._places.take(address):\n",
        '        while not self._places.take(""):\n',
        ("tests/server/test_load_shedding.py", "-k", "connections"),
    ),
    Mutant(
        "the connection that has just become idle makes room",
        "ragfence/server/connections.py",
        "            self._evict(next(iter(idle)))\n",
        "            self._evict(next(reversed(idle)))\n",
        ("tests/server/test_load_shedding.py", "-k", "idle"),
    ),
    Mutant(
        "a connection in use is idle",
        "ragfence/server/connections.py",
        "            self._addresses.begin(self)\n",
        "",
        ("tests/server/test_load_shedding.py", "-k", "in_use"),
    ),
    Mutant(
        "bytes of unfinished heads are not counted",
        "ragfence/server/connections.py",
        "        return self._head_bytes + self.transport.get_write_buffer_size()\n",
        "        return self.transport.get_write_buffer_size()\n",
        ("tests/server/test_load_shedding.py", "-k", "unfinished_heads"),
    ),
    Mutant(
        "bytes of unread answers are not counted",
        "ragfence/server/connections.py",
        "        return self._head_bytes + self.transport.get_write_buffer_size()\n",
        "        return self._head_bytes\n",
        ("tests/server/test_load_shedding.py", "-k", "does_not_read_are"),
    ),
    Mutant(
        "the bytes of a batch do not count",
        "ragfence/server/ndjson_batch.py",
        "        unfinished.take(len(piece))\n",
        "",
        ("tests/server/test_fairness.py", "-k", "unfinished"),
    ),
    Mutant(
        "the bytes of a batch count for ever",
        "ragfence/server/ndjson_batch.py",
        "Spool(closed=unfinished.end)",
        "Spool()",
        ("tests/server/test_fairness.py", "-k", "unfinished"),
    ),
    Mutant(
        "without API keys, a website may send requests",
        "ragfence/server/edge.py",
        "    if any(origin != own for origin in origins):\n",
        "    if False:\n",
        (*OVER_HTTP, "-k", "another_website"),
    ),
    Mutant(
        "without API keys, any host name will do",
        "ragfence/server/edge.py",
        "    if named is None or not is_loopback(",
        "    if named is None and not is_loopback(",
        (*OVER_HTTP, "-k", "rebound"),
    ),
    Mutant(
        "an API key is sent over plain http to any host",
        "ragfence/client/session.py",
        '        if not _is_loopback(parts.hostname or ""):\n',
        "        if not parts.hostname:\n",
        ("tests/client/test_calls.py", "-k", "plain_http"),
    ),
    Mutant(
        "a client without an address asks nobody",
        "ragfence/client/session.py",
        'os.environ.get(URL, "") or LOCAL_URL if url is None',
        'os.environ.get(URL, "") if url is None',
        ("tests/client/test_local_server.py",),
    ),
    Mutant(
        "a fault inside ragfence is taken for a missing package",
        "ragfence/_extras.py",
        'if package in ("", "ragfence"):',
        'if package == "":',
        ("tests/package/test_extras.py", "-k", "fault_inside"),
    ),
    Mutant(
        "a path that is not UTF-8 is read leniently",
        "ragfence/server/edge.py",
        '        unquote_to_bytes(raw).decode("utf-8")\n',
        '        unquote_to_bytes(raw).decode("utf-8", "replace")\n',
        (*OVER_HTTP, "-k", "not_utf8"),
    ),
    Mutant(
        "a phone number with blanks of the web is none",
        "ragfence/core/secret_patterns.py",
        "    plain = text if text.isascii() else _ODD",
        "    plain = text if text else _ODD",
        ("tests/core/test_redaction.py", "-k", "without_a_width"),
    ),
    Mutant(
        "a date and a counter are a phone number",
        "ragfence/core/secret_patterns.py",
        "(?!{_A_DATE})",
        "",
        ("tests/core/test_redaction.py", "-k", "201511180001"),
    ),
    Mutant(
        "an international number without a plus stays",
        "ragfence/core/secret_patterns.py",
        '    rf"{WITHOUT_PLUS}"',
        '    r"(?!)"',
        ("tests/core/test_redaction.py", "-k", "447946095800"),
    ),
    Mutant(
        "a query that is not UTF-8 is read leniently",
        "ragfence/server/edge.py",
        '        if not _is_readable(scope.get("query_string")):\n',
        "        if False:\n",
        (*OVER_HTTP, "-k", "query_that_is_not_utf8"),
    ),
    Mutant(
        "a weak ETag satisfies If-Match",
        "ragfence/server/routes/documents.py",
        "frozenset(tag for weak, tag in tags if not weak)",
        "frozenset(tag for _, tag in tags)",
        (*OVER_HTTP, "-k", "fails_the_condition"),
    ),
    Mutant(
        "a list of ETags has to match as a whole",
        "ragfence/documents/claims.py",
        "current != NOTHING and current in expected",
        "expected == {current}",
        (*OVER_HTTP, "-k", "one_etag_of_a_list"),
    ),
    Mutant(
        "a StopIteration of a progress callback ends the generator around it",
        "ragfence/documents/progress.py",
        "        except StopIteration as stopped:\n",
        "        except GeneratorExit as stopped:\n",
        ("tests/documents/test_guard.py", "-k", "stops_iterating"),
    ),
    Mutant(
        "the threads of a build forget for whom it is made",
        "ragfence/indexes/build.py",
        "            api_key=acting_key.get(),\n",
        "",
        ("tests/server/test_key_log.py", "-k", "rows_of_a_build"),
    ),
    Mutant(
        "a folder of objects that is gone is ready",
        "ragfence/server/routes/health.py",
        "                self._objects.check_folder()\n",
        "                pass\n",
        ("tests/engine/test_outage_recovery.py", "-k", "folder_of_objects"),
    ),
    Mutant(
        "metrics are open through a proxy on the same machine",
        "ragfence/server/routes/health.py",
        "    if any(name in request.headers for name in FORWARDED):\n        return False\n",
        "",
        (*OVER_HTTP, "-k", "proxy"),
    ),
    Mutant(
        "a condition is not compared with that of the first request",
        MESSAGES,
        "        return {name: value for name, value in given.items() if value}\n",
        "        return {}\n",
        (*OVER_HTTP, "-k", "condition"),
    ),
    Mutant(
        "If-Match: * passes where there is no document",
        "ragfence/documents/claims.py",
        "current != NOTHING if expected == ANY else current == expected",
        "expected == ANY or current == expected",
        (*OVER_HTTP, "-k", "any_version"),
    ),
    Mutant(
        "Allow names the methods of one route only",
        SCOPES,
        "    found = {each.method for each in _PATTERNS if each.path.fullmatch(path) is not None}\n",
        "    found = {[each.method for each in _PATTERNS if each.path.fullmatch(path) is not None][0]}\n",
        (*OVER_HTTP, "-k", "methods_of_a_document"),
    ),
    Mutant(
        "redis-py's health check reads the replies of parts on their way",
        LINK,
        '(b"".join(packed),), check_health=False)',
        '(b"".join(packed),))',
        ("tests/stores/test_redis_replies.py", "-k", "health_check"),
    ),
    Mutant(
        "closing takes connections away from whoever reads from them",
        LINK,
        "        self._pool.disconnect(inuse_connections=False)\n",
        "        self._pool.disconnect()\n",
        ("tests/stores/test_closing.py", "-k", "awaited"),
    ),
    Mutant(
        "a connection that is given back to a closed store stays open",
        LINK,
        "            if self.closed:\n                self.tidy()\n\n    def drop",
        "\n    def drop",
        ("tests/stores/test_closing.py", "-k", "awaited"),
    ),
    Mutant(
        "a closed fence performs effects without a fence",
        "ragfence/engine/once.py",
        "isinstance(away, StoreClosed):\n                    raise\n                if committed := self",
        "False:\n                    raise\n                if committed := self",
        ("tests/stores/test_closing.py", "-k", "performs_nothing"),
    ),
    Mutant(
        "a reply of another shape is an answer",
        LINK,
        "    refuse_others(shapes, replies)\n",
        "",
        ("tests/stores/test_redis_replies.py", "-k", "asked_for_again"),
    ),
    Mutant(
        "a connection on which something is left to read is used again",
        LINK,
        "            return not self.connection.can_read()\n",
        "            return True\n",
        ("tests/stores/test_redis_replies.py", "-k", "comes_twice"),
    ),
    Mutant(
        "a document that is loaded twice counts twice",
        SETTLING,
        "live_in(item.head) - (counted and before is not None and _is_live(SourceRecord.decode(before)))",
        "live_in(item.head)",
        COUNTED,
    ),
    Mutant(
        "a hydration adds to the documents that were counted before",
        SETTLING,
        "        shelf.reset_documents(shard)\n",
        "",
        COUNTED,
    ),
    Mutant(
        "a repeated seal is counted again",
        SETTLING,
        "    if change is None:\n        return\n",
        "    if change is None:\n        change = Change()\n",
        COUNTED,
    ),
    Mutant(
        "lua: a hydration adds to the documents that were counted before",
        f"{LUA}/epoch.lua",
        "redis.call('GET', prefix .. 'v') or '0', 'd', 0)",
        "redis.call('GET', prefix .. 'v') or '0')",
        COUNTED_ON_REDIS,
    ),
    Mutant(
        "lua: a retraction does not count",
        f"{LUA}/seal_rules.lua",
        "(seal.live and 1 or 0) - (head and head.live and 1 or 0)",
        "head and 0 or 1",
        COUNTED_ON_REDIS,
    ),
    Mutant(
        "lua: a sealed key stays pending",
        f"{LUA}/seal_alone.lua",
        "    redis.call('ZREM', ARGV[6] .. 'p', sub(seal, 15, 46))\n",
        "",
        ("tests/contract/test_fences.py", "-k", "TestRedis and valkey and no_longer_pending"),
    ),
    Mutant(
        "api: whoever may swap may force",
        API_INDEXES,
        "    if given.force:\n",
        "    if False:\n",
        SCOPED,
    ),
    Mutant(
        "api: a group is written for the key of whoever began it",
        GROUPING,
        "        self.api_key = acting_key.get()\n",
        '        self.api_key = ""\n',
        KEY_LOG,
    ),
    Mutant(
        "api: a retry is told as one of the key that came first",
        API_READING,
        "        name.append(acting_key.get())",
        '        name.append("")',
        KEY_LOG,
    ),
    Mutant(
        "purge: rows keep the key that is made from the content",
        TOMBSTONES,
        '        key = key[:1] + hmac.digest(purge.secret, key, "sha256")\n',
        "",
        BURIED,
    ),
    Mutant(
        "purge: receipts of superseded revisions stay in the fence store",
        "ragfence/documents/purge.py",
        "        self._fences.forget([gone.key for gone in gone_of(rows)], below=epoch)\n",
        "",
        BURIED,
    ),
    Mutant(
        "purge: a request that sent the document may bring it back",
        TOMBSTONES,
        "            self._commits.put(operation, tombstone)\n",
        "",
        BURIED,
    ),
    Mutant(
        "purge: a purge that is completed makes other keys than the one that was cut off",
        TOMBSTONES,
        'json.loads(data if put.won else put.existing or b"")',
        "json.loads(data)",
        ("tests/privacy/test_purged.py", "-k", "same_secret"),
    ),
    Mutant(
        "phone numbers are kept in snapshots",
        SECRET_PATTERNS,
        'DEFAULT_PATTERNS: Final = ("bearer_token", "card", "phone")',
        'DEFAULT_PATTERNS: Final = ("bearer_token", "card")',
        ("tests/privacy/test_planted_secrets.py", "-k", "phone_numbers_are_nowhere and embedded"),
    ),
    Mutant(
        "phone numbers: digits within a path or a version are masked",
        SECRET_PATTERNS,
        r'_PHONE_START = r"(?<![\w+/-])(?<!\d[.,:])"',
        '_PHONE_START = ""',
        ("tests/core/test_redaction.py", "-k", "not_phone_numbers"),
    ),
    Mutant(
        "a plain date in a key warns",
        "ragfence/core/key_strategies.py",
        "    if isinstance(value, date) and not isinstance(value, datetime):\n        return False",
        "    if isinstance(value, date):\n        return True",
        ("tests/core/test_key_strategies.py", "-k", "steady"),
    ),
    Mutant("api: any scope will do", SCOPES, "    if held & needed:\n", "    if held:\n", SCOPED),
    Mutant(
        "api: who may send documents may retract them",
        SCOPES,
        '("DELETE", "/v1/documents/{doc_id:path}"): frozenset({KeyScope.RETRACT})',
        '("DELETE", "/v1/documents/{doc_id:path}"): frozenset({KeyScope.INGEST})',
        SCOPED,
    ),
    Mutant(
        "api: a key that was let in before is slowed down with the wrong ones",
        GATE,
        " and not self._keys.let_in_before(token):",
        ":",
        THROTTLED,
    ),
    Mutant(
        "api: an address that is slowed down still asks the store",
        GATE,
        "            if (wait_s := self._throttle.wait_s(address)) and not",
        "            if (wait_s := 0) and not",
        THROTTLED,
    ),
    Mutant(
        "api: that a key has ended is said to anybody",
        APIKEYS,
        "        if key is None or not same:",
        "        if key is None:",
        KEYS_OF_THE_API,
    ),
    Mutant(
        "the auditor takes the newest epoch from the rows alone",
        "ragfence/audit/auditor.py",
        "newest.get(shard, newest_epoch)",
        "newest.get(shard, 0)",
        ("tests/audit/test_corrupted.py", "-k", "loss or forget"),
    ),
    Mutant(
        "the auditor excuses every document of an older epoch",
        "ragfence/audit/audit.py",
        "            if bytes.fromhex(finding.key) in gone - left:\n",
        "            if False:\n",
        ("tests/audit/test_corrupted.py", "-k", "loss or forget"),
    ),
    Mutant(
        "the auditor excuses an unknown winner of the newest epoch",
        "ragfence/audit/auditor.py",
        "rows_may_be_lost = row.fence.epoch < newest[shard]",
        "rows_may_be_lost = row.fence.epoch <= newest[shard]",
        ("tests/audit/test_corrupted.py", "-k", "loss or forget"),
    ),
    Mutant(
        "a claim counts as an answer",
        "ragfence/core/decision_rows.py",
        "ANSWER_PHASES = (Phase.SEAL,",
        "ANSWER_PHASES = (Phase.CLAIM, Phase.SEAL,",
        ("tests/audit/test_queries.py", "-k", "counts and sqlite"),
    ),
    Mutant(
        "a late seal has the phase of a seal",
        "ragfence/core/decision_rows.py",
        "FENCED_POSITION: Phase.LATE_SEAL",
        "FENCED_POSITION: Phase.SEAL",
        ("tests/audit/test_columns.py", "-k", "phase"),
    ),
    Mutant(
        "a tenant may hold all of the server",
        SHARES,
        "if held >= self._share * (self._most - self._total) or self._total + amount > self._most:",
        "if self._total + amount > self._most:",
        (*FAIRNESS, "-k", "TestShares"),
    ),
    Mutant(
        "a body that is still arriving is a request under way",
        SHARES,
        'has_body=scope["method"] not in READS and body_length(scope) != 0',
        "has_body=False",
        (*FAIRNESS, "-k", "slow_bodies or too_many_bodies"),
    ),
    Mutant(
        "builds have no limit per tenant",
        SHARES,
        "if self._held[tenant] >= self._per_tenant or self._held.total() >= MAX_BUILDS:",
        "if self._held.total() >= MAX_BUILDS:",
        (*FAIRNESS, "-k", "builds_of_one_tenant"),
    ),
    Mutant(
        "values are not counted before a body is parsed",
        ASKING,
        "if max_values is not None and _holds_more_values(body, max_values):",
        "if False:",
        (*FAIRNESS, "-k", "TestBodies"),
    ),
    Mutant(
        "a large body is parsed on the event loop",
        ASKING,
        "return await run_large(call) if size > LARGE_BODY else call()",
        "return call()",
        (*FAIRNESS, "-k", "TestBodies"),
    ),
    Mutant(
        "all values of a large body are counted, however many there are",
        ASKING,
        "        if found > most:\n            return True\n",
        "        pass\n",
        (*FAIRNESS, "-k", "TestCounting"),
    ),
    Mutant(
        "a string of a body ends with its piece",
        ASKING,
        "inside ^= len(parts) % 2 == 0",
        "inside = False",
        (*FAIRNESS, "-k", "TestCounting"),
    ),
    Mutant(
        "large bodies of a tenant are parsed at the same time",
        SHARES,
        "async with turns.large:",
        "if turns:",
        (*FAIRNESS, "-k", "one_at_a_time"),
    ),
    Mutant(
        "large bodies are refused as fast as they come",
        SHARES,
        "async with turns.refused:\n                    await pause(PAUSE_S)",
        "pass",
        (*FAIRNESS, "-k", "one_after_the_other"),
    ),
    Mutant(
        "marks of a long run are sorted by insertion",
        COMPOSED,
        "_tables().long_run.sub(_in_order, text)",
        "text",
        ("tests/core/test_normalization.py",),
    ),
    Mutant(
        "a slow body is waited for without end",
        SHEDDING,
        "left_s = self._timeout_s + self._size / self._min_rate - self._waited_s",
        "left_s = 3600.0",
        (*FAIRNESS, "-k", "least_rate"),
    ),
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
    Mutant(
        "commit sent, but released as if not",
        SEGMENTS,
        "code_of(failure), expire=sent,",
        "code_of(failure), expire=False,",
        STORIES,
    ),
    Mutant(
        "a note of an earlier attempt is not looked at",
        PERFORMING,
        "return not first or won.lease.may_have_happened",
        "return won.lease.may_have_happened",
        NOTES,
    ),
    Mutant(
        "the effect is entered before its note",
        PERFORMING,
        "        first = self.backing.notes.put(won.request.operation, note)\n",
        "        first = True\n",
        NOTES,
    ),
    Mutant(
        "a note of a key that the fence store knows is purged",
        EXPIRY,
        "zip(left, held, strict=True) if not _holds_key(note.key, found)]",
        "zip(left, held, strict=True)]",
        NOTES,
    ),
    Mutant(
        "a note outlives the key's life",
        EXPIRY,
        "                self._commits.remove(aged.kept.entries, self._note_of(aged))\n",
        "                self._commits.remove(aged.kept.entries)\n",
        NOTES,
    ),
    Mutant(
        "a refund gives nothing back",
        DECISIONS,
        "attempt=max(record.attempt - 1, 0) if refund else record.attempt,",
        "attempt=record.attempt,",
        CONTRACT,
    ),
    Mutant(
        "Lua: a refund gives nothing back",
        f"{LUA}/lease.lua",
        "refund and math.max(record.attempt - 1, 0) or record.attempt",
        "record.attempt",
        ON_REDIS,
    ),
    Mutant(
        "a document that was taken over and given back counts as settled",
        DECISIONS,
        "unsettled = answer.takeover and claim.mode is Mode.DOCUMENT",
        "unsettled = False",
        CONTRACT,
    ),
    Mutant(
        "Lua: a document that was taken over and given back counts as settled",
        f"{LUA}/claim_rules.lua",
        "local unsettled = answer.takeover and claim.mode == DOCUMENT",
        "local unsettled = false",
        ON_REDIS,
    ),
    Mutant(
        "Lua: a release settles a document",
        f"{LUA}/lease.lua",
        "unsettled = spot.unsettled }",
        "unsettled = false }",
        ON_REDIS,
    ),
    Mutant(
        "an outage uses up the attempts of documents",
        SEGMENTS,
        "refund = not entered or is_outage(failure) or not isinstance(failure, Exception)",
        "refund = False",
        OUTAGES,
    ),
    Mutant(
        "an effect that was not entered uses up an attempt",
        PERFORMING,
        "refund = not won.entered or (won.repeatable and outage)",
        "refund = won.repeatable and outage",
        OUTAGES,
    ),
    Mutant(
        "an outage refunds an effect that may have happened",
        PERFORMING,
        "refund = not won.entered or (won.repeatable and outage)",
        "refund = not won.entered or outage",
        OUTAGES,
    ),
    Mutant(
        "an outage uses up the attempts of a repeatable effect",
        PERFORMING,
        "refund = not won.entered or (won.repeatable and outage)",
        "refund = not won.entered",
        ("tests/indexes/test_outages.py",),
    ),
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
        "return FenceNumber(epoch, shelf.next_counter(shard))",
        "return FenceNumber(1, shelf.next_counter(shard))",
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
        "            replaced.row.text if replaced else _retracted_at(grant),\n            fresh,\n",
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
        "owner, origin=origin.text)",
        'owner, origin="")',
        HEADS,
    ),
    Mutant(
        "result without origin after a revive",
        MOVING,
        "return FinishedEffect(result_of(ids, origin, owner=owner), ",
        "return FinishedEffect(result_of(ids, owner=owner), ",
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
        ("tests/documents/test_segments.py",),
    ),
    Mutant(
        "the token of hydrated heads lost",
        PARQUET,
        "sequence, described, fingerprint, token, fields",
        "sequence, described, fingerprint, bytes(12), fields",
        ("tests/documents/test_segments.py",),
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
        "any secret is taken for a keyed tenant",
        CONTENT_HASH,
        """if not hmac.compare_digest(mine, str(settings.get("secret_check", ""))):""",
        "if False:",
        SECRETS,
    ),
    Mutant(
        "a used tenant becomes keyed",
        CONTENT_HASH,
        "            self._refuse_used_tenant()\n",
        "",
        SECRETS,
    ),
    Mutant(
        "the secret is fixed with the first document only",
        CONTENT_HASH,
        "            self.settle()\n        return self._key",
        "            self._derived()\n        return self._key",
        SECRETS,
    ),
    Mutant(
        "a keyed tenant is opened without its key",
        CONTENT_HASH,
        """if known is not None and self._parsed(known)["content_hash"] == "hmac":""",
        "if False:",
        SECRETS,
    ),
    Mutant(
        "tenants with one secret share a key",
        HASHING,
        """framed("ragfence/content-key/1", (tenant.encode(),))""",
        """framed("ragfence/content-key/1", (b"",))""",
        SECRETS,
    ),
    Mutant(
        "a tenant's name leads to another file",
        SETTINGS,
        """Path(given.file.replace("{tenant}", encoded(tenant)))""",
        """Path(given.file.replace("{tenant}", tenant))""",
        SECRETS,
    ),
    Mutant(
        "a short secret is taken",
        SETTINGS,
        "if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:",
        "if len(secret) > MAX_SECRET_BYTES:",
        SECRETS,
    ),
    Mutant(
        "snippet ids are not keyed",
        IDENTITY,
        "made = _sha256 if key is None else key.digest_frame",
        "made = _sha256",
        KEYED,
    ),
    Mutant(
        "content hashes are not keyed",
        IDENTITY,
        """lambda data: content_hash(data, "hmac", key)""",
        """lambda data: "hmac:" + sha256(data).hexdigest()""",
        KEYED,
    ),
    Mutant(
        "metadata hashes are not keyed",
        IDENTITY,
        "return lambda data: key.digest_frame(data)[:16],",
        "return lambda data: sha256(data).digest()[:16],",
        KEYED,
    ),
    Mutant(
        "states of a source are noted as they are",
        IDENTITY,
        "if self._content_key is None or not state:",
        "if True:",
        KEYED,
    ),
    Mutant(
        "fingerprints of payloads are not keyed",
        HASHING,
        "return digest(domain, data) if key is None else key.digest(domain, data)",
        "return digest(domain, data)",
        KEYED,
    ),
    Mutant(
        "parts of requests are not keyed",
        HASHING,
        """return "hmac:" + key.digest("ragfence/http-part/1", data).hex()""",
        """return "hmac:" + sha256(data).hexdigest()""",
        KEYED,
    ),
    Mutant(
        "keys that are digests of the content are stored as they are",
        "ragfence/server/http_claims.py",
        "if content_key is None or not _DIGEST.fullmatch(key):",
        "if True:",
        KEYED,
    ),
    Mutant(
        "the body of a batch is not keyed",
        "ragfence/server/ndjson_batch.py",
        "body.digest.hex() if key is None else",
        "body.digest.hex() if True else",
        KEYED,
    ),
    Mutant(
        "the recipe is no part of the key",
        PREPARING,
        "return cls(chunker, recipe, name, key_tail(name), key)",
        'return cls(chunker, recipe, name, key_tail(""), key)',
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
    Mutant(
        "gc appends to the catalog for what nobody can open",
        COLLECTING,
        "if report.dry_run or not self._backend_of(target.backend).exists(target.physical):",
        "if report.dry_run:",
        ("tests/indexes/test_gc.py",),
    ),
    Mutant(
        "an emptied folder on S3 counts as an index",
        LANCE,
        "            names = mine.folders.holding(names)\n",
        "",
        ("tests/indexes/test_gc_s3.py",),
    ),
    Mutant(
        "vectors that were read back are not compared",
        VERIFYING,
        "    if equal < contents.rows:\n",
        "    if equal < 0:\n",
        ("tests/indexes/test_build.py", "-k", "every_vector"),
    ),
    Mutant(
        "a store that answers is emptied before the log is known to be readable",
        HYDRATION,
        "                self._check_log(whole=current)\n",
        "                self._check_log(whole=False)\n",
        ("tests/documents/test_verify.py", "-k", "that_answers_is_refused"),
    ),
    Mutant(
        "segments that cannot be read are given up without being told to",
        REPAIRING,
        "        if accept_loss and Trouble.ROWS_UNREADABLE in troubles",
        "        if Trouble.ROWS_UNREADABLE in troubles",
        ("tests/documents/test_verify.py", "-k", "nobody_can_restore or nothing_is_changed"),
    ),
    Mutant(
        "nobody is told what was given up with a segment",
        REPAIRING,
        "        tell(self._fences, self._gone({*segments} - {*left}, left, keep), GIVEN_UP)\n",
        "",
        ("tests/documents/test_verify.py", "-k", "knows_what_was_given_up and embedded"),
    ),
    Mutant(
        "whatever the log does not have counts as given up",
        REPAIRING,
        "            return name in given_up or (epoch < newest and name in rewritten)\n",
        "            return True\n",
        ("tests/documents/test_verify.py", "-k", "lost_by_itself and embedded"),
    ),
    Mutant(
        "what was packed into a segment that is given up is not told",
        REPAIRING,
        "            return name in given_up or (epoch < newest and name in rewritten)\n",
        "            return name in given_up\n",
        ("tests/documents/test_verify.py", "-k", "knows_what_was_given_up and embedded"),
    ),
    Mutant(
        "recover= is not asked while the fence store is away",
        "ragfence/engine/once.py",
        "self._options.recover is not None and self._performer.announce_alone(request, token)",
        "False",
        ("tests/engine/test_notes.py", "-k", "is_away or without_the_fence_store"),
    ),
    Mutant(
        "an object store that is away means that nothing has happened",
        PERFORMING,
        "            return True  # away as well\n",
        "            return False\n",
        ("tests/engine/test_notes.py", "-k", "is_away"),
    ),
    Mutant(
        "an attempt that was withdrawn settles its source",
        DECISIONS,
        "source.head and source.lease and not source.lease.unsettled:",
        "source.head and source.lease:",
        ("tests/contract/test_fences.py", "-k", "withdrawn and sqlite"),
    ),
    Mutant(
        "a withdrawn attempt forgets those that failed before",
        DECISIONS,
        "if withdraw and lease.mode is Mode.DOCUMENT and record.attempt == 1:",
        "if withdraw and lease.mode is Mode.DOCUMENT:",
        ("tests/contract/test_fences.py", "-k", "withdrawn and sqlite"),
    ),
    Mutant(
        "on Redis a withdrawn attempt stays pending",
        f"{LUA}/lease.lua",
        "  redis.call('ZREM', lease.prefix .. 'q', sub(lease.source_key, #lease.prefix + 2))\n  return true\n",
        "  return true\n",
        ("tests/contract/test_fences.py", "-k", "withdrawn and valkey"),
    ),
    Mutant(
        "a conflict of origin waits for its outcome for ever",
        SEGMENTS,
        "refund=is_outage(error), withdraw=declined)",
        "refund=declined or is_outage(error))",
        ("tests/documents/test_origins.py", "-k", "nothing_pending"),
    ),
    Mutant(
        "rows that the store has counted are counted once more",
        "ragfence/audit/recount.py",
        "    forgotten = pc.less(",
        "    forgotten = pc.not_equal(",
        ("tests/documents/test_recounted.py", "-k", "its_own_loss"),
    ),
    Mutant(
        "a store that goes on counting says that it has just begun",
        SETTLING,
        "    if not shelf.counts():",
        "    if True:",
        ("tests/contract/test_fences.py", "-k", "since_when_it_counts and sqlite"),
    ),
    Mutant(
        "a Redis that goes on counting says that it has just begun",
        f"{LUA}/epoch.lua",
        "    if redis.call('EXISTS', prefix .. 'c') == 0 then\n",
        "    if true then\n",
        ("tests/contract/test_fences.py", "-k", "since_when_it_counts and valkey"),
    ),
    Mutant(
        "an approximate index is swapped to whatever its recall",
        GATES,
        '    if not (ok := _reaches(seen["recall"], limits.min_ann_recall)):',
        "    if not (ok := _reaches(1.0, limits.min_ann_recall)):",
        ("tests/indexes/test_approximate.py", "-k", "too_little"),
    ),
    Mutant(
        "a row counts for its own vector when recall is measured",
        VERIFYING,
        "if each.snippet_id != own]",
        "]",
        ("tests/indexes/test_approximate.py", "-k", "share_of_what"),
    ),
    Mutant(
        "an index at the limit is approximate",
        SPEC,
        "if rows > ann_above and suits",
        "if rows >= ann_above and suits",
        ("tests/indexes/test_approximate.py", "-k", "up_to_the_limit"),
    ),
    Mutant(
        "an alias that moved during a search is not resolved again",
        SEARCHING,
        "            if now.physical == target.physical:\n",
        "            if True:\n",
        ("tests/indexes/test_search.py", "-k", "overtook"),
    ),
    Mutant(
        "vectors of earlier revisions are not looked for",
        VECTORS,
        "for address in earlier(left) if left else ():",
        "for address in ():",
        ("tests/indexes/test_vectors.py", "-k", "memory"),
    ),
    Mutant(
        "a build forgets what it embedded when the log is rewritten",
        VECTORS,
        "dict(self._carried.of(missing))",
        "{}",
        ("tests/indexes/test_vectors.py", "-k", "memory"),
    ),
    Mutant(
        "parts of vectors do not move with their segment",
        VECTORS,
        "for name in (held.whole_name(address), *held.some_names(address)):",
        "for name in (held.whole_name(address),):",
        ("tests/indexes/test_vectors.py", "-k", "memory"),
    ),
    Mutant(
        "a sink keeps its vectors to itself",
        VECTORS,
        "            with contextlib.suppress(SnapshotGone):\n                self._put(address, name, made)\n",
        "            pass\n",
        SHARED_VECTORS,
    ),
    Mutant(
        "a page of a sink is taken for all vectors of its segment",
        SINK_VECTORS,
        "whole = len(ordered) == len(new.snippet_ids)",
        "whole = True",
        SHARED_VECTORS,
    ),
    Mutant(
        "an edit for a sink does not look at earlier revisions",
        SINK_VECTORS,
        "        yield from self._log.history(starts, known)\n",
        "",
        SHARED_VECTORS,
    ),
    Mutant(
        "what a killed writer embedded for a sink is forgotten",
        DELIVERING,
        "                self._remember(name, intent)\n                if",
        "                if",
        SHARED_VECTORS,
    ),
    Mutant(
        "vectors for a sink outlive a segment that became void",
        VECTORS,
        "        self._refuse_void(address, name)\n",
        "",
        SHARED_VECTORS,
    ),
    Mutant(
        "a refused document is new",
        MOVING,
        'def refused(error: Exception, key: str = "", decision: Decision = Decision.REFUSED)',
        'def refused(error: Exception, key: str = "", decision: Decision = Decision.NEW)',
        ("tests/documents/test_refused.py", "-k", "memory"),
    ),
    Mutant(
        "what follows an invalid document is ingested though the call stops at it",
        BATCHES,
        "                    errors[at] = invalid\n                    break\n",
        "                    errors[at] = invalid\n",
        ("tests/documents/test_refused.py", "-k", "memory"),
    ),
    Mutant(
        "a full settle deletes the rows of others",
        DELIVERING,
        "own = orphans if delete_foreign else named_in_log(orphans, history)",
        "own = orphans",
        ("tests/contract/test_sinks.py", "-k", "List"),
    ),
    Mutant(
        "an operation with a sequence is the head of a document",
        "ragfence/stores/sqlite.py",
        "if head is not None and head.record is not None:",
        "if head is not None:",
        ("tests/contract/test_fences.py", "-k", "TestSqlite and is_no_document"),
    ),
    Mutant(
        "an operation with a sequence changes the corpus digest",
        RECORDS,
        "if data[66:_RECORD_AT] == _NO_RECORD:",
        "if data[66:_RECORD_AT] == b'':",
        ("tests/contract/test_fences.py", "-k", "TestSqlite and is_no_document"),
    ),
    Mutant(
        "a purge leaves what is kept of refused requests",
        TOMBSTONES,
        "requests = self._refused_requests(doc_id)",
        "requests: set[str] = set()",
        ("tests/privacy/test_purged.py", "-k", "http_requests and embedded"),
    ),
    Mutant(
        "a record whose lease is live is forgotten",
        f"{LUA}/epoch.lua",
        "and (state % 16 ~= HELD or now() >= struct.unpack('>I6', data, 51)) then",
        "then",
        ("tests/contract/test_fences.py", "-k", "TestRedis and valkey and nobody_holds"),
    ),
    Mutant(
        "any source replaces what another owns",
        ORIGINS,
        "if replaced is None or owner == origin.digest or origin.take_over:",
        "if True:",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "equal content changes the owner",
        ORIGINS,
        "    if owner == NO_OWNER:\n        return origin.digest\n",
        "    if owner == NO_OWNER:\n        return owner\n",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "metadata of another source replace those of the owner",
        ORIGINS,
        "            raise ContentStands(head.record)\n        return owner",
        "            pass\n        return owner",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a document that is ingested by hand loses its owner",
        ORIGINS,
        "    if origin is None:\n        return owner\n",
        "    if origin is None:\n        return NO_OWNER\n",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a prune retracts what another source owns",
        PRUNE_PLAN,
        "head.record and stored_in(head.record).owner == self.origin.digest:",
        "head.record:",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a prune retracts what another source still has",
        PRUNE_PLAN,
        "if not found.versions or self.origin.take_over:",
        "if True:",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a full prune retracts what another source owns",
        PRUNE_PLAN,
        'if row.detail.owner in ("", self.origin.digest.hex()) or self.origin.take_over:',
        "if True:",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a prune retracts what somebody has moved since",
        SYNC,
        "._replace(expected=doomed[doc_id])",
        "",
        ("tests/documents/test_origins.py", "-k", "memory and moved"),
    ),
    Mutant(
        "hydration forgets the owner",
        PARQUET,
        "return result_of(ids, there, None if at_home else here, bytes.fromhex(owner))",
        "return result_of(ids, there, None if at_home else here)",
        ("tests/documents/test_origins.py", "tests/documents/test_segments.py", "-k", "not embedded"),
    ),
    Mutant(
        "a source that conflicts again and again is quarantined",
        SEGMENTS,
        "refund=is_outage(error), withdraw=declined)",
        "refund=is_outage(error))",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "a doc_id whose first document was refused is answered with what another source has",
        SYNC,
        "refused = read.doc_id in self._refused_ids",
        "refused = False",
        ("tests/documents/test_origins.py", "-k", "memory and first_one"),
    ),
    Mutant(
        "a doc_id listed twice with different content is a duplicate",
        SYNC,
        "if refused or not head or not head.live or head.record is None or head.digest != ask.key[1:]:",
        "if refused or not head or head.record is None:",
        ("tests/documents/test_origins.py", "-k", "memory"),
    ),
    Mutant(
        "the table of a sync forgets files that were not read",
        "ragfence/documents/sync/sync.py",
        "                self._row(place, note.doc_id, note.content_hash, DUPLICATE, ids)\n",
        "",
        ("tests/documents/test_ingest_table.py", "-k", "sqlite"),
    ),
    Mutant(
        "a purge leaves the document in the stored tables",
        GUARD,
        "                partial(forget_in_tables, self._engine.tenant, self._objects),\n",
        "",
        ("tests/documents/test_ingest_table.py", "-k", "purge and memory"),
    ),
    Mutant(
        "folders of a source are opened through links",
        REGULAR_FILES,
        "return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)",
        "return os.open(name, _FOLDER, dir_fd=folder)",
        ("tests/documents/test_sources_folder.py", "-k", "swapped"),
    ),
    Mutant(
        "pipes and devices of a source are read",
        REGULAR_FILES,
        "if not stat.S_ISREG(mode):",
        "if False:",
        ("tests/documents/test_sources_folder.py", "-k", "pipe"),
    ),
    Mutant(
        "files without a reader are left out in silence",
        "ragfence/documents/sources/folder.py",
        "self._skipped.add_file(entry.name)",
        "pass",
        ("tests/documents/test_sources_folder.py", "-k", "counted_anew"),
    ),
    Mutant(
        "an empty text replaces what was there",
        "ragfence/documents/document.py",
        "if (not text or text.isspace()) and not limits.allow_empty_text:",
        "if False:",
        ("tests/documents/test_guard.py", "-k", "without_a_word"),
    ),
    Mutant(
        "a guard with other options forgets less at a purge",
        "ragfence/documents/documents.py",
        "            traces=self._traces,\n        )",
        "        )",
        ("tests/privacy/test_purged.py", "-k", "nothing_stored and embedded"),
    ),
    Mutant(
        "equal texts of a few rows are taken for random ids",
        "ragfence/documents/sync/report.py",
        "again > 0 and 2 * again >= len(held)",
        "again > 0",
        ("tests/documents/test_sync.py", "-k", "random_ids and sqlite"),
    ),
    Mutant(
        "made up ids are kept",
        "ragfence/documents/sources/frameworks.py",
        'isinstance(fields, set | frozenset) and "id_" not in fields',
        "False",
        ("tests/documents/test_sources_frameworks.py", "-k", "made_up or llamaindex_itself"),
    ),
    Mutant(
        "any bytes may be cp1252",
        "ragfence/documents/readers/content.py",
        'if guess is None and b"\\0" not in data and _is_mostly_ascii(data):',
        "if guess is None:",
        ("tests/documents/test_sources_folder.py", "-k", "plausibly"),
    ),
    Mutant(
        "ignore patterns backtrack",
        IGNORING,
        'f"(?>[^/]*?{piece})"',
        'f"(?:[^/]*?{piece})"',
        ("tests/documents/test_sources_ignoring.py", "-k", "worth and stars"),
    ),
    Mutant(
        "a mistyped URL is shown whole",
        "ragfence/core/urls.py",
        '        return f"{scheme}://{HIDDEN}"',
        "        return url",
        ("tests/privacy/test_store_urls.py", "-k", "what_is_shown or error_of_open"),
    ),
    Mutant(
        "a password in --store is not warned of",
        "ragfence/cli/options.py",
        "if store is not None and holds_password(store):",
        "if store is None and holds_password(store or ''):",
        ("tests/privacy/test_store_urls.py", "-k", "warned_of"),
    ),
    Mutant(
        "two processes remove rows from one index at once",
        LANCE,
        'with self._mine.removing, lance_aliases.locked(self._lock_file("remove")):',
        "with self._mine.removing:",
        ("tests/indexes/test_backend_lance.py", "-k", "same_moment"),
    ),
    Mutant(
        "files of a rewrite that was cut off stay",
        LANCE,
        ", delete_unverified=True)",
        ")",
        ("tests/indexes/test_backend_lance.py", "-k", "rewrite_that_was_cut_off"),
    ),
    Mutant(
        "the lock of who removes rows is not renewed",
        "ragfence/engine/lock.py",
        "keeper.start()",
        "keeper.run = lambda: None; keeper.start()",
        ("tests/engine/test_lock.py",),
    ),
]


def main(words: list[str]) -> int:
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    console = Console()
    table = Table("mutant", "caught by", "verdict", title="deliberately broken variants")
    caught = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        controls = [
            Mutant("nothing", DECISIONS, "", "", tests) for tests in dict.fromkeys(mutant.tests for mutant in wanted)
        ]
        for control, verdict in zip(controls, pool.map(run, controls), strict=True):
            if verdict != "SURVIVED":
                pool.shutdown(wait=False, cancel_futures=True)
                console.print(f"without any mutant, {' '.join(control.tests)} must pass, but: {verdict}")
                return 2
        for mutant, verdict in zip(wanted, pool.map(run, wanted), strict=True):
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
