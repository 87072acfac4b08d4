"""VAR's published sampling on small random weights, reproduced from the files alone.

`STREAMGEN_GOLDEN` names the folder (default `../shared/parity`); every file with VAR tensors in it
must pass. Its metadata key `meta` has the values of sampling, sizes are read off the tensors.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from streamgen.cache import BlockPool, KVSpec, NextScale
from streamgen.cache.scales import block_tokens
from streamgen.models.var import CachedScales, VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.pipelines.next_scale import ImageConfig, NextScalePipeline
from streamgen.sampling.tokens import Sampling, draw, guide, keep_likely, mix, ramp
from streamgen.weights import var as files
from streamgen.weights.load import load_into

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)


def is_var(path: Path) -> bool:
    with safe_open(path, "pt") as file:
        return {"io.raw_logits.0", "io.indices.0", "io.labels", "io.image"} <= set(file.keys())


FILES = [p for p in sorted(FOLDER.glob("*.safetensors")) if is_var(p)] if FOLDER.is_dir() else []
PARAMS = [pytest.param(path, id=path.stem) for path in FILES] or [
    pytest.param(None, marks=pytest.mark.skip(reason=f"no VAR tensors in {FOLDER.name}"))
]


@dataclass
class Golden:
    """One file: its tensors, its values, and the two models they describe."""

    path: Path

    def __post_init__(self) -> None:
        with safe_open(self.path, "pt") as file:
            self.meta: dict[str, Any] = json.loads((file.metadata() or {})["meta"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        var, vae = self.part("var."), self.part("vae.")
        files.check_pair(var, vae)
        self.config = VARConfig.from_tensors(var, self.meta.get("patch_nums"))
        self.var = self.filled(VARModel(self.config), var)
        self.vae = self.filled(VQVAE(VQConfig.from_tensors(vae)), vae)
        self.sampling = Sampling(
            self.meta["cfg"],
            self.meta["top_k"],
            self.meta["top_p"],
            self.meta.get("more_smooth", False),
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"io.{name}"]

    def part(self, prefix: str) -> dict[str, Tensor]:
        found = {k: v for k, v in self.tensors.items() if k.startswith(prefix)}
        return {k.removeprefix(prefix): v for k, v in found.items()}

    @staticmethod
    def filled(module: Any, tensors: dict[str, Tensor]) -> Any:
        assert isinstance(module, nn.Module)
        load_into(module, files.weights_only(tensors))
        return module.eval().requires_grad_(False)

    def cache(self, rows: int) -> NextScale:
        config, sides = self.config, self.config.patch_nums
        tokens = block_tokens(sides, store_last=False)
        pool = BlockPool(KVSpec(config.depth, config.heads, config.head_dim, tokens), rows)
        return NextScale(pool, rows, sides, store_last=False)


@pytest.mark.parametrize("path", PARAMS)
def test_sampling(path: Path) -> None:
    """Raw logits of every scale, sampled indices, and the image, with one generator a batch."""
    golden = Golden(path)
    config, quantize = golden.config, golden.vae.quantize
    sides, labels, sampling = config.patch_nums, golden["labels"], golden.sampling
    generator = torch.Generator().manual_seed(golden.meta["seed"])
    condition = golden.var.condition(torch.cat([labels, torch.full_like(labels, config.no_class)]))
    x = golden.var.start(condition)
    f_hat = torch.zeros(len(labels), config.latent_channels, sides[-1], sides[-1])
    with golden.cache(2 * len(labels)) as cache:
        for scale, side in enumerate(sides):
            way = ramp(scale, len(sides))
            cache.begin(scale)
            raw = golden.var.predict(x, condition, CachedScales(cache))
            cache.commit()
            want = golden[f"raw_logits.{scale}"]
            assert raw.shape == want.shape
            worst = ((raw - want).abs().max() / want.abs().max()).item()
            assert worst <= 2e-4, f"raw logits of scale {scale}: {worst:.2e} relative"
            logits = guide(raw, sampling.cfg * way)
            logits = keep_likely(logits, sampling.top_k, sampling.top_p)
            indices = draw(logits, generator)
            assert torch.equal(indices, golden[f"indices.{scale}"].view_as(indices)), scale
            h = quantize.lookup(indices, side)
            if sampling.more_smooth:
                h = mix(logits, way, generator) @ quantize.embedding.weight
                h = h.transpose(1, 2).unflatten(2, (side, side))
            f_hat, seen = quantize.add(f_hat, h, scale, sides)
            if seen is not None:
                x = golden.var.embed(seen.flatten(2).transpose(1, 2), scale + 1).repeat(2, 1, 1)
    image = golden.vae.decode(f_hat).clamp(-1, 1) * 0.5 + 0.5
    worst = (image - golden["image"]).abs().max().item()
    assert worst <= 1e-4, f"image: {worst:.2e}"


@pytest.mark.parametrize("path", PARAMS)
def test_pipeline(path: Path) -> None:
    """The pipeline draws the same image where one generator a batch is one an image."""
    golden = Golden(path)
    pipe = NextScalePipeline(golden.var, golden.vae, ImageConfig(sampling=golden.sampling))
    labels = golden["labels"].tolist()
    images = pipe(labels, seeds=[golden.meta["seed"]] * len(labels))
    assert [image.label for image in images] == labels
    # The first image's tokens of the first scale are drawn first from one generator, too.
    assert torch.equal(images[0].tokens[0], golden["indices.0"].view(len(labels), -1)[0])
    if len(labels) > 1:
        return
    for scale, tokens in enumerate(images[0].tokens):
        assert torch.equal(tokens, golden[f"indices.{scale}"].flatten())
    want = (golden["image"][0] * 255).permute(1, 2, 0).numpy()
    assert np.abs(images[0].pixels - want).max() <= 0.5 + 1e-4 * 255
