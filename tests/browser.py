"""A real headless chromium, driven through its DevTools pipe: no driver, no extra package."""

import base64
import json
import os
import shutil
import subprocess
from fcntl import F_DUPFD_CLOEXEC, fcntl
from select import select
from time import monotonic

from patience import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = [
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27, "j": 74, "k": 75, "Tab": 9, " ": 32}


class Browser:
    """One tab. `complaints` is what its page wrote to the console or threw; `requests` the addresses it asked for."""

    def __init__(self, profile):
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()

        def at_3_and_4():  # where chromium looks; out of the way first, so that no end closes the other
            ends = [fcntl(end, F_DUPFD_CLOEXEC, 10) for end in (commands, answers)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=at_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints, self.requests, self._loaded = [], [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=PATIENCE)
        os.close(self._write)
        os.close(self._read)

    # ---- what a reader does

    def open(self, path, width=1280, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._loaded = False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not self._loaded:
            self._receive()

    def click(self, selector, index=0):
        """A real click in the middle of the element's first line."""
        where = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"{where}.getClientRects()[0].toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys):
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def run(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def media(self, media="", dark=False):
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    # ---- the protocol: JSON ended by a zero byte

    def call(self, method, **params):
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self, patience=PATIENCE):
        end = monotonic() + patience
        while b"\0" not in self._buffer:
            assert select([self._read], [], [], max(0, end - monotonic()))[0], "chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "chromium has gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        self._note(message := json.loads(message))
        return message

    def _note(self, message):
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(params)
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
