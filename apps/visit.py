"""One visit: a websocket, the thread that walks for it, and the tasks between them.

What may be said is in `wire.Gate`, when frames go out in `wire.Playout`, what happens to a walk in
`Runner`; this is the shell that moves messages between the three.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import WebSocket, WebSocketDisconnect

from streamgen import __version__, wire
from streamgen.apps.encode import CODECS
from streamgen.apps.hub import Hub, origin_allowed
from streamgen.apps.record import Recorder
from streamgen.apps.runner import HISTORY_SECONDS, Cut, Emitted, Runner, Walk
from streamgen.errors import StreamgenError
from streamgen.frames import Event


class Visit:
    """One websocket: what comes in goes through the gate, what goes out waits for credit."""

    def __init__(self, hub: Hub, socket: WebSocket) -> None:
        settings = hub.settings
        self.hub, self._socket, self._limits = hub, socket, settings.limits
        self._gate = wire.Gate(settings.token, time.monotonic(), settings.limits)
        self._playout = wire.Playout()
        self._loop = asyncio.get_running_loop()
        self._texts: deque[str] = deque()
        self._ready = asyncio.Event()
        self._runner: Runner | None = None
        self._codec = wire.Codec.JPEG
        self._recorder: Recorder | None = None
        self._recording = ""
        self._heard: deque[tuple[int, float]] = deque(maxlen=256)  # (action seq, when)
        self._flown: deque[tuple[int, int]] = deque(maxlen=64)  # (frame, action seq)
        self._latency: deque[float] = deque(maxlen=60)
        self._sent_at: deque[float] = deque(maxlen=60)
        self._blocked_since: float | None = None
        self._hz = 0.0
        self._closing: wire.Close | None = None
        self._started: wire.Started | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until either side leaves."""
        offered = self._socket.scope.get("subprotocols", [])
        await self._socket.accept(wire.PROTOCOL if wire.PROTOCOL in offered else None)
        headers = self._socket.headers
        if not origin_allowed(headers.get("origin"), headers.get("host"), self.hub.settings):
            text = f"pages from {headers['origin']} may not connect; see STREAMGEN_ALLOW_ORIGINS"
            await self._refuse("forbidden_origin", text, wire.Close.FORBIDDEN_ORIGIN)
            return
        sender = asyncio.create_task(self._send_loop())
        ticker = asyncio.create_task(self._tick_loop())
        try:
            await self._receive_loop()
        except (WebSocketDisconnect, RuntimeError):
            pass  # the other side is gone
        finally:
            sender.cancel()
            ticker.cancel()
            await self._finish()

    def leave(self) -> None:
        """End the walk at the server's shutdown."""
        if self._runner is not None:
            self._runner.stop()

    async def _finish(self) -> None:
        if self._runner is not None:
            self._runner.stop()
            with suppress(asyncio.CancelledError):  # at a shutdown the thread ends by itself
                await asyncio.to_thread(self._runner.join, 10.0)
        self.hub.visits.discard(self)
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            with suppress(StreamgenError):
                await asyncio.to_thread(recorder.close)

    async def _refuse(self, code: str, message: str, close: wire.Close) -> None:
        """Say why, then close: a bare close before `accept` would look like a broken network."""
        error = wire.Error(code=code, message=message, retryable=close is wire.Close.FULL)
        await self._socket.send_text(error.to_json())
        await self._socket.close(close, code)

    # -- in -------------------------------------------------------------------------------------

    async def _receive_loop(self) -> None:
        while True:
            deadline = self._gate.deadline
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                raw = await asyncio.wait_for(self._socket.receive(), wait)
            except TimeoutError:
                passed: Any = self._gate.late()
            else:
                if raw["type"] != "websocket.receive":
                    return
                text = raw.get("text")
                content: str | bytes = text if text is not None else raw.get("bytes") or b""
                passed = self._gate.receive(content, time.monotonic())
            if isinstance(passed, wire.Refusal):
                if passed.close is not None:
                    await self._refuse(passed.error.code, passed.error.message, passed.close)
                    return
                self._say(passed.error)
            elif isinstance(passed, wire.Bye):
                await self._socket.close(wire.Close.NORMAL, "bye")
                return
            elif passed is not None and not await self._handle(passed):
                return

    async def _handle(self, message: wire.ClientMessage) -> bool:
        """Do what a message asks; False ends the visit."""
        if isinstance(message, wire.Hello):
            return await self._hello(message)
        try:
            await self._dispatch(message)
        except StreamgenError as error:
            self._say(wire.Error(code="invalid_request", message=str(error), ref=message.type))
        return True

    async def _hello(self, message: wire.Hello) -> bool:
        settings = self.hub.settings
        if len(self.hub.visits) >= settings.max_sessions:
            text = f"all {settings.max_sessions} places are taken; try again later"
            await self._refuse("full", text, wire.Close.FULL)
            return False
        codec = next((name for name in message.accept.codecs if name in CODECS), None)
        if codec is None:
            text = f"no codec in common; this server has {' '.join(CODECS)}"
            await self._refuse("no_codec", text, wire.Close.BAD_MESSAGE)
            return False
        self._codec = CODECS[codec]
        self._playout.credit = message.credit
        self.hub.visits.add(self)
        self._say(
            wire.Welcome(
                server=f"streamgen {__version__}",
                session=secrets.token_hex(4),
                world=self.hub.info(),
                codecs=list(CODECS),
                rewind_seconds=HISTORY_SECONDS,
                max_sessions=settings.max_sessions,
                max_branches=self._limits.branches,
                prompt_chars=self._limits.prompt_chars,
            )
        )
        return True

    async def _dispatch(self, message: wire.ClientMessage) -> None:
        if isinstance(message, wire.FrameAck):
            self._acked(message.frame)
        elif isinstance(message, wire.StatsRequest):
            self._hz = message.hz
        elif isinstance(message, wire.Record):
            await self._record(message.on)
        elif isinstance(message, wire.Start):
            walk = Walk(message.prompt, message.seed, self.hub.image(message.image))
            self._runner = Runner(
                self.hub.world,
                self.hub.engine,
                self._emit,
                self._codec,
                self._limits,
                self.hub.settings.first_frame,
            )
            self._warn_words(message.prompt)
            self._runner.submit("start", walk)
            self._runner.start()
        elif self._runner is not None:
            self._command(self._runner, message)

    def _command(self, runner: Runner, message: wire.ClientMessage) -> None:
        if isinstance(message, wire.Action):
            runner.submit("act", message)
            self._heard.append((message.seq, time.monotonic()))
            self._log("act", sorted(message.keys))
        elif isinstance(message, wire.Prompt):
            runner.submit("prompt", message)
            self._warn_words(message.text)
            self._log("prompt", message.text)
        elif isinstance(message, wire.Pause):
            self._playout.freeze()
            shown = message.frame if message.frame is not None else self._playout.shown
            runner.submit("pause", shown)
        elif isinstance(message, wire.Rewind):
            runner.submit("rewind", message, self._playout.shown)
        elif isinstance(message, wire.Reset):
            keep = message.prompt is None
            image = self.hub.image(message.image)
            self._warn_words(message.prompt or "")
            runner.submit("reset", Walk(message.prompt or "", message.seed, image), keep)
        elif isinstance(message, wire.Fork):
            runner.submit("fork", message.name)
        elif isinstance(message, wire.Switch):
            runner.submit("switch", message.branch)
        elif isinstance(message, wire.Resume):
            runner.submit("resume")

    def _warn_words(self, text: str) -> None:
        unknown = unknown_words(text, self.hub.world.config.vocabulary)
        if unknown:
            words = ", ".join(unknown[:8])
            self._say(wire.Warn(code="unknown_words", message=f"not in its vocabulary: {words}"))

    def _acked(self, frame: int) -> None:
        now = time.monotonic()
        self._playout.ack(frame, now)
        self._blocked_since = None
        if self._runner is not None:
            self._runner.stall(False)
        seq = next((seq for flown, seq in self._flown if flown == frame), 0)
        answered = None
        while self._heard and self._heard[0][0] <= seq:
            answered = self._heard.popleft()[1]
        if answered is not None:
            self._latency.append((now - answered) * 1000)
        self._ready.set()

    # -- out ------------------------------------------------------------------------------------

    def _say(self, message: wire.ServerMessage) -> None:
        self._texts.append(message.to_json())
        self._ready.set()

    def _emit(self, item: Emitted) -> None:
        """Called from any thread; everything arrives in the loop in the order of the calls."""
        try:
            self._loop.call_soon_threadsafe(self._take, item)
        except RuntimeError:
            pass  # the loop is closed: the server is going down

    def _take(self, item: Emitted) -> None:
        if isinstance(item, list):
            self._playout.post(item)
        elif isinstance(item, Cut):
            self._playout.cut(item.shown)
            self._flown.clear()
        else:
            if isinstance(item, wire.Ack) and item.of in ("rewind", "switch", "pause"):
                self._log(item.of, item.applies_at_frame)
            if isinstance(item, wire.Bye):
                full = item.reason == "full"
                self._closing = wire.Close.FULL if full else wire.Close.INTERNAL
            if isinstance(item, wire.Started):
                self._started = item
                self._log("start", {"prompt": item.prompt, "seed": item.seed})
            self._texts.append(item.to_json())
        self._ready.set()

    async def _send_loop(self) -> None:
        try:
            await self._send_all()
        except (WebSocketDisconnect, RuntimeError):
            pass  # the other side is gone; the receive loop hears it too

    async def _send_all(self) -> None:
        while True:
            self._ready.clear()
            while self._texts:
                await self._socket.send_text(self._texts.popleft())
            if self._closing is not None:
                await self._socket.close(self._closing)
                return
            now = time.monotonic()
            for frame in self._playout.take_due(now):
                self._tape(frame)
            ready = self._playout.take()
            if ready is not None:
                self._flown.append((ready.header.frame, ready.header.action_seq))
                self._sent_at.append(now)
                await self._socket.send_bytes(ready.to_bytes())
                continue
            due = self._playout.next_due
            try:
                await asyncio.wait_for(
                    self._ready.wait(), None if due is None else max(0.0, due - time.monotonic())
                )
            except TimeoutError:
                pass

    async def _tick_loop(self) -> None:
        """Twice a second, or as often as statistics are asked for."""
        while True:
            await asyncio.sleep(1 / self._hz if self._hz >= 2 else 0.5)
            now = time.monotonic()
            if not self._playout.blocked:
                self._blocked_since = None
            elif self._blocked_since is None:
                self._blocked_since = now
            elif self._runner and now - self._blocked_since > self._limits.stall_seconds:
                self._runner.stall(True)
            if self._hz and self._runner is not None:
                self._say(self._stats(self._runner, now))
            if self._recorder and self._recorder.seconds > self._limits.recording_seconds:
                limit = self._limits.recording_seconds / 60
                self._say(wire.Warn(code="recording", message=f"stopped after {limit:g} minutes"))
                await self._record(False)

    def _stats(self, runner: Runner, now: float) -> wire.Stats:
        lately = [at for at in self._sent_at if now - at < 2.0]
        span = now - lately[0] if len(lately) > 1 else 0.0
        latency = float(np.median(self._latency)) if self._latency else None
        return wire.Stats(
            frame=self._playout.shown or 0,
            fps=round((len(lately) - 1) / span, 2) if span else 0.0,
            gen_p50_ms=round(runner.meter.quantile(0.5), 2),
            gen_p95_ms=round(runner.meter.quantile(0.95), 2),
            encode_ms=round(runner.meter.encode_ms, 3),
            input_to_frame_ms=None if latency is None else round(latency, 1),
            in_flight=self._playout.in_flight,
            sent=self._playout.sent,
            dropped=self._playout.dropped,
            paused=runner.paused,
        )

    # -- recording ------------------------------------------------------------------------------

    async def _record(self, on: bool) -> None:
        if on and self._recorder is None:
            config = self.hub.world.config
            self._recording, path = self.hub.new_recording()
            header = {
                "model": self.hub.name,
                "prompt": self._started.prompt if self._started else "",
                "seed": self._started.seed if self._started else None,
                "fps": config.fps,
                "width": config.width,
                "height": config.height,
                "chunk_frames": config.chunk_frames,
                "version": __version__,
            }
            make = lambda: Recorder(  # noqa: E731
                path, width=config.width, height=config.height, fps=config.fps, header=header
            )
            self._recorder = await asyncio.to_thread(make)
            self._say(wire.Recording(id=self._recording, on=True))
        elif not on and self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            task = asyncio.create_task(self._finish_recording(recorder, self._recording))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish_recording(self, recorder: Recorder, name: str) -> None:
        try:
            done = await asyncio.to_thread(recorder.close)
        except StreamgenError as error:
            self._say(wire.Recording(id=name, on=False))
            self._say(wire.Error(code="recording", message=str(error), ref="record"))
            return
        url = f"v1/recordings/{name}" if done.frames else None
        self._say(
            wire.Recording(
                id=name,
                on=False,
                frames=done.frames,
                seconds=round(done.frames / recorder.fps, 2),
                url=url and f"{url}.mp4",
                track=url and f"{url}.jsonl",
            )
        )

    def _tape(self, frame: wire.Frame) -> None:
        if self._recorder is not None and frame.pixels is not None:
            self._recorder.put(frame.pixels)

    def _log(self, kind: str, value: Any) -> None:
        if self._recorder is not None:
            frame = self._playout.shown or 0
            self._recorder.event({"type": "event", **Event(0, kind, value, frame).to_json()})


def unknown_words(text: str, vocabulary: tuple[str, ...]) -> list[str]:
    """The words of a prompt that a world does not know; none if it has no vocabulary."""
    known = {word.lower() for word in vocabulary}
    words = re.findall(r"[^\W\d_]+", text.lower())
    return list(dict.fromkeys(word for word in words if word not in known)) if known else []
