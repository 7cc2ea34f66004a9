"""The catalog: a log of numbers in which every entry has the whole state, and of which the head is all one needs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragfence.errors import FormatCorrupt, FormatTooNew, ValidationError
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.build_log import BuildEntry, BuildLog, BuildSeal, next_retired
from ragfence.indexes.catalog import (
    EMPTY_HEAD,
    MAX_ALIASES,
    SHORTEST_HISTORY,
    Alias,
    Catalog,
    CatalogEntry,
    CatalogState,
    Target,
    check_alias,
    next_entry,
)
from ragfence.testing.memory import MemoryObjects

KEEP = 3


class Counted:
    """An object store that counts its requests."""

    def __init__(self) -> None:
        self.inner, self.calls = MemoryObjects(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.inner, name)


def sealed(builds: BuildLog, name: str, number: int = 1, physical: str = "") -> BuildEntry:
    seal = BuildSeal(name, physical or f"rf-{name}-{number}", "folder", 1, 1, 4, "cosine", "", "")
    entry = BuildEntry(number, "sealed", number, "me", f"token-{number}", seal)
    assert builds.append(name, entry)
    return entry


def swap_of(alias: str, entry: BuildEntry, **more: Any) -> CatalogEntry:
    return CatalogEntry(0, "swap", entry.at_ms + 1000, alias, Target.of(entry), **more)


@pytest.fixture
def objects() -> Counted:
    return Counted()


@pytest.fixture
def catalog(objects: Counted) -> Catalog:
    return Catalog("acme", objects)  # type: ignore[arg-type]


@pytest.fixture
def builds(objects: Counted) -> BuildLog:
    return BuildLog("acme", objects)  # type: ignore[arg-type]


def append(catalog: Catalog, builds: BuildLog, change: CatalogEntry) -> CatalogEntry:
    entry = next_entry(catalog.head(), change, builds, keep=KEEP)
    assert catalog.append(entry)
    return entry


def test_an_empty_catalog_has_a_head_too(catalog: Catalog) -> None:
    assert catalog.head() == EMPTY_HEAD
    assert catalog.head(EMPTY_HEAD) is EMPTY_HEAD
    assert list(catalog.entries()) == []


def test_an_entry_comes_back_as_it_was_written(catalog: Catalog, builds: BuildLog) -> None:
    first, second = sealed(builds, "a"), sealed(builds, "b")
    append(catalog, builds, swap_of("docs", first))
    report = ({"gate": "rows", "ok": True, "value": 1, "limit": 1, "detail": ""},)
    made = append(catalog, builds, swap_of("docs", second, actor="ann", reason="better", gates=report, forced=True))
    assert catalog.head() == made == catalog.at(2)
    assert made.state.aliases["docs"].target == replace(Target.of(second), generation=2)
    assert [each.generation for each in made.state.aliases["docs"].history] == [1]
    assert [entry.number for entry in catalog.entries()] == [2, 1]


def test_the_next_number_is_the_compare_and_swap(catalog: Catalog, builds: BuildLog) -> None:
    head = catalog.head()
    one = next_entry(head, swap_of("one", sealed(builds, "a")), builds, keep=KEEP)
    other = next_entry(head, swap_of("other", sealed(builds, "b")), builds, keep=KEEP)
    assert catalog.append(one)
    assert not catalog.append(other)
    assert catalog.head() == one


def test_a_head_costs_one_list_and_one_get_and_one_get_when_it_is_known(
    objects: Counted, catalog: Catalog, builds: BuildLog
) -> None:
    head = append(catalog, builds, swap_of("docs", sealed(builds, "a")))
    objects.calls.clear()
    assert catalog.head() == head
    assert objects.calls == {"list": 1, "get": 1}
    objects.calls.clear()
    assert catalog.head(head) is head
    assert objects.calls == {"get": 1}


def test_who_slept_for_long_does_not_follow_every_entry(objects: Counted, catalog: Catalog, builds: BuildLog) -> None:
    one, other = sealed(builds, "a"), sealed(builds, "b")
    old = append(catalog, builds, swap_of("docs", one))
    for number in range(100):
        append(catalog, builds, swap_of("docs", other if number % 2 == 0 else one))
    objects.calls.clear()
    assert catalog.head(old).number == 101
    assert objects.calls.total() < 25


def test_the_history_has_every_build_once_and_is_bounded() -> None:
    alias = Alias(Target("h0", 1, "p0", "b", 1))
    for number in range(1, 40):
        alias = alias.move_to(Target(f"h{number % 15}", 1, f"p{number % 15}", "b", number + 1), KEEP)
        hashes = [each.index_hash for each in (alias.target, *alias.history)]
        assert len(hashes) == len(set(hashes)) <= SHORTEST_HISTORY + 1
    assert [each.index_hash for each in alias.history[:3]] == ["h8", "h7", "h6"]
    assert len(alias.move_to(Target("x", 1, "p", "b", 99), 100).history) == SHORTEST_HISTORY + 1


def test_what_an_alias_may_go_back_to_is_in_use() -> None:
    alias = Alias(Target("h0", 1, "p0", "b", 1))
    for number in range(1, 6):
        alias = alias.move_to(Target(f"h{number}", 1, f"p{number}", "b", number + 1), KEEP)
    state = CatalogState({"docs": alias})
    assert [state.users(f"h{number}", KEEP) for number in range(6)] == [[], [], *[["docs"]] * 4]


def test_what_is_retired_or_sealed_anew_leaves_the_state_with_the_next_entry(
    catalog: Catalog, builds: BuildLog
) -> None:
    entries = {name: sealed(builds, name) for name in "abc"}
    for entry in entries.values():
        head = append(catalog, builds, CatalogEntry(0, "retire", 5, target=Target.of(entry)))
    assert head.state.retiring == {"a": 1, "b": 1, "c": 1}
    builds.append("a", next_retired(entries["a"], at_ms=6, owner="gc", reason=""))
    sealed(builds, "b", 2, entries["b"].seal.physical)  # type: ignore[union-attr]
    head = append(catalog, builds, swap_of("docs", sealed(builds, "d")))
    assert head.state.retiring == {"c": 1}
    assert head.state.retires(entries["c"], "c")
    assert list(alias_findings(catalog, builds)) == []


def test_a_broken_log_of_a_build_that_is_retiring_does_not_stop_all_aliases(
    objects: Counted, catalog: Catalog, builds: BuildLog
) -> None:
    append(catalog, builds, CatalogEntry(0, "retire", 5, target=Target.of(sealed(builds, "a"))))
    objects.inner.put_new(f"acme/builds/a/{10**20 - 3:020d}", b"nonsense")
    assert append(catalog, builds, swap_of("docs", sealed(builds, "b"))).state.retiring == {"a": 1}


@pytest.mark.parametrize("name", ["docs", "a", "0", "docs-v2.prod_eu", "x" * 64])
def test_a_name_for_an_alias(name: str) -> None:
    assert check_alias(name) == name


@pytest.mark.parametrize("name", ["", "Docs", "-a", ".a", "a/b", "a b", "x" * 65, "ä", "docs\n", None, 3])
def test_no_name_for_an_alias(name: object) -> None:
    with pytest.raises(ValidationError, match="not a valid name for an alias"):
        check_alias(name)


def test_the_state_is_bounded(builds: BuildLog) -> None:
    target = Target("h", 1, "p", "b", 1)
    head = replace(EMPTY_HEAD, number=1, state=CatalogState({f"a{at}": Alias(target) for at in range(MAX_ALIASES)}))
    entry = sealed(builds, "h")
    with pytest.raises(ValidationError, match="1,000 aliases already"):
        next_entry(head, swap_of("one-more", entry), builds, keep=KEEP)
    assert next_entry(head, swap_of("a7", entry), builds, keep=KEEP).number == 2
    with pytest.raises(ValidationError, match="reason may have at most"):
        next_entry(head, swap_of("a7", entry, reason="x" * 1001), builds, keep=KEEP)


@pytest.mark.parametrize(
    "broken",
    [b"", b"{}", b"[]", b"null", b'{"version":1}', b"\xff", "change", "target", "state", "aliases"],
)
def test_what_is_no_entry_is_said_to_be_corrupt(
    broken: bytes | str, objects: Counted, catalog: Catalog, builds: BuildLog
) -> None:
    good = json.loads(next_entry(EMPTY_HEAD, swap_of("docs", sealed(builds, "a")), builds, keep=KEEP).encode())
    if isinstance(broken, str):
        if broken == "aliases":
            good["state"]["aliases"] = {"docs": {}}
        else:
            good[broken] = "nonsense"
        broken = json.dumps(good).encode()
    objects.inner.put_new(f"acme/catalog/{10**20 - 2:020d}", broken)
    with pytest.raises(FormatCorrupt, match="not a valid entry of the catalog"):
        catalog.head()


def test_a_newer_format_is_refused(objects: Counted, catalog: Catalog) -> None:
    objects.inner.put_new(f"acme/catalog/{10**20 - 2:020d}", b'{"version":2}')
    with pytest.raises(FormatTooNew):
        catalog.head()


class CatalogMachine(RuleBasedStateMachine):
    """Whatever is swapped, rolled back, retired, restored and removed: the head says what a dict would."""

    HASHES = tuple("abcdef")
    NAMES = ("docs", "staging")

    @initialize()
    def begin(self) -> None:
        objects = MemoryObjects()
        self.catalog, self.builds = Catalog("t", objects), BuildLog("t", objects)
        self.model: dict[str, list[str]] = {}
        self.retiring: dict[str, int] = {}
        self.known = EMPTY_HEAD
        self.clock = 0
        for name in self.HASHES:
            self._seal(name)

    def _seal(self, name: str) -> None:
        newest = self.builds.newest(name)
        self.clock += 1
        number = newest.number + 1 if newest else 1
        seal = BuildSeal(name, f"rf-{name}-{number}", "folder", 1, 1, 4, "cosine", "", "")
        assert self.builds.append(name, BuildEntry(number, "sealed", self.clock, "me", f"{number}", seal))

    def _append(self, change: str, alias: str, name: str | None) -> None:
        self.clock += 1
        newest = self.builds.newest(name) if name else None
        target = Target.of(newest) if newest else None
        entry = CatalogEntry(0, change, self.clock, alias, target)  # type: ignore[arg-type]
        assert self.catalog.append(next_entry(self.catalog.head(), entry, self.builds, keep=KEEP))

    def _usable(self, name: str) -> bool:
        newest = self.builds.newest(name)
        return newest is not None and newest.usable and not self.catalog.head().state.retires(newest, name)

    @rule(alias=st.sampled_from(NAMES), name=st.sampled_from(HASHES), change=st.sampled_from(["swap", "rollback"]))
    def move(self, alias: str, name: str, change: str) -> None:
        if not self._usable(name):
            return
        self._append(change, alias, name)
        had = self.model.get(alias, [])
        self.model[alias] = [name, *(each for each in had if each != name)]

    @rule(alias=st.sampled_from(NAMES))
    def remove(self, alias: str) -> None:
        if alias in self.model:
            self._append("remove", alias, None)
            del self.model[alias]

    @rule(name=st.sampled_from(HASHES))
    def retire(self, name: str) -> None:
        used = any(name in had[: KEEP + 1] for had in self.model.values())
        assert bool(self.catalog.head().state.users(name, KEEP)) == used
        if not used and self._usable(name):
            self._append("retire", "", name)

    @precondition(lambda self: self.catalog.head().state.retiring)
    @rule(data=st.data(), again=st.booleans())
    def end_or_restore(self, data: st.DataObject, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.catalog.head().state.retiring)))
        newest = self.builds.newest(name)
        assert newest is not None
        if not newest.usable or newest.number > self.catalog.head().state.retiring[name]:
            return
        if again:
            self.clock += 1
            assert self.builds.append(name, replace(newest, number=newest.number + 1, at_ms=self.clock))
            self._append("restore", "", name)
        else:
            assert self.builds.append(name, next_retired(newest, at_ms=self.clock, owner="gc", reason=""))

    @rule(name=st.sampled_from(HASHES))
    def build_again(self, name: str) -> None:
        newest = self.builds.newest(name)
        if newest is not None and not newest.usable:
            self._seal(name)

    @invariant()
    def the_head_is_the_model(self) -> None:
        self.known = self.catalog.head(self.known)
        assert self.known == self.catalog.head()
        state = self.known.state
        assert {
            name: [each.index_hash for each in (alias.target, *alias.history)] for name, alias in state.aliases.items()
        } == self.model
        for name, alias in state.aliases.items():
            newest = self.builds.newest(alias.target.index_hash)
            assert newest is not None
            assert newest.usable, f"{name} points at a retired build"
            assert not state.retires(newest, alias.target.index_hash)

    def teardown(self) -> None:
        if hasattr(self, "catalog"):
            assert [str(found) for found in alias_findings(self.catalog, self.builds)] == []


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
