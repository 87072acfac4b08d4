"""From files of Wan's form to frames: every part read from disk, nothing made in memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wan_folders import self_forcing, wan_folder

from streamgen.errors import InvalidRequest, StreamgenError, UnknownModel, WeightsError
from streamgen.pipelines.causal_video import PRESETS, CausalVideoPipeline
from streamgen.sampling.denoise import few_step

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "height": 32,
    "width": 48,
    "window": 6,
    "device": "cpu",
    "dtype": "float32",
    "prompt_cache": None,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wan_folder(tmp_path_factory.mktemp("base") / "Wan2.1-tiny")


@pytest.fixture(scope="module")
def checkpoint(base: Path) -> Path:
    path = base.parent / "self_forcing_dmd.pt"
    self_forcing(path, seed=8)
    return path


def load(base: Path, checkpoint: Path | None = None, **changes: Any) -> CausalVideoPipeline:
    return CausalVideoPipeline.from_pretrained(base, checkpoint, **{**SMALL, **changes})


def test_from_files_to_frames(base: Path, checkpoint: Path) -> None:
    """A Self-Forcing checkpoint over a base: the loop of its paper, written out on its weights."""
    pipe = load(base, checkpoint)
    assert pipe.config.chunk_frames == 3 and pipe.config.fps == 16
    assert pipe.config.schedule == PRESETS["self-forcing"].schedule
    made = pipe("a red maze", 9, seed=5)
    assert made.shape == (9, 32, 48, 3) and made.std() > 1

    dit, engine = self_forcing(base.parent / "again.pt", seed=8), pipe.engine
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(
            engine.dit.state_dict().values(), dit.state_dict().values(), strict=True
        )
    )
    draw = torch.Generator().manual_seed(5)
    shape = (1, 3, 16, 4, 6)
    prompt = engine.prompt("a red maze")
    with engine.table().chunk(3) as chunk, torch.inference_mode():
        history = engine.history(chunk)

        def predict(x: torch.Tensor, t: float) -> torch.Tensor:
            out = dit(x.transpose(1, 2), torch.full((1, 3), t), history, prompt)
            return out.transpose(1, 2)

        latents = few_step(
            predict,
            torch.randn(shape, generator=draw),
            pipe.config.schedule,
            lambda x: torch.randn(x.shape, generator=draw),
        )
    assert (engine.codec.decode(latents[0])[0].numpy() == made).all()


def test_bases_own_transformer(base: Path, checkpoint: Path) -> None:
    """Without a checkpoint the base's is run; the two differ."""
    assert (load(base)("a maze", 9) != load(base, checkpoint)("a maze", 9)).any()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets(base: Path, name: str) -> None:
    """Each runs past its window and keeps its own settings where nothing else is said."""
    preset = PRESETS[name]
    sizes = {"height": 16, "width": 16, "window": None}
    pipe = load(base, preset=name, **sizes)
    config = pipe.config
    assert (config.sink, config.window, config.positions) == (
        preset.sink,
        preset.window,
        preset.positions,
    )
    assert config.recache == preset.recache
    frames = pipe.first_pixels + 3 * pipe.chunk_pixels
    made = pipe({0: "a maze", 9: "heavy snow"}, frames)
    assert made.shape == (frames, 16, 16, 3)


def test_settings_of_a_call(base: Path) -> None:
    """Timesteps, shift, chunk and window can be other than the preset's."""
    pipe = load(base, steps=(1000, 500), shift=8.0, chunk_frames=1, sink=1, window=4)
    assert pipe.config.schedule == replace(
        PRESETS["self-forcing"].schedule, steps=(1000, 500), shift=8.0
    )
    assert pipe.config.first_schedule == pipe.config.schedule
    pipe.check_frames(5)
    assert pipe("a maze", 5).shape[0] == 5


def test_prompts_are_cached_on_disk(base: Path, tmp_path: Path) -> None:
    """The second process needs no text encoder for a text that the first one encoded."""
    copy = shutil.copytree(base, tmp_path / "copy")
    cache = tmp_path / "prompts"
    first = load(copy, prompt_cache=cache)("a red maze", 9)
    assert list(cache.rglob("*.safetensors"))
    pipe = load(copy, prompt_cache=cache)
    assert (pipe("a red maze", 9) == first).all()
    assert not pipe.engine.text.encoder.loaded  # type: ignore[attr-defined]


def test_offloaded_is_bitwise_the_same(base: Path) -> None:
    """Weights that are streamed to the device give the same frames."""
    expected = load(base)("a maze", 9)
    for offload in ("text", "all"):
        pipe = load(base, offload=offload)
        assert (pipe("a maze", 9) == expected).all()
        assert pipe.placement is not None and "streamed" in pipe.placement.describe()


def test_half_precision(base: Path) -> None:
    """bfloat16 all through: near the float32 frames."""
    exact = load(base)("a maze", 9).astype(int)
    half = load(base, dtype="bfloat16")
    assert half.engine.dit.dtype == half.engine.pool.spec.dtype == torch.bfloat16
    assert np.abs(half("a maze", 9).astype(int) - exact).mean() < 4


def test_goes_on_from_a_file(base: Path, tmp_path: Path) -> None:
    """Saved in one process' pipeline, gone on with in another's, bitwise."""
    with load(base).session("a maze", seed=2) as session:
        expected = np.concatenate([c.frames for c in session.stream(4)])
    with load(base).session("a maze", seed=2) as session:
        parts = [c.frames for c in session.stream(2)]
        session.save(tmp_path / "video.sgs")
    with load(base).load_session(tmp_path / "video.sgs") as session:
        parts += [c.frames for c in session.stream(2)]
    assert (np.concatenate(parts) == expected).all()


# What can't be loaded


def one_line(caught: pytest.ExceptionInfo[StreamgenError]) -> None:
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 30}, "height 30: accepted are multiples of 16 .*nearest: 16 and 32"),
        ({"width": 8}, "width 8: .*multiples of 16"),
        ({"preset": "self-forced"}, "preset 'self-forced': accepted are 'self-forcing', "),
        ({"kv": "fp7"}, "fp7"),
        ({"offload": "most"}, "offload 'most'"),
        ({"quantize": "fp8"}, "fp8"),
        ({"window": 2}, r"window=2 is smaller than sink=0 \+ chunk=3"),
        ({"positions": "relative"}, "'relative': accepted are 'absolute', 'sliding_sink'"),
        ({"steps": (100, 900)}, "accepted are falling numbers"),
        ({"image_start": "block"}, "needs first_chunk=1"),
        ({"recache": "x"}, "unexpected keyword"),
    ],
)
def test_settings_that_do_not_go(base: Path, changes: dict[str, Any], message: str) -> None:
    """Refused in one line."""
    kind = TypeError if "recache" in changes else StreamgenError
    with pytest.raises(kind, match=message) as caught:
        load(base, **changes)
    assert "\n" not in str(caught.value)


def test_autoencoder_of_another_model(tmp_path: Path) -> None:
    """Latents of another width than the transformer's."""
    with pytest.raises(WeightsError, match="4 channels|z_dim|latent") as caught:
        load(wan_folder(tmp_path / "mixed", channels=4))
    one_line(caught)


def test_text_encoder_of_another_model(tmp_path: Path) -> None:
    """Rows of another width than the transformer's."""
    pipe = load(wan_folder(tmp_path / "mixed", text_dim=24))
    with pytest.raises(WeightsError, match="of width 24; the transformer takes 16") as caught:
        pipe("a maze", 9)
    one_line(caught)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer", "transformer"])
def test_a_part_is_missing(base: Path, tmp_path: Path, part: str) -> None:
    """Named, with what was looked for."""
    copy = shutil.copytree(base, tmp_path / "copy")
    shutil.rmtree(copy / part)
    with pytest.raises(WeightsError, match=part.split("_")[0]) as caught:
        load(copy)("a maze", 9)
    one_line(caught)


def test_half_downloaded(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint that ends too soon."""
    short = tmp_path / "short.pt"
    short.write_bytes(checkpoint.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="short.pt: half-downloaded") as caught:
        load(base, short)
    one_line(caught)


def test_neither_name_nor_folder() -> None:
    """Says what there is."""
    with pytest.raises(UnknownModel, match="packaged models are") as caught:
        CausalVideoPipeline.from_pretrained("Wan2.1-T2V-1.3B")
    one_line(caught)


def test_packaged_models_have_settings_of_their_own(tmp_path: Path) -> None:
    """A world is no video, and says what it is for; a preset is for Wan's form only."""
    with pytest.raises(InvalidRequest, match="not a video .*streamgen play"):
        CausalVideoPipeline.from_pretrained("pocket-world")
    with pytest.raises(InvalidRequest, match="preset='causvid' is for a base folder"):
        CausalVideoPipeline.from_pretrained("pocket-world", preset="causvid")
