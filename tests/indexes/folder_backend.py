"""A backend that is small enough to be believed: an Arrow file for each physical index, and brute force.

Its files are in a folder, so many processes may use it at once, and a test can lose rows or whole indexes behind its
back. Every drop leaves a line in `drops`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from ragfence.errors import BuildMissing, StoreUnavailable, ValidationError
from ragfence.indexes.backends.backend import PAYLOAD, PREFIX, FoundRow, Pointer, Shape, row_schema


class FolderBackend:
    name = "folder"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pointers").mkdir(parents=True, exist_ok=True)
        self.away = False
        """it answers nothing"""
        self.searches = 0

    @property
    def url(self) -> str:
        return f"folder:{self.folder}"

    def check(self, shape: Shape) -> None:
        if shape.index != "flat":
            raise ValidationError("a folder is flat")

    def approximate(self, rows: int, dimension: int) -> None:
        return None

    def write(self, physical: str, shape: Shape, tables: Iterable[Any]) -> int:
        if self.exists(physical):
            raise ValidationError(f"{physical} exists")
        rows = 0
        part = self.folder / f"part-{os.getpid()}-{physical}"
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, row_schema(shape.dimension)) as writer:
            for table in tables:
                writer.write_table(table)
                rows += table.num_rows
        part.rename(self._file(physical))
        return rows

    def finish(self, physical: str, shape: Shape) -> None:
        pass

    def exists(self, physical: str) -> bool:
        self._answer()
        return self._file(physical).exists()

    def count(self, physical: str) -> int:
        return int(self._table(physical).num_rows)

    def read(self, physical: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        table = self._table(physical)
        yield table.select(list(columns)) if columns is not None else table

    def remove(self, physical: str, doc_ids: Sequence[str]) -> None:
        raise NotImplementedError

    def search(self, physical: str, vector: Any, k: int) -> list[FoundRow]:
        self.searches += 1
        table = self._table(physical)
        matrix = np.stack([np.asarray(row, dtype=np.float32) for row in table.column("vector").to_pylist()])
        scores = matrix @ np.asarray(vector, dtype=np.float32)
        rows = table.select(list(PAYLOAD)).to_pylist()
        best = sorted(range(len(rows)), key=lambda at: (-scores[at], rows[at]["snippet_id"]))[:k]
        return [FoundRow(**rows[at], score=float(scores[at])) for at in best]

    def drop(self, physical: str) -> None:
        self._answer()
        self._file(physical).unlink(missing_ok=True)
        with (self.folder / "drops").open("a") as drops:
            drops.write(f"{physical}\n")

    def physicals(self) -> list[str]:
        self._answer()
        return sorted(file.stem for file in self.folder.glob(f"{PREFIX}*.arrow"))

    def point(self, alias: str, physical: str, generation: int) -> None:
        if not self.exists(physical):
            raise BuildMissing(f"{physical} is not there")
        known = self.pointer(alias)
        if known is not None and known.generation is not None and known.generation > generation:
            return
        part = self.folder / "pointers" / f".{alias}-{os.getpid()}-{generation}"
        part.write_text(json.dumps([physical, generation]))
        part.rename(self.folder / "pointers" / alias)

    def pointer(self, alias: str) -> Pointer | None:
        self._answer()
        try:
            return Pointer(*json.loads((self.folder / "pointers" / alias).read_text()))
        except FileNotFoundError:
            return None

    def unpoint(self, alias: str) -> None:
        self._answer()
        (self.folder / "pointers" / alias).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def drops(self) -> list[str]:
        file = self.folder / "drops"
        return file.read_text().splitlines() if file.exists() else []

    def lose(self, physical: str, rows: int) -> None:
        """Rows get lost behind everybody's back."""
        table = self._table(physical)
        self._file(physical).unlink()
        self.write(physical, Shape(table.schema.field("vector").type.list_size), [table.slice(rows)])

    def _file(self, physical: str) -> Path:
        return self.folder / f"{physical}.arrow"

    def _table(self, physical: str) -> Any:
        self._answer()
        try:
            # Read whole, not mapped: a drop takes the file away under its reader.
            return pa.ipc.open_file(pa.BufferReader(self._file(physical).read_bytes())).read_all()
        except FileNotFoundError:
            raise BuildMissing(f"{physical} is not there") from None

    def _answer(self) -> None:
        if self.away:
            raise StoreUnavailable("the folder is away")


class WordEmbedder:
    """A vector of the words of a text: texts with the same words are near each other."""

    normalised = True

    def __init__(self, revision: str = "1", dimension: int = 64) -> None:
        self.name, self.revision, self.dimension = "words", revision, dimension

    def embed(self, texts: Sequence[str]) -> Any:
        made = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for at, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                spot = sum(ord(letter) * 31**place for place, letter in enumerate(word + self.revision))
                made[at, spot % self.dimension] += 1
        norms = np.linalg.norm(made, axis=1, keepdims=True)
        return made / np.where(norms == 0, 1, norms)
