"""The server end to end: real sockets on localhost, a coloured world in place of a model."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as open_socket
from websockets.typing import Subprotocol

from streamgen import wire
from streamgen.apps.client import Client, ClientFrame, connect
from streamgen.apps.encode import encode_frame
from streamgen.apps.hub import Settings, origin_allowed
from streamgen.apps.play import listen, make_server, page_address, play
from streamgen.apps.server import create_app
from streamgen.apps.visit import unknown_words
from streamgen.errors import InvalidRequest, PoolFull, PortInUse
from tests.fakes import FakeConfig, FakeWorld, read_stamp

FAST = FakeConfig(fps=200)  # media time runs ten times faster than for people
TOKEN = "a-token"


@dataclass
class Served:
    """A server that runs, and what it serves."""

    address: str
    world: FakeWorld
    opened: ExitStack = field(default_factory=ExitStack)

    def connect(self, **options: Any) -> Client:
        options = {"token": TOKEN, "prompt": "a brick maze", "seed": 3, "codec": "png", **options}
        return self.opened.enter_context(connect(self.address, **options))

    def open(self, origin: str | None = None) -> Any:
        """A bare websocket."""
        url = self.address.replace("http", "ws", 1) + "v1/stream"
        return self.opened.enter_context(
            open_socket(url, subprotocols=[Subprotocol(wire.PROTOCOL)], origin=origin)  # type: ignore[arg-type]
        )

    def get(self, path: str) -> Any:
        return urllib.request.urlopen(self.address + path)

    def health(self) -> dict[str, Any]:
        return json.load(self.get("healthz"))


@contextmanager
def serve(world: FakeWorld, **settings: Any) -> Iterator[Served]:
    listener = listen("127.0.0.1", 0)
    server = make_server(create_app(world, Settings(token=TOKEN, **settings)))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    served = Served(page_address("127.0.0.1", listener.getsockname()[1]), world)
    try:
        wait_until(lambda: server.started)
        yield served
    finally:
        served.opened.close()
        server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeWorld(FAST)) as found:
        yield found


def wait_until(check: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(500):
        if check():
            return
        tick.wait(0.02)
    raise AssertionError("it did not happen within ten seconds")


def take(client: Client, until: Callable[[ClientFrame], bool]) -> ClientFrame:
    """Frames until one fits."""
    return next(frame for frame in client if until(frame))


def hello(**fields: Any) -> str:
    return json.dumps({"type": "hello", "version": 1, "token": TOKEN, **fields})


def hear(socket: Any, kind: str) -> dict[str, Any]:
    """Text messages until one of that type."""
    while True:
        data = socket.recv(timeout=10)
        if isinstance(data, str) and (message := json.loads(data))["type"] == kind:
            return message


def raise_(error: Exception) -> Any:
    raise error


def close_code(socket: Any) -> int | None:
    try:
        while True:
            socket.recv(timeout=10)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


# -- frames -----------------------------------------------------------------------------------


def test_frames_arrive_in_order(served: Served) -> None:
    """A started walk sends its frames, numbered as they are painted, with both chunk flags."""
    client = served.connect(credit=8)
    frames = [next(client) for _ in range(20)]
    assert [read_stamp(f.pixels) for f in frames] == [f.index for f in frames]
    assert [f.index for f in frames] == sorted({f.index for f in frames})
    for frame in frames:
        flag = wire.Flag.CHUNK_END if frame.index % 2 else wire.Flag.CHUNK_START
        assert frame.header.flags & flag
    stamps = [f.header.pts_us for f in frames]
    assert stamps == sorted(stamps)


def test_hello_tells_what_the_world_is(served: Served) -> None:
    """The welcome names keys, size, rate and suggestions; started names prompt and seed."""
    client = served.connect()
    world = client.welcome.world
    assert (world.width, world.height, world.fps, world.chunk_frames) == (128, 96, 200, 2)
    assert world.keys == ["w", "s", "a", "d", "q", "e"]
    assert (client.started.prompt, client.started.seed) == ("a brick maze", 3)


def test_action_seq_is_that_of_the_frame(served: Served) -> None:
    """A frame's header names the newest action that shaped it, and its pixels agree."""
    client = served.connect()
    client.act("w")
    client.act("w", "a")
    frame = take(client, lambda f: f.header.action_seq == 2)
    assert read_stamp(frame.pixels, row=1) == 0b101
    client.act()
    frame = take(client, lambda f: f.header.action_seq == 3)
    assert read_stamp(frame.pixels, row=1) == 0


def test_jpeg_is_rgb(served: Served) -> None:
    """The default codec shows the colours of the world: red is not blue."""
    frame = next(served.connect(codec="jpeg"))
    lossless = next(served.connect(codec="rgb24"))
    assert frame.header.codec == wire.Codec.JPEG
    colours = [f.pixels[40:].reshape(-1, 3).mean(0) for f in (frame, lossless)]
    assert np.abs(colours[0] - colours[1]).max() < 4


@pytest.mark.parametrize("codec", list(wire.Codec))
def test_codecs_keep_the_picture(codec: wire.Codec) -> None:
    """PNG and raw lose nothing, JPEG little."""
    from streamgen.apps.client import decode_frame

    pixels = cv2.resize(np.random.default_rng(0).integers(0, 255, (6, 8, 3), np.uint8), (128, 96))
    header = wire.Header(codec, 1, 0, 0, 0, 0, 0.0, 128, 96)
    found = decode_frame(header.pack() + encode_frame(pixels, codec)).pixels
    error = np.abs(found.astype(int) - pixels).mean()
    assert error < (4 if codec is wire.Codec.JPEG else 1e-9)


def test_slow_reader_sees_new_frames(served: Served) -> None:
    """A reader that takes its time skips frames: the next one it gets is not the next one made."""
    client = served.connect(credit=1)
    first = next(client)
    threading.Event().wait(0.3)  # 60 frames of media time
    client._frames.clear()
    later = [next(client).index for _ in range(3)]
    assert later[1] > first.index + 10


# -- controls ---------------------------------------------------------------------------------


def test_prompt_says_where_it_applies(served: Served) -> None:
    """The answer names the first frame of the new text, and the colour changes exactly there."""
    client = served.connect(credit=8)
    before = next(client)
    at = client.prompt("heavy snow")
    hue = {f.index: tuple(f.pixels[30, 30]) for f in (next(client) for _ in range(60))}
    ratio = {i: colour[0] / max(colour[2], 1) for i, colour in hue.items()}
    old = [r for i, r in ratio.items() if i < at] or [
        before.pixels[30, 30, 0] / max(before.pixels[30, 30, 2], 1)
    ]
    new = [r for i, r in ratio.items() if i >= at]
    assert np.ptp(new) < 0.2
    assert abs(np.mean(old) - np.mean(new)) > 0.3


def test_pause_freezes_at_the_frame_shown(served: Served) -> None:
    """After a pause the very next frame follows the one shown; none is lost, none made twice."""
    client = served.connect(credit=8)
    for shown_parity in (0, 1):
        shown = take(client, lambda f, p=shown_parity: f.index > 8 and f.index % 2 == p)
        made_next = client.pause()
        assert made_next == shown.index // 2 * 2 + 2
        client.resume()
        after = [next(client).index for _ in range(4)]
        assert after == list(range(shown.index + 1, shown.index + 5))


def test_prompt_survives_a_pause(served: Served) -> None:
    """A prompt whose first frame was not shown yet when the pause came still applies after it."""
    client = served.connect(credit=8)
    shown = take(client, lambda f: f.index > 6)
    client._send(wire.Prompt(id=9, text="lava"))
    client._send(wire.Pause(frame=shown.index))
    ack = client._ack("pause")
    client._frames.clear()
    client._unacked = None
    session = served.world.live[0]
    client.resume()
    take(client, lambda f: f.index > ack.applies_at_frame + 4)
    assert session.text == "lava"


def test_nothing_is_made_while_paused(served: Served) -> None:
    """A paused walk stands still."""
    client = served.connect()
    take(client, lambda f: f.index > 4)
    at = client.pause()
    threading.Event().wait(0.2)
    assert served.world.live[0].frame == at


def test_rewind(served: Served) -> None:
    """Rewind goes back from the frame shown, restores the prompt, and says where it stands."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 30)
    at = client.prompt("lava")
    shown = take(client, lambda f: f.index > at + 10)
    stands = client.rewind(seconds=0.2)  # 40 frames
    assert shown.index - 44 <= stands <= shown.index - 38
    assert stands % 2 == 0
    looked, after = next(client), next(client)
    assert (looked.index, after.index) == (stands - 1, stands)
    assert looked.header.flags & wire.Flag.DISCONTINUITY
    assert served.world.live[0].text == "a brick maze"


def test_rewind_to_the_beginning(served: Served) -> None:
    """Rewinding by more than there is goes to frame 0."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 6)
    assert client.rewind(seconds=2) == 0
    assert next(client).index == 0


def test_held_keys_survive_a_rewind(served: Served) -> None:
    """Keys that are down stay down when the timeline jumps."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 10)
    client.act("e")
    take(client, lambda f: f.header.action_seq == 1)
    client.rewind(seconds=0.02)
    frame = take(client, lambda f: f.header.action_seq == 1)
    assert read_stamp(frame.pixels, row=1) == 0b100000


def test_branches(served: Served) -> None:
    """A fork keeps the walk so far; switching shows where that one stood and goes on from there."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 10)
    assert client.fork("twin") == 1
    forked = served.world.live[0].frame
    client.prompt("lava")
    frame = take(client, lambda f: f.index > forked + 10)
    assert frame.header.branch == 1
    client.switch(0)
    looked, after = next(client), next(client)
    assert (looked.index, after.index) == (forked - 1, forked)
    assert (looked.header.branch, after.header.branch) == (0, 0)
    assert client.branches is not None
    assert client.branches.id == 0
    assert [b.name for b in client.branches.branches] == ["main", "twin"]
    assert [b.prompt for b in client.branches.branches] == ["a brick maze", "lava"]


def test_reset(served: Served) -> None:
    """A reset starts at frame 0 with the same prompt and the seed asked for; branches end."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 4)
    client.fork()
    client.reset(seed=11)
    assert (client.started.seed, client.started.prompt) == (11, "a brick maze")
    assert next(client).index == 0
    wait_until(lambda: len(served.world.live) == 1)


def test_recording(served: Served) -> None:
    """Record on, record off: an mp4 of what was shown and a track of what was asked, by URL."""
    client = served.connect(credit=8)
    assert client.record(True).on
    at = client.prompt("heavy snow")
    take(client, lambda f: f.index > at + 24)
    done = client.record(False)
    assert done.frames >= 20
    with served.get(done.url or "") as answer:
        assert answer.headers["content-type"] == "video/mp4"
        assert answer.read()[4:8] == b"ftyp"
    lines = [json.loads(line) for line in served.get(done.track or "")]
    assert lines[0]["type"] == "header"
    assert any(line.get("value") == "heavy snow" for line in lines)


def test_stats(served: Served) -> None:
    """Statistics come when asked for."""
    client = served.connect()
    client._send(wire.StatsRequest(hz=10))
    found = client._wait(lambda m: isinstance(m, wire.Stats))
    assert isinstance(found, wire.Stats)
    assert found.sent >= 1 and found.gen_p95_ms >= found.gen_p50_ms > 0


# -- many, and few ----------------------------------------------------------------------------


def test_two_visitors_are_two_walks(served: Served) -> None:
    """Each visitor has a session of its own; neither sees the other's keys."""
    one, two = served.connect(seed=1), served.connect(seed=2)
    one.act("w")
    take(one, lambda f: f.header.action_seq == 1)
    assert all(next(two).header.action_seq == 0 for _ in range(10))
    assert [s.seed for s in served.world.live] == [1, 2]
    assert served.health()["sessions"] == 2


def test_session_ends_with_the_connection(served: Served) -> None:
    """When a visitor is gone, so are their sessions, forks included, and the place is free."""
    client = served.connect()
    next(client)
    client.fork()
    client.close()
    wait_until(lambda: served.world.live == [] and served.health()["sessions"] == 0)


def test_full() -> None:
    """One visitor too many is told so and closed with 4503."""
    with serve(FakeWorld(FAST), max_sessions=1) as served:
        served.connect()
        with pytest.raises(InvalidRequest, match="full: all 1 places are taken"):
            served.connect()
        socket = served.open()
        socket.send(hello())
        assert close_code(socket) == wire.Close.FULL


def test_a_full_pool_is_an_error_of_the_fork(served: Served) -> None:
    """When the world has no room for a branch, the walk goes on and the fork is refused."""
    client = served.connect()
    served.world.max_sessions = 0
    with pytest.raises(InvalidRequest, match="refused: no free blocks"):
        client.fork()
    at = next(client).index
    assert take(client, lambda f: f.index > at + 4)


def test_parked_branches_make_room(served: Served) -> None:
    """When a step finds no room, the oldest parked branch is let go and the walk goes on."""
    client = served.connect(credit=8)
    client.fork()
    live = served.world.live[1]
    step, failures = live.step, [PoolFull("no free blocks")]
    live.step = lambda: step() if not failures else raise_(failures.pop())  # type: ignore
    client._wait(lambda m: isinstance(m, wire.Warn))
    assert client.warnings[-1].message == "main was let go: the world has no room for more"
    at = next(client).index
    take(client, lambda f: f.index > at + 4)
    assert served.world.live == [live]


def test_no_room_at_all_pauses(served: Served) -> None:
    """When a step finds no room and nothing is parked, the walk stands still and says why."""
    client = served.connect(credit=8)
    take(client, lambda f: f.index > 4)
    served.world.live[0].step = lambda: raise_(PoolFull("no free blocks"))  # type: ignore
    with pytest.raises(InvalidRequest, match="full: paused, the world has no room"):
        client._wait(lambda m: False)
    client._ack("pause")


def test_nobody_watching() -> None:
    """When nothing is acknowledged for a while the walk waits, and goes on with the next ack."""
    with serve(FakeWorld(FAST), limits=wire.Limits(stall_seconds=0.1)) as served:
        client = served.connect()
        session = served.world.live[0]
        first = next(client)
        still = [-1, -2]

        def stands_still() -> bool:
            threading.Event().wait(0.1)
            still.append(session.frame)
            return still[-1] == still[-2]

        wait_until(stands_still)
        assert take(client, lambda f: f.index > still[-1] + 4).index > first.index


def test_engine_is_used_by_one_at_a_time(served: Served) -> None:
    """Steps of different visitors never overlap."""
    busy, overlaps = threading.Lock(), []
    clients = [served.connect(seed=seed) for seed in (1, 2)]
    for session in served.world.live:
        step = session.step

        def watched(step: Any = step) -> Any:
            if not busy.acquire(blocking=False):
                overlaps.append(1)
                return step()
            try:
                return step()
            finally:
                busy.release()

        session.step = watched
    for _ in range(30):
        for client in clients:
            next(client)
    assert overlaps == []


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "complaint"),
    [
        ('{"type": "action", "seq": 1, "keys": ["x"]}', "invalid_request", "unknown key 'x'"),
        ('{"type": "prompt", "text": "' + "snow " * 40 + '"}', "invalid_request", "40 words"),
        ('{"type": "switch", "branch": 9}', "invalid_request", "no branch 9"),
        ('{"type": "reset", "image": "none"}', "invalid_request", "no image 'none'"),
        ('{"type": "rewind", "to_frame": 99999}', "invalid_request", "lies ahead"),
        ('{"type": "dance"}', "bad_message", "unknown message type 'dance'"),
        ("so?", "bad_message", "not JSON"),
    ],
)
def test_mistakes_are_answered(served: Served, message: str, code: str, complaint: str) -> None:
    """Each mistake has one clear error, and the walk goes on."""
    socket = served.open()
    socket.send(hello())
    socket.send('{"type": "start", "prompt": "a maze", "seed": 1}')
    hear(socket, "started")
    socket.send(message)
    error = hear(socket, "error")
    assert error["code"] == code
    assert complaint in error["message"]
    socket.send('{"type": "prompt", "id": 5, "text": "lava"}')
    assert hear(socket, "ack")["id"] == 5


def test_a_bad_start_can_be_mended(served: Served) -> None:
    """A start that fails is an error; a reset with better words begins the walk."""
    socket = served.open()
    socket.send(hello())
    socket.send(json.dumps({"type": "start", "prompt": "snow " * 40}))
    assert hear(socket, "error")["ref"] == "start"
    socket.send('{"type": "reset", "prompt": "snow", "seed": 4}')
    assert hear(socket, "started")["prompt"] == "snow"


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("{", wire.Close.BAD_MESSAGE),
        ('{"type": "start"}', wire.Close.BAD_MESSAGE),
        (hello(token="guess"), wire.Close.UNAUTHORIZED),
        (hello(version=9), wire.Close.WRONG_VERSION),
        (hello(accept={"codecs": ["webp"]}), wire.Close.BAD_MESSAGE),
    ],
)
def test_close_codes(served: Served, first: str, code: wire.Close) -> None:
    """A bad hello is answered with an error, then closed with the code of its kind."""
    socket = served.open()
    socket.send(first)
    assert hear(socket, "error")["message"]
    assert close_code(socket) == code


def test_silence_is_closed() -> None:
    """Who says nothing is closed with 4408."""
    with serve(FakeWorld(FAST), limits=wire.Limits(hello_timeout=0.1)) as served:
        assert close_code(served.open()) == wire.Close.TIMEOUT


def test_unknown_words_are_named(served: Served) -> None:
    """A prompt with words that the world does not know is accepted with a warning."""
    client = served.connect()
    client.prompt("a purple maze with dragons")
    client._send(wire.StatsRequest(hz=10))
    client._wait(lambda m: isinstance(m, wire.Stats))
    assert client.warnings[-1].message == "not in its vocabulary: purple, with, dragons"


def test_words() -> None:
    """Words are compared without case and punctuation; no vocabulary knows every word."""
    assert unknown_words("A Maze, at NIGHT; at dusk!", ("a", "maze", "at", "night")) == ["dusk"]
    assert unknown_words("anything", ()) == []


def test_foreign_page_is_refused(served: Served) -> None:
    """A browser page from elsewhere gets 4403, one from this server gets in."""
    assert close_code(served.open("http://evil.example")) == wire.Close.FORBIDDEN_ORIGIN
    socket = served.open(served.address.rstrip("/"))
    socket.send(hello())
    assert hear(socket, "hello")["version"] == 1


@pytest.mark.parametrize(
    ("host", "origin", "header", "allowed"),
    [
        ("127.0.0.1", None, "127.0.0.1:7860", True),
        ("127.0.0.1", "http://localhost:7860", "localhost:7860", True),
        ("127.0.0.1", "http://[::1]:7860", "[::1]:7860", True),
        ("127.0.0.1", "http://evil.example:7860", "evil.example:7860", False),
        ("0.0.0.0", "http://box.local:7860", "box.local:7860", True),
        ("0.0.0.0", "http://evil.example", "box.local:7860", False),
        ("127.0.0.1", "https://tunnel.example", "x", True),
    ],
)
def test_origins(host: str, origin: str | None, header: str, allowed: bool) -> None:
    """On localhost only localhost's pages; on the network only the server's own; and the list."""
    settings = Settings(host=host, allow_origins=("https://tunnel.example",))
    assert origin_allowed(origin, header, settings) is allowed


# -- http -------------------------------------------------------------------------------------


def post_image(served: Served, data: bytes, token: str = TOKEN) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(served.address + "v1/images", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def test_first_frame_of_ones_own(served: Served) -> None:
    """An uploaded picture is cut to the world's size and is what the walk starts from."""
    red = np.zeros((300, 300, 3), np.uint8)
    red[..., 2] = 220  # BGR
    ref = post_image(served, cv2.imencode(".png", red)[1].tobytes())["ref"]
    socket = served.open()
    socket.send(hello())
    socket.send(json.dumps({"type": "start", "prompt": "a maze", "seed": 1, "image": ref}))
    hear(socket, "started")
    image = served.world.live[0].image
    assert image is not None
    assert image.shape == (96, 128, 3)
    assert image[50, 50].tolist() == [220, 0, 0]


def test_painted_first_frames() -> None:
    """A walk without a picture begins with one for its words and seed; each start asks for another,
    and a picture of one's own stays one's own."""
    asked: list[tuple[str, int]] = []

    def paint(prompt: str, seed: int) -> np.ndarray:
        asked.append((prompt, seed))
        return np.full((96, 128, 3), 10 * len(asked), np.uint8)

    world = FakeWorld(FAST)
    with serve(world, first_frame=paint) as served:
        client = served.connect(prompt="heavy snow", seed=7)
        assert world.live[0].image.max() == 10
        client.reset()
        next(client)
        client.reset(seed=3)
        next(client)
        assert asked == [("heavy snow", 7), ("heavy snow", 8), ("heavy snow", 5)]
        own = cv2.imencode(".png", np.full((96, 128, 3), 200, np.uint8))[1].tobytes()
        socket = served.open()
        socket.send(hello())
        ref = post_image(served, own)["ref"]
        socket.send(json.dumps({"type": "start", "prompt": "", "image": ref}))
        hear(socket, "started")
        assert world.live[-1].image.min() == 200
        socket.send(json.dumps({"type": "reset", "seed": 1}))
        hear(socket, "started")
    assert asked[3:] == [(world.config.suggestions[0], 1)]


def test_play_paints_first_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start_image` comes to the server as a painter at the world's size."""
    made: list[Any] = []

    def first_frames(source: str, **size: int) -> Any:
        made.append((source, size))
        return lambda prompt, seed: np.zeros((96, 128, 3), np.uint8)

    served: list[Settings] = []

    def build(world: Any, settings: Settings, **_: Any) -> Any:
        served.append(settings)
        raise InvalidRequest("enough")

    monkeypatch.setattr("streamgen.apps.painter.first_frames", first_frames)
    monkeypatch.setattr("streamgen.apps.play.build_app", build)
    with pytest.raises(InvalidRequest, match="enough"):
        play(FakeWorld(FAST), port=0, start_image="generated", say=lambda _: None)
    assert made == [("generated", {"width": 128, "height": 96})]
    assert served[0].first_frame is not None


def test_bad_uploads(served: Served) -> None:
    """No image, too much of it, and no token: each is refused with a line."""
    assert post_image(served, b"hello")["message"].startswith("not an image")
    assert post_image(served, b"x" * (9 << 20))["status"] == 413
    assert post_image(served, b"x", token="guess")["status"] == 401


def test_plain_page(served: Served) -> None:
    """The page without Gradio carries the token and names files that are there."""
    page = served.get("plain").read().decode()
    assert TOKEN in page
    for name in ("streamgen.js", "streamgen.css", "page.css"):
        assert f"plain/{name}" in page
        assert served.get(f"plain/{name}").status == 200


@pytest.mark.parametrize("path", ["plain/index.html", "v1/recordings/none.mp4", "plain/..%2f"])
def test_not_found(served: Served, path: str) -> None:
    """What is not there is 404, and no path leads out of the folder."""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        served.get(path)


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """A taken port is one line, found before anything is loaded."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use; choose another"):
            play("no-such-model", port=port, open_browser=False)
    assert "loading" not in capsys.readouterr().out


def test_bad_first_prompt() -> None:
    """A prompt that the world can't take is found before the page is served."""
    world = FakeWorld()
    with pytest.raises(InvalidRequest, match="40 words"):
        play(world, port=0, prompt="snow " * 40, open_browser=False, say=lambda _: None)
    assert world.live == []


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
        ("box.local", "http://box.local:80/"),
    ],
)
def test_address(host: str, address: str) -> None:
    """The printed address can be typed into a browser, whatever the server is bound to."""
    assert page_address(host, 80) == address
