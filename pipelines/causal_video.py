"""Video from a text, a picture or a clip, chunk by chunk and without end.

    pipe = CausalVideoPipeline.from_pretrained("pocket-video")
    pipe = CausalVideoPipeline.from_pretrained(
        "Wan2.1-T2V-1.3B", checkpoint="self_forcing_dmd.pt", preset="self-forcing"
    )
    for chunk in pipe.generate({0: "a cat on a beach", 40: "the cat runs"}, frames=81, seed=7):
        ...  # chunk.frames: uint8 [F, H, W, 3]

A base is a packaged model, or a folder of Wan weights in diffusers' or the original layout; the
checkpoint of CausVid, Self-Forcing, LongLive, ... takes the place of its transformer. A preset says
how such a checkpoint is run: chunk, window, positions, timesteps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from streamgen import session_file
from streamgen.cache.codec import codec_name
from streamgen.engine import Engine, ImageStart, Recache, VideoConfig, one_of
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.folder import load, save
from streamgen.frames import Chunk, read_image
from streamgen.models.history import Positions
from streamgen.models.prompts import CachedText, default_prompt_cache
from streamgen.models.umt5 import Umt5Text
from streamgen.models.wan import WanConfig, WanModel
from streamgen.models.wan_vae import WanCodec
from streamgen.placement import Placement, place_text, place_transformer, place_vae, plan
from streamgen.sampling.schedule import PRESETS as SCHEDULES
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session
from streamgen.weights import registry
from streamgen.weights.load import load_into
from streamgen.weights.wan import WanBase, open_base, read_transformer

SECONDS = 5.0
"""Length of a video of which nothing is said; rounded up to whole chunks."""


@dataclass(frozen=True)
class Preset:
    """How a public causal checkpoint of Wan is run.

    Attributes are those of `VideoConfig`; lengths in latent frames. A window of 21 is what these
    models are trained on (81 pixel frames); the public code stops there, here it rolls on.
    """

    schedule: FewStep
    window: int = 21
    sink: int = 0
    positions: Positions = "absolute"
    chunk_frames: int = 3
    recache: Recache = "last_chunk"
    height: int = 480
    width: int = 832
    fps: int = 16


PRESETS = {
    "self-forcing": Preset(SCHEDULES["self-forcing"]),
    "causvid": Preset(SCHEDULES["causvid"]),
    "longlive": Preset(SCHEDULES["longlive"], 12, 3, recache="window_bidirectional"),
    # LongLive's model with window-relative positions, for length without a wall.
    "longlive-infinity": Preset(SCHEDULES["longlive"], 12, 3, "sliding_sink"),
    "matrix-game-2": Preset(SCHEDULES["matrix-game-2"], 6, height=352, width=640),
    # No code of GameCraft-2 is public: its two ablations, read as latent frames.
    "gamecraft-2": Preset(SCHEDULES["self-forcing"], 6, 1),
    "gamecraft-2-long": Preset(SCHEDULES["self-forcing"], 9, 3),
}
"""How each family's checkpoints are run, by name (reference: their configs and papers)."""


class CausalVideoPipeline:
    """A loaded video model. Load once, share it, open a session per video.

    Attributes:
        engine: weights and KV pool.
        name: of the model.
        folder: where it was loaded from; None if it was made in memory.
        placement: what lies on which device.
    """

    def __init__(
        self,
        engine: Engine,
        name: str = "",
        folder: Path | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.engine, self.name, self.folder = engine, name, folder
        self.placement = placement

    @property
    def config(self) -> VideoConfig:
        """What the model makes."""
        return cast(VideoConfig, self.engine.config)

    @classmethod
    def from_pretrained(
        cls,
        base: str | Path = "pocket-video",
        checkpoint: str | Path | None = None,
        preset: str | None = None,
        *,
        lora: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        device_map: str | Mapping[str, str] | None = None,
        offload: str | None = None,
        quantize: str | None = None,
        height: int | None = None,
        width: int | None = None,
        sink: int | None = None,
        window: int | None = None,
        positions: str | None = None,
        chunk_frames: int | None = None,
        first_chunk: int | None = None,
        image_start: ImageStart | None = None,
        steps: tuple[float, ...] | None = None,
        shift: float | None = None,
        kv: str = "raw",
        max_sessions: int = 1,
        history_frames: int = 0,
        prompt_cache: str | Path | None = "auto",
    ) -> CausalVideoPipeline:
        """Load a packaged model, or a base folder of Wan with a causal checkpoint.

        Args:
            base: such as "pocket-video"; or a folder of Wan2.1 in diffusers' or the original
                layout, or a hub id of one, for its autoencoder and text encoder.
            checkpoint: `.pt` or `.safetensors` of a causal transformer in Wan's form; None = the
                base's own.
            preset: one of `PRESETS`; None = "self-forcing". For a Wan base only.
            lora: a PEFT LoRA to merge (LongLive: `lora.pt`).
            device, dtype: "auto", or such as "cuda:1", "bfloat16".
            device_map, offload, quantize: see `streamgen.placement.plan`.
            height, width: pixels; None = the preset's.
            sink, window, positions, chunk_frames, first_chunk, image_start: other than the
                preset's; see `VideoConfig`. `chunk_frames=1` runs a frame-wise checkpoint.
            steps, shift: other timesteps, as their config writes them (`FewStep`). Self-Forcing's
                checkpoint is run with shift 5 (its training) and 8 (its demo).
            kv: how frames of the past are stored (`streamgen.cache.codec`).
            max_sessions, history_frames: what the KV pool has room for.
            prompt_cache: folder of encoded prompts; "auto" = the user's cache; None = none.

        Raises:
            UnknownModel: nothing of that name.
            WeightsError: files missing, damaged, of another family or of other shapes.
            InvalidRequest: a value is not accepted.
            MissingExtra: an optional package is needed.
        """
        kv = codec_name(kv)  # refused before anything is read
        changes = {
            "height": height,
            "width": width,
            "sink": sink,
            "window": window,
            "positions": positions,
            "chunk_frames": chunk_frames,
            "first_chunk": first_chunk,
            "image_start": image_start,
        }
        where: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "device_map": device_map,
            "offload": offload,
            "quantize": quantize,
        }
        pool = (max_sessions, history_frames, kv)
        folder = _find(base)
        if (folder / registry.MANIFEST).is_file():
            for name, value in (("checkpoint", checkpoint), ("preset", preset), ("lora", lora)):
                if value is not None:
                    raise InvalidRequest(
                        f"{name}={str(value)!r} is for a base folder of Wan weights; "
                        f"{folder.name!r} is a packaged model with settings of its own"
                    )
            return cls._packaged(folder, changes, steps, shift, where, pool)
        one_of("preset", preset or "self-forcing", tuple(PRESETS))
        chosen = PRESETS[preset or "self-forcing"]
        found = open_base(folder)
        placement = plan(**where, sizes=_bytes_of(found, checkpoint))
        tensors, sizes = read_transformer(found, checkpoint, lora)
        codec = _codec(found, sizes["in_channels"])
        config = _video_config(chosen, changes, steps, shift, codec, sizes["patch_size"])
        text: Any = _text(found, placement, sizes["text_dim"])
        cache = default_prompt_cache() if prompt_cache == "auto" else prompt_cache
        if cache is not None:
            text = CachedText(text, Path(cache))
        with torch.device("meta"):
            dit = WanModel(WanConfig(**sizes))
        load_into(dit, tensors)
        del tensors
        dit.eval().requires_grad_(False).to(placement.dtype)
        codec.cast(placement.dtype)
        return cls._placed(dit, text, codec, config, placement, pool, folder)

    @classmethod
    def _packaged(
        cls,
        folder: Path,
        changes: Mapping[str, Any],
        steps: tuple[float, ...] | None,
        shift: float | None,
        where: Mapping[str, Any],
        pool: tuple[int, int, str],
    ) -> CausalVideoPipeline:
        for name in ("height", "width"):
            if changes[name] is not None:
                raise InvalidRequest(
                    f"{name}={changes[name]}: {folder.name!r} makes pictures of one size only"
                )
        names = {"transformer": "transformer.safetensors", "text": "text.safetensors", "vae": "vae"}
        placement = plan(**where, sizes={part: _weigh(folder / at) for part, at in names.items()})
        dit, text, codec, config = load(folder, "video", VideoConfig, changes)
        if steps is not None or shift is not None:
            config = replace(config, schedule=_schedule(config.schedule, steps, shift))
        dit.to(placement.dtype)
        text.to(placement.dtype)
        codec.cast(placement.dtype)
        return cls._placed(dit, text, codec, config, placement, pool, folder)

    @classmethod
    def _placed(
        cls,
        dit: WanModel,
        text: Any,
        codec: Any,
        config: VideoConfig,
        placement: Placement,
        pool: tuple[int, int, str],
        folder: Path,
    ) -> CausalVideoPipeline:
        place_transformer(dit, placement)
        place_text(text, placement)
        place_vae(codec, placement)
        max_sessions, history_frames, kv = pool
        engine = Engine(
            dit, text, codec, config, max_sessions, history_frames, kv, placement.transformer
        )
        return cls(engine, folder.name, folder, placement)

    # Lengths

    @property
    def chunk_pixels(self) -> int:
        """Pixel frames of every chunk but the first."""
        return self.engine.pixel_frames(1, self.config.chunk_frames)

    @property
    def first_pixels(self) -> int:
        """Pixel frames of the first chunk."""
        return self.engine.pixel_frames(0, self.config.chunk_at(0))

    def check_frames(self, frames: int) -> None:
        """Raise InvalidRequest, which names the nearest counts, unless whole chunks make them."""
        first, each = self.first_pixels, self.chunk_pixels
        if frames < first or (frames - first) % each:
            below = first + max(0, frames - first) // each * each
            near = f"{below}" if frames < first else f"{below} and {below + each}"
            raise InvalidRequest(
                f"{frames} frames: a video has {first} and any multiple of {each} more (chunks of "
                f"{self.config.chunk_frames} latent frames); nearest: {near}"
            )

    def chunks_for(self, frames: int) -> int:
        """Chunks of a video of so many frames.

        Raises:
            InvalidRequest: as `check_frames`.
        """
        self.check_frames(frames)
        return 1 + (frames - self.first_pixels) // self.chunk_pixels

    def frames_for(self, seconds: float) -> int:
        """The least accepted number of frames that lasts so long."""
        more = max(0, round(seconds * self.config.fps) - self.first_pixels)
        return self.first_pixels + -(-more // self.chunk_pixels) * self.chunk_pixels

    # Videos

    def session(
        self,
        prompt: str,
        seed: int = 0,
        image: np.ndarray | str | Path | None = None,
        video: np.ndarray | None = None,
        history_seconds: float = 0.0,
    ) -> Session:
        """Begin a video.

        Args:
            prompt: the text to begin with.
            seed: same seed and same prompts give the same frames.
            image: a picture to begin with: uint8 `[H, W, 3]` at any size, or a file's path.
            video: a clip to go on from: uint8 `[F, H, W, 3]` at the model's size, with a number of
                frames that `check_frames` accepts; the session stands behind it.
            history_seconds: how far back `rewind` can go; needs `history_frames` in the pool.

        Raises:
            InvalidRequest: an empty text, both a picture and a clip, or pictures of other shapes.
        """
        self._check_text(prompt)
        if image is not None and video is not None:
            raise InvalidRequest("a video begins with a picture or with a clip: give one of them")
        if isinstance(image, (str, Path)):
            image = read_image(image)
        session = Session(self.engine, prompt, seed, image, history_seconds)
        if video is not None:
            try:
                session.watch(video)
            except BaseException:
                session.close()
                raise
        return session

    def load_session(self, path: str | Path, history_seconds: float | None = None) -> Session:
        """Go on with a video that `Session.save` wrote, bitwise as if it had never stopped.

        Raises:
            SessionFileError: the file can't be read, or is damaged.
            InvalidRequest: it is no session file, or was made with another model or settings.
            PoolFull: there is no room for its K/V.
        """
        return session_file.load(self.engine, path, history_seconds)

    def generate(
        self,
        prompt: str | Mapping[int, str],
        frames: int | None = None,
        seed: int = 0,
        image: np.ndarray | str | Path | None = None,
        video: np.ndarray | None = None,
        recache: Recache | None = None,
        overlap: bool = True,
    ) -> Iterator[Chunk]:
        """Make a video, chunk by chunk.

        Args:
            prompt: a text, or texts by the pixel frame at which each begins; a text takes effect
                at the first chunk boundary at or after its frame. The first one is at 0.
            frames: pixel frames to make, see `check_frames`; None = about five seconds. After a
                clip, a multiple of `chunk_pixels`.
            seed, image, video: see `session`.
            recache: what of the past each later text recomputes (`Session.prompt`).
            overlap: decode each chunk while the next one is denoised.

        Raises:
            InvalidRequest: a value is not accepted; raised at once, before the first chunk.
        """
        texts = {0: prompt} if isinstance(prompt, str) else dict(prompt)
        if 0 not in texts:
            raise InvalidRequest(f"prompts at frames {sorted(texts)}: the first one is at frame 0")
        for text in texts.values():
            self._check_text(text)
        if frames is None:
            frames = self.frames_for(SECONDS) if video is None else 5 * self.chunk_pixels
        if video is None:
            chunks = self.chunks_for(frames)
        elif frames > 0 and frames % self.chunk_pixels == 0:
            chunks = frames // self.chunk_pixels
        else:
            raise InvalidRequest(
                f"{frames} frames behind a clip: accepted are multiples of {self.chunk_pixels}"
            )
        session = self.session(texts.pop(0), seed, image, video)
        try:
            start = session.frame
            for frame, text in sorted(texts.items()):
                if frame >= frames:
                    raise InvalidRequest(f"a prompt at frame {frame}: the video has {frames}")
                session.prompt(text, recache, at=start + frame)
        except BaseException:
            session.close()
            raise
        return _run(session, chunks, overlap)

    def __call__(
        self, prompt: str | Mapping[int, str], frames: int | None = None, **options: Any
    ) -> np.ndarray:
        """A whole video in memory: uint8 `[F, H, W, 3]`; arguments as for `generate`."""
        made = self.generate(prompt, frames, **options)
        return np.concatenate([chunk.frames for chunk in made])

    def save_pretrained(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder of a packaged model (`streamgen.folder`), weights in `dtype`."""
        save(self.engine, folder, "video", dtype)

    def _check_text(self, text: str) -> None:
        if not text.strip():
            offered = ", ".join(map(repr, self.config.suggestions)) or "'a cat walks on a beach'"
            raise InvalidRequest(f"the prompt is empty: say what to show, such as {offered}")


def _run(session: Session, chunks: int, overlap: bool) -> Iterator[Chunk]:
    with session:
        yield from session.stream(chunks, overlap)


# A base of Wan weights


def _find(base: str | Path) -> Path:
    """The folder of a packaged model or of Wan weights."""
    folder = Path(base).expanduser()
    if str(base) in registry.packaged_names() or not folder.is_dir():
        return registry.resolve(base, accept=_is_wan)
    return folder


def _is_wan(folder: Path) -> bool:
    """Whether a folder without a manifest looks like a base of Wan weights."""
    return any(folder.glob("model_index.json")) or any(folder.glob("*.safetensors*"))


def _bytes_of(base: WanBase, checkpoint: str | Path | None) -> dict[str, int]:
    """Bytes on disk of each component, for a placement."""
    paths = {"transformer": checkpoint or base.transformer, "text": base.text, "vae": base.vae}
    return {name: _weigh(Path(path)) for name, path in paths.items() if path is not None}


def _weigh(path: Path) -> int:
    if path.suffix == ".json":  # the index of shards beside it
        path = path.parent
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _codec(base: WanBase, channels: int) -> WanCodec:
    path = base.part("vae")
    codec = WanCodec.from_folder(path) if path.is_dir() else WanCodec.from_file(path)
    if codec.latent_channels != channels:
        raise WeightsError(
            f"the autoencoder in {path.name!r} has latents of {codec.latent_channels} channels, "
            f"the transformer takes {channels}: they belong to different models"
        )
    codec.eval().requires_grad_(False)
    return codec


def _text(base: WanBase, placement: Placement, width: int) -> Umt5Text:
    path, tokenizer = base.part("text"), base.part("tokenizer")
    make = Umt5Text.from_folder if path.is_dir() else Umt5Text.from_original
    return make(path, tokenizer, dtype=placement.dtype, width=width)


def _video_config(
    preset: Preset,
    changes: Mapping[str, Any],
    steps: tuple[float, ...] | None,
    shift: float | None,
    codec: WanCodec,
    patch_size: tuple[int, int, int],
) -> VideoConfig:
    values = {**vars(preset), **{k: v for k, v in changes.items() if v is not None}}
    values["schedule"] = _schedule(preset.schedule, steps, shift)
    height, width = values["height"], values["width"]
    for name, size, patch in zip(("height", "width"), (height, width), patch_size[1:], strict=True):
        unit = codec.spatial * patch
        if size < unit or size % unit:
            below = max(unit, size // unit * unit)
            raise InvalidRequest(
                f"{name} {size}: accepted are multiples of {unit} pixels (autoencoder "
                f"{codec.spatial} x patch {patch}); nearest: {below} and {below + unit}"
            )
    return VideoConfig(
        **values,
        latent_hw=(height // codec.spatial, width // codec.spatial),
        first_schedule=values["schedule"],
    )


def _schedule(given: FewStep, steps: tuple[float, ...] | None, shift: float | None) -> FewStep:
    if steps is not None:
        given = replace(given, steps=tuple(steps))
    return given if shift is None else replace(given, shift=shift)
