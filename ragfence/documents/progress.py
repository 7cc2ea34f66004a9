"""Progress of long work: a bar in a terminal, a callable of the caller, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Meter = Callable[[int], None]
"""Called with how much is done by now."""


@contextlib.contextmanager
def meter(progress: bool | Meter, total: int | None, what: str) -> Iterator[Meter]:
    if progress is False:
        yield lambda done: None
        return
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # On stderr: what a command prints may be read by another.
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, rate="")

        def told(done: int) -> None:
            speed = bar.tasks[task].speed
            bar.update(task, completed=done, rate=f"{speed:,.0f}/s" if speed else "")

        yield told
