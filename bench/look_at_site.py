"""The documentation site in headless Chromium: links, search, code copied out of it, a picture of every page.

    make docs
    python -m bench.look_at_site                        # checks; pictures into build/pictures/
    python -m bench.look_at_site --only tutorial --dark # of pages whose address has this in it

Needs Chromium, its driver, and Selenium: on Debian `apt install chromium chromium-driver`, and `pip install
selenium` in an environment with fdg, or in one of its own; `--python` then runs the code that is copied.
The exit status is 1 where anything is wrong.
"""

import argparse
import contextlib
import functools
import http.server
import os
import re
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "pictures"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of the built site."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@contextlib.contextmanager
def browser(width: int, dark: bool) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},900")
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.binary_location = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))  # else Selenium downloads one
    try:
        yield driver
    finally:
        driver.quit()


def _look(driver: webdriver.Chrome, page: str) -> tuple[str, set[str], list[str]]:
    """Title, names of places and targets of links of a page."""
    driver.get(page)
    script = "return [document.title, [...document.querySelectorAll('[id]')].map(e => e.id),"
    script += " [...document.querySelectorAll('a[href]')].map(e => e.getAttribute('href'))]"
    title, names, targets = driver.execute_script(script)
    return title, set(names), targets


def pages(driver: webdriver.Chrome, start: str) -> tuple[list[str], list[str]]:
    """Addresses of all pages that links lead to from the start, and what is wrong with the links."""
    todo, seen, links, wrong = [start], {}, [], []
    while todo:
        page = todo.pop()
        title, seen[page], targets = _look(driver, page)
        if "404" in title or "Error" in title:
            wrong.append(f"{page}: {title}")
        wrong += [f"{page}: {message['message']}" for message in driver.get_log("browser")]
        for target in targets:
            address, name = urldefrag(urljoin(page, target))
            if address.startswith(start) and not address.endswith((".png", ".svg", ".json")):
                links.append((page, address, name))
                if address not in seen and address not in todo:
                    todo.append(address)
    for address in {address for _, address, name in links if name and name not in seen[address]}:
        seen[address] |= _look(driver, address)[1]  # on a busy machine a page was looked at half loaded
    missing = [(page, address, name) for page, address, name in links if name and name not in seen[address]]
    wrong += [f"{page}: {address} has no #{name}" for page, address, name in missing if name != "__skip"]
    return sorted(seen), wrong


def foreign(driver: webdriver.Chrome, start: str) -> list[str]:
    """What a page asks of other hosts."""
    script = "return performance.getEntriesByType('resource').map(e => e.name)"
    return [name for name in driver.execute_script(script) if not name.startswith((start, "data:", "blob:"))]


def search(driver: webdriver.Chrome, start: str, words: str) -> list[str]:
    """The addresses that the search box finds."""
    driver.get(start)
    driver.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    time.sleep(1)
    driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys(words)
    for _ in range(60):
        time.sleep(0.5)
        found = driver.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
        if found:
            return [urldefrag(link.get_attribute("href"))[0].partition("?")[0] for link in found]
    return []


def copied(driver: webdriver.Chrome, page: str) -> str:
    """All Python of a page as its copy buttons give it, one block after the other."""
    driver.get(page)
    keep = "window.copied = []; document.addEventListener('copy', event =>"
    keep += " window.copied.push(event.target.value || window.getSelection().toString()), true)"
    driver.execute_script(keep)
    for button in driver.find_elements(By.CSS_SELECTOR, ".language-python button[data-md-type=copy]"):
        # A real click: browsers let nothing else write to the clipboard.
        ActionChains(driver).scroll_to_element(button).move_to_element(button).click().perform()
        time.sleep(0.2)
    time.sleep(0.5)
    return "\n".join(driver.execute_script("return window.copied"))


def take(driver: webdriver.Chrome, path: Path) -> None:
    """A picture of what the window shows; on a busy machine the browser needs several tries at a tall one."""
    for left in reversed(range(5)):
        try:
            driver.save_screenshot(str(path))
            return
        except TimeoutException:
            if not left:
                raise


def main() -> int:
    """Says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="pictures of pages whose address has this in it")
    parser.add_argument("--pictures-only", action="store_true", help="no checks")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels (default: 1280)")
    parser.add_argument("--python", default=sys.executable, help="runs what is copied")
    given = parser.parse_args()
    wrong: list[str] = []
    with served() as start, browser(given.width, given.dark) as driver:
        if given.pictures_only:
            found = [start + str(p.parent.relative_to(SITE)) + "/" for p in sorted(SITE.rglob("index.html"))]
            found = [address.replace("/./", "/") for address in found]
        else:
            found, wrong = pages(driver, start)
            print(f"{len(found)} pages")
            driver.get(start)
            wrong += [f"asks another host: {name}" for name in foreign(driver, start)]
            for words, expected in (("staleness", "policies/"), ("generalised advantage", "algorithms/ppo/")):
                hits = search(driver, start, words)
                print(f"search for {words!r}: {len(hits)} pages")
                if start + expected not in hits:
                    wrong.append(f"search for {words!r} does not find {expected}: {hits}")
            code = copied(driver, start + "tutorial/")
            with tempfile.TemporaryDirectory() as folder:
                words = [given.python, "-c", re.sub(r"(?<=total_steps=)[\d_]+", "1024", code)]
                environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
            print(
                f"copied out of the tutorial: {len(code.splitlines())} lines, exit status {done.returncode}"
            )
            if done.returncode or "class Corridor" not in code:
                wrong.append(f"what the tutorial's buttons copy does not run: {done.stderr[-500:]}")
            print("\n".join(wrong) or "nothing wrong", flush=True)
        PICTURES.mkdir(parents=True, exist_ok=True)
        for page in found:
            name = page.removeprefix(start).strip("/").replace("/", "-") or "index"
            if given.only in page and not name.startswith("source"):
                driver.get(page)
                height = driver.execute_script("return document.documentElement.scrollHeight")
                driver.set_window_size(given.width, min(max(height, 900), 8_000))
                take(driver, PICTURES / f"{name}.png")
                driver.set_window_size(given.width, 900)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
