"""Where the code location finds its documents and its golden queries: the bundled corpus, or what the environment says.

RAGFENCE_DEMO_SOURCE    a folder, a .jsonl file or s3://bucket/prefix instead of the bundled corpus
RAGFENCE_DEMO_GOLDEN    golden queries for it; those that are bundled fit the bundled corpus alone

Where the state is, RAGFENCE_STORE and RAGFENCE_OBJECTS say, as everywhere: without them `.ragfence/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus" / "django"
GOLDEN = HERE / "golden.jsonl"
ALIAS = "docs"
MIN_RECALL = 0.9

SOURCE_VARIABLE = "RAGFENCE_DEMO_SOURCE"
GOLDEN_VARIABLE = "RAGFENCE_DEMO_GOLDEN"


@dataclass(frozen=True, slots=True)
class Where:
    source: str
    golden: str
    """a file; empty: there are no golden queries for these documents"""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Where:
        env = os.environ if environ is None else environ
        source = env.get(SOURCE_VARIABLE, "").strip()
        golden = env.get(GOLDEN_VARIABLE, "").strip() or ("" if source else str(GOLDEN))
        return cls(source or str(CORPUS), golden)
