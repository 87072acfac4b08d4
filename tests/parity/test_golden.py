"""The public reference codes' results on small random weights, reproduced from the files alone.

`STREAMGEN_GOLDEN` names the folder (default `../shared/parity`). Each file carries its
configuration in the metadata key `meta`; files of forms that no test here knows are left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from streamgen.cache import Append, BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.wan import WanConfig, WanModel
from streamgen.sampling.denoise import few_step
from streamgen.sampling.schedule import FewStep
from streamgen.weights.keymaps import strip_prefixes
from streamgen.weights.load import load_into

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)
FULL_FRAMES = 21  # what `local_attn_size` -1 holds
TOLERANCE = 5e-5


def meta_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads((file.metadata() or {}).get("meta", "{}"))


def form_of(path: Path) -> str:
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    if "io.latents" in names and "io.noise" in names:
        return "causal"
    return meta_of(path).get("kind", "other")


FILES = sorted(FOLDER.glob("*.safetensors")) if FOLDER.is_dir() else []
FORMS = {path: form_of(path) for path in FILES}


def files(form: str) -> list[Any]:
    found = [pytest.param(path, id=path.stem) for path in FILES if FORMS[path] == form]
    reason = f"no golden tensors of this form in {FOLDER.name}"
    return found or [pytest.param(None, marks=pytest.mark.skip(reason=reason))]


@dataclass
class Golden:
    """One file: its tensors, its configuration, and the model and cache they describe."""

    path: Path
    positions: str = "absolute"

    def __post_init__(self) -> None:
        self.meta = meta_of(self.path)
        with safe_open(self.path, "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        weights = {k: v for k, v in self.tensors.items() if k.startswith("model.")}
        weights = strip_prefixes(weights)
        self.config = WanConfig.from_tensors(weights, self.meta["heads"])
        self.model = WanModel(self.config).eval().requires_grad_(False)
        load_into(self.model, weights)
        self.grid = self.config.grid((self.meta["latent_hw"],) * 2)
        self.chunk = self.meta["frames_per_chunk"]
        window, sink = self.meta["local_attn_size"], self.meta["sink_size"]
        self.sink, self.window = sink, None if window == -1 else window
        frames = FULL_FRAMES if window == -1 else window
        self.policy = (
            Append(frames)
            if window == -1
            else SinkWindow(sink, window, shadow_sink=self.positions == "sliding_sink")
        )
        spec = KVSpec(
            self.config.num_layers,
            self.config.num_heads,
            self.config.head_dim,
            self.grid[0] * self.grid[1],
        )
        self.pool = BlockPool(spec, frames + sink + self.chunk)
        self.table = BlockTable(self.pool, self.policy)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"io.{name}"]

    def prompt(self, name: str = "prompt_embeds") -> CachedPrompt:
        return CachedPrompt(self.model.encode_prompt(self[name]))

    def history(self, chunk: Chunk) -> CachedHistory:
        sliding = self.positions == "sliding_sink"
        return CachedHistory(chunk, self.grid, self.window if sliding else None)

    def run(
        self, x_BCFYX: Tensor, t: float, history: CachedHistory, prompt: CachedPrompt
    ) -> Tensor:
        return self.model(
            x_BCFYX, torch.full(x_BCFYX.shape[:1] + x_BCFYX.shape[2:3], t), history, prompt
        )

    def commit(self, x_BCFYX: Tensor, prompt: CachedPrompt) -> None:
        with self.table.chunk(x_BCFYX.shape[2]) as chunk:
            self.run(x_BCFYX, 0.0, self.history(chunk), prompt)
            chunk.commit()

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in logical order, `[1, tokens, heads, head_dim]`."""
        slots = [block.slot for _, block in self.table.entries]
        k, v = self.pool.k[layer][slots], self.pool.v[layer][slots]
        return k.flatten(0, 1)[None], v.flatten(0, 1)[None]

    def check_cache(self, suffix: str = "") -> None:
        for layer in range(self.config.num_layers):
            for kind, ours in zip("kv", self.stored(layer), strict=True):
                theirs = self[f"cache_{kind}{suffix}.{layer}"][:, : ours.shape[1]]
                assert_close(ours, theirs, f"cache_{kind}{suffix} of layer {layer}")


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert ours.shape == theirs.shape, what
    worst = (ours - theirs).abs().max().item()
    assert worst <= TOLERANCE, f"{what}: largest difference {worst:.2e}"


def in_chunks(x_BCFYX: Tensor, size: int) -> Iterator[Tensor]:
    return iter(x_BCFYX.split(size, dim=2))


@pytest.mark.parametrize("path", files("causal"))
def test_causal_pipeline(path: Path) -> None:
    """Self-Forcing's pipeline: latents and the final cache, from noise and every re-noise draw."""
    golden = Golden(path)
    meta, prompt = golden.meta, golden.prompt()
    schedule = FewStep(tuple(meta["denoising_steps"]), meta["shift"], meta["warp"])
    assert schedule.timesteps == pytest.approx(meta["warped"], rel=1e-6)
    draws = iter(golden["renoise"])
    latents = []
    for noise in golden["noise"].split(golden.chunk, dim=1):
        with golden.table.chunk(noise.shape[1]) as chunk:
            history = golden.history(chunk)

            def predict(x: Tensor, t: float, history: CachedHistory = history) -> Tensor:
                return golden.run(x.transpose(1, 2), t, history, prompt).transpose(1, 2)

            x0 = few_step(predict, noise, schedule, lambda x: next(draws).view_as(x))
            predict(x0, float(meta["context_noise"]))
            chunk.commit()
        latents.append(x0)
    assert_close(torch.cat(latents, dim=1), golden["latents"], "latents")
    golden.check_cache()


@pytest.mark.parametrize("path", files("relative_window"))
def test_sliding_sink_equals_the_window_relative_model(path: Path) -> None:
    """LongLive's window-relative positions equal a sink that is re-rotated once per chunk."""
    golden = Golden(path, positions="sliding_sink")
    prompt = golden.prompt()
    clean, noisy = (in_chunks(golden[name], golden.chunk) for name in ("clean", "noisy"))
    for index, (x0, x) in enumerate(zip(clean, noisy, strict=True)):
        with golden.table.chunk(x.shape[2]) as chunk:
            history = golden.history(chunk)
            velocity = golden.run(x, 700.0, history, prompt)
            assert_close(velocity, golden[f"velocity.{index}"], f"velocity of chunk {index}")
            golden.model(x0, torch.zeros(1, x0.shape[2]), history, prompt, store_only=True)
            chunk.commit()


@pytest.mark.parametrize("path", files("recache"))
def test_recache(path: Path) -> None:
    """ReCache: what is in the cache before and after, and what the next chunk makes of it."""
    golden = Golden(path)
    before, after = golden.prompt("prompt_before"), golden.prompt("prompt_after")
    clean = golden["clean"][:, :, : golden.meta["chunks"] * golden.chunk]
    for x0 in in_chunks(clean, golden.chunk):
        golden.commit(x0, before)
    for layer in range(golden.config.num_layers):
        k = golden.stored(layer)[0]
        assert_close(k, golden[f"cache_k_before.{layer}"][:, : k.shape[1]], "keys before")
    total = clean.shape[2]
    first = total - golden.chunk
    if golden.meta["mode"] == "window_bidirectional":
        first = max(0, total - (golden.window or total))  # the sink included
    with golden.table.reopen(total - first) as chunk:
        golden.run(clean[:, :, first:], 0.0, golden.history(chunk), after)
        chunk.commit()
    golden.check_cache("_after")
    with golden.table.chunk(golden.chunk) as chunk:
        velocity = golden.run(golden["noisy"], 700.0, golden.history(chunk), after)
    assert_close(velocity, golden["next_velocity"], "velocity of the next chunk")
