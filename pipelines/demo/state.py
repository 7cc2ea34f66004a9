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

# Neither variable nor file alone stops all of Dagster's telemetry.
_DAGSTER_YAML = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
# Short leases, so that nobody has to wait half a minute for what a killed process held.
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
        """As wholes and, where embedding took more than a second, as parts: never the same vector in both."""
        objects = self.folder / "objects" / "objects" / "default"
        return objects / "vectors", objects / "vectors-parts"

    def begin(self) -> Corpus:
        """From nothing, whatever an earlier demo has left: it has edited some of the documents."""
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
        """This process and its children work on this state, whatever the environment said before."""
        self.quiet_dagster()
        for name in ("RAGFENCE_OBJECTS", "RAGFENCE_TENANT"):
            os.environ.pop(name, None)
        os.environ["RAGFENCE_STORE"] = str(self.folder)
        os.environ["RAGFENCE_POLICY"] = str(self.folder / "ragfence.yml")
        self.use_corpus()

    def use_corpus(self) -> None:
        """Which is what the code location reads unless the environment says otherwise."""
        for name in (SOURCE_VARIABLE, GOLDEN_VARIABLE):
            os.environ.pop(name, None)
