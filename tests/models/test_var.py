"""VAR's transformer: the cached scales equal the masked pass, and the formulas are the paper's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pictures import SIDES, randomised, tiny_var, tiny_vqvae
from torch import Tensor

from streamgen.cache import BlockPool, KVSpec, NextScale
from streamgen.cache.scales import VAR_256, block_tokens
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.models.var import (
    VAR_512,
    CachedScales,
    Condition,
    ForkedScales,
    MaskedScales,
    VARConfig,
    VARModel,
)

ROWS = 3
TOKENS = sum(side * side for side in SIDES)


def inputs(model: VARModel, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Classes (the last is none), and maps as an autoencoder shows them."""
    make = torch.Generator().manual_seed(5)
    labels = torch.tensor([1, 4, model.config.no_class][:rows])
    quantize = tiny_vqvae().quantize
    maps = [torch.randint(24, (rows, side * side), generator=make) for side in SIDES]
    return labels, quantize.inputs(maps, SIDES)


def cache_of(model: VARModel, rows: int, blocks: int = 0, store_last: bool = False) -> NextScale:
    config = model.config
    tokens = block_tokens(SIDES, store_last)
    spec = KVSpec(config.depth, config.heads, config.head_dim, tokens, model.dtype)
    return NextScale(BlockPool(spec, blocks or rows), rows, SIDES, store_last)


def cached(model: VARModel, labels: Tensor, maps: Tensor, cache: NextScale) -> Tensor:
    """All logits, scale by scale."""
    condition, outs = model.condition(labels), []
    x = model.start(condition)
    shown = maps.split(model.config.lengths[1:], dim=1)
    for scale in range(len(SIDES)):
        if scale:
            x = model.embed(shown[scale - 1], scale)
        cache.begin(scale)
        outs.append(model.predict(x, condition, CachedScales(cache)))
        cache.commit()
    return torch.cat(outs, 1)


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    assert one.shape == other.shape
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


@pytest.mark.parametrize("shared_aln", [False, True])
@pytest.mark.parametrize("store_last", [False, True])
def test_cached_equals_masked(shared_aln: bool, store_last: bool) -> None:
    """One scale after the other through the cache, and all at once under a mask."""
    model = tiny_var(shared_aln)
    labels, maps = inputs(model)
    want = model(labels, maps)
    assert want.std() > 0.1
    assert close(cached(model, labels, maps, cache_of(model, ROWS, store_last=store_last)), want)


def naive(model: VARModel, labels: Tensor, maps: Tensor) -> Tensor:
    """The published network, written out for all scales with everything recomputed in place."""
    c, w = model.config, dict(model.named_parameters())
    cond = w["class_emb.weight"][labels]
    level = torch.arange(len(SIDES)).repeat_interleave(torch.tensor(c.lengths))
    x = F.linear(maps, w["word_embed.weight"], w["word_embed.bias"])
    x = torch.cat([cond[:, None] + w["pos_start"], x], 1)
    x = x + w["lvl_embed.weight"][level] + w["pos_1LC"]
    mask = torch.where(level[:, None] >= level, 0.0, -math.inf)

    def lin(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-6
        ).sqrt()

    for layer in range(c.depth):
        p = f"blocks.{layer}"
        if c.shared_aln:
            six = lin("shared_ada_lin.1", F.silu(cond)).view(-1, 1, 6, c.width) + w[f"{p}.ada_gss"]
        else:
            six = lin(f"{p}.ada_lin.1", F.silu(cond)).view(-1, 1, 6, c.width)
        gate1, gate2, scale1, scale2, shift1, shift2 = six.unbind(2)
        h = norm(x) * (scale1 + 1) + shift1
        q, k, v = (h @ w[f"{p}.attn.mat_qkv.weight"].T).chunk(3, -1)
        q, v = q + w[f"{p}.attn.q_bias"], v + w[f"{p}.attn.v_bias"]
        q, k, v = (y.view(len(x), -1, c.heads, c.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        q = q * w[f"{p}.attn.scale_mul_1H11"].clamp(max=math.log(100)).exp()
        y = ((q @ k.transpose(2, 3) + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + lin(f"{p}.attn.proj", y) * gate1
        h = norm(x) * (scale2 + 1) + shift2
        y = lin(f"{p}.ffn.fc2", F.gelu(lin(f"{p}.ffn.fc1", h), approximate="tanh"))
        x = x + y * gate2
    scale, shift = lin("head_nm.ada_lin.1", F.silu(cond)).view(-1, 1, 2, c.width).unbind(2)
    return lin("head", norm(x) * (scale + 1) + shift)


@pytest.mark.parametrize("shared_aln", [False, True])
def test_the_network_is_the_published_one(shared_aln: bool) -> None:
    """Against the formulas written out: order of gates, scales and shifts, scale 1, log 100."""
    model = tiny_var(shared_aln)
    model.blocks[0].attn.scale_mul_1H11.data[0, 0] = 7.0  # beyond the limit
    labels, maps = inputs(model)
    assert close(model(labels, maps), naive(model, labels, maps))


def test_without_l2_norm() -> None:
    """A file without scales of its heads: softmax scale 1/4 of the usual one."""
    config = VARConfig(1, 64, 1, 5, 6, 24, SIDES, l2_norm=False)
    model = randomised(VARModel(config), 3)
    assert VARConfig.from_tensors(model.state_dict(), SIDES) == config
    attention, x = model.blocks[0].attn, torch.randn(1, 3, 64, generator=torch.manual_seed(0))
    q, k, _ = attention.qkv(x)
    raw = F.linear(x, attention.mat_qkv.weight)
    assert close(q[0, :, 0], (raw[0, :, :64] + attention.q_bias) / 8 / 4)
    assert close(k[0, :, 0], raw[0, :, 64:128])
    labels, maps = inputs(model)
    assert close(cached(model, labels, maps, cache_of(model, ROWS)), model(labels, maps))


@pytest.mark.parametrize("shared_aln", [False, True])
def test_a_condition_is_computed_once(shared_aln: bool) -> None:
    """Once an image is the same as once a scale, and no scale reads the adaptive norms' weights."""
    model = tiny_var(shared_aln)
    labels, maps = inputs(model)
    want = model(labels, maps)
    calls: list[Any] = []
    for name, module in model.named_modules():
        if name.endswith("ada_lin"):
            module.register_forward_hook(lambda *_: calls.append(1))
    got = cached(model, labels, maps, cache_of(model, ROWS))
    assert len(calls) == 2 if shared_aln else model.config.depth + 1
    assert close(got, want)
    again = model.condition(labels)
    for one, other in zip(again.blocks, model.condition(labels).blocks, strict=True):
        assert torch.equal(one, other)


def test_classes_matter_and_coarser_scales_do_not_see_finer_ones() -> None:
    """Another class changes all logits; another fine map changes only its own scale and finer."""
    model = tiny_var()
    labels, maps = inputs(model)
    out = model(labels, maps)
    other = model(labels.roll(1), maps)
    assert (out - other).abs().amax(-1).min() > 1e-3
    changed = maps.clone()
    changed[:, model.config.ends[1] - 1 :] += 1  # from scale 2 on
    seen = (model(labels, changed) - out).abs().amax((0, 2))
    assert seen[: model.config.ends[1]].max() == 0
    assert seen[model.config.ends[1] :].min() > 1e-4


@pytest.mark.parametrize("n", [1, 3])
def test_forks_equal_a_batch(n: int) -> None:
    """Variations in forked caches, each with its own fine maps, against runs of their own."""
    model = tiny_var()
    labels, _ = inputs(model)
    labels = torch.stack([labels[0], labels[2]])  # one image: condition, uncondition
    make = torch.Generator().manual_seed(6)
    maps = torch.randn(n, TOKENS - 1, 6, generator=make)
    maps[:, : model.config.ends[1] - 1] = maps[:1, : model.config.ends[1] - 1]
    rows = labels.repeat_interleave(n)  # by branch, then by image
    want = model(rows, maps.repeat(2, 1, 1))

    trunk = cache_of(model, 2, blocks=2 * n)
    condition = model.condition(labels)
    x = model.start(condition)
    for scale in range(2):
        trunk.begin(scale)
        model.predict(x, condition, CachedScales(trunk), store_only=True)
        trunk.commit()
        shown = maps[:1, model.config.ends[scale] - 1 : model.config.ends[scale + 1] - 1]
        x = model.embed(shown.repeat(2, 1, 1), scale + 1)
    forks = [trunk.fork_after(1) for _ in range(n)]
    trunk.close()
    condition = model.condition(rows)
    for scale in (2, 3):
        shown = maps[:, model.config.ends[scale - 1] - 1 : model.config.ends[scale] - 1]
        x = model.embed(shown.repeat(2, 1, 1), scale)
        for fork in forks:
            fork.begin(scale)
        got = model.predict(x, condition, ForkedScales(forks))
        for fork in forks:
            fork.commit()
        a, b = model.config.ends[scale - 1], model.config.ends[scale]
        assert close(got, want[:, a:b])


def test_store_only_stores_the_same() -> None:
    """A pass nobody reads leaves the same keys and values, without the head."""
    model = tiny_var()
    labels, _ = inputs(model)
    condition = model.condition(labels)
    x, stored = model.start(condition), []
    for store_only in (False, True):
        cache = cache_of(model, ROWS)
        cache.begin(0)
        out = model.predict(x, condition, CachedScales(cache), store_only)
        assert out.shape[2] == (model.config.width if store_only else model.config.vocab)
        stored.append([cache.kv(layer) for layer in range(2)])
    assert all(
        torch.equal(a, b)
        for one, other in zip(*stored, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_bfloat16_is_close_and_keeps_the_heads_precise() -> None:
    """Keys and values come in bfloat16; logits and the heads' scales in float32."""
    model = tiny_var()
    labels, maps = inputs(model)
    want = model(labels, maps)
    model.cast(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert {model.head.weight.dtype, model.blocks[0].attn.scale_mul_1H11.dtype} == {torch.float32}
    got = cached(model, labels, maps, cache_of(model, ROWS))
    assert got.dtype == torch.float32
    assert close(got, want, 0.1) and close(got, model(labels, maps), 0.1)


def test_training_reaches_every_parameter() -> None:
    """From `init_weights` on, a step on the masked pass lowers the loss."""
    torch.manual_seed(0)
    model = VARModel(tiny_var().config).train()
    model.init_weights(gate=0.1)
    labels, maps = inputs(model)
    target = torch.randint(24, (ROWS, TOKENS))
    logits = model(labels, maps)
    assert logits.detach().softmax(-1).max() < 0.1  # all tokens begin about equally likely
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(labels, maps).flatten(0, 1), target.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in gradients)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 0.5 * gradient
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


# Configuration


@pytest.mark.parametrize("shared_aln", [False, True])
def test_sizes_are_read_off_the_tensors(shared_aln: bool) -> None:
    """All of them; the sides from `lvl_1L` where it is, else they must be given."""
    model = tiny_var(shared_aln)
    tensors = model.state_dict()
    assert VARConfig.from_tensors(tensors, SIDES) == model.config
    level = torch.arange(len(SIDES)).repeat_interleave(torch.tensor(model.config.lengths))
    assert VARConfig.from_tensors({**tensors, "lvl_1L": level[None]}) == model.config
    with pytest.raises(WeightsError, match='39 tokens .*680 or 2240.*"patch_nums"'):
        VARConfig.from_tensors(tensors)
    with pytest.raises(WeightsError, match=r"\(1, 2, 3, 4\) make 30 tokens of 4 .* have 39"):
        VARConfig.from_tensors(tensors, (1, 2, 3, 4))


@pytest.mark.parametrize(("sides", "depth"), [(VAR_256, 16), (VAR_512, 36)])
def test_published_sizes_are_known_by_their_tokens(sides: tuple[int, ...], depth: int) -> None:
    """680 and 2,240 tokens, on the meta device."""
    with torch.device("meta"):
        model = VARModel(VARConfig(1, 64 * depth, depth, 1000, patch_nums=sides))
    config = VARConfig.from_tensors(model.state_dict())
    assert (config.patch_nums, config.heads, config.head_dim) == (sides, depth, 64)
    assert (config.hidden, config.vocab, config.latent_channels) == (256 * depth, 4096, 32)


@pytest.mark.parametrize(
    "key", ["pos_1LC", "blocks.0.attn.mat_qkv.weight", "head.weight", "word_embed.weight"]
)
def test_a_missing_tensor_is_named(key: str) -> None:
    """The one that a size can't be read from."""
    tensors = tiny_var().state_dict()
    del tensors[key]
    with pytest.raises(WeightsError, match=f"no VAR transformer: {key} is missing"):
        VARConfig.from_tensors(tensors, SIDES)


def test_wrong_sizes() -> None:
    """Heads that don't divide the width, no scales, a tensor with other axes."""
    with pytest.raises(InvalidRequest, match="width 30 does not split into 4 heads"):
        VARConfig(1, 30, 4, 5)
    with pytest.raises(InvalidRequest, match="at least one positive side"):
        VARConfig(1, 32, 4, 5, patch_nums=())
    tensors = {**tiny_var().state_dict(), "pos_1LC": torch.zeros(39, 32)}
    with pytest.raises(WeightsError, match=r"pos_1LC is of shape \[39, 32\]; expected are 3 axes"):
        VARConfig.from_tensors(tensors, SIDES)


def test_a_mask_of_scales() -> None:
    """Every token sees its own scale and the coarser ones."""
    mask = MaskedScales((1, 2)).mask_LL
    assert mask.tolist() == [[True] + [False] * 4] + [[True] * 5] * 4
    assert isinstance(tiny_var().condition(torch.tensor([0])), Condition)
