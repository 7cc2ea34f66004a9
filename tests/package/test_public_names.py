"""What users import: the names, what they load, and the errors."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragfence
import ragfence.testing
from ragfence import errors
from ragfence.core.receipts import Receipt
from ragfence.errors import RagfenceError

NAMES = [
    "Decision",
    "Document",
    "Fence",
    "Flags",
    "IndexSpec",
    "Operation",
    "Policy",
    "Receipt",
    "Recovered",
    "__version__",
    "by_fields",
    "by_id",
    "by_id_and_fields",
    "by_payment_confirmation",
    "by_payment_request",
    "compare_keys",
    "current_lease",
    "errors",
    "open",
]
TESTING_NAMES = [
    "HYDRATION_POINTS",
    "OPERATION_POINTS",
    "FaultyFences",
    "FaultyObjects",
    "FenceStoreContract",
    "FencesUnderTest",
    "MemoryFences",
    "MemoryObjects",
    "ObjectStoreContract",
    "VirtualClock",
    "at_point",
    "freeze_at",
    "kill_at",
]
HEAVY = ("boto3", "botocore", "dagster", "lancedb", "pyarrow", "redis")


@pytest.mark.parametrize(("module", "names"), [(ragfence, NAMES), (ragfence.testing, TESTING_NAMES)])
def test_the_public_names_are_these_and_all_of_them_are_there(module: object, names: list[str]) -> None:
    assert module.__all__ == names  # type: ignore[attr-defined]
    assert dir(module) == sorted(names)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        "import ragfence",
        "import ragfence; [getattr(ragfence, name) for name in ragfence.__all__]",
        """
        import ragfence
        with ragfence.open() as fence:
            double = fence.once(kind="double", key=lambda n: str(n))(lambda n: 2 * n)
            assert (double(2).result, double(2).decision) == (4, "duplicate")
        """,
    ],
    ids=["import", "every name", "open and once"],
)
def test_what_is_embedded_loads_no_backend(code: str, tmp_path: Path) -> None:
    assert _loaded_by(code, tmp_path) & set(HEAVY) == set()


def test_a_backend_is_seen_when_it_is_loaded(tmp_path: Path) -> None:
    assert "redis" in _loaded_by("import ragfence.stores.redis.store", tmp_path)


def test_only_the_contracts_of_testing_load_pytest(tmp_path: Path) -> None:
    contracts = {"FenceStoreContract", "FencesUnderTest", "ObjectStoreContract"}
    rest = [f"ragfence.testing.{name}" for name in TESTING_NAMES if name not in contracts]
    assert _loaded_by(f"import ragfence.testing; {'; '.join(rest)}", tmp_path) & {"pytest", *HEAVY} == set()
    assert "pytest" in _loaded_by("from ragfence.testing import ObjectStoreContract", tmp_path)


def test_the_example_in_the_docstring_of_testing_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = (ragfence.testing.__doc__ or "").split("contracts.\n")
    example, _ = text.split("What there is:")
    tickets: list[object] = []
    scope = {"ragfence": ragfence, "tickets": tickets, "create_ticket": tickets.append}
    exec(textwrap.dedent(example), scope)
    scope["test_a_lost_reply_creates_no_second_ticket"]()  # type: ignore[operator]
    assert tickets == [{"id": "r1"}]


def _classes() -> list[type[RagfenceError]]:
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RagfenceError)]


def _drawn() -> Iterator[tuple[str, str | None]]:
    """(class, parent) of each line of the tree in the docstring."""
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ((?:[| +-])*)([A-Z]\w+)  +\S", line):
            depth, name = len(found[1]), found[2]
            while above and above[-1][0] >= depth:
                above.pop()
            yield name, above[-1][1] if above else None
            above.append((depth, name))


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in _classes()]
    assert sorted(codes) == sorted(set(codes))
    for code in codes:
        assert re.fullmatch(r"[A-Z_]+(\.[a-z_]+)*", code), code


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = list(_drawn())
    names = {kind.__name__ for kind in _classes()}
    real = {
        kind.__name__: next((base.__name__ for base in kind.__bases__ if base.__name__ in names), None)
        for kind in _classes()
    }
    assert dict(drawn) == real
    assert len(drawn) == len(real)


def test_every_error_is_transient_or_terminal() -> None:
    for kind in set(_classes()) - {RagfenceError}:
        assert issubclass(kind, errors.TransientError) != issubclass(kind, errors.TerminalError), kind
        assert kind.retryable == issubclass(kind, errors.TransientError), kind


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_every_error_survives_a_process_boundary_with_its_details(kind: type[RagfenceError]) -> None:
    details = {name: f"the {name}" for name in kind.carries} | {"receipt": Receipt("key", "ef_1"), "else": [1]}
    raised = kind("what happened", hint="what to do", **details)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copied = pickle.loads(pickle.dumps(raised, protocol))  # noqa: S301  # our own bytes
        assert type(copied) is kind
        assert (copied.message, copied.hint, copied.details) == ("what happened", "what to do", details)
        assert (str(copied), copied.args) == (str(raised), raised.args)
        for name in kind.carries:
            assert getattr(copied, name) == details[name]


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_every_error_tells_its_code_and_what_to_do(kind: type[RagfenceError]) -> None:
    assert kind.code in str(kind("what happened"))
    assert "-> what to do" in str(kind("what happened", hint="what to do"))
    bare = kind()
    assert kind.__name__ in str(bare)
    assert {getattr(bare, name) for name in kind.carries} == {None}
    with pytest.raises(AttributeError):
        _ = bare.nonsense


def _loaded_by(code: str, folder: Path) -> set[str]:
    """The top-level modules a new interpreter has after this code."""
    told = subprocess.run(
        [sys.executable, "-c", f"{textwrap.dedent(code)}\nimport sys; print(*sys.modules)"],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAGFENCE_", "COV"))},
            "PYTHONPATH": str(Path(ragfence.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return {name.partition(".")[0] for name in told.stdout.split()}
