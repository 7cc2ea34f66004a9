"""The embedder for OpenAI-compatible endpoints, against a real local server."""

from __future__ import annotations

import logging
import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest

from ragfence.core.backoff import Backoff, may_pass, retry_after_s
from ragfence.errors import EmbedderInvalid, EmbedderUnavailable, ValidationError
from ragfence.indexes.embedders.embedder import EmbedderId, embed_texts
from ragfence.indexes.embedders.endpoint import OPENAI, PROBE, EndpointEmbedder
from tests.indexes.stub_endpoint import Reply, StubEndpoint, vector_of

KEY = "sk-a-secret-that-is-told-to-nobody"
TEXTS = ["alpha", "beta", "gamma", "delta", "epsilon"]


@pytest.fixture(autouse=True)
def _no_key_of_the_machine(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def endpoint():
    with StubEndpoint() as server:
        yield server


@pytest.fixture
def embedder_at(endpoint):
    made = []

    def make(**options):
        options = {"dimension": 4, "sleep": lambda seconds: None, **options}
        made.append(EndpointEmbedder(endpoint.url, "stub", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wanted(texts, dimension=4):
    return np.array([vector_of(text, dimension) for text in texts], dtype=np.float32)


def test_texts_become_vectors_in_their_order(endpoint, embedder_at):
    assert (embedder_at().embed(TEXTS) == wanted(TEXTS)).all()
    [request] = endpoint.requests
    assert request.path == "/v1/embeddings"
    assert request.body == {"model": "stub", "input": TEXTS, "encoding_format": "float"}
    assert "authorization" not in request.headers


def test_an_answer_in_another_order_is_put_in_order_by_its_index(endpoint, embedder_at):
    endpoint.script(Reply(change=lambda answer: answer["data"].reverse()))
    assert (embedder_at().embed(TEXTS) == wanted(TEXTS)).all()


def test_an_answer_without_indexes_is_taken_in_the_order_it_has(endpoint, embedder_at):
    endpoint.script(Reply(change=lambda answer: [each.pop("index") for each in answer["data"]]))
    assert (embedder_at().embed(TEXTS) == wanted(TEXTS)).all()


def test_no_texts_are_no_request(endpoint, embedder_at):
    assert embedder_at().embed([]).shape == (0, 4)
    assert endpoint.requests == []


def test_an_empty_text_is_sent_as_a_space_because_openai_refuses_it(endpoint, embedder_at):
    assert (embedder_at().embed(["a", ""]) == wanted(["a", " "])).all()


def test_texts_are_sent_in_requests_of_so_many(endpoint, embedder_at):
    assert (embedder_at(batch=2, concurrency=1).embed(TEXTS) == wanted(TEXTS)).all()
    assert endpoint.texts == [["alpha", "beta"], ["gamma", "delta"], ["epsilon"]]


def test_requests_keep_to_the_token_budget_and_a_text_above_it_goes_alone(endpoint, embedder_at):
    texts = ["x" * 20, "y" * 16, "z" * 400, "u" * 4, "v" * 36, "w"]  # 5, 4, 100, 1, 9, 1 tokens
    assert (embedder_at(max_tokens_per_request=10, concurrency=1).embed(texts) == wanted(texts)).all()
    assert endpoint.texts == [texts[:2], [texts[2]], texts[3:5], [texts[5]]]


def test_the_dimension_is_asked_once_when_it_is_not_given(endpoint, embedder_at):
    embedder = embedder_at(dimension=None)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: embedder.dimension, range(16))) == {4}
    assert endpoint.texts == [[PROBE]]


def test_the_dimension_is_learnt_from_the_first_answer_if_there_was_one(endpoint, embedder_at):
    embedder = embedder_at(dimension=None)
    embedder.embed(["a"])
    assert embedder.dimension == 4
    assert endpoint.texts == [["a"]]


def test_the_key_is_sent_but_never_shown(endpoint, embedder_at, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    embedder = embedder_at()
    endpoint.script(Reply(), Reply.error(401, f"Incorrect API key provided: {KEY}."))
    embedder.embed(["a"])
    assert endpoint.requests[0].headers["authorization"] == f"Bearer {KEY}"
    with pytest.raises(EmbedderInvalid, match=r"answered 401: Incorrect API key provided: \*\*\*") as refused:
        embedder.embed(["a"])
    assert "OPENAI_API_KEY" in refused.value.hint
    for shown in (str(refused.value), repr(embedder), embedder.name, caplog.text):
        assert KEY not in shown


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it():
    with pytest.raises(ValidationError) as refused:
        EndpointEmbedder(OPENAI, "m", api_key="sk-schlüssel")
    assert "schlüssel" not in str(refused.value)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 422, 302])
def test_what_cannot_pass_fails_at_once_and_says_what_the_server_said(endpoint, embedder_at, status):
    endpoint.script(Reply.error(status, "this model\ndoes not exist"))
    with pytest.raises(EmbedderInvalid, match=f"answered {status}: this model does not exist"):
        embedder_at().embed(TEXTS)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"plain words", "plain words"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b'{"message": "of vLLM"}', "of vLLM"),
        (b'"quoted"', "quoted"),
    ],
)
def test_servers_complain_in_several_shapes(endpoint, embedder_at, body, said):
    endpoint.script(Reply(400, body))
    with pytest.raises(EmbedderInvalid) as refused:
        embedder_at().embed(TEXTS)
    assert refused.value.message.endswith(f"answered 400: {said}")


def test_a_long_complaint_is_cut(endpoint, embedder_at):
    endpoint.script(Reply(400, b"x" * 100_000))
    with pytest.raises(EmbedderInvalid) as refused:
        embedder_at().embed(TEXTS)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    "fault",
    [Reply.error(429), Reply.error(500), Reply.error(503), Reply.error(529), Reply.hang_up()],
    ids=["429", "500", "503", "529", "hung up"],
)
def test_what_may_pass_is_tried_again(endpoint, embedder_at, fault):
    endpoint.script(fault, fault)
    assert (embedder_at().embed(TEXTS) == wanted(TEXTS)).all()
    assert len(endpoint.requests) == 3


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(endpoint, embedder_at):
    embedder = embedder_at(timeout_s=0.3)
    endpoint.script(Reply.hang())
    assert (embedder.embed(TEXTS) == wanted(TEXTS)).all()
    assert len(endpoint.requests) == 2


def test_a_server_that_is_not_there_is_unavailable_after_the_last_attempt():
    with StubEndpoint() as gone:
        url = gone.url
    pauses = []
    embedder = EndpointEmbedder(url, "stub", dimension=4, attempts=3, sleep=pauses.append)
    with pytest.raises(EmbedderUnavailable, match="failed after 3 attempts: ConnectError"):
        embedder.embed(["a"])
    assert len(pauses) == 2
    embedder.close()


def test_after_the_last_attempt_it_says_what_the_server_said(endpoint, embedder_at):
    endpoint.script(*[Reply.error(429, "you exceeded your quota")] * 2)
    with pytest.raises(EmbedderUnavailable, match="failed after 2 attempts: it answered 429: you exceeded your quota"):
        embedder_at(attempts=2).embed(["a"])
    assert len(endpoint.requests) == 2


def test_a_retry_after_is_waited_for(endpoint, embedder_at):
    pauses = []
    endpoint.script(Reply.error(429, Retry_After="7"), Reply.error(503, Retry_After="100000"))
    embedder_at(sleep=pauses.append, longest_pause_s=20).embed(["a"])
    assert 7 <= pauses[0] <= 7.5
    assert pauses[1] == 20


def test_a_retry_after_may_be_a_date(endpoint, embedder_at):
    pauses = []
    then = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    endpoint.script(Reply.error(429, Retry_After=then))
    embedder_at(sleep=pauses.append, longest_pause_s=30).embed(["a"])
    assert pauses == [30]


NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("0", 0.0),
        (" 2.5 ", 2.5),
        ("120", 120.0),
        ("Tue, 01 Jan 2030 00:00:30 GMT", 30.0),
        ("Tue, 01 Jan 2030 00:00:30 -0000", 30.0),
        ("Mon, 31 Dec 2029 23:00:00 GMT", 0.0),
    ],
)
def test_how_long_a_server_asks_to_wait(header, seconds):
    assert retry_after_s(header, NOW) == seconds


def test_pauses_are_chosen_at_random_below_a_limit_that_doubles():
    backoff = Backoff(attempts=10, first_s=1, longest_s=8)
    assert [backoff.limit_s(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 8, 8]
    dice = random.Random(5)
    pauses = [backoff.pause_s(3, None, dice) for _ in range(1000)]
    assert 0 <= min(pauses) < 0.1
    assert 3.9 < max(pauses) <= 4
    assert backoff.limit_s(100_000) == 8


def test_only_too_many_requests_and_faults_of_the_server_may_pass():
    assert [status for status in range(100, 700) if may_pass(status)] == [429, *range(500, 600)]


def test_fewer_vectors_than_texts_are_refused(endpoint, embedder_at):
    endpoint.script(Reply(change=lambda answer: answer["data"].pop()))
    with pytest.raises(EmbedderInvalid, match="returned 4 vectors for 5 texts"):
        embedder_at().embed(TEXTS)


def test_two_vectors_for_one_text_are_refused(endpoint, embedder_at):
    endpoint.script(Reply(change=lambda answer: answer["data"][1].update(index=0)))
    with pytest.raises(EmbedderInvalid, match="numbered its vectors"):
        embedder_at().embed(TEXTS)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b"{}", b'{"data": [1]}', b'{"data": [{"index": 0}]}', b'{"data": null}', b"\xff"],
)
def test_what_is_no_answer_is_refused(endpoint, embedder_at, body):
    endpoint.script(Reply(200, body))
    with pytest.raises(EmbedderInvalid, match="has no embeddings"):
        embedder_at().embed(["a"])
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("vector", [[], [1.0, None], "AAAA", [[1.0]], 3])
def test_what_is_no_vector_is_refused(endpoint, embedder_at, vector):
    endpoint.script(Reply(change=lambda answer: answer["data"][0].update(embedding=vector)))
    embedder = embedder_at()
    with pytest.raises(EmbedderInvalid):
        embed_texts(embedder, EmbedderId.of(embedder), ["a"])


def test_nan_is_refused(endpoint, embedder_at):
    embedder = embedder_at()
    endpoint.script(Reply(change=lambda answer: answer["data"][2].update(embedding=[0, 1, float("nan"), 0])))
    with pytest.raises(EmbedderInvalid, match="NaN or infinity for text number 2"):
        embed_texts(embedder, EmbedderId.of(embedder), TEXTS)


def test_another_dimension_than_the_one_that_is_known_is_refused(endpoint, embedder_at):
    with pytest.raises(EmbedderInvalid, match="vectors with 4 dimensions, not 8"):
        embedder_at(dimension=8).embed(TEXTS)


def test_a_dimension_that_changes_is_refused(endpoint, embedder_at):
    embedder = embedder_at(dimension=None)
    embedder.embed(TEXTS)
    endpoint.dimension = 6
    with pytest.raises(EmbedderInvalid, match="vectors with 6 dimensions, not 4"):
        embedder.embed(TEXTS)


def test_a_model_that_changes_behind_the_endpoint_is_refused(endpoint, embedder_at):
    embedder = embedder_at()
    embedder.embed(["a"])
    endpoint.model = "stub-v2"
    with pytest.raises(EmbedderInvalid, match="are from 'stub' and now from 'stub-v2'"):
        embedder.embed(["a"])


def test_requests_of_one_call_go_out_together_up_to_the_limit(endpoint, embedder_at):
    endpoint.gate = threading.Barrier(3)  # nobody is answered before three have come
    texts = [f"text {number}" for number in range(12)]
    assert (embedder_at(batch=1, concurrency=3).embed(texts) == wanted(texts)).all()
    assert endpoint.most_at_once == 3


def test_many_threads_share_one_embedder_and_its_limit(endpoint, embedder_at):
    embedder = embedder_at(batch=3, concurrency=2)
    endpoint.script(*[Reply.error(429), Reply(), Reply.error(500), Reply.hang_up(), Reply()] * 4)
    calls = [[f"{call}/{number}" for number in range(7)] for call in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for texts, vectors in zip(calls, pool.map(embedder.embed, calls), strict=True):
            assert (vectors == wanted(texts)).all()
    assert endpoint.most_at_once <= 2


def test_one_request_that_fails_stops_the_others_of_its_call(endpoint, embedder_at):
    endpoint.script(Reply.error(400, "no"))
    with pytest.raises(EmbedderInvalid, match="answered 400"):
        embedder_at(batch=1, concurrency=1).embed([str(number) for number in range(500)])
    assert len(endpoint.requests) < 500


def test_a_failure_wakes_the_requests_that_are_pausing(endpoint, embedder_at):
    """Without it this would take the hour that the server asks for."""
    endpoint.gate = threading.Barrier(2)
    endpoint.script(Reply.error(429, Retry_After="3600"), Reply.error(400, "no"))
    with pytest.raises(EmbedderInvalid, match="answered 400"):
        embedder_at(batch=1, concurrency=2, sleep=None, longest_pause_s=3600).embed(["a", "b"])


def _embedded_in_a_child(embedder, answers):
    answers.put([embedder.embed([f"child {number}"]).tolist() for number in range(20)])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_process_has_connections_of_its_own(endpoint, embedder_at):
    """A socket shared after a fork would give each the other's vectors."""
    embedder = embedder_at()
    embedder.embed(["warm"])
    forked = multiprocessing.get_context("fork")
    answers = forked.SimpleQueue()
    child = forked.Process(target=_embedded_in_a_child, args=(embedder, answers))
    child.start()
    for number in range(20):
        assert (embedder.embed([f"parent {number}"]) == wanted([f"parent {number}"])).all()
    assert answers.get() == [wanted([f"child {number}"]).tolist() for number in range(20)]
    child.join()


def test_its_names_open_it_again():
    assert EndpointEmbedder(OPENAI, "m", dimension=3).name == "openai:m"
    assert EndpointEmbedder("http://h:1/v1/", "org/m", dimension=3).name == "openai+http://h:1/v1#org/m"
    assert EndpointEmbedder("http://h:1/v1/embeddings", "m", dimension=3).url == "http://h:1/v1"


def test_its_revision_is_the_name_of_the_model_unless_it_is_said():
    assert EndpointEmbedder(OPENAI, "m", dimension=3).revision == "m"
    assert EndpointEmbedder(OPENAI, "m", dimension=3, revision="2030-01").revision == "2030-01"


@pytest.mark.parametrize("url", ["", "h:1/v1", "ftp://h/v1", "http://", "http://h:x/", "http://[h/", "http://h/?k=v"])
def test_what_is_no_url_of_an_endpoint_is_refused(url):
    with pytest.raises(ValidationError, match="what comes before /embeddings"):
        EndpointEmbedder(url, "m")


def test_a_url_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ValidationError) as refused:
        EndpointEmbedder("https://user:hunter2@h/v1", "m")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("option", ["batch", "max_tokens_per_request", "concurrency", "timeout_s", "attempts"])
def test_a_limit_of_nothing_is_refused(option):
    with pytest.raises(ValidationError):
        EndpointEmbedder(OPENAI, "m", **{option: 0})
