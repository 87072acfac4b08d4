"""Latents to pixels and back, frame by frame, and folders that are no autoencoder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import nn

from streamgen.errors import WeightsError
from streamgen.models.vae import FrameCodec

MEAN, STD = [0.3, -0.2, 0.0, 1.0], [0.5, 2.0, 1.0, 0.7]


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
    )


def dc() -> nn.Module:
    torch.manual_seed(0)
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    )


@pytest.fixture(params=[tiny, dc], ids=["AutoencoderTiny", "AutoencoderDC"])
def codec(request: pytest.FixtureRequest) -> FrameCodec:
    """Either class, with statistics that are not the identity."""
    return FrameCodec(request.param(), MEAN, STD)


def pixels(frames: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (frames, 16, 24, 3), dtype=torch.uint8, generator=generator)


def test_shapes(codec: FrameCodec) -> None:
    """uint8 `[F, H, W, 3]` to float32 `[F, C, Y, X]` and back; the codec has no state."""
    latents = codec.encode(pixels())
    assert latents.shape == (3, 4, 8, 12) and latents.dtype == torch.float32
    decoded, state = codec.decode(latents)
    assert decoded.shape == (3, 16, 24, 3) and decoded.dtype == torch.uint8 and state is None
    assert decoded.is_contiguous() and decoded.float().std() > 0


def test_frame_by_frame(codec: FrameCodec) -> None:
    """A frame's pixels and latents do not depend on its neighbours."""
    latents = codec.encode(pixels())
    together = codec.decode(latents)[0]
    for frame in range(3):
        part = slice(frame, frame + 1)
        torch.testing.assert_close(
            codec.encode(pixels()[part]), latents[part], atol=1e-5, rtol=1e-5
        )
        alone = codec.decode(latents[part])[0]
        assert (alone.int() - together[part].int()).abs().max() <= 1


def test_statistics(codec: FrameCodec) -> None:
    """A model's latents are the autoencoder's less the mean, over the spread."""
    plain = FrameCodec(codec.vae, [0.0] * 4, [1.0] * 4)
    mean, std = (torch.tensor(x).view(1, 4, 1, 1) for x in (MEAN, STD))
    raw = plain.encode(pixels())
    torch.testing.assert_close(codec.encode(pixels()), (raw - mean) / std)
    assert (
        torch.equal(codec.decode((raw - mean) / std)[0], plain.decode(raw)[0])
        or (codec.decode((raw - mean) / std)[0].int() - plain.decode(raw)[0].int()).abs().max() <= 1
    )


class Passes(nn.Module):
    """An autoencoder whose pixels are its latents."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def decode(self, latents: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=latents)


@pytest.mark.parametrize(
    ("value", "pixel"), [(-1, 0), (0, 128), (1, 255), (-9, 0), (9, 255), (-0.5, 64)]
)
def test_range(value: float, pixel: int) -> None:
    """[-1, 1] becomes 0..255, rounded; what lies outside is clamped and does not wrap."""
    latents = torch.full((1, 3, 2, 2), float(value))
    decoded = FrameCodec(Passes(), [0.0] * 3, [1.0] * 3).decode(latents)[0]
    assert decoded.unique().tolist() == [pixel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folder_round_trip(codec: FrameCodec, dtype: torch.dtype, tmp_path: Path) -> None:
    """Saved as diffusers saves it and loaded again: the same pixels, in float32."""
    codec.vae.to(dtype).save_pretrained(tmp_path)
    stats = {"mean": MEAN, "std": STD}
    (tmp_path / "latent_stats.json").write_text(json.dumps(stats))
    loaded = FrameCodec.from_folder(tmp_path)
    assert loaded.dtype == torch.float32
    expected = FrameCodec(codec.vae.float(), MEAN, STD).decode(torch.ones(1, 4, 8, 12))[0]
    assert torch.equal(loaded.decode(torch.ones(1, 4, 8, 12))[0], expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder, to be damaged."""
    tiny().save_pretrained(tmp_path)
    (tmp_path / "latent_stats.json").write_text(json.dumps({"mean": MEAN, "std": STD}))
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "latent_stats.json"])
@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"], ids=repr)
def test_damaged_json(folder: Path, name: str, text: str | None) -> None:
    """Missing, truncated or of another form: one line that names the folder."""
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(WeightsError) as caught:
        FrameCodec.from_folder(folder)
    assert folder.name in str(caught.value) and "\n" not in str(caught.value)


def test_other_class(folder: Path) -> None:
    """An autoencoder of another class is named, and so are the two that are known."""
    config = json.loads((folder / "config.json").read_text())
    config["_class_name"] = "AutoencoderKL"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="'AutoencoderKL': known are AutoencoderDC and"):
        FrameCodec.from_folder(folder)


def test_truncated_weights(folder: Path) -> None:
    """Half a file is no file."""
    path = folder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(WeightsError, match="truncated"):
        FrameCodec.from_folder(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    """A config that does not fit its weights."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "latent_channels": 8}))
    stats = {"mean": [0.0] * 8, "std": [1.0] * 8}
    (folder / "latent_stats.json").write_text(json.dumps(stats))
    with pytest.raises(WeightsError, match="of another shape"):
        FrameCodec.from_folder(folder)


@pytest.mark.parametrize("stats", [{"mean": [0.0], "std": [1.0]}, {"mean": "x", "std": [1.0] * 4}])
def test_statistics_must_fit(folder: Path, stats: dict[str, object]) -> None:
    """One number for each latent channel."""
    (folder / "latent_stats.json").write_text(json.dumps(stats))
    with pytest.raises(WeightsError):
        FrameCodec.from_folder(folder)
