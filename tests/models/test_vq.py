"""VAR's autoencoder: official names and sizes, its golden pictures, and the quantiser's algebra."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.models.vq import IGNORED, VQVAE, VQConfig
from streamgen.weights.load import load_into, read_tensors

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)
GOLDEN = sorted(FOLDER.glob("var_*.safetensors"))
SIDES = (1, 2, 3, 5)
TINY = VQConfig(
    vocab=20, latent_channels=6, ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, share_phi=4
)


@pytest.fixture
def vae() -> VQVAE:
    torch.manual_seed(0)
    return VQVAE(TINY).eval().requires_grad_(False)


def random_maps(batch: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(TINY.vocab, (batch, side * side)) for side in SIDES]


# Names and sizes


def test_official_keys() -> None:
    """Every key and shape of the published state dict but its statistic; no weights are made."""
    path = FOLDER / "keys" / "vae_ch160v4096z32.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the folder of golden files")
    official = {k: v for k, v in json.loads(path.read_text()).items() if k not in IGNORED}
    with torch.device("meta"):
        config = VQConfig.from_tensors({k: torch.empty(v) for k, v in official.items()})
        state = VQVAE(config).state_dict()
    assert config == VQConfig()
    assert {key: list(value.shape) for key, value in state.items()} == official


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        VQConfig(8, 4, 64, (1,), 2, using_sa=False, using_mid_sa=True, share_phi=1),
        VQConfig(8, 4, 32, (1, 3), 1, using_sa=True, using_mid_sa=False, share_phi=6),
        VQConfig(8, 4, 32, (1, 1, 2), 3, using_sa=False, using_mid_sa=False, encoder=False),
    ],
)
def test_config_is_read_off_the_tensors(config: VQConfig) -> None:
    with torch.device("meta"):
        assert VQConfig.from_tensors(VQVAE(config).state_dict()) == config


def test_other_weights_are_named(vae: VQVAE) -> None:
    with pytest.raises(WeightsError, match=r"quantize\.embedding\.weight is missing"):
        VQConfig.from_tensors({"blocks.0.ffn.fc1.weight": torch.zeros(2, 2)})
    tensors = vae.state_dict()
    del tensors["quantize.quant_resi.qresi_ls.0.weight"]
    with pytest.raises(WeightsError, match="qresi_ls"):
        VQConfig.from_tensors(tensors)
    with pytest.raises(WeightsError, match="multiples"):
        VQConfig.from_tensors(vae.state_dict() | {"decoder.norm_out.weight": torch.zeros(33)})


def test_decoder_alone_refuses_to_encode(vae: VQVAE) -> None:
    tensors = {k: v for k, v in vae.state_dict().items() if not k.startswith("encoder.")}
    alone = VQVAE(VQConfig.from_tensors(tensors)).eval()
    load_into(alone, tensors)
    f = torch.randn(1, 6, 5, 5)
    assert torch.equal(alone.decode(f), vae.decode(f))
    with pytest.raises(WeightsError, match="only decode"):
        alone.encode(torch.zeros(1, 3, 8, 8))


# The public code's pictures


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_picture(path: Path) -> None:
    """The sampled tokens give the picture that VAR's own code made of them."""
    with safe_open(path, "pt") as file:
        sides = json.loads(file.metadata()["meta"])["patch_nums"]
    tensors = read_tensors(path)
    weights = {k.removeprefix("vae."): v for k, v in tensors.items() if k.startswith("vae.")}
    vae = VQVAE(VQConfig.from_tensors(weights)).eval().requires_grad_(False)
    load_into(vae, weights, ignore=IGNORED)
    size = (tensors["io.labels"].shape[0], vae.config.latent_channels, sides[-1], sides[-1])
    f_hat = torch.zeros(size)
    for scale, side in enumerate(sides):
        h = vae.quantize.lookup(tensors[f"io.indices.{scale}"].flatten(1), side)
        f_hat, shown = vae.quantize.add(f_hat, h, scale, sides)
        assert shown is None or shown.shape[-1] == sides[scale + 1]
    picture = vae.decode(f_hat).clamp(-1, 1).mul(0.5).add(0.5)
    assert (picture - tensors["io.image"]).abs().max() < 1e-4


# The network


def test_sizes_and_gradients(vae: VQVAE) -> None:
    x = torch.randn(2, 3, 20, 20)
    f = vae.encode(x)
    assert f.shape == (2, 6, 5, 5) and vae.config.factor == 4
    assert vae.decode(f).shape == x.shape


def test_attention_is_one_head_over_all_positions(vae: VQVAE) -> None:
    """Against the formula written out: softmax(q k / sqrt(width)) v, added to the input."""
    block = vae.decoder.mid.attn_1
    x = torch.randn(2, 64, 3, 4)
    q, k, v = block.qkv(block.norm(x)).flatten(2).chunk(3, dim=1)  # [B, width, positions]
    weights = torch.einsum("bci,bcj->bij", q, k).div(64**0.5).softmax(2)
    y = torch.einsum("bij,bcj->bci", weights, v).view_as(x)
    assert torch.allclose(block(x), x + block.proj_out(y), atol=1e-5)


def test_each_picture_is_coded_by_itself(vae: VQVAE) -> None:
    x = torch.randn(3, 3, 12, 12)
    assert torch.allclose(vae.encode(x)[1:2], vae.encode(x[1:2]), atol=1e-5)


# The quantiser


@pytest.mark.parametrize(
    ("count", "scales", "picked"),
    [
        # Ticks at 1/12, 13/36, 23/36, 11/12. Scales 2 and 7 of 10 are ties in exact arithmetic;
        # the public code's NumPy rounds both up.
        (4, 10, [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]),
        (4, 7, [0, 0, 1, 2, 2, 3, 3]),
        (4, 1, [0]),
        (2, 5, [0, 0, 0, 1, 1]),  # ticks at 1/4 and 3/4; the tie in the middle goes to the first
        (1, 3, [0, 0, 0]),
    ],
)
def test_which_phi(count: int, scales: int, picked: list[int]) -> None:
    phis = VQVAE(VQConfig(4, 4, 32, (1,), 1, share_phi=count)).quantize.quant_resi
    found = [list(phis.qresi_ls).index(phis.pick(scale, scales)) for scale in range(scales)]
    assert found == picked


def test_phi_is_half_itself(vae: VQVAE) -> None:
    phi, x = vae.quantize.quant_resi.qresi_ls[0], torch.randn(1, 6, 4, 4)
    wanted = 0.5 * x + 0.5 * F.conv2d(x, phi.weight, phi.bias, padding=1)
    assert torch.allclose(phi(x), wanted, atol=1e-6)


def test_lookup_is_in_row_order(vae: VQVAE) -> None:
    indices = torch.arange(6).view(1, 6).repeat(2, 1)[:, [3, 1, 4, 5]]
    h = vae.quantize.lookup(indices, 2)
    assert torch.equal(h[1, :, 0, 1], vae.quantize.embedding.weight[1])
    assert torch.equal(h[0, :, 1, 0], vae.quantize.embedding.weight[4])


def test_nearest_is_the_smallest_distance(vae: VQVAE) -> None:
    z = torch.randn(2, 6, 3, 3)
    table = vae.quantize.embedding.weight
    slow = [
        [min(range(len(table)), key=lambda i: float((table[i] - v).square().sum())) for v in row]
        for row in z.flatten(2).transpose(1, 2)
    ]
    assert vae.quantize.nearest(z).tolist() == slow


def test_tokens_are_residual(vae: VQVAE) -> None:
    """Each map codes what all earlier ones, added up, left; written out scale by scale."""
    f = torch.randn(2, 6, 5, 5)
    maps = vae.quantize.tokens(f, SIDES)
    f_hat = torch.zeros_like(f)
    for scale, side in enumerate(SIDES):
        rest = F.interpolate(f - f_hat, size=(side, side), mode="area")
        distance = (rest.flatten(2)[:, :, :, None] - vae.quantize.embedding.weight.T[:, None]).norm(
            dim=1
        )
        assert torch.equal(maps[scale], distance.argmin(2))
        f_hat = vae.quantize.latents(maps[: scale + 1], SIDES)


def test_add_up_to_the_latents(vae: VQVAE) -> None:
    """`add` step by step, `latents` at once, and `inputs` for training say the same."""
    maps = random_maps()
    f_hat, shown = torch.zeros(2, 6, 5, 5), []
    for scale, side in enumerate(SIDES):
        before = f_hat.clone()
        h = vae.quantize.lookup(maps[scale], side)
        new, seen = vae.quantize.add(f_hat, h, scale, SIDES)
        assert torch.equal(f_hat, before)  # never changed in place
        f_hat = new
        if seen is not None:
            assert torch.equal(seen, F.adaptive_avg_pool2d(f_hat, SIDES[scale + 1]))
            shown.append(seen.flatten(2).transpose(1, 2))
    assert torch.allclose(vae.quantize.latents(maps, SIDES), f_hat, atol=1e-6)
    assert torch.allclose(vae.quantize.inputs(maps, SIDES), torch.cat(shown, 1), atol=1e-6)
    assert seen is None
