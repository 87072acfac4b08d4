"""What all sessions of a world share: weights, the KV pool, and the texts already encoded.

The engine knows no user. Each of its verbs takes the session's state as arguments and holds
`lock` while it computes, so sessions in several threads take turns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.cache.codec import codec_name
from streamgen.errors import InvalidRequest
from streamgen.frames import Chunk as FrameChunk
from streamgen.models.history import CachedHistory, CachedPrompt, Positions
from streamgen.models.text import WordEncoder
from streamgen.models.vae import FrameCodec
from streamgen.models.wan import History, Prompt, WanModel
from streamgen.sampling.denoise import few_step
from streamgen.sampling.schedule import FewStep

PROMPTS_KEPT = 32


@dataclass(frozen=True)
class WorldConfig:
    """What a world is, beyond its weights.

    Attributes:
        height, width: pixels.
        fps: frames a second at which the world is meant to be watched.
        latent_hw: rows and columns of a latent frame.
        chunk_frames: latent frames made together; each is one pixel frame.
        sink, window: latent frames that stay for ever, and all that a chunk can see (`SinkWindow`).
        positions: position policy (`streamgen.models.history`).
        schedule: denoising steps of a chunk.
        first_schedule: denoising steps of the first chunk, which has no past to lean on.
        context_noise: timestep told in the clean pass that commits a chunk.
        keys: names of the keys, in the order of the action vector.
        opposites: pairs of keys that cancel out.
        suggestions: prompts to offer.
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
    keys: tuple[str, ...] = ()
    opposites: tuple[tuple[str, str], ...] = ()
    suggestions: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    max_words: int = 0

    def __post_init__(self) -> None:
        if self.positions not in ("absolute", "sliding_sink"):
            raise InvalidRequest(
                f"positions {self.positions!r}: accepted are 'absolute', 'sliding_sink'"
            )
        self.policy.validate(self.chunk_frames)

    @property
    def policy(self) -> SinkWindow:
        """The cache policy that follows."""
        return SinkWindow(self.sink, self.window, shadow_sink=self.positions == "sliding_sink")

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


class Steps(Protocol):
    """What the engine asks of a session."""

    def step(self) -> FrameChunk:
        """Make the next chunk."""
        ...


class Engine:
    """Weights and pools of one world; see the module's text.

    Args:
        dit: the transformer.
        text: its prompt encoder.
        codec: pixels in and out.
        config: the world.
        max_sessions: sessions that the pool has room for.
        history_frames: frames of past, over all sessions, that the pool has room for besides.
        kv: how the pool stores committed frames: "raw", "fp8" (short for "fp8_e4m3"), "fp8_e5m2",
            "int8" or "nvfp4" (`streamgen.cache.codec`).

    Raises:
        InvalidRequest: another `kv`, or one that can't take the transformer's heads.
    """

    def __init__(
        self,
        dit: WanModel,
        text: WordEncoder,
        codec: FrameCodec,
        config: WorldConfig,
        max_sessions: int = 4,
        history_frames: int = 0,
        kv: str = "raw",
    ) -> None:
        self.dit, self.text, self.codec, self.config = dit, text, codec, config
        self.grid = dit.config.grid(config.latent_hw)
        self.max_sessions = max_sessions
        self.device = dit.patch_embedding.weight.device
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
        """
        with self._prompts_lock:
            found = self._prompts.get(text)
            if found is None:
                found = CachedPrompt(self.dit.encode_prompt(self.text([text])))
                self._prompts[text] = found
            self._prompts.move_to_end(text)
            while len(self._prompts) > PROMPTS_KEPT:
                self._prompts.popitem(last=False)
            return found

    def history(self, chunk: Chunk, causal: int | None = None) -> CachedHistory:
        """What the transformer's self-attention sees for a pending chunk."""
        window = self.config.window if self.config.positions == "sliding_sink" else None
        return CachedHistory(chunk, self.grid, window, causal)

    @torch.inference_mode()
    def denoise(
        self,
        history: History,
        prompt: Prompt,
        actions_FA: Tensor,
        draw: Callable[[tuple[int, ...]], Tensor],
        schedule: FewStep,
    ) -> Tensor:
        """Make one chunk's clean latents `[F, C, Y, X]` from noise.

        Args:
            history: of the pending chunk.
            prompt: the text in force.
            actions_FA: action of each frame.
            draw: Gaussian noise of a given shape, from the session's generator.
            schedule: the timesteps.
        """
        config = self.dit.config
        shape = (1, len(actions_FA), config.in_channels, *self.config.latent_hw)

        def predict(x_BFCYX: Tensor, t: float) -> Tensor:
            out = self._forward(x_BFCYX[0], t, history, prompt, actions_FA, store_only=False)
            return out.float()[None]

        noise = draw(shape)
        return few_step(predict, noise, schedule, lambda x: draw(x.shape), config.prediction)[0]

    @torch.inference_mode()
    def store(
        self, latents_FCYX: Tensor, history: History, prompt: Prompt, actions_FA: Tensor
    ) -> None:
        """The clean pass: write the keys and values of finished latents."""
        t = self.config.context_noise
        self._forward(latents_FCYX, t, history, prompt, actions_FA, store_only=True)

    def _forward(
        self,
        x_FCYX: Tensor,
        t: float,
        history: History,
        prompt: Prompt,
        actions_FA: Tensor,
        store_only: bool,
    ) -> Tensor:
        actions = actions_FA[None].to(self.device) if self.config.keys else None
        t_BF = torch.full((1, len(x_FCYX)), t, device=self.device)
        x_BCFYX = x_FCYX.transpose(0, 1)[None]
        out = self.dit(x_BCFYX, t_BF, history, prompt, actions, store_only)
        return out[0].transpose(0, 1)

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
            torch.cuda.synchronize()
        return 1000 * perf_counter()

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *error: object) -> None:
        self.ms[self._name] = self.ms.get(self._name, 0.0) + self._now() - self._start
