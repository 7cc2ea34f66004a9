"""The password of a store URL is in no message, no repr, no chained exception, no log line and not in `ps`."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
import redis
from typer.testing import CliRunner

import ragfence
from ragfence.cli.app import app
from ragfence.cli.options import StoreOptions
from ragfence.client import Client, RetryPolicy
from ragfence.core.settings import Settings
from ragfence.core.urls import holds_password, show_url
from ragfence.dagster import FenceResource
from ragfence.dagster.component import RagIndexComponent
from ragfence.documents.sources import source_of
from ragfence.indexes.backends.registry import open_backend
from ragfence.indexes.embedders.registry import open_embedder
from ragfence.server.app import create_app
from ragfence.server.serve import AppSettings
from ragfence.stores.object_address import open_address
from ragfence.stores.s3 import S3Objects
from tests import servers
from tests.cli.test_serve import line, serving

SECRET = "hunter2"
CLOSED = "127.0.0.1:1"
"""nobody listens there"""

RIGHT = [
    f"redis://:{SECRET}@{CLOSED}/0",
    f"rediss://app:{SECRET}@{CLOSED}/0",
    f"redis://{CLOSED}/0?password={SECRET}",
    f"redis+sentinel://app:{SECRET}@{CLOSED}/main/0?sentinel_password={SECRET}",
    f"redis+cluster://app:{SECRET}@{CLOSED}",
    f"unix://app:{SECRET}@/nowhere/redis.sock?db=0",
]
MISTYPED = [
    # the scheme
    f"redsi://:{SECRET}@{CLOSED}/0",
    f"http://app:{SECRET}@{CLOSED}/0",
    f"sqlite://app:{SECRET}@{CLOSED}/0",
    f"file://app:{SECRET}@{CLOSED}/0",
    f"redis:/:{SECRET}@{CLOSED}/0",
    f"redis//:{SECRET}@{CLOSED}/0",
    f"redis:{SECRET}@{CLOSED}/0",
    f"://:{SECRET}@{CLOSED}/0",
    f":{SECRET}@{CLOSED}/0",
    f"app:{SECRET}@{CLOSED}/0",
    f" redis://:{SECRET}@{CLOSED}/0",
    f"redis:///:{SECRET}@{CLOSED}/0",
    # the @
    f"redis://:{SECRET}{CLOSED}/0",
    f"redis://app:{SECRET}/{CLOSED}/0",
    f"redis://app:{SECRET}",
    f"redis://app:{SECRET}#{CLOSED}/0",
    f"redis+sentinel://app:{SECRET}{CLOSED}/main/0",
    f"redis+cluster://app:{SECRET}{CLOSED}",
    # the port
    f"redis://:{SECRET}@127.0.0.1:port/0",
    f"redis://:{SECRET}@127.0.0.1:99999/0",
    f"redis+cluster://:{SECRET}@127.0.0.1:port",
    f"redis+sentinel://:{SECRET}@127.0.0.1:port/main/0",
    f"redis+sentinel://:{SECRET}@{CLOSED}",
    # spaces, percent signs, characters that want to be encoded
    f"redis://:{SECRET} @{CLOSED} /0",
    f"redis://:{SECRET}%@{CLOSED}%zz/0",
    f"redis://:a{SECRET}/b@{CLOSED}:x/0",
    f"redis://:{SECRET}?x@{CLOSED}:x/0",
    f"redis://:[{SECRET}@{CLOSED}/0",
    f"redis://:\u2100{SECRET}@{CLOSED}/0",
    f"redis://:{SECRET}@{CLOSED}/zero",
    f"redis://{CLOSED}/0?password={SECRET}&db=zero",
]
BUCKETS = [
    f"s3://AKIA:{SECRET}@bucket/prefix",
    f"s3://AKIA:{SECRET}/bucket",
    f"s3://bucket?secret={SECRET}",
    f"s3://bucket?endpoint_url=http://app:{SECRET}@{CLOSED}",
    f"s3://bucket?endpoint_url=http://app:{SECRET}{CLOSED}",
    f"s3://bucket?endpoint_url=http://[{SECRET}",
    f"s3://\u2100{SECRET}@bucket",
    f"s3:AKIA:{SECRET}@bucket",
]


def said_by(call: Callable[[], Any]) -> str:
    """Everything that a call shows of itself: its exceptions with what they come from, and log lines at DEBUG."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        made = call()
    except Exception as error:
        return heard.getvalue() + "\n".join(chain(error))
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    return heard.getvalue() + f"{made!r} {made}"


def chain(error: BaseException) -> Iterator[str]:
    """Each exception that led here, suppressed ones too."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield f"{each!r} {each} {each.__dict__} {getattr(each, '__notes__', '')}"
        waiting += [linked for linked in (each.__cause__, each.__context__) if linked is not None]


@pytest.fixture(autouse=True)
def _a_quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "OBJECTS", "TENANT", "POLICY", "URL", "API_KEY"):
        monkeypatch.delenv(f"RAGFENCE_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("url", RIGHT + MISTYPED)
def test_an_error_of_open_shows_no_password(url: str, tmp_path: Path) -> None:
    said = said_by(lambda: ragfence.open(url, objects=tmp_path / "objects").stats())
    assert SECRET not in said
    assert re.search(r"StoreUnavailable|UnknownStore|StoreAuth", said)
    assert not any(SECRET in str(made) for made in tmp_path.rglob("*"))


@pytest.mark.parametrize("url", RIGHT + MISTYPED)
def test_a_server_that_cannot_start_shows_no_password(url: str, tmp_path: Path) -> None:
    assert SECRET not in said_by(lambda: create_app(url, objects=str(tmp_path / "objects"), insecure_dev=True))


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize("entry", ["open", "source", "address"])
def test_an_error_about_a_bucket_shows_no_secret(url: str, entry: str, tmp_path: Path) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "open": lambda: ragfence.open(tmp_path, objects=url),
        "source": lambda: source_of(url),
        "address": lambda: open_address(url),
    }
    assert SECRET not in said_by(calls[entry])


@pytest.mark.parametrize("endpoint", [f"http://a:{SECRET}@{CLOSED}", f"http://a:{SECRET}{CLOSED}", f"ttp:{SECRET}@h"])
def test_an_error_about_an_endpoint_shows_no_secret(endpoint: str) -> None:
    assert SECRET not in said_by(lambda: S3Objects("bucket", endpoint_url=endpoint))


@pytest.mark.parametrize("form", ["app:{}@host:1", ":{}host:1", "[{}", "\u2100{}@h", "app:{}/host"])
@pytest.mark.parametrize(
    "scheme", ["qdrant+http://", "qdrant+https://", "qdarnt+http://", "lance+s3://", "pinecone:", "lance+"]
)
def test_an_error_about_a_backend_shows_no_password(form: str, scheme: str) -> None:
    assert SECRET not in said_by(lambda: open_backend(scheme + form.format(SECRET), default_lance="/nowhere").url)


@pytest.mark.parametrize("form", ["app:{}@host:1#m", ":{}host:1#m", "[{}#m", "\u2100{}@h#m"])
@pytest.mark.parametrize("scheme", ["openai+http://", "opanai+https://", "openai+http//"])
def test_an_error_about_an_embedder_shows_no_password(form: str, scheme: str) -> None:
    assert SECRET not in said_by(lambda: open_embedder(scheme + form.format(SECRET)))


@pytest.mark.parametrize("form", ["app:{}@host:1", ":{}host:1", "[{}", "\u2100{}@h"])
@pytest.mark.parametrize("scheme", ["http://", "https://", "htp://", "http:/", ""])
def test_an_error_of_the_client_shows_neither_password_nor_key(form: str, scheme: str) -> None:
    assert SECRET not in said_by(lambda: Client(scheme + form.format(SECRET), "rf_key"))
    assert SECRET not in said_by(lambda: Client(f"http://{CLOSED}", f"rf {SECRET}\n"))


def test_a_client_that_reaches_nobody_does_not_show_its_key() -> None:
    client = Client(f"http://{CLOSED}", f"rf_{SECRET}", retry=RetryPolicy(budget_s=0.2))
    assert "127.0.0.1" in said_by(client.stats)
    assert SECRET not in said_by(client.stats) + repr(client)


@pytest.mark.parametrize("url", RIGHT + MISTYPED)
def test_a_repr_shows_no_password(url: str) -> None:
    shown: list[Any] = [
        Settings(store=url, objects=url),
        Settings.from_env({"RAGFENCE_STORE": url}),
        AppSettings(store=url, objects=url),
        StoreOptions(url, url),
        FenceResource(store=url, objects=url),
        RagIndexComponent(source=url, alias="docs", store=url, objects=url),
    ]
    for each in shown:
        assert SECRET not in f"{each!r} {each}", type(each).__name__
        assert "tenant=" in repr(each) or isinstance(each, AppSettings)  # the rest is shown as ever


def test_a_repr_shows_where_the_store_is() -> None:
    assert repr(Settings(store=f"redis://:{SECRET}@cache:6379/0")) == (
        "Settings(store='redis://cache:6379/0', objects=None, tenant='default', policy=None)"
    )
    assert "FENCES" in repr(FenceResource(store=dg.EnvVar("FENCES")))


def test_a_dagster_run_logs_no_password(tmp_path: Path) -> None:
    @dg.op
    def use(fence: FenceResource) -> None:
        dg.get_dagster_logger().info(f"with {fence}")
        with fence.open() as opened:
            opened.stats()

    @dg.job
    def work() -> None:
        use()

    heard: list[str] = []

    def run() -> Any:
        resource = FenceResource(store=f"redis://:{SECRET}@{CLOSED}/0", objects=str(tmp_path))
        with dg.DagsterInstance.ephemeral() as instance:
            done = work.execute_in_process(resources={"fence": resource}, instance=instance, raise_on_error=False)
            assert not done.success
            heard.extend(str(entry) for entry in instance.all_logs(done.run_id))
            return done.success

    assert SECRET not in said_by(run)
    assert any("did not answer" in entry for entry in heard)
    assert SECRET not in "\n".join(heard)


COMMANDS = [["status"], ["doctor"], ["ingest", "nothing"], ["audit", "check"], ["apikeys", "list"], ["tenants", "list"]]


def output_of(*words: str, **environ: str) -> str:
    done = CliRunner().invoke(app, list(words), env=environ)
    raised = list(chain(done.exception)) if done.exception is not None else []
    return "\n".join([done.stdout, done.stderr, *raised])


@pytest.mark.parametrize("url", MISTYPED[::6])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_the_password_of_its_store(command: list[str], url: str, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "url").write_text(url)
    more = ["--objects", str(tmp_path / "objects")]
    for given in (["--store", url], ["--store-env", "FENCES"], ["--store-file", "url"], ["--store-env", url]):
        assert SECRET not in output_of(*command, *more, *given, FENCES=url), given
    assert SECRET not in output_of(*command, "--json", RAGFENCE_STORE=url, RAGFENCE_OBJECTS=str(tmp_path / "objects"))


@pytest.mark.parametrize("url", (RIGHT + MISTYPED)[::6])
def test_wrong_usage_shows_no_password(url: str) -> None:
    for words in ([url], ["status", url], ["status", f"--bad={url}"], ["serve", "--port", url], ["audit", url]):
        assert SECRET not in output_of(*words), words
    assert SECRET not in output_of("status", "--store-file", url)


def test_a_password_on_the_command_line_is_warned_of() -> None:
    said = output_of("status", "--store", f"redis://:{SECRET}@{CLOSED}/0")
    assert re.search(r"WARNING: .*\(ps\).*--store-env.*--store-file", said)
    assert "WARNING" not in output_of("status", "--store-env", "FENCES", FENCES=f"redis://:{SECRET}@{CLOSED}/0")
    assert "WARNING" not in output_of("status", "--store", f"redis://{CLOSED}/0")


def test_the_three_ways_to_name_a_store_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"redis://{CLOSED}/0\n")
    for pair in itertools.combinations((["--store", "x"], ["--store-env", "PATH"], ["--store-file", "url"]), 2):
        done = CliRunner().invoke(app, ["status", *itertools.chain(*pair)])
        assert done.exit_code == 2, done.output


def test_a_store_variable_or_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_text("x" * 100_000)
    for given in (
        ["--store-env", "NOT_SET"],
        ["--store-file", "absent"],
        ["--store-file", "empty"],
        ["--store-file", "pipe"],
        ["--store-file", "huge"],
        ["--store-file", "."],
    ):
        done = CliRunner().invoke(app, ["status", *given])
        assert done.exit_code == 2, (given, done.output)


@pytest.mark.parametrize("way", ["--store-env", "--store-file"])
def test_ps_does_not_show_the_password_of_a_server(
    way: str, tmp_path: Path, valkey_server: servers.RedisServer
) -> None:
    with redis.Redis.from_url(valkey_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "guard", "on", f">{SECRET}", "~*", "&*", "+@all")
    url = valkey_server.url.replace("redis://", f"redis://guard:{SECRET}@")
    (tmp_path / "url").write_text(url + "\n")
    given = {"--store-env": "FENCES", "--store-file": "url"}[way]
    environ = {"FENCES": url} if way == "--store-env" else {}
    options = ("--insecure-dev", "--json", "--objects", "objects", way, given)
    with serving(tmp_path, *options, **environ) as process:
        assert json.loads(line(process))["workers"] == 1
        family = [process.pid, *children_of(process.pid)]
        for pid in family:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert SECRET not in out + err


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_that_cannot_reach_its_store_says_so_without_the_password(tmp_path: Path) -> None:
    options = ("--insecure-dev", "--json", "--objects", "objects", "--store-env", "FENCES")
    with serving(tmp_path, *options, FENCES=f"redis://:{SECRET}{CLOSED}/0") as process:
        url = json.loads(line(process))["url"]
        answers = [httpx.get(f"{url}/readyz"), httpx.get(f"{url}/v1/stats"), httpx.get(f"{url}/metrics")]
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert answers[0].status_code == 503
    assert SECRET not in out + err + "".join(f"{answer.headers} {answer.text}" for answer in answers)


@pytest.mark.parametrize(
    ("url", "shown", "secret"),
    [
        ("redis://app:pw@cache:6379/0?timeout=3", "redis://cache:6379/0", True),
        ("redis://cache:6379/0", "redis://cache:6379/0", False),
        ("redis+sentinel://a:1,b:2/main/0", "redis+sentinel://a:1,b:2/main/0", False),
        ("rediss://:pw@[::1]:6379/0", "rediss://[::1]:6379/0", True),
        ("redis://:p@w@cache", "redis://cache", True),
        ("redis://cache?password=pw", "redis://cache", True),
        ("redis://:pwcache:6379", "redis://***", True),
        ("redis:pw@cache", "redis:***", True),
        ("app:pw@cache", "***", True),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock", False),
        ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db", False),
        ("s3://bucket/prefix?region=eu", "s3://bucket/prefix", False),
        ("folder/of mine", "folder/of mine", False),
        ("/data/12:30/x", "/data/12:30/x", False),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str, secret: bool) -> None:
    assert (show_url(url), holds_password(url)) == (shown, secret)
