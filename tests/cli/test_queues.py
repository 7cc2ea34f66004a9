"""`ragfence consume`, `enqueue` and `queue`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.queues import Envelope, open_transport
from tests.cli.conftest import run

QUEUE = "sqlite:///queue.db?queue=docs"


def lines(*values: Any, name: str = "docs.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return name


def documents(count: int) -> list[dict[str, str]]:
    return [{"doc_id": f"d{number}", "text": f"text {number}"} for number in range(count)]


def printed(*words: str, code: int = 0) -> Any:
    done = run(*words, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_documents_of_a_file_are_sent_and_ingested_once() -> None:
    file = lines(*documents(7))
    assert printed("enqueue", QUEUE, file, "--documents")["sent"] == 7
    assert printed("enqueue", QUEUE, file)["sent"] == 7
    told = printed("consume", QUEUE, "--documents", "--until-empty")
    assert told["results"] == {"new": 7, "duplicate": 7}
    assert told["queue"] == "docs"
    with ragfence.open() as fence:
        assert sum(1 for _ in fence.documents.heads()) == 7
    assert printed("queue", "status", QUEUE)["visible"] == 0


def test_the_table_at_the_end_says_what_became_of_the_messages() -> None:
    run("enqueue", QUEUE, lines(*documents(3), {"doc_id": "bad"}))
    done = run("consume", QUEUE, "--documents", "--until-empty")
    assert done.exit_code == 1
    assert "docs: 4 messages" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["new", "3"], ["dead", "1"]]


def test_a_limit_leaves_the_rest_in_the_queue() -> None:
    run("enqueue", QUEUE, lines(*documents(10)))
    assert printed("consume", QUEUE, "--documents", "--limit", "4")["messages"] == 4
    assert printed("queue", "status", QUEUE)["visible"] == 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"doc_id": "a", "text": "x"}\n{bad\n', "line 2 of docs.jsonl is not valid JSON"),
        ('{"doc_id": "a", "text": "x"}\n\n{"doc_id": "b"}\n', "line 3 of docs.jsonl: it is not a document: /text"),
        ("\xff", "line 1 of docs.jsonl"),
        ('{"doc_id": "a", "text": NaN}\n', "line 1 of docs.jsonl"),
    ],
)
def test_nothing_is_sent_of_a_file_with_a_mistake(text: str, problem: str) -> None:
    Path("docs.jsonl").write_bytes(text.encode("latin-1"))
    done = run("enqueue", QUEUE, "docs.jsonl", "--documents")
    assert done.exit_code == 1
    assert problem in done.stderr
    assert "nothing was sent" in done.stderr
    assert not Path("queue.db").exists()


def test_a_file_is_sent_up_to_where_the_queue_is_full_and_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    file = lines(*documents(5))
    full = open_transport(QUEUE, high_water=4)
    with monkeypatch.context() as patched:
        patched.setattr("ragfence.cli.queues.SENT_AT_ONCE", 2)
        patched.setattr("ragfence.queues.open_transport", lambda url, **_: full)
        done = run("enqueue", QUEUE, file)
    assert done.exit_code == 1
    assert "4 messages up to line 4 were sent" in done.stderr
    assert "--from-line 5" in done.stderr
    assert printed("enqueue", QUEUE, file, "--from-line", "5")["sent"] == 1
    assert printed("queue", "status", QUEUE)["visible"] == 5


def test_dead_letters_are_listed_replayed_and_dropped() -> None:
    run("enqueue", QUEUE, lines({"doc_id": "bad"}, {"no": "document"}))
    run("consume", QUEUE, "--documents", "--until-empty")
    listed = [json.loads(line) for line in run("queue", "dead", "list", QUEUE, "--json").stdout.splitlines()]
    assert [letter["body"] for letter in listed] == [{"doc_id": "bad"}, {"no": "document"}]
    assert all("/text" in letter["reason"] for letter in listed)
    first, second = (letter["message_id"] for letter in listed)
    assert printed("queue", "dead", "replay", QUEUE, first) == {"queue": "docs", "replayed": 1, "unknown": 0}
    assert printed("queue", "dead", "drop", QUEUE, second, "--yes")["dropped"] == 1
    assert printed("queue", "dead", "replay", QUEUE, "unknown", code=1)["unknown"] == 1
    assert printed("queue", "status", QUEUE)["visible"] == 1
    assert "no dead letters" in run("queue", "dead", "list", QUEUE).stdout


def test_all_dead_letters_are_replayed_or_dropped_at_once() -> None:
    run("enqueue", QUEUE, lines(*[{"doc_id": f"bad{number}"} for number in range(5)]))
    run("consume", QUEUE, "--documents", "--until-empty")
    assert printed("queue", "dead", "replay", QUEUE, "--all")["replayed"] == 5
    run("consume", QUEUE, "--documents", "--until-empty")
    refused = run("queue", "dead", "drop", QUEUE, "--all")
    assert refused.exit_code == 1
    assert "delete 5 dead letters of docs?" in refused.stderr
    assert printed("queue", "status", QUEUE)["dead"] == 5
    assert printed("queue", "dead", "drop", QUEUE, "--all", "--yes")["dropped"] == 5
    assert printed("queue", "status", QUEUE)["dead"] == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("consume", QUEUE), "choose what to do"),
        (("consume", QUEUE, "--documents", "--handler", "a:b"), "choose what to do"),
        (("consume", QUEUE, "--handler", "nothing"), "MODULE:FUNCTION"),
        (("consume", QUEUE, "--handler", "no_such_module:f"), "no module 'no_such_module'"),
        (("consume", QUEUE, "--handler", "json:nothing"), "json has no 'nothing'"),
        (("consume", QUEUE, "--documents", "--quota", "many"), "'many' is not a valid quota"),
        (("consume", QUEUE, "--documents", "--visibility", "1"), "less than a lease"),
        (("consume", "kafka://host/topic", "--documents"), "not the URL of a queue"),
        (("enqueue", QUEUE, "missing.jsonl"), "missing.jsonl cannot be read"),
        (("queue", "status", "redis://:secret@127.0.0.1:1/0"), "redis://127.0.0.1:1/0"),
        (("queue", "dead", "drop", QUEUE), "which dead letters?"),
        (("queue", "dead", "replay", QUEUE, "id", "--all"), "not both"),
    ],
)
def test_wrong_input_is_an_error_that_says_what_to_do(words: tuple[str, ...], problem: str) -> None:
    done = run(*words)
    assert done.exit_code == 1
    assert problem in done.stderr
    assert "secret" not in done.output


def test_a_handler_is_called_once_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("orders_of_test.py").write_text(
        "calls = []\nasync def handle(message):\n    calls.append(message.body['id'])\n    return {'id': calls[-1]}\n"
    )
    transport = open_transport(QUEUE)
    transport.send(
        [Envelope(body={"id": 7}, dedupe_key="order-7")] * 3 + [Envelope(body={"id": 8}, event_id="e-8")] * 2
    )
    transport.close()
    told = printed("consume", QUEUE, "--handler", "orders_of_test:handle", "--until-empty", "--workers", "2")
    assert told["results"]["new"] == 2
    assert sorted(sys.modules["orders_of_test"].calls) == [7, 8]


def test_a_quota_holds_up_what_is_over_it() -> None:
    run("enqueue", QUEUE, lines(*documents(10)))
    told = printed("consume", QUEUE, "--documents", "--until-empty", "--quota", "4/hour")
    assert told["results"] == {"new": 4, "throttled": 6}
    assert printed("queue", "status", QUEUE)["visible"] == 6


def test_sigterm_ends_the_command_with_what_it_has_done(tmp_path: Path) -> None:
    run("enqueue", QUEUE, lines(*documents(20)))
    command = [sys.executable, "-m", "ragfence", "consume", QUEUE, "--documents", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ragfence.__file__).parents[1])}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        queue = open_transport(QUEUE)
        give_up_at = time.monotonic() + 60
        while queue.depth().visible + queue.depth().in_flight and time.monotonic() < give_up_at:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        told = json.loads(process.communicate(timeout=30)[0])
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert told["results"] == {"new": 20}
    assert queue.depth().in_flight == 0
    queue.close()
