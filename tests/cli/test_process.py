"""The command line as a process: what it loads, how it ends, and what a terminal gets to see."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import ragfence
from ragfence.cli import main
from tests.cli.conftest import Site, fail_until_quarantined, perform, run

ROOT = Path(ragfence.__file__).parents[1]
COMMANDS = [
    *("ingest", "retract", "snippets", "purge", "status", "keys", "explain", "release", "decisions", "audit check"),
    *("doctor", "hydrate", "verify", "compact", "purge-expired", "journal reconcile", "policy check"),
    *("build", "builds", "swap", "rollback", "alias", "reconcile", "gc", "search"),
    *("apikeys create", "apikeys list", "apikeys revoke", "tenants list", "tenants export", "tenants drop", "serve"),
    *("drain", "audit savings", "audit conflicts", "audit anomalies", "audit export"),
]
HEAVY = {
    "boto3",
    "botocore",
    "dagster",
    "httpx",
    "lancedb",
    "numpy",
    "onnxruntime",
    "pyarrow",
    "qdrant_client",
    "redis",
}


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAGFENCE_", "COV", "COLUMNS"))}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm"}


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ragfence", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", ["ingest", "snippets", "retract", "explain", "policy check"])
def test_an_argument_that_is_not_utf_8_is_reported_in_json(embedded: Site, words: str) -> None:
    perform(embedded.open())
    done = run(*words.split(), os.fsdecode(b"\xff"), "--json")
    assert done.exit_code != 0
    assert json.loads(done.stdout)
    assert "error" in done.stdout


def test_an_argument_that_is_not_utf_8_is_reported_by_a_process(embedded: Site) -> None:
    perform(embedded.open())
    done = process("explain", os.fsdecode(b"\xff"), "--json")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert json.loads(done.stdout)["error"]


def test_a_document_that_the_terminal_cannot_write_is_escaped() -> None:
    code = "from ragfence.cli import output\noutput.print_json({'a': 'caf\u00e9 \\udcff'})"
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment(), "PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == {"a": "caf\u00e9 \udcff"}


HELP_OF_ALL = """
import json
import sys

from ragfence.cli import main

loaded = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["ragfence", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    loaded[words] = sorted({name.partition(".")[0] for name in sys.modules})
print("LOADED", json.dumps(loaded))
"""


def test_help_loads_no_backend() -> None:
    """One process for all commands, since modules stay loaded: the first command that loads a backend is named."""
    every = ["--help", "--version", *(f"{command} --help" for command in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HELP_OF_ALL, json.dumps(every)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.rpartition("LOADED")[2])
    assert list(loaded) == every
    assert {"ragfence", "typer"} <= set(loaded["--help"])
    assert {words: HEAVY & set(names) for words, names in loaded.items() if HEAVY & set(names)} == {}


def test_the_library_does_not_load_the_command_line() -> None:
    code = "import sys, ragfence; [getattr(ragfence, name) for name in ragfence.__all__]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"ragfence.cli", "typer", "rich"}


def test_the_script_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {"ragfence": "ragfence.cli:main"}
    assert callable(main)


def test_the_version() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ragfence {ragfence.__version__}\n", "")


def test_every_command_is_in_the_help() -> None:
    told = run("--help").stdout
    for command in COMMANDS:
        assert command.split()[0] in told
        options = run(*command.split(), "--help").stdout
        assert "--json" in options
        if command != "policy check":
            # Keys and tenants are of the object store, and of no policy.
            of_objects = command.split()[0] in ("apikeys", "tenants")
            for name in ("--objects",) if of_objects else ("--store", "--objects", "--tenant", "--policy"):
                assert name in options


@pytest.mark.parametrize("words", [["nonsense"], ["status", "--nonsense"], ["explain"], ["keys", "--limit", "x"]])
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage:" in done.stderr


def test_wrong_usage_ends_a_process_with_2() -> None:
    done = process("status", "--nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_expected_error_is_a_message_and_a_hint() -> None:
    done = process("status", "--store", "mysql://u:geheim@h/db")
    assert (done.returncode, done.stdout) == (1, "")
    warning, first, second = done.stderr.splitlines()
    assert warning.startswith("WARNING: the password in --store can be read")
    assert first.startswith("error: 'mysql://h/db' does not name a fence store")
    assert second.startswith("  -> use redis://")
    told = process("status", "--store", "mysql://u:geheim@h/db", "--json")
    assert (told.returncode, told.stderr.splitlines()) == (1, [warning])
    error = json.loads(told.stdout)["error"]
    assert set(error) == {"code", "message", "hint", "retryable"}
    assert (error["code"], error["retryable"]) == ("VALIDATION.unknown_store", False)
    assert "geheim" not in told.stdout + done.stderr


def test_the_environment_names_the_stores(embedded: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with ragfence.open("sub/fences.db", tenant="acme") as fence:
        perform(fence, "a")
    assert run("status").exit_code == 1
    monkeypatch.setenv("RAGFENCE_STORE", "sub/fences.db")
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    told = embedded.json("status")
    assert (told["tenant"], told["rows"]) == ("acme", 2)
    assert embedded.json("status", "--tenant", "other")["rows"] == 0


@pytest.mark.parametrize(
    "words", [["keys", "--limit", "0"], ["keys", "--limit", "0", "--json"], ["decisions", "--json"]]
)
def test_a_closed_pipe_is_silent(embedded: Site, words: list[str]) -> None:
    fence = embedded.open()
    for number in range(400):  # more than a pipe holds, so that the reader is gone before the last line is written
        perform(fence, f"{number}-{'x' * 200}")
    running = subprocess.Popen(
        [sys.executable, "-m", "ragfence", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.read(10)
    running.stdout.close()
    with running.stderr as told:
        assert told.read() == b""
    assert running.wait(60) in (0, 1)


def test_an_interrupted_command_ends_with_130() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        running = subprocess.Popen(
            [sys.executable, "-m", "ragfence", "status", "--store", url],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests in the background of a shell has it ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        silent.settimeout(60)
        accepted, _ = silent.accept()
        with accepted:
            assert accepted.recv(1)  # it asks, and waits for an answer that never comes
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert (out, "Traceback" in err) == ("", False)


@contextmanager
def at_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command whose stdin and stderr are a terminal; its stdout is a pipe."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "ragfence", *words],
        env=environment(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield running, ours
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        if running.stdout:
            running.stdout.close()
        os.close(ours)


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, f"{wanted!r} never came: {seen!r}"
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # Linux: the other side is closed
            break
    return seen


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_release_asks_on_a_terminal(embedded: Site, answer: bytes, code: int) -> None:
    key = fail_until_quarantined(embedded.open(lease={"max_attempts": 2}))
    with at_a_terminal("release", key[:12]) as (running, terminal):
        asked = read_until(terminal, b"Release it?")
        os.write(terminal, answer)
        rest = read_until(terminal, b"\x00")
        assert running.stdout is not None
        out = running.stdout.read()
        assert running.wait(60) == code
    assert b"quarantined after 2 attempts, last error RuntimeError" in asked
    assert (b"nothing was released" in rest) == (code == 1)
    assert (b"released" in out) == (code == 0)
    state = embedded.json("explain", key)["keys"][0]["now"]["state"]
    assert state == ("quarantined" if code else "released")


@pytest.mark.parametrize("option", ["--yes", "--json"])
def test_a_release_that_must_not_ask_does_not(embedded: Site, option: str) -> None:
    key = fail_until_quarantined(embedded.open(lease={"max_attempts": 2}))
    with at_a_terminal("release", key, option) as (running, terminal):
        seen = read_until(terminal, b"\x00")
        assert running.wait(60) == 0
    assert b"Release it?" not in seen


def test_progress_is_for_a_terminal_and_never_on_stdout(embedded: Site) -> None:
    perform(embedded.open(), "a")
    with at_a_terminal("keys", "--json") as (running, terminal):
        seen = read_until(terminal, b"\x00")
        assert running.stdout is not None
        out = running.stdout.read()
        assert running.wait(60) == 0
    assert b"reading rows" in seen
    assert b"reading records" in seen
    assert len(out.splitlines()) == 1
    assert json.loads(out)["state"] == "sealed"
    done = process("keys")
    assert (done.stderr, "reading" in done.stdout) == ("", False)
