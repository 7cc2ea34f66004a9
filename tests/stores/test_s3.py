"""S3 when it does not answer plainly: every fault on the way, over real servers and one small liar."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.errors import (
    CommitUncertain,
    RagfenceError,
    StoreAuth,
    StoreUnavailable,
    StoreUnsafe,
    UnknownStore,
    ValidationError,
)
from ragfence.stores import s3 as objects_s3_listing
from ragfence.stores.objects import ObjectEntry, Put
from ragfence.stores.s3 import NONCE, ListingPage, PutRetry, S3Objects, flat, walk
from tests.faulty_http import Fault, FaultyProxy
from tests.servers import S3Server, free_ports

pytestmark = pytest.mark.usefixtures("s3_env")

ACTED = [
    Fault.drop_reply(),
    *(Fault.act_then_answer(status) for status in (409, 412, 500, 503)),
]
READ_TIMEOUT_S = 2.0  # how long a hung request takes; enough for a busy machine to answer all others
NOT_ACTED = [
    Fault.drop_request(),
    *(Fault.answer(status) for status in (404, 409, 412, 500, 503)),
]


@pytest.fixture
def proxy(moto_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_server.url) as proxy:
        yield proxy


Open = Callable[..., S3Objects]


@pytest.fixture
def open_store(moto_server: S3Server, proxy: FaultyProxy) -> Iterator[Open]:
    """Opens stores on one empty prefix, through the proxy, which sleep only in name."""
    prefix = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:

        def open_store(**given: Any) -> S3Objects:
            options = {"endpoint_url": proxy.url, "probe": False, "sleep": lambda seconds: None}
            store = S3Objects(moto_server.bucket, prefix, **{**options, **given})
            return stack.enter_context(contextlib.closing(store))

        yield open_store


@pytest.fixture
def direct(open_store: Open, moto_server: S3Server) -> S3Objects:
    """Somebody else's view of the same objects: past the proxy."""
    return open_store(endpoint_url=moto_server.url)


def nonces(proxy: FaultyProxy) -> list[str]:
    return [request.headers[f"x-amz-meta-{NONCE}"] for request in proxy.requests("PUT")]


def methods(proxy: FaultyProxy) -> list[str]:
    return [request.method for request in proxy.log]


def names(store: S3Objects, prefix: str = "", **asked: Any) -> list[str]:
    return [entry.name for entry in store.list(prefix, **asked)]


def test_a_plain_put_is_one_conditional_request(open_store: Open, proxy: FaultyProxy) -> None:
    assert open_store().put_new("t/one", b"1") == Put(won=True)
    (request,) = proxy.log
    assert (request.method, request.headers["if-none-match"]) == ("PUT", "*")
    assert re.fullmatch("[0-9a-f]{32}", request.headers[f"x-amz-meta-{NONCE}"])


def test_a_put_that_is_cut_off_before_its_body_leaves_nothing(
    open_store: Open, proxy: FaultyProxy, seaweed_server: S3Server
) -> None:
    """SeaweedFS makes an empty object of such a request, unless it has a checksum to compare: ours have one."""
    open_store().put_new("t/one", b"1")
    (request,) = proxy.log
    name, client = f"cut-off/{secrets.token_hex(8)}", seaweed_server.client()
    url = urlsplit(client.generate_presigned_url("put_object", Params={"Bucket": seaweed_server.bucket, "Key": name}))
    headers = {"Host": url.netloc, "Content-Length": "1", "Content-MD5": request.headers["content-md5"]}
    with socket.create_connection((url.hostname, url.port)) as line:
        told = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        line.sendall(f"PUT {url.path}?{url.query} HTTP/1.1\r\n{told}\r\n".encode())
        line.shutdown(socket.SHUT_WR)
        line.settimeout(10)
        with contextlib.suppress(OSError):
            line.recv(1000)  # it has made up its mind
    found = client.list_objects_v2(Bucket=seaweed_server.bucket, Prefix=name)
    assert found["KeyCount"] == 0


def test_every_put_has_a_nonce_of_its_own(open_store: Open, proxy: FaultyProxy) -> None:
    store = open_store()
    store.put_new("t/one", b"1")
    store.put_new("t/two", b"1")
    assert len(set(nonces(proxy))) == 2


@pytest.mark.parametrize("fault", [*ACTED, Fault.hang(forward=True)], ids=lambda fault: fault.name)
def test_our_own_write_is_won_whatever_was_answered(open_store: Open, proxy: FaultyProxy, fault: Fault) -> None:
    proxy.script(fault, method="PUT")
    assert open_store(read_timeout_s=READ_TIMEOUT_S).put_new("t/one", b"mine") == Put(won=True)
    assert methods(proxy) == ["PUT", "GET"]


@pytest.mark.parametrize("fault", [*NOT_ACTED, Fault.hang()], ids=lambda fault: fault.name)
def test_a_write_that_is_not_there_is_put_again_with_the_same_nonce(
    open_store: Open, proxy: FaultyProxy, direct: S3Objects, fault: Fault
) -> None:
    proxy.script(fault, method="PUT")
    assert open_store(read_timeout_s=READ_TIMEOUT_S).put_new("t/one", b"mine") == Put(won=True)
    assert methods(proxy) == ["PUT", "GET", "PUT"]
    assert len(set(nonces(proxy))) == 1
    assert direct.get("t/one") == b"mine"


@pytest.mark.parametrize("fault", [*ACTED, *NOT_ACTED], ids=lambda fault: fault.name)
def test_somebody_elses_write_is_lost_whatever_was_answered(
    open_store: Open, proxy: FaultyProxy, direct: S3Objects, fault: Fault
) -> None:
    direct.put_new("t/one", b"theirs")
    proxy.script(fault, method="PUT")
    store = open_store()
    assert store.put_new("t/one", b"mine") == Put(won=False, existing=b"theirs")
    assert store.get("t/one") == b"theirs"


def test_a_412_that_a_retry_of_the_sdk_brought_upon_us_is_won(
    open_store: Open, proxy: FaultyProxy, moto_server: S3Server
) -> None:
    client = moto_server.client(proxy.url, retries={"mode": "standard", "total_max_attempts": 3})
    proxy.script(Fault.drop_reply(), method="PUT")
    with contextlib.closing(client):
        assert open_store(client=client).put_new("t/one", b"mine") == Put(won=True)
    assert methods(proxy) == ["PUT", "PUT", "GET"]  # the second one is the SDK's, and was answered 412


def test_our_own_client_leaves_retries_of_a_put_to_us(open_store: Open, proxy: FaultyProxy) -> None:
    proxy.script(*[Fault.answer(500)] * 2, method="PUT")
    open_store().put_new("t/one", b"1")
    assert methods(proxy) == ["PUT", "GET", "PUT", "GET", "PUT"]


def test_whoever_comes_first_after_a_failed_put_wins(open_store: Open, proxy: FaultyProxy, direct: S3Objects) -> None:
    proxy.script(Fault.answer(500), method="PUT")
    store = open_store(sleep=lambda seconds: direct.put_new("t/one", b"theirs"))
    assert store.put_new("t/one", b"mine") == Put(won=False, existing=b"theirs")


def test_a_write_that_lands_late_is_recognised_as_ours(
    open_store: Open, proxy: FaultyProxy, moto_server: S3Server
) -> None:
    """The first PUT is stuck on its way, the read-back finds nothing, then it lands before the second PUT."""
    client = moto_server.client()
    proxy.script(Fault.drop_request(), method="PUT")

    def land(seconds: float) -> None:
        sent = proxy.requests("PUT")[0]
        _, bucket, key = sent.path.split("/", 2)
        nonce = sent.headers[f"x-amz-meta-{NONCE}"]
        client.put_object(Bucket=bucket, Key=key, Body=b"mine", IfNoneMatch="*", Metadata={NONCE: nonce})

    with contextlib.closing(client):
        assert open_store(sleep=land).put_new("t/one", b"mine") == Put(won=True)
    assert methods(proxy) == ["PUT", "GET", "PUT", "GET"]


def test_a_read_back_that_fails_is_tried_again(open_store: Open, proxy: FaultyProxy, moto_server: S3Server) -> None:
    proxy.script(Fault.drop_reply(), method="PUT")
    proxy.script(Fault.answer(500), Fault.drop_reply(), Fault.cut_reply(), method="GET")
    with contextlib.closing(moto_server.client(proxy.url)) as client:  # one that does not retry
        assert open_store(client=client).put_new("t/one", b"mine" * 100) == Put(won=True)
    assert methods(proxy) == ["PUT", "GET", "PUT", "GET", "PUT", "GET", "GET"]


def test_when_all_tries_are_used_up_the_commit_is_uncertain_and_nothing_is_deleted(
    open_store: Open, proxy: FaultyProxy
) -> None:
    pauses: list[float] = []
    proxy.script(*[Fault.answer(503)] * 99, method="PUT")
    retry = PutRetry(tries=6, base_s=1.0, cap_s=4.0)
    with pytest.raises(CommitUncertain, match=r"t/one .*: SlowDown \(503\)"):
        open_store(put_retry=retry, sleep=pauses.append).put_new("t/one", b"1")
    assert methods(proxy) == ["PUT", "GET"] * 6
    assert len(set(nonces(proxy))) == 1
    assert len(pauses) == 5
    assert all(0 <= pause <= limit for pause, limit in zip(pauses, [2, 4, 4, 4, 4], strict=True))
    assert len(set(pauses)) == 5  # jitter


def test_when_the_time_is_used_up_the_commit_is_uncertain(open_store: Open, proxy: FaultyProxy) -> None:
    proxy.script(*[Fault.answer(503)] * 99, method="PUT")
    with pytest.raises(CommitUncertain):
        open_store(put_retry=PutRetry(budget_s=0)).put_new("t/one", b"1")
    assert methods(proxy) == ["PUT", "GET"]


def test_a_refusal_after_an_unclear_put_is_uncertain(open_store: Open, proxy: FaultyProxy) -> None:
    """The refused one did not happen, but the first may land yet: the caller must not take it for undone."""
    proxy.script(Fault.drop_request(), Fault.answer(403), method="PUT")
    with pytest.raises(CommitUncertain):
        open_store().put_new("t/one", b"1")


def test_a_read_back_that_is_refused_is_uncertain_at_once(open_store: Open, proxy: FaultyProxy) -> None:
    proxy.script(Fault.drop_reply(), method="PUT")
    proxy.script(Fault.answer(403), method="GET")
    with pytest.raises(CommitUncertain):
        open_store().put_new("t/one", b"1")
    assert methods(proxy) == ["PUT", "GET"]


def test_a_refusal_at_the_first_put_is_final(open_store: Open, proxy: FaultyProxy) -> None:
    proxy.script(Fault.answer(403), method="PUT")
    with pytest.raises(StoreAuth) as caught:
        open_store().put_new("t/one", b"1")
    assert "PutObject" in caught.value.hint
    assert methods(proxy) == ["PUT"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_chaos_nobody_is_told_anything_false(
    open_store: Open, proxy: FaultyProxy, direct: S3Objects, seed: int
) -> None:
    """Two writers a name, one after the other: a winner's bytes are there, a loser is told what is there."""
    odds = {Fault.drop_reply(): 0.1, Fault.drop_request(): 0.1, Fault.answer(409): 0.1, Fault.act_then_answer(500): 0.1}
    proxy.chaos(odds, seed=seed)
    store = open_store(put_retry=PutRetry(tries=3))
    told: list[tuple[str, bytes, Put | None]] = []
    for number in range(8):
        for data in (b"first", b"second"):
            try:
                told.append((f"t/{number}", data, store.put_new(f"t/{number}", data)))
            except CommitUncertain:
                told.append((f"t/{number}", data, None))
    for name, data, put in told:
        if put is not None:
            assert direct.get(name) == (data if put.won else put.existing)
            assert put.won == (direct.get(name) == data)
    assert sum(count for fault, count in proxy.counts.items() if fault != "none") > 0


@pytest.mark.parametrize("cuts", [1, 2])
def test_an_object_cut_off_half_way_is_read_again(
    open_store: Open, proxy: FaultyProxy, direct: S3Objects, cuts: int
) -> None:
    direct.put_new("t/one", b"whole" * 100)
    proxy.script(*[Fault.cut_reply()] * cuts, method="GET")
    assert open_store().get("t/one") == b"whole" * 100


def test_an_object_that_is_always_cut_off_is_no_object(open_store: Open, proxy: FaultyProxy, direct: S3Objects) -> None:
    direct.put_new("t/one", b"whole" * 100)
    proxy.script(*[Fault.cut_reply()] * 99, method="GET")
    with pytest.raises(StoreUnavailable):
        open_store().get("t/one")


def test_a_failed_read_is_repeated_by_the_sdk(open_store: Open, proxy: FaultyProxy, direct: S3Objects) -> None:
    direct.put_new("t/one", b"1")
    proxy.script(Fault.answer(503), method="GET")
    assert open_store().get("t/one") == b"1"
    proxy.script(Fault.drop_reply(), method="GET")
    assert names(open_store()) == ["t/one"]


def test_a_listing_asks_for_no_more_than_it_needs(open_store: Open, proxy: FaultyProxy, direct: S3Objects) -> None:
    for number in range(5):
        direct.put_new(f"t/{number}", b"")
    store = open_store(probe=True)
    proxy.log.clear()
    assert names(store, "t/", limit=1) == ["t/0"]
    assert methods(proxy) == ["GET"]
    assert list(store.list("t/", limit=0)) == []
    listing = store.list("t/")
    assert methods(proxy) == ["GET"]  # not before somebody iterates
    next(listing)
    assert methods(proxy) == ["GET", "GET"]


def test_only_whole_pages_more_are_fetched_as_they_are_needed(
    open_store: Open, proxy: FaultyProxy, direct: S3Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        direct.put_new(f"t/{number}", b"")
    monkeypatch.setattr(objects_s3_listing, "PAGE", 2)
    listing = open_store().list("t/")
    assert [next(listing).name, next(listing).name] == ["t/0", "t/1"]
    assert methods(proxy) == ["GET"]
    assert [entry.name for entry in listing] == ["t/2", "t/3", "t/4"]
    assert methods(proxy) == ["GET"] * 3


def test_folder_objects_that_consoles_leave_are_not_listed(open_store: Open, moto_server: S3Server) -> None:
    store = open_store()
    store.put_new("t/one", b"1")
    with contextlib.closing(moto_server.client()) as client:
        client.put_object(Bucket=moto_server.bucket, Key=f"{store.url.rpartition('/')[2]}/t/", Body=b"")
    assert names(store) == ["t/one"]
    assert names(store, "t/") == ["t/one"]


def test_deletes_go_in_batches_of_a_thousand(open_store: Open, proxy: FaultyProxy, direct: S3Objects) -> None:
    for name in ("t/0", "t/999", "t/1000", "t/kept"):
        direct.put_new(name, b"1")
    open_store().delete([f"t/{number}" for number in range(1001)])
    assert methods(proxy) == ["POST", "POST"]
    assert names(direct) == ["t/kept"]


def test_stores_on_different_prefixes_do_not_see_each_other(moto_server: S3Server) -> None:
    bases = [secrets.token_hex(8)] * 2
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(
                contextlib.closing(
                    S3Objects(moto_server.bucket, f"{base}/{end}", endpoint_url=moto_server.url, probe=False)
                )
            )
            for base, end in zip(bases, ("a", "ab"), strict=True)
        )
        assert one.put_new("t", b"1").won
        assert other.put_new("t", b"2").won
        assert (names(one), names(other)) == (["t"], ["t"])
        assert (one.get("t"), other.get("t")) == (b"1", b"2")


def test_a_forked_child_makes_connections_of_its_own(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    ours = store._clients
    assert store._clients is ours
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert store._clients is not ours


def test_a_client_that_was_given_is_not_closed(open_store: Open, moto_server: S3Server) -> None:
    with contextlib.closing(moto_server.client()) as client:
        closed: list[bool] = []
        client.close, close = lambda: closed.append(True), client.close
        store = open_store(client=client)
        store.put_new("t/one", b"1")
        store.close()
        assert closed == []
        client.close = close


def every_call(store: S3Objects) -> Iterator[Callable[[], Any]]:
    yield lambda: store.put_new("t/one", b"1")
    yield lambda: store.get("t/one")
    yield lambda: list(store.list("t/"))
    yield lambda: store.delete(["t/one"])
    yield store.probe


def expect(error: type[RagfenceError], store: S3Objects, hint: str, says: str = "") -> None:
    for call in every_call(store):
        with pytest.raises(error, match=says) as caught:
            call()
        assert type(caught.value) is error
        assert hint in caught.value.hint


def test_a_missing_bucket_is_an_unknown_store(open_store: Open, moto_server: S3Server) -> None:
    with contextlib.closing(S3Objects("no-such-bucket", endpoint_url=moto_server.url, probe=False)) as store:
        expect(UnknownStore, store, "create it first: aws s3 mb s3://no-such-bucket", "has no bucket")
    with pytest.raises(UnknownStore):
        S3Objects("no-such-bucket", endpoint_url=moto_server.url)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket": ""}, "cannot open"),
        ({"bucket": "no spaces"}, "Invalid bucket name"),
        ({"prefix": "p" * 121}, "cannot open"),
        ({"endpoint_url": "no url"}, "is not the URL of an endpoint"),
        ({"endpoint_url": "http://key:hunter2@127.0.0.1:1"}, "credentials"),
    ],
)
def test_what_cannot_be_opened_is_said_at_open(options: dict[str, str], says: str) -> None:
    with pytest.raises(UnknownStore, match=says) as caught:
        S3Objects(**{"bucket": "bucket", "endpoint_url": "http://127.0.0.1:1", **options})
    assert "hunter2" not in str(caught.value)


def test_a_prefix_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValidationError):
        S3Objects("bucket", "a//b", probe=False)


def test_an_endpoint_nobody_listens_at_is_unavailable() -> None:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    pauses: list[float] = []
    options = {"endpoint_url": endpoint, "probe": False, "put_retry": PutRetry(tries=3), "sleep": pauses.append}
    with contextlib.closing(S3Objects("bucket", **options)) as store:
        with pytest.raises(StoreUnavailable) as caught:  # not uncertain: nothing was sent
            store.put_new("t/one", b"1")
        assert "nothing was written" in caught.value.hint
        assert len(pauses) == 2
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}"):
            store.get("t/one")
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}"):
            store.probe()


def test_without_credentials_the_error_says_how_to_set_them(
    moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with contextlib.closing(S3Objects(moto_server.bucket, endpoint_url=moto_server.url, probe=False)) as store:
        expect(StoreAuth, store, "AWS_ACCESS_KEY_ID", "credentials")


def test_the_url_names_bucket_and_prefix() -> None:
    assert S3Objects("bucket", "/a/b/", probe=False).url == "s3://bucket/a/b"
    assert S3Objects("bucket", probe=False).url == "s3://bucket"


@pytest.mark.xdist_group("seaweedfs")  # slow to start: one worker only
class TestOnARealServer:
    """What moto cannot show: it checks no signatures, and lists in byte order."""

    def test_a_wrong_secret_is_refused(self, seaweed_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with contextlib.closing(
            S3Objects(seaweed_server.bucket, endpoint_url=seaweed_server.url, probe=False)
        ) as store:
            expect(StoreAuth, store, "AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")

    def test_an_unknown_key_is_refused(self, seaweed_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        with pytest.raises(StoreAuth, match="InvalidAccessKeyId") as caught:
            S3Objects(seaweed_server.bucket, endpoint_url=seaweed_server.url)
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint

    def test_a_missing_bucket_is_not_made(self, seaweed_server: S3Server) -> None:
        with pytest.raises(UnknownStore, match="has no bucket"):
            S3Objects("no-such-bucket", endpoint_url=seaweed_server.url)

    def test_the_probe_accepts_it_and_leaves_nothing(self, seaweed_server: S3Server) -> None:
        prefix = secrets.token_hex(8)
        with contextlib.closing(S3Objects(seaweed_server.bucket, prefix, endpoint_url=seaweed_server.url)) as store:
            assert names(store) == []

    @pytest.mark.parametrize("fault", [Fault.drop_reply(), Fault.answer(503)], ids=lambda fault: fault.name)
    def test_a_fault_on_the_way_is_seen_through(self, seaweed_server: S3Server, fault: Fault) -> None:
        """Also that the proxy keeps signatures valid: this server checks them."""
        prefix = secrets.token_hex(8)
        with FaultyProxy(seaweed_server.url) as proxy:
            proxy.script(fault, method="PUT")
            options = {"endpoint_url": proxy.url, "probe": False, "sleep": lambda seconds: None}
            with contextlib.closing(S3Objects(seaweed_server.bucket, prefix, **options)) as store:
                assert store.put_new("t/one", b"mine") == Put(won=True)
                assert store.put_new("t/one", b"more") == Put(won=False, existing=b"mine")


class Liar(ThreadingHTTPServer):
    """An S3 server of a few lines which can be told how to fail its clients."""

    def __init__(self, how: str) -> None:
        super().__init__(("127.0.0.1", 0), _LiarHandler)
        self.how = how
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _LiarHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Liar

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        meta = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
        taken, how = self.path in self.server.objects, self.server.how
        if how == "does not implement If-None-Match":
            return self._say(501, b"<Error><Code>NotImplemented</Code></Error>")
        if not taken or how in ("ignores If-None-Match", "overwrites, then says 412"):
            self.server.objects[self.path] = (data, {} if how == "drops metadata" else meta)
        if taken and how != "ignores If-None-Match":
            return self._say(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return self._say(200)

    def do_GET(self) -> None:
        if self.path in self.server.objects:
            data, meta = self.server.objects[self.path]
            return self._say(200, data, meta)
        if "list-type=2" not in self.path:
            return self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        after, prefix = asked.get("start-after", ""), asked.get("prefix", "")
        keys = sorted(unquote(path.split("/", 2)[2]) for path in self.server.objects)
        if self.server.how == "lists late":
            keys = []
        listed = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
            if key.startswith(prefix) and key > after
        )
        return self._say(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        if self.server.how == "deletes nothing":
            errors = "".join(f"<Error><Key>{key}</Key><Code>InternalError</Code></Error>" for key in keys)
            return self._say(200, f"<DeleteResult>{errors}</DeleteResult>".encode())
        for key in keys:
            self.server.objects.pop(f"/bucket/{key}", None)
        return self._say(200, b"<DeleteResult></DeleteResult>")

    def _say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": len(body), "Connection": "close"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def lying(how: str) -> Iterator[Liar]:
    server = Liar(how)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ignores If-None-Match", "ignores If-None-Match"),
        ("overwrites, then says 412", "ignores If-None-Match"),
        ("does not implement If-None-Match", "not implemented"),
        ("drops metadata", "drops user metadata"),
        ("lists late", "does not list what was just written"),
    ],
)
def test_a_server_that_cannot_keep_the_promise_is_refused_at_open(how: str, says: str) -> None:
    with lying(how) as server:
        with pytest.raises(StoreUnsafe, match=says) as caught:
            S3Objects("bucket", "p", endpoint_url=server.url)
        assert "s3://bucket/p" in str(caught.value)
        assert server.objects == {}


def test_a_server_that_honours_only_the_single_put_is_accepted() -> None:
    with lying("in no way") as server, contextlib.closing(S3Objects("bucket", "p", endpoint_url=server.url)) as store:
        assert server.objects == {}
        store.put_new("t/one", b"1")
        assert list(server.objects) == ["/bucket/p/t/one"]


def test_errors_inside_the_answer_to_a_delete_are_raised() -> None:
    with lying("deletes nothing") as server:
        store = S3Objects("bucket", endpoint_url=server.url, probe=False)
        with contextlib.closing(store), pytest.raises(StoreUnavailable, match=r"cannot delete 2 of 2 .* InternalError"):
            store.delete(["t/one", "t/two"])


def test_a_probe_that_cannot_be_deleted_is_no_reason_to_refuse() -> None:
    with lying("deletes nothing") as server:
        S3Objects("bucket", endpoint_url=server.url).close()


PART = st.text(st.sampled_from("aB0-.%~"), min_size=1, max_size=3)
NAME = st.lists(PART, min_size=1, max_size=3).map("/".join)


def serve(names: list[str], *, by_folder: bool) -> Callable[..., Iterator[ListingPage]]:
    """A server that sorts whole names, as S3 does, or level by level, as SeaweedFS does."""

    def position(name: str) -> Any:
        return name.rstrip("/").split("/") if by_folder else name

    def pages(prefix: str, *, start_after: str, page_size: int, one_level: bool) -> Iterator[ListingPage]:
        base = prefix[: prefix.rfind("/") + 1]
        found: set[str] = set()
        for name in names:
            head, slash, _ = name[len(base) :].partition("/")
            rolled = base + head + slash if one_level else name
            if name.startswith(prefix) and (not start_after or position(rolled) > position(start_after)):
                found.add(rolled)
        ordered = sorted(found, key=position)
        for at in range(0, len(ordered), page_size):
            page = ordered[at : at + page_size]
            entries = [ObjectEntry(name, 0, 0) for name in page if not name.endswith("/")]
            yield ListingPage(entries, [name[:-1] for name in page if name.endswith("/")])

    return pages


@settings(deadline=None)
@given(st.sets(NAME, max_size=20), NAME, st.text(st.sampled_from("aB0-.%~/"), max_size=4), st.booleans())
def test_a_walk_is_sorted_on_servers_of_both_kinds(wanted: set[str], prefix: str, after: str, by_folder: bool) -> None:
    """For all names, prefixes and starts: what is listed is what sorting the names would give."""
    there = sorted(name for name in wanted if not any(other.startswith(f"{name}/") for other in wanted))
    pages = serve(there, by_folder=by_folder)
    for beginning in ("", prefix[:1], prefix):
        expected = [name for name in there if name.startswith(beginning) and name > after]
        for limit in (None, 1):
            listed = [entry.name for entry in walk(pages, beginning, after, limit)]
            assert listed == expected
        if not by_folder:
            assert [entry.name for entry in flat(pages, beginning, after, None)] == expected
