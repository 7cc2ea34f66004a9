"""What `make test` leaves out is chosen by patterns: a test that is renamed must not slip out of them, or into them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ragfence.testing.contracts.fences import FenceStoreContract
from ragfence.testing.contracts.objects import ObjectStoreContract
from tests.thorough import FENCE_CORE, OBJECT_CORE, RULES, reason_for

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("contract", "core"),
    [(FenceStoreContract, FENCE_CORE), (ObjectStoreContract, OBJECT_CORE)],
    ids=["fences", "objects"],
)
def test_every_name_of_a_core_is_in_the_contract(contract: type, core: tuple[str, ...]) -> None:
    names = [name for name in dir(contract) if name.startswith("test_")]
    assert [part for part in core if not any(part in name for name in names)] == []


@pytest.mark.parametrize(
    ("test", "thorough"),
    [
        ("tests/contract/test_fences.py::TestSqlite::test_a_key_nobody_knows_is_new[object]", False),
        ("tests/contract/test_fences.py::TestCluster::test_a_key_nobody_knows_is_new[object]", False),
        ("tests/contract/test_fences.py::TestCluster::test_a_long_route_is_cut", True),
        ("tests/contract/test_fences.py::TestRedis::test_a_long_route_is_cut[valkey]", False),
        ("tests/contract/test_fences.py::TestRedis::test_a_long_route_is_cut[redis-6.2]", True),
        ("tests/documents/test_sync.py::test_one[sqlite-True]", False),
        ("tests/documents/test_sync.py::test_one[valkey-True]", True),
        ("tests/documents/attack/test_heads.py::test_one[valkey-AB]", False),
        ("tests/cli/test_keys.py::test_one[valkey alone-filters-sources]", True),
        ("tests/cli/test_keys.py::test_one[embedded]", False),
        ("tests/crash/test_kill_points.py::test_one_receipt_whoever_stops_where[after_effect-kill-sqlite]", False),
        ("tests/crash/test_kill_points.py::test_one_receipt_whoever_stops_where[after_effect-freeze-sqlite]", True),
    ],
)
def test_a_rule_says_what_make_test_leaves_out(test: str, thorough: bool) -> None:
    assert (reason_for(test) is not None) is thorough


def test_the_two_targets_are_all_tests_that_are_not_slow() -> None:
    assert "-m 'not slow and not thorough'" in MAKEFILE
    assert "-m 'thorough and not slow'" in MAKEFILE
    assert re.search(r"^test-all: test\b", MAKEFILE, re.M)


@pytest.mark.slow
def test_the_rules_match() -> None:
    """Every rule matches a test, so that none is left over from a name of the past."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert [rule.pattern for rule in RULES if not any(re.search(rule.pattern, test) for test in tests)] == []
    kept = [part for rule in RULES for part in rule.unless if not any(part in test for test in tests)]
    assert kept == []
