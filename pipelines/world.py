"""Interactive worlds: a causal video transformer that a user walks through.

    world = WorldPipeline.from_pretrained("pocket-world")
    session = world.session(prompt="a brick maze at night", seed=7)

Its folder: `streamgen.folder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch

from streamgen import session_file
from streamgen.cache.codec import codec_name
from streamgen.device import pick_device, pick_dtype
from streamgen.engine import Engine, WorldConfig
from streamgen.folder import load, save
from streamgen.frames import read_image
from streamgen.session import Session
from streamgen.weights import registry


class WorldPipeline:
    """A loaded world. Load once, share it, open a session per user.

    Attributes:
        config: what the world is (`WorldConfig`).
        engine: weights and KV pool.
        name: name of its folder.
        folder: where it was loaded from; None if it was made in memory.
    """

    def __init__(self, engine: Engine, name: str = "", folder: Path | None = None) -> None:
        self.engine, self.name, self.folder = engine, name, folder

    @property
    def max_sessions(self) -> int:
        """Sessions that the KV pool has room for."""
        return self.engine.max_sessions

    @property
    def config(self) -> WorldConfig:
        """What the world is."""
        return cast(WorldConfig, self.engine.config)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        sink: int | None = None,
        window: int | None = None,
        positions: str | None = None,
        max_sessions: int = 4,
        history_seconds: float = 8.0,
        kv: str = "raw",
    ) -> WorldPipeline:
        """Load a packaged world, a local folder or a hub id.

        Args:
            name: such as "pocket-world".
            device: "auto", "cpu", "cuda", "cuda:1", ...
            dtype: "auto", "float32" or "bfloat16".
            sink, window, positions: other than the config's; see `SinkWindow` and
                `streamgen.models.history`.
            max_sessions: sessions that the KV pool has room for.
            history_seconds: past of each that it has room for besides.
            kv: how frames of the past are stored: "raw", "fp8", "fp8_e5m2", "int8" or "nvfp4"; see
                `streamgen.cache.codec`.

        Raises:
            UnknownModel: nothing of that name.
            WeightsError: files missing, damaged or of other shapes.
            InvalidRequest: a value is not accepted, such as a window smaller than sink + chunk.
        """
        kv = codec_name(kv)  # refused before anything is read
        where = pick_device(device)
        kind = pick_dtype(dtype, where)
        folder = registry.resolve(name)
        changes = {"sink": sink, "window": window, "positions": positions}
        dit, text, codec, config = load(folder, "world", WorldConfig, changes)
        for part in (dit, text, codec):
            part.to(where)
        dit.to(kind)
        text.to(kind)
        codec.cast(kind)
        past = round(max_sessions * history_seconds * config.fps)
        engine = Engine(dit, text, codec, config, max_sessions, past, kv)
        return cls(engine, folder.name, folder)

    def session(
        self,
        prompt: str = "",
        seed: int = 0,
        image: np.ndarray | str | Path | None = None,
        history_seconds: float = 8.0,
    ) -> Session:
        """Begin a walk.

        Args:
            prompt: the text to begin with; "" = the config's first suggestion.
            seed: same seed and same actions give the same frames.
            image: a first frame of one's own: uint8 `[H, W, 3]`, or a picture's path.
            history_seconds: how far back `rewind` can go without a mark.

        Raises:
            InvalidRequest: a text over the limit, or an image that is no image.
        """
        suggestions = self.config.suggestions
        text = prompt or (suggestions[0] if suggestions else "")
        if isinstance(image, (str, Path)):
            image = read_image(image)
        return Session(self.engine, text, seed, image, history_seconds)

    def load_session(self, path: str | Path, history_seconds: float | None = None) -> Session:
        """Go on with a walk that `Session.save` wrote, bitwise as if it had never stopped.

        Args:
            path: of the file.
            history_seconds: how far back `rewind` will be able to go; None = as far as before. The
                file holds no past to go back to: that begins anew.

        Raises:
            SessionFileError: the file can't be read, or is damaged.
            InvalidRequest: it is no session file, or its session was made with another model,
                other settings or another dtype.
            PoolFull: there is no room for its K/V.
        """
        return session_file.load(self.engine, path, history_seconds)

    def save_pretrained(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder that `from_pretrained` reads, weights in `dtype`."""
        save(self.engine, folder, "world", dtype)
