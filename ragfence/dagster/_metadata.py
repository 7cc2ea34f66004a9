"""Metadata of materializations: tables, and charts as pictures in Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import dagster as dg

from ragfence.core.receipts import Receipt

_COLOURS = ("#4f46e5", "#0ea5e9", "#10b981", "#f59e0b", "#ef4444", "#8b5cf6", "#64748b")


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """`columns` maps their names to "string", "int", "float" or "bool"."""
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()])
    records = [dg.TableRecord({name: row.get(name) for name in columns}) for row in rows]
    return dg.MetadataValue.table(records=records, schema=schema)


def decisions(counts: Mapping[str, int]) -> dg.TableMetadataValue:
    rows = [{"decision": name, "documents": count} for name, count in counts.items() if count]
    return table(rows, {"decision": "string", "documents": "int"})


def gates(report: Sequence[Any]) -> dg.TableMetadataValue:
    """A table of gate results."""
    rows = [
        {
            "gate": each.gate,
            "ok": each.ok,
            "value": _text(each.value),
            "limit": _text(each.limit),
            "detail": each.detail,
        }
        for each in report
    ]
    return table(rows, {"gate": "string", "ok": "bool", "value": "string", "limit": "string", "detail": "string"})


def chart(title: str, bars: Mapping[str, int]) -> dg.MarkdownMetadataValue:
    """Horizontal bars, drawn as SVG, so that neither a package nor a file is needed."""
    bars = {name: count for name, count in bars.items() if count} or {"nothing": 0}
    most, height = max(1, *bars.values()), 26
    lines = [f'<text x="0" y="16" font-size="14" font-weight="bold">{escape(title)}</text>']
    for row, (name, count) in enumerate(bars.items()):
        y, width = 28 + row * height, max(1, round(300 * count / most))
        lines.append(f'<text x="0" y="{y + 14}" font-size="12">{escape(name)}</text>')
        lines.append(
            f'<rect x="140" y="{y}" width="{width}" height="18" rx="3" fill="{_COLOURS[row % len(_COLOURS)]}"/>'
        )
        lines.append(f'<text x="{146 + width}" y="{y + 14}" font-size="12">{count:,}</text>')
    size = f'width="540" height="{34 + len(bars) * height}"'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#334155">{"".join(lines)}</svg>'
    )
    return dg.MetadataValue.md(f"![{title}](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})")


def decision(receipt: Receipt) -> dict[str, Any]:
    """The decision, the number of the attempt, and the flags that explain what a step did."""
    flags = receipt.flags
    metadata: dict[str, Any] = {"decision": str(receipt.decision), "attempt": flags.attempt}
    return metadata | {name: True for name in ("takeover", "healed", "fenced_out") if getattr(flags, name)}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
