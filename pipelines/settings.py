"""Where the code location finds its documents and its golden queries: the demo's corpus, or what the environment says.

RAGFENCE_DEMO_SOURCE    a folder, a .jsonl file or s3://bucket/prefix instead of the demo's corpus
RAGFENCE_DEMO_GOLDEN    golden queries for it; those in this folder fit the manual in the demo's corpus alone

Where the state is, RAGFENCE_STORE and RAGFENCE_OBJECTS say, as everywhere: without them `.ragfence/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus import ensure_corpus, has_manual

CORPUS = Path(".ragfence") / "demo" / "corpus"
"""under the working folder, as any embedded state; written by the first run that reads it, never at import"""
GOLDEN = Path(__file__).resolve().parent / "golden.jsonl"
ALIAS = "docs"
MIN_RECALL = 0.9

SOURCE_VARIABLE = "RAGFENCE_DEMO_SOURCE"
GOLDEN_VARIABLE = "RAGFENCE_DEMO_GOLDEN"


@dataclass(frozen=True, slots=True)
class Where:
    named: str
    """the source that the environment names; empty: the demo's corpus"""
    golden: str
    """a file; empty: there are no golden queries for these documents"""
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
        """What `sync` is given. The demo's corpus is written here, unless it was before."""
        return self.named or str(ensure_corpus(self.corpus))
