"""What the visits of one server share: the world, the engine's lock, pictures and recordings."""

from __future__ import annotations

import ipaddress
import secrets
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from streamgen import wire
from streamgen.apps.images import read_image
from streamgen.errors import InvalidRequest

KEPT_IMAGES, KEPT_RECORDINGS = 32, 50


@dataclass(frozen=True)
class Settings:
    """How a world is served.

    Args:
        host: the address that is served on; decides which pages may connect.
        token: what visitors must say; None asks for none. A new one for each server by default.
        max_sessions: visits at once.
        allow_origins: pages from elsewhere that may connect, as `https://host`; "*" is all.
        prompt, seed: what the page starts with; without them a suggestion and any seed.
        first_frame: gives uint8 `[H, W, 3]` for a prompt and a seed, with which walks begin that
            bring no picture of their own.
        limits: of one visit.
    """

    host: str = "127.0.0.1"
    token: str | None = field(default_factory=lambda: secrets.token_urlsafe(24))
    max_sessions: int = 4
    allow_origins: tuple[str, ...] = ()
    prompt: str | None = None
    seed: int | None = None
    first_frame: Callable[[str, int], np.ndarray] | None = None
    limits: wire.Limits = wire.Limits()


class Guest(Protocol):
    """Who visits: all that the hub needs to know is how to ask them to go."""

    def leave(self) -> None:
        """End the visit soon."""


@dataclass
class Hub:
    """What the visits of one server share."""

    world: Any
    settings: Settings
    engine: threading.Lock = field(default_factory=threading.Lock)
    visits: set[Guest] = field(default_factory=set)
    images: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)
    recordings: OrderedDict[str, Path] = field(default_factory=OrderedDict)
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="streamgen-")
    )

    @property
    def name(self) -> str:
        """The model's name."""
        config = self.world.config
        return str(getattr(self.world, "name", None) or getattr(config, "name", "world"))

    def info(self) -> wire.WorldInfo:
        """What a page needs to know of the world."""
        config = self.world.config
        return wire.WorldInfo(
            name=self.name,
            width=config.width,
            height=config.height,
            fps=config.fps,
            chunk_frames=config.chunk_frames,
            keys=list(config.keys),
            suggestions=list(config.suggestions),
            vocabulary=list(config.vocabulary),
            max_words=config.max_words,
        )

    def add_image(self, data: bytes) -> str:
        """Keep a first frame; returns what `start.image` names it by. Raises InvalidRequest."""
        config = self.world.config
        return self.add_pixels(read_image(data, width=config.width, height=config.height))

    def add_pixels(self, pixels: np.ndarray) -> str:
        """Keep a first frame, uint8 `[H, W, 3]` of the world's size."""
        ref = secrets.token_urlsafe(12)
        self.images[ref] = pixels
        while len(self.images) > KEPT_IMAGES:
            self.images.popitem(last=False)
        return ref

    def image(self, ref: str | None) -> np.ndarray | None:
        """The first frame of that name. Raises InvalidRequest if there is none."""
        if ref is None:
            return None
        if ref not in self.images:
            raise InvalidRequest(f"no image {ref!r}; send one with POST /v1/images first")
        return self.images[ref]

    def new_recording(self) -> tuple[str, Path]:
        """A name and a path for a recording; the oldest ones are deleted."""
        name = secrets.token_urlsafe(12)
        path = Path(self.folder.name) / f"{name}.mp4"
        self.recordings[name] = path
        while len(self.recordings) > KEPT_RECORDINGS:
            _, old = self.recordings.popitem(last=False)
            old.unlink(missing_ok=True)
            old.with_suffix(".jsonl").unlink(missing_ok=True)
        return name, path


def origin_allowed(origin: str | None, host_header: str | None, settings: Settings) -> bool:
    """May a page from `origin` connect? None is no page: a program, which needs only the token.

    A server on this machine's own address lets in pages of that address alone: another name in
    `Origin` could be a stranger's, pointed here (DNS rebinding). One that is open to the network
    lets in the pages it serves itself, under whatever name.
    """
    if origin is None or "*" in settings.allow_origins or origin in settings.allow_origins:
        return True
    page = urlsplit(origin)
    if is_loopback(settings.host):
        return is_loopback(page.hostname or "")
    return page.netloc == host_header


def is_loopback(host: str) -> bool:
    """True for the names and addresses of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
