"""Who reads a message on a terminal or over HTTP is told commands and requests, not calls of Python."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import ragfence
from ragfence import errors
from ragfence.cli import output
from ragfence.cli.app import app
from ragfence.errors import Hint, RagfenceError, hint_on
from ragfence.stores.checkups.check import fail
from ragfence.wire.problems import ERRORS, REFUSALS, problem_of

PACKAGE = Path(ragfence.__file__).parent

PYTHON = re.compile(
    r"\b(?:fence|client|ragfence|documents|op|lease)\.[a-z_.]+\(|\bragfence\.(?:open|errors|Document|Operation)\b"
    r"|\b(?:str|int|sorted|lambda|check|build|verify|settle|using|swap|ingest|ingest_many|embed)\("
    r"|(?<![?&])\b[a-z_]+=(?:True|False|None|\.\.\.|[\[{'\"(])|\b[a-z_]{3,}=(?=[\s,;:)]|$)|(?<!-)\bNone\b|\bTrue\b|\bpathlib\b"
)
"""a call, an argument by its name, or a value that only Python has"""

ONLY_PYTHON = {
    "client/": "its callers write Python",
    "dagster/": "resources, assets and decorators",
    "testing/": "tests",
    "telemetry/": "listeners",
    "server/middleware.py": "the middleware of an application",
    "server/scopes.py": "a route without a scope is a mistake of ours",
    "core/json_values.py": "payloads and results; what JSON or the terminal gives is JSON already",
    "core/key_strategies.py": "functions that make keys",
    "core/payments.py": "functions that make keys",
    "documents/chunking/chunker.py": "chunkers",
    "documents/sinks/delivery.py": "sinks",
    "documents/sinks/sink.py": "sinks",
    "documents/sources/frameworks.py": "loaders",
    "engine/claim_block.py": "the block of a claim",
    "engine/leases.py": "the lease of an effect",
    "engine/once.py": "decorated functions",
    "engine/refusals.py": "claims of a caller's own",
    "engine/results.py": "results of effects",
    "fence.py": "the facade",
    "indexes/embedders/": "embedders of the caller's own",
    "webhooks/": "endpoints that an application declares",
}
OF_ARGUMENTS = {
    "pass session.connection(bind_arguments={'mapper': Model}), with a model of the outbox's database",
    "use ingest(document), or pass [document]",
    "use fence.documents.ingest(document), or pass [document]",
    "accept_loss needs repair=True",
    "verify(repair=True, accept_loss=True)",
    'for example kind="ticket"',
    "use solo=True exactly when there is no object store",
    "made with solo=True, but there is an object store",
    "made without solo=True, but there is no object store",
    "pass a ragfence.Document",
    "a document without metadata cannot get some later; pass metadata= to Document(...)",
}
"""said of an argument that only a Python program can give"""
NO_PYTHON = {
    'Bearer realm="ragfence"',
    "text/plain; version=0.0.4",
}


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every text that is no docstring, and not what a `Hint` says to Python only."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Hint":
            skipped |= {id(each) for each in ast.walk(node.args[0]) if any(word.arg == "cli" for word in node.keywords)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _said(root: Path) -> Iterator[tuple[str, str]]:
    """What is said to everybody: sentences, so texts with a space in them."""
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not name.startswith(tuple(ONLY_PYTHON)):
            for line, text in _texts(ast.parse(file.read_text())):
                if " " in text and text not in OF_ARGUMENTS | NO_PYTHON:
                    yield f"{name}:{line}", text


def test_no_text_that_a_terminal_may_show_speaks_python() -> None:
    found = [f"{place}: {text}" for place, text in _said(PACKAGE) if PYTHON.search(text) and not _is_code(text)]
    assert found == [], "give it as Hint(python, cli=...), or say in this test why only Python reads it"


def _is_code(text: str) -> bool:
    """SQL, Lua, SVG, regular expressions and the page of errors."""
    return bool(
        re.search(r"\b(?:SELECT|INSERT|PRAGMA|CREATE|DELETE FROM|substr)\b|^# Errors|<svg|<text|\(\?", text)
    ) or ("redis." in text or text.startswith("local "))


def test_the_test_above_knows_python_when_it_sees_it(tmp_path: Path) -> None:
    for text in (
        "call fence.hydrate() now",
        "allow it: take_over=True",
        "pass a pathlib.Path",
        "set the region or region=",
        "ragfence.open with objects",
        "pass str(X)",
        "it is None",
    ):
        assert PYTHON.search(text), text
    for text in ("run `ragfence verify --repair`", "?region=NAME", "POST /v1/builds", "set RAGFENCE_STORE=redis://h"):
        assert not PYTHON.search(text), text
    (tmp_path / "a.py").write_text('x = Hint("call fence.x()", cli="run `x`")\ny = f"call fence.y({x}) now"\n')
    assert {text for _, text in _said(tmp_path)} == {"run `x`", "call fence.y(X) now"}


def _kinds(kind: type[RagfenceError] = RagfenceError) -> Iterator[type[RagfenceError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _kinds(each)


@pytest.mark.parametrize("kind", list(dict.fromkeys(_kinds())), ids=lambda kind: kind.__name__)
def test_every_error_has_a_hint_for_each_surface(kind: type[RagfenceError], capsys: pytest.CaptureFixture[str]) -> None:
    error = pickle.loads(pickle.dumps(kind("something happened")))  # noqa: S301  # our own bytes
    output.print_error(error, as_json=False)
    output.print_error(error, as_json=True)
    told = capsys.readouterr()
    assert not PYTHON.search(told.err.replace("\n", " ")), told.err
    assert not PYTHON.search(told.out.replace("null", "")), told.out
    over_http = problem_of(error).hint
    assert not PYTHON.search(over_http)
    if "`ragfence" in over_http:
        assert "on the server" in over_http, over_http
    assert str(error).endswith(error.hint), "in Python the text is that of Python"


def test_problems_that_only_http_knows_speak_no_python() -> None:
    assert not [row.hint for row in REFUSALS.values() if PYTHON.search(row.hint)]
    assert not [row.title for row in ERRORS.values() if PYTHON.search(row.title)]


def test_a_hint_is_text_and_keeps_its_words_for_other_surfaces() -> None:
    hint = Hint("call it()", cli="run it", http="POST /it")
    assert (hint, hint_on("cli", hint), hint_on("http", hint)) == ("call it()", "run it", "POST /it")
    longer = pickle.loads(pickle.dumps(hint.after("now: ")))  # noqa: S301  # our own bytes
    assert (longer, longer.cli, longer.http) == ("now: call it()", "now: run it", "now: POST /it")
    assert hint_on("cli", "the same everywhere") == "the same everywhere"
    assert Hint("call it()", cli="run it").http == "run it"
    assert output.format_hint(fail("s", "t", hint).advice) == "run it"


def _commands(group: Any, name: str = "ragfence") -> Iterator[tuple[str, Any]]:
    yield name, group
    for each, command in getattr(group, "commands", {}).items():
        yield from _commands(command, f"{name} {each}")


def test_no_help_text_speaks_python() -> None:
    for name, command in _commands(typer.main.get_command(app)):
        texts = [command.help, command.epilog, *(getattr(each, "help", "") for each in command.params)]
        for text in filter(None, texts):
            assert not PYTHON.search(text), f"{name}: {text}"


def test_one_thing_is_not_told_in_the_plural() -> None:
    source = "\n".join(file.read_text() for file in sorted((PACKAGE / "cli").glob("*.py")))
    counted = re.findall(
        r"\{[^{}]+:,\} (?:[a-z]+ )?(?:document|snippet|row|object|segment|build|record|finding|key)s\b", source
    )
    verb_follows = {"{report.kept:,} documents", "{count:,} documents"}
    assert set(counted) <= verb_follows, "use output.pluralize"
    assert (output.pluralize(1, "document"), output.pluralize(1200, "index")) == ("1 document", "1,200 indexes")
