"""A headless Chromium, driven over the DevTools protocol on a pipe: no driver, no port.

The protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON and end with a
NUL byte; Chromium reads them from file descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-extensions", "--disable-sync", "--remote-debugging-pipe"),
)
#: Gives the child the pipe's ends as the descriptors that Chromium asks for.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """Return the browser's path, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab.

    Attributes:
        urls: all that it asked for.
        complaints: errors of scripts, and what the console says of any level above info.
    """

    def __init__(self, sink: int, source: int) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self._password = ""
        self._sink, self._source = sink, source
        self._rest = b""
        self._next_id = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        call_id = self._send(method, params)
        while True:
            message = self._receive()
            if message.get("id") == call_id:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def answer_with(self, password: str) -> None:
        """From now on give this password to a server that asks the browser for one."""
        self._password = password
        self.call("Fetch.enable", handleAuthRequests=True)

    def eval(self, script: str) -> Any:
        """Return the value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20.0) -> Any:
        """Wait until an expression holds, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.eval(script)):
            assert time.monotonic() < end, f"not in time: {script}; {self.complaints}"
            time.sleep(0.01)
        return value

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return self.eval(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """Press the mouse's button on an element, where it is seen."""
        x, y = self.eval(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView(); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Replace what is in a field, as typing does."""
        self.eval(f"document.querySelector({json.dumps(selector)}).select()")
        self.eval(f"document.querySelector({json.dumps(selector)}).focus()")
        self.press("Backspace")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key."""
        codes = {"Enter": 13, "Backspace": 8, "Tab": 9}
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(more if kind == "keyDown" else {}),
            )

    def picture(self, path: Path) -> None:
        """Write what is seen as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": params}
        if self._session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._sink, data) :]
        return self._next_id

    def _receive(self, seconds: float = 30.0) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._source], [], [], seconds)
            assert ready, "the browser does not answer"
            data = os.read(self._source, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Take in an event; requests are held by the browser until they are let go."""
        params = message.get("params", {})
        match message.get("method"):
            case "Fetch.requestPaused":
                self._send("Fetch.continueRequest", {"requestId": params["requestId"]})
            case "Fetch.authRequired":
                answer = {"response": "ProvideCredentials", "username": "any"}
                answer["password"] = self._password
                more = {"requestId": params["requestId"], "authChallengeResponse": answer}
                self._send("Fetch.continueWithAuth", more)
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("warning", "error"):
                self.complaints.append(params["entry"]["text"])


@contextmanager
def chromium(browser: str, directory: Path) -> Iterator[Page]:
    """Start the browser with a profile of its own in a folder, and yield a tab."""
    to_child, to_browser = (_moved(end) for end in os.pipe())
    from_browser, from_child = (_moved(end) for end in os.pipe())
    arguments = [*_FLAGS, f"--user-data-dir={directory / 'profile'}"]
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_child), str(from_child), browser, *arguments],
            pass_fds=(to_child, from_child),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(to_child)
    os.close(from_child)
    try:
        page = Page(to_browser, from_browser)
        yield page
        page.call("Browser.close")
        process.wait(20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(to_browser)
        os.close(from_browser)


def _moved(descriptor: int) -> int:
    """Return the same file under a number clear of those that Chromium asks for."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
