"""A headless Chromium for tests of pages, with its console and its network log."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--disable-default-apps", "--no-default-browser-check", "--force-color-profile=srgb"),
)


class Keys:
    """Keys as in `selenium.webdriver.Keys`, with their codes, since test files are imported without selenium too."""

    TAB = "\ue004"
    ENTER = "\ue007"
    ESCAPE = "\ue00c"
    HOME = "\ue011"
    ARROW_LEFT = "\ue012"
    ARROW_RIGHT = "\ue014"
    ARROW_DOWN = "\ue015"


class Browser:
    """A browser window with one open page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._log: list[dict[str, Any]] = []

    def open(self, url: str) -> None:
        """Open an address, from an empty page, and wait until the view is complete."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.settle()

    def settle(self) -> None:
        """Wait until the view is complete."""
        self.until(lambda: self.js("return document.querySelector('.body[aria-busy=false]') !== null"))

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait until a condition is true, and return its value; fails after `seconds`."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, "the page did not reach the expected state"
            time.sleep(0.02)
        return value

    def js(self, code: str, *arguments: Any) -> Any:
        """Run a script in the page, and return its value."""
        return self.driver.execute_script(code, *arguments)

    def text(self, selector: str) -> str:
        """Return the text of the element with this CSS selector."""
        text = self.js("return document.querySelector(arguments[0])?.textContent ?? null", selector)
        assert text is not None, selector
        return str(text)

    def click(self, selector: str) -> None:
        """Click on an element, and wait until the view is complete."""
        self.js("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def keys(self, *pressed: str) -> None:
        """Press keys in the element with the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*pressed).perform()
        self.settle()

    def focus(self, selector: str) -> None:
        """Give the focus to an element."""
        self.js("document.querySelector(arguments[0]).focus()", selector)

    def fill(self, selector: str, value: str) -> None:
        """Set the value of a field, without an event."""
        self.js("document.querySelector(arguments[0]).value = arguments[1]", selector, value)

    def dark(self, on: bool) -> None:
        """Set the colour scheme that the system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def restore(self) -> None:
        """Undo `dark`, and changes of the size of the window."""
        self.dark(False)
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def memory(self) -> int:
        """Return the proportional set size of the processes that show pages, in bytes."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # the process has ended
                children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                    int(stat.parent.name)
                )
        memory, descendants = 0, [self.driver.service.process.pid]
        while descendants:
            process = descendants.pop()
            descendants += children.get(process, [])
            with suppress(OSError):
                if b"--type=renderer" in Path(f"/proc/{process}/cmdline").read_bytes():
                    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
                    memory += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        assert memory, "no process of this browser shows a page"
        return memory

    def shot(self, path: Path, height: int | None = None) -> None:
        """Save a picture of the page: of its full height, or of its upper `height` pixels."""
        full_height = int(self.js("return document.documentElement.scrollHeight"))
        width = int(self.js("return window.innerWidth"))
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": min(height or full_height, full_height),
                "deviceScaleFactor": 1,
                "mobile": False,
            },
        )
        time.sleep(0.3)
        self.driver.save_screenshot(str(path))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def browser(folder: Path, *, size: tuple[int, int] = (1280, 900), flags: tuple[str, ...] = ()) -> Iterator[Browser]:
    """Context with a running Chromium; skips the test if Chromium or its driver is not installed."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(30)
    driver.set_page_load_timeout(30)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
