"""A server as a process: ports nobody has, a folder of its own, started, killed, frozen and started again."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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


def wait_until(condition: Callable[[], Any], what: str, *, within_s: float = READY_WITHIN_S) -> Any:
    """What the condition returns, once that is something. While it raises, it counts as nothing."""
    give_up_at = time.monotonic() + within_s
    trouble: Exception | None = None
    while True:
        try:
            if found := condition():
                return found
        except Exception as error:
            trouble = error
        if time.monotonic() >= give_up_at:
            raise NotStarted(f"not within {within_s:.0f} s: {what}") from trouble
        time.sleep(0.02)


class Daemon:
    """A command that can be started, killed and started again; `ready` raises until it answers."""

    def __init__(
        self,
        argv: Sequence[str],
        ready: Callable[[], Any],
        folder: Path,
        env: dict[str, str],
        user: dict[str, Any] | None = None,
    ) -> None:
        """`user`: as whom it runs, in the words of `subprocess.Popen`."""
        self.argv, self.ready, self.folder, self.env, self.user = list(argv), ready, folder, env, user or {}
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
                **self.user,
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

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

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

    def end(self) -> None:
        """For good."""
        self.daemon.end()

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and nothing is answered until `thaw`. It can be killed all the same."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def started(make: Callable[[], Any]) -> Any:
    """Starts what `make` describes; with new ports if somebody took one of them in between."""
    for attempt in range(3):
        server = make()
        try:
            server.start()
            return server
        except NotStarted:
            server.end()
            if attempt == 2:
                raise
    raise AssertionError


@contextlib.contextmanager
def folder_for(given: Path | None = None) -> Iterator[Path]:
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
