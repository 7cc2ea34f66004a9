"""Progress of long work: a bar in a terminal, a callable of the caller, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec

from ragfence.errors import TerminalError

P = ParamSpec("P")

Meter = Callable[[int], None]
"""Called with how much is done by now."""
Gauge = Callable[[int, int | None], None]
"""The same where only the work itself finds out how much there is to do: called with both."""


@contextlib.contextmanager
def meter(progress: bool | Meter, total: int | None, what: str) -> Iterator[Meter]:
    if callable(progress):
        yield without_stop_iteration(progress)
        return
    with gauge(progress, what) as report:
        yield lambda done: report(done, total)


@contextlib.contextmanager
def gauge(progress: bool | Gauge, what: str) -> Iterator[Gauge]:
    if progress is False:
        yield lambda done, total: None
        return
    if callable(progress):
        yield without_stop_iteration(progress)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # On stderr: what a command prints may be read by another.
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, rate="")

        def report(done: int, total: int | None) -> None:
            speed = bar.tasks[task].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.0f}/s" if speed else "")

        yield report


def without_stop_iteration(progress: Callable[P, object]) -> Callable[P, None]:
    """Turns a StopIteration of the callback into a TerminalError: a generator around it would seem to have ended."""

    def report(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            progress(*args, **kwargs)
        except StopIteration as stopped:
            raise TerminalError(
                "the callback for progress raised StopIteration",
                hint="let it raise another error to stop the work; what was acknowledged until then stays",
            ) from stopped

    return report
