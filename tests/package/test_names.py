"""Names: one meaning per class name, modules are nouns, and no module reaches behind the facade."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import ragfence

ROOT = Path(ragfence.__file__).parent

BEHIND_THE_FACADE = frozenset({"fence.py", "_open.py"})
NOT_GERUNDS = frozenset({"testing", "hashing", "chunking", "load_shedding", "ranking"})
"""nouns that end like a gerund; what they name is a subject, not a step"""
FORBIDDEN_MODULES = frozenset(
    ("ahead", "asked", "beside", "earlier", "helpers", "kept", "manager", "misc", "soon", "stored", "told", "utils")
)
"""participles, adverbs, and names that say nothing"""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(ROOT.rglob("*.py")):
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def engine_reaches(tree: ast.Module) -> list[int]:
    """Lines with `x._engine` where x is not `self`: a look behind somebody else's facade."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "_engine"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def test_no_module_reaches_behind_the_facade() -> None:
    """`fence.inspector` reads stores and records; `fence.batched_claims()` claims for an event loop."""
    found = [
        f"{file}:{line}" for file, tree in _modules() if file not in BEHIND_THE_FACADE for line in engine_reaches(tree)
    ]
    assert not found, f"use fence.inspector: {found}"


def test_a_reach_behind_the_facade_is_found() -> None:
    assert engine_reaches(ast.parse("def f(fence):\n    return fence._engine.fences")) == [2]
    assert engine_reaches(ast.parse("self._fence._engine.fences")) == [1]
    assert not engine_reaches(ast.parse("self._engine = engine"))


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, twice


def test_modules_are_nouns() -> None:
    names = {Path(file).stem if not file.endswith("__init__.py") else Path(file).parent.name for file, _ in _modules()}
    gerunds = {name for name in names if name.endswith("ing")} - NOT_GERUNDS
    assert not gerunds, f"a module is a noun: {sorted(gerunds)}"
    assert not names & FORBIDDEN_MODULES, sorted(names & FORBIDDEN_MODULES)
