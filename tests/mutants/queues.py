"""Mutants of queues/."""

from tests.mutants.mutant import Mutant
from tests.mutants.selections import S3_EVENTS, SQS, STREAMS

MUTANTS = [
    Mutant(
        "lua: any consumer may settle a delivery",
        "ragfence/queues/lua/settle.lua",
        "pending[2] ~= consumer or pending[4] ~= count",
        "false",
        STREAMS,
    ),
    Mutant(
        "lua: an earlier delivery of the same consumer may settle",
        "ragfence/queues/lua/settle.lua",
        " or pending[4] ~= count",
        "",
        STREAMS,
    ),
    Mutant(
        "lua: a delayed message stays where it was when it enters its lane",
        "ragfence/queues/lua/receive.lua",
        "  call('ZREM', prefix .. 'delayed', packed)\n",
        "",
        STREAMS,
    ),
    Mutant(
        "lua: a retried message stays in its lane as well",
        "ragfence/queues/lua/settle.lua",
        "  call('XACK', stream, group, entry)\n  call('XDEL', stream, entry)\n",
        "",
        ("tests/contract/test_transports.py", "-k", "TestValkey and acknowledged_is_gone"),
    ),
    Mutant(
        "lua: a group does not wait for its first message",
        "ragfence/queues/lua/base.lua",
        "group ~= '' and call('SADD', prefix .. 'groups', group) == 0",
        "false",
        ("tests/contract/test_transports.py", "-k", "TestValkey and one_group"),
    ),
    Mutant(
        "lua: an extension beyond the visibility is forgotten",
        "ragfence/queues/lua/receive.lua",
        "if tonumber(till) > now then",
        "if false then",
        STREAMS,
    ),
    Mutant(
        "lua: the high-water mark is ignored",
        "ragfence/queues/lua/send.lua",
        "if live + count > high_water then",
        "if false then",
        STREAMS,
    ),
    Mutant(
        "sqs: a partial failure of a batch is taken for success",
        "ragfence/queues/sqs.py",
        '            batch = [entry for entry in batch if entry["Id"] not in sent]\n',
        '            sent |= {entry["Id"]: "" for entry in batch}\n            batch = []\n',
        SQS,
    ),
    Mutant(
        "sqs: a partial failure of a delete is taken for success",
        "ragfence/queues/sqs.py",
        "        if unclear:\n",
        "        if False:\n",
        SQS,
    ),
    Mutant(
        "sqs: an expired delivery may bury its message",
        "ragfence/queues/sqs.py",
        "            return delivery is None or time.monotonic() < delivery.hidden_until",
        "            return True",
        ("tests/contract/test_transports.py", "-k", "TestSqsStandard and expired"),
    ),
    Mutant(
        "sqs: a delivery is extended beyond twelve hours",
        "ragfence/queues/sqs.py",
        "(now - delivery.received_at if delivery else 0.0)",
        "0.0",
        SQS,
    ),
    Mutant(
        "sqs: several messages of a group are received at once",
        "ragfence/queues/sqs.py",
        "count = 1 if self._fifo else min(BATCH, limit - len(found))",
        "count = min(BATCH, limit - len(found))",
        ("tests/contract/test_transports.py", "-k", "TestSqsFifo and one_group"),
    ),
    Mutant(
        "sqs: dead letters that were looked at stay hidden",
        "ragfence/queues/sqs.py",
        '                handles = [raw["ReceiptHandle"] for raw in found.values()]\n',
        "                handles = []\n",
        ("tests/contract/test_transports.py", "-k", "TestSqsStandard and page_by_page"),
    ),
    Mutant(
        "s3: sequencers are compared without padding",
        "ragfence/queues/s3_events.py",
        '.ljust(_DIGITS, "0")[: _DIGITS + 1]',
        "",
        S3_EVENTS,
    ),
    Mutant(
        "s3: the object is read before the claim",
        "ragfence/queues/s3_events.py",
        "    return Consumer(fence, transport, handle, key=_operation, payload=_payload, **options)",
        "    def read(message: Message) -> Operation:\n"
        "        for change in changes_of(message.body):\n"
        "            if found := objects._source_of(change.bucket):\n"
        "                found.load(change.key, change.key)\n"
        "        return _operation(message)\n\n"
        "    return Consumer(fence, transport, handle, key=read, payload=_payload, **options)",
        S3_EVENTS,
    ),
    Mutant(
        "s3: removed objects are ignored",
        "ragfence/queues/s3_events.py",
        "            elif change.removes:\n",
        "            elif False:\n",
        S3_EVENTS,
    ),
    Mutant(
        "s3: a message is fenced as a whole",
        "ragfence/queues/s3_events.py",
        "        if len(changes) == 1:\n            return objects.apply(changes[0], message.event_id)\n"
        "        return objects.apply_each(changes, message)",
        '        return {"records": [objects.apply(change, message.event_id) for change in changes]}',
        S3_EVENTS,
    ),
    Mutant(
        "s3: a key is not decoded",
        "ragfence/queues/s3_events.py",
        'key=unquote_plus(found["key"], errors="strict")',
        'key=found["key"]',
        S3_EVENTS,
    ),
    Mutant(
        "s3: the removal of one version removes the document",
        "ragfence/queues/s3_events.py",
        'bool(self.sequencer) and (not self.version_id or self.event.endswith("DeleteMarkerCreated"))',
        "True",
        S3_EVENTS,
    ),
]
