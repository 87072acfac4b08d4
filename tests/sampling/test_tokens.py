"""Drawing tokens: each step against the definition written out, and the order of random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from streamgen.errors import InvalidRequest
from streamgen.sampling.tokens import Sampling, draw, guide, keep_likely, mix, ramp

IMAGES, TOKENS, VOCAB = 3, 5, 12


def some_logits(seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(IMAGES, TOKENS, VOCAB, generator=make)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def kept(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """The entries that may be drawn, by the words of the definition."""
    left = set(range(len(logits)))
    if top_k:
        least = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        left = {i for i in left if logits[i] >= least}
    if top_p:
        total = sum(math.exp(logits[i]) for i in left)
        mass = 0.0
        for i in sorted(left, key=lambda i: logits[i])[:-1]:
            mass += math.exp(logits[i]) / total
            if mass <= 1 - top_p:
                left.remove(i)
    return left


@pytest.mark.parametrize("top_k", [0, 1, 4, VOCAB, 900])
@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.6, 0.95, 1.0])
def test_what_may_be_drawn(top_k: int, top_p: float) -> None:
    """Top-k, then top-p of what is left; what is kept keeps its logit."""
    logits = some_logits()
    filtered = keep_likely(logits, top_k, top_p)
    for row, got in zip(logits.flatten(0, 1), filtered.flatten(0, 1), strict=True):
        want = kept(row.tolist(), top_k, top_p)
        assert {int(i) for i in got.isfinite().nonzero()} == want
        assert torch.equal(got[got.isfinite()], row[got.isfinite()])


def test_ties_stay_and_the_input_too() -> None:
    """Entries as likely as the k-th may be drawn; nothing is done in place."""
    logits = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 2.0]]])
    before = logits.clone()
    assert keep_likely(logits, 2, 0.0).isfinite().tolist() == [[[False, True, True, True, True]]]
    assert keep_likely(logits, 0, 1e-9).isfinite().tolist() == [[[False, True] + [False] * 3]]
    assert torch.equal(logits, before)


def test_guidance_grows_with_the_scale() -> None:
    """(1 + t) * condition - t * uncondition, t from 0 at the first scale to cfg at the last."""
    logits = torch.cat([some_logits(0), some_logits(1)])
    cond, uncond = some_logits(0), some_logits(1)
    assert [ramp(scale, 5) for scale in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert ramp(0, 1) == 0
    assert torch.equal(guide(logits, 0.0), cond)
    for t in (0.5, 4.0):
        assert torch.allclose(guide(logits, t), cond + t * (cond - uncond), atol=1e-5)


def test_one_generator_is_one_draw_for_the_batch() -> None:
    """One multinomial call for all tokens of all images, as VAR's code makes it."""
    logits = keep_likely(some_logits(), 6, 0.9)
    (one, other) = generators(7, 7)
    p = logits.softmax(-1).view(-1, VOCAB)
    want = torch.multinomial(p, 1, replacement=True, generator=other).view(IMAGES, TOKENS)
    assert torch.equal(draw(logits, one), want)
    assert torch.equal(one.get_state(), other.get_state())
    assert (logits.gather(-1, want[..., None]) > -torch.inf).all()


@pytest.mark.parametrize("smooth", [False, True])
def test_an_images_tokens_do_not_depend_on_the_others(smooth: bool) -> None:
    """With a generator an image: alone, in a batch, in another order."""
    logits = some_logits()

    def run(images: list[int]) -> Tensor:
        own = generators(*(10 + i for i in images))
        first = draw(logits[images], own)
        return (
            mix(logits[images], 0.5, own)
            if smooth
            else torch.cat([first, draw(logits[images], own)], 1)
        )

    batch = run([0, 1, 2])
    assert torch.equal(run([2, 0]), batch[[2, 0]])
    for i in range(IMAGES):
        assert torch.equal(run([i]), batch[[i]])
    assert not torch.equal(batch[0], batch[1])


def test_draws_follow_the_probabilities() -> None:
    """Of 20,000 draws each entry gets its share, to five standard errors."""
    n, logits = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = draw(logits.expand(1, n, 4), generators(0))
    share = drawn.flatten().bincount(minlength=4) / n
    p = logits.softmax(0)
    assert ((share - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


@pytest.mark.parametrize("way", [0.0, 0.6, 1.0])
def test_mixtures(way: float) -> None:
    """Gumbel-softmax of logits * (1 + way) at the published temperature; -inf has no share."""
    logits = keep_likely(some_logits(), 4, 0.0)
    (one, other) = generators(3, 3)
    shares = mix(logits, way, one)
    noise = -torch.empty_like(logits).exponential_(generator=other).log()
    temperature = max(0.27 * (1 - way * 0.95), 0.005)
    assert torch.equal(shares, ((logits * (1 + way) + noise) / temperature).softmax(-1))
    assert (shares[logits == -torch.inf] == 0).all()
    assert torch.allclose(shares.sum(-1), torch.ones(IMAGES, TOKENS))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cfg": -1.0}, "cfg=-1.0"),
        ({"cfg": math.nan}, "cfg=nan"),
        ({"top_k": -3}, "top_k=-3"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 1.01}, "top_p=1.01"),
    ],
)
def test_values_out_of_range(values: dict[str, float], says: str) -> None:
    """Refused with what is accepted."""
    with pytest.raises(InvalidRequest, match=rf"{says}.*accepted"):
        Sampling(**values)  # type: ignore[arg-type]
    assert Sampling() == Sampling(cfg=4, top_k=900, top_p=0.95)
