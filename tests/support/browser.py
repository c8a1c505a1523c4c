"""A headless Chromium, spoken to over a pair of pipes in its DevTools protocol: no port, no driver, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",  # as root it refuses to start with one
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_READS, _WRITES = 3, 4  # the descriptors that the browser speaks on

# Counts the colours of a picture; in a page, as Python has no decoder of its own.
_COUNT_COLOURS = """(async () => {
  const picture = await createImageBitmap(await (await fetch("data:image/png;base64,%s")).blob());
  const canvas = new OffscreenCanvas(picture.width, picture.height), context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, picture.width, picture.height).data.buffer), found = {};
  for (const pixel of pixels) found[pixel] = (found[pixel] ?? 0) + 1;
  return found;
})()"""


def why_no_browser() -> str | None:
    """Why there is no browser here; ``None`` if there is one."""
    return None if _program() else f"there is no browser (package chromium): none of {', '.join(NAMES)} is installed"


def _program() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser; ended, with all its processes, when the ``with`` block ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self._pid = 0
        self._in = self._out = -1
        self._number = 0
        self._buffer = b""
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        program = _program()
        assert program is not None, why_no_browser()
        with contextlib.ExitStack() as ends:
            reads, self._in = map(_high, os.pipe())
            ends.callback(os.close, reads)
            self._out, writes = map(_high, os.pipe())
            ends.callback(os.close, writes)
            quiet = os.open(os.devnull, os.O_RDWR)
            ends.callback(os.close, quiet)
            to = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in ((quiet, 0), (quiet, 1), (quiet, 2))]
            to += [(os.POSIX_SPAWN_DUP2, reads, _READS), (os.POSIX_SPAWN_DUP2, writes, _WRITES)]
            self._pid = os.posix_spawn(
                program,
                [program, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
                {**os.environ, "HOME": self._folder.name, "XDG_RUNTIME_DIR": self._folder.name},
                file_actions=to,
                setsid=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        os.close(self._in)
        os.close(self._out)
        end = time.monotonic() + 10.0
        while time.monotonic() < end and os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._folder.cleanup()

    @contextlib.contextmanager
    def page(self, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False) -> Iterator[Page]:
        """A tab of a given size, in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch
            )
            page.call("Emulation.setTouchEmulationEnabled", enabled=touch)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            yield page
        finally:
            del self._pages[session]
            self.call("Target.closeTarget", targetId=target)

    def colours(self, png: bytes) -> Counter[str]:
        """How many pixels of a picture have which colour, ``#rrggbb``."""
        with self.page() as blank:
            found = blank.evaluate(_COUNT_COLOURS % base64.b64encode(png).decode())
        counts: Counter[str] = Counter()
        for pixel, count in found.items():
            red, green, blue, _ = int(pixel).to_bytes(4, "little")
            counts[f"#{red:02x}{green:02x}{blue:02x}"] += count
        return counts

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command; what comes in meanwhile goes to its page."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            said["sessionId"] = session
        data = json.dumps(said).encode() + b"\0"
        while data:
            data = data[os.write(self._in, data) :]
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self.next_message(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def next_message(self, end: float) -> dict[str, Any]:
        """The next message, an event or an answer; an event is handed to its page first."""
        while b"\0" not in self._buffer:
            if not select.select([self._out], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered within {DEADLINE_S:.0f} s")
            data = os.read(self._out, 1 << 20)
            if not data:
                raise BrokenPipeError("the browser has ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.take(message["method"], message["params"])
        return message


class Page:
    """One tab.

    Attributes:
        errors: What its scripts raised and its console said, but for plain logs.
        requests: Addresses it asked for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def take(self, method: str, said: dict[str, Any]) -> None:
        """Note an event."""
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(argument.get("value")) for argument in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(said["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is drawn."""
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + DEADLINE_S
        while not self._loaded:
            self._browser.next_message(end)
        self.settle()

    def settle(self) -> None:
        """Wait until what is under way is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """Fingers: ``touchStart``, ``touchMove`` or ``touchEnd``, with where they are."""
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=places)
        self.settle()

    def screenshot(self, *, whole: bool = False) -> bytes:
        """What is in view, or the whole page, as PNG."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])


def _high(descriptor: int) -> int:
    """The same at a number that none of those for the child has, closed in children."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
