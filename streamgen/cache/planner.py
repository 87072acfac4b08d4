"""How much memory sessions need, and how many fit: arithmetic on integers and fractions.

The dense formula (layers x 2 x tokens x KV heads x head width x bytes, arXiv 2512.23914 eq. 15),
and what it leaves out: whole blocks, a codec's scales, windows, latent attention, cross-attention,
fixed-size state and its snapshots, weights, and a reserve. All sizes are bytes, exact to the last
one; nothing is measured here. `streamgen.cache.shapes` has models and GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Literal

from streamgen.errors import InvalidRequest

GB, GiB = 10**9, 2**30

ScaleOf = Literal["none", "block", "channel", "token", "16 values"]
"""What one scale covers, inside one head of one block."""


@dataclass(frozen=True)
class KVFormat:
    """Stored bytes of keys and values.

    Args:
        bits: of a value.
        scale_bytes: of a scale.
        keys, values: what one scale covers.
        block_scale_bytes: of one more scale for each head of a block, where there is one.
    """

    bits: int
    scale_bytes: int = 0
    keys: ScaleOf = "none"
    values: ScaleOf = "none"
    block_scale_bytes: int = 0

    def side_bytes(self, tokens: int, heads: int, dim: int, scale_of: ScaleOf) -> int:
        """Bytes of the keys (or of the values) of one block in one layer."""
        scales = {
            "none": 0,
            "block": 1,
            "channel": dim,
            "token": tokens,
            "16 values": tokens * ceil(dim / 16),
        }[scale_of]
        payload = tokens * ceil(dim * self.bits / 8)
        return heads * (payload + scales * self.scale_bytes + self.block_scale_bytes)


RAW = ("fp32", "bf16", "fp16")
"""Formats that are a compute dtype."""

_FP8 = KVFormat(8, 4, "block", "block")
FORMATS = {
    "fp32": KVFormat(32),
    "bf16": KVFormat(16),
    "fp16": KVFormat(16),
    "fp8": _FP8,
    "fp8_e4m3": _FP8,
    "fp8_e5m2": _FP8,
    "fp8_static": KVFormat(8),
    "int8": KVFormat(8, 4, "channel", "token"),
    "nvfp4": KVFormat(4, 1, "16 values", "16 values", 4),
}
"""Formats by name, with the scales of `streamgen.cache.codec`; "fp8_static" has one scale for a
whole tensor, for which no block pays (what serving engines do, and what planners count)."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same keys and values.

    Args:
        layers: how many.
        heads: K/V heads of a layer.
        dim: channels of a head.
        window: tokens that are in view at most, sink included; 0 = all.
        sink: first tokens that stay in view for ever.
        raw_sink: the sink is kept a second time, un-rotated (`SinkWindow.shadow_sink`).
        latent: one vector stands for a token's keys and values (multi-head latent attention).
    """

    layers: int
    heads: int
    dim: int
    window: int = 0
    sink: int = 0
    raw_sink: bool = False
    latent: bool = False

    def kept(self, tokens: int, past: int = 0) -> int:
        """Tokens in memory of a context of `tokens`, with `past` more behind the window."""
        if self.window:
            tokens = min(tokens, self.window) + past
        return tokens + self.sink * self.raw_sink

    def shared(self, tokens: int, prefix: int) -> int:
        """Of those, the tokens of a common prefix: all of it, or what has not left the window."""
        return min(prefix, self.sink) if self.window and tokens > self.window else prefix

    def block_bytes(self, block_tokens: int, kv: KVFormat) -> int:
        """Bytes of one block in all layers of the group."""
        size = kv.side_bytes(block_tokens, self.heads, self.dim, kv.keys)
        if not self.latent:
            size += kv.side_bytes(block_tokens, self.heads, self.dim, kv.values)
        return self.layers * size


@dataclass(frozen=True)
class ModelShape:
    """What of a model the memory depends on.

    Args:
        name: of the model.
        groups: its layers that keep keys and values.
        weight_bytes: of one copy; None = not known, and counted as 0.
        kv: its usual format of keys and values.
        raw_bytes: of a value in the compute dtype, in which cross-attention is kept.
        frame_tokens: tokens of a latent frame, which is a block; 0 = a text model.
        block_tokens: tokens of a text model's block.
        cross_tokens: of a prompt whose keys and values every layer keeps besides.
        state_bytes: fixed-size state of a session: a decoder's, or recurrent layers'.
        snapshot_tokens: a copy of the state is kept for every so many tokens that a session could
            go back by; 0 = none is.
        snapshot_bytes: of such a copy; 0 = `state_bytes`.
        staging_bytes: of the buffers in which a chunk works where K/V is kept in a codec
            (`streamgen.cache.staging`), once for each copy of the weights.
        max_tokens: longest context; 0 = not known.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    weight_bytes: int | None = None
    kv: str = "bf16"
    raw_bytes: int = 2
    frame_tokens: int = 0
    block_tokens: int = 16
    cross_tokens: int = 0
    state_bytes: int = 0
    snapshot_tokens: int = 0
    snapshot_bytes: int = 0
    staging_bytes: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if self.frame_tokens:
            object.__setattr__(self, "block_tokens", self.frame_tokens)
        expect_format(self.kv)

    def token_bytes(self, kv: str = "") -> Fraction:
        """Bytes of one token in all layers, its share of a full block."""
        codec = FORMATS[kv or self.kv]
        size = sum(group.block_bytes(self.block_tokens, codec) for group in self.groups)
        return Fraction(size, self.block_tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens; the last may be partly filled."""
        return -(-tokens // self.block_tokens)

    @property
    def cross_bytes(self) -> int:
        """Cross-attention keys and values of one prompt."""
        raw = KVFormat(8 * self.raw_bytes)
        return sum(g.block_bytes(self.cross_tokens, raw) for g in self.groups)

    @property
    def window(self) -> int:
        """Tokens of a session that runs for ever; 0 = it grows for ever."""
        windows = [group.window for group in self.groups]
        return max(windows) if all(windows) else 0


@dataclass(frozen=True)
class Fleet:
    """Where the bytes can be.

    Args:
        gpu: name of the GPU.
        gpu_bytes: memory of one.
        nodes: machines.
        gpus_per_node: GPUs of a machine.
        gpus_per_copy: GPUs that hold one copy of the weights together; 0 = as few whole nodes as
            the weights fit into.
        reserve: share of all GPU memory that is left to activations.
        dram, nvme: bytes of a node for K/V that does not fit into GPU memory.
        pooled: bytes of a store that all nodes reach; None = without limit.
    """

    gpu: str
    gpu_bytes: int
    nodes: int = 1
    gpus_per_node: int = 1
    gpus_per_copy: int = 0
    reserve: Fraction = Fraction(1, 10)
    dram: int = 0
    nvme: int = 0
    pooled: int | None = 0

    def __post_init__(self) -> None:
        _at_least(1, gpu_bytes=self.gpu_bytes, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        _at_least(0, gpus_per_copy=self.gpus_per_copy, dram=self.dram, nvme=self.nvme)
        _at_least(0, pooled=self.pooled or 0)
        if not 0 <= self.reserve < 1:
            raise InvalidRequest(f"reserve {float(self.reserve):g}: accepted are 0 and up to 1")

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def copies(self, weight_bytes: int) -> tuple[int, int]:
        """Copies of the weights, and the GPUs of each.

        Raises:
            InvalidRequest: not even one copy fits.
        """
        needed = max(1, ceil(weight_bytes / (self.gpu_bytes * (1 - self.reserve))))
        size = self.gpus_per_copy or -(-needed // self.gpus_per_node) * self.gpus_per_node
        if needed > size or size > self.gpus:
            raise InvalidRequest(
                f"a copy of the weights ({weight_bytes / GB:.1f} GB) needs {max(needed, size)} "
                f"GPUs of {self.gpu_bytes / GB:g} GB with {float(self.reserve):.0%} in reserve: "
                f"{min(size, self.gpus)} were given"
            )
        return self.gpus // size, size


@dataclass(frozen=True)
class Load:
    """The sessions to hold at once.

    Args:
        sessions: how many.
        mix: (share, tokens of context) of each kind of session; shares are relative.
        prefix: first tokens that all of them have in common and keep once in each copy.
        prompts: different texts in cross-attention, kept once in each copy; None = one a session.
        past: tokens behind the window that a session can go back to.
    """

    sessions: int
    mix: Sequence[tuple[int, int]]
    prefix: int = 0
    prompts: int | None = None
    past: int = 0

    def __post_init__(self) -> None:
        _at_least(1, sessions=self.sessions)
        _at_least(0, prefix=self.prefix, past=self.past, prompts=self.prompts or 0)
        if not self.mix:
            raise InvalidRequest("the mix names no kind of session")
        for share, tokens in self.mix:
            _at_least(1, share=share, tokens=tokens)
            if self.prefix > tokens:
                raise InvalidRequest(
                    f"a shared prefix of {self.prefix:,} tokens is longer than a session of "
                    f"{tokens:,}"
                )

    def mean(self, values: Sequence[int]) -> Fraction:
        """Mean of one value for each kind of session."""
        total = sum(share for share, _ in self.mix)
        parts = (share * value for (share, _), value in zip(self.mix, values, strict=True))
        return Fraction(sum(parts), total)


@dataclass(frozen=True)
class SessionBytes:
    """Mean bytes of a session, by what they hold. `snapshots` counts the copies of its state."""

    tokens: Fraction
    kv: Fraction
    cross: Fraction
    state: Fraction
    snapshots: Fraction
    snapshot_bytes: Fraction

    @property
    def total(self) -> Fraction:
        """All of it, nothing shared."""
        return self.kv + self.cross + self.state + self.snapshot_bytes


@dataclass(frozen=True)
class TierUse:
    """What lands in one tier; `capacity` None = without limit."""

    name: str
    capacity: Fraction | None
    used: Fraction


@dataclass(frozen=True)
class Plan:
    """What `plan` found; all sizes are bytes.

    Attributes:
        model, fleet, load, kv: what was asked; `kv` names the format.
        token: bytes of a token.
        session: mean bytes of one session.
        copies, gpus_per_copy: copies of the weights, and the GPUs of each.
        idle_gpus: GPUs that are left over by whole copies.
        hbm, weights, reserve, staging: memory of the GPUs in use, and what is taken of it before
            sessions.
        free: what is left for sessions; negative = nothing fits.
        once: bytes that all sessions of a copy share, over all copies.
        private: mean bytes that a session has for itself.
        demand: bytes of all sessions together.
        saved: bytes that sharing spares.
        live: sessions that fit into `free` at once.
        fit: share of `demand` that fits.
        tiers: where it lands, fastest first.
        unplaced: bytes that no tier has room for.
    """

    model: ModelShape
    fleet: Fleet
    load: Load
    kv: str
    token: Fraction
    session: SessionBytes
    copies: int
    gpus_per_copy: int
    idle_gpus: int
    hbm: int
    weights: int
    reserve: Fraction
    staging: int
    free: Fraction
    once: Fraction
    private: Fraction
    demand: Fraction
    saved: Fraction
    live: int
    fit: Fraction
    tiers: tuple[TierUse, ...]
    unplaced: Fraction


def plan(model: ModelShape, fleet: Fleet, load: Load, kv: str = "") -> Plan:
    """Place the sessions of `load` on `fleet`.

    K/V is taken to spread evenly over the GPUs of a copy, with none kept twice; sessions are
    counted by their mean size. Bytes fill the tiers in order, fastest first.

    Args:
        model: the model's shape.
        fleet: where the bytes can be.
        load: the sessions.
        kv: a name in `FORMATS`; "" = the model's usual one.

    Raises:
        InvalidRequest: an unknown format, a context over the model's longest, or weights that don't
            fit.
    """
    kv = expect_format(kv or model.kv)
    for _, tokens in load.mix:
        if model.max_tokens and tokens > model.max_tokens:
            raise InvalidRequest(
                f"a context of {tokens:,} tokens is over the {model.max_tokens:,} of {model.name}"
            )
    weights = model.weight_bytes or 0
    copies, gpus_per_copy = fleet.copies(weights)
    used = copies * gpus_per_copy
    hbm = used * fleet.gpu_bytes
    reserve = hbm * fleet.reserve
    staging = copies * (0 if kv in RAW else model.staging_bytes)
    free = hbm - reserve - copies * weights - staging

    session = session_bytes(model, load, kv)
    prefix = load.mean([_prefix_bytes(model, load.prefix, n, kv) for _, n in load.mix])
    # A longest prefix is kept once, so that the sessions of every kind find theirs in it.
    kept_once = max(_prefix_bytes(model, load.prefix, n, kv) for _, n in load.mix)
    private = session.total - prefix
    once = Fraction(copies * kept_once)
    if load.prompts is not None:
        private -= session.cross
        once += copies * load.prompts * model.cross_bytes
    demand = load.sessions * private + once
    tiers, unplaced = _fill(fleet, free, demand)
    room = max(free - once, Fraction(0))
    live = min(load.sessions, floor(room / private)) if private else load.sessions
    return Plan(
        model=model,
        fleet=fleet,
        load=load,
        kv=kv,
        token=model.token_bytes(kv),
        session=session,
        copies=copies,
        gpus_per_copy=gpus_per_copy,
        idle_gpus=fleet.gpus - used,
        hbm=hbm,
        weights=copies * weights,
        reserve=reserve,
        staging=staging,
        free=free,
        once=once,
        private=private,
        demand=demand,
        saved=load.sessions * session.total - demand,
        live=live,
        fit=min(Fraction(1), max(free, Fraction(0)) / demand),
        tiers=tiers,
        unplaced=unplaced,
    )


def session_bytes(model: ModelShape, load: Load, kv: str) -> SessionBytes:
    """Mean bytes of one session, as if it were alone."""
    codec = FORMATS[expect_format(kv)]
    sizes, snapshots = [], []
    for _, tokens in load.mix:
        kept = [group.kept(tokens, load.past) for group in model.groups]
        blocks = [group.block_bytes(model.block_tokens, codec) for group in model.groups]
        sizes.append(sum(model.blocks(n) * size for n, size in zip(kept, blocks, strict=True)))
        # A state is of use only where all K/V before it is there too: not inside a window.
        reach = min(load.past if group.window else tokens for group in model.groups)
        snapshots.append(reach // model.snapshot_tokens if model.snapshot_tokens else 0)
    count = load.mean(snapshots)
    return SessionBytes(
        tokens=load.mean([tokens for _, tokens in load.mix]),
        kv=load.mean(sizes),
        cross=Fraction(model.cross_bytes),
        state=Fraction(model.state_bytes),
        snapshots=count,
        snapshot_bytes=count * (model.snapshot_bytes or model.state_bytes),
    )


def pool_bytes(model: ModelShape, sessions: int, past: int, kv: str = "") -> int:
    """Bytes of the K/V pool of an engine for so many sessions (`streamgen.engine.Engine`).

    Args:
        model: a shape whose layers all have a window.
        sessions: sessions that it has room for.
        past: tokens of past over all of them.
    """
    load = Load(sessions, [(1, model.window)])
    alone = session_bytes(model, load, kv or model.kv).kv
    more = model.blocks(past) * model.token_bytes(kv) * model.block_tokens
    return int(sessions * alone + more)


def expect_format(name: str) -> str:
    """The name of a format.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in FORMATS:
        raise InvalidRequest(f"K/V format {name!r}: accepted are {', '.join(FORMATS)}")
    return name


def sharing_saves(sessions: int, shared: int, own: int) -> Fraction:
    """Share of memory that one common part of each of `sessions` spares: (n-1) S / n (S + W)."""
    return Fraction((sessions - 1) * shared, sessions * (shared + own))


def _prefix_bytes(model: ModelShape, prefix: int, tokens: int, kv: str) -> int:
    """Bytes of the full blocks of a common prefix; a partly filled last block is everyone's own."""
    return sum(
        group.shared(tokens, prefix)
        // model.block_tokens
        * group.block_bytes(model.block_tokens, FORMATS[kv])
        for group in model.groups
    )


def _fill(fleet: Fleet, free: Fraction, demand: Fraction) -> tuple[tuple[TierUse, ...], Fraction]:
    """Let the demand run down the tiers: what each gets, and what is left over."""
    sizes: list[tuple[str, Fraction | None]] = [
        ("HBM", max(free, Fraction(0))),
        ("DRAM", Fraction(fleet.nodes * fleet.dram)),
        ("NVMe", Fraction(fleet.nodes * fleet.nvme)),
        ("pooled", None if fleet.pooled is None else Fraction(fleet.pooled)),
    ]
    tiers, left = [], demand
    for name, size in sizes:
        used = left if size is None else min(left, size)
        tiers.append(TierUse(name, size, used))
        left -= used
    return tuple(tiers), left


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            kind = "a positive integer" if least else "an integer of 0 or more"
            raise InvalidRequest(f"{name}={value!r}: {kind} is needed")
