"""Memory over a long video: that of frame 10,000 is that of frame 100, in every mode.

A model of random weights, as small as there can be, makes videos by real sessions; what is watched
does not depend on the model's size:

    blocks    of the KV pool that are in use
    tensors   bytes of all tensors made since the beginning that live, whoever holds them
    resident  memory of the process, as the system counts it

The first two must be equal at both frames, and any byte more is a leak. The third holds Python's
own objects and the allocator's habits too, so it may grow by a little.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor, nn

from streamgen.apps.bench.steps import resident_bytes
from streamgen.engine import Engine, Recache, VideoConfig
from streamgen.models.text import WordEncoder
from streamgen.models.wan import WanConfig, WanModel
from streamgen.models.wan_vae import WanCodec
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session

WORDS = ("snow", "night")
EVERY = 10  # chunks from one change of the text to the next, where a mode has them


@dataclass(frozen=True)
class Mode:
    """A way to make a video.

    Attributes:
        config: what differs from chunks of 5, a sink of 1 in a window of 11, absolute positions.
        kv: how the pool stores frames.
        recache: if the text changes every now and then, what that recomputes.
        overlap: decode each chunk beside the next one.
        wan: Wan's autoencoder, whose decoder remembers, instead of one that codes frame by frame.
        history: chunks that the session can go back.
    """

    config: dict[str, Any] = field(default_factory=dict)
    kv: str = "raw"
    recache: Recache | None = None
    overlap: bool = False
    wan: bool = False
    history: int = 0


MODES = {
    "chunk by chunk, no sink": Mode({"sink": 0, "window": 10}),
    "frame by frame": Mode({"chunk_frames": 1}),
    "sink and window, absolute": Mode(),
    "sliding sink": Mode({"positions": "sliding_sink"}),
    "recache: last chunk": Mode(recache="last_chunk"),
    "recache: window, causal": Mode(recache="window_causal"),
    "recache: window, bidirectional": Mode(recache="window_bidirectional"),
    "recache under a sliding sink": Mode({"positions": "sliding_sink"}, recache="window_causal"),
    "K/V in fp8": Mode(kv="fp8"),
    "K/V in int8": Mode(kv="int8"),
    "K/V in nvfp4": Mode(kv="nvfp4"),
    "decoded beside the next chunk": Mode(overlap=True),
    "with a past to go back to": Mode(history=4),
    "Wan's autoencoder": Mode({"chunk_frames": 3, "window": 7}, wan=True),
}
"""Every mode by its name in the report."""


def make(mode: Mode) -> CausalVideoPipeline:
    """A model of random weights that makes a few pixels in one step."""
    once = FewStep((1000,))
    values: dict[str, Any] = {
        "height": 16,
        "width": 16,
        "fps": 16,
        "latent_hw": (2, 2) if mode.wan else (16, 16),
        "chunk_frames": 5,
        "sink": 1,
        "window": 11,
        "positions": "absolute",
        "schedule": once,
        "first_schedule": once,
        "vocabulary": WORDS,
        "max_words": 2,
    }
    config = VideoConfig(**{**values, **mode.config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = WanConfig(
            dim=32,
            ffn_dim=32,
            num_heads=1,
            num_layers=1,
            in_channels=4,
            out_channels=4,
            patch_size=(1, 2, 2) if mode.wan else (1, 8, 8),
            text_dim=8,
            text_len=2,
            freq_dim=16,
        )
        dit, text = WanModel(shape), WordEncoder(WORDS, 8, 2)
        codec: Any = _wan_codec() if mode.wan else Plain()
    for part in (dit, text, codec):
        part.eval().requires_grad_(False)
    past = mode.history * config.chunk_frames
    return CausalVideoPipeline(Engine(dit, text, codec, config, 1, past, mode.kv), "tiny")


class Plain(nn.Module):
    """Latents that are pixels (`streamgen.models.vae.VideoCodec`)."""

    temporal = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(1))  # engines ask where its tensors are

    def decode(self, latents_FCYX: Tensor, state: None = None) -> tuple[Tensor, None]:
        """uint8 `[F, H, W, 3]` of the first three channels."""
        pixels = latents_FCYX[:, :3].add(1).mul_(127.5).clamp_(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous(), None


def _wan_codec() -> WanCodec:
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return WanCodec(vae)


def live_tensor_bytes() -> int:
    """Bytes of all tensors that live in this process; storages that several share count once.

    What was there at a `gc.freeze` does not count.
    """
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # by its type: some objects (proxies) answer for another one, which may be gone
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def measure_memory(near: int, far: int, modes: dict[str, Mode] | None = None) -> dict[str, Any]:
    """Blocks, tensors and memory at two frames of one video, for every mode.

    Args:
        near: a frame at which every window is full.
        far: a much later one.
        modes: None = all.
    """
    gc.collect()
    gc.freeze()  # what was there before isn't looked through again and again
    try:
        chosen = MODES if modes is None else modes
        return {name: _measure(mode, near, far) for name, mode in chosen.items()}
    finally:
        gc.unfreeze()


def _measure(mode: Mode, near: int, far: int) -> dict[str, Any]:
    pipe = make(mode)
    each = pipe.chunk_pixels
    seconds = mode.history * each / pipe.config.fps
    report: dict[str, Any] = {"pool_bytes": pipe.engine.pool.stats().bytes}
    with pipe.session(WORDS[0], seed=1, history_seconds=seconds) as session:
        for name, frame in (("near", near), ("far", far)):
            _advance(session, mode, frame)
            report[name] = {
                "frame": session.frame,
                "blocks": pipe.engine.pool.stats().live,
                "tensor_bytes": live_tensor_bytes(),
                "resident_bytes": resident_bytes(),
            }
    first, last = report["near"], report["far"]
    report["flat"] = all(first[key] == last[key] for key in ("blocks", "tensor_bytes"))
    before, after = first["resident_bytes"], last["resident_bytes"]
    report["resident_ratio"] = after / before if before and after else None
    return report


def _advance(session: Session, mode: Mode, frame: int) -> None:
    """Make chunks up to a frame, changing the text now and then if the mode does."""
    while session.frame < frame:
        if mode.recache is not None:
            session.prompt(WORDS[session.text == WORDS[0]], mode.recache)
        for _ in session.stream(EVERY, mode.overlap):
            pass
