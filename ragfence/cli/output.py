"""Output of commands: times, sizes, keys, tables, progress on a terminal, and JSON for programs.

The contents of the stores were written by callers: they are printed as text, never as markup or control sequences.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from ragfence.errors import RagfenceError, ValidationError, hint_on

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")

KEY_DIGITS, NARROW_KEY_DIGITS = 16, 8
"""The beginning of a key in tables on a terminal. Every command that takes a key accepts 8 digits of it."""
WIDE = 130
"""Terminals with fewer columns get shorter times and keys, and tables without the columns that are `wide`."""
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
        console.width = 10_000  # a pipe has no width: nothing may be cut off or wrapped in it
    return console


def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def echo(text: str) -> None:
    """Prints a line of text to stdout; a long line is not cut."""
    out().print(plain(text), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints the JSON document of a command with --json. `keys` prints one such line per record."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        # Checked here, because in some locales the stream would write bytes that are not valid text.
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a file name that is not UTF-8, or a terminal without these characters
        text = json.dumps(value, default=str)
    sys.stdout.write(text + "\n")


def format_hint(hint: str) -> str:
    """The next step, as a command line where there is one; printable."""
    return plain(hint_on("cli", hint))


def error_document(error: RagfenceError) -> dict[str, Any]:
    """An error in JSON."""
    hint = hint_on("cli", error.hint)
    return {"code": error.code, "message": error.message, "hint": hint, "retryable": error.retryable}


def print_error(error: RagfenceError, *, as_json: bool) -> None:
    """Prints the message and the hint to stderr, or to stdout as JSON."""
    if as_json:
        document = error_document(error)
        if problems := error.details.get("problems"):
            document["problems"] = list(problems)
        print_json({"error": document})
        return
    console = err()
    console.print(f"error: {plain(error.message or type(error).__name__)}")
    if error.hint:
        console.print(f"  -> {format_hint(error.hint)}")


def suggest(*commands: str) -> None:
    """Names the usual next commands to a person at a terminal. Scripts do not see it."""
    if is_interactive():
        for command in commands:
            err().print(plain(f"  -> {command}"))


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    right: bool = False
    whole: bool = False
    """Keeps its width on a narrow terminal, where other columns wrap."""
    cut: bool = False
    """Shortened with an ellipsis where it does not fit the terminal."""
    wide: bool = False
    """Left out on a narrow terminal."""


class Listing:
    """A table whose cells are text, never markup."""

    def __init__(self, console: Console, *columns: Column | str) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        self._console = console
        # A program that reads lines wants one per record, and a header without a rule.
        self._table = Table(
            box=SIMPLE_HEAD if console.is_terminal else None,
            show_edge=False,
            pad_edge=False,
            collapse_padding=console.is_terminal,
        )
        every = [column if isinstance(column, Column) else Column(column) for column in columns]
        self._shown = [console.width >= WIDE or not column.wide for column in every]
        for column in (column for column, shown in zip(every, self._shown, strict=True) if shown):
            self._table.add_column(
                column.name,
                justify="right" if column.right else "left",
                overflow="ellipsis" if column.cut else "fold",
                no_wrap=column.whole or column.cut,
                min_width=None if column.whole else 7,
            )

    def add(self, *cells: object) -> None:
        from rich.text import Text

        chosen = (cell for cell, shown in zip(cells, self._shown, strict=True) if shown)
        self._table.add_row(*(Text("-" if cell in (None, "") else plain(str(cell))) for cell in chosen))

    def print(self) -> None:
        self._console.print(self._table)


def plain(text: str) -> str:
    """The text with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def key(text: str, *, console: Console) -> str:
    """As much of a key or an INDEX_HASH as fits a table; the whole of it in a pipe."""
    if not console.is_terminal:
        return text
    return text[: KEY_DIGITS if console.width >= WIDE else NARROW_KEY_DIGITS]


def pluralize(count: int, what: str) -> str:
    """A number with its noun.

    >>> pluralize(1, "document"), pluralize(2000, "document"), pluralize(0, "physical index"), pluralize(2, "entry")
    ('1 document', '2,000 documents', '0 physical indexes', '2 entries')
    """
    if count == 1:
        return f"1 {what}"
    if what.endswith("try"):
        return f"{count:,} {what[:-1]}ies"
    return f"{count:,} {what}{'es' if what.endswith(('x', 'ch')) else 's'}"


def span(ms: float) -> str:
    """A duration in the unit that people would use."""
    for least, unit_ms, unit in _UNITS:
        if ms >= least:
            return f"{ms / unit_ms:.0f} {unit}"
    return f"{max(ms, 0):.0f} ms"


def ago(ms: int, now_ms: int) -> str:
    return f"{span(now_ms - ms)} ago" if now_ms >= ms else f"in {span(ms - now_ms)}"


def moment(ms: int) -> str:
    """Local time in ISO format, to the second."""
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def time_cell(ms: int, *, console: Console) -> str:
    """Local time for a table; without its offset from UTC on a narrow terminal."""
    text = moment(ms)
    return text if not console.is_terminal or console.width >= WIDE else text[:19]


def when(ms: int, now_ms: int) -> str:
    return f"{moment(ms)} ({ago(ms, now_ms)})"


def iso(ms: int | None) -> str | None:
    """For JSON: UTC, to the millisecond. None for 0, which means "never" in the stores."""
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
    """Shows a growing count on stderr, if that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done: shown.update(task, completed=done)


def track(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yields the items and shows their count on the terminal."""
    with progress(what) as advance:
        for number, item in enumerate(items, start=1):
            if number % 200 == 0:  # an update for every item would cost more than the scan
                advance(number)
            yield item


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm_deletion(question: str, *, as_json: bool) -> None:
    """Asks on the terminal before something is deleted. Raises `ValidationError` where nobody can be asked."""
    import typer

    if as_json or not is_interactive():
        raise ValidationError(f"{question} Nothing was deleted", hint="--yes deletes without a question")
    typer.confirm(question, abort=True, err=True)
