"""A headless Chromium for tests, driven over a pipe with the DevTools protocol: no driver, no package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from requirements import missing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ),
    *(
        "--no-first-run",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        "--remote-debugging-pipe",
    ),
)
# Chromium reads commands from descriptor 3 and writes to 4; this puts our pipes there.
LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str:
    """The browser, which `make browser` installs."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    return missing(
        "needs Chromium: `make browser` installs it on Debian as root (apt-get install chromium)"
    )


class Tab:
    """One page in the browser: what it logs, what its script gives, its keys and pointer, its picture."""

    def __init__(self, send, events) -> None:
        self.send = send
        self.events = events
        for domain in ("Page", "Runtime", "Log", "Network"):
            send(f"{domain}.enable")

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def run(self, script: str):
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.03)

    def settle(self) -> None:
        """Waits until the page has drawn what it was asked to draw."""
        self.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
        self.wait("[...document.querySelectorAll('.viewer')].every(v => v.dataset.ready === 'yes')")

    def middle(self, selector: str, down: float = 0.5, across: float = 0.5) -> tuple[float, float]:
        """A point of an element in the window, as shares of its height and width."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        box = self.run(f"(b => [b.left, b.top, b.width, b.height])({found})")
        return box[0] + across * box[2], box[1] + down * box[3]

    def point(self, kinds: str, selector: str, down: float = 0.5, across: float = 0.5) -> None:
        """Mouse events at a point of an element."""
        x, y = self.middle(selector, down, across)
        for kind in kinds.split():
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)
        self.settle()

    def hover(self, *place) -> None:
        self.point("mouseMoved", *place)

    def click(self, *place) -> None:
        self.point("mouseMoved mousePressed mouseReleased", *place)

    def touch(self, selector: str, *points: tuple[float, float]) -> None:
        """A finger that goes down at the first point of an element, along the others, and up."""
        for kind, point in zip(("touchStart", *("touchMove",) * len(points)), points, strict=False):
            x, y = self.middle(selector, *point)
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def save(self, button: str, folder: Path) -> tuple[str, bytes]:
        """The name and the content of the file that a button saves; the button's last word is the kind of file."""
        folder.mkdir()
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.click(f"[aria-label='Save {button}']")
        end = time.monotonic() + 120
        while not (
            files := [
                path
                for path in folder.glob(f"*.{button.split()[-1].lower()}")
                if path.stat().st_size
            ]
        ):
            assert time.monotonic() < end, f"never saved: {button}"
            time.sleep(0.03)
        return files[0].name, files[0].read_bytes()

    def press(self, key: str) -> None:
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.send(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **named, **text
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)
        self.settle()

    def picture(self, path: Path) -> Path:
        """A screenshot of the whole page."""
        path.write_bytes(
            base64.b64decode(
                self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            )
        )
        return path

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests to anywhere but the page itself."""
        found = []
        for event in self.events:
            given = event["params"]
            kind = event["method"]
            if kind == "Runtime.exceptionThrown":
                found.append(
                    given["exceptionDetails"].get("exception", {}).get("description", "exception")
                )
            elif kind == "Runtime.consoleAPICalled" and given["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(str(given["args"]))
            elif kind == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(given["entry"]["text"])
            elif kind == "Network.requestWillBeSent" and not given["request"]["url"].startswith(
                ("file:", "data:")
            ):
                found.append(f"asked for {given['request']['url']}")
        return found


@contextmanager
def open_tab():
    """A browser with one empty page; it is ended with the block."""
    program = find_chromium()
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), program, *FLAGS]
        command += [f"--user-data-dir={home}", "about:blank"]
        silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **silent)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield connect(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            process.wait(120)


def connect(out, back) -> Tab:
    """Speaks with the browser: each message is JSON and a zero byte."""
    events: list[dict] = []
    number = 0
    session = {}
    text = bytearray()

    def next_message(seconds: float = 120) -> dict:
        """The browser's next message; a test fails rather than waits for ever."""
        nonlocal text
        while b"\0" not in text:
            assert select.select([back], [], [], seconds)[0], (
                f"the browser says nothing for {seconds} s"
            )
            more = os.read(back, 1 << 16)
            assert more, "the browser is gone"
            text += more
        message, _, text = text.partition(b"\0")
        return json.loads(message)

    def send(method: str, **parameters):
        nonlocal number
        number += 1
        command = (
            json.dumps({"id": number, "method": method, "params": parameters, **session}).encode()
            + b"\0"
        )
        while command:
            command = command[os.write(out, command) :]
        while (message := next_message()).get("id") != number:
            events.extend([message] if "method" in message else [])
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    target = send("Target.createTarget", url="about:blank")["targetId"]
    session = {
        "sessionId": send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    }
    return Tab(send, events)
