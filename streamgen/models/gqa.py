"""Fewer key and value heads: make a grouped-query model out of a multi-head one.

The recipe of GQA (arXiv 2305.13245, 2.1): split the heads into groups and take the mean of their K
and V projections; queries and the output stay. The cache then shrinks by heads / groups exactly. It
is a start for further training (the paper spends 5 % of the original steps), not a free lunch.

Order: group g is the run of query heads `g * H/G ... (g + 1) * H/G - 1`. The paper leaves the
assignment open; runs are what `enable_gqa`, transformers' `repeat_kv` and our kernels read.

A norm over all keys of a token (Wan, OLMo 2) has one weight a channel of all heads, and is taken
over fewer channels afterwards. Its weights are averaged like the projection. If the heads of each
group are equal, the mean square over G heads is that over H, and the conversion is exact. If they
differ, their mean is shorter than they are, and the norm stretches it back to the length that the
queries were trained with; the mean of the normalised keys would be shorter and flatten attention.
On the pocket world with 2 of 4 heads, x0 is off by 0.353 of its size this way and by 0.363 that
way, before any training. A norm over each head by itself (Qwen3) has no heads in its weights and
stays.

Axes: H query heads, K key and value heads before, G after, D head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from streamgen.errors import InvalidRequest
from streamgen.models.wan import WanModel

Model = TypeVar("Model", bound=nn.Module)

# Projections and norms with key or value heads side by side: Wan's names (those for the picture of
# an image-to-video model too), then transformers'. A norm goes with the projection before it.
_PARTS = {
    "k": "norm_k",
    "v": "",
    "k_img": "norm_k_img",
    "v_img": "",
    "k_proj": "k_norm",
    "v_proj": "",
}
_POOLED = re.compile(rf"((?:.*\.)?(?:self_attn|cross_attn)\.)({'|'.join(_PARTS)})\.weight")


def pool_heads(x: Tensor, heads: int, groups: int) -> Tensor:
    """Mean over each run of `heads / groups` heads along axis 0: `[K*D, ...]` to `[G*D, ...]`."""
    if heads == groups:
        return x
    parts = x.detach().unflatten(0, (groups, heads // groups, -1))
    exact = torch.promote_types(x.dtype, torch.float32)
    mean: Tensor = parts.mean(1, dtype=exact)
    return mean.flatten(0, 1).to(x.dtype)


def convert_mha_to_gqa(model: Model, groups: int) -> Model:
    """The same model with `groups` key and value heads in every layer; see the module's text.

    Takes a `WanModel` (self- and cross-attention), or a model of transformers whose attention has
    `k_proj`, `v_proj` and `num_key_value_groups` (Llama, Qwen2, Mistral, ...); an encoder without
    the latter stays as it is, as in the paper. One that is grouped already can be grouped further.

    Returns:
        A new model. What was not pooled it shares with the old one: copy it to train both.

    Raises:
        InvalidRequest: nothing to convert, or a number of groups that does not divide the heads.
    """
    keep: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    twin = deepcopy(model, keep)
    found = list(_attentions(twin))
    if not found:
        raise InvalidRequest(
            f"{type(model).__name__} has no attention to convert: accepted are WanModel and "
            "models of transformers with k_proj, v_proj and num_key_value_groups"
        )
    for attention, names in found:
        heads = getattr(attention, names[0]).out_features // attention.head_dim
        expect_groups(heads, groups)
        for name in names:
            linear, norm = getattr(attention, name), getattr(attention, _PARTS[name] or "-", None)
            if norm is not None and len(norm.weight) == linear.out_features:
                _pool(norm, heads, groups)
                norm.normalized_shape = tuple(norm.weight.shape)
            _pool(linear, heads, groups)
            linear.out_features = len(linear.weight)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups *= heads // groups
            attention.config.num_key_value_heads = groups
    if isinstance(twin, WanModel):
        config = twin.config
        twin.config = replace(config, num_kv_heads=0 if groups == config.num_heads else groups)
    return twin


def convert_state(state: Mapping[str, Tensor], heads: int, groups: int) -> dict[str, Tensor]:
    """`convert_mha_to_gqa` of a checkpoint that no model was built for.

    Args:
        state: name -> tensor, with the names of Wan2.1 or of transformers' Llama or Qwen2; of a
            decoder alone, since all attention in it is converted.
        heads: its key and value heads, which can't be seen in it.
        groups: as many are left.

    Raises:
        InvalidRequest: nothing to convert, or a number of groups that does not divide the heads.
    """
    expect_groups(heads, groups)
    pooled = {}
    for key, weight in state.items():
        match = _POOLED.fullmatch(key)
        if not match:
            continue
        prefix, name = match.groups()
        for other in (key, f"{prefix}{name}.bias", f"{prefix}{_PARTS[name]}.weight"):
            if other in state and len(state[other]) == len(weight):  # else a norm of single heads
                pooled[other] = pool_heads(state[other], heads, groups)
    if not pooled:
        raise InvalidRequest(
            "the state has no keys and values under self_attn or cross_attn: accepted are the "
            "names of Wan2.1 (self_attn.k) and of transformers' decoders (self_attn.k_proj)"
        )
    return {**state, **pooled}


def expect_groups(heads: int, groups: int) -> None:
    """Raise InvalidRequest unless `groups` divides `heads`."""
    if groups < 1 or heads % groups:
        accepted = [n for n in range(1, heads + 1) if heads % n == 0]
        raise InvalidRequest(
            f"{heads} heads don't split into {groups} groups: accepted are {accepted}"
        )


def _attentions(model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """Every attention to convert, and the names of its projections of keys and values."""
    for module in model.modules():
        ours = isinstance(getattr(module, "norm_k", None), nn.RMSNorm)
        if ours or hasattr(module, "num_key_value_groups"):
            names = [name for name in _PARTS if isinstance(getattr(module, name, None), nn.Linear)]
            if names:
                yield module, names


def _pool(part: nn.Module, heads: int, groups: int) -> None:
    for name, old in list(part.named_parameters(recurse=False)):
        new = nn.Parameter(pool_heads(old, heads, groups), requires_grad=old.requires_grad)
        setattr(part, name, new)
