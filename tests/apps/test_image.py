"""Pictures into files, and the first frames that they make for worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pictures import CLASSES, SIDES, tiny_pictures
from PIL import Image

from streamgen.apps import painter
from streamgen.apps.image import GAP, Painted, list_classes, paint, sheet
from streamgen.apps.images import read_image
from streamgen.apps.painter import choose_class, first_frames
from streamgen.apps.pocket.prompts import THEME_WORDS, WALL_WORDS
from streamgen.errors import InvalidRequest, StreamgenError
from streamgen.pipelines.next_scale import NextScalePipeline


@pytest.fixture(scope="module")
def pipe() -> NextScalePipeline:
    """10 x 10 pixels, four scales, five classes."""
    return tiny_pictures()


def draw(pipe: Any, path: Path, *classes: str, **options: Any) -> Painted:
    return paint(classes, **{"model": pipe, "output": path, "scale": 1, **options})


def read(path: Path) -> np.ndarray:
    return cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)


def test_one_picture(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """What the pipeline draws for the class and the seed, to the pixel."""
    done = draw(pipe, tmp_path / "x.png", "lava,brick", seed=3)
    assert np.array_equal(read(done.path), pipe(["lava, brick"], seeds=[3])[0].pixels)
    assert done.pictures == ("lava, brick",)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize(("ending", "error"), [("png", 0.0), ("webp", 12.0), ("jpg", 40.0)])
def test_formats(pipe: NextScalePipeline, tmp_path: Path, ending: str, error: float) -> None:
    """The ending says which; red stays red in all."""
    done = draw(pipe, tmp_path / f"x.{ending}", "ocean", scale=8)
    wanted = cv2.resize(pipe(["ocean"])[0].pixels, (80, 80), interpolation=cv2.INTER_LANCZOS4)
    assert np.abs(read(done.path).astype(int) - wanted).mean() <= error
    magic = {"png": b"\x89PNG", "webp": b"RIFF", "jpg": b"\xff\xd8\xff"}[ending]
    assert done.path.read_bytes().startswith(magic)


def test_small_pictures_are_enlarged(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """To some 512 pixels, unless said otherwise."""
    assert read(draw(pipe, tmp_path / "x.png", "ocean", scale=None).path).shape == (510, 510, 3)


def test_a_grid(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Classes take turns, seeds go up, rows come first; black lies between."""
    done = draw(pipe, tmp_path / "x.png", "ocean", "Snow, brick", grid="2x3", seed=5)
    names = ["ocean", "Snow, brick"] * 3
    images = pipe(names, seeds=range(5, 11))
    page = read(done.path)
    assert page.shape == (20 + GAP, 30 + 2 * GAP, 3)
    for index, image in enumerate(images):
        top, left = (10 + GAP) * (index // 3), (10 + GAP) * (index % 3)
        assert np.array_equal(page[top : top + 10, left : left + 10], image.pixels)
    assert not page[10 : 10 + GAP].any()
    assert done.pictures == tuple(names)


def test_a_grid_of_every_class(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Without a class, all of them."""
    assert draw(pipe, tmp_path / "x.png", grid="1x5").pictures == CLASSES


def test_several_classes(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Nearly a square."""
    page = read(draw(pipe, tmp_path / "x.png", *CLASSES).path)
    assert page.shape == (20 + GAP, 30 + 2 * GAP, 3)


def test_sampling_reaches_the_pipeline(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Each option changes the picture as it does there."""
    for options in ({"cfg": 6.0}, {"top_k": 1}, {"top_p": 0.3}, {"more_smooth": True}):
        done = draw(pipe, tmp_path / "x.png", "ocean", sampling=options)
        assert np.array_equal(read(done.path), pipe(["ocean"], **options)[0].pixels)


def test_a_gif_sharpens(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """One frame for each scale; the last is the picture, stays longest, and it begins again."""
    done = draw(pipe, tmp_path / "x.png", "ocean", gif=tmp_path / "x.gif", grid="1x2")
    with Image.open(tmp_path / "x.gif") as moving:
        frames, shown = [], []
        for index in range(moving.n_frames):  # type: ignore[attr-defined]
            moving.seek(index)
            frames.append(np.asarray(moving.convert("RGB")).astype(int))
            shown.append(moving.info["duration"])
        assert moving.info["loop"] == 0
    assert len(frames) == len(SIDES)
    assert shown[-1] > max(shown[:-1])
    last = read(done.path).astype(int)
    assert np.abs(frames[-1] - last).mean() < 4  # 256 colours
    assert np.abs(frames[0] - last).mean() > 4
    steps = list(pipe.stream(["ocean"] * 2, seeds=[0, 1]))
    for frame, step in zip(frames, steps, strict=True):
        assert np.abs(frame - sheet(list(step.pixels), (1, 2))).mean() < 4


def test_variations(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """The picture, then others of the same coarse scales with the next seeds."""
    done = draw(pipe, tmp_path / "x.png", "ocean", vary=3, from_scale=2, seed=7)
    first = pipe(["ocean"], seeds=[7])[0]
    others = pipe.vary(first, from_scale=2, n=3, seeds=[8, 9, 10])
    wanted = sheet([image.pixels for image in (first, *others)], (1, 4))
    assert np.array_equal(read(done.path), wanted)


def test_an_edit(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """White of the mask is drawn anew as another class, from a picture of any size."""
    picture = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    mask = np.zeros((40, 40, 3), np.uint8)
    mask[:, 20:] = 255
    cv2.imwrite(str(tmp_path / "in.png"), picture[..., ::-1])
    cv2.imwrite(str(tmp_path / "mask.png"), mask)
    options = {"edit": tmp_path / "in.png", "mask": tmp_path / "mask.png", "seed": 2}
    done = draw(pipe, tmp_path / "x.png", "ocean", **options)
    small = read_image(tmp_path / "in.png", width=10, height=10)
    where = np.zeros((10, 10), bool)
    where[:, 5:] = True
    assert np.array_equal(read(done.path), pipe.edit(small, where, "ocean", seed=2).pixels)
    assert draw(pipe, tmp_path / "x.png", **options).pictures == ("no class",)


def test_the_list(pipe: NextScalePipeline) -> None:
    """Numbers and names, or how many there are."""
    assert list_classes(pipe)[:2] == ["   0  lava, brick", "   1  lava, stone"]
    nameless = NextScalePipeline(pipe.var, pipe.vae)
    assert list_classes(nameless) == ["classes 0 to 4; their names are not in the weights"]


@pytest.mark.parametrize(
    ("classes", "wrong", "message"),
    [
        ((), {}, "no class: say --class, such as 'lava, brick'; --list shows them all"),
        (("lawa, brick",), {}, "lava, brick"),
        (("ocean",), {"grid": "4"}, "grid '4': write ROWSxCOLUMNS"),
        (("ocean",), {"grid": "0x4"}, "grid '0x4'"),
        (("ocean",), {"output": "x.bmp"}, "ends in .png or .jpg"),
        (("ocean",), {"output": "no/x.png"}, "there is no folder .*no"),
        (("ocean",), {"gif": "x.png"}, "ends in .gif"),
        (("ocean",), {"scale": 0}, "scale 0"),
        (("ocean",), {"sampling": {"top_p": 2.0}}, "top_p"),
        (("ocean",), {"from_scale": 2}, "add --vary N"),
        (("ocean",), {"vary": 0}, "at least 1 variation"),
        ((), {"vary": 2}, "which --class"),
        (("ocean", "0"), {"vary": 2}, "--vary takes one --class, and 2 are given"),
        (("ocean",), {"vary": 2, "grid": "1x2"}, "--vary and --grid do not go together"),
        (("ocean",), {"vary": 2, "from_scale": 9}, "from_scale=9"),
        (("ocean",), {"edit": "in.png"}, "--edit and --mask go together"),
        (("ocean",), {"edit": "in.png", "mask": "none.png"}, "none.png: No such file"),
        (("ocean",), {"edit": "text.txt", "mask": "in.png"}, "text.txt: not an image"),
        (("ocean",), {"edit": "in.png", "mask": "big.png"}, "big.png is 9 x 6 and .*in.png 8 x 8"),
        (("ocean",), {"edit": "in.png", "mask": "in.png", "gif": "x.gif"}, "--edit and --gif"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    pipe: NextScalePipeline, tmp_path: Path, classes: Any, wrong: dict[str, Any], message: str
) -> None:
    """The message names what is wrong and what is accepted; no file appears."""
    (tmp_path / "text.txt").write_text("hello")
    cv2.imwrite(str(tmp_path / "in.png"), np.zeros((8, 8, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "big.png"), np.zeros((6, 9, 3), np.uint8))
    there = set(tmp_path.iterdir())
    options = {"output": "x.png", **wrong}
    for name in ("output", "gif", "edit", "mask"):
        if name in options:
            options[name] = tmp_path / options[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        draw(pipe, options.pop("output"), *classes, **options)
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) == there


def test_a_full_disk_is_one_line(
    pipe: NextScalePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the old picture stays."""
    (tmp_path / "x.png").write_text("old")

    def full(self: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StreamgenError, match=r"x.png: can't be written \(No space left"):
        draw(pipe, tmp_path / "x.png", "ocean")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_text() == "old"


# First frames


def test_classes_of_a_prompt() -> None:
    """Each word of a theme or a wall leads to its class, whatever the seed."""
    classes = [f"{theme}, {wall}" for theme in THEME_WORDS for wall in WALL_WORDS]
    for theme, words in THEME_WORDS.items():
        for wall, others in WALL_WORDS.items():
            prompt = f"Walk: {words[-1]} in a {others[-1].upper()} maze"
            assert choose_class(classes, prompt, seed=len(prompt)) == f"{theme}, {wall}"


def test_what_a_prompt_leaves_open() -> None:
    """The seed decides: all that fit come up, and none that does not."""
    classes = [f"{theme}, {wall}" for theme in THEME_WORDS for wall in WALL_WORDS]
    found = {choose_class(classes, "a volcano", seed) for seed in range(60)}
    assert found == {f"lava, {wall}" for wall in WALL_WORDS}
    assert len({choose_class(classes, "", seed) for seed in range(200)}) == len(classes)
    assert choose_class(classes, "", 3) == choose_class(classes, "", 3)


def test_generated_first_frames(
    pipe: NextScalePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Painted for the words at the world's size; the seed changes the picture."""
    monkeypatch.setattr(painter, "load", lambda model: pipe)
    give = first_frames("generated", width=12, height=9)
    one, again, other = give("ocean", 1), give("ocean", 1), give("ocean", 2)
    assert one.shape == (9, 12, 3) and one.dtype == np.uint8
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    wanted = pipe(["ocean"], seeds=[1])[0].pixels
    cv2.imwrite(str(tmp_path / "w.png"), wanted[..., ::-1])
    assert np.array_equal(one, read_image(tmp_path / "w.png", width=12, height=9))
    fixed = first_frames(tmp_path / "w.png", width=12, height=9)
    assert np.array_equal(fixed("lava", 5), one)


def test_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Path is a file, even if it is called `generated`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="generated: No such file"):
        first_frames(Path("generated"), width=12, height=9)
