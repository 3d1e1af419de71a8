"""
The page in a real browser, Debian's headless Chromium: for the tests, and for the screenshot of the docs.

    python tests/app/browser.py docs/app/screenshot.png [ARGUMENTS OF examples/app.py]
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SWITCHES = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-dev-shm-usage", "disable-sync", "hide-scrollbars"),
)


@contextmanager
def served(
    *arguments: str, script: Path = ROOT / "examples" / "app.py", python: str = sys.executable
) -> Iterator[str]:
    """The address of a page, as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    address, command = f"http://127.0.0.1:{port}", [python, str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=script.parent, env=environment, stdout=log, stderr=log)

        def printed() -> str:
            log.seek(0)
            return log.read()

        try:
            while not answers(address):
                assert process.poll() is None, printed()
                time.sleep(0.1)
            yield address
            assert "Traceback" not in printed(), printed()
        finally:
            process.terminate()
            process.wait()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def browser(width: int = 1500, height: int = 1260) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for switch in (*SWITCHES, f"user-data-dir={profile}", f"window-size={width},{height}"):
            options.add_argument(f"--{switch}")
        driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def wait(driver: webdriver.Chrome, condition, seconds: float = 60):
    """What `condition(driver)` returns as soon as it is true; elements that are not there yet are waited for."""
    return WebDriverWait(driver, seconds, poll_frequency=0.05, ignored_exceptions=(WebDriverException,)).until(
        condition
    )


def text(driver: webdriver.Chrome, name: str) -> str:
    return driver.find_element(By.ID, name).text


def answered(driver: webdriver.Chrome) -> bool:
    """Whether both sides show a cost and every picture is there."""
    pictures = driver.find_elements(By.CSS_SELECTOR, "[id^='A-'] img, [id^='B-'] img")
    loaded = driver.execute_script("return arguments[0].every(one => one.complete && one.naturalWidth)", pictures)
    return loaded and len(pictures) >= 2 and all("GFLOPs" in text(driver, f"{side}-cost") for side in "AB")


def main(path: str, *arguments: str) -> None:
    with served(*arguments) as address, browser() as driver:
        driver.get(address)
        wait(driver, answered)
        time.sleep(1)  # for transitions
        driver.save_screenshot(path)
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(path, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
