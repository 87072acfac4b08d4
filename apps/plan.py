"""How much memory do sessions need, how many fit, and where does the rest go: `streamgen plan`.

Sizes are read and printed without ambiguity: GB is 10^9 bytes and GiB 2^30; 59k tokens are 59,000
and 59Ki are 60,416; 21f are 21 latent frames. The arithmetic is `streamgen.cache.planner`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from streamgen.cache.planner import Fleet, LayerGroup, Load, ModelShape, Plan, expect_format, plan
from streamgen.cache.scales import block_tokens
from streamgen.cache.shapes import GPUS, MODELS, from_hf, from_world
from streamgen.errors import InvalidRequest, UnknownModel, WeightsError
from streamgen.weights import registry

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_TOKENS = {
    key: size for key, size in (_DECIMAL | _BINARY).items() if key[:1] in ("", "k", "K", "M")
}
_BYTES = {f"{key}B": size for key, size in (_DECIMAL | _BINARY).items() if key != "k"} | {
    "kB": 1000,
    "": 1,
}


def run_plan(
    model: str,
    gpu: str,
    sessions: int,
    context: str | None = None,
    kv: str = "raw",
    nodes: int = 1,
    gpus_per_node: int = 1,
    gpus_per_copy: int = 0,
    reserve: float = 10.0,
    dram: str = "0",
    nvme: str = "0",
    pooled: str = "0",
    share_prefix: str = "0",
    prompts: int | None = None,
    past: str = "0",
    snapshot_every: str | None = None,
    weights: str | None = None,
    as_json: bool = False,
) -> Plan:
    """Plan, print the table or the JSON, and return the plan.

    Args:
        model: a name of the table, a packaged model, or a `config.json` (or the folder of one).
        gpu: a name of the table, "cpu", or the memory of one such as "96GB" or "96GiB".
        sessions: sessions to hold at once.
        context: tokens of a session, or a mix such as "50:16Ki,30:64Ki,20:160Ki" (shares and
            tokens); None = what a session with a window keeps for ever.
        kv: "raw" (the model's compute dtype), "usual" (as the model is mostly served), or a name
            in `streamgen.cache.planner.FORMATS`.
        nodes, gpus_per_node, gpus_per_copy: see `Fleet`.
        reserve: per cent of GPU memory that is left to activations.
        dram, nvme: bytes of a node for what does not fit, such as "1TB".
        pooled: bytes of a store that all nodes reach, or "unlimited".
        share_prefix: tokens that all sessions begin with.
        prompts: different texts in cross-attention; None = one a session.
        past: tokens or frames behind the window that a session can go back to.
        snapshot_every: tokens or frames between two copies of the state; None = the model's own.
        weights: bytes of one copy; None = as the table or the files say.
        as_json: print JSON.

    Raises:
        InvalidRequest: a value is not accepted.
        UnknownModel: no such model.
        WeightsError: a config that can't be read.
    """
    shape = read_shape(model, raw_bytes=4 if kv == "fp32" else 2)
    if weights is not None:
        shape = replace(shape, weight_bytes=parse_bytes(weights))
    if snapshot_every is not None:
        shape = replace(shape, snapshot_tokens=parse_tokens(snapshot_every, shape.frame_tokens))
        if not shape.state_bytes:
            raise InvalidRequest(f"--snapshot-every: {shape.name} has no state to copy")
    if not 0 <= reserve < 100:
        raise InvalidRequest(f"--reserve {reserve:g}: accepted are 0 and up to 100 per cent")
    tokens = parse_tokens(past, shape.frame_tokens)
    if tokens and not any(group.window for group in shape.groups):
        raise InvalidRequest(f"--past: {shape.name} has no window and forgets nothing")
    if prompts is not None and not shape.cross_tokens:
        raise InvalidRequest(f"--prompts: {shape.name} has no cross-attention")
    fleet = Fleet(
        gpu=gpu,
        gpu_bytes=parse_gpu(gpu),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpus_per_copy=gpus_per_copy,
        reserve=Fraction(str(reserve)) / 100,
        dram=parse_bytes(dram),
        nvme=parse_bytes(nvme),
        pooled=None if pooled == "unlimited" else parse_bytes(pooled),
    )
    load = Load(
        sessions=sessions,
        mix=_mix(context, shape),
        prefix=parse_tokens(share_prefix, shape.frame_tokens),
        prompts=prompts,
        past=tokens,
    )
    raw = "fp32" if shape.raw_bytes == 4 else "bf16"
    name = {"raw": raw, "usual": shape.kv}.get(kv, kv)
    found = plan(shape, fleet, load, expect_format(name))
    print(json.dumps(as_dict(found), indent=1) if as_json else table(found))
    return found


def read_shape(model: str, raw_bytes: int = 2) -> ModelShape:
    """The shape of a model by name, or from a `config.json`.

    Args:
        model: a name of the table, a packaged model, a `config.json`, or its folder.
        raw_bytes: of a value in the dtype that a world runs in.

    Raises:
        UnknownModel: none of these.
        WeightsError: the file can't be read.
        InvalidRequest: it is a config of something else.
    """
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    path = Path(model).expanduser()
    if model in registry.packaged_names():
        path = registry.resolve(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        known = ", ".join((*MODELS, *registry.packaged_names()))
        raise UnknownModel(
            f"no model {model!r}: known are {known}; or name a config.json or the folder of one"
        )
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: can't be read as a config ({error})") from error
    files = sorted(path.parent.rglob("*.safetensors"))
    kind = config.get("kind")
    if kind == "image":
        return _image_shape(path.parent, raw_bytes)
    if kind in ("world", "video"):
        parts = [file for file in files if file.parent.name in (path.parent.name, "vae")]
        parameters = sum(_parameters(file) for file in parts) if parts else None
        # A video is a world without keys.
        config = {**config, "world": config.get(kind)}
        return from_world(path.parent.name, config, parameters, raw_bytes)
    stored = sum(file.stat().st_size for file in files)
    return from_hf(str(config.get("_name_or_path") or path.parent.name), config, stored or None)


def _image_shape(folder: Path, raw_bytes: int) -> ModelShape:
    """A picture in the making is a session, all scales but the last its tokens; guidance draws two,
    so the K/V heads count twice."""
    from streamgen.pipelines.next_scale import NextScalePipeline

    pipe = NextScalePipeline.from_pretrained(folder, device="cpu")
    shape = pipe.var.config
    tokens = block_tokens(shape.patch_nums, store_last=False)
    parameters = sum(p.numel() for part in (pipe.var, pipe.vae) for p in part.parameters())
    group = LayerGroup(shape.depth, 2 * shape.heads, shape.head_dim, window=tokens)
    return ModelShape(
        folder.name,
        (group,),
        parameters * raw_bytes,
        kv="bf16" if raw_bytes == 2 else "fp32",
        raw_bytes=raw_bytes,
        block_tokens=tokens,
        max_tokens=tokens,
    )


def parse_bytes(text: str) -> int:
    """Bytes of "80GB" (10^9), "80GiB" (2^30), "500000000", ...

    Raises:
        InvalidRequest: no number, or a unit that could mean either.
    """
    return _parse(text, _BYTES, "a size such as 80GB (10^9 bytes), 80GiB (2^30) or plain bytes")


def parse_tokens(text: str, frame_tokens: int = 0) -> int:
    """Tokens of "59000", "59k" (59,000), "59Ki" (60,416), or "21f" (latent frames).

    Raises:
        InvalidRequest: no number, a unit that could mean either, or frames of a text model.
    """
    units = _TOKENS | ({"f": frame_tokens} if frame_tokens else {})
    frames = ", 21f (21 latent frames)" if frame_tokens else ""
    return _parse(text, units, f"tokens such as 59000, 59k (59,000), 59Ki (60,416){frames}")


def parse_gpu(text: str) -> int:
    """Bytes of a GPU by name, of this machine's memory for "cpu", or of a size.

    Raises:
        InvalidRequest: neither a known name nor a size.
    """
    if text == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if text in GPUS:
        return GPUS[text]
    try:
        return parse_bytes(text)
    except InvalidRequest:
        raise InvalidRequest(
            f"gpu {text!r}: known are {', '.join(GPUS)}, cpu; or a size such as 96GB or 96GiB"
        ) from None


def as_dict(found: Plan) -> dict[str, Any]:
    """The plan as JSON: sizes in bytes, fractions as floats."""
    session, fleet, load = found.session, found.fleet, found.load
    return {
        "model": found.model.name,
        "kv": found.kv,
        "token_bytes": _number(found.token),
        "session": {
            "tokens": _number(session.tokens),
            "kv_bytes": _number(session.kv),
            "cross_attention_bytes": _number(session.cross),
            "state_bytes": _number(session.state),
            "snapshots": _number(session.snapshots),
            "snapshot_bytes": _number(session.snapshot_bytes),
            "bytes": _number(session.total),
        },
        "fleet": {
            "gpu": fleet.gpu,
            "gpu_bytes": fleet.gpu_bytes,
            "nodes": fleet.nodes,
            "gpus_per_node": fleet.gpus_per_node,
            "gpus_per_copy": found.gpus_per_copy,
            "copies": found.copies,
            "idle_gpus": found.idle_gpus,
            "hbm_bytes": found.hbm,
            "weight_bytes": found.weights if found.model.weight_bytes is not None else None,
            "reserve_bytes": _number(found.reserve),
            "staging_bytes": found.staging,
            "free_bytes": _number(found.free),
        },
        "sessions": load.sessions,
        "mix": [{"share": share, "tokens": tokens} for share, tokens in load.mix],
        "demand_bytes": _number(found.demand),
        "shared_once_bytes": _number(found.once),
        "saved_by_sharing_bytes": _number(found.saved),
        "sessions_in_hbm": found.live,
        "share_in_hbm": float(found.fit),
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": None if tier.capacity is None else _number(tier.capacity),
                "used_bytes": _number(tier.used),
            }
            for tier in found.tiers
        ],
        "unplaced_bytes": _number(found.unplaced),
    }


def table(found: Plan) -> str:
    """The plan as text, on one screen."""
    fleet = found.fleet
    head = f"{found.model.name}, K/V in {found.kv}, on "
    head += f"{fleet.nodes} x {fleet.gpus_per_node} {fleet.gpu} ({_size(fleet.gpu_bytes)} each)"
    units = "GB = 10^9 bytes, GiB = 2^30; K/V spreads evenly over a copy's GPUs"
    return "\n".join(
        [head, units, *_session_lines(found), *_fleet_lines(found), *_tier_lines(found)]
    )


def _session_lines(found: Plan) -> Iterator[str]:
    session, model = found.session, found.model
    mean = " on average" if len(found.load.mix) > 1 else ""
    past = f" and {found.load.past:,} of past" if found.load.past else ""
    yield f"one session: {_round(session.tokens)} tokens{mean}{past}"
    yield f"  {'a token':36}{_round(found.token):>14} B"
    yield _line("keys and values", session.kv, f"blocks of {model.block_tokens:,} tokens")
    if session.cross:
        yield _line("cross-attention", session.cross, f"{model.cross_tokens} rows of text")
    if session.state:
        yield _line("state", session.state)
    if session.snapshots:
        yield _line(f"{_round(session.snapshots)} snapshots of the state", session.snapshot_bytes)
    yield _line("together", session.total)


def _fleet_lines(found: Plan) -> Iterator[str]:
    fleet, known = found.fleet, found.model.weight_bytes is not None
    idle = f", {found.idle_gpus} idle" if found.idle_gpus else ""
    copies = "1 copy" if found.copies == 1 else f"{found.copies} copies"
    gpus = "1 GPU" if found.gpus_per_copy == 1 else f"{found.gpus_per_copy} GPUs"
    yield f"GPU memory: {copies} of the weights, {gpus} each{idle}"
    yield _line("all", found.hbm)
    yield _line("weights", found.weights, "" if known else "not known: see --weights")
    yield _line(f"reserve, {float(100 * fleet.reserve):g} %", found.reserve)
    if found.staging:
        yield _line("buffers to decode into", found.staging)
    yield _line("left for sessions", found.free)


def _tier_lines(found: Plan) -> Iterator[str]:
    sessions = found.load.sessions
    yield f"{sessions:,} sessions: {found.live:,} fit into GPU memory at once"
    yield _line("they need", found.demand)
    if found.saved:
        share = found.saved / (found.saved + found.demand)
        yield _line("saved by sharing", found.saved, f"{float(100 * share):.1f} %")
    for tier in found.tiers:
        if tier.capacity == 0:
            continue
        size = "no limit" if tier.capacity is None else f"of {_size(tier.capacity)}"
        yield _line(f"in {tier.name}", tier.used, f"{_share(tier.used, found.demand)}, {size}")
    if found.unplaced:
        yield _line("with no place", found.unplaced, _share(found.unplaced, found.demand))


def _mix(context: str | None, shape: ModelShape) -> list[tuple[int, int]]:
    if context is None:
        if not shape.window:
            raise InvalidRequest(
                f"--context is needed: {shape.name} keeps all of it, such as 59000, 59k (59,000) "
                "or 59Ki (60,416)"
            )
        return [(1, shape.window)]
    kinds = []
    for part in context.split(","):
        share, _, tokens = part.rpartition(":")
        if share and not share.strip().isdecimal():
            raise InvalidRequest(
                f"context {context!r}: a mix is share:tokens, such as 50:16Ki,30:64Ki,20:160Ki"
            )
        kinds.append((int(share or 1), parse_tokens(tokens, shape.frame_tokens)))
    return kinds


def _parse(text: str, units: dict[str, int], accepted: str) -> int:
    match = re.fullmatch(
        r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text.strip().replace("_", "")
    )
    if match and match[2] in units:
        value = Fraction(match[1]) * units[match[2]]
        if value.denominator == 1:
            return int(value)
    raise InvalidRequest(f"{text!r}: accepted are {accepted}")


def _parameters(path: Path) -> int:
    """Values of all tensors of a safetensors file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(key).get_shape() for key in file.keys()]
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: can't be read as weights ({error})") from error
    total = 0
    for shape in shapes:
        count = 1
        for n in shape:
            count *= n
        total += count
    return total


def _line(label: str, size: Fraction | int, note: str = "") -> str:
    return f"  {label:28}{_size(size):>12}{_size(size, binary=True):>13}  {note}".rstrip()


def _size(size: Fraction | int, binary: bool = False) -> str:
    """Four figures and a unit: "2.130 GB", or "1.984 GiB"."""
    units, step = (_BINARY, 1024) if binary else (_DECIMAL, 1000)
    value, names = float(size), list(units)
    while abs(value) >= step and len(names) > 1:
        value /= step
        names.pop(0)
    digits = max(0, 3 - len(str(int(abs(value)))) + 1) if names[0] else 0
    return f"{value:.{digits}f} {names[0]}B"


def _share(part: Fraction, whole: Fraction) -> str:
    return f"{float(100 * part / whole):.1f} %"


def _round(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.1f}"


def _number(value: Fraction | int) -> int | float:
    return int(value) if Fraction(value).denominator == 1 else float(value)
