"""One tenant against the others: slow bodies, many builds and huge bodies of one, and who is answered meanwhile.

A real server process and raw sockets. What is asserted is who is answered with what, never how fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragfence.server import dependencies, fair_shares
from ragfence.server.dependencies import PIECE, parse_bounded
from ragfence.server.fair_shares import Shares
from ragfence.wire.problems import RequestRefused
from ragfence.wire.validation import MAX_ERRORS, MAX_FIELDS
from tests.indexes.stub_endpoint import Reply as Vectors
from tests.indexes.stub_endpoint import StubEndpoint
from tests.server.hostile import Reply, ServerProcess, head, huge_refused_body, read_reply, server_process, slow_bodies
from tests.server.processes import served

DOCUMENT = {"doc_id": "a", "text": "Thirty days a year."}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path) as made:
        yield made


def test_another_tenant_writes_while_slow_bodies_of_one_key_hang(server: ServerProcess) -> None:
    with slow_bodies(server, 210) as connections:
        for number in range(20):
            reply = server.ask("POST", "/v1/documents", server.acme, DOCUMENT, key=f"own-{number}")
            assert reply.status in (200, 201), reply.body
        assert server.ask("GET", "/v1/documents/a", server.acme).status == 200
        assert server.ask("GET", "/healthz", "").status == 200
        # Those that hang were not dropped for it: the first still may send the rest.
        connections[0].sendall(b'"doc_id":"slow","text":"x"}' + b" " * (1000 - 28))
        assert read_reply(connections[0]).status == 201


def test_a_tenant_with_too_many_bodies_under_way_is_told_so_and_loses_nothing(tmp_path: Path) -> None:
    with (
        server_process(tmp_path, {"http": {"max_arriving": 30}}) as server,
        slow_bodies(server, 60) as connections,
    ):
        reply = read_reply(connections[-1])
        assert (reply.status, reply.json()["code"]) == (429, "RATE_LIMIT.share")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert server.ask("POST", "/v1/documents", server.acme, DOCUMENT).status == 201


def test_a_body_below_the_least_rate_is_cut_off_with_408(tmp_path: Path) -> None:
    rules = {"http": {"body_grace_s": 0.5, "min_body_rate": 1 << 20}}
    with server_process(tmp_path, rules) as server, slow_bodies(server, 3) as connections:
        replies = [read_reply(connection) for connection in connections]
        assert [(reply.status, reply.json()["code"]) for reply in replies] == [(408, "VALIDATION.slow_client")] * 3


def test_who_is_not_known_is_refused_before_the_body_is_read(server: ServerProcess) -> None:
    with contextlib.closing(server.connect()) as connection:
        connection.sendall(head("POST", "/v1/documents", "rf_nobody", length=4 << 20))
        assert read_reply(connection).status == 401


def test_builds_of_one_tenant_beyond_its_limit_are_429_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    with StubEndpoint(dimension=4) as endpoint:
        endpoint.script(*[Vectors.hang() for _ in range(200)])
        name = f"openai+{endpoint.url}#stub"
        rules = {"http": {"embedders": [name], "max_builds": 2}}
        with server_process(tmp_path, rules) as server:
            assert server.ask("POST", "/v1/documents", server.mallory, DOCUMENT).status == 201
            replies: list[Reply] = []
            body = {"embedder": name}

            def build(number: int) -> None:
                replies.append(_build(server, body, f"build-{number}"))

            threads = [threading.Thread(target=build, args=(number,)) for number in range(60)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(reply.status for reply in replies) == [202] * 2 + [429] * 58
            refused = next(reply for reply in replies if reply.status == 429)
            assert refused.json()["code"] == "RATE_LIMIT.builds"
            assert int(refused.headers["retry-after"]) >= 1
            # Its two builds hang still; every thread that serves others is free.
            for number in range(40):
                reply = server.ask("POST", "/v1/documents", server.acme, DOCUMENT, key=f"own-{number}")
                assert reply.status in (200, 201), reply.body
            begun = next(number for number in range(60) if _status(server, number) == 202)
            # Who asks again for one that is under way is not one more.
            assert _build(server, body, f"build-{begun}").status == 202


def _build(server: ServerProcess, body: Any, key: str) -> Reply:
    return server.ask("POST", "/v1/builds", server.mallory, body, key, "X-Request-Timeout: 2")


def _status(server: ServerProcess, number: int) -> int:
    path = f"/v1/idempotency?key=build-{number}&method=POST&route=%2Fv1%2Fbuilds"
    return server.ask("GET", path, server.mallory).status


def test_a_refused_build_uses_up_no_attempt_of_its_key(tmp_path: Path) -> None:
    with StubEndpoint(dimension=4) as endpoint:
        endpoint.script(Vectors.hang())
        name = f"openai+{endpoint.url}#stub"
        rules = {"http": {"embedders": [name], "max_builds": 1}}
        with server_process(tmp_path, rules) as server:
            server.ask("POST", "/v1/documents", server.mallory, DOCUMENT)
            assert _build(server, {"embedder": name}, "first").status == 202
            body = {"embedder": name, "metric": "dot"}
            asked = [_build(server, body, "second") for _ in range(8)]
            assert [reply.status for reply in asked] == [429] * 8
            assert _status_of(server, "second") == 404


def _status_of(server: ServerProcess, key: str) -> int:
    return server.ask("GET", f"/v1/idempotency?key={key}&method=POST&route=%2Fv1%2Fbuilds", server.mallory).status


def test_unfinished_batches_of_a_tenant_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    """Whole batches whose work has to wait: nothing is written while somebody else holds the database."""
    with server_process(tmp_path, {"http": {"max_unfinished_bytes": 2_000_000}}) as server:
        for token in (server.mallory, server.acme):
            assert server.ask("POST", "/v1/documents", token, DOCUMENT).status == 201
        database = sqlite3.connect(tmp_path / "fence" / "fences.db", isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        with contextlib.ExitStack() as stack:
            waiting: list[socket.socket] = []
            reply = None
            while reply is None:
                assert len(waiting) < 10, "the share has no end"
                connection = stack.enter_context(contextlib.closing(server.connect()))
                connection.sendall(_batch(server.mallory, f"batch-{len(waiting)}"))
                reply = _reply_within(connection, 1.5)
                if reply is None:
                    waiting.append(connection)
            assert len(waiting) == 3
            assert reply.status == 429
            assert reply.json()["code"] == "RATE_LIMIT.share"
            assert "unfinished batches" in reply.json()["detail"]
            assert int(reply.headers["retry-after"]) >= 1
            # Other requests of the tenant, and the batch of another tenant, find room.
            others = stack.enter_context(contextlib.closing(server.connect()))
            others.sendall(_batch(server.acme, "own"))
            assert server.ask("GET", "/v1/documents/a", server.mallory).status == 200
            database.execute("COMMIT")
            database.close()
            for connection in (*waiting, others):
                assert _outcome(connection)["new"] == 300
        # What was refused is lost for nobody: it is new when it comes again, and the room is free for it.
        for number in range(4):
            with contextlib.closing(server.connect()) as connection:
                connection.sendall(_batch(server.mallory, f"batch-{len(waiting) + number}"))
                assert _outcome(connection)["new"] == 300


def _batch(token: str, key: str, *, documents: int = 300, size: int = 1000) -> bytes:
    lines = [json.dumps({"doc_id": f"{key}-{number}", "text": "x" * size}) for number in range(documents)]
    body = "".join(f"{line}\n" for line in lines).encode()
    start = head("POST", "/v1/documents:batch", token, key=key, length=len(body))
    return start.replace(b"application/json", b"application/x-ndjson") + body


def _reply_within(connection: socket.socket, seconds: float) -> Reply | None:
    connection.settimeout(seconds)
    try:
        return read_reply(connection)
    except TimeoutError:
        return None
    finally:
        connection.settimeout(60)


def _outcome(connection: socket.socket) -> Any:
    """The last line of the answer to a batch, which comes in chunks."""
    seen = b""
    while b"0\r\n\r\n" not in seen:
        piece = connection.recv(65536)
        assert piece, f"closed after {seen[-200:]!r}"
        seen += piece
    assert seen.startswith(b"HTTP/1.1 200"), seen[:200]
    return json.loads(next(line for line in seen.split(b"\n") if line.startswith(b'{"done"')))


def test_a_huge_refused_body_gets_a_short_answer_and_others_are_answered(server: ServerProcess) -> None:
    body = huge_refused_body()
    with contextlib.closing(server.connect()) as connection:
        connection.sendall(head("POST", "/v1/documents", server.mallory, length=len(body)) + body)
        assert server.ask("GET", "/healthz", "").status == 200
        reply = read_reply(connection)
    assert reply.status == 422
    assert len(reply.body) < 16 << 10
    long_name = b'{"doc_id":"a","text":"b","' + b"n" * (3 << 20) + b'":1}'
    reply = server.ask("POST", "/v1/documents", server.mallory, long_name)
    assert reply.status == 422
    assert len(reply.body) < 16 << 10


class TestBodies:
    """What is done with a body before it is a document."""

    @pytest.fixture
    def parsed_in(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The threads in which JSON was parsed."""
        threads: list[str] = []
        parse = dependencies.parse_json  # type: ignore[attr-defined]

        def spy(text: Any) -> Any:
            threads.append(threading.current_thread().name)
            return parse(text)

        monkeypatch.setattr(dependencies, "parse_json", spy)
        return threads

    def test_a_body_above_64_kib_is_parsed_off_the_loop(self, tmp_path: Path, parsed_in: list[str]) -> None:
        with served(tmp_path) as api:
            caller = api.caller()
            assert caller.post("/v1/documents", DOCUMENT).status_code == 201
            large = DOCUMENT | {"text": "word " * 20_000}
            assert caller.post("/v1/documents", large).status_code == 201
        on_the_loop, off_the_loop = parsed_in
        assert not on_the_loop.startswith("ragfence-api")
        assert off_the_loop.startswith("ragfence-api")

    def test_what_holds_more_values_than_any_document_is_refused_before_it_is_parsed(
        self, tmp_path: Path, parsed_in: list[str]
    ) -> None:
        many = b'{"doc_id":"a","text":"b","metadata":{"x":[' + b"0," * 1_000_000 + b"0]}}"
        with served(tmp_path) as api:
            answer = api.caller().post("/v1/documents", content=many, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION.body")
        assert parsed_in == []

    def test_commas_and_brackets_in_a_text_are_no_values(self, tmp_path: Path) -> None:
        with served(tmp_path) as api:
            document = DOCUMENT | {"text": 'a, [b], {"c"}, ' * 60_000}
            assert api.caller().post("/v1/documents", document).status_code == 201

    def test_more_fields_than_any_model_has_are_refused_without_naming_each(self, tmp_path: Path) -> None:
        fields = {f"x{number}": 0 for number in range(MAX_FIELDS + 1)}
        with served(tmp_path) as api:
            answer = api.caller().post("/v1/documents", DOCUMENT | fields)
            assert answer.status_code == 422
            assert len(answer.json()["errors"]) == 1
            answer = api.caller().post("/v1/documents", dict(list(fields.items())[:MAX_FIELDS]))
            assert answer.status_code == 422
            assert 1 < len(answer.json()["errors"]) <= MAX_ERRORS


class TestCounting:
    """How many values a large body may hold, counted in pieces."""

    def test_counting_ends_with_the_piece_in_which_there_are_too_many(self) -> None:
        body = Watched(b'{"a":[' + b'"",' * 1_000_000 + b'""]}')
        with pytest.raises(RequestRefused):
            parse_bounded(body, 1000)
        assert body.read == [PIECE]

    def test_no_more_than_a_piece_is_looked_at_in_one_go(self) -> None:
        body = Watched(b'{"text":"' + b"a, [b], " * 100_000 + b'"}')
        assert len(parse_bounded(body, 1000)["text"]) == 800_000
        assert sum(body.read) == len(body)
        assert max(body.read) == PIECE

    @pytest.mark.parametrize("piece", [1, 2, 3, 5, 8])
    def test_the_count_is_that_of_a_parser_wherever_a_piece_ends(
        self, monkeypatch: pytest.MonkeyPatch, piece: int
    ) -> None:
        monkeypatch.setattr(dependencies, "PIECE", piece)
        dice = random.Random(piece)
        parts = ["a", ",", "[", "{", '"', "\\", "\\\\", '\\"', "\n", "é"]
        for _ in range(300):
            texts = ["".join(dice.choices(parts, k=dice.randrange(12))) for _ in range(5)]
            body = json.dumps({"x": texts, "y": [{}, [1, 2]]}, ensure_ascii=dice.random() < 0.5).encode()
            held = 2 + 3 + 7  # objects, lists, commas
            assert not dependencies._holds_more_values(body, held)
            assert dependencies._holds_more_values(body, held - 1)


class Watched(bytes):
    """Remembers how much was read of it in one go."""

    read: list[int]

    def __init__(self, _: bytes) -> None:
        self.read = []

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read.append(len(found))
        return found


class TestTurns:
    """Large bodies of one tenant, in turn, while others are answered."""

    def test_large_bodies_of_a_tenant_are_parsed_one_at_a_time_and_those_of_another_beside_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on = threading.Semaphore(0), threading.Event()
        parsed: list[str] = []
        parse = dependencies.parse_json  # type: ignore[attr-defined]

        def slow(text: Any) -> Any:
            given = parse(text)
            parsed.append(given["doc_id"])
            if given["doc_id"].startswith("large"):
                begun.release()
                assert go_on.wait(30)
            return given

        monkeypatch.setattr(dependencies, "parse_json", slow)

        with served(tmp_path) as api:
            mallory, acme = api.caller("mallory"), api.caller("acme")

            def send(caller: Any, name: str) -> int:
                document = {"doc_id": name, "text": f"{name} " * 20_000}
                status: int = caller.post("/v1/documents", document, key=name).status_code
                return status

            with ThreadPoolExecutor(4) as pool:
                first = [pool.submit(send, mallory, f"large-{number}") for number in range(3)]
                assert begun.acquire(timeout=30)
                assert not begun.acquire(timeout=0.5)
                assert acme.post("/v1/documents", DOCUMENT).status_code == 201
                other = pool.submit(send, acme, "large-other")
                assert begun.acquire(timeout=30)
                assert parsed.count("a") == 1
                assert len(parsed) == 3
                go_on.set()
                assert [each.result(30) for each in (*first, other)] == [201] * 4

    def test_large_bodies_that_are_refused_are_answered_one_after_the_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pausing: list[int] = []
        now = 0

        async def pause(seconds: float) -> None:
            nonlocal now
            now += 1
            pausing.append(now)
            await asyncio.sleep(0.05)
            now -= 1

        monkeypatch.setattr(fair_shares, "pause", pause)
        with served(tmp_path) as api:
            caller = api.caller("mallory")
            with ThreadPoolExecutor(4) as pool:
                wrong = DOCUMENT | {"text": "x" * (1 << 17), "more": 1}
                sent = [pool.submit(caller.post, "/v1/documents", wrong, key=f"k{each}") for each in range(4)]
                assert [each.result(30).status_code for each in sent] == [422] * 4
            assert pausing == [1] * 4
            assert caller.post("/v1/documents", {"text": 1}).status_code == 422
            assert caller.post("/v1/documents", DOCUMENT | {"text": "x " * (1 << 16)}).status_code == 201
            assert pausing == [1] * 4


class TestShares:
    """A tenant may hold at most `share` times what is still free; so a newcomer always finds room."""

    def test_one_tenant_alone_cannot_fill_the_server(self) -> None:
        fair_shares = Shares(90, share=2.0)
        assert [fair_shares.take("mallory") for _ in range(90)].count(True) == 60
        assert fair_shares.take("acme")

    def test_newcomers_find_room_however_many_tenants_are_greedy(self) -> None:
        fair_shares = Shares(100, share=1.0)
        for number in range(6):
            took = 0
            while fair_shares.take(f"greedy-{number}"):
                took += 1
            assert took >= 1

    def test_what_is_given_back_can_be_taken_again(self) -> None:
        fair_shares = Shares(2, share=2.0)
        assert fair_shares.take("a")
        assert fair_shares.take("b")
        assert not fair_shares.take("c")
        fair_shares.give("a")
        assert fair_shares.take("c")
        assert fair_shares.used("a") == 0
