"""Policies against arithmetic done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamgen.cache import Append, CachePolicy, SinkWindow
from streamgen.cache.policy import PinnedWindow, RollingBuffer
from streamgen.errors import InvalidRequest


@pytest.mark.parametrize(
    ("window", "sink", "end", "visible"),
    [
        (6, 1, 3, (0, 1, 2)),
        (6, 1, 6, (0, 1, 2, 3, 4, 5)),
        (6, 1, 9, (0, 4, 5, 6, 7, 8)),
        (6, 1, 12, (0, 7, 8, 9, 10, 11)),
        (7, 1, 6, (0, 1, 2, 3, 4, 5)),
        (7, 1, 9, (0, 3, 4, 5, 6, 7, 8)),
        (7, 1, 12, (0, 6, 7, 8, 9, 10, 11)),
        (9, 3, 9, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (9, 3, 12, (0, 1, 2, 6, 7, 8, 9, 10, 11)),
        (9, 3, 15, (0, 1, 2, 9, 10, 11, 12, 13, 14)),
    ],
)
def test_what_a_chunk_of_three_sees(
    window: int, sink: int, end: int, visible: tuple[int, ...]
) -> None:
    """The window counts the sink and the chunk itself."""
    assert tuple(SinkWindow(sink, window).visible(end)) == visible


@pytest.mark.parametrize(
    ("window", "sink", "places"),
    [
        (6, 1, [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]),
        (7, 1, [0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]),
        (9, 3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5]),
    ],
)
def test_where_frames_lie(window: int, sink: int, places: list[int]) -> None:
    """A frame behind the window takes the place of the frame it pushes out."""
    policy = SinkWindow(sink, window)
    assert [policy.place(ordinal) for ordinal in range(12)] == places


def test_append_keeps_everything() -> None:
    """All frames are visible, in their order."""
    policy = Append(5)
    assert (policy.lane_size, policy.shadow) == (5, 0)
    assert list(policy.visible(4)) == [0, 1, 2, 3] == [policy.place(f) for f in range(4)]


def test_who_is_causal() -> None:
    """A chunk sees itself as a whole unless the policy counts how far back a frame sees."""
    assert SinkWindow(1, 4).span is PinnedWindow(1, 4, 1).span is Append(4).span is None
    assert (Append(4, causal=True).span, RollingBuffer(4).span) == (4, 4)
    assert RollingBuffer(4, inclusive=True).span == 5


def test_shadow_is_the_sink_when_asked_for() -> None:
    """A shadowed sink changes where the sink lives, and neither what is seen nor the lane."""
    plain, shadowed = SinkWindow(2, 6), SinkWindow(2, 6, shadow_sink=True)
    assert (plain.shadow, shadowed.shadow) == (0, 2)
    assert (plain.lane_size, plain.visible(9)) == (shadowed.lane_size, shadowed.visible(9))


@given(
    policy=st.one_of(
        st.builds(Append, st.integers(60, 70)),
        st.integers(0, 6).flatmap(
            lambda sink: st.builds(SinkWindow, st.just(sink), st.integers(sink + 1, 20))
        ),
        st.builds(RollingBuffer, st.integers(1, 9), st.integers(1, 9), st.booleans()),
        st.integers(1, 9).map(lambda pin: PinnedWindow(1, 12, 2).pin([pin], end=10)),
    ),
    end=st.integers(1, 60),
)
def test_contract(policy: CachePolicy, end: int) -> None:
    """What is visible fills a prefix of the lane, one to one, and what has left stays away."""
    visible = list(policy.visible(end))
    assert visible == sorted(visible) and visible[-1] == end - 1
    assert sorted(policy.place(ordinal) for ordinal in visible) == list(range(len(visible)))
    assert len(visible) <= policy.lane_size
    assert set(policy.visible(end + 1)) - {end} <= set(visible)


@pytest.mark.parametrize(("sink", "window"), [(-1, 4), (3, 3), (0, 0)])
def test_window_without_room(sink: int, window: int) -> None:
    """A window that holds nothing but the sink is refused."""
    with pytest.raises(InvalidRequest, match=f"sink={sink}, window={window}"):
        SinkWindow(sink, window)


def test_chunk_beyond_the_window() -> None:
    """Sink and chunk together must fit; the message says the numbers."""
    SinkWindow(3, 6).validate(3)
    with pytest.raises(InvalidRequest, match=r"window=5 .* sink=3 \+ chunk=3"):
        SinkWindow(3, 5).validate(3)


def test_chunk_beyond_the_capacity() -> None:
    """Append ends where its lane ends."""
    Append(6).validate(3, end=6)
    with pytest.raises(InvalidRequest, match="capacity of 6"):
        Append(6).validate(3, end=9)
    with pytest.raises(InvalidRequest, match="capacity=0"):
        Append(0)


@pytest.mark.parametrize(
    "policy", [Append(4), SinkWindow(1, 4), RollingBuffer(4), PinnedWindow(1, 4, 1)]
)
def test_empty_chunk(policy: CachePolicy) -> None:
    """A chunk has at least one frame."""
    with pytest.raises(InvalidRequest, match="a chunk of 0"):
        policy.validate(0)
