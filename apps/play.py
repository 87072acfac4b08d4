"""`streamgen play`: serve a world on this machine and open its page."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI

from streamgen.apps.hub import Settings
from streamgen.apps.server import create_app
from streamgen.apps.worlds import as_world
from streamgen.errors import MissingExtra, PortInUse


def play(
    world: Any = "pocket-world",
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    plain: bool = False,
    open_browser: bool = True,
    prompt: str | None = None,
    seed: int | None = None,
    start_image: str | None = None,
    max_sessions: int | None = None,
    token: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a world until Ctrl-C.

    Args:
        world: a name, folder or hub id to load, or a loaded world.
        host, port: where to serve; port 0 is any free one.
        plain: the page without Gradio, which starts some seconds sooner.
        open_browser: open the page, where this machine has a display.
        prompt, seed: what the page starts with; without them a suggestion and any seed.
        start_image: a picture's path that walks begin with, or "generated" for one that is painted
            for the prompt at each start; None = a dreamt one.
        max_sessions: visitors at once; the world's own number by default.
        token: what clients must say; STREAMGEN_TOKEN or a new one by default.
        say: prints a line.

    Raises:
        PortInUse: the port is taken (found before anything is loaded).
        UnknownModel, WeightsError: from loading.
        InvalidRequest: the world can't take the prompt, or the picture can't be read.
    """
    listener = listen(host, port)
    try:
        say("loading the world ...")
        world = as_world(world)
        first_frame = None
        if start_image is not None:
            from streamgen.apps.painter import first_frames

            size = {"width": world.config.width, "height": world.config.height}
            first_frame = first_frames(start_image, **size)
        say("waking the world ...")
        wake(world, prompt)
        token = token or os.environ.get("STREAMGEN_TOKEN") or secrets.token_urlsafe(24)
        origins = os.environ.get("STREAMGEN_ALLOW_ORIGINS", "")
        settings = Settings(
            host=host,
            token=token,
            max_sessions=max_sessions or int(getattr(world, "max_sessions", None) or 4),
            allow_origins=tuple(part.strip() for part in origins.split(",") if part.strip()),
            prompt=prompt,
            seed=seed,
            first_frame=first_frame,
        )
        app = build_app(world, settings, plain=plain, say=say)
        address = page_address(host, listener.getsockname()[1])
        say(f"\n  streamgen is at {address}")
        say(f"  programs connect to {address.replace('http', 'ws', 1)}v1/stream")
        say(f"  with the token {settings.token}")
        say("  Ctrl-C ends it\n")
        serve(app, listener, _opener(address) if open_browser and has_display() else None)
    finally:
        listener.close()


def wake(world: Any, prompt: str | None = None) -> None:
    """Make two chunks that nobody sees: what is slow only once is over before a visitor comes.

    Raises:
        InvalidRequest: the world can't take the prompt.
    """
    with world.session(**({} if prompt is None else {"prompt": prompt})) as session:
        for _ in session.stream(chunks=2):
            pass


def build_app(
    world: Any, settings: Settings, *, plain: bool = False, say: Callable[[str], None] = print
) -> FastAPI:
    """The app with a page at "/": Gradio's, or the plain one if asked for or Gradio is missing."""
    app = create_app(world, settings)
    if not plain:
        from streamgen.apps import demo

        try:
            say("building the page ...")
            return demo.mount(app)
        except ImportError as error:
            say(f"the page comes without Gradio ({error}); pip install gradio adds it")
    from fastapi.responses import RedirectResponse

    @app.get("/")
    async def root() -> RedirectResponse:
        return RedirectResponse("/plain")

    return app


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises PortInUse if the address is taken or can't be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere this option would share a port that is in use
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # only now is a port that another server listens on refused
    except OSError as error:
        listener.close()
        taken = {errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", None)}
        why = "is in use" if error.errno in taken else f"can't be used ({error.strerror})"
        raise PortInUse(
            f"port {port} of {host} {why}; choose another with --port, 0 is any free one"
        ) from None
    return listener


def serve(app: FastAPI, listener: socket.socket, started: Callable[[], None] | None = None) -> None:
    """Run the app on a bound socket until Ctrl-C; `started` is called once it answers."""
    server = make_server(app)
    if started is not None:

        def wait() -> None:
            while not server.started:
                time.sleep(0.05)
            started()

        threading.Thread(target=wait, daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass


def make_server(app: FastAPI) -> Any:
    """The uvicorn server with the options that the stream needs.

    Raises:
        MissingExtra: without the websockets package uvicorn would answer every visit with 404.
    """
    import uvicorn

    if find_spec("websockets") is None:
        raise MissingExtra("the stream needs the websockets package: pip install websockets")

    config = uvicorn.Config(
        app,
        log_level="warning",
        ws="websockets-sansio",
        ws_max_size=4 * 1024 * 1024,
        ws_per_message_deflate=False,  # 2 ms of CPU for every frame, for nothing
        ws_ping_interval=20.0,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


def page_address(host: str, port: int) -> str:
    """The address to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def has_display() -> bool:
    """Can a browser window open here?"""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _opener(address: str) -> Callable[[], None]:
    def show() -> None:
        webbrowser.open(address)

    return show
