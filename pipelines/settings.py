"""Where the code location finds its documents and golden queries.

RAGFENCE_DEMO_SOURCE    a folder, a .jsonl file or s3://bucket/prefix instead of the demo's corpus
RAGFENCE_DEMO_GOLDEN    golden queries for that source; those in this folder only fit the manual in the demo's corpus

RAGFENCE_STORE and RAGFENCE_OBJECTS name the stores, as everywhere. Without them the state is under `.ragfence/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus import ensure_corpus, has_manual

CORPUS = Path(".ragfence") / "demo" / "corpus"
"""Under the working folder, like any embedded state. The first run that reads it writes it; an import never does."""
GOLDEN = Path(__file__).resolve().parent / "golden.jsonl"
ALIAS = "docs"
MIN_RECALL = 0.9

SOURCE_VARIABLE = "RAGFENCE_DEMO_SOURCE"
GOLDEN_VARIABLE = "RAGFENCE_DEMO_GOLDEN"


@dataclass(frozen=True, slots=True)
class Where:
    named: str
    """The source named by the environment. Empty: the demo's corpus."""
    golden: str
    """A file. Empty: there are no golden queries for these documents."""
    corpus: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Where:
        env = os.environ if environ is None else environ
        named, corpus = env.get(SOURCE_VARIABLE, "").strip(), Path.cwd() / CORPUS
        golden = env.get(GOLDEN_VARIABLE, "").strip()
        if not golden and not named and has_manual(corpus):
            golden = str(GOLDEN)
        return cls(named, golden, corpus)

    def source(self) -> str:
        """The source for `sync`. Writes the demo's corpus if it does not exist."""
        return self.named or str(ensure_corpus(self.corpus))
