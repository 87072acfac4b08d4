"""Interactive worlds: a causal video transformer that a user walks through.

    world = WorldPipeline.from_pretrained("pocket-world")
    session = world.session(prompt="a brick maze at night", seed=7)

A folder holds `config.json` (the world and the shapes of its parts), `transformer.safetensors`,
`text.safetensors` and `vae/` (a diffusers autoencoder with `latent_stats.json`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from streamgen import session_file
from streamgen.cache.codec import codec_name
from streamgen.device import pick_device, pick_dtype
from streamgen.engine import Engine, WorldConfig
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.models.text import WordEncoder
from streamgen.models.vae import FrameCodec
from streamgen.models.wan import WanConfig, WanModel
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session
from streamgen.weights import registry
from streamgen.weights.load import load_into, read_tensors


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
        return self.engine.config

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
        folder = registry.resolve(name)
        if (folder / registry.MANIFEST).exists():
            registry.verify(folder)
        raw = _read_config(folder)
        try:
            changes = {"sink": sink, "window": window, "positions": positions}
            changes = {key: value for key, value in changes.items() if value is not None}
            config = replace(_world_config(raw["world"]), **changes)
            shape = WanConfig(**raw["transformer"])
            with torch.device("meta"):  # no random start for weights that are read anyway
                dit = WanModel(shape).to_empty(device="cpu")
                text = WordEncoder(config.vocabulary, shape.text_dim, config.max_words)
                text.to_empty(device="cpu")
        except (KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"config.json of {folder.name!r} does not fit: {error}") from error
        if len(config.keys) != shape.action_dim:
            raise WeightsError(
                f"config.json of {folder.name!r} names {len(config.keys)} keys for a transformer "
                f"that takes actions of width {shape.action_dim}"
            )
        where = pick_device(device)
        kind = pick_dtype(dtype, where)
        load_into(dit, read_tensors(folder / "transformer.safetensors"))
        load_into(text, read_tensors(folder / "text.safetensors"))
        codec = FrameCodec.from_folder(folder / "vae")
        for part in (dit, text, codec):
            part.eval().requires_grad_(False).to(where)
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
        folder.mkdir(parents=True, exist_ok=True)
        engine = self.engine
        config = {
            "kind": "world",
            "world": asdict(engine.config),
            "transformer": asdict(engine.dit.config),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for name, part in (("transformer", engine.dit), ("text", engine.text)):
            tensors = {k: v.to(dtype).contiguous() for k, v in part.state_dict().items()}
            save_file(tensors, folder / f"{name}.safetensors")
        vae = engine.codec.vae
        vae.save_config(folder / "vae")
        described = json.loads((folder / "vae" / "config.json").read_text())
        described.pop("_name_or_path", None)  # where it lay on the machine that made it
        (folder / "vae" / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        tensors = {
            k: (v.to(dtype) if v.is_floating_point() else v).contiguous()
            for k, v in vae.state_dict().items()
        }
        save_file(tensors, folder / "vae" / "diffusion_pytorch_model.safetensors")
        stats = {k: getattr(engine.codec, k).flatten().tolist() for k in ("mean", "std")}
        (folder / "vae" / "latent_stats.json").write_text(json.dumps(stats) + "\n")


def read_image(path: str | Path) -> np.ndarray:
    """A picture file as uint8 RGB `[H, W, 3]`.

    Raises:
        InvalidRequest: there is no such file, or it is not a picture.
    """
    import cv2

    try:
        data = np.frombuffer(Path(path).read_bytes(), np.uint8)
    except OSError as error:
        raise InvalidRequest(f"image {str(path)!r} can't be read: {error.strerror}") from error
    image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB) if data.size else None
    if image is None:
        raise InvalidRequest(f"{str(path)!r} is not a picture (accepted: PNG, JPEG, WebP, BMP)")
    return image


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"config.json of {folder.name!r} can't be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("kind") != "world":
        raise InvalidRequest(f"{folder.name!r} is not a world (its config.json has another kind)")
    return raw


def _world_config(raw: dict[str, Any]) -> WorldConfig:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    for name in ("schedule", "first_schedule"):
        values[name] = FewStep(**values[name])
    values["opposites"] = tuple(tuple(pair) for pair in values["opposites"])
    return WorldConfig(**values)
