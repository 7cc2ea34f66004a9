"""The folder that `make demo` and `make ui` share: stores, the corpus, and Dagster's own records."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipelines.corpus import Corpus, write_corpus
from pipelines.settings import CORPUS, GOLDEN_VARIABLE, SOURCE_VARIABLE

FOLDER = CORPUS.parent
LEASE_S = 3.0

# Dagster's telemetry is off only if both the environment variable and the file say so.
_DAGSTER_YAML = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
# Short leases, so that the demo does not wait half a minute for the lease of a killed process.
_POLICY = f"lease:\n  ttl_s: {LEASE_S}\n"


@dataclass(frozen=True, slots=True)
class State:
    folder: Path

    @classmethod
    def here(cls) -> State:
        return cls(Path.cwd() / FOLDER)

    @property
    def corpus(self) -> Path:
        return self.folder / CORPUS.name

    @property
    def vectors(self) -> tuple[Path, ...]:
        """The folders of the vectors. Where embedding took more than a second, vectors are stored in parts instead."""
        objects = self.folder / "objects" / "objects" / "default"
        return objects / "vectors", objects / "vectors-parts"

    def begin(self) -> Corpus:
        """Deletes the state of an earlier demo, which has edited some documents, and writes the corpus again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.prepare()
        return write_corpus(self.corpus)

    def prepare(self) -> None:
        (self.folder / "dagster").mkdir(parents=True, exist_ok=True)
        (self.folder / "dagster" / "dagster.yaml").write_text(_DAGSTER_YAML)
        (self.folder / "ragfence.yml").write_text(_POLICY)

    def quiet_dagster(self) -> None:
        os.environ["DAGSTER_HOME"] = str(self.folder / "dagster")
        os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"

    def enter(self) -> None:
        """Makes this process and its children use this state, whatever the environment was before."""
        self.quiet_dagster()
        for name in ("RAGFENCE_OBJECTS", "RAGFENCE_TENANT"):
            os.environ.pop(name, None)
        os.environ["RAGFENCE_STORE"] = str(self.folder)
        os.environ["RAGFENCE_POLICY"] = str(self.folder / "ragfence.yml")
        self.use_corpus()

    def use_corpus(self) -> None:
        """Makes the code location read the corpus of the demo, which is its default."""
        for name in (SOURCE_VARIABLE, GOLDEN_VARIABLE):
            os.environ.pop(name, None)
