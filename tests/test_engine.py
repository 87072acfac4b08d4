"""What sessions share: the world's settings, encoded texts, and one pool."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import tiny_world

from streamgen.cache import SinkWindow
from streamgen.engine import PROMPTS_KEPT, Engine, Stopwatch, WorldConfig
from streamgen.errors import InvalidRequest
from streamgen.pipelines.world import WorldPipeline
from streamgen.sampling.schedule import FewStep


@pytest.fixture
def world() -> WorldPipeline:
    """Window 6, sink 1, chunks of 2 frames."""
    return tiny_world()


@pytest.fixture
def engine(world: WorldPipeline) -> Engine:
    """Its engine."""
    return world.engine


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 2}, r"window=2 .*sink=1 \+ chunk=2"),
        ({"sink": 5}, r"window=6 .*sink=5 \+ chunk=2"),
        ({"sink": 6}, "sink=6, window=6"),
        ({"sink": -1}, "sink=-1"),
        ({"chunk_frames": 6}, r"window=6 .*chunk=6"),
        ({"chunk_frames": 0}, "chunk of 0"),
        ({"positions": "relative"}, "'relative': accepted are 'absolute', 'sliding_sink'"),
    ],
)
def test_settings_are_checked(world: WorldPipeline, changes: dict[str, Any], message: str) -> None:
    """A window that holds no sink and chunk, or an unknown policy: refused with the numbers."""
    with pytest.raises(InvalidRequest, match=message):
        replace(world.config, **changes)


@pytest.mark.parametrize(("positions", "shadow"), [("sliding_sink", True), ("absolute", False)])
def test_policy(world: WorldPipeline, positions: Any, shadow: bool) -> None:
    """Sink and window as they are; a sliding sink has shadows."""
    config = replace(world.config, positions=positions)
    assert config.policy == SinkWindow(1, 6, shadow_sink=shadow)


@pytest.mark.parametrize(
    ("keys", "held"),
    [("", ""), ("w", "w"), ("wa", "wa"), ("ws", ""), ("wsa", "a"), ("adq", "q"), ("wsadqe", "")],
)
def test_action(world: WorldPipeline, keys: str, held: str) -> None:
    """One number a key, in the order of the config; opposites are both 0."""
    expected = [float(key in held) for key in world.config.keys]
    assert world.config.action(frozenset(keys)).tolist() == expected


def test_action_of_an_unknown_key(world: WorldPipeline) -> None:
    """Refused with all that are unknown and all that are known."""
    with pytest.raises(InvalidRequest, match=r"\['x', 'z'\]: accepted are \['w', 's'"):
        world.config.action(frozenset("wxz"))


# What is shared


def test_pool_has_room_for_all_sessions() -> None:
    """A window and a sink for each session, and the past besides; K/V of one frame are a block."""
    for sessions, past in ((1, 0), (3, 10)):
        pool = tiny_world(max_sessions=sessions, history_frames=past).engine.pool
        assert pool.stats().total >= sessions * (6 + 1) + past
        assert pool.spec.block_tokens == 12 and pool.spec.num_layers == 3


def test_prompts_are_keyed_by_their_text(engine: Engine) -> None:
    """The same text is encoded once; another one is another."""
    one = engine.prompt("a maze")
    assert engine.prompt("a maze") is one
    other = engine.prompt("snow")
    assert not torch.equal(one.layers[0][0], other.layers[0][0])
    assert one.nbytes == 3 * 2 * 6 * 48 * 4


def test_prompts_kept_are_bounded(engine: Engine) -> None:
    """The least recently used text goes; one in use is encoded again to the same."""
    first = engine.prompt("a maze")
    for i in range(PROMPTS_KEPT - 1):
        engine.prompt("snow " * (i % 5) + "x" * i)
    assert engine.prompt("a maze") is first  # used again, so it stays
    engine.prompt("night")
    assert engine.prompt("a maze") is first
    for i in range(PROMPTS_KEPT):
        engine.prompt("day " * (i % 5) + "y" * i)
    again = engine.prompt("a maze")
    assert again is not first
    assert all(torch.equal(a, b) for a, b in zip(again.layers[2], first.layers[2], strict=True))


def test_an_overlong_prompt_is_not_kept(engine: Engine) -> None:
    """It is refused every time."""
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="up to 6"):
            engine.prompt("a a a a a a a")


# Passes


def noise_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_denoise(engine: Engine) -> None:
    """As many passes as the schedule says, noise for each, and latents of the chunk's shape."""
    table, drawn, actions = engine.table(), [], torch.zeros(2, 6)

    def draw(shape: tuple[int, ...]) -> Tensor:
        drawn.append(tuple(shape))
        return noise_of(tuple(shape))

    with table.chunk(2) as chunk:
        history = engine.history(chunk)
        prompt = engine.prompt("snow")
        schedule = FewStep((1000, 600, 300))
        latents = engine.denoise(history, prompt, actions, draw, schedule)
        assert latents.shape == (2, 4, 8, 12) and latents.dtype == torch.float32
        assert drawn == [(1, 2, 4, 8, 12)] * 3
        again = engine.denoise(history, prompt, actions, noise_of, schedule)
        assert torch.equal(latents, again)


def test_store_is_the_clean_pass(engine: Engine) -> None:
    """It writes what a full pass at the context noise writes, whatever was there before."""
    latents, actions = noise_of((2, 4, 8, 12)), torch.eye(6)[:2]
    engine.config = replace(engine.config, context_noise=30.0)
    tables = [engine.table(), engine.table()]
    prompt = engine.prompt("snow")
    with tables[0].chunk(2) as chunk:
        history = engine.history(chunk)
        engine.denoise(history, prompt, actions, noise_of, FewStep((1000,)))
        engine.store(latents, history, prompt, actions)
        chunk.commit()
    with tables[1].chunk(2) as chunk, torch.inference_mode():
        engine.dit(
            latents.transpose(0, 1)[None],
            torch.full((1, 2), 30.0),
            engine.history(chunk),
            prompt,
            actions[None],
        )
        chunk.commit()
    for side in (engine.pool.k, engine.pool.v):
        for layer in side:
            ours, theirs = ([layer[b.slot] for _, b in table.entries] for table in tables)
            assert all(map(torch.equal, ours, theirs))


def test_step_of_several_sessions(world: WorldPipeline) -> None:
    """One chunk of each, in order: what each makes alone."""
    sessions = [world.session(seed=seed) for seed in (1, 2, 3)]
    alone = [world.session(seed=seed) for seed in (1, 2, 3)]
    for _ in range(3):
        chunks = world.engine.step(sessions)
        for chunk, session in zip(chunks, alone, strict=True):
            assert (chunk.frames == session.step().frames).all()


def test_sessions_in_threads(world: WorldPipeline) -> None:
    """Sessions stepped by threads of their own, prompts and keys included, do not meet."""
    made: dict[int, np.ndarray] = {}

    def live(seed: int, into: WorldPipeline) -> np.ndarray:
        session = into.session(seed=seed)
        frames = []
        for index in range(8):
            session.act(keys={"wasdqe"[(seed + index) % 6]})
            if index == 4:
                session.prompt(("snow", "day", "night")[seed], recache="window_causal")
            frames.append(session.step().frames)
        return np.concatenate(frames)

    threads = [
        threading.Thread(target=lambda seed=seed: made.update({seed: live(seed, world)}))
        for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert (made[seed] == live(seed, tiny_world())).all()
    world.engine.pool.check()


def test_stopwatch() -> None:
    """Milliseconds add up under their name."""
    watch = Stopwatch(torch.device("cpu"))
    with watch("a"):
        pass
    once = watch.ms["a"]
    with watch("a"):
        pass
    with watch("b"):
        pass
    assert watch.ms["a"] > once >= 0 and set(watch.ms) == {"a", "b"}


def test_world_without_keys() -> None:
    """A world that takes no actions steps too."""
    engine = tiny_world().engine
    assert isinstance(engine.config, WorldConfig)
    with pytest.raises(InvalidRequest, match="unknown keys"):
        replace(engine.config, keys=(), opposites=()).action(frozenset("w"))
