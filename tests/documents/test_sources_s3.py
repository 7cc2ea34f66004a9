"""A prefix on S3 as a source, on moto and on SeaweedFS, and when the server does not answer plainly."""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from ragfence.core.document import Document
from ragfence.documents.sources import S3Source, source_of
from ragfence.errors import DocumentInvalid, StoreAuth, StoreUnavailable, UnknownStore
from tests.faulty_http import Fault, FaultyProxy
from tests.servers import S3Server, free_ports

pytestmark = pytest.mark.usefixtures("s3_env")


@pytest.fixture(
    params=["moto", pytest.param("seaweedfs", marks=pytest.mark.xdist_group("seaweedfs"))]  # slow to start: one worker
)
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue("moto_server" if request.param == "moto" else "seaweed_server")


@pytest.fixture
def client(server: S3Server) -> Iterator[Any]:
    with closing(server.client()) as client:
        yield client


Put = Callable[..., None]


@pytest.fixture
def prefix() -> str:
    return f"docs-{secrets.token_hex(4)}"


@pytest.fixture
def put(server: S3Server, client: Any, prefix: str) -> Put:
    def put(path: str, data: bytes | str = "text") -> None:
        body = data.encode() if isinstance(data, str) else data
        client.put_object(Bucket=server.bucket, Key=f"{prefix}/{path}", Body=body)

    return put


@pytest.fixture
def source(server: S3Server, prefix: str) -> Iterator[S3Source]:
    with closing(S3Source(server.bucket, prefix, endpoint_url=server.url)) as source:
        yield source


def test_objects_below_the_prefix_are_documents(
    server: S3Server, client: Any, prefix: str, put: Put, source: S3Source
) -> None:
    put("guide/how to.md", b"\xef\xbb\xbf# Hello")
    put("page.html", "<title>T</title><h1>A</h1>b")
    put("image.png", b"\x89PNG")
    put("folder.md/", "")
    put(".hidden.png", "")
    client.put_object(Bucket=server.bucket, Key=f"{prefix}-old/other.md", Body=b"no")
    assert source.name == f"s3://{server.bucket}/{prefix}"
    assert {item.doc_id: item.load() for item in source.items()} == {
        "guide/how to.md": Document(
            "guide/how to.md",
            "# Hello",
            {"path": "guide/how to.md"},
            f"s3://{server.bucket}/{prefix}/guide/how to.md",
            content_type="text/markdown",
        ),
        "page.html": Document(
            "page.html",
            "# A\n\nb",
            {"path": "page.html", "title": "T"},
            f"s3://{server.bucket}/{prefix}/page.html",
            content_type="text/html",
        ),
    }
    assert (source.skipped.extensions, source.skipped.special) == ({".png": 1}, 0)


def test_the_state_changes_with_the_content_and_only_with_it(put: Put, source: S3Source) -> None:
    put("a.md", "one")
    put("b.md", "one more")
    first = {item.doc_id: item.state for item in source.items()}
    assert first["a.md"].endswith(":3")
    assert '"' not in "".join(first.values())
    assert {item.doc_id: item.state for item in source.items()} == first
    put("a.md", "two")
    second = {item.doc_id: item.state for item in source.items()}
    assert second["a.md"] != first["a.md"]
    assert second["b.md"] == first["b.md"]


def test_what_is_ignored_in_a_folder_is_ignored_here(server: S3Server, prefix: str, put: Put) -> None:
    for path in ("a.md", ".hidden/b.md", "node_modules/c.md", "drafts/d.md", "drafts/keep.md", "x.rst"):
        put(path)
    options: dict[str, Any] = {"ignore": ["drafts/", "!keep.md"], "extensions": ["md", "rst"]}
    with closing(S3Source(server.bucket, prefix, endpoint_url=server.url, **options)) as source:
        assert {item.doc_id for item in source.items()} == {"a.md", "x.rst"}


def test_keys_of_any_script_have_ids_in_nfc(put: Put, source: S3Source) -> None:
    put("re\u0301sume\u0301 & more/\u65e5\u672c.md", "hello")
    (item,) = source.items()
    assert item.doc_id == "r\u00e9sum\u00e9 & more/\u65e5\u672c.md"
    document = item.load()
    assert document.text == "hello"
    assert document.source_url.endswith("/re\u0301sume\u0301 & more/\u65e5\u672c.md")


def test_listings_of_many_pages_are_read_page_by_page(server: S3Server, client: Any, prefix: str, put: Put) -> None:
    paths = {f"{number:02}.md" for number in range(25)}
    for path in sorted(paths):
        put(path)
    asked: list[dict[str, Any]] = []

    def ask_for_less(params: dict[str, Any], **_: Any) -> None:
        params["MaxKeys"] = 10
        asked.append(params)

    client.meta.events.register("before-parameter-build.s3.ListObjectsV2", ask_for_less)
    items = S3Source(server.bucket, prefix, client=client).items()
    found = {next(items).doc_id}
    assert len(asked) == 1
    found |= {item.doc_id for item in items}
    assert (found, len(asked)) == (paths, 3)


def test_a_url_is_enough(server: S3Server, prefix: str, put: Put) -> None:
    put("a.md", "hello")
    source = source_of(f"s3://{server.bucket}/{prefix}/?endpoint_url={server.url}&region={server.region}")
    assert isinstance(source, S3Source)
    with closing(source):
        assert [item.load().text for item in source.items()] == ["hello"]


def test_the_whole_bucket_is_the_empty_prefix(server: S3Server, client: Any) -> None:
    bucket = f"whole-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="top/a.md", Body=b"hello")
    with closing(S3Source(bucket, endpoint_url=server.url)) as source:
        assert source.name == f"s3://{bucket}"
        (item,) = source.items()
        assert (item.doc_id, item.load().source_url) == ("top/a.md", f"s3://{bucket}/top/a.md")


def test_an_object_overwritten_after_it_was_listed_is_read_as_it_is_and_again_the_next_time(
    put: Put, source: S3Source
) -> None:
    put("a.md", "one")
    (listed,) = source.items()
    put("a.md", "newer")
    assert listed.load().text == "newer"
    (again,) = source.items()
    assert again.state != listed.state


def test_an_object_that_is_gone_or_too_big_or_no_text_is_told_by_its_id(
    server: S3Server, client: Any, prefix: str, put: Put
) -> None:
    put("gone.md")
    put("grown.md")
    put("big.md", "x" * 101)
    put("binary.md", b"\xff\xfe\x00")
    with closing(S3Source(server.bucket, prefix, endpoint_url=server.url, limit_bytes=100)) as source:
        items = {item.doc_id: item for item in source.items()}
        client.delete_object(Bucket=server.bucket, Key=f"{prefix}/gone.md")
        put("grown.md", "x" * 101)
        for path, told in {
            "gone.md": "was removed before it was read",
            "grown.md": "has 101 bytes, and the limit is 100",
            "big.md": "has 101 bytes, and the limit is 100",
            "binary.md": "is binary data, not text",
        }.items():
            with pytest.raises(DocumentInvalid, match=told) as error:
                items[path].load()
            assert error.value.doc_id == path
            assert error.value.message.startswith(f"{path} (s3://{server.bucket}/{prefix})")


def test_a_bucket_that_is_not_there_is_an_error_and_not_an_empty_source(server: S3Server) -> None:
    source = S3Source("no-such-bucket-here", "x", endpoint_url=server.url)
    with closing(source), pytest.raises(UnknownStore, match="no bucket 'no-such-bucket-here'"):
        next(source.items())


def test_an_empty_prefix_yields_nothing(source: S3Source) -> None:
    assert list(source.items()) == []


def test_a_closed_source_can_be_used_again(put: Put, source: S3Source) -> None:
    put("a.md", "hello")
    (item,) = source.items()
    source.close()
    source.close()
    assert item.load().text == "hello"


class TestFaults:
    """Over moto alone: what matters is what the client gets to hear."""

    @pytest.fixture
    def server(self, moto_server: S3Server) -> S3Server:
        return moto_server

    @pytest.fixture
    def proxy(self, server: S3Server) -> Iterator[FaultyProxy]:
        with FaultyProxy(server.url) as proxy:
            yield proxy

    @pytest.fixture
    def source(self, server: S3Server, prefix: str, proxy: FaultyProxy) -> Iterator[S3Source]:
        with closing(S3Source(server.bucket, prefix, endpoint_url=proxy.url)) as source:
            yield source

    def test_a_body_that_is_cut_off_is_read_again(self, put: Put, source: S3Source, proxy: FaultyProxy) -> None:
        put("a.md", "x" * 50_000)
        (item,) = source.items()
        proxy.script(Fault.cut_reply(), Fault.cut_reply(), path="*/a.md")
        assert item.load().text == "x" * 50_000

    def test_a_body_that_is_always_cut_off_is_no_fault_of_the_document(
        self, put: Put, source: S3Source, proxy: FaultyProxy
    ) -> None:
        put("a.md", "x" * 50_000)
        (item,) = source.items()
        proxy.script(*[Fault.cut_reply()] * 3, path="*/a.md")
        with pytest.raises(StoreUnavailable, match=r"cannot read a\.md"):
            item.load()
        assert item.load().text == "x" * 50_000

    def test_an_object_nobody_may_read_is_told_by_its_id(self, put: Put, source: S3Source, proxy: FaultyProxy) -> None:
        put("a.md")
        (item,) = source.items()
        proxy.script(Fault.answer(403), path="*/a.md")
        with pytest.raises(DocumentInvalid, match=r"a\.md .* cannot be read") as error:
            item.load()
        assert error.value.doc_id == "a.md"

    def test_a_listing_that_fails_in_the_middle_raises_and_does_not_end(
        self, server: S3Server, prefix: str, put: Put, proxy: FaultyProxy
    ) -> None:
        for number in range(4):
            put(f"{number}.md")
        with closing(server.client(endpoint_url=proxy.url)) as client:
            client.meta.events.register(
                "before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=2)
            )
            items = S3Source(server.bucket, prefix, client=client).items()
            assert [next(items).doc_id, next(items).doc_id] == ["0.md", "1.md"]
            proxy.script(Fault.answer(503))
            with pytest.raises(StoreUnavailable, match="cannot list the documents"):
                next(items)


def test_a_server_that_is_not_there_is_told(prefix: str) -> None:
    (port,) = free_ports(1)
    source = S3Source("bucket", prefix, endpoint_url=f"http://127.0.0.1:{port}")
    with closing(source), pytest.raises(StoreUnavailable):
        next(source.items())


@pytest.mark.xdist_group("seaweedfs")
def test_wrong_credentials_are_told(seaweed_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    source = S3Source(seaweed_server.bucket, prefix, endpoint_url=seaweed_server.url)
    with closing(source), pytest.raises(StoreAuth, match="SignatureDoesNotMatch"):
        next(source.items())


def test_an_endpoint_that_is_no_url_is_told() -> None:
    with pytest.raises(UnknownStore, match="endpoint"):
        next(S3Source("bucket", endpoint_url="nonsense").items())


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_boto3(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_boto3)
    with pytest.raises(UnknownStore, match="needs the package 'boto3'") as error:
        next(S3Source("bucket").items())
    assert error.value.hint == "pip install 'ragfence[s3]'"
