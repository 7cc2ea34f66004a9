"""A site: stores that a test fills with a fence and looks at with the command line."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ragfence
from ragfence import Fence, Operation, Policy
from ragfence.cli.app import app


@dataclass
class Site:
    name: str
    folder: Path
    options: tuple[str, ...]
    """what a command needs to find the stores; embedded ones are found by the working directory"""
    stores: dict[str, Any]
    opened: list[Fence] = field(default_factory=list)

    def open(self, **policy: Any) -> Fence:
        fence = ragfence.open(**self.stores, policy=Policy(**policy), owner="worker-7", run_id="run-1")
        self.opened.append(fence)
        return fence

    def run(self, *arguments: str, **more: Any) -> Any:
        """One command, with its outputs apart; a traceback fails the test."""
        command, *rest = arguments
        words = [command, *rest] if command in ("policy", "--version", "--help") else [command, *rest, *self.options]
        return run(*words, **more)

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self.run(*arguments, "--json")
        assert done.exit_code == code, done.output
        assert done.stderr == ""
        return json.loads(done.stdout)


def run(*words: str, **more: Any) -> Any:
    done = CliRunner().invoke(app, list(words), **more)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(autouse=True)
def _nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STORE", "OBJECTS", "TENANT", "POLICY"):
        monkeypatch.delenv(f"RAGFENCE_{name}", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["embedded", "valkey", "valkey alone"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    yield from _site(request, tmp_path, request.param)


@pytest.fixture
def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    yield from _site(request, tmp_path, "embedded")


def _site(request: pytest.FixtureRequest, folder: Path, name: str) -> Iterator[Site]:
    if name == "embedded":
        made = Site(name, folder, (), {})
    else:
        url, tenant = request.getfixturevalue("valkey_server").url, f"cli-{uuid.uuid4().hex}"
        options, stores = ("--store", url, "--tenant", tenant), {"store": url, "tenant": tenant}
        if name == "valkey":
            options, stores = (*options, "--objects", str(folder / "o")), {**stores, "objects": folder / "o"}  # type: ignore[assignment]
        made = Site(name, folder, options, stores)
    try:
        yield made
    finally:
        for fence in made.opened:
            fence.close()


def perform(fence: Fence, source_id: str = "a", *, payload: object = None, kind: str = "ticket", **more: Any) -> str:
    """Claims and seals; returns the key."""
    with fence.claim(Operation(kind=kind, source_id=source_id, **more), payload=payload) as op:
        if op.is_new:
            op.seal(result={"done": source_id})
    return op.receipt.key


def key_of(fence: Fence, source_id: str, *, kind: str = "ticket", **more: Any) -> str:
    return Operation(kind=kind, source_id=source_id, tenant=fence.tenant, **more).key.hex()


def fail_until_quarantined(fence: Fence, source_id: str = "bad", *, kind: str = "ticket", **more: Any) -> str:
    """Attempts that raise, until the fence has enough of them."""
    operation = Operation(kind=kind, source_id=source_id, **more)
    while True:
        try:
            with fence.claim(operation):
                raise RuntimeError("it never works")
        except RuntimeError:
            continue
        except ragfence.errors.Quarantined as stuck:
            return str(stuck.key)
