"""The server: one FastAPI app that plays a world to many visitors over `/v1/stream`.

The app is a shell: the routes and the page are here, a visit is in `visit`, what visits share in
`hub`. Each visit has one thread for its walk; the model itself is used by one thread at a time.

Who may connect: `hello.token` must be the server's (its pages carry it), and a browser's page must
come from this server (`Origin`), so that no other web page can use a server on localhost.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request, WebSocket
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from streamgen import __version__, wire
from streamgen.apps.hub import Hub, Settings
from streamgen.apps.visit import Visit
from streamgen.errors import InvalidRequest

STATIC = Path(__file__).parent / "static"


def create_app(world: Any, settings: Settings | None = None) -> FastAPI:
    """An app that serves `world`: the stream, its recordings and the page without Gradio.

    Args:
        world: anything with `.config` and `.session(...)`.
        settings: see `Settings`.
    """
    hub = Hub(world, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for visit in list(hub.visits):
            visit.leave()
        hub.folder.cleanup()

    # No /docs: FastAPI's page loads its scripts from elsewhere.
    app = FastAPI(title="streamgen", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.hub = hub
    _add_api(app, hub)
    _add_page(app, hub)
    return app


def _add_api(app: FastAPI, hub: Hub) -> None:
    @app.websocket(wire.PATH)
    async def stream(socket: WebSocket) -> None:
        await Visit(hub, socket).run()

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        limit = hub.settings.max_sessions
        return {
            "status": "ok",
            "version": __version__,
            "model": hub.name,
            "sessions": len(hub.visits),
            "max_sessions": limit,
        }

    @app.post("/v1/images")
    async def images(
        request: Request, authorization: Annotated[str | None, Header()] = None
    ) -> JSONResponse:
        token = hub.settings.token
        given = (authorization or "").removeprefix("Bearer ").encode()
        if token is not None and not secrets.compare_digest(given, token.encode()):
            return _refuse(401, "unauthorized", "send the server's token as Authorization: Bearer")
        limit, data = hub.settings.limits.image_bytes, bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > limit:
                return _refuse(413, "too_large", f"an image has at most {limit >> 20} MiB")
        try:
            ref = await asyncio.to_thread(hub.add_image, bytes(data))
        except InvalidRequest as error:
            return _refuse(400, "invalid_request", str(error))
        return JSONResponse({"ref": ref})

    @app.get("/v1/recordings/{name}.{ending}")
    async def recording(name: str, ending: str) -> FileResponse:
        path = hub.recordings.get(name)
        kinds = {"mp4": "video/mp4", "jsonl": "application/jsonl"}
        if path is None or ending not in kinds or not path.exists():
            raise HTTPException(404, "no such recording, or it is not finished")
        file = path.with_suffix(f".{ending}")
        return FileResponse(
            file,
            media_type=kinds[ending],
            filename=f"streamgen-{name[:6]}.{ending}",
            content_disposition_type="inline",
        )


def _refuse(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message}, status_code=status)


def _add_page(app: FastAPI, hub: Hub) -> None:
    @app.get("/plain")
    async def plain() -> HTMLResponse:
        page = (STATIC / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(page.replace("__OPTIONS__", script_json(page_options(hub))))

    @app.get("/plain/{name}")
    async def static(name: str) -> FileResponse:
        if name not in ("streamgen.js", "streamgen.css", "page.css"):
            raise HTTPException(404)
        return FileResponse(STATIC / name, headers={"Cache-Control": "no-cache"})


def page_options(hub: Hub) -> dict[str, Any]:
    """What `mountStreamgen` in streamgen.js is given."""
    settings = hub.settings
    return {"token": settings.token, "prompt": settings.prompt, "seed": settings.seed}


def script_json(value: Any) -> str:
    """JSON that may stand inside a <script>."""
    return json.dumps(value).replace("<", "\\u003c")
