"""A headless Chromium, driven over its DevTools protocol.

with Chromium(folder) as browser:
    tab = browser.open(path.as_uri(), width=360)
    tab.evaluate("document.title")
    assert tab.problems() == []
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
_DEADLINE_S = 180.0  # on a machine that does ten other things
_NETWORK = ("http:", "https:", "ws:", "wss:")


def require_chromium() -> None:
    """Skips the test where there is none, unless all that `make setup-slurm` installs must be there."""
    if shutil.which("chromium") is None:
        reason = "Chromium is not installed (Debian: make setup-slurm)"
        if os.environ.get("CORRAL_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


class Chromium:
    """One browser, whose tabs know nothing of each other."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: for its profile.
        """
        self._folder = folder

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        command = ["chromium", *_OPTIONS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        address = self._folder / "DevToolsActivePort"
        wait_for(lambda: address.exists() and len(address.read_text().splitlines()) == 2, "Chromium to listen")
        port, path = address.read_text().splitlines()
        self._runner.run(self._connect(f"ws://127.0.0.1:{port}{path}"))
        self._number, self.events = 0, list[dict[str, Any]]()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            self._runner.run(self._session.close())
        self._runner.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_DEADLINE_S)

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """What the browser answers; what it tells meanwhile is in `events`."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        return self._runner.run(self._ask(request | ({"sessionId": session} if session else {})))

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(_DEADLINE_S):
            await self._socket.send_json(request)
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == request["id"]:
                    assert "error" not in message, (request, message["error"])
                    result: dict[str, Any] = message["result"]
                    return result
                self.events.append(message)

    def open(
        self, address: str, *, width: int = 1200, height: int = 900, is_dark: bool = False, is_watched: bool = True
    ) -> "Tab":
        """A tab of that size that is loading the address.

        Args:
            is_watched: whether `Tab.problems` has what it complains of, which makes scripts slower.
        """
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        tab = Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log") if is_watched else ():
            tab.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        tab.address = address
        tab.call("Page.navigate", url=address)
        return tab


class Tab:
    """One page."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session, self.address = browser, session, ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression is, or what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """Waits for a JavaScript expression to be true of the page, once that has been loaded; its value."""
        complete = f"document.readyState === 'complete' && ({expression})"
        return wait_for(lambda: self.evaluate(complete), f"{expression} to be so")

    def texts(self, selector: str) -> list[str]:
        """What is read in each element."""
        read = "(one) => one.innerText ?? one.textContent"
        found: list[str] = self.evaluate(f"[...document.querySelectorAll('{selector}')].map({read})")
        return found

    def choose(self, selector: str, value: str) -> None:
        """What a user types or picks."""
        how = f"one.value = '{value}'; one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change'))"
        self.evaluate(f"(() => {{ const one = document.querySelector('{selector}'); {how} }})()")

    def press(self, key: str) -> None:
        """A key, such as Tab, Enter or Escape."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def problems(self) -> list[str]:
        """What the page has complained of, and addresses on the network that are not its own."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown" or (
                event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning")
            ):
                found.append(json.dumps(told)[:500])
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(told["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = told["request"]["url"]
                if url.startswith(_NETWORK) and not url.startswith(self.address):
                    found.append(url)
        return found

    def picture(self, path: Path, *, is_whole: bool = True) -> None:
        """Writes what is seen as a PNG; all of the page, or what is on the screen."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """What a look gives, once it gives something."""
    deadline = time.monotonic() + _DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {_DEADLINE_S:.0f} s for {what}"
        time.sleep(0.05)
    return found
