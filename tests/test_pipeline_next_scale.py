"""The image pipeline on random weights: what is drawn, shared, kept and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import CLASSES, SIDES, tiny_pictures, tiny_var, tiny_vqvae
from torch import Tensor

from streamgen.cache import BlockPool
from streamgen.errors import InvalidRequest, UnknownModel, WeightsError
from streamgen.pipelines.next_scale import ImageConfig, NextScaleImage, NextScalePipeline
from streamgen.weights import registry
from streamgen.weights import var as files

SCALES = len(SIDES)


@pytest.fixture(scope="module")
def pipe() -> NextScalePipeline:
    return tiny_pictures()


def same(one: NextScaleImage, other: NextScaleImage) -> bool:
    """The same tokens; pixels to the rounding of sums whose order depends on the batch."""
    pixels = np.abs(one.pixels.astype(int) - other.pixels).max() <= 1
    return bool(pixels) and all(map(torch.equal, one.tokens, other.tokens))


def by_hand(
    pipe: NextScalePipeline,
    label: int,
    seed: int,
    cfg: float = 2.0,
    known: Sequence[Tensor] = (),
    where: Callable[[int], Tensor | None] = lambda scale: None,
    first: int = 0,
) -> list[Tensor]:
    """The slow twin: no cache, every scale from the masked pass over all scales.

    Scales before `first` are `known` and draw nothing; later ones draw, and are forced `where`.
    """
    config, quantize = pipe.var.config, pipe.vae.quantize
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.zeros(1, side * side, dtype=torch.long) for side in SIDES]
    rows = torch.tensor([label, config.no_class])
    for scale in range(SCALES):
        if scale < first:
            tokens[scale] = known[scale][None]
            continue
        logits = pipe.var(rows, quantize.inputs(tokens, SIDES).repeat(2, 1, 1))
        logits = logits[:, config.ends[scale] - config.lengths[scale] : config.ends[scale]]
        t = cfg * scale / (SCALES - 1)
        p = ((1 + t) * logits[0] - t * logits[1]).softmax(-1)
        drawn = torch.multinomial(p, 1, replacement=True, generator=generator).T
        forced = where(scale)
        if forced is not None:
            drawn = torch.where(forced, known[scale], drawn)
        tokens[scale] = drawn
    return [one[0] for one in tokens]


def equal(image: NextScaleImage, tokens: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, image.tokens, tokens))


# Drawing


@pytest.mark.parametrize("cfg", [0.0, 3.0])
@pytest.mark.parametrize("shared_aln", [False, True])
def test_equals_recomputation(cfg: float, shared_aln: bool) -> None:
    """Tokens of a batch are those of the masked pass, image by image, guided or not."""
    pipe = tiny_pictures(shared_aln)
    images = pipe([1, 4], seeds=[3, 8], cfg=cfg)
    for image, label, seed in zip(images, [1, 4], [3, 8], strict=True):
        assert equal(image, by_hand(pipe, label, seed, cfg))
        assert (image.label, image.seed) == (label, seed)
        assert image.pixels.shape == (10, 10, 3) and image.pixels.dtype == np.uint8
        f_hat = pipe.vae.quantize.latents([one[None] for one in image.tokens], SIDES)
        decoded = (pipe.vae.decode(f_hat)[0].clamp(-1, 1) * 127.5 + 127.5).permute(1, 2, 0)
        assert np.abs(decoded.numpy() - image.pixels).max() < 0.51
    assert not equal(images[0], images[1].tokens)


def test_an_image_does_not_depend_on_its_batch(pipe: NextScalePipeline) -> None:
    """Its class and its seed make it: alone, with others, in another order."""
    batch = pipe([0, 3, 1, 3], seeds=[5, 6, 7, 9])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for image in batch:
        assert image.label is not None and image.seed is not None
        assert same(pipe(image.label, seeds=image.seed)[0], image)
    assert same(pipe([3, 0], seeds=[6, 5])[0], batch[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert not same(batch[1], batch[3])


def test_seeds(pipe: NextScalePipeline) -> None:
    """None = 0, 1, ...; a number is the first of consecutive ones."""
    assert [image.seed for image in pipe([0, 0])] == [0, 1]
    assert [image.seed for image in pipe([0, 0], seeds=4)] == [4, 5]
    with pytest.raises(InvalidRequest, match="3 seeds for 2 images"):
        pipe([0, 0], seeds=[1, 2, 3])
    for seed in (-1, 2**64, 1.5):
        with pytest.raises(InvalidRequest, match=r"seed .*: accepted are whole numbers from 0"):
            pipe(0, seeds=[seed])  # type: ignore[list-item]


def test_names(pipe: NextScalePipeline) -> None:
    """As good as indices, without case and spaces; a part will do if it is one class's."""
    assert pipe.classes == CLASSES
    for name, index in (
        ("lava, brick", 0),
        ("LAVA,stone", 1),
        ("snow", 2),
        ("nightsky", 4),
        ("3", 3),
        (3, 3),
        (np.int64(2), 2),
        (None, 5),
    ):
        assert pipe.label(name) == index
    assert same(pipe("ocean", seeds=2)[0], pipe([3], seeds=[2])[0])
    assert pipe(None)[0].label is None


def test_options(pipe: NextScalePipeline) -> None:
    """top_k=1 draws the likeliest whatever the seed; mixtures change pixels and are repeatable."""
    one, other = (pipe(2, seeds=seed, top_k=1)[0] for seed in (0, 1))
    assert same(one, other)
    plain, smooth, again = (pipe(2, more_smooth=flag)[0] for flag in (False, True, True))
    assert torch.equal(plain.tokens[0], smooth.tokens[0])
    assert np.abs(plain.pixels.astype(int) - smooth.pixels).max() > 10
    assert same(smooth, again)
    assert not same(plain, pipe(2, top_p=0.3)[0])


def test_stream(pipe: NextScalePipeline) -> None:
    """A step a scale; each shows the tokens so far, and the last is what a call gives."""
    images = pipe([0, 1], seeds=[1, 2])
    steps = list(pipe.stream([0, 1], seeds=[1, 2]))
    assert [(step.scale, step.side) for step in steps] == list(enumerate(SIDES))
    assert [len(step.images) for step in steps] == [0, 0, 0, 2]
    for image, last, row in zip(images, steps[-1].images, steps[-1].pixels, strict=True):
        assert same(image, last) and np.array_equal(row, image.pixels)
    for step in steps:
        known = [torch.stack(maps) for maps in zip(*(i.tokens for i in images), strict=True)]
        f_hat = pipe.vae.quantize.latents(known[: step.scale + 1], SIDES)
        assert np.abs(pipe._pixels(f_hat).astype(int) - step.pixels).max() <= 1


def test_another_size() -> None:
    """Pictures are resized to the config's height and width; tokens stay the same."""
    wide = tiny_pictures(height=12, width=30)
    image = wide(1)[0]
    assert image.pixels.shape == (12, 30, 3)
    assert all(map(torch.equal, image.tokens, tiny_pictures()(1)[0].tokens))
    assert next(wide.stream(1)).pixels.shape == (1, 12, 30, 3)
    assert abs(image.pixels.mean() - tiny_pictures()(1)[0].pixels.mean()) < 8


def test_one_scale() -> None:
    """A model of a single scale, which has nothing to store."""
    var = tiny_var(patch_nums=(4,))
    assert NextScalePipeline(var, tiny_vqvae())(1, top_k=0)[0].tokens[0].shape == (16,)


# Variations


@pytest.mark.parametrize("from_scale", [1, 2, 3])
@pytest.mark.parametrize("shared_aln", [False, True])
def test_vary(from_scale: int, shared_aln: bool) -> None:
    """The coarse scales are the image's, the finer ones drawn anew: the twin's, seed by seed."""
    pipe = tiny_pictures(shared_aln)
    image = pipe(1, seeds=3)[0]
    others = pipe.vary(image, from_scale, n=3, seeds=[7, 8, 9])
    for other, seed in zip(others, [7, 8, 9], strict=True):
        assert (other.label, other.seed) == (1, seed)
        for scale in range(SCALES):
            kept = torch.equal(other.tokens[scale], image.tokens[scale])
            assert kept == (scale < from_scale)
        assert equal(other, by_hand(pipe, 1, seed, known=image.tokens, first=from_scale))
    assert len({other.pixels.tobytes() for other in others}) == 3
    assert same(pipe.vary(image, from_scale, n=1, seeds=[8])[0], others[1])


def test_vary_by_default(pipe: NextScalePipeline) -> None:
    """Four, from the middle on; from the first scale on, it is another image of the class."""
    image = pipe(2, seeds=5)[0]
    others = pipe.vary(image)
    assert [other.seed for other in others] == [0, 1, 2, 3]
    assert all(torch.equal(other.tokens[1], image.tokens[1]) for other in others)
    assert not all(torch.equal(other.tokens[2], image.tokens[2]) for other in others)
    assert same(pipe.vary(image, 0, n=1, seeds=6)[0], pipe(2, seeds=6)[0])
    assert pipe.vary(pipe(None)[0], n=1)[0].label is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"from_scale": 4}, "from_scale=4: accepted are 0 to 3"),
        ({"from_scale": -1}, "from_scale=-1"),
        ({"n": 0}, "n=0"),
        ({"n": 2, "seeds": [1]}, "1 seeds for 2 images"),
    ],
)
def test_vary_refuses(pipe: NextScalePipeline, values: dict[str, int], says: str) -> None:
    """Values out of range."""
    with pytest.raises(InvalidRequest, match=says):
        pipe.vary(pipe(0)[0], **values)


def test_an_image_of_another_model(pipe: NextScalePipeline) -> None:
    """Has maps of other sizes; both are said."""
    image = pipe(0)[0]
    other = NextScaleImage(image.pixels, image.tokens[:2], 0, 0)
    with pytest.raises(InvalidRequest, match=r"\[1, 4\]; this model's are of \[1, 4, 9, 25\]"):
        pipe.vary(other)
    with pytest.raises(InvalidRequest, match=r"this model's are of \[1, 4, 9, 25\]"):
        pipe.edit(other, np.ones((10, 10), bool))


# Editing


def right_half(first: int = 6) -> np.ndarray:
    mask = np.zeros((10, 10), bool)
    mask[:, first:] = True
    return mask


def forced(mask: np.ndarray) -> Callable[[int], Tensor]:
    """Where an edit keeps tokens: the mask holds less than half of one; and the first scale."""

    def where(scale: int) -> Tensor:
        side = SIDES[scale]
        share = F.adaptive_avg_pool2d(torch.tensor(mask)[None].float(), side).flatten()
        return share < 0.5 if scale else torch.ones(1, dtype=torch.bool)

    return where


@pytest.mark.parametrize(("cls", "first"), [(None, 6), ("ocean", 6), (None, 5)])
def test_edit_keeps_tokens_outside_the_mask(
    pipe: NextScalePipeline, cls: str | None, first: int
) -> None:
    """At every scale; inside, and where half of a token is, they are drawn as the twin draws them,
    for another class, too."""
    image, mask = pipe(1, seeds=3)[0], right_half(first)
    edited = pipe.edit(image, mask, cls, seed=9)
    where = forced(mask)
    for scale in range(SCALES):
        kept = where(scale)
        assert torch.equal(edited.tokens[scale][kept], image.tokens[scale][kept])
        assert not kept.any() or scale == 0 or not kept.all()
    changed = [(a != b).float().mean() for a, b in zip(edited.tokens, image.tokens, strict=True)]
    assert max(changed) > 0.3
    label = 1 if cls is None else 3
    assert equal(edited, by_hand(pipe, label, 9, known=image.tokens, where=where))
    assert (edited.label, edited.seed) == (label, 9)


def test_edit_of_everything_and_of_a_mixture(pipe: NextScalePipeline) -> None:
    """A full mask keeps the first scale alone; a uint8 mask counts from 128; mixtures are kept
    out of what is forced."""
    image = pipe(1, seeds=3)[0]
    full = np.full((10, 10), 255, np.uint8)
    edited = pipe.edit(image, full, seed=4)
    assert torch.equal(edited.tokens[0], image.tokens[0])
    assert not torch.equal(edited.tokens[3], image.tokens[3])
    half = right_half()
    grey = np.where(half, 128, 127).astype(np.uint8)
    assert same(pipe.edit(image, grey, seed=4), pipe.edit(image, half, seed=4))
    smooth = pipe.edit(image, half, seed=4, more_smooth=True)
    assert torch.equal(smooth.tokens[3].view(5, 5)[:, :2], image.tokens[3].view(5, 5)[:, :2])
    one_token = np.zeros((10, 10), bool)
    one_token[:2, :2] = True
    corner = pipe.edit(image, one_token, seed=1, more_smooth=True)
    assert torch.equal(corner.tokens[3][1:], image.tokens[3][1:])
    changed = np.abs(corner.pixels.astype(int) - image.pixels)
    assert changed[6:, 6:].mean() < 2 < changed[:4, :4].mean()


def test_a_picture_is_encoded(pipe: NextScalePipeline) -> None:
    """Tokens are the autoencoder's, of the picture at the model's size; pixels what they decode to;
    an edit of a picture is one of its tokens, of no class."""
    make = np.random.default_rng(0)
    picture = make.integers(0, 256, (10, 10, 3), dtype=np.uint8)
    image = pipe.encode(picture)
    x = torch.tensor(picture).permute(2, 0, 1)[None] / 127.5 - 1
    want = pipe.vae.quantize.tokens(pipe.vae.encode(x), SIDES)
    assert equal(image, [one[0] for one in want])
    shown = pipe._pixels(pipe.vae.quantize.latents(want, SIDES))[0]
    assert np.array_equal(image.pixels, shown)
    assert (image.label, image.seed) == (None, None)
    edited = pipe.edit(picture, right_half(), seed=2)
    assert edited.label is None
    assert same(edited, pipe.edit(image, right_half(), seed=2))
    large = pipe.encode(np.kron(picture, np.ones((3, 2, 1), np.uint8)))
    assert [len(tokens) for tokens in large.tokens] == [1, 4, 9, 25]
    wide = np.zeros((30, 20), bool)
    wide[:, 12:] = True
    assert pipe.edit(np.kron(picture, np.ones((3, 2, 1), np.uint8)), wide).label is None


@pytest.mark.parametrize(
    "mask",
    [np.zeros((10, 9), bool), np.zeros((10, 10), float), np.zeros((10, 10, 3), np.uint8)],
)
def test_masks_of_another_form(pipe: NextScalePipeline, mask: np.ndarray) -> None:
    """Both forms are said."""
    with pytest.raises(InvalidRequest, match=r"mask is bool or uint8 \[10, 10\].*this is"):
        pipe.edit(pipe(0)[0], mask)


def test_a_mask_without_a_token(pipe: NextScalePipeline) -> None:
    """It would have no effect: the message says how much it takes."""
    mask = np.zeros((10, 10), bool)
    mask[3, 3] = True
    with pytest.raises(InvalidRequest, match=r"mask \(1 pixels\) covers no token.*2 x 2 pixels"):
        pipe.edit(pipe(0)[0], mask)


@pytest.mark.parametrize("shape", [(10, 10), (10, 10, 4), (0, 10, 3)])
def test_pictures_of_another_form(pipe: NextScalePipeline, shape: tuple[int, ...]) -> None:
    """What a picture is, and what was given."""
    with pytest.raises(InvalidRequest, match=r"uint8 \[H, W, 3\]; this is uint8 \["):
        pipe.encode(np.zeros(shape, np.uint8))
    with pytest.raises(InvalidRequest, match=r"uint8 \[H, W, 3\]; this is float"):
        pipe.edit(np.zeros((10, 10, 3)), np.ones((10, 10), bool))


def test_weights_without_an_encoder() -> None:
    """Draw and vary, but take no picture."""
    pipe = tiny_pictures(encoder=False)
    image = pipe(0)[0]
    assert pipe.edit(image, right_half()).label == 0
    with pytest.raises(WeightsError, match="no encoder"):
        pipe.encode(image.pixels)


# Memory, threads


@pytest.fixture
def pools(pipe: NextScalePipeline, monkeypatch: pytest.MonkeyPatch) -> list[BlockPool]:
    """Every pool that calls make from now on."""
    made: list[BlockPool] = []
    make = NextScalePipeline._pool
    monkeypatch.setattr(
        NextScalePipeline, "_pool", lambda self, rows: made.append(make(self, rows)) or made[-1]
    )
    return made


def test_nothing_is_left_in_a_pool(pipe: NextScalePipeline, pools: list[BlockPool]) -> None:
    """After a call, a stream broken off, an edit and variations; each has just the room it needs:
    a block a row, without the last scale."""
    image = pipe([0, 1])[0]
    steps = pipe.stream(0)
    next(steps)
    assert pools[1].stats().live == 2
    steps.close()
    pipe.edit(image, right_half())
    pipe.vary(image, 2, n=3)
    pipe(0, cfg=0)
    assert [pool.stats().total for pool in pools] == [4, 2, 2, 6, 1]
    for pool in pools:
        pool.check()
        assert pool.stats().free == pool.stats().total
        assert pool.spec.block_tokens == 14


def test_an_error_inside_gives_everything_back(
    pipe: NextScalePipeline, pools: list[BlockPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises, in a call and in variations."""
    image = pipe(0)[0]
    lookup, calls = pipe.vae.quantize.lookup, [0]

    def failing(indices: Tensor, side: int) -> Tensor:
        calls[0] += 1
        if side == SIDES[2]:
            raise RuntimeError("broken")
        return lookup(indices, side)

    monkeypatch.setattr(pipe.vae.quantize, "lookup", failing)
    for call in (lambda: pipe(0), lambda: pipe.vary(image, 1), lambda: list(pipe.stream(0))):
        with pytest.raises(RuntimeError, match="broken"):
            call()
        assert pools[-1].stats().free == pools[-1].stats().total
    assert len(pools) == 4


def test_threads_and_streams_do_not_meet(pipe: NextScalePipeline) -> None:
    """Images drawn at the same time are those drawn alone; modules are as they were."""
    alone = [pipe(i, seeds=i)[0] for i in range(4)]
    before = {key: value.clone() for key, value in pipe.var.state_dict().items()}
    attributes = [set(vars(module)) for module in pipe.var.modules()]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: pipe(i, seeds=i)[0], range(4)))
    assert all(map(same, alone, together))
    one, other = pipe.stream(0, seeds=0), pipe.stream(1, seeds=1)
    *_, last = zip(one, other, strict=True)
    assert same(last[0].images[0], alone[0]) and same(last[1].images[0], alone[1])
    assert attributes == [set(vars(module)) for module in pipe.var.modules()]
    assert all(torch.equal(before[key], value) for key, value in pipe.var.state_dict().items())


def test_no_gradients_and_no_mode_leaks(pipe: NextScalePipeline) -> None:
    """Between two steps of a stream the caller's own mode holds."""
    for _ in pipe.stream(0):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# Requests


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        ("lawa, brick", "'lawa, brick' is unknown: close are 'lava, brick'"),
        ("zzz", r"'zzz' is unknown: there are 5, such as 'lava, brick'"),
        ("lava", r"fits several: 'lava, brick' \(0\), 'lava, stone' \(1\); name one"),
        (5, "class 5: accepted are 0 to 4"),
        (-1, "class -1: accepted are 0 to 4"),
        (True, "class True: a name, an index or None"),
        (1.5, "class 1.5: a name, an index or None"),
    ],
)
def test_unknown_classes(pipe: NextScalePipeline, cls: str | int, says: str) -> None:
    """What is wrong and what is accepted."""
    with pytest.raises(InvalidRequest, match=says):
        pipe([0, cls])


def test_requests_are_checked_before_anything_is_drawn(pipe: NextScalePipeline) -> None:
    """A stream refuses when it is asked for, not at its first step."""
    with pytest.raises(InvalidRequest, match="class 9"):
        pipe.stream(9)
    with pytest.raises(InvalidRequest, match="cfg=nan"):
        pipe.stream(0, cfg=math.nan)
    with pytest.raises(InvalidRequest, match="classes are empty"):
        pipe([])


def test_parts_that_do_not_fit() -> None:
    """Names of another number than classes, another codebook, no names where one is asked for."""
    with pytest.raises(InvalidRequest, match="2 class names for a model of 5 classes"):
        NextScalePipeline(tiny_var(), tiny_vqvae(), ImageConfig(("a", "b")))
    with pytest.raises(InvalidRequest, match="entries of width 4, the transformer takes .* 6"):
        NextScalePipeline(tiny_var(), tiny_vqvae(latent_channels=4))
    bare = NextScalePipeline(tiny_var(), tiny_vqvae())
    assert bare.classes == ()
    with pytest.raises(InvalidRequest, match="no class names; accepted are 0 to 4, or .*classes="):
        bare("lava")


# Loading


def load(*args: str | Path, **options: str | Path) -> NextScalePipeline:
    return NextScalePipeline.from_pretrained(*args, device="cpu", dtype="float32", **options)


def test_a_saved_model_draws_the_same(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """With checksums or without; classes, size, sampling and sides come back."""
    folder = tmp_path / "mine"
    pipe.save_pretrained(folder, torch.float32)
    for _ in range(2):
        again = load(folder)
        assert (again.config, again.patch_nums, again.name) == (pipe.config, SIDES, "mine")
        assert same(again(1, seeds=4)[0], pipe(1, seeds=4)[0])
        registry.write_manifest(folder, name="mine", kind="image", version="1", licence="MIT")
    (folder / "var.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="var.safetensors is damaged"):
        load(folder)


def test_bfloat16(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Draws, and close to the float32 model at the first scale's logits."""
    pipe.save_pretrained(tmp_path / "m", torch.float32)
    half = NextScalePipeline.from_pretrained(tmp_path / "m", device="cpu", dtype="bfloat16")
    assert (half.var.dtype, half.vae.quantize.embedding.weight.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    image = half([0, 1])[0]
    assert image.pixels.shape == (10, 10, 3)
    assert half.encode(image.pixels).pixels.shape == (10, 10, 3)


def published(folder: Path, depth: int = 2) -> tuple[Path, Path]:
    """Small weights as VAR publishes them: the key lists' names, flat, with `lvl_1L`."""
    level = torch.arange(SCALES).repeat_interleave(torch.tensor([side**2 for side in SIDES]))
    zeros = {f"blocks.{i}.attn.zero_k_bias": torch.zeros(32) for i in range(depth)}
    paths = folder / "var_d2.pth", folder / "vae.pth"
    torch.save({**tiny_var().state_dict(), **zeros, "lvl_1L": level[None]}, paths[0])
    hits = {"quantize.ema_vocab_hit_SV": torch.zeros(10, 24)}
    torch.save({**tiny_vqvae().state_dict(), **hits}, paths[1])
    return paths


def test_published_files(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """A transformer and an autoencoder by their paths; VAR's demo's sampling; names from a file."""
    var, vae = published(tmp_path)
    got = load(var, vae)
    assert (got.patch_nums, got.name, got.classes) == (SIDES, "var_d2", ())
    assert (got.config.sampling.cfg, got.config.sampling.top_k) == (4.0, 900)
    options = {"cfg": 2.0, "top_k": 0, "top_p": 0.0}
    assert same(got(1, seeds=4, **options)[0], pipe(1, seeds=4)[0])  # type: ignore[arg-type]
    lines, listed = tmp_path / "names.txt", tmp_path / "names.json"
    lines.write_text("\n".join(CLASSES) + "\n")
    listed.write_text(json.dumps(CLASSES))
    for names in (lines, listed, CLASSES):
        assert load(var, vae, classes=names).label("ocean") == 3  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="classes='none.txt' can't be read"):
        load(var, vae, classes="none.txt")


def test_where_the_autoencoder_is(tmp_path: Path) -> None:
    """Beside the transformer under its published name, or in the same checkpoint; else it is
    asked for."""
    var, vae = published(tmp_path)
    with pytest.raises(WeightsError, match="var_d2.pth: an autoencoder is needed.*vae_ch160v4096"):
        load(var)
    vae.rename(tmp_path / files.VAE_NAME)
    assert load(var).patch_nums == SIDES
    trainer = {"var_wo_ddp": torch.load(var), "vae_local": tiny_vqvae().state_dict()}
    torch.save({"trainer": trainer, "iter": 5}, tmp_path / "ckpt.pth")
    (tmp_path / files.VAE_NAME).unlink()
    assert load(tmp_path / "ckpt.pth").patch_nums == SIDES


def test_what_is_no_model_of_images(tmp_path: Path) -> None:
    """Each in one line that says what it is."""
    with pytest.raises(InvalidRequest, match="'pocket-world' is not an? image.*streamgen play"):
        load("pocket-world")
    with pytest.raises(UnknownModel, match="no model 'nothing'"):
        load("nothing")
    with pytest.raises(WeightsError, match="var_d16.pth: no such file"):
        load(tmp_path / "var_d16.pth", tmp_path / "vae.pth")
    with pytest.raises(InvalidRequest, match="vae='x.pth': model folders hold their own"):
        load("pocket-world", "x.pth")
    var, vae = published(tmp_path)
    with pytest.raises(WeightsError, match="is a VQVAE .*give this file as vae="):
        load(vae, vae)
    torch.save(tiny_vqvae(latent_channels=4).state_dict(), vae)
    with pytest.raises(WeightsError, match="of width 4 .*takes 24 .*of width 6"):
        load(var, vae)


def test_a_damaged_config(pipe: NextScalePipeline, tmp_path: Path) -> None:
    """Sampling out of range, sides that are not the weights'."""
    folder = tmp_path / "m"
    pipe.save_pretrained(folder)
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "sampling": {"cfg": -1}}))
    with pytest.raises(WeightsError, match="does not fit: cfg=-1"):
        load(folder)
    path.write_text(json.dumps({**whole, "sampling": {"steps": 3}}))
    with pytest.raises(WeightsError, match="does not fit: .*steps"):
        load(folder)
    path.write_text(json.dumps({**whole, "patch_nums": [1, 2, 3]}))
    with pytest.raises(WeightsError, match=r"patch_nums \(1, 2, 3\) make 14 tokens"):
        load(folder)


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_would() -> None:
    """The first scale's most likely tokens, and a whole image without an error."""
    pipe, there = tiny_pictures(), tiny_pictures()
    for part in (there.var, there.vae):
        part.to("cuda")
    one, other = (each([0, 1], top_k=1) for each in (pipe, there))
    assert all(torch.equal(a.tokens[0], b.tokens[0]) for a, b in zip(one, other, strict=True))
    there.vary(there(0)[0])
    there.edit(there.encode(one[0].pixels), right_half(), cls=1)
