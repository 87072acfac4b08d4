"""One user's walk or video: everything that is state, and nothing that is shared.

A session is stepped chunk by chunk. What the user does (`act`, `prompt`) is queued and applies at
the next chunk boundary; the chunk says what it contains. `mark`, `fork` and `rewind` copy handles:
the K/V bytes stay where they are. The same seed and the same track give bitwise the same frames.

A chunk is made in two halves: its latents are denoised and stored, then they are decoded. `step`
does one after the other. `stream(overlap=True)` decodes a chunk while the next one is denoised; a
chunk of which only the first half is done is `_Ahead`, part of the session's state like all else,
so whatever comes in between (an error, a fork, a session file), it is decoded next and nothing is
lost.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from streamgen.cache import BlockTable, Snapshot
from streamgen.cache import Chunk as CacheChunk
from streamgen.engine import Engine, Recache, Stopwatch, VideoConfig, one_of
from streamgen.errors import InvalidRequest, PoolFull, SessionClosed
from streamgen.frames import Chunk, Event, Receipt, Timing, fit_image
from streamgen.models.history import CachedHistory, CachedPrompt

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Asked:
    """What a user asked and no chunk contains yet; applies at pixel frame `at` at the earliest."""

    id: int
    kind: str
    value: Any
    at: int


@dataclass(frozen=True, eq=False)
class _Ahead:
    """A chunk whose latents are made and stored, and wait to be decoded."""

    index: int
    first_frame: int
    latents: Tensor  # [F, C, Y, X]
    applied: tuple[Event, ...]
    timing: Timing


@dataclass(frozen=True, eq=False)
class _Track:
    """The events of one chunk and, linked, all before them: a step adds without copying, and a
    mark or a twin shares what lies behind."""

    events: tuple[Event, ...]
    before: _Track | None


@dataclass(frozen=True)
class _State:
    """All of a session but its K/V; never changed in place, so a mark is a reference.

    `frame` and `chunk` are the next ones to be made, `decoder` is the state after the last chunk
    that was decoded: between the two lies `ahead`.
    """

    text: str
    prompt: CachedPrompt
    keys: frozenset[str]
    rng: Tensor
    frame: int = 0
    chunk: int = 0
    decoder: Any = None
    latents: tuple[Tensor, ...] = ()  # clean latents [C, Y, X] of the last frames, up to a window
    actions: tuple[Tensor, ...] = ()  # and what led to them
    track: _Track | None = None
    ahead: tuple[_Ahead, ...] = ()

    @property
    def delivered(self) -> int:
        """The first pixel frame that no caller has seen."""
        return self.ahead[0].first_frame if self.ahead else self.frame


class Mark:
    """A moment of a session to `rewind` to; keeps its K/V alive until `release`.

    `_token` names the moment and `_before` those that a session at this moment could go back to:
    after a jump to another branch, it may go back along that branch only.
    """

    def __init__(
        self, state: _State, snapshot: Snapshot, token: object, before: tuple[object, ...]
    ) -> None:
        self._state, self._snapshot = state, snapshot
        self._token, self._before = token, before
        weakref.finalize(self, snapshot.release)

    def _copy(self) -> Mark:
        return Mark(self._state, self._snapshot.copy(), self._token, self._before)

    @property
    def frame(self) -> int:
        """The frame that came next."""
        return self._state.delivered

    def release(self) -> None:
        """Let the K/V go; the mark can't be used any more. Idempotent."""
        self._snapshot.release()


class Session:
    """One walk or video; made by the `session` of a pipeline.

    `step`, `fork`, `rewind`, `mark` and `close` belong to one thread at a time; `act` and `prompt`
    may come from any.

    Args:
        engine: what is shared.
        prompt: the text to begin with.
        seed: of the session's own generator.
        image: a first frame of one's own, uint8 `[H, W, 3]` at any size; None = the model's.
        history_seconds: how far back `rewind` can go without a mark.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: str,
        seed: int = 0,
        image: np.ndarray | None = None,
        history_seconds: float = 8.0,
    ) -> None:
        self.engine, self.config, self.seed = engine, engine.config, seed
        self._generator = torch.Generator().manual_seed(seed)
        self._state = _State(
            text=prompt,
            prompt=self._encode(prompt),
            keys=frozenset(),
            rng=self._generator.get_state(),
        )
        self._table: BlockTable = engine.table()
        weakref.finalize(self, self._table.close)
        self._image = None if image is None else self._encode_image(image)
        self._table.reserve()  # a full pool is told now, not at the first step
        chunks = history_seconds * self.config.fps / self._frames_a_chunk
        self._past: deque[Mark] = deque()
        self._past_size, self._history_seconds = round(chunks), history_seconds
        self._model = ""  # the digest of the weights, once a session file needed it
        self._closed = False
        self._queue_lock = threading.Lock()
        self._queue: list[_Asked] = []
        self._pressed: set[str] = set()
        self._receipts = 0
        self._boundary = 0  # the frame at which what is asked now will apply

    # What can be seen

    @property
    def frame(self) -> int:
        """Index of the next frame."""
        return self._state.delivered

    @property
    def fps(self) -> int:
        """Frames a second at which the world is meant to be watched."""
        return self.config.fps

    @property
    def _frames_a_chunk(self) -> int:
        return self.engine.pixel_frames(1, self.config.chunk_frames)

    @property
    def text(self) -> str:
        """The prompt in force."""
        return self._state.text

    @property
    def keys(self) -> frozenset[str]:
        """The keys held in the last chunk."""
        return self._state.keys

    @property
    def track(self) -> list[Event]:
        """Everything that was applied so far, in order."""
        newest_first: list[Event] = []
        track = self._state.track
        while track:
            newest_first += reversed(track.events)
            track = track.before
        return newest_first[::-1]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # What the user does

    def act(self, keys: Collection[str]) -> Receipt:
        """Hold exactly these keys from the next chunk on; latest wins.

        A key that is pressed and released before a chunk begins still counts for that chunk,
        unless its opposite is held by then.

        Raises:
            InvalidRequest: a key that the world does not know.
            SessionClosed: after `close`.
        """
        held = frozenset([keys] if isinstance(keys, str) else keys)
        self.config.action(held)
        return self._ask("act", held)

    def prompt(self, text: str, recache: Recache | None = None, at: int | None = None) -> Receipt:
        """Change the text from the next chunk on.

        Args:
            text: words that the model does not know are named in a warning.
            recache: what of the past is recomputed under the new text; None = as the model's
                config says.

                - `last_chunk`: the newest chunk (ReCache, Hunyuan-GameCraft-2).
                - `window_causal`: all that is in view but the sink, each chunk seeing those before
                  it, as if the past had been made under the new text.
                - `window_bidirectional`: the same frames in one pass in which all see all (what
                  LongLive 1.0 does).
                - `off`: nothing.

            at: a pixel frame; the text changes at the first chunk boundary at or after it.

        Raises:
            InvalidRequest: a text over the limit, an unknown way to recache, or a frame that is
                made already.
            SessionClosed: after `close`.
        """
        recache = recache or self.config.recache
        one_of("recache", recache, get_args(Recache))
        self._encode(text)
        return self._ask("prompt", (text, recache), at)

    def _ask(self, kind: str, value: Any, at: int | None = None) -> Receipt:
        self._expect_open()
        with self._queue_lock:
            if at is not None and at < self._boundary:
                raise InvalidRequest(
                    f"frame {at} is made already or being made: accepted are {self._boundary} "
                    "and later"
                )
            self._receipts += 1
            self._queue.append(_Asked(self._receipts, kind, value, at or 0))
            if kind == "act":
                self._pressed |= value
            return Receipt(self._receipts, kind, self._boundary_from(at or 0))

    def _boundary_from(self, frame: int) -> int:
        """The first chunk boundary at or after a pixel frame, from the next one on."""
        boundary, each = self._boundary, self._frames_a_chunk
        if boundary == 0 and frame > 0:
            boundary = self.engine.pixel_frames(0, self.config.chunk_at(0))
        return boundary + -(-max(0, frame - boundary) // each) * each

    def _encode(self, text: str) -> CachedPrompt:
        unknown = self.engine.text.unknown(text)
        if unknown:
            words = self.config.vocabulary
            known = f"; its words are: {' '.join(words)}" if words else ""
            warnings.warn(f"the model does not know {unknown}{known}", stacklevel=3)
        return self.engine.prompt(text)

    def _encode_image(self, image: np.ndarray) -> Tensor:
        image = np.asarray(image)
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise InvalidRequest(
                f"the image is {image.dtype} {image.shape}: accepted is uint8 [height, width, 3]"
            )
        fitted = fit_image(image, width=self.config.width, height=self.config.height)
        with self.engine.lock:
            return self.engine.encode(torch.from_numpy(fitted)[None])[0]

    # The walk

    def stream(self, chunks: int | None = None, overlap: bool = False) -> Iterator[Chunk]:
        """Step `chunks` times, or for ever.

        Args:
            chunks: how many.
            overlap: decode each chunk while the next is denoised: more frames a second, at the
                price that what is asked takes effect one chunk later. A chunk made ahead when the
                caller stops is the next one that `step` or `stream` gives.
        """
        if overlap:
            yield from self._stream_overlapped(chunks)
            return
        while chunks is None or chunks > 0:
            yield self.step()
            chunks = None if chunks is None else chunks - 1

    def _stream_overlapped(self, chunks: int | None) -> Iterator[Chunk]:
        with ThreadPoolExecutor(1, thread_name_prefix="decode") as thread:
            while chunks is None or chunks > 0:
                start = perf_counter()
                self._expect_open()
                if not self._state.ahead:
                    self._make_ahead()
                decoded = thread.submit(self.engine.beside(self._decode_ahead))
                if chunks != 1:
                    self._make_ahead()
                yield self._deliver(decoded.result(), start)
                chunks = None if chunks is None else chunks - 1

    def step(self) -> Chunk:
        """Make the next chunk.

        When the pool is full, the oldest of what `rewind` could go back to makes room.
        A step that fails leaves the session as it was before, and the next try makes the frames
        that this one would have made. With `history_seconds=0` nothing of the past is kept for
        that: a ReCache right after a failed step then does nothing.

        Raises:
            PoolFull: there is no room for the chunk's K/V.
            SessionClosed: after `close`.
        """
        self._expect_open()
        start = perf_counter()
        if self._state.ahead:
            with self.engine.lock:
                return self._deliver(self._decode_ahead(), start)
        chunk, timing = self._attempt(self._make_chunk)
        return replace(chunk, timing=timing)

    def _make_ahead(self) -> None:
        """Make the first half of the next chunk; it waits to be decoded."""
        ahead, timing = self._attempt(self._make_latents)
        waiting = (*self._state.ahead, replace(ahead, timing=timing))
        self._state = replace(self._state, ahead=waiting)

    def _decode_ahead(self) -> tuple[np.ndarray, Tensor, Any, float]:
        """The second half of the oldest chunk that waits, in any thread; changes nothing."""
        start = perf_counter()
        pixels, decoder = self.engine.decode(self._state.ahead[0].latents, self._state.decoder)
        return pixels.cpu().numpy(), pixels, decoder, 1000 * (perf_counter() - start)

    def _deliver(self, decoded: tuple[np.ndarray, Tensor, Any, float], start: float) -> Chunk:
        frames, pixels, decoder, ms = decoded
        chunk, *waiting = self._state.ahead
        self._state = replace(self._state, decoder=decoder, ahead=tuple(waiting))
        total = 1000 * (perf_counter() - start)
        timing = replace(chunk.timing, decode=ms, total=total)
        return Chunk(chunk.index, chunk.first_frame, frames, pixels, timing, chunk.applied)

    def _attempt(self, make: Callable[[Stopwatch], Made]) -> tuple[Made, Timing]:
        """What `make` makes, and its times; if it fails the session is as it was before."""
        watch = Stopwatch(self.engine.device)
        start = perf_counter()
        with self.engine.lock:
            before, asked = self._state, (self._queue, self._pressed)
            self._remember(watch)
            try:
                made = make(watch)
            except BaseException:
                self._restore(self._past[-1]) if self._past_size else self._set(before)
                with self._queue_lock:
                    self._queue = asked[0] + [new for new in self._queue if new not in asked[0]]
                    self._pressed = asked[1] | self._pressed
                raise
        ms, total = watch.ms, 1000 * (perf_counter() - start)
        named = {name: ms.get(name, 0.0) for name in ("dit", "cache", "decode")}
        named["dit"] -= ms.get("inside", 0.0)
        named["cache"] += ms.get("inside", 0.0)
        return made, Timing(**named, other=total - sum(named.values()), total=total)

    def _make_chunk(self, watch: Stopwatch) -> Chunk:
        """Both halves of the next chunk. It is decoded before it is committed, after which
        nothing may fail."""
        pending, latents, actions, applied = self._denoise(watch)
        state = self._state
        with pending:
            with watch("decode"):
                pixels, decoder = self.engine.decode(latents, state.decoder)
                frames = pixels.cpu().numpy()
            self._commit(watch, pending, latents, actions, decoder)
        return Chunk(state.chunk, state.frame, frames, pixels, Timing(), applied)

    def _make_latents(self, watch: Stopwatch) -> _Ahead:
        """The first half of the next chunk."""
        pending, latents, actions, applied = self._denoise(watch)
        state = self._state
        with pending:
            self._commit(watch, pending, latents, actions, state.decoder)
        return _Ahead(state.chunk, state.frame, latents, applied, Timing())

    def _denoise(self, watch: Stopwatch) -> tuple[CacheChunk, Tensor, Tensor, tuple[Event, ...]]:
        """Make the next latents, in a cache chunk that is written and still pending."""
        engine, config = self.engine, self.config
        applied, recache, keys = self._apply()
        undo = recache != "off" and not self._past_size
        if recache != "off":
            with watch("dit"):
                self._recache(recache, undo)
        state, count = self._state, config.chunk_at(self._table.end)
        actions = config.action(keys)[None].expand(count, -1)
        if state.frame == 0:
            actions = torch.zeros_like(actions)  # nothing led to the first frame
        with watch("cache"):
            pending = self._begin(self._table.chunk, count, undo)
        try:
            with watch("dit"):
                history = engine.history(pending)
                latents = self._latents(history, actions)
                engine.store(latents, history, state.prompt, actions)
        except BaseException:
            pending.abort()
            raise
        watch.ms["inside"] = 1000 * history.seconds
        return pending, latents, actions, applied

    def _latents(self, history: CachedHistory, actions: Tensor) -> Tensor:
        """The chunk's clean latents `[F, C, Y, X]`: denoised, or what the picture gives."""
        engine, config, state = self.engine, self.config, self._state
        image = self._image if state.frame == 0 else None
        start = config.image_start if isinstance(config, VideoConfig) else "repeat"
        if image is not None and start != "clamp":
            return image[None].expand(len(actions), -1, -1, -1)
        schedule = config.schedule if state.frame else config.first_schedule
        return engine.denoise(history, state.prompt, actions, self._draw, schedule, image)

    def _commit(
        self,
        watch: Stopwatch,
        pending: CacheChunk,
        latents: Tensor,
        actions: Tensor,
        decoder: Any,
    ) -> None:
        start = pending.frames.start
        with watch("cache"):
            pending.commit()
        self._advance(start, latents, actions, decoder)

    def _advance(self, start: int, latents: Tensor, actions: Tensor, decoder: Any) -> None:
        """The state after a chunk of latents `[F, C, Y, X]` from latent frame `start` on."""
        state, keep = self._state, -self.config.window
        self._state = replace(
            state,
            rng=self._generator.get_state(),
            frame=state.frame + self.engine.pixel_frames(start, len(latents)),
            chunk=state.chunk + 1,
            decoder=decoder,
            latents=(*state.latents, *latents.unbind())[keep:],
            actions=(*state.actions, *actions.unbind())[keep:],
        )
        with self._queue_lock:
            self._boundary = self._state.frame

    def watch(self, frames: np.ndarray, actions: np.ndarray | None = None) -> None:
        """Make given frames the session's past, as if it had made them itself.

        They are encoded and committed chunk by chunk under the prompt in force; what follows goes
        on from them. A decoder with a memory is shown them too, so that no seam is seen.

        Args:
            frames: uint8 `[F, H, W, 3]` at the model's size; F is a whole number of chunks (see
                `Engine.pixel_frames`).
            actions: what led to each latent frame, `[F', A]` in the order of `config.keys`; None
                where the model takes none.

        Raises:
            InvalidRequest: other shapes, or a part of a chunk; or, where the autoencoder joins
                several frames, a session that has begun.
            SessionClosed: after `close`.
        """
        self._expect_open()
        engine = self.engine
        chunks = self._whole_chunks(frames)
        led_to = torch.zeros(sum(chunks), engine.dit.config.action_dim)
        if actions is not None:
            if actions.shape != led_to.shape:
                raise InvalidRequest(
                    f"actions are {actions.shape}: accepted is {tuple(led_to.shape)}"
                )
            led_to = torch.from_numpy(actions.astype(np.float32))
        if self._state.ahead:
            raise InvalidRequest("a chunk made ahead waits to be given out: step() comes first")
        with engine.lock:
            latents = engine.encode(torch.from_numpy(frames))
            for some, led in zip(latents.split(chunks), led_to.split(chunks), strict=True):
                self._remember(Stopwatch(engine.device))
                start, decoder = self._table.end, self._state.decoder
                if engine.codec.temporal > 1:
                    decoder = engine.decode(some, decoder)[1]
                with self._begin(self._table.chunk, len(some)) as pending:
                    engine.store(some, engine.history(pending), self._state.prompt, led)
                    pending.commit()
                self._draw((1, *some.shape))  # each chunk has noise of its own, watched or made
                self._advance(start, some, led, decoder)

    def _whole_chunks(self, frames: np.ndarray) -> list[int]:
        """Latent frames of each chunk that pixel frames come to."""
        config, engine = self.config, self.engine
        shape = (len(frames), config.height, config.width, 3)
        latent, left, chunks = self._table.end, len(frames), list[int]()
        while left > 0:
            chunks.append(config.chunk_at(latent))
            left -= engine.pixel_frames(latent, chunks[-1])
            latent += chunks[-1]
        if frames.shape != shape or frames.dtype != np.uint8 or left or not chunks:
            first, more = config.chunk_at(self._table.end), config.chunk_at(latent)
            counts = f"{engine.pixel_frames(self._table.end, first)} frames"
            raise InvalidRequest(
                f"frames are {frames.dtype} {frames.shape}: accepted is uint8 {shape} with "
                f"{counts} and any multiple of {engine.pixel_frames(1, more)} more"
            )
        if self._table.end and engine.codec.temporal > 1:
            raise InvalidRequest(
                f"frames were made already ({self._state.frame}): this autoencoder joins "
                f"{engine.codec.temporal} frames, so a session watches before its first step only"
            )
        return chunks

    def _apply(self) -> tuple[tuple[Event, ...], Recache, frozenset[str]]:
        """Take what was asked: the events, how to recache, and the keys of this chunk."""
        with self._queue_lock:
            due = [asked for asked in self._queue if asked.at <= self._state.frame]
            self._queue = [asked for asked in self._queue if asked.at > self._state.frame]
            pressed, self._pressed = frozenset(self._pressed), set()
            count = self.config.chunk_at(self._table.end)
            self._boundary = self._state.frame + self.engine.pixel_frames(self._table.end, count)
        state, events = self._state, list[Event]()
        recache: Recache = "off"
        for asked in sorted(due, key=lambda asked: asked.at):
            value = asked.value
            if asked.kind == "act":
                state = replace(state, keys=value)
                value = sorted(value)
            else:
                text, how = value
                if text != state.text and state.frame:
                    recache = how
                state = replace(state, text=text, prompt=self.engine.prompt(text))
                value = {"text": text, "recache": how}
            events.append(Event(asked.id, asked.kind, value, state.frame))
        track = _Track(tuple(events), state.track) if events else state.track
        self._state = replace(state, track=track)
        return tuple(events), recache, self.config.held(state.keys, pressed)

    def _begin(
        self, begin: Callable[[int, bool], CacheChunk], frames: int, undo: bool = False
    ) -> CacheChunk:
        """Begin a cache chunk; if the pool is full, what a retry or `rewind` needs makes room."""
        while True:
            try:
                return begin(frames, undo)
            except PoolFull:
                if len(self._past) > 1:  # the newest is where a failed step goes back to
                    self._past.popleft().release()
                elif undo:
                    undo = False
                else:
                    raise

    def _recache(self, how: Recache, undo: bool = False) -> None:
        """Recompute the newest chunk, or all in view but the sink, under the text now in force."""
        config, state = self.config, self._state
        held = {ordinal for ordinal, _ in self._table.entries}
        if not held.issuperset(config.policy.visible(self._table.end)):
            return  # a failed step has pushed out what the recomputed frames would have to see
        end = self._table.end
        frames = min(config.chunk_frames, end)
        if how != "last_chunk":
            frames = min(self._table.tail, max(frames, end - config.sink))
        latents = torch.stack(state.latents[-frames:])
        actions = torch.stack(state.actions[-frames:])
        with self._begin(self._table.reopen, frames, undo) as pending:
            several = frames > config.chunk_frames
            history = self.engine.history(pending, causal=several and how == "window_causal")
            self.engine.store(latents, history, state.prompt, actions)
            pending.commit()

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=self._generator)
        return noise.to(self.engine.device)

    # Time travel

    def mark(self) -> Mark:
        """This moment, to `rewind` to at any later time; costs no K/V bytes."""
        self._expect_open()
        before = tuple(mark._token for mark in self._past)
        return Mark(self._state, self._table.snapshot(), object(), before)

    def fork(self) -> Session:
        """A second session with the same past; both go their own way. Costs no K/V bytes.

        Raises:
            SessionClosed: after `close`.
        """
        self._expect_open()
        twin = copy(self)
        twin._generator = torch.Generator()
        twin._generator.set_state(self._state.rng)
        twin._table = self._table.fork()
        weakref.finalize(twin, twin._table.close)
        twin._past = deque(mark._copy() for mark in self._past)
        twin._queue_lock = threading.Lock()
        twin._queue, twin._pressed = [], set()
        return twin

    def save(self, path: str | Path) -> None:
        """Write the session to one file, from which a pipeline's `load_session` goes on bitwise.

        It holds all that is state, what was asked and not yet applied included, but not what
        `rewind` could go back to; see `streamgen.session_file`. A file of that name is replaced in
        one step: whatever happens on the way, it is the old one or the new one.

        Raises:
            InvalidRequest: there is no such folder, or the decoder's state can't be written.
            SessionFileError: the file can't be written (a full disk, for example).
            TierError: K/V that went to another tier is lost.
            SessionClosed: after `close`.
        """
        from streamgen import session_file  # which knows sessions

        self._expect_open()
        session_file.save(self, path)

    def rewind(
        self,
        to: Mark | None = None,
        *,
        seconds: float | None = None,
        frames: int | None = None,
    ) -> int:
        """Go back to a mark, or by a time or a number of frames, to a chunk boundary.

        Prompt, keys, generator, decoder and track go back too; what was asked and not yet applied
        is dropped. Exactly one of the arguments is given. By `seconds` or `frames` it lands on the
        newest boundary at least that far back, or on the oldest that is remembered.

        Returns:
            The frame that comes next.

        Raises:
            InvalidRequest: not exactly one argument, a negative one, a released mark, or nothing
                before this frame is remembered.
            SessionClosed: after `close`.
        """
        self._expect_open()
        if sum(x is not None for x in (to, seconds, frames)) != 1:
            raise InvalidRequest("rewind takes exactly one of: a mark, seconds, frames")
        if to is None:
            back = frames if frames is not None else round((seconds or 0) * self.config.fps)
            if back < 0:
                raise InvalidRequest(f"rewind by {back} frames: accepted are 0 and more")
            target = self.frame - back
            if back == 0 or self.frame == 0:
                return self.frame
            if not self._past:
                raise InvalidRequest(
                    f"nothing before frame {self.frame} is remembered; a session remembers "
                    "the chunks that it makes while its history_seconds are above 0 (here "
                    f"{self._history_seconds:g}); keep a mark() to go back to any other moment"
                )
            to = next((m for m in reversed(self._past) if m.frame <= target), self._past[0])
        with self.engine.lock:
            self._restore(to)
        with self._queue_lock:
            self._queue, self._pressed = [], set()
        return self.frame

    def _remember(self, watch: Stopwatch) -> None:
        """Mark this boundary. A mark holds the frames that leave the window, so they get copied
        out of the lane: without a history nothing is."""
        if self._past_size:
            with watch("cache"):
                self._past.append(self.mark())
                while len(self._past) > self._past_size:
                    self._past.popleft().release()

    def _set(self, state: _State) -> None:
        self._state = state
        self._generator.set_state(state.rng)
        with self._queue_lock:
            self._boundary = state.frame

    def _restore(self, mark: Mark) -> None:
        self._table.rewind(mark._snapshot)
        self._set(mark._state)
        past, self._past = self._past, deque()
        for old in past:
            if old._token in mark._before:
                self._past.append(old)
            else:
                old.release()

    def close(self) -> None:
        """Give the K/V back. Idempotent."""
        if not self._closed:
            self._closed = True
            while self._past:
                self._past.pop().release()
            self._table.close()

    def _expect_open(self) -> None:
        if self._closed:
            raise SessionClosed("the session was closed; open a new one with world.session(...)")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
