"""A world's folder: written, read, damaged; and what a session may be begun with."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from worlds import tiny_world

from streamgen import WorldPipeline
from streamgen.errors import InvalidRequest, StreamgenError, UnknownModel, WeightsError
from streamgen.frames import read_image
from streamgen.weights import registry


def seal(folder: Path) -> None:
    """Write the manifest, as the last step of making a model or after changing one."""
    registry.write_manifest(
        folder, name="tiny", kind="world", version="1", licence="Apache-2.0", card="config.json"
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny world's folder in float32; not to be changed."""
    folder = tmp_path_factory.mktemp("worlds") / "tiny"
    tiny_world().save_pretrained(folder, dtype=torch.float32)
    seal(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def walk(world: WorldPipeline, chunks: int = 6) -> np.ndarray:
    """Frames of a short walk with a switch."""
    frames = []
    with world.session("a brick maze at night", seed=3) as session:
        for index in range(chunks):
            session.act(keys={"wasdqe"[index % 6]})
            if index == 3:
                session.prompt("heavy snow")
            frames.append(session.step().frames)
    return np.concatenate(frames)


def one_line(error: pytest.ExceptionInfo[StreamgenError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# There and back


@pytest.mark.parametrize("as_text", [False, True])
def test_round_trip(saved: Path, as_text: bool) -> None:
    """Saved and loaded in float32, a world makes bitwise the frames that it made."""
    name = str(saved) if as_text else saved
    world = WorldPipeline.from_pretrained(name, device="cpu", dtype="float32")
    original = tiny_world()
    assert world.config == original.config and world.engine.dit.config == original.engine.dit.config
    assert world.name == "tiny"
    assert (walk(world) == walk(original)).all()


def test_half_precision_file(tmp_path: Path) -> None:
    """The default writes bfloat16, half the bytes; it loads as float32 and runs."""
    original = tiny_world()
    original.save_pretrained(tmp_path / "half")
    seal(tmp_path / "half")
    world = WorldPipeline.from_pretrained(tmp_path / "half", device="cpu", dtype="float32")
    assert world.engine.dit.dtype == torch.float32
    for name, value in original.engine.dit.state_dict().items():
        loaded = world.engine.dit.state_dict()[name]
        assert torch.equal(loaded, value.bfloat16().float()), name
    assert walk(world, 2).shape == (4, 16, 24, 3)


def test_dtype(saved: Path) -> None:
    """bfloat16 on request: weights and cache; frames stay near those of float32."""
    world = WorldPipeline.from_pretrained(saved, device="cpu", dtype="bfloat16")
    assert world.engine.dit.dtype == world.engine.pool.spec.dtype == torch.bfloat16
    first = world.session("snow", seed=1).step().frames.astype(int)
    exact = tiny_world().session("snow", seed=1).step().frames.astype(int)
    assert np.abs(first - exact).mean() < 2


def test_loading_leaves_the_generator_alone(saved: Path) -> None:
    """Nothing of torch's global random state is used up, so a script stays reproducible."""
    state = torch.get_rng_state()
    WorldPipeline.from_pretrained(saved, device="cpu", dtype="float32")
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_ask_for_no_gradient(saved: Path) -> None:
    """A loaded world is for running."""
    engine = WorldPipeline.from_pretrained(saved, device="cpu", dtype="float32").engine
    for part in (engine.dit, engine.text, engine.codec):
        assert not part.training
        assert not any(parameter.requires_grad for parameter in part.parameters())


def test_changes_at_loading(saved: Path) -> None:
    """Sink, window and positions can be other than the config's; so can the pool's size."""
    world = WorldPipeline.from_pretrained(
        saved, device="cpu", sink=2, window=9, positions="absolute", max_sessions=2,
        history_seconds=1.0,
    )  # fmt: skip
    assert (world.config.sink, world.config.window) == (2, 9)
    assert world.config.positions == "absolute"
    assert world.engine.pool.stats().total >= 2 * (9 + 20)


# What can't be loaded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 2}, r"window=2 is smaller than sink=1 \+ chunk=2"),
        ({"sink": 5}, r"window=6 is smaller than sink=5 \+ chunk=2"),
        ({"sink": 7}, "sink=7, window=6"),
        ({"positions": "relative"}, "'relative': accepted are"),
        ({"dtype": "float7"}, "float7"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_settings_that_do_not_go(saved: Path, changes: dict[str, Any], message: str) -> None:
    """Refused with the numbers and what they mean."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        WorldPipeline.from_pretrained(saved, **{"device": "cpu", **changes})
    one_line(caught)


@pytest.mark.parametrize("name", ["pocket-wrld", "no/such/folder/anywhere", ""])
def test_unknown_name(name: str) -> None:
    """Says what there is."""
    with pytest.raises(StreamgenError, match="no model|model.json") as caught:
        WorldPipeline.from_pretrained(name)
    assert isinstance(caught.value, (UnknownModel, WeightsError))
    one_line(caught)


FILES = (
    "config.json",
    "transformer.safetensors",
    "text.safetensors",
    "vae/config.json",
    "vae/latent_stats.json",
    "vae/diffusion_pytorch_model.safetensors",
)


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [missing, truncated, empty, flipped])
def test_damaged_file(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    """The checksum finds it before anything is loaded, and the message names the file."""
    damage(folder / name)
    with pytest.raises(WeightsError, match=name.rpartition("/")[2]) as caught:
        WorldPipeline.from_pretrained(folder, device="cpu")
    one_line(caught)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [missing, truncated, empty])
def test_damaged_before_it_was_sealed(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """With checksums that agree with the damage, reading still ends in one line."""
    damage(folder / name)
    seal(folder)
    with pytest.raises(WeightsError) as caught:
        WorldPipeline.from_pretrained(folder, device="cpu")
    one_line(caught)


def change(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        config = config[parent]
    if value is None:
        del config[last]
    else:
        config[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("world", None),
        ("world", []),
        ("world.keys", None),
        ("world.colour", "red"),
        ("world.schedule", None),
        ("world.schedule", {"steps": [1000], "wrap": True}),
        ("world.schedule.steps", []),
        ("world.window", 1),
        ("world.window", "many"),
        ("world.latent_hw", [8, 13]),
        ("world.keys", ["w", "s"]),
        ("world.vocabulary", ["a"]),
        ("transformer", None),
        ("transformer.dim", None),
        ("transformer.dim", 96),
        ("transformer.num_layers", 2),
        ("transformer.num_heads", 5),
        ("transformer.action_dim", 0),
        ("transformer.depth", 3),
    ],
)  # fmt: skip
def test_config_that_does_not_fit(folder: Path, path: str, value: Any) -> None:
    """A field missing, unknown, or at odds with the weights: one line, and nothing half-loaded."""
    config = json.loads((folder / "config.json").read_text())
    change(config, path, value)
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    with pytest.raises((WeightsError, InvalidRequest)) as caught:
        WorldPipeline.from_pretrained(folder, device="cpu")
    one_line(caught)


def test_another_kind(folder: Path) -> None:
    """A folder of another pipeline's."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "kind": "next_scale"}))
    seal(folder)
    with pytest.raises(InvalidRequest, match="'tiny' is not a world") as caught:
        WorldPipeline.from_pretrained(folder, device="cpu")
    one_line(caught)


def test_a_plain_folder(tmp_path: Path) -> None:
    """A folder without a manifest is no model."""
    with pytest.raises(WeightsError, match="model.json"):
        WorldPipeline.from_pretrained(tmp_path)


# What a session may be begun with


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp"])
def test_read_image(tmp_path: Path, suffix: str) -> None:
    """Red stays red: RGB, uint8."""
    path = tmp_path / f"red{suffix}"
    red = np.zeros((10, 12, 3), np.uint8)
    red[..., 2] = 255  # OpenCV writes BGR
    cv2.imwrite(str(path), red)
    image = read_image(path)
    assert image.shape == (10, 12, 3) and image.dtype == np.uint8
    assert image[..., 0].min() > 200 and image[..., 1:].max() < 60


@pytest.mark.parametrize("channels", [1, 4])
def test_gray_and_transparent_pictures(tmp_path: Path, channels: int) -> None:
    """Become RGB."""
    path = tmp_path / "picture.png"
    cv2.imwrite(str(path), np.full((6, 7, channels), 128, np.uint8))
    assert read_image(str(path)).shape == (6, 7, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "can't be read"), (b"", "not a picture"), (b"GIF89a or not", "not a picture")],
)
def test_no_picture(tmp_path: Path, content: bytes | None, message: str) -> None:
    """No file, an empty one, or one of something else: refused by its name."""
    path = tmp_path / "cat.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=rf"cat\.png.*{message}") as caught:
        tiny_world().session(image=path)
    one_line(caught)


def test_half_a_picture(tmp_path: Path) -> None:
    """A truncated file is refused, or read as far as it goes, and never a traceback."""
    path = tmp_path / "half.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path.write_bytes(cv2.imencode(".png", noise)[1].tobytes()[:2000])
    try:
        assert read_image(path).shape == (64, 64, 3)
    except InvalidRequest as error:
        assert "not a picture" in str(error)


def test_a_folder_as_picture(tmp_path: Path) -> None:
    """A folder is no picture."""
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_image(tmp_path)


def test_image_by_path(tmp_path: Path) -> None:
    """The same first frame as the array."""
    image = np.zeros((16, 24, 3), np.uint8)
    image[4:12, 6:18] = (200, 30, 90)
    path = tmp_path / "start.png"
    cv2.imwrite(str(path), image[..., ::-1])
    world = tiny_world()
    by_path, by_array = (world.session("snow", image=x).step().frames for x in (path, image))
    assert (by_path == by_array).all()


def test_no_warning_in_normal_use(saved: Path) -> None:
    """Loading and walking are quiet."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(WorldPipeline.from_pretrained(saved, device="cpu", dtype="float32"), 1)
