"""A small client for Python: `for frame in connect(url, token=...): ...`

    with connect("ws://127.0.0.1:7860", token="...", prompt="a brick maze at night") as world:
        world.act("w")
        for frame in world:
            show(frame.pixels)                      # uint8 [H, W, 3]
            if frame.index == 200:
                world.prompt("heavy snow")          # the frame at which it applies

A frame is acknowledged when the next one is asked for, so a slow loop sees fewer frames, not old
ones (`wire.Playout`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from streamgen import wire
from streamgen.errors import InvalidRequest, SessionClosed


@dataclass(frozen=True)
class ClientFrame:
    """One frame as it arrived: its number, uint8 pixels `[H, W, 3]` RGB, and its header."""

    index: int
    pixels: np.ndarray
    header: wire.Header


class Client:
    """One walk in a world served elsewhere; see `connect`."""

    def __init__(self, socket: Any, timeout: float, opened: ExitStack) -> None:
        self._socket, self._timeout, self._opened = socket, timeout, opened
        self._frames: deque[ClientFrame] = deque()
        self._seq = self._id = 0
        self._unacked: int | None = None
        self.welcome: wire.Welcome
        self.started: wire.Started
        self.branches: wire.Branches | None = None
        self.warnings: list[wire.Warn] = []

    def act(self, *keys: str) -> None:
        """Hold these keys from now on; none is standing still."""
        self._seq += 1
        self._send(wire.Action(seq=self._seq, keys=list(keys)))

    def prompt(self, text: str) -> int:
        """Show another text; returns the first frame that contains it."""
        self._id += 1
        number = self._id
        self._send(wire.Prompt(id=number, text=text))
        return self._ack("prompt", number).applies_at_frame

    def rewind(self, seconds: float) -> int:
        """Go back from the newest frame taken; returns the number of the next frame."""
        self._send(wire.Rewind(seconds=seconds))
        return self._jumped("rewind").applies_at_frame

    def pause(self) -> int:
        """Stop at the frame taken last; returns the number of the next frame to be made."""
        self._send(wire.Pause(frame=self._unacked))
        return self._jumped("pause").applies_at_frame

    def resume(self) -> None:
        """Go on after a pause."""
        self._send(wire.Resume())
        self._ack("resume")

    def fork(self, name: str | None = None) -> int:
        """Branch here; returns the number of the new branch, which is live now."""
        self._send(wire.Fork(name=name))
        branch = self._ack("fork").id
        assert branch is not None, "a fork is answered with its branch"
        return branch

    def switch(self, branch: int) -> None:
        """Go on in another branch."""
        self._send(wire.Switch(branch=branch))
        self._jumped("switch")

    def reset(self, prompt: str | None = None, seed: int | None = None) -> None:
        """A new walk; what is left out stays as it is."""
        self._send(wire.Reset(prompt=prompt, seed=seed))
        self._wait(lambda m: isinstance(m, wire.Started))
        self._frames.clear()

    def record(self, on: bool) -> wire.Recording:
        """Start or finish a recording; its `url` is relative to the server's address."""
        self._send(wire.Record(on=on))
        found = self._wait(lambda m: isinstance(m, wire.Recording) and m.on == on)
        assert isinstance(found, wire.Recording)
        return found

    def __iter__(self) -> Iterator[ClientFrame]:
        return self

    def __next__(self) -> ClientFrame:
        if self._unacked is not None:
            self._send(wire.FrameAck(frame=self._unacked))
            self._unacked = None
        try:
            while not self._frames:
                self._receive()
        except SessionClosed:
            raise StopIteration from None
        frame = self._frames.popleft()
        self._unacked = frame.index
        return frame

    def close(self) -> None:
        """Leave."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: wire.ClientMessage) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(message.to_json())
        except ConnectionClosed as closed:
            raise SessionClosed(f"the server closed the connection: {closed}") from None

    def _receive(self, timeout: float | None = None) -> wire.ServerMessage | None:
        """Take one message; a frame goes to `_frames`. Raises InvalidRequest for an error."""
        from websockets.exceptions import ConnectionClosed

        try:
            data = self._socket.recv(timeout)
        except TimeoutError:
            raise SessionClosed(f"no answer within {timeout:g} s") from None
        except ConnectionClosed as closed:
            raise SessionClosed(f"the server closed the connection: {closed}") from None
        if isinstance(data, bytes):
            self._frames.append(decode_frame(data))
            return None
        message = wire.read_server(data)
        if isinstance(message, wire.Error):
            raise InvalidRequest(f"{message.code}: {message.message}")
        if isinstance(message, wire.Started):
            self.started = message
        elif isinstance(message, wire.Branches):
            self.branches = message
        elif isinstance(message, wire.Warn):
            self.warnings.append(message)
        return message

    def _wait(self, wanted: Callable[[wire.ServerMessage], bool]) -> wire.ServerMessage:
        while True:
            message = self._receive(self._timeout)
            if message is not None and wanted(message):
                return message

    def _ack(self, of: str, number: int | None = None) -> wire.Ack:
        found = self._wait(
            lambda m: isinstance(m, wire.Ack) and m.of == of and (number is None or m.id == number)
        )
        assert isinstance(found, wire.Ack)
        return found

    def _jumped(self, of: str) -> wire.Ack:
        """After a jump the frames that waited belong to what is no more."""
        ack = self._ack(of)
        self._frames.clear()
        self._unacked = None
        return ack


def connect(
    url: str,
    *,
    token: str | None = None,
    prompt: str = "",
    seed: int | None = None,
    codec: str = "jpeg",
    credit: int = 2,
    timeout: float = 60.0,
) -> Client:
    """Start a walk in a world that `streamgen play` serves.

    Args:
        url: of the server: ws://, wss://, http:// or https://, with or without /v1/stream.
        token: what the server printed at its start.
        prompt, seed: of the walk; no seed means any.
        codec: "jpeg", or "png" and "rgb24", which lose nothing.
        credit: frames that may be under way at once.
        timeout: seconds to wait for the connection and for an answer.

    Raises:
        InvalidRequest: the server refused; its message is in the text.
        SessionClosed: no server answers there, in time, or it closed the connection.
    """
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect as open_socket
    from websockets.typing import Subprotocol

    url = url.replace("http", "ws", 1) if url.startswith("http") else url
    if not url.endswith(wire.PATH):
        url = url.rstrip("/") + wire.PATH
    opened = ExitStack()
    try:
        socket = opened.enter_context(
            open_socket(
                url,
                subprotocols=[Subprotocol(wire.PROTOCOL)],
                compression=None,  # pictures are compressed already
                open_timeout=timeout,
            )
        )
    except (OSError, TimeoutError, WebSocketException) as error:
        raise SessionClosed(f"no server at {url}: {error}") from None
    client = Client(socket, timeout, opened)
    try:
        accept = wire.Accept(codecs=[codec])
        client._send(
            wire.Hello(
                version=wire.VERSION, client="python", token=token, accept=accept, credit=credit
            )
        )
        welcome = client._wait(lambda m: isinstance(m, wire.Welcome))
        assert isinstance(welcome, wire.Welcome)
        client.welcome = welcome
        client._send(wire.Start(prompt=prompt, seed=seed))
        client._wait(lambda m: isinstance(m, wire.Started))
    except BaseException:
        client.close()
        raise
    return client


def decode_frame(data: bytes) -> ClientFrame:
    """Read a binary message. Raises InvalidRequest if it is no frame or does not decode."""
    header, payload = wire.read_frame(data)
    raw = np.frombuffer(payload, np.uint8)
    if header.codec == wire.Codec.RGB24:
        pixels: np.ndarray = raw.reshape(header.height, header.width, 3)
    else:
        import cv2

        bgr = cv2.imdecode(raw, cv2.IMREAD_COLOR)
        if bgr is None:
            raise InvalidRequest(f"frame {header.frame} does not decode")
        pixels = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
    return ClientFrame(header.frame, pixels, header)
