"""`streamgen plan`: what it reads and prints, and a real world's bytes against its forecast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import tiny_pictures
from torch import Tensor
from videos import tiny_video
from worlds import tiny_world

from streamgen.apps.plan import parse_bytes, parse_gpu, parse_tokens, read_shape, run_plan
from streamgen.cache.planner import Fleet, Load, ModelShape, Plan, plan, pool_bytes
from streamgen.cache.shapes import MODELS, from_world
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest, StreamgenError, UnknownModel, WeightsError
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Session
from streamgen.weights import registry

# Units


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("59000", 59_000),
        ("59_000", 59_000),
        ("59k", 59_000),
        ("59Ki", 60_416),
        ("2.5k", 2500),
        ("1M", 10**6),
        ("1Mi", 2**20),
        ("21f", 21 * 1560),
    ],
)
def test_tokens(text: str, tokens: int) -> None:
    """k is 1,000, Ki is 1,024, f is latent frames."""
    assert parse_tokens(text, 1560) == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5 TB", 15 * 10**11),
        ("2TiB", 2**41),
        ("500MB", 5 * 10**8),
        ("3kB", 3000),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_bytes(text: str, size: int) -> None:
    """GB is 10^9, GiB is 2^30."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["59K", "59m", "59G", "k", "", "-1", "1e3", "1.5", "21f", "٣", "9" * 5000]
)
def test_tokens_that_could_mean_anything(text: str) -> None:
    """A unit that has two meanings, half a token or no number is refused, with what is accepted."""
    with pytest.raises(InvalidRequest, match=r"accepted are .*59k \(59,000\), 59Ki \(60,416\)"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["80G", "80Gi", "80gb", "80 KB", "GB", "0.5B"])
def test_bytes_that_could_mean_anything(text: str) -> None:
    """So are sizes."""
    with pytest.raises(InvalidRequest, match=r"80GB \(10\^9 bytes\), 80GiB \(2\^30\)"):
        parse_bytes(text)


def test_gpus() -> None:
    """By name, by size, or this machine's memory."""
    assert parse_gpu("h200") == 141 * 10**9 and parse_gpu("24GiB") == 24 * 2**30
    assert parse_gpu("cpu") > 2**28
    with pytest.raises(InvalidRequest, match="'h300': known are h100-80, h200"):
        parse_gpu("h300")


# What is printed


def test_planner_example(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek R1 on 4 nodes of 8 x 80 GB: 451 of 1,000 sessions, all of it on one screen."""
    found = run_plan(
        "deepseek-r1",
        "h100-80",
        sessions=1000,
        context="50:16Ki,30:64Ki,20:160Ki",
        kv="usual",
        nodes=4,
        gpus_per_node=8,
        dram="1TB",
    )
    text = capsys.readouterr().out
    assert found.live == 451
    for piece in ("60,620.8 tokens", "2.130 GB", "1.984 GiB", "962.0 GB", "45.2 %", "1.168 TB"):
        assert piece in text
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_longest_table_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line that there can be, in 24 lines of 80 characters."""
    run_plan(
        "wan2.1-14b",
        "h200",
        sessions=100_000,
        context="1:18f,2:9f",
        gpus_per_node=8,
        gpus_per_copy=3,
        dram="1TB",
        nvme="30TB",
        pooled="10TB",
        prompts=3,
        share_prefix="3f",
        past="12f",
        snapshot_every="3f",
        kv="nvfp4",
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for piece in ("snapshots", "cross-attention", "saved by sharing", "NVMe", "pooled", "no place"):
        assert any(piece in line for line in lines), piece
    assert any("2 idle" in line for line in lines)


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes in bytes, names that say so."""
    found = run_plan(
        "llama-3.1-8b", "h200", 1000, "59k", kv="fp8", pooled="unlimited", as_json=True
    )
    raw = json.loads(capsys.readouterr().out)
    assert raw["sessions_in_hbm"] == found.live
    assert raw["session"]["kv_bytes"] == found.session.kv
    assert raw["mix"] == [{"share": 1, "tokens": 59_000}]
    assert raw["fleet"]["gpu_bytes"] == 141 * 10**9
    assert sum(tier["used_bytes"] for tier in raw["tiers"]) == raw["demand_bytes"]
    assert raw["tiers"][3] == {
        "name": "pooled",
        "capacity_bytes": None,
        "used_bytes": raw["demand_bytes"] - raw["tiers"][0]["used_bytes"],
    }


def test_fp8_halves_and_sharing_spares(capsys: pytest.CaptureFixture[str]) -> None:
    """Half the bytes, twice the sessions, but for the scales; a shared prefix fits more of them."""

    def live(**options: Any) -> Plan:
        return run_plan("llama-3.1-8b", "h200", 1000, "59k", **options)

    raw, fp8 = live(), live(kv="fp8")
    assert fp8.session.kv / raw.session.kv == pytest.approx(0.5, rel=0.002)
    assert fp8.live in (2 * raw.live, 2 * raw.live + 1)
    shared = live(kv="fp8", share_prefix="16Ki")
    assert shared.saved == 999 * 1024 * 16 * raw.model.token_bytes("fp8")
    assert shared.live > fp8.live
    assert "saved by sharing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nothing"}, "no model 'nothing': known are opt-13b, .*pocket-world"),
        ({"gpu": "h300"}, "gpu 'h300'"),
        ({"sessions": 0}, "sessions=0"),
        ({"context": None}, "--context is needed"),
        ({"context": "59K"}, "'59K'"),
        ({"context": "x:59k"}, "a mix is share:tokens"),
        ({"context": "0:59k"}, "share=0"),
        ({"context": "200k"}, "200,000 tokens is over the 131,072"),
        ({"kv": "fp7"}, "'fp7': accepted are fp32"),
        ({"nodes": 0}, "nodes=0"),
        ({"reserve": 100}, "--reserve 100: accepted are 0 and up to 100"),
        ({"reserve": float("nan")}, "--reserve nan"),
        ({"dram": "1T"}, "'1T'"),
        ({"past": "1k"}, "--past: llama-3.1-8b has no window"),
        ({"snapshot_every": "768"}, "--snapshot-every: llama-3.1-8b has no state"),
        ({"prompts": 3}, "--prompts: llama-3.1-8b has no cross-attention"),
        ({"weights": "1TB"}, "1000.0 GB. needs 8 GPUs of 141 GB"),
        ({"share_prefix": "60k"}, "prefix of 60,000 tokens is longer"),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    """One line that says what is wrong; an option without an effect is wrong too."""
    line = {"model": "llama-3.1-8b", "gpu": "h200", "sessions": 10, "context": "59k", **options}
    with pytest.raises(StreamgenError, match=message) as caught:
        run_plan(**line)
    assert "\n" not in str(caught.value)


# Configs


def test_shape_from_a_folder(tmp_path: Path) -> None:
    """A `config.json` of transformers, alone or in its folder; weights are the files beside it."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    assert shape == read_shape(str(tmp_path / "config.json"))
    assert shape.token_bytes("bf16") == 2 * 2 * 2 * 16 * 2 and shape.weight_bytes is None
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(700))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(300))
    assert read_shape(str(tmp_path)).weight_bytes == 1000


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "world"}', "{}"])
def test_configs_of_something_else(tmp_path: Path, text: str) -> None:
    """Damaged, or of no model that is known: an error that names the file or the field."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((WeightsError, InvalidRequest), match=r"config"):
        read_shape(str(tmp_path))


def test_names_are_found_in_any_case() -> None:
    """A table's name is a name, however it is written; a hub id is none and is not fetched."""
    assert read_shape("DeepSeek-R1") is MODELS["deepseek-r1"]
    with pytest.raises(UnknownModel, match="or name a config.json"):
        read_shape("someone/something")


# Forecast and measurement


def tensors(*things: object) -> Iterator[Tensor]:
    """Every tensor inside."""
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, (tuple, list)):
            yield from tensors(*thing)


def held(*things: object) -> int:
    """Bytes of the storages behind all tensors, each counted once."""
    storages = [x.untyped_storage() for x in tensors(*things)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def state_bytes(sessions: list[Session]) -> int:
    """What sessions hold besides K/V and texts: at their moment and at every one they can go to."""
    states = [s._state for s in sessions] + [m._state for s in sessions for m in s._past]
    return held(*((x.latents, x.actions, x.rng, x.decoder) for x in states))


def measure(world: WorldPipeline, sessions: list[Session]) -> dict[str, int]:
    """Bytes of a world that is running, by what they hold."""
    engine = world.engine
    modules = (engine.dit, engine.text, engine.codec)
    return {
        "weights": held(*(list(m.parameters()) + list(m.buffers()) for m in modules)),
        "kv": held(engine.pool.parts),
        "staging": engine.pool.stats().staging,
        "cross": sum(prompt.nbytes for prompt in engine._prompts.values()),
        "state": state_bytes(sessions),
    }


def check(
    world: WorldPipeline, shape: ModelShape, kv: str, sessions: int, past_frames: int
) -> None:
    """Walk until every history is full, then compare each part and the sum."""
    config, frame = world.config, shape.frame_tokens
    walks = [
        world.session(
            seed=i, prompt=config.suggestions[i], history_seconds=past_frames / config.fps
        )
        for i in range(sessions)
    ]
    for session in walks:
        for _ in range((config.window + past_frames) // config.chunk_frames + 2):
            session.step()
    found = plan(
        shape,
        Fleet("cpu", 2**35),
        Load(sessions, [(1, shape.window)], past=past_frames * frame, prompts=sessions),
        kv,
    )
    measured = measure(world, walks)
    alone = found.session
    forecast = {
        "weights": found.weights,
        "kv": sessions * alone.kv,
        "staging": found.staging,
        "cross": sessions * alone.cross,
        "state": sessions * (alone.state + alone.snapshot_bytes),
    }
    assert (
        measured["kv"]
        == forecast["kv"]
        == pool_bytes(shape, sessions, sessions * past_frames * frame, kv)
    )
    assert measured["cross"] == forecast["cross"]
    assert measured["staging"] == forecast["staging"]
    assert measured["weights"] == pytest.approx(forecast["weights"], rel=0.02)
    assert measured["state"] == pytest.approx(int(forecast["state"]), rel=0.1)
    total = sum(measured.values())
    assert float(found.weights + found.staging + found.demand) == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(
    ("kv", "positions"),
    [("fp32", "sliding_sink"), ("fp8", "sliding_sink"), ("int8", "absolute")],
)
def test_tiny_world_is_forecast(kv: str, positions: str) -> None:
    """Pool, texts, states and weights of a world in memory, with two sessions and their pasts."""
    world = tiny_world(sink=3, window=6, positions=positions)
    old = world.engine
    codec = "raw" if kv == "fp32" else kv
    engine = Engine(old.dit, old.text, old.codec, world.config, 2, 2 * 12, codec)
    config = {"world": asdict(world.config), "transformer": asdict(old.dit.config)}
    modules = (old.dit, old.text, old.codec)
    parameters = sum(x.numel() for m in modules for x in m.parameters())
    shape = from_world("tiny", json.loads(json.dumps(config)), parameters, raw_bytes=4)
    check(WorldPipeline(engine), shape, kv, sessions=2, past_frames=12)


@pytest.mark.parametrize(("dtype", "kv"), [("float32", "raw"), ("bfloat16", "fp8")])
def test_pocket_world_is_forecast(dtype: str, kv: str) -> None:
    """The packaged world's bytes are within 2 % of what its config.json and file headers say."""
    world = WorldPipeline.from_pretrained(
        "pocket-world", device="cpu", dtype=dtype, kv=kv, max_sessions=1, history_seconds=0.4
    )
    shape = read_shape("pocket-world", getattr(torch, dtype).itemsize)
    check(world, shape, shape.kv if kv == "raw" else kv, sessions=1, past_frames=8)


# Packaged videos and pictures


def test_a_video_is_a_world_without_keys(tmp_path: Path) -> None:
    """Its window, its grid and its weights are those of the engine."""
    pipe = tiny_video(temporal=False, sink=1, window=6)
    pipe.save_pretrained(tmp_path / "video")
    shape, engine = read_shape(str(tmp_path / "video")), pipe.engine
    tokens = engine.grid[0] * engine.grid[1]
    assert (shape.name, shape.frame_tokens, shape.window) == ("video", tokens, 6 * tokens)
    parts = (engine.dit, engine.text, engine.codec)
    stored = sum(p.numel() for part in parts for p in part.parameters())
    assert shape.weight_bytes == 2 * stored
    assert shape.token_bytes() * tokens * 2 == engine.pool.payload_bytes  # float32 there


def test_a_picture_is_a_session_of_all_scales_but_the_last(tmp_path: Path) -> None:
    """Both branches of guidance: what the pipeline's own pool takes for one picture."""
    pipe = tiny_pictures()
    pipe.save_pretrained(tmp_path / "image")
    registry.write_manifest(
        tmp_path / "image", name="image", kind="image", version="1", licence="Apache-2.0"
    )
    shape = read_shape(str(tmp_path / "image"))
    assert shape.window == shape.block_tokens == 1 + 4 + 9
    assert shape.token_bytes("fp32") * shape.window == 2 * pipe._pool(2).payload_bytes
    stored = sum(p.numel() for part in (pipe.var, pipe.vae) for p in part.parameters())
    assert shape.weight_bytes == 2 * stored
