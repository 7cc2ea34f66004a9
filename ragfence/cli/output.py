"""How things look: times, sizes, keys, tables, progress on a terminal, and JSON for programs.

What comes out of the stores was written by callers: it is printed as text, never as markup or control sequences.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from ragfence.errors import RagfenceError, hint_on

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")

KEY_DIGITS = 16
"""enough of a key to find it again, where a line has to fit the terminal"""
WIDE = 130
_UNITS = (
    (86_400_000 * 2, 86_400_000, "d"),
    (3_600_000 * 2, 3_600_000, "h"),
    (60_000, 60_000, "min"),
    (1000, 1000, "s"),
)


def out() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width: nothing may be cut off or wrapped there
    return console


def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    out().print(plain(text), soft_wrap=True)


def document(value: Any) -> None:
    """The one JSON document of a command with --json; `keys` prints one such line per record."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        # Not left to the stream, which in some locales lets bytes through that are no text.
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a file name that is not UTF-8, or a terminal that has not all characters
        text = json.dumps(value, default=str)
    sys.stdout.write(text + "\n")


def advice(hint: str) -> str:
    """What to do next, as a command line where there is one; printable."""
    return plain(hint_on("cli", hint))


def as_told(error: RagfenceError) -> dict[str, Any]:
    """An error in JSON."""
    hint = hint_on("cli", error.hint)
    return {"code": error.code, "message": error.message, "hint": hint, "retryable": error.retryable}


def error(error: RagfenceError, *, as_json: bool) -> None:
    if as_json:
        told = as_told(error)
        if problems := error.details.get("problems"):
            told["problems"] = list(problems)
        document({"error": told})
        return
    console = err()
    console.print(f"error: {plain(error.message or type(error).__name__)}")
    if error.hint:
        console.print(f"  -> {advice(error.hint)}")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    right: bool = False
    whole: bool = False
    """keeps its width on a narrow terminal, where others wrap"""
    wide: bool = False
    """left out on a narrow terminal"""


class Listing:
    """A table of what people wrote: cells are text, whatever they look like."""

    def __init__(self, console: Console, *columns: Column | str) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        self._console = console
        # Rules are for the eye; a program that reads lines wants one per record, and a head.
        self._table = Table(box=SIMPLE_HEAD if console.is_terminal else None, show_edge=False, pad_edge=False)
        every = [column if isinstance(column, Column) else Column(column) for column in columns]
        self._shown = [console.width >= WIDE or not column.wide for column in every]
        for column in (column for column, shown in zip(every, self._shown, strict=True) if shown):
            self._table.add_column(
                column.name,
                justify="right" if column.right else "left",
                overflow="fold",
                no_wrap=column.whole,
                min_width=None if column.whole else 7,
            )

    def add(self, *cells: object) -> None:
        from rich.text import Text

        chosen = (cell for cell, shown in zip(cells, self._shown, strict=True) if shown)
        self._table.add_row(*(Text("-" if cell in (None, "") else plain(str(cell))) for cell in chosen))

    def print(self) -> None:
        self._console.print(self._table)


def plain(text: str) -> str:
    """Without what would steer the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def key(text: str, *, console: Console) -> str:
    """As much of a key as fits a table; all of it where a program reads."""
    return text[:KEY_DIGITS] if console.is_terminal else text


def many(count: int, what: str) -> str:
    """A number with its noun.

    >>> many(1, "document"), many(2000, "document"), many(0, "physical index")
    ('1 document', '2,000 documents', '0 physical indexes')
    """
    ending = "" if count == 1 else "es" if what.endswith(("x", "ch")) else "s"
    return f"{count:,} {what}{ending}"


def span(ms: float) -> str:
    """A duration, in the unit people would use."""
    for least, unit_ms, unit in _UNITS:
        if ms >= least:
            return f"{ms / unit_ms:.0f} {unit}"
    return f"{max(ms, 0):.0f} ms"


def ago(ms: int, now_ms: int) -> str:
    return f"{span(now_ms - ms)} ago" if now_ms >= ms else f"in {span(ms - now_ms)}"


def moment(ms: int) -> str:
    """Local time, as ISO has it, to the second."""
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def when(ms: int, now_ms: int) -> str:
    return f"{moment(ms)} ({ago(ms, now_ms)})"


def iso(ms: int | None) -> str | None:
    """For JSON: UTC, to the millisecond. Nothing for 0, which is how the stores say "never"."""
    if not ms:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def size(count: int | None) -> str:
    if count is None:
        return "-"
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """A count that grows, on stderr, where somebody sits in front of it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done: shown.update(task, completed=done)


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with a count of them on the terminal; telling it of every single one would cost more than the scan."""
    with progress(what) as told:
        for number, item in enumerate(items, start=1):
            if number % 200 == 0:
                told(number)
            yield item


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
