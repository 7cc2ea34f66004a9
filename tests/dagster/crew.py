"""The processes of one attack, as seen by the one who commands them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ragfence.dagster.maintenance import SHOWN
from tests.chaos.crew import ROOT, until
from tests.chaos.sites import Site
from tests.dagster.work import RunJob
from tests.indexes.attack.judge import opened
from tests.indexes.building import text_of
from tests.servers import S3_ACCESS_KEY, S3_REGION, S3_SECRET_KEY

ALIAS = "handbook"
FOLDERS = ("east", "north", "west")
EACH = 4
"""documents in a folder"""


class Nursery:
    """The process that forks the workers; see `tests.dagster.cradle`."""

    def __init__(self, folder: Path) -> None:
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.dagster.cradle", str(home)],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
        )

    def tell(self, what: str, job: Path) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{what} {job}\n".encode())
        self._popen.stdin.flush()

    def end(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


class Process:
    def __init__(self, nursery: Nursery, job: RunJob, path: Path) -> None:
        self.job, self._path, self._nursery = job, path, nursery
        job.save(path)
        nursery.tell("start", path)

    @property
    def status(self) -> int | None:
        told = self._path.with_suffix(".status")
        return int(told.read_text()) if told.exists() else None

    @property
    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(Path(self.job.answer).read_text())
        return answer

    def said(self) -> str:
        errors = self._path.with_suffix(".err")
        return errors.read_text(errors="replace")[-3000:] if errors.exists() else ""

    def send(self, what: signal.Signals) -> None:
        self._nursery.tell(str(int(what)), self._path)


class Crew:
    """Starts runs on a site, each in a process of its own, and ends them all at the end."""

    def __init__(self, nursery: Nursery, site: Site) -> None:
        assert site.objects is not None
        self._nursery = nursery
        self._site, self._objects = site, site.objects
        self.trace = site.folder / "embedded"
        self.trace.touch()
        self.processes: list[Process] = []
        for name in FOLDERS:
            folder = site.folder / "sources" / name
            folder.mkdir(parents=True)
            for at in range(EACH):
                (folder / f"{name}{at}.txt").write_text(text_of(f"{name}{at}"))
                os.utime(folder / f"{name}{at}.txt", (1_600_000_000, 1_600_000_000))

    def start(self, count: int = 1, *, home: str = "", lease_s: float = 30.0, wait: bool = True, **more: Any) -> Any:
        """Runs that begin at the same moment, when all of them stand ready."""
        folder, first = self._site.folder, len(self.processes)
        policy = folder / f"policy-{first}.yml"
        policy.write_text(
            f"lease: {{ttl_s: {lease_s}}}\nwait: {{mode: {'wait' if wait else 'raise'}}}\n"
            # One thread that embeds: what was embedded and not put when it stopped is one object at most.
            f"indexes: {{embed_workers: 1}}\n"
        )
        go = folder / f"go-{first}"
        for number in range(first, first + count):
            here = folder / f"run-{number}"
            here.mkdir()
            job = RunJob(
                store=self._site.store,
                objects=self._objects,
                tenant=self._site.tenant,
                policy=str(policy),
                sources=tuple(str(folder / "sources" / name) for name in FOLDERS),
                alias=ALIAS,
                trace=str(self.trace),
                home=home or str(here / "home"),
                ready=str(here / "ready"),
                go=str(go),
                answer=str(here / "answer.json"),
                **more,
            )
            self.processes.append(Process(self._nursery, job, here / "job.json"))
        started = self.processes[first:]
        until(lambda: all(Path(each.job.ready).exists() or each.status is not None for each in started), "all ready")
        go.touch()
        return started

    def wait(self, processes: list[Process]) -> None:
        until(lambda: all(each.status is not None for each in processes), "the end of all")

    def run(self, count: int = 1, **more: Any) -> list[Process]:
        processes: list[Process] = self.start(count, **more)
        self.wait(processes)
        return processes

    def end(self) -> None:
        for each in self.processes:
            each.send(signal.SIGKILL)
        self.wait(self.processes)

    def embeds(self) -> Counter[str]:
        return Counter(self.trace.read_text().splitlines())

    def texts(self) -> dict[str, set[str]]:
        """Of each folder, and so of each object of vectors."""
        return {name: {text for at in range(EACH) for text in text_of(f"{name}{at}").split("\n\n")} for name in FOLDERS}


def judged(site: Site, crew: Crew, *, again: int = 0) -> list[str]:
    """What is not as it has to be after any number of runs: `again` objects of vectors may have been made twice."""
    problems: list[str] = []
    embeds, texts = crew.embeds(), crew.texts()
    if set(embeds) != set().union(*texts.values()):
        problems.append("texts were embedded that are none, or never")
    twice = {text for text, count in embeds.items() if count > 1}
    if len([name for name in texts if texts[name] & twice]) > again:
        problems.append(f"{len(twice)} texts were embedded twice")
    with opened(site) as fence:
        sealed = [state for state in fence.indexes.builds() if state.entry.seal is not None]
        if len(sealed) != 1:
            problems.append(f"{len(sealed)} builds are sealed")
        changes = [entry.change for entry in fence.aliases.history(ALIAS, limit=SHOWN)]
        if changes != ["swap"]:
            problems.append(f"the log of aliases has {changes}")
        heads = sorted(head.doc_id for head in fence.documents.heads())
        if heads != sorted(f"{name}{at}.txt" for name in FOLDERS for at in range(EACH)):
            problems.append(f"live are {heads}")
        problems += [f"verify: {finding}" for finding in fence.documents.verify().findings]
        problems += [f"the auditor: {finding}" for finding in fence.audit.check().findings]
    return problems


def _environment() -> dict[str, str]:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAGFENCE_", "DAGSTER_"))
    }
    return plain | {
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "AWS_ACCESS_KEY_ID": S3_ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY,
        "AWS_REGION": S3_REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_CONFIG_FILE": "/dev/null",
    }
