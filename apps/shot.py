"""The README's picture: `python -m streamgen.apps.shot OUT.png` plays the world and takes it.

Needs Playwright and a Chromium (Debian: apt install chromium).
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamgen.apps.doctor import find_chromium
from streamgen.apps.hub import Settings
from streamgen.apps.play import build_app, listen, make_server, page_address
from streamgen.apps.worlds import as_world
from streamgen.errors import MissingExtra, StreamgenError

CHROMIUM_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def serving(world: Any, *, plain: bool = False, **settings: Any) -> Iterator[str]:
    """Serve a world on a free port in a thread; the address of the page."""
    listener = listen("127.0.0.1", 0)
    app = build_app(world, Settings(**settings), plain=plain, say=lambda _: None)
    server = make_server(app)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield page_address("127.0.0.1", listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def browser_page(width: int = 1280, height: int = 800) -> Iterator[Any]:
    """A page in a headless Chromium. Raises MissingExtra without Playwright or Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise MissingExtra("the browser needs Playwright: pip install playwright") from None
    chromium = find_chromium()
    if chromium is None:
        raise MissingExtra("no Chromium found (Debian: apt install chromium)")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=str(chromium), args=list(CHROMIUM_ARGS))
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()


def shoot(
    world: Any, out: str | Path, *, prompt: str | None, switch: str | None, seed: int, plain: bool
) -> Path:
    """Walk a little, change the prompt, and write a picture of the page with W held down."""
    path = Path(out)
    with (
        serving(as_world(world), plain=plain, prompt=prompt, seed=seed) as address,
        browser_page() as page,
    ):
        page.goto(address)
        page.wait_for_function("window.streamgen?.state.drawn > 8", timeout=120_000)
        _explore(page, 6)
        words = switch or page.evaluate("window.streamgen.state.world.suggestions[1]")
        if words:
            page.evaluate("text => window.streamgen.prompt(text)", words)
        _explore(page, 10, path)
    return path


# How much there is to see: the mean step between neighbouring pixels of the canvas.
_DETAIL = """() => {
  const canvas = document.querySelector(".sg-canvas"), small = document.createElement("canvas");
  small.width = 64; small.height = 48;
  const pen = small.getContext("2d");
  pen.drawImage(canvas, 0, 0, 64, 48);
  const data = pen.getImageData(0, 0, 64, 48).data;
  let sum = 0;
  for (let i = 4; i < data.length; i += 4) sum += Math.abs(data[i + 1] - data[i - 3]);
  return sum / (64 * 48);
}"""


def _explore(page: Any, legs: int, path: Path | None = None) -> None:
    """Walk, and turn away from walls; the best view with W held down becomes the picture."""
    best, before = -1.0, 0.0
    for _ in range(legs):
        page.keyboard.down("w")
        _wait_frames(page, 9)
        detail = float(page.evaluate(_DETAIL))
        if path is not None and detail > best:
            best = detail
            page.screenshot(path=str(path))
        page.keyboard.up("w")
        if detail < 0.8 * before or detail < 6:
            page.keyboard.down("d")
            _wait_frames(page, 9)
            page.keyboard.up("d")
        before = float(page.evaluate(_DETAIL))


def _wait_frames(page: Any, frames: int) -> None:
    until = page.evaluate("window.streamgen.state.drawn") + frames
    page.wait_for_function(f"window.streamgen.state.drawn >= {until}", timeout=120_000)


def main(args: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m streamgen.apps.shot", description=__doc__)
    parser.add_argument("out", help="the PNG to write")
    parser.add_argument("--world", default="pocket-world", help="a name, a folder or a hub id")
    parser.add_argument("--prompt", help="what the walk starts with")
    parser.add_argument("--switch", help="what the world changes to")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="the page without Gradio")
    asked = parser.parse_args(args)
    try:
        path = shoot(
            asked.world, asked.out, prompt=asked.prompt, switch=asked.switch, seed=asked.seed,
            plain=asked.plain,
        )  # fmt: skip
    except StreamgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
