"""A Chromium that a test or a tool drives, over the DevTools protocol: no package but Python itself.

    with Chromium(executable()) as browser:
        tab = browser.open(path, width=390, dark=True)
        tab.run("document.title")

The protocol goes through two pipes, messages end with a zero byte. Everything that a page says or asks for is
kept: errors and warnings of its console in `tab.said`, addresses that it wanted in `tab.asked`.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

#: Names under which it is installed.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: Seconds that an answer may take: a machine may have other things to do.
PATIENCE = 60.0

#: The browser reads from 3 and writes to 4, whatever numbers the pipes have here.
START = """
import os, sys
from fcntl import F_DUPFD, fcntl
ends = [fcntl(int(n), F_DUPFD, 10) for n in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""

Message = dict[str, Any]


def executable() -> str | None:
    """Where Chromium is; None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser, without a window and with a profile of its own. Without `pictures` it draws fewer frames:
    `Tab.png` would wait for one forever."""

    def __init__(self, path: str, pictures: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="isobit-chromium-", ignore_cleanup_errors=True)
        there, self._to = os.pipe()
        self._from, back = os.pipe()
        flags = [
            "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
            "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
            "--disable-dev-shm-usage", f"--user-data-dir={self._folder.name}",
        ]  # fmt: skip
        if not pictures:
            flags.append("--disable-threaded-compositing")  # frames took a third of the time of a page
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to run as root with one
        start = [sys.executable, "-I", "-S", "-c", START, str(there), str(back), path]
        self._process = subprocess.Popen(
            [*start, *flags], pass_fds=(there, back), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        self._number, self._rest = 0, b""
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._folder.cleanup()

    def open(
        self, page: Path, width: int, dark: bool = False, height: int = 900, scale: float = 1.0
    ) -> "Tab":
        """A tab of this width that shows a file."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.ask(f"{domain}.enable")
        tab.resize(width, height, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.ask("Emulation.setEmulatedMedia", features=[scheme])
        tab.show(page)
        return tab

    def ask(self, method: str, session: str | None = None, **params: Any) -> Message:
        """Send a command and return its answer; what happens meanwhile is kept."""
        self._number += 1
        number, answers = self._number, list[Message]()
        message: Message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")

        def answered() -> bool:
            return bool(answers)

        self.wait(answered, lambda found: answers.append(found) if found.get("id") == number else None)
        if "error" in answers[0]:
            raise RuntimeError(f"{method}: {answers[0]['error']['message']}")
        return dict(answers[0]["result"])

    def wait(self, done: Any, see: Any = lambda found: None) -> None:
        """Read what the browser says until something has come true."""
        end = time.monotonic() + PATIENCE
        while not done():
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"chromium has said nothing for {PATIENCE:.0f} s")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise RuntimeError(f"chromium ended with code {self._process.wait(10)}")
            *whole, self._rest = (self._rest + read).split(b"\0")
            for found in map(json.loads, whole):
                see(found)
                if found.get("sessionId") in self._tabs:
                    self._tabs[found["sessionId"]].hear(found)


class Tab:
    """One page in it."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.loaded = False
        self.said: list[str] = []
        self.asked: list[str] = []

    def ask(self, method: str, **params: Any) -> Message:
        return self._browser.ask(method, self._session, **params)

    def show(self, page: Path) -> None:
        """Another file. A new tab takes as long as most pages."""
        self.loaded = False
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self._browser.wait(lambda: self.loaded)

    def resize(self, width: int, height: int = 900, scale: float = 1.0) -> None:
        """Narrow ones are phones."""
        screen = {"width": width, "height": height, "screenWidth": width, "screenHeight": height}
        self.ask("Emulation.setDeviceMetricsOverride", **screen, deviceScaleFactor=scale, mobile=width < 600)

    def hear(self, found: Message) -> None:
        method, params = found.get("method"), found.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.said.append(str([each.get("value") for each in params["args"]]))

    def run(self, expression: str) -> Any:
        """The value of an expression of the page; of a promise, what it comes to."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse where an element is, as a person would."""
        place = self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
            )

    def png(self, height: int | None = None) -> bytes:
        """The page as a picture: its first so many pixels, or all of it."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height or whole, whole), "scale": 1}
        answer = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)


if __name__ == "__main__":
    sys.exit(executable() is None)
