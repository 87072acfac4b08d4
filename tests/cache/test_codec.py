"""How good, how large and how safe each codec is; its fast arithmetic against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from streamgen.cache.codec import CODECS, NVFP4, KVCodec, Scaled, codec_name, make_codecs
from streamgen.errors import InvalidRequest

LOSSY = CODECS[1:]
SIDES = [(name, side) for name in LOSSY for side in (0, 1)]
F32_MAX = torch.finfo(torch.float32).max


def codec_of(name: str, side: int = 0) -> KVCodec:
    return make_codecs(name, torch.float32)[side]


def store(codec: KVCodec, x: Tensor) -> list[Tensor]:
    """The parts of blocks `[N, T, H, D]`."""
    parts = [torch.zeros((len(x), *p.shape), dtype=p.dtype) for p in codec.layout(*x.shape[1:])]
    codec.encode(x.float().clone(), parts, torch.empty(x.shape, dtype=torch.int32))
    return parts


def load(codec: KVCodec, parts: list[Tensor], shape: torch.Size) -> Tensor:
    out = torch.full(shape, math.nan)
    codec.decode(parts, out, torch.empty(shape, dtype=torch.int32))
    return out


def there_and_back(codec: KVCodec, x: Tensor) -> Tensor:
    return load(codec, store(codec, x), x.shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_with_outliers() -> Tensor:
    """A frame of Wan 480p, 2 heads: Gaussian, but two channels of a head are 8 times as large."""
    x = gaussian(1, 1560, 2, 128)
    x[..., (3, 77)] *= 8
    return x


# How good


@pytest.mark.parametrize(
    ("name", "side", "figure"),
    [
        ("fp8_e4m3", 0, 0.0265),
        ("fp8_e5m2", 0, 0.053),
        ("int8", 0, 0.0080),
        ("int8", 1, 0.0165),
        ("nvfp4", 0, 0.093),
    ],
)
def test_error_figures(name: str, side: int, figure: float) -> None:
    """Relative L2 error of keys with two outlier channels, within 4 % of the figure."""
    x = keys_with_outliers()
    error = (there_and_back(codec_of(name, side), x) - x).norm() / x.norm()
    assert error.item() == pytest.approx(figure, rel=0.04)


def test_integer_keys_want_a_scale_per_channel() -> None:
    """One per head is 6 times worse on the same keys: an outlier takes the range of all."""
    x = keys_with_outliers()
    per_channel, per_head = (
        (there_and_back(codec, x) - x).norm()
        for codec in (codec_of("int8"), Scaled(torch.int8, (1, 3), "cpu"))
    )
    assert per_head > 6 * per_channel


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_error_of_each_element(name: str, side: int, magnitude: float) -> None:
    """At most half a step of its code, whatever the magnitude."""
    x = gaussian(2, 5, 2, 32) * magnitude
    parts = store(codec_of(name, side), x)
    error = (load(codec_of(name, side), parts, x.shape) - x).abs()
    scale = parts[-1]
    if name == "int8":
        step = scale.expand_as(x)
    elif name == "nvfp4":
        scale = parts[1].float().repeat_interleave(16, -1) * scale
        quotient = (x / scale).abs()  # at most 6.4: a scale is rounded down by 1/16 at most
        step = scale * torch.where(quotient < 2, 0.5, torch.where(quotient < 4, 1.0, 2.0))
    else:
        mantissa, least = (3, 2**-9) if name == "fp8_e4m3" else (2, 2**-16)
        step = scale * torch.clamp((x / scale).abs().log2().floor().exp2() * 2**-mantissa, least)
    assert (error <= 0.5 * step * (1 + 1e-5)).all()


# Exact, repeatable, block by block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_is_the_identity(dtype: torch.dtype) -> None:
    """Bitwise, in every compute dtype, through the fp32 that codecs speak."""
    x = gaussian(2, 3, 2, 16).to(dtype)
    codec = make_codecs("raw", dtype)[0]
    assert same_bits(there_and_back(codec, x).to(dtype), x)


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_blocks_stand_alone(name: str, side: int) -> None:
    """Five blocks at once give bitwise the bytes and values of one at a time, and do so again."""
    codec, x = codec_of(name, side), gaussian(5, 3, 2, 32)
    parts = store(codec, x)
    for index in range(5):
        alone = store(codec, x[index : index + 1])
        assert all(same_bits(p[index], q[0]) for p, q in zip(parts, alone, strict=True))
        assert same_bits(load(codec, alone, x[:1].shape)[0], load(codec, parts, x.shape)[index])


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_codes_are_a_fixed_point(name: str, side: int) -> None:
    """What was decoded has codes of its own: encoding it once more changes it by rounding only."""
    codec = codec_of(name, side)
    once = there_and_back(codec, gaussian(1, 6, 2, 32))
    again = there_and_back(codec, once)
    assert (again - once).norm() <= (1e-6 if name != "nvfp4" else 0.05) * once.norm()


# Safe


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_zero_stays_zero(name: str, side: int) -> None:
    """A head of zeros, and zeros among others; no scale is 0."""
    codec, x = codec_of(name, side), gaussian(2, 4, 2, 32)
    x[0, :, 0] = 0
    x[1, 2, 1, 5] = 0
    parts = store(codec, x)
    got = load(codec, parts, x.shape)
    assert not got[0, :, 0].any() and got[1, 2, 1, 5] == 0
    assert all((scale.float() > 0).all() for scale in parts[1:])


@pytest.mark.parametrize("largest", [F32_MAX, 3.3895e38, 65504.0, 1.0, 1e-33, 1e-45])
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_finite_stays_finite(name: str, side: int, largest: float) -> None:
    """Up to the ends of fp32, bf16 and fp16, nothing grows beyond the largest; which is kept."""
    codec = codec_of(name, side)
    x = gaussian(1, 8, 1, 32).clamp(-3, 3) / 3
    x[0, 1, 0, 1], x[0, 2, 0, 2] = 1.0, -1.0
    x = (x.double() * largest).float()
    got = there_and_back(codec, x).double()
    assert got.isfinite().all()
    assert got.abs().max() <= x.double().abs().max() * (1 + 3e-7)
    if largest >= 1e-33:
        assert got[0, 1, 0, 1].item() == pytest.approx(x[0, 1, 0, 1].item(), rel=2e-6)
        assert got[0, 2, 0, 2].item() == pytest.approx(x[0, 2, 0, 2].item(), rel=2e-6)


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_infinity_saturates_and_nan_is_seen(name: str, side: int) -> None:
    """Infinity becomes a large number; NaN spoils what shares its scale and nothing else."""
    codec, x = codec_of(name, side), gaussian(2, 4, 2, 32)
    x[0, 1, 0, 7], x[1, 1, 0, 7] = math.inf, math.nan
    got = there_and_back(codec, x)
    assert got[0].isfinite().all() and got[0, 1, 0, 7] > 1e38
    shares = torch.zeros(4, 2, 32, dtype=torch.bool)
    if name == "int8":
        shares[(slice(None), 0, 7) if side == 0 else (1, 0)] = True
    else:
        shares[:, 0] = True
    assert torch.equal(got[1].isnan(), shares)


# Fast against slow


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_look_up_is_torchs_decoding(dtype: torch.dtype) -> None:
    """All 256 codes, bitwise (NaN is NaN)."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 1, 256)
    got = load(Scaled(dtype, (1, 3), "cpu"), [codes, torch.ones(1, 1, 1, 1)], codes.shape)
    assert torch.equal(got.nan_to_num(7e7), codes.float().nan_to_num(7e7))


@pytest.mark.parametrize(("name", "side"), SIDES[:6])
def test_scaled_against_a_plain_formula(name: str, side: int) -> None:
    """fp8 and int8: code = x / scale rounded, scale = largest / largest code; torch's casts."""
    x = gaussian(2, 5, 2, 32)
    codec = codec_of(name, side)
    assert isinstance(codec, Scaled)
    scale = x.abs().amax(codec.shared, keepdim=True) / codec.peak
    code = x / scale
    code = code.round().to(torch.int8) if name == "int8" else code.to(codec.dtype)
    parts = store(codec, x)
    assert same_bits(parts[0], code) and same_bits(parts[1], scale)
    assert same_bits(load(codec, parts, x.shape), code.float() * scale)


def nearest_code(values: list[float], x: float) -> int:
    """Index of the nearest of ascending values, the even index if two are equally near."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))


def reference_nvfp4(x_THD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales and values of one block, element by element in Python."""
    tokens, heads, dim = x_THD.shape
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    codes, scales = np.zeros((tokens, heads, dim // 2), np.uint8), np.zeros((tokens, heads, dim))
    values, f32 = np.zeros_like(x_THD), np.float32
    for head in range(heads):
        top = f32(np.abs(x_THD[:, head]).max()) / f32(2688)
        for token in range(tokens):
            for start in range(0, dim, 16):
                group = x_THD[token, head, start : start + 16] / top
                largest = min(max(f32(np.abs(group).max()) / f32(6), f32(2**-9)), f32(448))
                scale = f32(e4m3[nearest_code(e4m3, float(largest))])
                for offset, element in enumerate(group):
                    channel, quotient = start + offset, float(element / scale)
                    code = nearest_code(list(NVFP4.MAGNITUDES), abs(quotient))
                    value = f32(math.copysign(NVFP4.MAGNITUDES[code], quotient))
                    nibble = code + (8 if code and quotient < 0 else 0)
                    codes[token, head, channel // 2] |= nibble << (4 * (channel % 2))
                    scales[token, head, channel] = scale
                    values[token, head, channel] = value * (scale * top)
    return codes, scales[..., ::16], values


@pytest.mark.parametrize("case", ["gaussian", "outliers", "ties", "tiny groups"])
def test_nvfp4_against_a_loop(case: str) -> None:
    """The same bytes, scales and values as the format written out element by element."""
    x = gaussian(1, 3, 2, 48)
    if case == "outliers":
        x[..., (3, 40)] *= 20
    elif case == "ties":  # scales come out as 1, so all quotients are quarters
        x = torch.arange(-24, 24).div(4).expand(1, 3, 2, 48).clone()
        x[..., 0], x[..., 16], x[..., 32] = 2688, 6, -6
    elif case == "tiny groups":
        x[..., 16:32] *= 1e-6
        x[..., 32:] = 0
    codec = NVFP4("cpu")
    code, scale, _ = parts = store(codec, x)
    codes, scales, values = reference_nvfp4(x[0].numpy())
    assert np.array_equal(code[0].numpy(), codes)
    assert np.array_equal(scale[0].float().numpy(), scales)
    assert np.array_equal(load(codec, parts, x.shape)[0].numpy(), values)


def test_nvfp4_ties_by_hand() -> None:
    """Halfway between two codes goes to the even one, on both sides of zero; beyond 6 is 6."""
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.4])
    x = torch.cat([halves, -halves, torch.tensor([2688.0]), torch.zeros(15)])
    x[7], x[15] = 6.0, -6.0  # so that the scale of the first 16 is 1
    got = there_and_back(NVFP4("cpu"), x.view(1, 1, 1, 32)).flatten()
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert got[:16].tolist() == rounded + [-value for value in rounded]


# How large


@pytest.mark.parametrize(
    ("name", "side", "nbytes"),
    [
        ("raw", 0, 1560 * 12 * 128 * 4),
        ("fp8_e4m3", 0, 1560 * 12 * 128 + 12 * 4),
        ("fp8_e5m2", 1, 1560 * 12 * 128 + 12 * 4),
        ("int8", 0, 1560 * 12 * 128 + 12 * 128 * 4),
        ("int8", 1, 1560 * 12 * 128 + 1560 * 12 * 4),
        ("nvfp4", 0, 1560 * 12 * 72 + 12 * 4),
    ],
)
def test_bytes_by_hand(name: str, side: int, nbytes: int) -> None:
    """One layer of a frame of Wan 1.3B at 480p."""
    assert sum(part.nbytes for part in codec_of(name, side).layout(1560, 12, 128)) == nbytes


def test_nvfp4_is_nine_sixteenths_of_fp8() -> None:
    """56.25 % of FP8's bytes a value; each has the same fp32 scale a head besides."""
    fp8, fp4 = (codec_of(name).layout(1560, 12, 128) for name in ("fp8_e4m3", "nvfp4"))
    assert sum(part.nbytes for part in fp4[:2]) / fp8[0].nbytes == 0.5625
    assert fp4[2] == fp8[1]


# Names


def test_names() -> None:
    """ "fp8" is short for e4m3; anything else is refused with what is accepted."""
    assert [codec_name(name) for name in (*CODECS, "fp8")] == [*CODECS, "fp8_e4m3"]
    accepted = "'fp7': accepted are raw, fp8, fp8_e4m3, fp8_e5m2, int8, nvfp4$"
    with pytest.raises(InvalidRequest, match=accepted):
        codec_name("fp7")
    with pytest.raises(InvalidRequest, match="'fp8': accepted are raw, fp8_e4m3"):
        make_codecs("fp8", torch.float32)


def test_nvfp4_takes_whole_groups() -> None:
    """A head of 24 channels can't be cut into groups of 16."""
    with pytest.raises(InvalidRequest, match="head_dim=24.*multiples of 16"):
        NVFP4("cpu").layout(3, 2, 24)
