"""Training and run time are one computation: two streams in one pass, or chunks through a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worlds import tiny_world

from streamgen.apps.pocket.forcing import PromptPerFrame, TwoStreams
from streamgen.models.rope import rotation
from streamgen.pipelines.world import WorldPipeline

FRAMES, CHUNK = 8, 2


class Clip:
    """Random clean and noisy latents, levels and keys of one clip, and its two texts."""

    def __init__(self, world: WorldPipeline, switch: int = FRAMES, recached: int = 0) -> None:
        torch.manual_seed(3)
        config, dit = world.config, world.engine.dit
        shape = (FRAMES, dit.config.in_channels, *config.latent_hw)
        self.clean, self.noisy = torch.randn(shape), torch.randn(shape)
        self.t = (1000 * torch.rand(FRAMES // CHUNK)).repeat_interleave(CHUNK)
        self.keys = (torch.rand(FRAMES, len(config.keys)) > 0.5).float()
        self.texts = ["brick maze", "heavy snow at night"]
        self.switch, self.recached = switch, recached


@torch.inference_mode()
def teacher_forced(world: WorldPipeline, clip: Clip) -> Tensor:
    """Predictions of all chunks in the one pass of training, [F, C, Y, X]."""
    dit, text = world.engine.dit, world.engine.text
    grid = world.engine.grid
    tokens = grid[0] * grid[1]
    turn = rotation(range(FRAMES), grid, dit.config.head_dim)
    frame = torch.arange(FRAMES)
    which = torch.cat([frame >= clip.switch - clip.recached, frame >= clip.switch]).long()
    prompt = PromptPerFrame(dit.encode_prompt(text(clip.texts)), which[None], tokens)
    x = torch.cat([clip.clean, clip.noisy]).transpose(0, 1)[None]
    t = torch.cat([torch.zeros(FRAMES), clip.t])[None]
    keys = torch.cat([clip.keys, clip.keys])[None]
    history = TwoStreams(turn, CHUNK * tokens, torch.float32)
    return dit(x, t, history, prompt, keys)[0, :, FRAMES:].transpose(0, 1)


@torch.inference_mode()
def cached(world: WorldPipeline, clip: Clip) -> Tensor:
    """Predictions chunk by chunk: denoise against the cache, then commit the clean chunk."""
    engine, table, out = world.engine, world.engine.table(), []
    old, new = (engine.prompt(text) for text in clip.texts)
    for first in range(0, FRAMES, CHUNK):
        part, before = slice(first, first + CHUNK), slice(first - CHUNK, first)
        prompt = new if first >= clip.switch else old
        if first == clip.switch and clip.recached:
            with table.reopen(CHUNK) as pending:
                history = engine.history(pending)
                engine.store(clip.clean[before], history, prompt, clip.keys[before])
                pending.commit()
        with table.chunk(CHUNK) as pending:
            history = engine.history(pending)
            x = clip.noisy[part].transpose(0, 1)[None]
            keys = clip.keys[None, part]
            out.append(engine.dit(x, clip.t[None, part], history, prompt, keys)[0].transpose(0, 1))
            engine.store(clip.clean[part], history, prompt, clip.keys[part])
            pending.commit()
    table.close()
    return torch.cat(out)


@pytest.mark.parametrize("positions", ["absolute", "sliding_sink"])
@pytest.mark.parametrize(("switch", "recached"), [(FRAMES, 0), (4, 0), (4, CHUNK)])
def test_training_equals_run_time(positions: str, switch: int, recached: int) -> None:
    """Every chunk of a teacher-forced pass is what the cache gives; a switch, with ReCache of the
    last chunk and without, included."""
    world = tiny_world(window=FRAMES, positions=positions)
    clip = Clip(world, switch, recached)
    torch.testing.assert_close(teacher_forced(world, clip), cached(world, clip), atol=1e-4, rtol=0)


def test_a_noisy_chunk_sees_no_future() -> None:
    """Changing a clean chunk changes later predictions, and neither earlier ones nor its own."""
    world = tiny_world(window=FRAMES)
    clip = Clip(world)
    before = teacher_forced(world, clip)
    clip.clean[4:6] += 1
    moved = (teacher_forced(world, clip) - before).abs().amax(dim=(1, 2, 3)) > 1e-6
    assert moved.tolist() == [False] * 6 + [True] * 2


def test_noisy_chunks_do_not_meet() -> None:
    """Changing a noisy chunk changes its own prediction and no other."""
    world = tiny_world(window=FRAMES)
    clip = Clip(world)
    before = teacher_forced(world, clip)
    clip.noisy[2:4] += 1
    moved = (teacher_forced(world, clip) - before).abs().amax(dim=(1, 2, 3)) > 1e-6
    assert moved.tolist() == [False, False, True, True, False, False, False, False]
