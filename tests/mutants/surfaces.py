"""Mutants of the other surfaces: the audit, the client, the command line, and what they share."""

from tests.mutants.mutant import Mutant
from tests.mutants.selections import CLI_WORDS, HTTP, PURGED

MUTANTS = [
    Mutant(
        "the terminal is told what Python is told",
        "ragfence/cli/output.py",
        """hint = hint_on("cli", error.hint)""",
        """hint = error.hint""",
        CLI_WORDS,
    ),
    Mutant(
        "a caller over HTTP is told what Python is told",
        "ragfence/wire/problems.py",
        """hint=hint_on("http", error.hint)""",
        """hint=error.hint""",
        CLI_WORDS,
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
        "a condition is not compared with that of the first request",
        "ragfence/wire/messages.py",
        "        return {name: value for name, value in given.items() if value}\n",
        "        return {}\n",
        (*HTTP, "-k", "condition"),
    ),
    Mutant(
        "purge: rows keep the key that is made from the content",
        "ragfence/audit/tombstones.py",
        '        key = key[:1] + hmac.digest(purge.secret, key, "sha256")\n',
        "",
        PURGED,
    ),
    Mutant(
        "purge: a request that sent the document may bring it back",
        "ragfence/audit/tombstones.py",
        "            self._commits.put(operation, tombstone)\n",
        "",
        PURGED,
    ),
    Mutant(
        "purge: a purge that is completed makes other keys than the one that was cut off",
        "ragfence/audit/tombstones.py",
        'json.loads(data if put.won else put.existing or b"")',
        "json.loads(data)",
        ("tests/privacy/test_purged.py", "-k", "same_secret"),
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
        "rows that the store has counted are counted once more",
        "ragfence/audit/statistics.py",
        "    forgotten = pc.less(",
        "    forgotten = pc.not_equal(",
        ("tests/documents/test_recounted.py", "-k", "its_own_loss"),
    ),
    Mutant(
        "a purge leaves what is kept of refused requests",
        "ragfence/audit/tombstones.py",
        "requests = self._refused_requests(doc_id)",
        "requests: set[str] = set()",
        ("tests/privacy/test_purged.py", "-k", "http_requests and embedded"),
    ),
    Mutant(
        "a password in --store is not warned of",
        "ragfence/cli/options.py",
        "    if holds_password(url):\n",
        "    if not url:\n",
        ("tests/privacy/test_store_urls.py", "-k", "warned_of"),
    ),
]
