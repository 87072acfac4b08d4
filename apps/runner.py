"""The thread that lives one visitor's walk: it steps the session, encodes frames, obeys commands.

All calls to a session happen here, between two chunks, so that nothing needs a lock but the engine
and the frame at which a request applies is known for certain. What the thread has to tell goes
through `emit` as one ordered stream: messages, frames, `Cut`s.

Where a frame number is on its way, three may differ: `session.frame` (made), the newest sent, and
the one on the visitor's screen. Pause and rewind mean the last one.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from streamgen import wire
from streamgen.apps.encode import encode_frame
from streamgen.errors import InvalidRequest, PoolFull, StreamgenError
from streamgen.frames import Chunk, Receipt

log = logging.getLogger(__name__)
HISTORY_SECONDS = 8.0


class Cut(NamedTuple):
    """The timeline jumps here: forget frames that were not sent; `shown` is on the screen."""

    shown: int | None


class Walk(NamedTuple):
    """What to start with. `image` is uint8 `[H, W, 3]` or None; no seed means any."""

    prompt: str
    seed: int | None
    image: np.ndarray | None


Emitted = wire.ServerMessage | Cut | list[wire.Frame]


@dataclass
class Line:
    """One branch: its session, and the frames of its last seconds, to look at after a jump."""

    id: int
    parent: int | None
    name: str
    from_frame: int
    session: Any
    starts: list[int] = field(default_factory=list)
    seen: deque[wire.Frame] = field(default_factory=deque)


@dataclass
class Meter:
    """The last times of one visitor, in milliseconds."""

    gen: deque[float] = field(default_factory=lambda: deque(maxlen=120))
    encode: deque[float] = field(default_factory=lambda: deque(maxlen=120))

    def quantile(self, q: float) -> float:
        """A quantile of the time a chunk took; 0 before the first."""
        return float(np.quantile(self.gen, q)) if self.gen else 0.0

    @property
    def encode_ms(self) -> float:
        """Median time to encode a frame."""
        return float(np.median(self.encode)) if self.encode else 0.0


class Runner(threading.Thread):
    """One visitor's thread.

    Args:
        world: anything with `.config` and `.session(...)`.
        engine: held while the model works, so that visitors take turns.
        emit: takes what happens, in this thread.
        codec: how frames are encoded.
        limits: of the connection.
        first_frame: see `Settings`.
    """

    def __init__(
        self,
        world: Any,
        engine: threading.Lock,
        emit: Callable[[Emitted], None],
        codec: wire.Codec,
        limits: wire.Limits,
        first_frame: Callable[[str, int], np.ndarray] | None = None,
    ) -> None:
        super().__init__(name="walk", daemon=True)
        self.meter = Meter()
        self.paused = False
        self._world, self._engine, self._emit = world, engine, emit
        self._codec, self._limits = codec, limits
        self._first_frame, self._starts = first_frame, 0
        self._commands: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ending = False
        self._stalled = False
        self._lines: dict[int, Line] = {}
        self._live: Line | None = None
        self._born = 0
        self._walk = Walk("", None, None)
        self._held: list[str] = []
        self._newest_seq = 0  # of the newest action heard
        self._seq = 0  # of the newest action that shaped the newest frame
        self._acts: deque[tuple[int, int]] = deque()  # (applies at frame, seq)
        self._asked: list[tuple[int, wire.Prompt]] = []  # (applies at frame, prompt)
        self._rest: list[wire.Frame] = []  # of the chunk that a pause cut in two
        self._pacer = wire.Pacer(world.config.fps, time.monotonic())
        self._began = time.monotonic()

    # -- called from outside --------------------------------------------------------------------

    def submit(self, kind: str, *args: Any) -> None:
        """Do what `_{kind}` does between two chunks: start, reset, act, prompt, pause, ..."""
        method: Callable[..., None] = getattr(self, f"_{kind}")
        self._commands.put((kind, lambda: method(*args)))
        self._wake.set()

    def stall(self, stalled: bool) -> None:
        """Make nothing while the visitor takes nothing."""
        if stalled != self._stalled:
            self._stalled = stalled
            self._wake.set()

    def stop(self) -> None:
        """End the walk; its sessions are closed by the thread itself."""
        self._ending = True
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------

    def run(self) -> None:
        """Commands, then a chunk when it is time for one, until `stop`."""
        try:
            while not self._ending:
                self._wake.clear()
                self._obey()
                wait = self._wait()
                if wait is None or wait > 0:
                    self._wake.wait(wait)
                    continue
                self._make_chunk()
        except StreamgenError as error:
            self._fail(str(error))
        except Exception:
            log.exception("a walk ended")
            self._fail("the walk ended by an internal error; the server's log has it")
        finally:
            self._close_all()

    def _fail(self, message: str) -> None:
        self._emit(wire.Error(code="internal", message=message, retryable=True))
        self._emit(wire.Bye(reason="internal"))

    def _obey(self) -> None:
        while not self._commands.empty():
            kind, command = self._commands.get()
            try:
                command()
            except StreamgenError as error:
                code = "invalid_request" if isinstance(error, InvalidRequest) else "refused"
                self._emit(wire.Error(code=code, message=str(error), ref=kind))
                if kind == "start" and isinstance(error, PoolFull):
                    self._emit(wire.Bye(reason="full"))

    def _wait(self) -> float | None:
        if self._live is None or self.paused or self._stalled:
            return None
        return self._pacer.start_at - time.monotonic()

    def _make_chunk(self) -> None:
        line = self._line
        begun = time.monotonic()
        with self._engine:
            if self._ending:
                return
            try:
                chunk: Chunk = line.session.step()
            except PoolFull as error:
                self._make_room(error)
                return
        encoded = time.monotonic()
        while self._acts and self._acts[0][0] <= chunk.first_frame:
            self._seq = self._acts.popleft()[1]
        line.starts = [*line.starts[-511:], chunk.first_frame]
        total = chunk.timing.total or (encoded - begun) * 1000
        frames = self._encode(line, chunk, total)
        now = time.monotonic()
        self.meter.gen.append(total)
        self.meter.encode.append((now - encoded) * 1000 / len(frames))
        self._send(frames, took=now - begun)
        line.seen.extend(frames)
        keep = round((HISTORY_SECONDS + 1) * self._world.config.fps)
        while len(line.seen) > keep:
            line.seen.popleft()
        old = len(line.seen) - 4 * len(frames)
        for index in range(max(0, old - len(frames)), old):
            line.seen[index].pixels = None  # the encoded frame is enough to look at

    def _make_room(self, error: PoolFull) -> None:
        """The oldest branch that nobody walks in is let go; without one, the walk is paused."""
        parked = [line for line in self._lines.values() if line is not self._live]
        if not parked:
            message = f"paused, the world has no room to go on: {error}"
            self._emit(wire.Error(code="full", message=message, retryable=True))
            self._pause(None)
            return
        del self._lines[parked[0].id]
        parked[0].session.close()
        text = f"{parked[0].name} was let go: the world has no room for more"
        self._emit(wire.Warn(code="full", message=text))
        self._tell_branches()

    def _encode(self, line: Line, chunk: Chunk, total_ms: float) -> list[wire.Frame]:
        count, height, width = chunk.frames.shape[:3]
        frames = []
        for index, pixels in enumerate(chunk.frames):
            flags = wire.Flag.KEY
            flags |= wire.Flag.CHUNK_START if index == 0 else wire.Flag(0)
            flags |= wire.Flag.CHUNK_END if index == count - 1 else wire.Flag(0)
            header = wire.Header(
                self._codec,
                flags,
                line.id,
                chunk.first_frame + index,
                self._seq,
                0,
                total_ms / count,
                width,
                height,
            )
            frames.append(wire.Frame(header, encode_frame(pixels, self._codec), 0.0, pixels))
        return frames

    def _send(self, frames: list[wire.Frame], took: float | None = None) -> None:
        """Give frames their due times and hand them over."""
        dues = self._pacer.schedule(len(frames), time.monotonic(), took)
        for frame, due in zip(frames, dues, strict=True):
            frame.due = due
            stamp = max(0, round((due - self._began) * 1e6))
            frame.header = frame.header._replace(pts_us=stamp)
        self._emit(frames)

    # -- commands -------------------------------------------------------------------------------

    @property
    def _line(self) -> Line:
        if self._live is None:
            raise InvalidRequest("there is no walk yet; wait for started")
        return self._live

    def _start(self, walk: Walk) -> None:
        seed = secrets.randbelow(10**6) if walk.seed is None else walk.seed
        options: dict[str, Any] = {"prompt": walk.prompt, "seed": seed}
        options |= {"image": walk.image, "history_seconds": HISTORY_SECONDS}
        with self._engine:
            if walk.image is None and self._first_frame is not None:
                text = walk.prompt or next(iter(self._world.config.suggestions), "")
                options["image"] = self._first_frame(text, seed + self._starts)
                self._starts += 1  # the same seed again shows another picture
            try:
                session = self._world.session(**options)
            except PoolFull:  # the old walk may be what fills it
                self._close_all()
                session = self._world.session(**options)
        self._close_all()
        self._walk = walk._replace(seed=seed)
        self._born = 0
        self._live = self._add(None, "main", session)
        self.paused, self._rest, self._asked = False, [], []
        self._jump(None)
        config = self._world.config
        self._emit(
            wire.Started(
                width=config.width,
                height=config.height,
                fps=config.fps,
                codec=self._codec.name.lower(),
                chunk_frames=config.chunk_frames,
                branch=self._live.id,
                frame=session.frame,
                prompt=session.text,
                seed=seed,
            )
        )
        self._tell_branches()

    def _reset(self, walk: Walk, keep_prompt: bool) -> None:
        prompt = self._live.session.text if keep_prompt and self._live else walk.prompt
        seed = self._walk.seed if walk.seed is None else walk.seed
        self._start(Walk(prompt, seed, walk.image))

    def _act(self, message: wire.Action) -> None:
        receipt: Receipt = self._line.session.act(keys=set(message.keys))
        self._held, self._newest_seq = message.keys, message.seq
        self._acts.append((receipt.applies_at_frame, message.seq))
        self._emit(wire.Ack(of="action", id=message.seq, applies_at_frame=receipt.applies_at_frame))

    def _prompt(self, message: wire.Prompt) -> None:
        receipt: Receipt = self._line.session.prompt(message.text, recache=message.recache)
        frame = receipt.applies_at_frame
        self._asked = [*self._asked[-31:], (frame, message)]
        self._emit(
            wire.Ack(of="prompt", id=message.id, applies_at_frame=frame, prompt=message.text)
        )

    def _pause(self, shown: int | None) -> None:
        """Stop after the frame shown: the session goes back to the end of that frame's chunk.

        The rest of the chunk is kept for `resume`, so that not one frame is lost or made twice.
        """
        line = self._line
        if not self.paused:
            self.paused = True
            ends = [*line.starts[1:], line.session.frame]
            shown = shown if shown is not None else max(0, ends[-1] - 1)
            end = next((end for end in ends if end > shown), ends[-1])
            waiting = [item for item in self._asked if item[0] >= end]
            try:
                self._go_to(end)
            except InvalidRequest:  # a screen that lags by more than the history: stay here
                end = line.session.frame
            self._rest = [f for f in line.seen if shown < f.header.frame < end]
            self._jump(shown)
            for _, message in waiting[-1:]:
                self._prompt(message)  # asked for but not seen yet: still wanted
        frame = line.session.frame
        self._emit(wire.Ack(of="pause", applies_at_frame=frame, shown=shown))

    def _resume(self) -> None:
        line = self._line
        if self.paused:
            self.paused = False
            self._pacer.restart(time.monotonic())
            if self._rest:
                self._send(self._rest)
                self._rest = []
        self._emit(wire.Ack(of="resume", applies_at_frame=line.session.frame))

    def _rewind(self, message: wire.Rewind, shown: int | None) -> None:
        line = self._line
        now = line.session.frame if shown is None else shown + 1
        if message.to_frame is not None:
            target = message.to_frame
        else:
            target = now - (message.frames or round((message.seconds or 0) * self._fps))
        if target > line.session.frame:
            raise InvalidRequest(f"frame {target} lies ahead; the newest is {now - 1}")
        at = bisect_right(line.starts, max(0, target))  # the chunk that holds it
        self._go_to(line.starts[at - 1] if at else line.session.frame)
        self._rest = []
        self._look("rewind")

    def _fork(self, name: str | None) -> None:
        old = self._line
        if len(self._lines) >= self._limits.branches:
            raise InvalidRequest(
                f"{len(self._lines)} branches are kept, which is the most; reset ends them"
            )
        with self._engine:
            session = old.session.fork()
        new = self._add(old.id, name or f"branch {self._born}", session)
        new.starts, new.seen = list(old.starts), deque(old.seen)
        self._live = new
        self._jump(None, cut=False)
        self._emit(wire.Ack(of="fork", id=new.id, applies_at_frame=session.frame))
        self._tell_branches()

    def _switch(self, branch: int) -> None:
        if branch not in self._lines:
            known = " ".join(map(str, self._lines))
            raise InvalidRequest(f"no branch {branch}; there are {known}")
        self._live = self._lines[branch]
        self._rest = []
        self._look("switch", branch)
        self._tell_branches()

    # -- parts of commands ----------------------------------------------------------------------

    @property
    def _fps(self) -> float:
        return float(self._world.config.fps)

    def _add(self, parent: int | None, name: str, session: Any) -> Line:
        line = Line(self._born, parent, name, session.frame, session)
        self._lines[line.id] = line
        self._born += 1
        return line

    def _go_to(self, frame: int) -> None:
        """Take the session back so that `frame`, the first of a chunk, is made next."""
        line = self._line
        back = line.session.frame - frame
        if back > 0:
            with self._engine:
                stands = line.session.rewind(frames=back)
            line.starts = [start for start in line.starts if start < stands]
            while line.seen and line.seen[-1].header.frame >= stands:
                line.seen.pop()

    def _jump(self, shown: int | None, cut: bool = True) -> None:
        """After the timeline moved: what was under way is void, what is held stays held."""
        if cut:
            self._emit(Cut(shown))
            self._pacer.restart(time.monotonic())
        session = self._line.session
        frame = session.frame
        if self._held or frame:
            frame = session.act(keys=set(self._held)).applies_at_frame
        self._acts.clear()
        self._acts.append((frame, self._newest_seq))

    def _look(self, of: str, number: int | None = None) -> None:
        """Show where the walk stands now, at once, and say so."""
        line = self._line
        last = line.seen[-1] if line.seen else None
        shown = last.header.frame if last else None
        self._asked = []
        self._jump(shown)
        self._emit(
            wire.Ack(
                of=of,
                id=number,
                applies_at_frame=line.session.frame,
                shown=shown,
                prompt=line.session.text,
            )
        )
        if last is not None:
            header = last.header._replace(branch=line.id)
            self._send([wire.Frame(header, last.payload)])

    def _tell_branches(self) -> None:
        branches = [
            wire.Branch(
                id=line.id,
                parent=line.parent,
                name=line.name,
                from_frame=line.from_frame,
                frame=line.session.frame,
                prompt=line.session.text,
            )
            for line in self._lines.values()
        ]
        self._emit(wire.Branches(id=self._line.id, branches=branches))

    def _close_all(self) -> None:
        lines, self._lines, self._live = list(self._lines.values()), {}, None
        for line in lines:
            line.session.close()
