"""Models and GPUs for the planner: a table, and shapes read from a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamgen.cache.planner import GB, LayerGroup, ModelShape
from streamgen.cache.staging import BATCH_TOKENS
from streamgen.errors import InvalidRequest

GPUS = {
    "h100-80": 80 * GB,
    "h200": 141 * GB,
    "b200": 180 * GB,
    "b300": 288 * GB,
    "a100-40": 40 * GB,
    "a100-80": 80 * GB,
    "l40s": 48 * GB,
    "l4": 24 * GB,
    "rtx-4090": 24 * GB,
    "rtx-5090": 32 * GB,
}
"""Bytes of memory as sold, GB = 10^9. Drivers report a few per cent more, and keep some of it."""

GENERATOR_BYTES = 5056
"""Bytes of the state of torch's CPU generator."""

_MiB = 2**20


def _video(
    name: str,
    layers: int,
    heads: int,
    frame_tokens: int,
    window: int,
    parameters: int,
    state_bytes: int,
) -> ModelShape:
    """A Wan-class video transformer: 128 channels a head, 512 rows of text; `window` in frames."""
    group = LayerGroup(layers, heads, 128, window=window * frame_tokens)
    return ModelShape(
        name,
        (group,),
        weight_bytes=2 * parameters,
        frame_tokens=frame_tokens,
        cross_tokens=512,
        state_bytes=state_bytes,
    )


# Weights of video models are the transformer's alone; their state is the feature cache of the
# autoencoder's decoder in bfloat16 (diffusers' AutoencoderKLWan at that size).
_TABLE = (
    ModelShape("opt-13b", (LayerGroup(40, 40, 128),), 2 * 12_853_473_280, max_tokens=2048),
    ModelShape(
        "deepseek-r1",
        (LayerGroup(61, 1, 512 + 64, latent=True),),
        671 * GB,
        kv="fp8_static",
        max_tokens=163_840,
    ),
    ModelShape("llama-3.1-8b", (LayerGroup(32, 8, 128),), 2 * 8_030_261_248, max_tokens=131_072),
    ModelShape("llama-3.1-70b", (LayerGroup(80, 8, 128),), 2 * 70_553_706_496, max_tokens=131_072),
    ModelShape("qwen2.5-vl-7b", (LayerGroup(28, 4, 128),), 2 * 8_292_166_656, max_tokens=128_000),
    ModelShape("mistral-7b", (LayerGroup(32, 8, 128, window=4096),), 2 * 7_241_732_096),
    # 24 latent layers; the other 69 keep 96 x 128 x 128 values in float32, saved every 768 tokens.
    ModelShape(
        "kimi-k3",
        (LayerGroup(24, 1, 512 + 64, latent=True),),
        state_bytes=414 * _MiB,
        snapshot_tokens=768,
    ),
    _video("wan2.1-1.3b", 30, 12, 1560, 21, 1_418_996_800, 1_888_573_440),
    _video("wan2.1-14b", 40, 40, 1560, 18, 14_288_491_584, 1_888_573_440),
    _video("wan2.2-5b", 30, 24, 880, 32, 4_999_787_712, 3_215_872_000),
)
MODELS = {shape.name: shape for shape in _TABLE}
"""Shapes by name. Wan2.1 at 480 x 832 pixels, Wan2.2 at 704 x 1280."""


def from_hf(name: str, config: Mapping[str, Any], weight_bytes: int | None = None) -> ModelShape:
    """The shape of a language model, from the `config.json` of transformers.

    Reads grouped-query, sliding-window and latent attention; of a model with several parts, its
    text part.

    Raises:
        InvalidRequest: a field is missing, or a layer keeps something else.
    """
    config = {**config, **config.get("text_config", {})}
    layers = _number(name, config, "num_hidden_layers", "n_layer")
    types = config.get("layer_types") or ["full_attention"] * layers
    window = int(config.get("sliding_window") or 0)
    if "layer_types" not in config and window and config.get("use_sliding_window", True):
        types = ["sliding_attention"] * layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or config.get("is_encoder_decoder"):
        what = f"layers of type {unknown[0]!r}" if unknown else "an encoder"
        raise InvalidRequest(
            f"{name} has {what}: shapes are read of decoders whose layers have full_attention or "
            "sliding_attention"
        )
    latent = config.get("kv_lora_rank")
    if latent:
        heads, dim = 1, int(latent) + _number(name, config, "qk_rope_head_dim")
    else:
        queries = _number(name, config, "num_attention_heads", "n_head")
        heads = int(config.get("num_key_value_heads") or queries)
        dim = int(
            config.get("head_dim") or _number(name, config, "hidden_size", "n_embd") // queries
        )
    groups = [
        LayerGroup(types.count(kind), heads, dim, window=seen, latent=bool(latent))
        for kind, seen in (("full_attention", 0), ("sliding_attention", window))
        if kind in types
    ]
    return ModelShape(
        name,
        tuple(groups),
        weight_bytes,
        max_tokens=int(config.get("max_position_embeddings") or 0),
    )


def from_world(
    name: str, config: Mapping[str, Any], parameters: int | None = None, raw_bytes: int = 2
) -> ModelShape:
    """The shape of an interactive world, from the `config.json` of a `WorldPipeline`'s folder.

    A session keeps its window and a raw copy of the sink; besides them the window's clean latents
    and actions in float32 and a generator's state, and for each chunk of its past the same of one
    chunk.

    Args:
        name: of the world.
        config: the file's content.
        parameters: of all its parts.
        raw_bytes: of a value in the dtype that it runs in.

    Raises:
        InvalidRequest: a field is missing.
    """
    try:
        world, shape = config["world"], config["transformer"]
        rows, cols = (
            n // p for n, p in zip(world["latent_hw"], shape["patch_size"][1:], strict=True)
        )
        frame, heads = rows * cols, shape["num_heads"]
        group = LayerGroup(
            layers=shape["num_layers"],
            heads=shape.get("num_kv_heads") or heads,
            dim=shape["dim"] // heads,
            window=world["window"] * frame,
            sink=world["sink"] * frame,
            raw_sink=True,  # an engine has slots for it, moving sink or not
        )
        latent = shape["in_channels"] * world["latent_hw"][0] * world["latent_hw"][1]
        beside = 4 * (latent + shape["action_dim"])  # of a frame
        chunk = world["chunk_frames"]
        return ModelShape(
            name,
            (group,),
            None if parameters is None else parameters * raw_bytes,
            kv="bf16" if raw_bytes == 2 else "fp32",
            raw_bytes=raw_bytes,
            frame_tokens=frame,
            cross_tokens=world["max_words"],
            state_bytes=world["window"] * beside + GENERATOR_BYTES,
            snapshot_tokens=chunk * frame,
            snapshot_bytes=chunk * beside + GENERATOR_BYTES,
            staging_bytes=_staging(group, frame, chunk, raw_bytes, world["positions"]),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidRequest(f"config.json of {name} is not a world's: {error!r}") from error


def _staging(group: LayerGroup, frame: int, chunk: int, raw_bytes: int, positions: str) -> int:
    """Buffers of `streamgen.cache.staging.Staging` for one chunk in a full window."""
    sunk = group.sink // frame if positions == "sliding_sink" else 0
    pairs = group.window // frame + group.layers * (chunk + min(sunk, chunk)) + sunk
    values = frame * group.heads * group.dim
    batch = max(1, BATCH_TOKENS // frame)  # worked on in int32 and float32
    return values * ((2 * pairs + group.layers * sunk) * raw_bytes + 8 * batch)


def _number(name: str, config: Mapping[str, Any], *keys: str) -> int:
    """The first of these fields that is there."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidRequest(f"config.json of {name} has no {' or '.join(keys)}")
