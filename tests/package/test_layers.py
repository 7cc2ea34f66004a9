"""Arrows point one way only: core <- stores <- engine <- guards <- surfaces.

Every import counts: at the top, inside functions, under TYPE_CHECKING, relative, and by name through `import_module`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ragfence

ROOT = Path(ragfence.__file__).parent

# Lowest first. A module may import its own layer and those below it. A new module of the package gets its layer here.
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("base", frozenset({"errors", "_extras", "_progress", "_version"})),
    ("core", frozenset({"core"})),
    ("stores", frozenset({"stores"})),
    ("engine", frozenset({"engine"})),
    # `wire` imports less than any guard does (see NARROW): what a document looks like in a request, or in a message.
    ("guards", frozenset({"documents", "indexes", "outbox", "queues", "steps", "webhooks", "wire"})),
    (
        "surfaces",
        frozenset(
            (
                "__init__",
                "__main__",
                "_open",
                "audit",
                "cli",
                "client",
                "console",
                "dagster",
                "fence",
                "langchain",
                "llamaindex",
                "notify",
                "ray",
                "server",
                "telemetry",
                "testing",
            )
        ),
    ),
)
STILL_TO_COME = frozenset({"console", "langchain", "llamaindex", "ray"})
"""Modules that are planned: their layer is decided, so that the first import already points the right way."""
LAYER_OF = {module: at for at, (_, modules) in enumerate(LAYERS) for module in modules}

# The core is pure: beyond the standard library it may load only what computes.
CORE_MAY_IMPORT = frozenset({"jsonpatch", "pydantic", "xxhash", "yaml"})
EXCEPTIONS = {
    # RE2, the one engine for regular expressions that strangers cannot make slow, comes with Arrow; loaded only for
    # a policy that has such an expression.
    ("core/secret_patterns.py", "pyarrow"),
    ("core/secret_patterns.py", "pyarrow.compute"),
    # A type parameter with a default, for type checkers alone; comes with pydantic.
    ("core/receipts.py", "typing_extensions"),
}


# Narrower than their layer: a program that only sends documents to a server loads neither stores nor engine.
NARROW: dict[str, frozenset[str]] = {
    "wire": frozenset({"wire", "core", "errors"}),
    "client": frozenset({"client", "wire", "core", "errors", "_extras", "_progress", "_version"}),
}
NARROW_EXCEPTIONS = {
    # Only when `load` is called: it reads what `documents.sync` reads.
    ("client/batches.py", "ragfence.documents.sources"),
}
CLIENT_MODULES = 30
"""`from ragfence.client import Client` loads fewer modules of the package."""


class Import(NamedTuple):
    file: str
    line: int
    name: str
    """dotted; for `from a import b` both `a` and `a.b`, whichever is a module"""


def imports_of(file: str, source: str) -> Iterator[Import]:
    """What the file (its path within the package) imports, in whatever way."""
    parts = ["ragfence", *Path(file).with_suffix("").parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*parts[: -node.level], *filter(None, [node.module])))
            for alias in node.names:
                # `from ragfence import errors` means the module; `from ragfence.core.hashing import digest` does not.
                yield Import(file, node.lineno, f"{base}.{alias.name}" if base == "ragfence" else base)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # import_module("ragfence.stores.redis.store"), or a table of such names
            top, _, inside = node.value.partition(".")
            if top == "ragfence" and inside and _is_module(inside.replace(".", "/")):
                yield Import(file, node.lineno, node.value)


def faults_in(found: Import) -> Iterator[str]:
    own = Path(found.file).parts[0].removesuffix(".py")
    if own not in LAYER_OF:
        yield f"{found.file}: {own!r} is in no layer; say in LAYERS where it belongs"
        return
    top, *rest = found.name.split(".")
    if top != "ragfence":
        pure = own in ("core", "errors", "_extras", "_version")
        known = top in sys.stdlib_module_names or top in CORE_MAY_IMPORT or (found.file, found.name) in EXCEPTIONS
        if pure and not known:
            yield f"{found.file}:{found.line}: the core must not import {found.name}"
        return
    target = rest[0] if rest else "__init__"
    if target not in LAYER_OF:
        target = "__init__" if not _is_module(target) else target
    if target not in LAYER_OF:
        yield f"{found.file}:{found.line}: imports {found.name}, which is in no layer; say in LAYERS where it belongs"
    elif own in NARROW and target not in NARROW[own] and (found.file, found.name) not in NARROW_EXCEPTIONS:
        yield f"{found.file}:{found.line}: {own} must not import {found.name}"
    elif LAYER_OF[target] > LAYER_OF[own]:
        below, above = LAYERS[LAYER_OF[own]][0], LAYERS[LAYER_OF[target]][0]
        yield f"{found.file}:{found.line}: {below} must not import {found.name}, which is in {above}"


def _is_module(path: str) -> bool:
    return (ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file()


def _sources() -> Iterator[tuple[str, str]]:
    for file in sorted(ROOT.rglob("*.py")):
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def test_no_import_points_upwards() -> None:
    faults = [fault for file, source in _sources() for found in imports_of(file, source) for fault in faults_in(found)]
    assert not faults, "\n".join(faults)


def test_every_module_of_the_package_is_in_one_layer() -> None:
    there = {Path(file).parts[0].removesuffix(".py") for file, _ in _sources()}
    assert there | STILL_TO_COME == set(LAYER_OF), "say in LAYERS where a new module belongs"
    assert not there & STILL_TO_COME, "a module that is there is no longer to come"
    assert len(LAYER_OF) == sum(len(modules) for _, modules in LAYERS)


def test_every_exception_is_still_needed() -> None:
    used = {(found.file, found.name) for file, source in _sources() for found in imports_of(file, source)}
    assert used >= EXCEPTIONS | NARROW_EXCEPTIONS


def test_the_client_loads_few_modules() -> None:
    program = (
        "import sys; from ragfence.client import Client; print(*(m for m in sys.modules if m.startswith('ragfence')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded) < CLIENT_MODULES, "\n".join(sorted(loaded))
    assert {name.split(".")[1] for name in loaded if "." in name} <= NARROW["client"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/keys.py", "import ragfence.stores"),
        ("core/keys.py", "from ragfence.stores.fences import Lookup"),
        ("core/keys.py", "from ragfence import engine"),
        ("core/keys.py", "from ragfence import open"),
        ("core/keys.py", "import ragfence"),
        ("core/keys.py", "from ..stores import fences"),
        ("core/deep/keys.py", "from ...stores.fences import Lookup"),
        ("core/keys.py", "def lazily():\n    from ragfence.engine.leases import Lease"),
        ("core/keys.py", "if TYPE_CHECKING:\n    from ragfence.fence import Fence"),
        ("core/keys.py", "import_module('ragfence.stores.redis.store')"),
        ("core/keys.py", "import redis"),
        ("core/keys.py", "from pyarrow import Table"),
        ("core/keys.py", "def lazily():\n    import boto3.session"),
        ("errors.py", "from ragfence.core.hashing import digest"),
        ("errors.py", "import pydantic_settings"),
        ("stores/fences_new.py", "from ragfence.engine import crash_points"),
        ("stores/fences_new.py", "from ragfence.testing.clock import VirtualClock"),
        ("wire/schemas.py", "from ragfence.server.responses import replay"),
        ("wire/schemas.py", "from ragfence.documents.claims import ANY"),
        ("client/calls.py", "from ragfence.indexes.spec import IndexSpec"),
        ("client/calls.py", "def lazily():\n    from ragfence.documents.sources import source_of"),
        ("engine/runner.py", "from ragfence.audit import check"),
        ("engine/runner.py", "from ragfence._open import open"),
        ("engine/runner.py", "from ragfence.unheard_of import thing"),
        ("outbox/relay.py", "from ragfence.server.app import create_app"),
        ("steps/steps.py", "from ragfence.fence import Fence"),
        ("queues/consumer.py", "import ragfence.langchain"),
        ("wire/schemas.py", "from ragfence.engine.leases import Lease"),
        ("unheard_of.py", "import os"),
        ("unheard_of/deep.py", "import os"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert [fault for found in imports_of(file, source) for fault in faults_in(found)]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/keys.py", "from ragfence.errors import Stale\nfrom ragfence import errors\nimport os, pydantic, xxhash"),
        ("core/keys.py", "from .hashing import digest\nfrom ..errors import Stale\nfrom . import hashing"),
        ("core/keys.py", '"""See ragfence.stores for more."""\nx = ["ragfence/stores", "ragfence.yml"]'),
        ("stores/fences_new.py", "import redis\nfrom ragfence.core import hashing\nfiles('ragfence.stores')"),
        ("engine/runner.py", "from ragfence.stores.fences import Lookup\nfrom ragfence.engine import crash_points"),
        ("client/calls.py", "from ragfence.wire.schemas import BuildIn\nfrom ragfence.core.document import Document"),
        ("fence.py", "from ragfence.audit.audit import Audit\nfrom ragfence import errors, open"),
        ("langchain/store.py", "from ragfence.fence import Fence\nfrom ragfence.steps.steps import Steps"),
        ("outbox/relay.py", "from ragfence.engine.claim_block import ClaimBlock"),
        ("testing/faults.py", "import pytest\nfrom ragfence.engine import crash_points"),
    ],
)
def test_an_import_that_points_down_is_fine(file: str, source: str) -> None:
    assert not [fault for found in imports_of(file, source) for fault in faults_in(found)]
