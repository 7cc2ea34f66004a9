"""The steps of `make demo`: ingest, build, swap and search; repeat; edit; kill; roll back and audit."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import ragfence
from pipelines.corpus import MANUAL, Corpus
from pipelines.demo.runs import Facts, Runner, killed_at, stored_vectors
from pipelines.demo.state import FOLDER, LEASE_S, State
from pipelines.settings import ALIAS
from ragfence.errors import RagfenceError

WIDTH = 110
MANUAL_QUESTIONS = (
    "how does a with statement enter and exit a context manager?",
    "precedence of operators, from lowest to highest",
)
README_QUESTIONS = ("show a progress bar and tables in the terminal", "orchestrate data assets")
EDITED = f"{MANUAL}/debugger.txt"
"""If this Python has no manual, the first document is edited instead."""
NEW_SECTION = """

When nothing helps
==================

Make coffee. The coffee machine is in the kitchen: fill in water and beans, press the red button, and wait until the
coffee is in your cup. If the coffee machine blinks, empty its tray and clean the machine.
"""
NEW_QUESTION = "how do I use the coffee machine?"
MANY = 50
"""How many documents are edited before the run that is killed."""
FOOTNOTE = "\n\nAbout this page\n===============\n\nThe team of {folder} read and approved the page {name} in spring.\n"
DIES_AT = "before_verify"
"""The crash point: everything is embedded and written, but not yet read back and sealed."""


class Story:
    def __init__(self, state: State, corpus: Corpus, runner: Runner, console: Console) -> None:
        self._state = state
        self._corpus = corpus
        self._edited = choose_edited(state.corpus)
        self._runner = runner
        self._console = console
        self._rounds: list[Facts] = []

    def run(self) -> None:
        self._ingest()
        self._repeat()
        self._edit_one()
        self._kill()
        self._roll_back()
        self._summarize()

    def _ingest(self) -> None:
        self._headline(1, "Ingest documents, build an index, check it, point an alias at it, search")
        self._say(f"documents: {self._corpus}")
        if not self._corpus.topics:
            self._say("the golden queries ask about the manual, so without it they are skipped")
        facts = self._round("first run", "ingesting, embedding, building, checking, swapping")
        passed, checks = facts.checks
        self._say(
            f"{facts.new} documents -> {facts.snippets_made:,} snippets -> {facts.embedded:,} embedded -> "
            f"{facts.rows:,} rows in the index, read back and verified; {passed} of {checks} checks passed. "
            f"The alias [b]{ALIAS}[/b] now points at this index (generation {facts.generation})."
        )
        self._search(*(MANUAL_QUESTIONS if self._corpus.topics else ()), *README_QUESTIONS)

    def _repeat(self) -> None:
        self._headline(2, "Run the same jobs again, as a retry or a second schedule would")
        self._say("Without a guard, this run would pay for every embedding again and may store every snippet twice.")
        before, stored = self._rounds[-1], self._vectors()
        facts = self._round("repeated", "running the same jobs")
        table = Table("", "first run", "repeated", title="0 new effects" if _nothing(facts, before) else "new effects!")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, of in _EFFECTS:
            table.add_row(name, of(before), of(facts))
        table.add_row("vectors in the store", f"{stored:,}", f"{self._vectors():,}")
        table.add_row("seconds", f"{before.seconds:.1f}", f"{facts.seconds:.1f}")
        self._show(table)
        self._say(
            f"Saved: {facts.snippets_saved:,} snippets ({facts.characters_saved:,} characters) not embedded again, "
            f"and {facts.unread} unchanged files not read."
        )

    def _edit_one(self) -> None:
        self._headline(3, f"Add a section to one document: {self._edited}")
        self._say("Only the new snippets should cost anything, and a search should find them.")
        with (self._state.corpus / self._edited).open("a", encoding="utf-8") as file:
            file.write(NEW_SECTION)
        facts = self._round("one edit", "ingesting the change, building, swapping")
        self._show(
            _facts_table(
                ("documents read", f"{facts.new} of {facts.new + facts.unread}"),
                ("new snippets", f"{facts.snippets_made:,}"),
                ("snippets embedded", f"{facts.embedded:,}"),
                ("rows copied from the previous index", f"{facts.rows - facts.embedded:,}"),
                ("INDEX_HASH", f"{self._rounds[-2].index_hash[:12]} -> {facts.index_hash[:12]}"),
                (f"generation of the alias {ALIAS}", f"{self._rounds[-2].generation} -> {facts.generation}"),
            )
        )
        self._search(NEW_QUESTION)

    def _kill(self) -> None:
        edited = sorted((self._state.corpus / self._edited).parent.iterdir())[:MANY]
        self._headline(4, f"Edit {len(edited)} documents, and kill the run in the middle of its build (SIGKILL)")
        self._say("Searches must keep working, and nothing that was paid for may be lost.")
        for file in edited:
            with file.open("a", encoding="utf-8") as document:
                document.write(FOOTNOTE.format(folder=file.parent.name, name=file.stem))
        stored, live = self._vectors(), self._generation()
        with self._working("another process runs the jobs and gets SIGKILL"):
            killed = Facts("killed", seconds=killed_at(DIES_AT))
        self._runner.close_killed_runs(killed)
        killed.embedded, killed.generation = self._vectors() - stored, self._generation()
        self._rounds.append(killed)
        self._say(
            f"[red]Killed[/red] after it had embedded {killed.embedded} snippets and before it could finish its index. "
            f"The alias [b]{ALIAS}[/b] still points at generation {live}, and searches work:"
        )
        self._search(NEW_QUESTION)
        facts = self._round(
            "resumed", f"running the jobs again, after at most {LEASE_S:.0f} s for the killed run's lease"
        )
        attempt = self._attempt(facts.index_hash)
        self._show(
            _facts_table(
                ("documents ingested again", f"{facts.new} of {facts.new + facts.unread}"),
                ("snippets embedded by the killed run", f"{killed.embedded:,}"),
                ("snippets embedded by the run after it", f"{facts.embedded:,}"),
                ("vectors added by both", f"{self._vectors() - stored:,}"),
                ("the index", f"attempt {attempt}, {facts.build}, {facts.rows:,} rows"),
                (f"generation of the alias {ALIAS}", f"{live} -> {facts.generation}"),
            )
        )

    def _roll_back(self) -> None:
        self._headline(5, "Roll the alias back and forward, then check every decision that was made")
        with self._working("rolling back twice, verifying, auditing"):
            for title in ("rolled back", "and forward"):
                self._runner.run("rollback", {"ops": {"roll_back": {"config": {"reason": f"demo: {title}"}}}})
                with ragfence.open() as fence:
                    target = fence.aliases.resolve(ALIAS)
                self._rounds.append(Facts(title, index_hash=target.index_hash, generation=target.generation))
            verified = self._runner.run("verify").success
        with ragfence.open() as fence:
            table = Table("generation", "change", "INDEX_HASH", "reason", title=f"the alias {ALIAS}")
            for entry in fence.aliases.history(ALIAS):
                target_hash = entry.target.index_hash[:12] if entry.target else ""
                table.add_row(str(entry.number), entry.change, target_hash, entry.reason)
            self._show(table)
            self._say(f"verify: {'stores, log, snippets and indexes agree' if verified else 'they do not agree'}")
            self._say(f"audit: [b]{escape(str(fence.audit.check()))}[/b]")

    def _summarize(self) -> None:
        rounds = {facts.title: facts for facts in self._rounds}
        first, repeated, edit, resumed = (rounds[name] for name in ("first run", "repeated", "one edit", "resumed"))
        self._headline(6, "Summary")
        self._say(f"- The first run embedded {first.embedded:,} snippets; repeating it embedded {repeated.embedded:,}.")
        self._say(f"- Editing one document embedded {_count(edit.embedded, 'snippet')}.")
        self._say(f"- After the kill, {_count(resumed.embedded, 'snippet')} had to be embedded again.")
        self._say("- Every search was answered by a complete index.")
        self._console.print()
        # In a terminal of 80 columns there is room for the numbers, not for space around them.
        table = Table(title="all runs", padding=(0, int(self._console.width >= 100)))
        for name in ("run", "new", "read", "unread", "snippets", "embedded", "INDEX_HASH", "alias at", "seconds"):
            table.add_column(name, justify="left" if name in ("run", "INDEX_HASH") else "right", no_wrap=True)
        for facts in self._rounds:
            read = facts.documents.get("duplicate", 0) - facts.unread
            counts = (str(facts.new), str(read), str(facts.unread), f"{facts.snippets_made:,}")
            table.add_row(
                facts.title,
                *(counts if facts.documents else ("", "", "", "")),
                f"{facts.embedded:,}" if facts.seconds else "",
                facts.index_hash[:10],
                str(facts.generation),
                f"{facts.seconds:.1f}" if facts.seconds else "",
            )
        self._show(table)
        self._say("new, read, unread: documents. Read ones were duplicates; unread ones were known to be unchanged.")

    def _round(self, title: str, doing: str) -> Facts:
        with self._working(doing):
            facts = self._runner.round(title)
        self._rounds.append(facts)
        return facts

    def _search(self, *questions: str) -> None:
        table = Table("question", "score", "found in", "text", show_lines=len(questions) > 1)
        table.columns[2].no_wrap = True
        with ragfence.open() as fence:
            for question in questions:
                (hit,) = fence.search(ALIAS, question, k=1)
                cited = f"{hit.doc_id}\n\\[{hit.start}:{hit.end}]"
                table.add_row(question, f"{hit.score:.2f}", cited, escape(excerpt(hit.text, question)))
        self._show(table)

    def _attempt(self, index_hash: str) -> int:
        with ragfence.open() as fence:
            rows = fence.audit.decisions(since="1h").to_pylist()
        return max(
            (row["attempt"] for row in rows if row["kind"] == "index" and row["source_id"] == index_hash), default=0
        )

    def _generation(self) -> int:
        with ragfence.open() as fence:
            return fence.aliases.resolve(ALIAS).generation

    def _vectors(self) -> int:
        return stored_vectors(*self._state.vectors)

    def _headline(self, number: int, text: str) -> None:
        self._console.print(f"\n[b]{number}. {text}[/b]", highlight=False)

    def _say(self, text: str) -> None:
        self._console.print(Padding(text, (0, 0, 0, 3)), highlight=False)

    def _show(self, table: Table) -> None:
        table.title_justify = "left"
        self._console.print(table)

    @contextmanager
    def _working(self, doing: str) -> Iterator[None]:
        """Shows that a run is at work. Its duration is unknown, so the bar only moves."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        shown = self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not shown) as progress:
            progress.add_task(doing, total=None)
            yield


_EFFECTS: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("documents ingested", lambda facts: f"{facts.new:,}"),
    ("files not read (unchanged)", lambda facts: f"{facts.unread:,}"),
    ("snippets made", lambda facts: f"{facts.snippets_made:,}"),
    ("snippets embedded", lambda facts: f"{facts.embedded:,}"),
    ("snippet_ids of all documents (digest)", lambda facts: facts.snippet_ids[:12]),
    ("INDEX_HASH", lambda facts: facts.index_hash[:12]),
    (f"generation of the alias {ALIAS}", lambda facts: str(facts.generation)),
)


def _nothing(facts: Facts, before: Facts) -> bool:
    same = (facts.index_hash, facts.generation) == (before.index_hash, before.generation)
    same = same and facts.snippet_ids == before.snippet_ids
    return same and not (facts.new or facts.snippets_made or facts.embedded)


def excerpt(text: str, question: str, length: int = 90) -> str:
    """The line of a snippet that has the most words of the question, and what follows it."""
    words = set(re.findall(r"\w{3,}", question.lower()))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    best = max(range(len(lines)), key=lambda at: len(words & set(re.findall(r"\w{3,}", lines[at].lower()))))
    shown = " ".join(lines[best:]).strip()
    return shown[:length] + ("..." if len(shown) > length else "")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _facts_table(*facts: tuple[str, str]) -> Table:
    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, value)
    return table


def choose_edited(corpus: Path) -> str:
    """The doc_id of the document that is edited."""
    if (corpus / EDITED).is_file():
        return EDITED
    return min(each.relative_to(corpus).as_posix() for each in corpus.rglob("*.*"))


def now_try(ragfence_command: str, edited: str) -> str:
    """Commands that work as printed, in the folder in which the demo ran."""
    command = f"RAGFENCE_STORE={FOLDER} {ragfence_command}"
    search = f'{command} search {ALIAS} "where is the coffee machine?"'
    return f"\nNow try:\n  make ui\n  {search}\n  {command} explain {edited}"


def installed_command() -> str:
    """The `ragfence` of this environment, as it can be typed in this folder."""
    script = Path(sys.executable).parent / "ragfence"
    path = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    return path if script.exists() else f"{sys.executable} -m ragfence"


def main() -> None:
    console = Console()
    console = Console(width=min(WIDTH, console.width) if console.is_terminal else WIDTH)
    introduction = (
        "[b]ragfence[/b] ingests each document once and builds each index once, however often a job is retried, "
        "repeated or killed. This demo runs a real job, repeats it, edits documents and kills it half-way. "
        f"It takes a minute or two and needs no server; its files are in {FOLDER}."
    )
    console.print(Panel(introduction, expand=False))
    state = State.here()
    state.enter()
    try:
        corpus = state.begin()
        Story(state, corpus, Runner(), console).run()
    except RagfenceError as error:
        console.print(f"[red]{error.code}[/red] {escape(error.message)}\n{escape(error.hint)}")
        raise SystemExit(1) from error
    console.print(now_try(installed_command(), choose_edited(state.corpus)), highlight=False, soft_wrap=True)
