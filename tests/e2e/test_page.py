"""The page in a real browser: keys move the picture, prompts switch it, rewind goes back.

Runs the packaged pocket world where its weights are, the coloured world of the other tests where
they are not. STREAMGEN_SHOT names the file for the screenshot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamgen.apps.shot import browser_page, serving
from streamgen.apps.worlds import as_world
from streamgen.errors import StreamgenError
from tests.fakes import FakeWorld

pytestmark = pytest.mark.ui
PATIENCE = 120_000  # milliseconds; machines that run tests are busy
WORDS = "heavy snow"


@pytest.fixture(scope="module")
def world() -> Any:
    """The real world if it is here."""
    try:
        return as_world("pocket-world")
    except (StreamgenError, ImportError):
        return FakeWorld()


@pytest.fixture(scope="module")
def address(world: Any) -> Iterator[str]:
    """A running server with Gradio's page at "/" and the plain one at "/plain"."""
    with serving(world, seed=7) as found:
        yield found


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    """One browser for all tests of this file."""
    with browser_page() as page:
        yield page.context.browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page that keeps what it asked for and what went wrong."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    page.close()


def state(page: Any, name: str) -> Any:
    return page.evaluate(f"window.streamgen.state.{name}")


def wait(page: Any, check: str) -> None:
    page.wait_for_function(check, timeout=PATIENCE)


def open_world(page: Any, address: str) -> None:
    page.goto(address)
    wait(page, "window.streamgen && window.streamgen.state.drawn > 5")


def wait_frames(page: Any, count: int) -> None:
    wait(page, f"window.streamgen.state.drawn >= {state(page, 'drawn') + count}")


def pixels(page: Any) -> list[int]:
    """The picture without the corner where the coloured world stamps its frame number."""
    return page.evaluate(
        """() => {
          const canvas = document.querySelector('.sg-canvas');
          const top = Math.floor(canvas.height / 4);
          const pen = canvas.getContext('2d');
          return [...pen.getImageData(0, top, canvas.width, canvas.height - top).data]
            .filter((_, index) => index % 97 === 0);
        }"""
    )


def test_walk_in_the_browser(page: Any, address: str, tmp_path: Path) -> None:
    """Hold W, see the picture change, switch the prompt, rewind, and take a picture of it all."""
    open_world(page, address)

    before = pixels(page)
    page.keyboard.down("w")
    wait_frames(page, 12)
    assert page.locator('.sg-key[data-code="KeyW"]').get_attribute("data-on") == "true"
    moved = pixels(page)
    difference = sum(abs(a - b) for a, b in zip(before, moved, strict=True)) / len(before)
    assert difference > 2, "W was held and the picture stands still"
    page.keyboard.up("w")
    assert page.locator('.sg-key[data-code="KeyW"]').get_attribute("data-on") == "false"

    actions = state(page, "seq")
    page.locator(".sg-prompt").click()
    page.keyboard.type(WORDS + " was a dawn")
    assert state(page, "seq") == actions, "typing moved somebody"
    page.locator(".sg-prompt").fill(WORDS)
    page.keyboard.press("Enter")
    wait(
        page,
        f"""[...document.querySelectorAll('.sg-applied')].some(
              (line) => line.dataset.applied === 'true' && line.innerText.includes('{WORDS}'))""",
    )
    line = page.locator(".sg-applied").last.inner_text()
    assert WORDS in line
    assert "applied at frame" in line
    assert page.locator(".sg-caption").inner_text().startswith(f"{WORDS} · applied at frame")
    assert state(page, "prompt") == WORDS

    page.keyboard.down("w")
    wait_frames(page, 10)
    shot = os.environ.get("STREAMGEN_SHOT") or str(tmp_path / "page.png")
    page.screenshot(path=shot)
    page.keyboard.up("w")
    assert Path(shot).stat().st_size > 20_000

    wait(page, "window.streamgen.state.frame > 44")
    frame = state(page, "frame")
    page.locator(".sg-rewind").click()
    wait(page, f"window.streamgen.state.frame < {frame - 20}")
    wait_frames(page, 4)

    assert page.errors == []
    assert [url for url in page.asked if not url.startswith((address, "blob:", "data:"))] == []


def test_pause_freezes_and_resume_goes_on(page: Any, address: str) -> None:
    """Space stops at the frame on the screen, and Resume goes on right behind it."""
    open_world(page, address + "plain")
    page.keyboard.press("Space")
    wait(page, "window.streamgen.state.phase === 'paused'")
    frame, drawn = state(page, "frame"), state(page, "drawn")
    page.wait_for_timeout(400)
    assert (state(page, "frame"), state(page, "drawn")) == (frame, drawn)
    page.evaluate(
        """() => {
          const s = window.streamgen.state;
          let frame = s.frame;
          window.after = [];
          Object.defineProperty(s, 'frame', {
            get: () => frame,
            set: (value) => { frame = value; window.after.push(value); },
          });
        }"""
    )
    page.locator(".sg-pause").click()
    wait(page, "window.after.length >= 2")
    assert frame < page.evaluate("window.after[0]") <= frame + 4  # a busy page may skip a few


def test_keys_go_up_when_the_window_loses_focus(page: Any, address: str) -> None:
    """A key that is down when the window stops listening is released."""
    open_world(page, address + "plain")
    page.keyboard.down("w")
    wait(page, "document.querySelector('.sg-key[data-code=KeyW]').dataset.on === 'true'")
    page.evaluate("window.dispatchEvent(new Event('blur'))")
    wait(page, "document.querySelector('.sg-key[data-code=KeyW]').dataset.on === 'false'")


def test_branch_and_back(page: Any, address: str) -> None:
    """Branch makes two chips; a click on the first goes back to where it was left."""
    open_world(page, address + "plain")
    wait_frames(page, 8)
    page.keyboard.press("b")
    wait(page, "document.querySelectorAll('.sg-branch').length === 2")
    frame = state(page, "frame")
    wait(page, f"window.streamgen.state.frame > {frame + 20}")
    page.locator(".sg-branch").first.click()
    wait(page, "window.streamgen.state.branch === 0")
    wait(page, f"window.streamgen.state.frame < {frame + 20}")


def test_record_and_download(page: Any, address: str) -> None:
    """Record, stop, and the link gives an mp4."""
    open_world(page, address + "plain")
    page.locator(".sg-record").click()
    wait(page, "window.streamgen.state.recording !== null")
    wait_frames(page, 12)
    page.locator(".sg-record").click()
    wait(page, "document.querySelector('.sg-download') !== null")
    answer = page.request.get(page.locator(".sg-download").get_attribute("href"))
    assert answer.body()[4:8] == b"ftyp"


def test_reconnects(page: Any, address: str) -> None:
    """When the connection drops the page says so, and goes on by itself with the same seed."""
    page.add_init_script(
        """const Real = window.WebSocket;
           window.sockets = [];
           window.WebSocket = class extends Real {
             constructor(...args) { super(...args); window.sockets.push(this); }
           };"""
    )
    open_world(page, address + "plain")
    page.evaluate("window.sockets[0].close()")
    wait(page, "window.streamgen.state.phase === 'offline'")
    wait(page, "window.streamgen.state.phase === 'live'")
    assert state(page, "seed") == 7
    assert page.evaluate("window.sockets.length") == 2
