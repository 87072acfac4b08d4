"""Wan's autoencoder in pieces: the whole video's bits, and a past that only the caller holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from original_wan_vae import random_tensors, shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamgen.errors import InvalidRequest, SessionFileError, WeightsError
from streamgen.models.wan_vae import WanCodec, state_nbytes

MEAN, STD = [0.3, -0.2, 0.0, 1.0], [0.5, 2.0, 1.3, 0.7]
SMALL: dict[str, Any] = {"base_dim": 4, "z_dim": 4, "num_res_blocks": 1}
RESIDUAL: dict[str, Any] = {  # Wan2.2's form
    **{"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12},
    **{"decoder_base_dim": 8, "scale_factor_spatial": 16},
}
# One latent frame is a multiple of 16 values in area: below that torch's 1x1 convolution gives a
# frame other last bits alone than among others, in diffusers' own decode as well.
ROWS, COLUMNS = 2, 8


def network(**sizes: Any) -> AutoencoderKLWan:
    """Small and random; what begins as one or zero is moved off it."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**{**SMALL, "latents_mean": MEAN, "latents_std": STD, **sizes})
    for name, value in vae.named_parameters():
        if name.endswith("gamma"):
            value.data += 0.1 * torch.randn_like(value)
        elif name.endswith("bias"):
            value.data = 0.05 * torch.randn_like(value)
    return vae


@pytest.fixture(scope="module", params=[{}, RESIDUAL], ids=["2.1", "2.2"])
def codec(request: pytest.FixtureRequest) -> WanCodec:
    """Either form of the network; no test changes it."""
    return WanCodec(network(**request.param))


@pytest.fixture(scope="module")
def plain() -> WanCodec:
    """Wan2.1's form; no test changes it."""
    return WanCodec(network())


def latents(frames: int = 5, seed: int = 0, channels: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames, channels, ROWS, COLUMNS, generator=generator)


def pixels(codec: WanCodec, frames: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (frames, ROWS * codec.spatial, COLUMNS * codec.spatial, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


@torch.inference_mode()
def official_decode(codec: WanCodec, latents_FCYX: Tensor) -> Tensor:
    """diffusers' decode of the whole video, latents brought back as the original brings them."""
    mean, std = (torch.tensor(x).view(1, 4, 1, 1) for x in (MEAN, STD))
    z = latents_FCYX / (1.0 / std) + mean
    return codec.vae.decode(z.transpose(0, 1)[None]).sample[0]


@torch.inference_mode()
def official_encode(codec: WanCodec, pixels_FHW3: Tensor) -> Tensor:
    mean, std = (torch.tensor(x).view(1, 4, 1, 1) for x in (MEAN, STD))
    x = pixels_FHW3.permute(3, 0, 1, 2)[None].float().div(127.5).sub(1).contiguous()
    mode = codec.vae.encode(x).latent_dist.mode()[0].transpose(0, 1)
    return (mode - mean) * (1.0 / std)


def in_pieces(codec: WanCodec, latents_FCYX: Tensor, split: list[int]) -> tuple[Tensor, Tensor]:
    """Samples and pixels of the latents in pieces of those sizes."""
    state_a = state_b = None
    samples, frames = [], []
    for piece in latents_FCYX.split(split):
        found, state_a = codec.decode_samples(piece, state_a)
        samples.append(found)
        found, state_b = codec.decode(piece, state_b)
        frames.append(found)
    return torch.cat(samples, 1), torch.cat(frames)


# Latents to pixels


@pytest.mark.parametrize("split", [[5], [1, 4], [2, 2, 1], [1] * 5], ids=str)
def test_decode_is_the_whole_videos(codec: WanCodec, split: list[int]) -> None:
    """In any pieces: diffusers' samples of the whole video, bit for bit, and their pixels."""
    samples, frames = in_pieces(codec, latents(), split)
    expected = official_decode(codec, latents())
    assert samples.shape == expected.shape == (3, 17, ROWS * codec.spatial, COLUMNS * codec.spatial)
    assert expected.std() > 0.05
    assert torch.equal(samples, expected)
    assert frames.dtype == torch.uint8 and frames.is_contiguous()
    assert torch.equal(frames.permute(3, 0, 1, 2), ((expected + 1) * 127.5).round().to(torch.uint8))


def test_frame_counts(codec: WanCodec) -> None:
    """The first latent of a video is one frame, every other one four; sizes are the config's."""
    first, state = codec.decode(latents(1))
    later, _ = codec.decode(latents(2), state)
    assert len(first) == 1 and len(later) == 8
    assert codec.temporal == 4 and codec.latent_channels == 4
    assert codec.spatial == codec.vae.spatial_compression_ratio


@pytest.mark.parametrize("frames", [1, 3])
def test_the_past_matters(plain: WanCodec, frames: int) -> None:
    """Going on from a state is not beginning again: the past is really looked at."""
    _, state = plain.decode(latents(frames))
    _, other = plain.decode(latents(frames, seed=1))
    after, elsewhere = (plain.decode(latents(1, seed=2), x)[0] for x in (state, other))
    assert not torch.equal(after, elsewhere)


def test_several_at_once(codec: WanCodec) -> None:
    """`piece` latents after the first go through in one call: the same but for the last bits."""
    several = WanCodec(codec.vae, piece=3)
    calls = []
    hook = codec.vae.decoder.register_forward_pre_hook(lambda _, x: calls.append(x[0].shape[2]))
    try:
        samples, state = several.decode_samples(latents(6))
    finally:
        hook.remove()
    assert calls == [1, 3, 2]
    torch.testing.assert_close(samples, official_decode(codec, latents(6)), atol=2e-5, rtol=0)
    _, expected = codec.decode_samples(latents(6))
    for mine, one in zip(state, expected, strict=True):
        torch.testing.assert_close(mine, one, atol=1e-4, rtol=1e-4)


def snapshot(state: Any) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in state]


def same(state: Any, other: Any) -> bool:
    pairs = zip(state, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_state_stays(codec: WanCodec, frames: int) -> None:
    """A state that was gone on from is as it was: two futures of it are both right."""
    past, futures = latents(frames), [latents(2, seed=1), latents(2, seed=2)]
    _, state = codec.decode(past)
    before = snapshot(state)
    for future in futures:
        found, after = codec.decode_samples(future, state)
        assert same(before, state) and after is not state
        expected = official_decode(codec, torch.cat([past, future]))
        assert torch.equal(found, expected[:, 1 + 4 * (frames - 1) :])


def test_nothing_on_the_module(codec: WanCodec) -> None:
    """The cache that diffusers keeps on the module is neither read nor written."""
    expected = in_pieces(codec, latents(3), [2, 1])[0]
    left = {name: ["another video's"] for name in ("_feat_map", "_enc_feat_map", "_conv_idx")}
    codec.vae.__dict__.update(left)
    attributes = set(codec.vae.__dict__)
    assert torch.equal(in_pieces(codec, latents(3), [2, 1])[0], expected)
    codec.encode(pixels(codec, 5))
    assert set(codec.vae.__dict__) == attributes
    assert all(codec.vae.__dict__[name] == ["another video's"] for name in left)


def test_two_threads(plain: WanCodec) -> None:
    """Two videos decoded at the same time, turn by turn, are each as alone."""
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    turn = Barrier(2)

    def run(seed: int) -> None:
        state = None
        for piece in latents(5, seed).split(1):
            turn.wait(timeout=60)  # both are inside the decoder at once
            frames, state = plain.decode(piece, state)
            found[seed].append(frames)

    threads = [Thread(target=run, args=(seed,)) for seed in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, frames in found.items():
        assert torch.equal(torch.cat(frames), plain.decode(latents(5, seed))[0])


@pytest.mark.parametrize(
    "shape",
    [(1, 5, 2, 4), (1, 4, 2), (0, 4, 2, 4), (1, 1, 4, 2, 4), (1, 4, 0, 4)],
    ids=str,
)
def test_wrong_latents(plain: WanCodec, shape: tuple[int, ...]) -> None:
    """Latents of another form: one line with the shape and the accepted one."""
    with pytest.raises(InvalidRequest) as caught:
        plain.decode(torch.zeros(shape))
    text = str(caught.value)
    assert str(list(shape)) in text and "4 channels" in text and "\n" not in text


def test_wrong_state(plain: WanCodec) -> None:
    """A state of a video of another size, or of something else, is refused."""
    _, state = plain.decode(latents(1))
    with pytest.raises(InvalidRequest, match="latents of 4x4 after a state of 2x8"):
        plain.decode(torch.zeros(1, 4, 4, 4), state)
    with pytest.raises(InvalidRequest, match="not one that this autoencoder's decoder returned"):
        plain.decode(latents(1), state[1:])


def test_piece_is_positive(plain: WanCodec) -> None:
    """No latents at once is no setting."""
    with pytest.raises(InvalidRequest, match="piece is 0"):
        WanCodec(plain.vae, piece=0)


# Pixels to latents


@pytest.mark.parametrize("frames", [1, 5, 9, 13])
def test_encode_is_the_whole_videos(codec: WanCodec, frames: int) -> None:
    """Latents are diffusers' of the whole video, bit for bit, less the mean, over the spread."""
    found = codec.encode(pixels(codec, frames))
    assert found.shape == (1 + (frames - 1) // 4, 4, ROWS, COLUMNS)
    assert found.dtype == torch.float32
    expected = official_encode(codec, pixels(codec, frames))
    assert torch.equal(found, expected) and expected.std() > 0.05


@pytest.mark.parametrize("split", [[1] * 9, [3, 3, 3], [5, 4], [8, 1], [2, 7]], ids=str)
def test_encode_pieces(codec: WanCodec, split: list[int]) -> None:
    """A clip that comes in pieces, groups of four cut or not, gives the same latents."""
    whole = pixels(codec)
    expected = codec.encode(whole)
    assert torch.equal(codec.encode(iter(whole.split(split))), expected)
    arrays = [piece.numpy() for piece in whole.split(split)]
    assert torch.equal(codec.encode(arrays), expected)


def test_encode_pictures(plain: WanCodec) -> None:
    """Single pictures in a row are a clip, and a clip may be a numpy array."""
    whole = pixels(plain, 5)
    assert torch.equal(plain.encode(list(whole)), plain.encode(whole))
    assert torch.equal(plain.encode(whole.numpy()), plain.encode(whole))


def test_encode_holds_little(plain: WanCodec) -> None:
    """Between pieces less than a group waits, and no view of the clip; a state is not changed."""
    whole, state, found = pixels(plain, 11), None, []
    counts = []
    for piece in whole.split([4, 4, 3]):
        before = state and (snapshot(state.features), state.pending_FHW3.clone())
        held, (some, state) = state, plain.encode_next(piece, state)
        if held is not None and before is not None:
            assert same(held.features, before[0]) and torch.equal(held.pending_FHW3, before[1])
        assert state.pending_FHW3.untyped_storage().nbytes() == state.pending_FHW3.nbytes
        counts.append((len(some), len(state.pending_FHW3), state.frames))
        found.append(some)
    assert counts == [(1, 3, 4), (1, 3, 8), (1, 2, 11)]
    assert torch.equal(torch.cat(found), official_encode(plain, whole[:9]))


@pytest.mark.parametrize(
    ("frames", "near"), [(0, "1"), (2, "1 and 5"), (4, "1 and 5"), (10, "9 and 13")]
)
@pytest.mark.parametrize("how", ["whole", "pieces"])
def test_frame_count_of_a_clip(plain: WanCodec, frames: int, near: str, how: str) -> None:
    """Another number than 1 + 4 k is refused with the nearest that are accepted."""
    clip = pixels(plain, frames)
    given = clip if how == "whole" else iter(clip[:, None])
    with pytest.raises(InvalidRequest, match=rf"^{frames} frames; .* 1 \+ 4 k .* {near}$"):
        plain.encode(given)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.zeros(1, 16, 32, 3), "uint8"),
        (np.zeros((1, 16, 32, 3), np.int64), "uint8"),
        (torch.zeros(1, 3, 16, 32, dtype=torch.uint8), "3 colours"),
        (torch.zeros(16, 32, dtype=torch.uint8), "3 colours"),
        (torch.zeros(1, 0, 32, 3, dtype=torch.uint8), "3 colours"),
        (torch.zeros(1, 12, 32, 3, dtype=torch.uint8), "multiples of 8"),
        (torch.zeros(1, 16, 33, 3, dtype=torch.uint8), "multiples of 8"),
    ],
)
def test_wrong_pixels(plain: WanCodec, wrong: Any, text: str) -> None:
    """Pixels of another form: one line with what is accepted."""
    with pytest.raises(InvalidRequest, match=text) as caught:
        plain.encode(wrong)
    assert "\n" not in str(caught.value)


def test_size_changes(plain: WanCodec) -> None:
    """A video keeps its size, also where no frame waits."""
    _, state = plain.encode_next(pixels(plain, 1))
    with pytest.raises(InvalidRequest, match="frames of 24x64 after 16x64"):
        plain.encode_next(torch.zeros(1, 24, 64, 3, dtype=torch.uint8), state)


# The state: its size, and its way through a file


def stages(codec: WanCodec) -> Iterator[Any]:
    """The states after one, two, three latents."""
    state = None
    for piece in latents(3).split(1):
        state = codec.decode(piece, state)[1]
        yield state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes(codec: WanCodec, dtype: torch.dtype) -> None:
    """The formula counts what a state holds from the second latent on, and no view holds more."""
    codec = WanCodec(network(**(RESIDUAL if codec.patch == 2 else {})))
    codec.cast(dtype)
    expected = codec.state_bytes(ROWS * codec.spatial, COLUMNS * codec.spatial)
    sizes = []
    for state in stages(codec):
        held = [x for x in state if isinstance(x, Tensor)]
        assert sum(x.untyped_storage().nbytes() for x in held) == state_nbytes(state)
        assert all(x.dtype == dtype for x in held)
        sizes.append(state_nbytes(state))
    assert sizes[0] < sizes[1] == sizes[2] == expected
    assert state_nbytes(None) == 0


def test_state_bytes_of_the_real_size() -> None:
    """Wan2.1 at 480x832 in half precision: 32 entries of together 1889 MB."""
    with torch.device("meta"):
        vae = AutoencoderKLWan().half()
    codec = WanCodec(vae)
    assert codec.live == 32
    assert round(codec.state_bytes(480, 832) / 1e6) == 1889


def test_state_is_plain(plain: WanCodec) -> None:
    """A tuple of tensors, texts and None, which any session file can hold."""
    kinds = [{type(x) for x in state} for state in stages(plain)]
    assert kinds == [{Tensor, str}, {Tensor}, {Tensor}]
    assert isinstance(next(stages(plain)), tuple)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_through_a_file(codec: WanCodec, stage: int, tmp_path: Path) -> None:
    """Written, read and gone on from: the bits of a video that was never interrupted."""
    state = list(stages(codec))[stage]
    save_file(codec.state_tensors(state), tmp_path / "state.safetensors")
    again = codec.state_from(load_file(tmp_path / "state.safetensors"))
    assert again is not None and same(state, again)
    future = latents(2, seed=3)
    expected = official_decode(codec, torch.cat([latents(3)[: stage + 1], future]))
    assert torch.equal(codec.decode_samples(future, again)[0], expected[:, 1 + 4 * stage :])


def test_no_state_through_a_file(plain: WanCodec) -> None:
    """Before the first latent there is nothing to write."""
    assert plain.state_tensors(None) == {} and plain.state_from({}) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"kinds": None},
        {"entry.3": None},
        {"entry.99": torch.zeros(1)},
        {"kinds": torch.tensor([2, 2], dtype=torch.uint8)},
        {"entry.1": torch.zeros(1, 3, 2, ROWS, COLUMNS)},
        {"entry.0": torch.zeros(1, 4, 2, 3, 3)},
        {"entry.0": torch.zeros(4)},
    ],
    ids=lambda x: str(list(x)[0]),
)
def test_damaged_state(plain: WanCodec, damage: dict[str, Tensor | None]) -> None:
    """What is no state of this autoencoder is refused in one line."""
    tensors = plain.state_tensors(list(stages(plain))[1]) | damage
    kept = {name: x for name, x in tensors.items() if x is not None}
    with pytest.raises(SessionFileError, match="does not fit this autoencoder") as caught:
        plain.state_from(kept)
    assert "\n" not in str(caught.value)


# Precision and placement


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(plain: WanCodec, dtype: torch.dtype) -> None:
    """Half precision: nearly the same pictures; a float32 state may be gone on from."""
    half = WanCodec(network())
    half.cast(dtype)
    assert half.dtype == dtype and half.mean.dtype == half.per_std.dtype == torch.float32
    expected, state = plain.decode(latents(2))
    found, _ = half.decode(latents(2))
    assert (found.int() - expected.int()).float().abs().mean() < 2
    later, after = half.decode(latents(1, seed=1), state)
    assert (later.int() - plain.decode(latents(1, seed=1), state)[0].int()).abs().float().mean() < 2
    assert all(x.dtype == dtype for x in after if isinstance(x, Tensor))
    coded = half.encode(pixels(plain, 5))
    assert coded.dtype == torch.float32
    torch.testing.assert_close(coded, plain.encode(pixels(plain, 5)), atol=0.2, rtol=0.1)


def test_not_exact(plain: WanCodec) -> None:
    """With oneDNN's convolutions everything is the same but for the last bits."""
    fast = WanCodec(network(), exact=False)
    used = [x for x in fast.vae.modules() if "_conv_forward" in x.__dict__]
    assert len(used) == sum(isinstance(x, torch.nn.Conv3d) for x in fast.vae.modules())
    samples, frames = in_pieces(fast, latents(), [2, 3])
    expected, _ = in_pieces(plain, latents(), [2, 3])
    torch.testing.assert_close(samples, expected, atol=2e-5, rtol=0)
    assert frames.is_contiguous()
    clip = pixels(plain, 5)
    torch.testing.assert_close(fast.encode(clip), plain.encode(clip), atol=1e-4, rtol=1e-4)


def test_offloaded_weights(plain: WanCodec) -> None:
    """Weights that an offload hook brings in call by call give the same bits."""
    accelerate = pytest.importorskip("accelerate")
    away = WanCodec(network())
    accelerate.cpu_offload(away.vae, execution_device=torch.device("cpu"))
    assert next(away.vae.decoder.parameters()).is_meta
    found = in_pieces(away, latents(3), [2, 1])[0]
    assert torch.equal(found, in_pieces(plain, latents(3), [2, 1])[0])
    assert torch.equal(away.encode(pixels(plain, 5)), plain.encode(pixels(plain, 5)))


@pytest.mark.gpu
def test_cuda(plain: WanCodec) -> None:
    """On a GPU, with latents, pixels and a state that come from the CPU."""
    there = WanCodec(network()).to("cuda")
    expected, state = plain.decode_samples(latents(3))
    found, _ = there.decode_samples(latents(3))
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, atol=1e-2, rtol=1e-2)
    later = there.decode_samples(latents(2, seed=1), state)[0].cpu()
    expected = plain.decode_samples(latents(2, seed=1), state)[0]
    torch.testing.assert_close(later, expected, atol=1e-2, rtol=1e-2)
    clip = pixels(plain, 5)
    torch.testing.assert_close(there.encode(clip).cpu(), plain.encode(clip), atol=1e-2, rtol=1e-2)


# Folders and files


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folder(codec: WanCodec, shard: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Saved by diffusers in one file or in shards, and loaded: the same pixels, in float32."""
    vae = network(**(RESIDUAL if codec.patch == 2 else {})).to(dtype)
    vae.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    loaded = WanCodec.from_folder(tmp_path, 4)
    assert loaded.dtype == torch.float32
    expected = WanCodec(vae.float()).decode(latents(2))[0]
    assert torch.equal(loaded.decode(latents(2))[0], expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder, to be damaged."""
    network().save_pretrained(tmp_path)
    return tmp_path


def config_of(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"], ids=repr)
def test_damaged_config(folder: Path, text: str | None) -> None:
    """Missing, truncated or of another form: one line that names the folder."""
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match="config.json") as caught:
        WanCodec.from_folder(folder)
    assert folder.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"_class_name": "AutoencoderKL"}, "'AutoencoderKL'; known is AutoencoderKLWan"),
        ({"dim_mult": "large"}, "sizes that make no autoencoder"),
        ({"temperal_downsample": []}, "sizes that make no autoencoder"),
        ({"z_dim": 8}, "4 means and 4 deviations for 8 latent channels"),
        ({"latents_std": [1.0]}, "4 means and 1 deviations for 4 latent channels"),
        ({"latents_mean": ["a"] * 4}, "latents_mean of the autoencoder's config"),
        ({"base_dim": 8}, "of another shape"),
        ({"num_res_blocks": 2}, "missing"),
    ],
    ids=lambda x: str(list(x)[0]) if isinstance(x, dict) else "",
)
def test_another_config(folder: Path, changes: dict[str, Any], text: str) -> None:
    """A class that is not this one, or sizes that do not go together or with the weights."""
    config_of(folder, **changes)
    with pytest.raises(WeightsError, match=text) as caught:
        WanCodec.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_another_latent_size(folder: Path) -> None:
    """Latents that the transformer does not have are found before weights are read."""
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(WeightsError, match="latents of 4 channels; the transformer's have 16"):
        WanCodec.from_folder(folder, 16)


def test_damaged_weights(folder: Path) -> None:
    """Half a file and no file are named."""
    path = folder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(WeightsError, match=path.name):
        WanCodec.from_folder(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=f"{folder.name}: holds no weights"):
        WanCodec.from_folder(folder)


def test_missing_shard(tmp_path: Path) -> None:
    """A shard that was not downloaded is named."""
    network().save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightsError, match=gone.name):
        WanCodec.from_folder(tmp_path)


@pytest.fixture(scope="module")
def original() -> dict[str, Tensor]:
    """Random weights under the original's names."""
    return random_tensors(shapes(dim=4, z=4))


@pytest.mark.parametrize("name", ["vae.pth", "vae.safetensors"])
def test_original_file(original: dict[str, Tensor], name: str, tmp_path: Path) -> None:
    """The original's file gives the network that diffusers' own converter fills."""
    path = tmp_path / name
    torch.save(original, path) if path.suffix == ".pth" else save_file(original, path)
    loaded = WanCodec.from_file(path, 4, mean=MEAN, std=STD)
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, latents_mean=MEAN, latents_std=STD)
    vae.load_state_dict(convert_wan_vae_to_diffusers(original))
    expected = official_decode(WanCodec(vae), latents(2))
    assert torch.equal(loaded.decode_samples(latents(2))[0], expected) and expected.std() > 0.05


def test_original_statistics(tmp_path: Path) -> None:
    """With 16 channels the latents' statistics are Wan2.1's, which diffusers has as defaults."""
    save_file(random_tensors(shapes(dim=2, z=16)), tmp_path / "vae.safetensors")
    loaded = WanCodec.from_file(tmp_path / "vae.safetensors")
    with torch.device("meta"):
        config = AutoencoderKLWan().config
    assert torch.equal(loaded.mean.flatten(), torch.tensor(config.latents_mean))
    assert torch.equal(loaded.per_std.flatten(), 1.0 / torch.tensor(config.latents_std))


def test_original_file_that_is_not(original: dict[str, Tensor], tmp_path: Path) -> None:
    """Unknown statistics, another latent size, another model, no file: one line with the path."""
    path = tmp_path / "vae.safetensors"
    save_file(original, path)
    statistics: dict[str, Any] = {"mean": MEAN, "std": STD}
    with pytest.raises(WeightsError, match=r"vae.safetensors: 4 latent channels, whose mean"):
        WanCodec.from_file(path)
    with pytest.raises(WeightsError, match="vae.safetensors: latents of 4 channels; the transf"):
        WanCodec.from_file(path, 16, **statistics)
    save_file({**original, "decoder.upsamples.99.weight": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match="vae.safetensors: .*1 unexpected"):
        WanCodec.from_file(path, **statistics)
    save_file({"blocks.0.modulation": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match=r"vae.safetensors: no Wan2\.1 autoencoder"):
        WanCodec.from_file(path)
    with pytest.raises(WeightsError, match="gone.pth: no such file"):
        WanCodec.from_file(tmp_path / "gone.pth")
