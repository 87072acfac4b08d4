"""Video pipelines: lengths, pictures, clips, prompt schedules, work ahead; tiny random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from videos import tiny_video

from streamgen.cache import BlockPool
from streamgen.errors import InvalidRequest
from streamgen.pipelines.causal_video import PRESETS, CausalVideoPipeline
from streamgen.session import Session

MAZE, SNOW = "a brick maze at night", "snow"


@pytest.fixture(scope="module")
def pipe() -> CausalVideoPipeline:
    return tiny_video()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Any:
    """Whatever a test does with the shared pipeline, its pool is empty afterwards."""
    yield
    if "pipe" in request.fixturenames:
        engine = request.getfixturevalue("pipe").engine
        engine.pool.check()
        assert engine.pool.stats().live == 0


def frames_of(session: Session, chunks: int, **options: Any) -> np.ndarray:
    return np.concatenate([chunk.frames for chunk in session.stream(chunks, **options)])


def picture(pipe: CausalVideoPipeline, seed: int = 0) -> np.ndarray:
    shape = (pipe.config.height, pipe.config.width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def clip(pipe: CausalVideoPipeline, frames: int, seed: int = 0) -> np.ndarray:
    shape = (frames, pipe.config.height, pipe.config.width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# Lengths


@pytest.mark.parametrize(
    ("changes", "accepted", "refused"),
    [
        ({}, (5, 13, 21, 81 + 4), (0, 1, 4, 6, 12, 14, 81)),
        ({"chunk_frames": 1}, (1, 5, 9, 81), (0, 2, 4, 80)),
        ({"chunk_frames": 3}, (9, 21, 33, 81), (1, 8, 10, 80)),
        ({"chunk_frames": 3, "first_chunk": 1}, (1, 13, 25, 85), (0, 9, 12, 81)),
    ],
)
def test_frame_counts(
    changes: dict[str, Any], accepted: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    """The first latent frame gives one pixel frame, each other one four; chunks are whole."""
    pipe = tiny_video(**changes)
    for frames in accepted:
        pipe.check_frames(frames)
        assert pipe.frames_for(frames / pipe.config.fps) == frames
    for frames in refused:
        with pytest.raises(InvalidRequest, match=f"^{frames} frames.*nearest: ") as caught:
            pipe.check_frames(frames)
        nearest = [int(n) for n in str(caught.value).rpartition("nearest: ")[2].split(" and ")]
        for near in nearest:
            pipe.check_frames(near)


@pytest.mark.parametrize("first_chunk", [0, 1])
@pytest.mark.parametrize("chunk_frames", [1, 2, 3])
def test_chunks_are_as_long_as_told(chunk_frames: int, first_chunk: int) -> None:
    """Frames are numbered without a gap, and a video of n frames has `chunks_for(n)` chunks."""
    pipe = tiny_video(chunk_frames=chunk_frames, first_chunk=first_chunk)
    frames = pipe.first_pixels + 3 * pipe.chunk_pixels
    with pipe.session(MAZE, seed=1) as session:
        made = list(session.stream(pipe.chunks_for(frames)))
        assert [chunk.index for chunk in made] == [0, 1, 2, 3]
        starts = np.cumsum([0] + [len(chunk.frames) for chunk in made])
        assert [chunk.first_frame for chunk in made] == list(starts[:-1])
        assert starts[-1] == session.frame == frames
        assert made[0].frames.shape[1:] == (32, 48, 3)


def test_decoded_as_one_video(pipe: CausalVideoPipeline) -> None:
    """Chunk by chunk or the latents of the whole video at once: bitwise the same pixels."""
    latents: list[Tensor] = []
    decode = pipe.engine.codec.decode

    def spy(x: Tensor, state: Any = None) -> Any:
        latents.append(x)
        return decode(x, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.engine.codec, "decode", spy)
        made = pipe(MAZE, 21, seed=2)
    whole, _ = decode(torch.cat(latents))
    assert (whole.numpy() == made).all()


# A long run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "sliding_sink"},
        {"chunk_frames": 1, "sink": 0},
        {"chunk_frames": 3, "first_chunk": 1},
        {"sink": 0, "window": 4},
    ],
)
def test_no_end(changes: dict[str, Any]) -> None:
    """Far beyond the window the K/V stay as many, and every frame still comes."""
    pipe = tiny_video(history_frames=0, max_sessions=1, **changes)
    with pipe.session(MAZE) as session:
        for _ in session.stream(8):
            pass
        used = pipe.engine.pool.stats().live
        for chunk in session.stream(40):
            assert len(chunk.frames) == pipe.chunk_pixels
            assert pipe.engine.pool.stats().live == used


# Seeds and texts


def test_same_seed_same_video(pipe: CausalVideoPipeline) -> None:
    """Bitwise; another seed or text gives another video."""
    one = pipe(MAZE, 13, seed=4)
    assert (one == pipe(MAZE, 13, seed=4)).all()
    assert (one != pipe(MAZE, 13, seed=5)).any()
    assert (one != pipe(SNOW, 13, seed=4)).any()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recache", ["last_chunk", "window_causal", "window_bidirectional", "off"])
def test_prompt_schedule(pipe: CausalVideoPipeline, recache: Any, overlap: bool) -> None:
    """A text takes effect at the first boundary at or after its frame, as if asked just then."""
    made = list(pipe.generate({0: MAZE, 14: SNOW}, 37, seed=3, recache=recache, overlap=overlap))
    assert [e.frame for chunk in made for e in chunk.applied] == [21]
    with pipe.session(MAZE, seed=3) as session:
        expected = [frames_of(session, 3)]
        session.prompt(SNOW, recache=recache)
        expected.append(frames_of(session, 2))
    assert (np.concatenate([c.frames for c in made]) == np.concatenate(expected)).all()


def test_ways_to_recache_differ(pipe: CausalVideoPipeline) -> None:
    """Under one and the same switch."""
    ways = ("last_chunk", "window_causal", "window_bidirectional", "off")
    made = {pipe({0: MAZE, 21: SNOW}, 29, seed=3, recache=how).tobytes() for how in ways}
    assert len(made) == 4


def test_config_says_how_to_recache() -> None:
    """What a call does not say."""
    pipe = tiny_video(recache="off")
    texts = {0: MAZE, 21: SNOW}
    assert (pipe(texts, 29) == pipe(texts, 29, recache="off")).all()
    assert (pipe(texts, 29) != pipe(texts, 29, recache="last_chunk")).any()


def test_receipts_of_a_schedule(pipe: CausalVideoPipeline) -> None:
    """The receipt names the boundary (5, 13, 21, ...), before the first chunk and later."""
    with pipe.session(MAZE) as session:
        at = [session.prompt(SNOW, at=frame).applies_at_frame for frame in (0, 1, 5, 6, 13, 14)]
        assert at == [0, 5, 5, 13, 13, 21]
        session.step()
        assert session.prompt(SNOW).applies_at_frame == 5
        assert session.prompt(SNOW, at=6).applies_at_frame == 13
        with pytest.raises(InvalidRequest, match="frame 4 .*accepted are 5 and later"):
            session.prompt(SNOW, at=4)


def test_scheduled_prompts_survive_a_failure(pipe: CausalVideoPipeline) -> None:
    """A step that fails loses none and repeats none."""
    expected = pipe({0: MAZE, 5: SNOW, 13: "day"}, 21, seed=6)
    denoise, calls = pipe.engine.denoise, 0

    def flaky(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in (2, 4):
            raise RuntimeError("no luck")
        return denoise(*args)

    with pytest.MonkeyPatch.context() as patch, pipe.session(MAZE, seed=6) as session:
        patch.setattr(pipe.engine, "denoise", flaky)
        session.prompt("day", at=13)
        session.prompt(SNOW, at=5)
        made = []
        while session.frame < 21:
            try:
                made.append(session.step())
            except RuntimeError:
                pass
        assert calls == 5
        assert [e.frame for chunk in made for e in chunk.applied] == [5, 13]
        assert (np.concatenate([chunk.frames for chunk in made]) == expected).all()


# Work ahead


def test_overlap_changes_nothing(pipe: CausalVideoPipeline) -> None:
    """Decoded beside the next chunk or before it: bitwise the same frames, in order."""
    with pipe.session(MAZE, seed=1) as one, pipe.session(MAZE, seed=1) as other:
        assert (frames_of(one, 5) == frames_of(other, 5, overlap=True)).all()
        assert one.frame == other.frame
        assert not other._state.ahead  # nothing is made that nobody asked for


def test_what_is_made_ahead_comes_next(pipe: CausalVideoPipeline) -> None:
    """A stream left in the middle has made a chunk more; a step, a twin and a rewind know it."""
    with pipe.session(MAZE, seed=1) as session:
        expected = frames_of(session, 4)
    with pipe.session(MAZE, seed=1, history_seconds=4) as session:
        stream = session.stream(overlap=True)
        made = [next(stream).frames, next(stream).frames]
        stream.close()
        assert session.frame == 13 and session._state.frame == 21
        twin = session.fork()
        made += [session.step().frames, session.step().frames]
        assert (np.concatenate(made) == expected).all()
        with twin:
            assert twin.frame == 13
            assert (frames_of(twin, 2, overlap=True) == expected[13:]).all()
        assert session.rewind(frames=16) == 5  # remembered when chunks are made: 0, 0, 5, 21
        assert (frames_of(session, 3) == expected[5:]).all()


def test_what_is_made_ahead_is_saved(pipe: CausalVideoPipeline, tmp_path: Any) -> None:
    """A session file holds it with the decoder's memory: what follows is bitwise the same."""
    with pipe.session(MAZE, seed=1) as session:
        session.prompt(SNOW, at=21)
        expected = frames_of(session, 5)
    with pipe.session(MAZE, seed=1) as session:
        session.prompt(SNOW, at=21)
        stream = session.stream(overlap=True)
        for _ in range(2):
            next(stream)
        stream.close()
        session.save(tmp_path / "walk.sgs")
    with pipe.load_session(tmp_path / "walk.sgs") as again:
        assert again.frame == 13
        assert (frames_of(again, 3) == expected[13:]).all()


def test_a_decoder_that_fails_loses_nothing(pipe: CausalVideoPipeline) -> None:
    """While the next chunk is being made: the chunk stays ahead and is decoded at the next try."""
    decode, calls = pipe.engine.codec.decode, 0

    def flaky(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no luck")
        return decode(*args)

    with pipe.session(MAZE, seed=1) as session:
        expected = frames_of(session, 5)
    with pytest.MonkeyPatch.context() as patch, pipe.session(MAZE, seed=1) as session:
        patch.setattr(pipe.engine.codec, "decode", flaky)
        made, stream = [], session.stream(overlap=True)
        made.append(next(stream).frames)
        with pytest.raises(RuntimeError, match="no luck"):
            next(stream)
        assert session.frame == 5
        made.append(frames_of(session, 4, overlap=True))
        assert (np.concatenate(made) == expected).all()


def test_making_that_fails_loses_nothing(pipe: CausalVideoPipeline) -> None:
    """While the chunk before it is being decoded."""
    with pipe.session(MAZE, seed=1) as session:
        expected = frames_of(session, 4)
    with pipe.session(MAZE, seed=1) as session:
        stream = session.stream(overlap=True)
        made = [next(stream).frames]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipe.engine, "denoise", None)
            with pytest.raises(TypeError):
                next(stream)
        made.append(frames_of(session, 3, overlap=True))
        assert (np.concatenate(made) == expected).all()


def test_a_dropped_generator_gives_everything_back(pipe: CausalVideoPipeline) -> None:
    """`generate` closes its session however it ends."""
    made = pipe.generate(MAZE, 37)
    next(made)
    assert pipe.engine.pool.stats().live > 0
    made.close()
    assert pipe.engine.pool.stats().live == 0


# A picture to begin with


def test_image_as_a_block_of_its_own() -> None:
    """Self-Forcing's way: the picture's latent is committed alone and is not denoised."""
    pipe = tiny_video(chunk_frames=2, first_chunk=1, image_start="block")
    image = picture(pipe)
    with pipe.session(MAZE, seed=1, image=image) as session:
        latent = session._image
        first = session.step()
        assert torch.equal(session._state.latents[0], latent)
        assert len(first.frames) == 1
        alone = pipe.engine.codec.decode(latent[None])[0].numpy()
        assert (first.frames == alone).all()
        with_image = frames_of(session, 2)
    with pipe.session(MAZE, seed=1, image=picture(pipe, 1)) as other:
        other.step()
        assert (frames_of(other, 2) != with_image).any()


def test_image_clamped(pipe: CausalVideoPipeline) -> None:
    """LongLive 2's way: every pass of the first chunk sees it clean, at timestep 0."""
    seen: list[tuple[Tensor, Tensor]] = []
    forward = pipe.engine.dit.forward

    def spy(x: Tensor, t: Tensor, *rest: Any) -> Tensor:
        seen.append((x, t))
        return forward(x, t, *rest)

    with pytest.MonkeyPatch.context() as patch:
        with pipe.session(MAZE, seed=1, image=picture(pipe)) as session:
            patch.setattr(pipe.engine.dit, "forward", spy)
            session.step()
            session.step()
            latent = session._image
            assert torch.equal(session._state.latents[0], latent)
    steps = pipe.config.schedule.timesteps
    told = [t[0].tolist() for _, t in seen[:3]]
    assert told == [[0.0, steps[0]], [0.0, pytest.approx(steps[1])], [0.0, 0.0]]
    for x, _ in seen[:3]:
        assert torch.equal(x[0, :, 0], latent)
    assert seen[3][1].tolist() == [[steps[0], steps[0]]]


def test_image_repeated() -> None:
    """For models without a still first chunk in their training: it fills the first chunk."""
    pipe = tiny_video(temporal=False, image_start="repeat")
    with pipe.session(MAZE, image=picture(pipe)) as session:
        first = session.step().frames
        assert len(first) == 2 and (first[0] == first[1]).all()
        assert torch.equal(session._state.latents[1], session._image)


def test_image_block_needs_a_first_chunk() -> None:
    """Refused with the reason."""
    with pytest.raises(InvalidRequest, match="needs first_chunk=1"):
        tiny_video(image_start="block")


# A clip to go on from


def test_clip_is_the_past(pipe: CausalVideoPipeline) -> None:
    """Latents, K/V and the decoder's memory are those of a session that made the clip."""
    given = clip(pipe, 13)
    latents = pipe.engine.codec.encode(torch.from_numpy(given))
    assert len(latents) == 4
    with pipe.session(MAZE, seed=1, video=given) as session:
        assert session.frame == 13 and session._table.end == 4
        assert torch.equal(torch.stack(session._state.latents), latents)
        made = session.step()
        assert made.first_frame == 13 and len(made.frames) == pipe.chunk_pixels
        more = session._state.latents[-2:]
    state = pipe.engine.codec.decode(latents)[1]
    expected, _ = pipe.engine.codec.decode(torch.stack(more), state)
    assert (made.frames == expected.numpy()).all()


def test_generate_after_a_clip(pipe: CausalVideoPipeline) -> None:
    """Only new frames come; prompts count from the clip's end."""
    made = list(pipe.generate({0: MAZE, 8: SNOW}, 16, video=clip(pipe, 5), overlap=False))
    assert [chunk.first_frame for chunk in made] == [5, 13]
    assert [event.frame for chunk in made for event in chunk.applied] == [13]


@pytest.mark.parametrize("frames", [0, 1, 4, 6, 12])
def test_clip_of_whole_chunks(pipe: CausalVideoPipeline, frames: int) -> None:
    """Others are refused, and the session leaves nothing behind."""
    with pytest.raises(InvalidRequest, match="5 frames and any multiple of 8 more"):
        pipe.session(MAZE, video=clip(pipe, frames))


def test_clip_comes_first(pipe: CausalVideoPipeline) -> None:
    """The autoencoder joins frames: a clip can't follow what was made."""
    with pipe.session(MAZE) as session:
        session.step()
        with pytest.raises(InvalidRequest, match="watches before its first step only"):
            session.watch(clip(pipe, 8))


# Time travel with a decoder that remembers


def test_rewind_and_replay(pipe: CausalVideoPipeline) -> None:
    """The decoder's memory goes back too."""
    with pipe.session(MAZE, seed=1, history_seconds=4) as session:
        frames = frames_of(session, 4)
        assert session.rewind(frames=10) == 13
        assert (frames_of(session, 2) == frames[13:]).all()


def test_two_videos_in_turns(pipe: CausalVideoPipeline) -> None:
    """Neither knows of the other."""
    alone = [pipe(MAZE, 21, seed=seed) for seed in (1, 2)]
    with pipe.session(MAZE, seed=1) as one, pipe.session(MAZE, seed=2) as other:
        made = [(one.step().frames, other.step().frames) for _ in range(3)]
    for expected, parts in zip(alone, zip(*made, strict=True), strict=True):
        assert (np.concatenate(parts) == expected).all()


def test_steady_state_copies_nothing(pipe: CausalVideoPipeline) -> None:
    """Once the window slides no block moves, whatever the chunk."""
    with pipe.session(MAZE) as session, pytest.MonkeyPatch.context() as patch:
        frames_of(session, 5)
        patch.setattr(BlockPool, "_carry", None)
        frames_of(session, 4, overlap=True)


# Bad input


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty.*brick"),
        ("  \n", {}, "prompt is empty"),
        ({0: MAZE, 8: ""}, {}, "prompt is empty"),
        ({4: MAZE}, {}, r"prompts at frames \[4\]: the first one is at frame 0"),
        ({0: MAZE, 21: SNOW}, {"frames": 21}, "a prompt at frame 21: the video has 21"),
        (MAZE, {"frames": 80}, "80 frames: .*nearest: 77 and 85"),
        (MAZE, {"recache": "twice", "prompt2": True}, "recache 'twice': accepted are 'last_chunk'"),
    ],
)
def test_bad_requests(
    pipe: CausalVideoPipeline, prompt: Any, options: dict[str, Any], message: str
) -> None:
    """One line, at once and not at the first chunk."""
    if options.pop("prompt2", False):
        prompt = {0: prompt, 5: SNOW}
    with pytest.raises(InvalidRequest, match=message) as caught:
        pipe.generate(prompt, **options)
    assert "\n" not in str(caught.value)


def test_picture_or_clip(pipe: CausalVideoPipeline) -> None:
    """Not both."""
    with pytest.raises(InvalidRequest, match="give one of them"):
        pipe.session(MAZE, image=picture(pipe), video=clip(pipe, 5))


def test_presets_are_runnable() -> None:
    """Each has a window with room for its sink and chunk, and a schedule."""
    for preset in PRESETS.values():
        assert preset.window >= preset.sink + preset.chunk_frames
        assert preset.schedule.timesteps[0] == pytest.approx(1000)
        assert preset.height % 16 == preset.width % 16 == 0
