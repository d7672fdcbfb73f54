"""What the dashboard's tests share: one real run of `tiny`, the dashboard over a copy of it, and a real Chromium.

Chromium is driven through chromedriver by the W3C WebDriver protocol, which is JSON over HTTP: httpx, which Tether depends on anyway, is all that
needs. Tests with a browser are skipped where Chromium or its driver is not installed.
"""

import base64
import fcntl
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
CHROMEDRIVER = shutil.which("chromedriver")
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1400,1000",
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run of two steps with `tiny`, made once however many workers there are. Not to be changed: tests take `runs`."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    folder = shared / "dashboard_run"
    with (shared / "dashboard_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "report.html").exists():
            import tether

            tether.train(
                "frozen_lake", model="tiny", steps=2, out=folder, seed=3, rollout={"num_groups": 2, "group_size": 3, "max_tokens": 40},
                evaluation={"prompts": 2}, diagnosis={"every": 1, "gradients": {"every": 2}}, filter={"keep": 0.5},
            )  # fmt: skip
            (folder / "report.html").write_text("made by the fixture: the run is complete", encoding="utf-8")
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A folder with one run, `first`, that a test may change."""
    shutil.copytree(trained, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("*.safetensors", "state.pt"))
    return tmp_path / "runs"


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    """The dashboard over `runs`, served."""
    from tether.cli.report import step_templates
    from tether.core.http import serving_app
    from tether.runs.dashboard.app import make_app
    from tether.runs.dashboard.catalogue import Catalogue

    app = make_app(Catalogue(runs), step_templates)
    with serving_app(app, "dashboard") as url:
        yield url
        app.state.stopping.set()


class Browser:
    """A session of Chromium, by WebDriver."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._client = httpx.Client(base_url=driver, timeout=60)
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
        self._session = f"/session/{self._post('/session', wanted)['sessionId']}"

    def open(self, url: str) -> None:
        """Load a page, and wait for its end."""
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; `arguments[0]` and so on are given to it."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = 60.0) -> Any:
        """The first true value that a script returns."""
        until = time.monotonic() + seconds
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < until, f"waited {seconds:g} s for: {script}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def type(self, selector: str, text: str) -> None:
        """Put text into a field the way a person does, so that the page's events are raised."""
        found = self._post(f"{self._session}/element", {"using": "css selector", "value": selector})
        element = next(iter(found.values()))
        self._post(f"{self._session}/element/{element}/clear", {})
        self._post(f"{self._session}/element/{element}/value", {"text": text})

    def messages(self) -> list[str]:
        """What the browser has complained about since the last time: errors of scripts and breaches of the content security policy."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol, such as to emulate a screen."""
        return self._post(f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path) -> None:
        answer = self._client.get(f"{self._session}/screenshot").json()
        path.write_bytes(base64.b64decode(answer["value"]))

    def close(self) -> None:
        self._client.delete(self._session)
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of a worker."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("needs Chromium and chromedriver, which are not installed here (Debian: apt install chromium chromium-driver)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/status")
                break
            except httpx.TransportError:
                assert driver.poll() is None and time.monotonic() < until, "chromedriver did not start"
                time.sleep(0.05)
        browser = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("profile"))
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()
