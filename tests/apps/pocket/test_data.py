"""Training clips: what is cut out of the encoded walks, and what it is called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

from streamgen.apps.pocket.data import GROUP, HELD_OUT, SINK_REACH, Clip, Clips, encode_group
from streamgen.apps.pocket.maze import HEIGHT, KEYS, THEMES, WALLS, WIDTH
from streamgen.apps.pocket.prompts import THEME_WORDS, WALL_WORDS

WALKS, FRAMES, CHUNK = HELD_OUT + 24, 80, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoded walks whose latents say where they come from: channels (walk, theme, frame)."""
    folder = tmp_path_factory.mktemp("pocket")
    (folder / "latents").mkdir()
    rng = np.random.default_rng(0)
    theme = np.stack([rng.permutation(len(THEMES))[:2] for _ in range(WALKS)]).astype(np.uint8)
    latents = np.zeros((WALKS, 2, FRAMES, 3, 1, 1), np.float16)
    latents[:, :, :, 0, 0, 0] = np.arange(WALKS)[:, None, None]
    latents[:, :, :, 1, 0, 0] = theme[:, :, None]
    latents[:, :, :, 2, 0, 0] = np.arange(FRAMES)
    arrays = {
        "latents": latents,
        "keys": rng.integers(2, size=(WALKS, FRAMES, len(KEYS))).astype(np.uint8),
        "blocked": np.zeros((WALKS, FRAMES), np.uint8),
        "theme": theme,
        "wall": rng.integers(len(WALLS), size=WALKS).astype(np.uint8),
    }
    for name, array in arrays.items():
        np.save(folder / "latents" / f"{name}.npy", array)
    return folder


@pytest.fixture(scope="module")
def clip(data: Path) -> Clip:
    """Many clips, half of which switch and half of which have a far sink."""
    return Clips(data).sample(np.random.default_rng(1), 200, 16, CHUNK, switching=0.5)


def origin(clip: Clip) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk, theme and frame that every frame of every clip comes from, [clip, frame] each."""
    walk, theme, frame = clip["latents"][..., 0, 0].numpy().astype(int).transpose(2, 0, 1)
    return walk, theme, frame


def test_switches_fall_between_chunks(clip: Clip) -> None:
    """The theme changes at `switch` and nowhere else, and that is the first frame of a chunk."""
    theme = origin(clip)[1]
    for row, switch in zip(theme, clip["switch"].tolist(), strict=True):
        assert switch % CHUNK == 0 and 0 < switch <= len(row)
        assert np.flatnonzero(np.diff(row)).tolist() == [switch - 1] * (switch < len(row))
    share = (clip["switch"] < 16).float().mean().item()
    assert 0.35 < share < 0.65


def test_clips_are_of_one_piece(clip: Clip) -> None:
    """Frames follow one another in one walk; only the first may come from further back."""
    walk, _, frame = origin(clip)
    assert (walk == walk[:, :1]).all()
    assert (np.diff(frame[:, 1:]) == 1).all()
    back = frame[:, 1] - 1 - frame[:, 0]
    sunk = clip["sunk"].numpy()
    assert (back[~sunk] == 0).all()
    assert (back[sunk] >= 0).all() and back.max() > 10 and back.max() <= SINK_REACH


def test_keys_led_to_their_frame(data: Path, clip: Clip) -> None:
    """Each frame carries the keys that led to it; nothing led to a clip's first frame."""
    stored = np.load(data / "latents" / "keys.npy")
    walk, _, frame = origin(clip)
    keys = clip["keys"].numpy()
    assert (keys[:, 0] == 0).all()
    assert (keys[:, 1:] == stored[walk[:, 1:], frame[:, 1:]]).all()


def test_prompts_describe_the_clip(data: Path, clip: Clip) -> None:
    """Both texts name only what is seen; the one after a switch names the new theme."""
    walls = np.load(data / "latents" / "wall.npy")
    walk, theme, _ = origin(clip)
    before, after = clip["prompts"]
    for i, switch in enumerate(clip["switch"].tolist()):
        words = set(before[i].split()), set(after[i].split())
        wall = set(WALL_WORDS[WALLS[walls[walk[i, 0]]]])
        other = {w for group in WALL_WORDS.values() for w in group} - wall
        assert not words[0] & other and not words[1] & other
        if switch < 16:
            assert words[1] & set(THEME_WORDS[THEMES[theme[i, -1]]])
        else:
            assert before[i] == after[i]


def test_held_out_walks_stay_out(data: Path) -> None:
    """Training never draws a reserved walk, and the reserved ones are all that a test draws."""
    rng = np.random.default_rng(2)
    trained = origin(Clips(data).sample(rng, 300, 4, CHUNK))[0]
    tested = origin(Clips(data, held_out=True).sample(rng, 300, 4, CHUNK))[0]
    assert trained.max() < WALKS - HELD_OUT <= tested.min()


def test_same_seed_same_clips(data: Path) -> None:
    """A generator in the same state draws the same clips."""
    first, second = (Clips(data).sample(np.random.default_rng(3), 4, 8, CHUNK) for _ in range(2))
    assert first["prompts"] == second["prompts"]
    assert torch.equal(first["latents"], second["latents"])
    assert torch.equal(first["switch"], second["switch"])


def test_walks_are_encoded_under_two_themes(tmp_path: Path) -> None:
    """A group holds the same walk twice, once in each of two themes, with its keys."""
    torch.manual_seed(0)
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(0, 1),
        encoder_qkv_multiscales=((),) * 2,
        decoder_block_out_channels=(8, 8),
        decoder_layers_per_block=(0, 1),
        decoder_qkv_multiscales=((),) * 2,
        decoder_norm_types="batch_norm",
    )
    vae.save_pretrained(tmp_path / "vae")
    stats = {"mean": [0.0] * 4, "std": [1.0] * 4}
    (tmp_path / "vae" / "latent_stats.json").write_text(json.dumps(stats))
    group = encode_group(5, tmp_path, frames=2)
    assert group["latents"].shape == (GROUP, 2, 2, 4, HEIGHT // 2, WIDTH // 2)
    assert (group["theme"][:, 0] != group["theme"][:, 1]).all()
    assert not np.array_equal(group["latents"][:, 0], group["latents"][:, 1])
    assert (group["keys"][:, 0] == 0).all() and group["keys"][:, 1].any()
