"""Savings: effects that did not run again, and characters and snippets that were not embedded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragfence.audit.ledger import RowQuery
from ragfence.audit.queries import HOTTEST, has_flag
from ragfence.audit.row_reader import RowReader
from ragfence.core.decision_rows import Phase

if TYPE_CHECKING:
    import pyarrow

    from ragfence.stores.objects import ObjectStore

TOOK_PER_DAY = 10_000
"""durations of a day that are enough for a median"""


@dataclass(frozen=True, slots=True)
class KindSavings:
    kind: str
    performed: int
    """effects that were sealed"""
    saved: int
    """answers without an effect: replays, healed commits, and moves to a known key"""
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
    """answers without an effect, by kind"""


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
    """of known documents, which were not split and embedded again"""
    snippets: int
    """of these documents, if their rows are still in the log"""
    unknown_documents: int
    """answers with documents whose revision is not in the log any more; their snippets are not counted"""
    days: tuple[DaySavings, ...]
    sources: tuple[SourceSavings, ...]
    """the ten sources of each kind that saved most"""

    @property
    def performed(self) -> int:
        return sum(kind.performed for kind in self.kinds)

    @property
    def saved(self) -> int:
        return sum(kind.saved for kind in self.kinds)


def savings(rows: RowReader, query: RowQuery, objects: ObjectStore | None, tenant: str) -> Savings:
    names = ["kind", "decision", "phase", "flags", "sealed_at", "first_seen", "saved", "idempotency_key", "source_id"]
    days = rows.map_days(query, names, _day_figures)
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
    per_day = tuple(
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
            KindSavings(kind, performed[kind], saved[kind], _median(took.get(kind, [])))
            for kind in sorted({*performed, *saved})
        ),
        characters=sum(day.characters for day in per_day),
        snippets=sum(day.snippets for day in per_day),
        unknown_documents=sum(_sum(table, "unknown") for table in cut.values()),
        days=per_day,
        sources=_best_sources(list(cut.values())),
    )


@dataclass(frozen=True, slots=True)
class _DayFigures:
    performed: dict[str, int]
    saved: dict[str, int]
    took: dict[str, list[int]]
    answers: pyarrow.Table
    """by kind, source_id and key: counts of answers without an effect, of their documents and characters"""


def _day_figures(table: pyarrow.Table) -> _DayFigures:
    import pyarrow as pa
    import pyarrow.compute as pc

    decision, sealed = table.column("decision"), pc.is_valid(table.column("sealed_at"))
    sealing = pc.and_(pc.equal(table.column("phase"), Phase.SEAL.value), sealed)
    news = table.filter(pc.and_(pc.equal(decision, "new"), sealing))
    answered = table.filter(pc.and_(pc.equal(decision, "duplicate"), pc.invert(has_flag(table, "fenced_out"))))
    sample = news.slice(0, TOOK_PER_DAY)
    took: dict[str, list[int]] = {}
    spans = pc.subtract(sample.column("sealed_at").cast(pa.int64()), sample.column("first_seen").cast(pa.int64()))
    for kind, span in zip(sample.column("kind").to_pylist(), spans.to_pylist(), strict=True):
        took.setdefault(kind or "", []).append(span or 0)
    by = ["kind", "source_id", "idempotency_key"]
    answers = answered.group_by(by).aggregate([([], "count_all"), ("saved", "count"), ("saved", "sum")])
    named = answers.select([*by, "count_all", "saved_count", "saved_sum"])
    return _DayFigures(
        _count_values(news, "kind"),
        _count_values(answered, "kind"),
        took,
        named.rename_columns([*by, "answers", "documents", "characters"]),
    )


def _documents(answers: Iterable[pyarrow.Table]) -> set[str]:
    """The keys of documents among these answers; only documents have snippets."""
    import pyarrow.compute as pc

    found: set[str] = set()
    for table in answers:
        found.update(table.column("idempotency_key").filter(pc.greater(table.column("documents"), 0)).to_pylist())
    return found


def _lengths(documents: set[str], objects: ObjectStore | None, tenant: str) -> dict[str, int]:
    """The number of snippets of each key that the log of documents has."""
    if not documents or objects is None:
        return {}
    import pyarrow.compute as pc

    from ragfence.documents.parquet import fixed_values, read_table
    from ragfence.engine.epochs import Epochs

    lengths: dict[str, int] = {}
    for name in Epochs(tenant, objects).truth():
        if (data := objects.get(name)) is None:
            continue  # a compaction or a purge began a new epoch; what it kept is counted, what it dropped is not
        table = read_table(name, data, "rows", ["key", "snippet_ids"])
        made = pc.list_value_length(table.column("snippet_ids")).to_pylist()
        for key, length in zip(fixed_values(table, "key"), made, strict=True):
            if (text := key.hex()) in documents:
                lengths[text] = max(lengths.get(text, 0), length or 0)
    return lengths


def _with_snippets(answers: pyarrow.Table, lengths: dict[str, int]) -> pyarrow.Table:
    """Adds the number of snippets that were not embedded again, and of documents that the log does not have."""
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


def _count_values(table: pyarrow.Table, name: str) -> dict[str, int]:
    import pyarrow.compute as pc

    return {each["values"] or "": each["counts"] for each in pc.value_counts(table.column(name)).to_pylist()}


def _sum(table: pyarrow.Table, name: str) -> int:
    import pyarrow.compute as pc

    return pc.sum(table.column(name)).as_py() or 0


def _median(values: list[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None
