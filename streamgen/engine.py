"""What all sessions of a model share: weights, the KV pool, and the texts already encoded.

The engine knows no user. Each of its verbs takes the session's state as arguments and holds
`lock` while it computes, so sessions in several threads take turns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.cache.codec import codec_name
from streamgen.errors import InvalidRequest
from streamgen.frames import Chunk as FrameChunk
from streamgen.models.history import CachedHistory, CachedPrompt, Positions
from streamgen.models.text import TextEncoder
from streamgen.models.vae import VideoCodec
from streamgen.models.wan import History, Prompt, WanModel
from streamgen.sampling.denoise import few_step
from streamgen.sampling.schedule import FewStep

PROMPTS_KEPT = 32
Done = TypeVar("Done")


Recache = Literal["last_chunk", "window_causal", "window_bidirectional", "off"]
"""What of the past is recomputed under a new text; see `Session.prompt`."""

ImageStart = Literal["repeat", "block", "clamp"]
"""How a video begins with a picture; see `VideoConfig`."""


@dataclass(frozen=True)
class StreamConfig:
    """What a model that streams is, beyond its weights.

    Attributes:
        height, width: pixels.
        fps: frames a second at which it is meant to be watched.
        latent_hw: rows and columns of a latent frame.
        chunk_frames: latent frames made together.
        sink, window: latent frames that stay for ever, and all that a chunk can see (`SinkWindow`).
        positions: position policy (`streamgen.models.history`).
        schedule: denoising steps of a chunk.
        first_schedule: denoising steps of the first chunk, which has no past to lean on.
        context_noise: timestep told in the clean pass that commits a chunk.
        suggestions: prompts to offer.
        vocabulary, max_words: of a `WordEncoder`; empty where the text encoder has its own files.
        recache: what a change of the text recomputes unless the caller says so.
    """

    height: int
    width: int
    fps: int
    latent_hw: tuple[int, int]
    chunk_frames: int
    sink: int
    window: int
    positions: Positions
    schedule: FewStep
    first_schedule: FewStep
    context_noise: float = 0.0
    suggestions: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    max_words: int = 0
    recache: Recache = "last_chunk"

    def __post_init__(self) -> None:
        one_of("positions", self.positions, get_args(Positions))
        one_of("recache", self.recache, get_args(Recache))
        self.policy.validate(self.chunk_frames)

    @property
    def policy(self) -> SinkWindow:
        """The cache policy that follows."""
        return SinkWindow(self.sink, self.window, shadow_sink=self.positions == "sliding_sink")

    def chunk_at(self, latent: int) -> int:
        """Latent frames of the chunk that begins at a latent frame."""
        return self.chunk_frames

    @property
    def block_start(self) -> int:
        """A latent frame at which a chunk of full length begins; others follow from it."""
        return 0

    def action(self, keys: frozenset[str]) -> Tensor:
        """The action vector `[A]` of a set of held keys; empty where nothing can be pressed.

        Raises:
            InvalidRequest: a key that the model does not know.
        """
        if keys:
            raise InvalidRequest(f"unknown keys {sorted(keys)}: this model takes no keys")
        return torch.empty(0)

    def held(self, keys: frozenset[str], pressed: frozenset[str]) -> frozenset[str]:
        """The keys of a chunk before which `pressed` were pressed and `keys` are held at last."""
        return keys | pressed


@dataclass(frozen=True)
class WorldConfig(StreamConfig):
    """A world: a stream that is acted in.

    Attributes:
        keys: names of the keys, in the order of the action vector.
        opposites: pairs of keys that cancel out.
    """

    keys: tuple[str, ...] = ()
    opposites: tuple[tuple[str, str], ...] = ()

    def action(self, keys: frozenset[str]) -> Tensor:
        """The action vector `[A]` of a set of held keys; opposites cancel out.

        Raises:
            InvalidRequest: a key that the world does not know.
        """
        unknown = sorted(keys - set(self.keys))
        if unknown:
            raise InvalidRequest(f"unknown keys {unknown}: accepted are {list(self.keys)}")
        cancelled = {key for pair in self.opposites if keys >= set(pair) for key in pair}
        return torch.tensor([float(key in keys and key not in cancelled) for key in self.keys])

    def held(self, keys: frozenset[str], pressed: frozenset[str]) -> frozenset[str]:
        """A key that was pressed and released still counts, unless its opposite is held."""
        spoilt = {key for pair in self.opposites if keys & set(pair) for key in pair}
        return keys | (pressed - spoilt)


@dataclass(frozen=True)
class VideoConfig(StreamConfig):
    """A video from a text.

    Attributes:
        first_chunk: latent frames of the first chunk if it is shorter than the others
            (Self-Forcing's `independent_first_frame`: 1); 0 = all are alike.
        image_start: how a video begins with a picture. `block`: its latent is the first chunk,
            alone, and not denoised (Self-Forcing; needs `first_chunk=1`). `clamp`: it stands as
            the first frame of the first chunk at timestep 0 while the others are denoised
            (LongLive 2). `repeat`: it fills the first chunk.
    """

    first_chunk: int = 0
    image_start: ImageStart = "clamp"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("image_start", self.image_start, get_args(ImageStart))
        if not 0 <= self.first_chunk <= self.chunk_frames:
            raise InvalidRequest(
                f"first_chunk={self.first_chunk}: accepted are 0 (as the others) to "
                f"{self.chunk_frames}"
            )
        if self.image_start == "block" and self.first_chunk != 1:
            raise InvalidRequest("image_start='block' needs first_chunk=1: a picture is one latent")

    def chunk_at(self, latent: int) -> int:
        """Latent frames of the chunk that begins at a latent frame."""
        return self.first_chunk if self.first_chunk and latent == 0 else self.chunk_frames

    @property
    def block_start(self) -> int:
        """A latent frame at which a chunk of full length begins; others follow from it."""
        return self.first_chunk


def one_of(name: str, value: Any, accepted: Sequence[Any]) -> None:
    """Raise InvalidRequest if `value` is none of the accepted ones."""
    if value not in accepted:
        raise InvalidRequest(f"{name} {value!r}: accepted are {', '.join(map(repr, accepted))}")


class Steps(Protocol):
    """What the engine asks of a session."""

    def step(self) -> FrameChunk:
        """Make the next chunk."""
        ...


class Engine:
    """Weights and pools of one model; see the module's text.

    Args:
        dit: the transformer.
        text: its prompt encoder.
        codec: pixels in and out.
        config: the world or the kind of video.
        max_sessions: sessions that the pool has room for.
        history_frames: latent frames of past, of all sessions, that the pool has room for besides.
        kv: how the pool stores committed frames: "raw", "fp8" (short for "fp8_e4m3"), "fp8_e5m2",
            "int8" or "nvfp4" (`streamgen.cache.codec`).
        device: where the transformer computes; None = where its weights are (they may be
            streamed there from another place).

    Raises:
        InvalidRequest: another `kv`, or one that can't take the transformer's heads.
    """

    def __init__(
        self,
        dit: WanModel,
        text: TextEncoder,
        codec: VideoCodec,
        config: StreamConfig,
        max_sessions: int = 4,
        history_frames: int = 0,
        kv: str = "raw",
        device: torch.device | None = None,
    ) -> None:
        self.dit, self.text, self.codec, self.config = dit, text, codec, config
        self.grid = dit.config.grid(config.latent_hw)
        self.max_sessions = max_sessions
        self.device = device or dit.patch_embedding.weight.device
        spec = KVSpec(
            num_layers=dit.config.num_layers,
            kv_heads=dit.config.kv_heads,
            head_dim=dit.config.head_dim,
            block_tokens=self.grid[0] * self.grid[1],
            dtype=dit.dtype,
            codec=codec_name(kv),
        )
        session_frames = config.window + config.sink
        self.pool = BlockPool(spec, max_sessions * session_frames + history_frames, self.device)
        self.lock = threading.RLock()
        self.codec_device = next(iter(codec.state_dict().values())).device
        cuda = self.codec_device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self.codec_device) if cuda else None
        self._prompts: OrderedDict[str, CachedPrompt] = OrderedDict()
        self._prompts_lock = threading.Lock()  # of its own: asking must not wait for a chunk

    def table(self) -> BlockTable:
        """A fresh K/V table for one session."""
        return BlockTable(self.pool, self.config.policy)

    @torch.inference_mode()
    def prompt(self, text: str) -> CachedPrompt:
        """The text's cross-attention keys and values, keyed by the text and shared by sessions.

        Raises:
            InvalidRequest: a text over the limit.
            WeightsError: the text encoder can't be read, or is another model's.
        """
        with self._prompts_lock:
            found = self._prompts.get(text)
            if found is None:
                rows = self.text([text]).to(self.device)
                found = CachedPrompt(self.dit.encode_prompt(rows))
                self._prompts[text] = found
            self._prompts.move_to_end(text)
            while len(self._prompts) > PROMPTS_KEPT:
                self._prompts.popitem(last=False)
            return found

    def pixel_frames(self, latent: int, count: int) -> int:
        """Pixel frames of `count` latent frames from `latent` on; the very first one gives one."""
        each = self.codec.temporal
        return each * count - (each - 1 if latent == 0 else 0)

    def history(self, chunk: Chunk, causal: bool = False) -> CachedHistory:
        """What the transformer's self-attention sees for a pending chunk.

        Args:
            chunk: from the session's table.
            causal: what is pending is several chunks of the model's, and none sees a later one.
        """
        config = self.config
        window = config.window if config.positions == "sliding_sink" else None
        blocks = (config.block_start, config.chunk_frames) if causal else None
        return CachedHistory(chunk, self.grid, window, blocks)

    @torch.inference_mode()
    def denoise(
        self,
        history: History,
        prompt: Prompt,
        actions_FA: Tensor,
        draw: Callable[[tuple[int, ...]], Tensor],
        schedule: FewStep,
        first_CYX: Tensor | None = None,
    ) -> Tensor:
        """Make one chunk's clean latents `[F, C, Y, X]` from noise.

        Args:
            history: of the pending chunk.
            prompt: the text in force.
            actions_FA: action of each frame.
            draw: Gaussian noise of a given shape, from the session's generator.
            schedule: the timesteps.
            first_CYX: what the first frame is known to be: it stands there, clean and at
                timestep 0, in every step (LongLive 2's image to video).
        """
        config = self.dit.config
        shape = (1, len(actions_FA), config.in_channels, *self.config.latent_hw)

        def clamp(x_FCYX: Tensor) -> Tensor:
            return x_FCYX if first_CYX is None else torch.cat([first_CYX[None], x_FCYX[1:]])

        def predict(x_BFCYX: Tensor, t: float) -> Tensor:
            x_FCYX, t_BF = clamp(x_BFCYX[0]), self._times(len(actions_FA), t)
            if first_CYX is not None:
                t_BF[:, 0] = 0.0
            out = self._forward(x_FCYX, t_BF, history, prompt, actions_FA, store_only=False)
            return out.float()[None]

        noise = draw(shape)
        made = few_step(predict, noise, schedule, lambda x: draw(x.shape), config.prediction)
        return clamp(made[0])

    @torch.inference_mode()
    def store(
        self, latents_FCYX: Tensor, history: History, prompt: Prompt, actions_FA: Tensor
    ) -> None:
        """The clean pass: write the keys and values of finished latents."""
        t_BF = self._times(len(latents_FCYX), self.config.context_noise)
        self._forward(latents_FCYX, t_BF, history, prompt, actions_FA, store_only=True)

    def _times(self, frames: int, t: float) -> Tensor:
        """One timestep for every frame `[1, F]`, made where it is used: no copy to wait for."""
        return torch.full((1, frames), t, device=self.device)

    def _forward(
        self,
        x_FCYX: Tensor,
        t_BF: Tensor,
        history: History,
        prompt: Prompt,
        actions_FA: Tensor,
        store_only: bool,
    ) -> Tensor:
        actions = actions_FA[None].to(self.device) if self.dit.config.action_dim else None
        x_BCFYX = x_FCYX.transpose(0, 1)[None]
        out = self.dit(x_BCFYX, t_BF, history, prompt, actions, store_only)
        return out[0].transpose(0, 1)

    # Pixels

    def encode(self, pixels_FHW3: Tensor) -> Tensor:
        """Normalised latents `[F', C, Y, X]` of a video's uint8 pixels."""
        return self.codec.encode(pixels_FHW3.to(self.codec_device)).to(self.device)

    def decode(self, latents_FCYX: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Pixels uint8 `[F', H, W, 3]` of the next latents, and the decoder's state after them."""
        return self.codec.decode(latents_FCYX.to(self.codec_device), state)

    def beside(self, work: Callable[[], Done]) -> Callable[[], Done]:
        """`work` for another thread to call: on CUDA it runs in a stream of its own, behind what
        this thread has asked for so far and beside what comes after."""
        stream = self._side_stream
        if stream is None:
            return work
        asked = torch.cuda.current_stream(self.device).record_event()

        def run() -> Done:
            with torch.cuda.stream(stream):
                stream.wait_event(asked)
                done = work()
                stream.synchronize()
                return done

        return run

    def step(self, sessions: Sequence[Steps]) -> list[FrameChunk]:
        """One chunk of each session, one after the other."""
        return [session.step() for session in sessions]


class Stopwatch:
    """Milliseconds by stage: `with watch("dit"): ...`."""

    def __init__(self, device: torch.device) -> None:
        self.ms: dict[str, float] = {}
        self._cuda = device.type == "cuda"
        self._name, self._start = "", 0.0

    def __call__(self, name: str) -> Stopwatch:
        self._name = name
        return self

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.current_stream().synchronize()  # not what runs beside
        return 1000 * perf_counter()

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *error: object) -> None:
        self.ms[self._name] = self.ms.get(self._name, 0.0) + self._now() - self._start
