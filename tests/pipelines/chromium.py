"""A headless Chromium, driven over its own DevTools protocol: four of its commands are all that a look at a page takes.

No driver has to be installed beside it whose version would have to fit, and no browser is downloaded: what is used is
the one that the machine has.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

VARIABLE = "RAGFENCE_CHROMIUM"
"""the browser, if it is none of those below"""
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    f"no Chromium: none of {', '.join(NAMES)} is on the PATH, and {VARIABLE} names none. "
    "Install one (Debian, Ubuntu: apt-get install chromium)"
)
WIDTH, HEIGHT = 1500, 857
PATIENCE_S = 90
"""for what a page is to show; a machine that is busy with other tests takes its time"""

_OPTIONS = (
    "--headless=new",
    # Its sandbox wants what containers and root do not have; the only pages that it opens are our own.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    # Whatever a page or the browser itself would load from elsewhere is not there, so nobody comes to rely on it.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    f"--window-size={WIDTH},{HEIGHT}",
    "--remote-debugging-port=0",
)


def found() -> str | None:
    """The browser of this machine."""
    if named := os.environ.get(VARIABLE, "").strip():
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page, and what a person sees on it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._asked = 0
        self._ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    @property
    def text(self) -> str:
        """What can be read on it, as it is shown."""
        return self._value("document.body ? document.body.innerText : ''") or ""

    @property
    def rows(self) -> list[list[str]]:
        """Of all tables, the text of the cells."""
        return self._value(
            "Array.from(document.querySelectorAll('tr'), row => Array.from(row.cells, cell => cell.innerText.trim()))"
        )

    @property
    def pictures(self) -> list[str]:
        """The names of the pictures that are drawn: one that is broken, or was taken out, has no width."""
        return self._value(
            "Array.from(document.querySelectorAll('img')).filter(each => each.naturalWidth).map(each => each.alt)"
        )

    def click(self, name: str) -> None:
        """The button with just this name, once it is there and can be pressed."""
        press = (
            "(() => { const it = Array.from(document.querySelectorAll('button')).find("
            f"each => each.innerText.trim() === {json.dumps(name)} && !each.disabled);"
            " if (it) it.click(); return !!it; })()"
        )
        self.until(lambda: self._value(press), f"a button {name!r}")

    def sees(self, *words: str) -> None:
        """Waits until all of them are there to be read."""
        for each in words:
            self.until(lambda each=each: each in self.text, repr(each))

    def until(self, shown: Callable[[], Any], what: str) -> None:
        waited = time.monotonic() + PATIENCE_S
        while not shown():
            assert time.monotonic() < waited, f"there is no {what} on the page, which reads:\n{self.text}"
            time.sleep(0.1)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def _value(self, expression: str) -> Any:
        # While a page is left for another one there is nothing to ask, and the answer is an error without a value.
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer.get("result", {}).get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if told.get("id") == self._asked:
                return told.get("result") or {}


@contextmanager
def opened(browser: str) -> Iterator[Page]:
    """A page of a browser of its own, which ends with it and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True) as profile:
        started = subprocess.Popen(
            [browser, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, "TMPDIR": profile},  # it is not given the time to clear up
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with connect(_page_of(started, Path(profile)), max_size=None) as socket:
                yield Page(socket)
        finally:
            os.killpg(started.pid, signal.SIGKILL)  # its own group: a browser is many processes
            started.wait()


def _page_of(browser: subprocess.Popen[bytes], profile: Path) -> str:
    """The address of its first page. The port it has chosen stands in a file, as soon as it listens there."""
    told, waited = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
    while True:
        assert browser.poll() is None, f"{browser.args[0]} ended with {browser.returncode}"  # type: ignore[index, str-bytes-safe]
        assert time.monotonic() < waited, "the browser does not listen"
        if told.exists() and (lines := told.read_text().splitlines()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=PATIENCE_S) as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
