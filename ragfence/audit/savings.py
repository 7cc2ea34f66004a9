"""What did it save: effects that were not performed again, and characters and snippets that were not embedded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragfence.audit.ledger import Wanted
from ragfence.audit.queries import HOTTEST, _flagged
from ragfence.audit.row_reader import Rows
from ragfence.core.decision_rows import Phase

if TYPE_CHECKING:
    import pyarrow

    from ragfence.stores.objects import ObjectStore

TOOK_PER_DAY = 10_000
"""so many durations of a day are enough for a median"""


@dataclass(frozen=True, slots=True)
class KindSavings:
    kind: str
    performed: int
    """effects that were sealed"""
    saved: int
    """answers without an effect: replays, healed commits, moves to a known key"""
    effect_ms: int | None
    """the median from the first claim to the seal"""

    @property
    def share(self) -> float:
        asked = self.performed + self.saved
        return self.saved / asked if asked else 0.0

    @property
    def saved_ms(self) -> int:
        return self.saved * (self.effect_ms or 0)


@dataclass(frozen=True, slots=True)
class DaySavings:
    day: str
    performed: int
    saved: int
    characters: int
    snippets: int
    kinds: dict[str, int]
    """saved, by kind"""


@dataclass(frozen=True, slots=True)
class SourceSavings:
    kind: str
    source_id: str
    saved: int
    characters: int
    snippets: int


@dataclass(frozen=True, slots=True)
class Savings:
    kinds: tuple[KindSavings, ...]
    characters: int
    """of documents that were known, and so neither cut nor embedded again"""
    snippets: int
    """of these documents, as far as their rows are still in the log"""
    unknown_documents: int
    """answers with documents whose revision the log does not have any more; their snippets are not counted"""
    days: tuple[DaySavings, ...]
    sources: tuple[SourceSavings, ...]
    """the ten of each kind that saved most"""

    @property
    def performed(self) -> int:
        return sum(kind.performed for kind in self.kinds)

    @property
    def saved(self) -> int:
        return sum(kind.saved for kind in self.kinds)


def savings(rows: Rows, wanted: Wanted, objects: ObjectStore | None, tenant: str) -> Savings:
    names = ["kind", "decision", "phase", "flags", "sealed_at", "first_seen", "saved", "idempotency_key", "source_id"]
    days = rows.by_day(wanted, names, _saved_in)
    performed, saved = Counter[str](), Counter[str]()
    took: dict[str, list[int]] = {}
    for day in days.values():
        performed.update(day.performed)
        saved.update(day.saved)
        for kind, each in day.took.items():
            took.setdefault(kind, []).extend(each)
    answers = {name: day.answers for name, day in days.items()}
    lengths = _lengths(_documents(answers.values()), objects, tenant)
    cut = {name: _with_snippets(table, lengths) for name, table in answers.items()}
    told = tuple(
        DaySavings(
            name,
            sum(day.performed.values()),
            sum(day.saved.values()),
            _sum(cut[name], "characters"),
            _sum(cut[name], "snippets"),
            day.saved,
        )
        for name, day in days.items()
    )
    return Savings(
        kinds=tuple(
            KindSavings(kind, performed[kind], saved[kind], _middle(took.get(kind, [])))
            for kind in sorted({*performed, *saved})
        ),
        characters=sum(day.characters for day in told),
        snippets=sum(day.snippets for day in told),
        unknown_documents=sum(_sum(table, "unknown") for table in cut.values()),
        days=told,
        sources=_best_sources(list(cut.values())),
    )


@dataclass(frozen=True, slots=True)
class _Saved:
    performed: dict[str, int]
    saved: dict[str, int]
    took: dict[str, list[int]]
    answers: pyarrow.Table
    """by kind, source_id and key: how many without an effect, of how many documents, with how many characters"""


def _saved_in(table: pyarrow.Table) -> _Saved:
    import pyarrow as pa
    import pyarrow.compute as pc

    decision, sealed = table.column("decision"), pc.is_valid(table.column("sealed_at"))
    sealing = pc.and_(pc.equal(table.column("phase"), Phase.SEAL.value), sealed)
    news = table.filter(pc.and_(pc.equal(decision, "new"), sealing))
    answered = table.filter(pc.and_(pc.equal(decision, "duplicate"), pc.invert(_flagged(table, "fenced_out"))))
    sample = news.slice(0, TOOK_PER_DAY)
    took: dict[str, list[int]] = {}
    spans = pc.subtract(sample.column("sealed_at").cast(pa.int64()), sample.column("first_seen").cast(pa.int64()))
    for kind, span in zip(sample.column("kind").to_pylist(), spans.to_pylist(), strict=True):
        took.setdefault(kind or "", []).append(span or 0)
    by = ["kind", "source_id", "idempotency_key"]
    answers = answered.group_by(by).aggregate([([], "count_all"), ("saved", "count"), ("saved", "sum")])
    named = answers.select([*by, "count_all", "saved_count", "saved_sum"])
    return _Saved(
        _counted(news, "kind"),
        _counted(answered, "kind"),
        took,
        named.rename_columns([*by, "answers", "documents", "characters"]),
    )


def _documents(answers: Iterable[pyarrow.Table]) -> set[str]:
    """The keys among these answers that are documents', and so have snippets."""
    import pyarrow.compute as pc

    found: set[str] = set()
    for table in answers:
        found.update(table.column("idempotency_key").filter(pc.greater(table.column("documents"), 0)).to_pylist())
    return found


def _lengths(documents: set[str], objects: ObjectStore | None, tenant: str) -> dict[str, int]:
    """How many snippets each of these keys has, as far as the log of documents knows it."""
    if not documents or objects is None:
        return {}
    import pyarrow.compute as pc

    from ragfence.documents.parquet import fixed_values, read_table
    from ragfence.engine.epochs import Epochs

    lengths: dict[str, int] = {}
    for name in Epochs(tenant, objects).truth():
        if (data := objects.get(name)) is None:
            continue  # a compaction or a purge has begun a new epoch; what it kept is counted, what it dropped is not
        table = read_table(name, data, "rows", ["key", "snippet_ids"])
        made = pc.list_value_length(table.column("snippet_ids")).to_pylist()
        for key, length in zip(fixed_values(table, "key"), made, strict=True):
            if (text := key.hex()) in documents:
                lengths[text] = max(lengths.get(text, 0), length or 0)
    return lengths


def _with_snippets(answers: pyarrow.Table, lengths: dict[str, int]) -> pyarrow.Table:
    """With the snippets that the answers stood for, and how many of them were documents that the log does not know."""
    import pyarrow as pa

    keys, counts = answers.column("idempotency_key").to_pylist(), answers.column("documents").to_pylist()
    pairs = list(zip(keys, counts, strict=True))
    snippets = pa.array([lengths.get(key, 0) * count for key, count in pairs], pa.int64())
    unknown = pa.array([0 if key in lengths else count for key, count in pairs], pa.int64())
    return answers.append_column("snippets", snippets).append_column("unknown", unknown)


def _best_sources(tables: list[pyarrow.Table]) -> tuple[SourceSavings, ...]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not tables:
        return ()
    names = ["answers", "characters", "snippets"]
    summed = pa.concat_tables(tables).group_by(["kind", "source_id"]).aggregate([(name, "sum") for name in names])
    ranked = summed.sort_by(
        [("characters_sum", "descending"), ("answers_sum", "descending"), ("source_id", "ascending")]
    )
    best = []
    for kind in sorted(pc.unique(ranked.column("kind")).to_pylist(), key=lambda kind: kind or ""):
        same = pc.equal(ranked.column("kind"), kind) if kind is not None else pc.is_null(ranked.column("kind"))
        for each in ranked.filter(same).slice(0, HOTTEST).to_pylist():
            counts = [each[f"{name}_sum"] or 0 for name in names]
            best.append(SourceSavings(kind or "", each["source_id"] or "", *counts))
    return tuple(best)


def _counted(table: pyarrow.Table, name: str) -> dict[str, int]:
    import pyarrow.compute as pc

    return {each["values"] or "": each["counts"] for each in pc.value_counts(table.column(name)).to_pylist()}


def _sum(table: pyarrow.Table, name: str) -> int:
    import pyarrow.compute as pc

    return pc.sum(table.column(name)).as_py() or 0


def _middle(values: list[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None
