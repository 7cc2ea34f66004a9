"""Mutants of queues/."""

from tests.mutants.mutant import Mutant
from tests.mutants.selections import STREAMS

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
]
