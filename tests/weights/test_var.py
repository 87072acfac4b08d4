"""VAR's files: the published key lists, training checkpoints, and what is said of other files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import SIDES, tiny_var, tiny_vqvae
from torch import Tensor, nn

from streamgen.cache.scales import VAR_256
from streamgen.errors import WeightsError
from streamgen.models.var import VAR_512, VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.weights import var as files
from streamgen.weights.families import recognise
from streamgen.weights.load import load_into

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)
PUBLISHED = [  # name, depth, shared adaptive norm, sides; the rest follows from the depth
    ("var_d16", 16, False, VAR_256),
    ("var_d30", 30, False, VAR_256),
    ("var_d36", 36, True, VAR_512),
]
META = torch.device("meta")


def published(name: str) -> dict[str, Tensor]:
    """Empty tensors with the keys and shapes of a published file."""
    path = FOLDER / "keys" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no key lists in {FOLDER.name}")
    shapes = json.loads(path.read_text())
    return {key: torch.empty(shape, device=META) for key, shape in shapes.items()}


def expected(depth: int, shared_aln: bool, sides: tuple[int, ...]) -> VARConfig:
    return VARConfig(depth, 64 * depth, depth, 1000, 32, 4096, sides, shared_aln=shared_aln)


def as_published(module: VARModel) -> dict[str, Tensor]:
    """Our weights with the constants that VAR's classes keep in their state dict."""
    config, tensors = module.config, module.state_dict()
    level = torch.arange(len(config.patch_nums)).repeat_interleave(torch.tensor(config.lengths))
    constants: dict[str, Tensor] = {
        "lvl_1L": level[None],
        "attn_bias_for_masking": torch.zeros(1, 1, len(level), len(level)),
    }
    for layer in range(config.depth):
        constants[f"blocks.{layer}.attn.zero_k_bias"] = torch.zeros(config.width)
    return {**tensors, **constants}


def vae_as_published(scales: int = len(SIDES), **sizes: Any) -> dict[str, Tensor]:
    tensors = tiny_vqvae(**sizes).state_dict()
    return {**tensors, "quantize.ema_vocab_hit_SV": torch.zeros(scales, 24)}


# Published files


@pytest.mark.parametrize(("name", "depth", "shared_aln", "sides"), PUBLISHED)
def test_published_transformers(
    name: str, depth: int, shared_aln: bool, sides: tuple[int, ...]
) -> None:
    """Sizes are read off the key lists, and every tensor finds its place in our class."""
    tensors = published(name)
    assert recognise(tensors).kind == "var"
    config = VARConfig.from_tensors(tensors)
    assert config == expected(depth, shared_aln, sides)
    with META:
        model = VARModel(config)
    load_into(model, files.weights_only(tensors))
    files.check_pair(tensors, published("vae_ch160v4096z32"))


def test_published_autoencoder() -> None:
    """The same of the autoencoder that all of them share."""
    tensors = published("vae_ch160v4096z32")
    assert recognise(tensors).kind == "vqvae"
    config = VQConfig.from_tensors(tensors)
    assert config == VQConfig()
    with META:
        model = VQVAE(config)
    load_into(model, files.weights_only(tensors))


@pytest.mark.parametrize(("name", "depth", "shared_aln", "sides"), PUBLISHED)
def test_our_names_are_the_published_ones(
    name: str, depth: int, shared_aln: bool, sides: tuple[int, ...]
) -> None:
    """Our names and shapes plus the constants are the key lists, neither more nor less."""
    with META:
        model = VARModel(expected(depth, shared_aln, sides))
    ours = {key: tuple(value.shape) for key, value in as_published(model).items()}
    assert ours == {key: tuple(value.shape) for key, value in published(name).items()}


def test_what_does_not_fit_is_named() -> None:
    """Missing, unexpected and misshapen keys, each with its name."""
    tensors = files.weights_only(as_published(tiny_var()))
    del tensors["blocks.1.ffn.fc2.bias"]
    tensors["blocks.1.ffn.fc3.bias"] = torch.zeros(3)
    tensors["pos_start"] = torch.zeros(1, 2, 32)
    with pytest.raises(WeightsError) as error:
        load_into(tiny_var(), tensors)
    assert str(error.value) == (
        "weights do not fit VARModel: 1 missing: blocks.1.ffn.fc2.bias; "
        "1 unexpected: blocks.1.ffn.fc3.bias; "
        "1 of another shape: pos_start (model [1, 1, 32], file [1, 2, 32])"
    )


# Reading


def test_flat_files(tmp_path: Path) -> None:
    """As published; constants and the statistic of training are left out, wrappers' names too."""
    var, vae = tmp_path / "var_d2.pth", tmp_path / files.VAE_NAME
    torch.save({f"module.{k}": v for k, v in as_published(tiny_var()).items()}, var)
    assert files.find_vqvae(var) is None
    torch.save(vae_as_published(), vae)
    tensors = files.read_var(var)
    assert set(tensors) == {*tiny_var().state_dict(), "lvl_1L"}
    assert VARConfig.from_tensors(tensors) == tiny_var().config
    assert files.find_vqvae(var) == vae
    assert set(files.read_vqvae(vae)) == set(tiny_vqvae().state_dict())


def test_a_checkpoint_of_training(tmp_path: Path) -> None:
    """Holds both models beside the optimiser's state; compiled ones have longer names."""
    path = tmp_path / "ar-ckpt-best.pth"
    inner = {
        "config": {"patch_nums": list(SIDES), "label_smooth": 0.0},
        "var_wo_ddp": {f"_orig_mod.{k}": v for k, v in as_published(tiny_var()).items()},
        "vae_local": vae_as_published(),
        "var_opt": {"state": {0: {"exp_avg": torch.zeros(3)}}},
    }
    torch.save({"epoch": 3, "iter": 0, "trainer": inner, "args": {"depth": 2}}, path)
    for read, whole in ((files.read_var, tiny_var()), (files.read_vqvae, tiny_vqvae())):
        tensors, module = read(path), type(whole)(whole.config)
        load_into(module, files.weights_only(tensors))
        _same(module, whole)
    assert files.find_vqvae(path) == path


def _same(one: nn.Module, other: nn.Module) -> None:
    for key, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[key], value), key


# Files of other models


OTHERS = [
    ("patch_embedding.weight", "a Wan2.1 text-to-video transformer"),
    ("decoder.mid.block_1.norm1.weight", "an image autoencoder"),
    ("decoder.middle.0.residual.0.gamma", "a Wan video autoencoder"),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", "a T5 text encoder"),
    ("anything", r"of no known family \(it holds anything"),
]


@pytest.mark.parametrize(("name", "says"), OTHERS)
def test_other_families_are_named(name: str, says: str, tmp_path: Path) -> None:
    """One line: what the file holds and what is taken."""
    path = tmp_path / "x.pt"
    torch.save({f"model.{name}": torch.zeros(2, 16, 16, 1, 1)}, path)
    with pytest.raises(WeightsError, match=f"x.pt: is {says}.*; var= takes a VAR transf"):
        files.read_var(path)
    with pytest.raises(WeightsError, match=f"is {says}.*; vae= takes VAR's VQ autoencoder"):
        files.read_vqvae(path)


def test_the_two_mixed_up(tmp_path: Path) -> None:
    """A transformer as the autoencoder and the other way round: which argument it belongs to."""
    var, vae = tmp_path / "one.pth", tmp_path / "two.pth"
    torch.save(as_published(tiny_var()), var)
    torch.save(vae_as_published(), vae)
    with pytest.raises(WeightsError, match="is a VQVAE .*give this file as vae="):
        files.read_var(vae)
    with pytest.raises(WeightsError, match="is a VAR transformer.*give this file as var="):
        files.read_vqvae(var)


def test_pairs() -> None:
    """Another codebook is refused; a statistic for another number of scales does not matter."""
    var = as_published(tiny_var())
    files.check_pair(var, vae_as_published(scales=10))
    with pytest.raises(WeightsError, match="has 24 codebook entries of width 4.* takes 24 .*of.*6"):
        files.check_pair(var, vae_as_published(latent_channels=4))
    vae = {**vae_as_published(), "quantize.embedding.weight": torch.zeros(16, 6)}
    with pytest.raises(WeightsError, match="has 16 .*entries of width 6.* takes 24"):
        files.check_pair(var, vae)
    with pytest.raises(WeightsError, match="word_embed.weight is missing"):
        files.check_pair({}, vae)
