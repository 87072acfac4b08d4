"""A walk in a file: it goes on bitwise, belongs to one world, and is whole or refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import tiny_world

from streamgen.engine import Engine
from streamgen.errors import (
    InvalidRequest,
    PoolFull,
    SessionClosed,
    SessionFileError,
    StreamgenError,
)
from streamgen.pipelines.world import WorldPipeline
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session
from streamgen.session_file import identity, read_file, write_file

KEYS = ("w", "wa", "", "s", "de", "q", "wd", "a")
BRICK, SNOW = "a brick maze at night", "snow"


@pytest.fixture
def world() -> WorldPipeline:
    """Window 6, sink 1, chunks of 2 frames, 20 frames a second."""
    return tiny_world()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where to save."""
    return tmp_path / "walk.sgs"


def walk(session: Session, chunks: int) -> list[bytes]:
    """Step with keys that depend on the chunk's number alone: pixels and latents of each chunk."""
    made = []
    for _ in range(chunks):
        session.act(keys=set(KEYS[session.frame // 2 % len(KEYS)]))
        frames = session.step().frames
        latents = torch.stack(session._state.latents[-len(frames) :])
        made.append(frames.tobytes() + latents.numpy().tobytes())
    return made


def told(session: Session) -> tuple[Any, ...]:
    """What a session says of itself."""
    return (session.seed, session.frame, session.text, session.keys, session.track)


def one_line(error: pytest.ExceptionInfo[StreamgenError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def seal(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Write a file again after a change of its header and tensors, with a digest that agrees."""
    header, tensors = read_file(path)
    change(header, tensors)
    write_file(path, header, tensors)


# It goes on as if it had never stopped


def straight(session: Session) -> Session:
    walk(session, 3)
    return session


def wrapped(session: Session) -> Session:
    walk(session, 8)  # 16 frames through a window of 6
    return session


def switched(session: Session) -> Session:
    walk(session, 4)
    session.prompt(SNOW, recache="window_causal")
    walk(session, 1)
    return session


def forked(session: Session) -> Session:
    walk(session, 5)
    twin = session.fork()
    twin.prompt(SNOW)
    walk(session, 1), walk(twin, 2)
    return twin


def just_forked(session: Session) -> Session:
    walk(session, 5)
    return session.fork()


def rewound(session: Session) -> Session:
    walk(session, 7)
    session.rewind(frames=6)
    return session


def failed(session: Session) -> Session:
    """A step that failed, where there is no history, has pushed a frame out of the window."""
    walk(session, 6)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(session.engine, "denoise", lambda *_: {}["broken"])
        session.step()
    return session


def fresh(session: Session) -> Session:
    return session


LIVES = (fresh, straight, wrapped, switched, forked, just_forked, rewound)
CASES = [(life, "sliding_sink") for life in LIVES] + [(wrapped, "absolute"), (forked, "absolute")]


@pytest.mark.parametrize(("life", "positions"), CASES)
def test_goes_on_bitwise(life: Callable[[Session], Session], positions: str, path: Path) -> None:
    """In another world of the same weights, whatever happened before: also where the window has
    wrapped, and with a ReCache of all of it right after."""
    session = life(tiny_world(positions=positions).session(BRICK, seed=5))
    session.save(path)
    resumed = tiny_world(positions=positions).load_session(path)
    assert told(resumed) == told(session)
    assert walk(resumed, 3) == walk(session, 3)
    for one in (resumed, session):
        one.prompt("day" if one.text == BRICK else BRICK, recache="window_causal")
    assert walk(resumed, 5) == walk(session, 5)
    assert told(resumed) == told(session)


def test_after_a_failed_step(world: WorldPipeline, path: Path) -> None:
    """The frames that it still holds are what a resumed session holds."""
    session = failed(world.session(BRICK, seed=5, history_seconds=0))
    session.save(path)
    resumed = tiny_world().load_session(path)
    assert [o for o, _ in resumed._table.entries] == [o for o, _ in session._table.entries]
    for one in (resumed, session):
        one.prompt(SNOW, recache="window_causal")
    assert walk(resumed, 4) == walk(session, 4)


def test_saving_changes_nothing(world: WorldPipeline, path: Path) -> None:
    """The saved session goes on as one that was never saved, and no slot is taken."""
    session, plain = world.session(BRICK, seed=5), world.session(BRICK, seed=5)
    walk(session, 4), walk(plain, 4)
    stats = world.engine.pool.stats()
    session.save(path)
    assert world.engine.pool.stats() == stats
    assert walk(session, 3) == walk(plain, 3)


def test_two_of_one_file(world: WorldPipeline, path: Path) -> None:
    """Beside the saved session and each other, in one pool: none disturbs another."""
    session = wrapped(world.session(BRICK, seed=5))
    session.save(path)
    twins = [world.load_session(path) for _ in range(2)]
    made = [[walk(one, 1) for one in (session, *twins)] for _ in range(4)]
    assert all(one == first for first, *rest in made for one in rest)
    for one in (session, *twins):
        one.close()
    assert world.engine.pool.stats().live == 0
    world.engine.pool.check()


def test_what_was_asked(world: WorldPipeline, path: Path) -> None:
    """Keys and texts that wait for the next chunk are in the file, a pulse too, and the numbers of
    receipts go on."""
    session = straight(world.session(BRICK, seed=5))
    session.act(keys={"q"})
    session.act(keys={"w"})
    session.prompt(SNOW, recache="off")
    session.save(path)
    resumed = tiny_world().load_session(path)
    chunks = [one.step() for one in (session, resumed)]
    assert chunks[0].applied == chunks[1].applied and len(chunks[1].applied) == 3
    assert (chunks[0].frames == chunks[1].frames).all()
    assert resumed.act(keys=()) == session.act(keys=())
    assert walk(session, 2) == walk(resumed, 2)
    assert told(session) == told(resumed)


def test_image_before_the_first_step(world: WorldPipeline, path: Path) -> None:
    """A picture to begin with is state until the first chunk was made."""
    image = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    session = world.session(BRICK, seed=5, image=image)
    session.save(path)
    assert walk(tiny_world().load_session(path), 3) == walk(session, 3)


def test_given_frames(world: WorldPipeline, path: Path) -> None:
    """Frames that were watched are a past like any other."""
    rng = np.random.default_rng(0)
    session = world.session(BRICK, seed=5)
    session.watch(rng.integers(0, 256, (6, 16, 24, 3), dtype=np.uint8), np.eye(6)[:6])
    session.save(path)
    assert walk(tiny_world().load_session(path), 3) == walk(session, 3)


class Trailing:
    """A decoder that shows the mean of all latents so far: state of every kind that is accepted."""

    def __init__(self, world: WorldPipeline, patch: pytest.MonkeyPatch) -> None:
        self._decode = world.engine.codec.decode
        patch.setattr(world.engine.codec, "decode", self.decode)

    def decode(self, latents: torch.Tensor, state: Any) -> Any:
        state = state or {"cache": [torch.zeros(()), None], 0: (0, "n", 0.5), "done": False}
        total, count = state["cache"][0] + latents.sum(0), state[0][0] + len(latents)
        shared = torch.stack([total, total])
        pixels = self._decode(total.expand(len(latents), -1, -1, -1) / count)[0]
        return pixels, {"cache": [shared[0], shared[1:]], 0: (count, "n", 0.5), "done": True}


def test_decoder_with_a_state(
    world: WorldPipeline, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with what it remembered."""
    Trailing(world, monkeypatch)
    session, other = straight(world.session(BRICK, seed=5)), tiny_world()
    session.save(path)
    Trailing(other, monkeypatch)
    resumed = other.load_session(path)
    ours, theirs = session._state.decoder, resumed._state.decoder
    assert theirs[0] == (6, "n", 0.5) and theirs["done"] is True and theirs.keys() == ours.keys()
    assert torch.equal(ours["cache"][1], theirs["cache"][1])
    assert walk(session, 3) == walk(resumed, 3)


@pytest.mark.parametrize("state", [object(), [{3}], {(1, 2): None}])
def test_decoder_with_a_state_of_another_kind(world: WorldPipeline, path: Path, state: Any) -> None:
    """Is refused by its type; no file is written."""
    session = straight(world.session(BRICK, seed=5))
    object.__setattr__(session._state, "decoder", state)
    with pytest.raises(InvalidRequest, match="holds a (object|set|dict): accepted") as caught:
        session.save(path)
    one_line(caught)
    assert not path.exists()


def test_blocks_in_another_tier(world: WorldPipeline, path: Path) -> None:
    """A parked session is saved from wherever its bytes lie."""

    class Shelf:
        def __init__(self, block: Any) -> None:
            self.bytes = bytearray(pool.payload_bytes)
            pool.read(block, memoryview(self.bytes))
            pool.unload(block, self)

        def read(self, out: memoryview) -> None:
            out[:] = self.bytes

        def forget(self) -> None:
            pass

    pool, session = world.engine.pool, wrapped(world.session(BRICK, seed=5, history_seconds=0))
    session.save(path)
    whole = path.read_bytes()
    session._table.park()
    for _, block in session._table.entries[::2]:
        Shelf(block)
    session.save(path)
    assert path.read_bytes() == whole


def test_a_file_per_moment(world: WorldPipeline, path: Path) -> None:
    """The same moment gives the same bytes; saving again replaces, and a link stays a link."""
    session = straight(world.session(BRICK, seed=5))
    session.save(path)
    first = path.read_bytes()
    session.fork().save(path)
    assert path.read_bytes() == first
    walk(session, 1)
    link = path.with_name("newest.sgs")
    link.symlink_to(path)
    session.save(str(link))
    assert link.is_symlink() and path.read_bytes() != first
    assert tiny_world().load_session(link).frame == 8
    assert sorted(path.parent.iterdir()) == [link, path]


def test_a_closed_session(world: WorldPipeline, path: Path) -> None:
    """Has nothing to save."""
    session = straight(world.session(BRICK, seed=5))
    session.close()
    with pytest.raises(SessionClosed):
        session.save(path)


CHILD = """
import hashlib, sys, torch
from streamgen.pipelines.world import WorldPipeline
torch.set_num_threads(1)
world = WorldPipeline.from_pretrained("pocket-world", device="cpu")
for path in sys.argv[1:]:
    with world.load_session(path) as session:
        for keys in ("w", "wa", "e"):
            session.act(keys=set(keys))
            chunk = session.step()
            latents = torch.stack(session._state.latents).float().numpy()
            print(hashlib.sha256(chunk.frames.tobytes() + latents.tobytes()).hexdigest())
"""


def test_in_a_fresh_process(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The pocket world: three chunks, a twin that switched its prompt, and a window that wrapped,
    each saved and resumed by another process, make bitwise the next three chunks."""
    world = WorldPipeline.from_pretrained("pocket-world", device="cpu")
    session = world.session("a brick maze at night", seed=7)
    paths = [tmp_path / f"{name}.sgs" for name in ("straight", "switched", "wrapped")]
    expected: list[str] = []

    def save(one: Session, path: Path) -> None:
        one.save(path)
        with one.fork() as twin:
            for keys in ("w", "wa", "e"):
                twin.act(keys=set(keys))
                frames = twin.step().frames
                latents = torch.stack(twin._state.latents).float().numpy()
                expected.append(hashlib.sha256(frames.tobytes() + latents.tobytes()).hexdigest())

    walk(session, 3)
    save(session, paths[0])
    twin = session.fork()
    twin.prompt("heavy snow", recache="window_causal")
    walk(twin, 1)
    save(twin, paths[1])
    walk(session, 7)
    assert session.frame > world.config.window
    save(session, paths[2])
    done = run_python("-c", CHILD, *map(str, paths))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected


# Nothing of before is remembered


def test_rewind_after_loading(path: Path) -> None:
    """Not past the load, which says so; what is made from then on can be gone back to."""
    session = wrapped(tiny_world().session(BRICK, seed=5, history_seconds=0.4))
    session.save(path)
    resumed = tiny_world().load_session(path)
    with pytest.raises(InvalidRequest, match="nothing before frame 16 is remembered") as caught:
        resumed.rewind(frames=2)
    one_line(caught)
    made = walk(resumed, 3)
    assert resumed.rewind(seconds=1.0) == 16
    assert walk(resumed, 3) == made
    walk(resumed, 3)
    assert resumed.rewind(seconds=9.0) == 28 - 8  # as far back as before
    forgetful = tiny_world().load_session(path, history_seconds=0)
    walk(forgetful, 1)
    with pytest.raises(InvalidRequest, match=r"history_seconds are above 0 \(here 0\)"):
        forgetful.rewind(frames=2)


# Room


def test_fits_where_a_session_fits(path: Path) -> None:
    """A pool with room for one session and no history takes one from a file, wrapped or not."""
    for life in (straight, wrapped):
        world = tiny_world(max_sessions=1, history_frames=0)
        session = life(world.session(BRICK, seed=5, history_seconds=0))
        session.save(path)
        expected = walk(session, 4)
        session.close()
        resumed = world.load_session(path)
        assert walk(resumed, 4) == expected
        resumed.close()
        assert world.engine.pool.stats().free == world.engine.pool.stats().total


def test_steady_after_one_chunk(world: WorldPipeline, path: Path) -> None:
    """The blocks come to where they would lie anyway: the first chunk moves nothing."""
    wrapped(world.session(BRICK, seed=5)).save(path)
    resumed = tiny_world().load_session(path, history_seconds=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(resumed.engine.pool), "move", None)
        patch.setattr(type(resumed.engine.pool), "copy", None)
        walk(resumed, 3)


def test_pool_full(path: Path) -> None:
    """No room: a typed error, every table and the pool unchanged, and room after a close."""
    world = tiny_world(max_sessions=2, history_frames=0)
    sessions = [world.session(BRICK, seed=seed, history_seconds=0) for seed in range(2)]
    made = [walk(session, 4) for session in sessions]
    sessions[0].save(path)
    pool = world.engine.pool
    before = pool.stats(), [session._table.entries for session in sessions]
    for _ in range(3):
        with pytest.raises(PoolFull):
            world.load_session(path)
        assert (pool.stats(), [session._table.entries for session in sessions]) == before
        pool.check()
    expected = walk(sessions[0], 2)
    sessions[1].close()
    assert walk(world.load_session(path), 2) == expected
    assert len(made) == 2


# Another world


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 8}, "world window is 6 there and 8 here"),
        ({"sink": 0}, "world sink is 1 there and 0 here"),
        ({"positions": "absolute"}, "world positions is sliding_sink there and absolute here"),
        ({"prediction": "sample"}, "world: transformer prediction is flow there and sample here"),
        ({"schedule": FewStep((1000, 400), shift=1.0)}, "schedule steps 1 is 500 there and 400"),
        ({"vocabulary": ("a",)}, "world vocabulary is a list of 9 there and .'a'. here"),
    ],
)
def test_other_settings(
    world: WorldPipeline, path: Path, changes: dict[str, Any], message: str
) -> None:
    """Refused by the first thing that differs, with both values."""
    straight(world.session(BRICK, seed=5)).save(path)
    made = {key: changes[key] for key in changes if key not in ("schedule", "vocabulary")}
    other = tiny_world(**made)
    for key in changes.keys() - made.keys():
        object.__setattr__(other.config, key, changes[key])
    with pytest.raises(InvalidRequest, match=message) as caught:
        other.load_session(path)
    assert str(path) in one_line(caught) and "accepted are" in str(caught.value)
    assert other.engine.pool.stats().free == other.engine.pool.stats().total


def test_other_weights(world: WorldPipeline, path: Path) -> None:
    """One number of any part that differs makes another model."""
    straight(world.session(BRICK, seed=5)).save(path)
    for part in ("dit", "text", "codec"):
        other = tiny_world()
        with torch.no_grad():
            parameter = next(getattr(other.engine, part).parameters())
            parameter[(0,) * parameter.ndim] += 1
        with pytest.raises(InvalidRequest, match="model weights is .* there and .* here") as caught:
            other.load_session(path)
        one_line(caught)


def test_other_cache(world: WorldPipeline, path: Path) -> None:
    """Another dtype of keys and values: said as such, before the weights are compared."""
    straight(world.session(BRICK, seed=5)).save(path)
    other = tiny_world()
    folder = path.with_name("tiny")
    other.save_pretrained(folder, dtype=torch.float32)
    (folder / "model.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamgen.weights.registry.verify", lambda folder: None)
        half = WorldPipeline.from_pretrained(folder, device="cpu", dtype="bfloat16")
        same = WorldPipeline.from_pretrained(folder, device="cpu", dtype="float32")
    with pytest.raises(InvalidRequest, match="cache dtype is torch.float32 there and torch.bfloa"):
        half.load_session(path)
    assert same.load_session(path).frame == 6


def coded(kv: str) -> WorldPipeline:
    """A world whose pool stores frames in a codec."""
    engine = tiny_world().engine
    return WorldPipeline(Engine(engine.dit, engine.text, engine.codec, engine.config, 4, 64, kv))


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_coded_cache(world: WorldPipeline, path: Path, kv: str) -> None:
    """Blocks are saved as they are stored, and go on bitwise; a raw pool does not take them."""
    wrapped(world.session(BRICK, seed=5)).save(path)
    raw = path.stat().st_size
    session = switched(wrapped(coded(kv).session(BRICK, seed=5)))
    session.save(path)
    blocks = len(session._table.entries)
    saved = world.engine.pool.payload_bytes - session.engine.pool.payload_bytes
    assert abs(raw - path.stat().st_size - blocks * saved) < 1500  # a longer track
    assert walk(coded(kv).load_session(path), 4) == walk(session, 4)
    with pytest.raises(InvalidRequest, match=f"cache codec is {kv}.* there and raw here"):
        world.load_session(path)


def test_what_may_differ(world: WorldPipeline, path: Path) -> None:
    """Room for more sessions, and the texts that are offered, change no frame."""
    straight(world.session(BRICK, seed=5)).save(path)
    other = tiny_world(max_sessions=1, history_frames=8)
    object.__setattr__(other.config, "suggestions", ("day",))
    assert other.load_session(path).frame == 6


def test_identity_is_plain(world: WorldPipeline) -> None:
    """What is compared survives JSON, and is the same for two worlds of the same weights: nothing
    of one process is in it."""
    ours, theirs = (identity(one.engine, "x") for one in (world, tiny_world()))
    assert json.loads(json.dumps(ours)) == ours == theirs
    assert " at 0x" not in json.dumps(ours)


# No session file


def no_file(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def prose(path: Path) -> None:
    path.write_text("# A walk\n\nIt was night.\n")


def weights(path: Path) -> None:
    path.write_bytes(bytes(8) + path.read_bytes()[8:])


def newer(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"streamgen-session 1 ", b"streamgen-session 2 "))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (no_file, SessionFileError, "can't be read .No such file"),
        (folder, SessionFileError, "can't be read .Is a directory"),
        (empty, InvalidRequest, "no session file .0 bytes.; accepted are"),
        (prose, InvalidRequest, "no session file"),
        (weights, InvalidRequest, "no session file"),
        (newer, InvalidRequest, "written in format 2; accepted is format 1"),
    ],
)
def test_no_session_file(
    world: WorldPipeline, path: Path, change: Callable[[Path], None], kind: Any, message: str
) -> None:
    """Told apart in one line; nothing is loaded."""
    straight(world.session(BRICK, seed=5)).save(path)
    change(path)
    other = tiny_world()
    with pytest.raises(kind, match=message) as caught:
        other.load_session(path)
    assert str(path) in one_line(caught)
    assert other.engine.pool.stats().free == other.engine.pool.stats().total


@pytest.fixture
def small(path: Path) -> Path:
    """A file of a few hundred bytes."""
    write_file(path, {"a": [1, "x"]}, {"t": torch.arange(3), "u": torch.ones(2, 2).bfloat16()})
    return path


def test_there_and_back(small: Path) -> None:
    """Header and tensors come back bitwise."""
    header, tensors = read_file(small)
    assert header == {"a": [1, "x"]} and tensors.keys() == {"t", "u"}
    assert torch.equal(tensors["t"], torch.arange(3))
    assert torch.equal(tensors["u"], torch.ones(2, 2).bfloat16())


def test_every_bit_and_every_length(small: Path) -> None:
    """Each single flipped bit and each cut is found, and a longer file too."""
    data = small.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        small.write_bytes(flipped)
        with pytest.raises((SessionFileError, InvalidRequest)):
            read_file(small)
    for size in range(len(data)):
        small.write_bytes(data[:size])
        with pytest.raises((SessionFileError, InvalidRequest)):
            read_file(small)
    small.write_bytes(data + b"\0")
    with pytest.raises(SessionFileError, match="damaged or cut short"):
        read_file(small)


def test_damaged_session(world: WorldPipeline, path: Path) -> None:
    """Of a real session: one line, and neither pool nor other sessions notice."""
    straight(world.session(BRICK, seed=5)).save(path)
    data, pick, witness = path.read_bytes(), random.Random(0), straight(world.session(SNOW))
    stats = world.engine.pool.stats()
    for _ in range(10):
        broken = bytearray(data)
        broken[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
        for bad in (broken, data[: pick.randrange(len(data))]):
            path.write_bytes(bad)
            with pytest.raises((SessionFileError, InvalidRequest)) as caught:
                world.load_session(path)
            one_line(caught)
    assert world.engine.pool.stats() == stats and witness.frame == 6


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no frame": lambda h, t: h.pop("frame"),
    "no blocks": lambda h, t: t.pop("blocks"),
    "fewer blocks": lambda h, t: t.update(blocks=t["blocks"][:2].clone()),
    "shorter blocks": lambda h, t: t.update(blocks=t["blocks"][:, 4:].clone()),
    "unseen frames": lambda h, t: h.update(ordinals=[x + 90 for x in h["ordinals"]]),
    "frames twice": lambda h, t: h.update(ordinals=[0] * len(h["ordinals"])),
    "a frame of text": lambda h, t: h.update(ordinals=["0"] * len(h["ordinals"])),
    "no generator": lambda h, t: t.pop("rng"),
    "another generator": lambda h, t: t.update(rng=t["rng"][:-1].clone()),
    "flat latents": lambda h, t: t.update(latents=t["latents"].flatten(1)),
    "no actions": lambda h, t: t.pop("actions"),
    "other actions": lambda h, t: t.update(actions=t["actions"][:, :2].clone()),
    "unknown keys": lambda h, t: h.update(keys=["jump"]),
    "a long text": lambda h, t: h.update(text="maze " * 7),
    "no text": lambda h, t: h.update(text=None),
    "a bare event": lambda h, t: h.update(track=[{"id": 1}]),
    "a list": lambda h, t: h.update({"made in": []}),
    "an empty decoder": lambda h, t: h.update(decoder={}),
    "a decoder of nothing": lambda h, t: h.update(decoder={"tensor": "none"}),
    "an image of another size": lambda h, t: t.update(image=torch.zeros(3, 3)),
    "half an ask": lambda h, t: h.update(asked=[[1, "act"]]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged(world: WorldPipeline, path: Path, name: str) -> None:
    """A digest is no signature: what does not fit is refused although it agrees."""
    straight(world.session(BRICK, seed=5)).save(path)
    seal(path, FORGERIES[name])
    other = tiny_world()
    with pytest.raises((SessionFileError, InvalidRequest)) as caught:
        other.load_session(path)
    one_line(caught)
    assert other.engine.pool.stats().free == other.engine.pool.stats().total
    other.engine.pool.check()


# Saving when the disk or the process dies


@pytest.mark.parametrize("name", ["no/such/folder/walk.sgs", "."])
def test_no_place_to_save(world: WorldPipeline, tmp_path: Path, name: str) -> None:
    """Said in one line."""
    with pytest.raises(InvalidRequest, match="accepted is the name of a file") as caught:
        straight(world.session(BRICK, seed=5)).save(tmp_path / name)
    one_line(caught)


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """`file_limit(n)`: the system refuses to make files longer than `n` bytes, as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 50, 5000])
def test_disk_refuses(
    world: WorldPipeline, path: Path, file_limit: Callable[[int], None], room: int
) -> None:
    """The old file stays, nothing lies beside it, and the session goes on."""
    session = straight(world.session(BRICK, seed=5))
    session.save(path)
    old = path.read_bytes()
    assert len(old) > 5000
    walk(session, 1)
    file_limit(room)
    with pytest.raises(SessionFileError, match="can't be written .File too large") as caught:
        session.save(path)
    one_line(caught)
    file_limit(10**9)
    assert path.read_bytes() == old and list(path.parent.iterdir()) == [path]
    session.save(path)
    assert tiny_world().load_session(path).frame == 8


CALLS = ("open", "write", "fsync", "close", "replace")


def die_at(call: int, half: bool) -> list[str]:
    """From here on, this process is killed instead of making system call number `call`; half of
    what it writes then still gets through if `half`. Returns the calls made, as they are made."""
    made: list[str] = []

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any) -> Any:
            if len(made) == call:
                if half and name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return real(*args)

        return replacement

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))
    return made


def in_a_child(work: Callable[[], object]) -> int:
    """Run in a forked process; its exit status, negative for the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_every_call(path: Path, half: bool) -> None:
    """Killed before each call to the system, and in the middle of each write: what lies there is
    the old file or the new one, the new one once it has the name, and saving works afterwards."""
    path = path.with_name("deep") / path.name
    path.parent.mkdir()
    old, new = ({"a": torch.full((1000,), x)} for x in (1, 2))
    seen = []
    for call in range(100):
        write_file(path, {"is": "old"}, old)

        def save(call: int = call) -> None:
            die_at(call, half)
            write_file(path, {"is": "new"}, new)

        status = in_a_child(save)
        header, tensors = read_file(path)
        assert tensors["a"].unique().tolist() == [1 if header["is"] == "old" else 2]
        seen.append(header["is"])
        for left in path.parent.glob(".*.part"):
            left.unlink()
        assert list(path.parent.iterdir()) == [path]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    # open, 3 writes, fsync, close, replace | open, fsync, close of the folder, and the whole run
    assert seen == ["old"] * 7 + ["new"] * 4


def test_order_of_calls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on the disk before the name is, and the name before `save` returns."""
    for name in CALLS:
        monkeypatch.setattr(os, name, getattr(os, name))  # to be put back
    made = die_at(-1, half=False)
    write_file(path, {}, {"a": torch.zeros(1)})
    expected = ["open", "write", "write", "write", "fsync", "close", "replace"]
    assert made == [*expected, "open", "fsync", "close"]


def test_killed_at_any_time(path: Path) -> None:
    """A process that saves all the time is killed at random moments."""
    pick = random.Random(0)
    write_file(path, {"n": 0}, {"a": torch.zeros(1)})

    def save_for_ever() -> None:
        for number in range(1, 10**6):
            write_file(path, {"n": number}, {"a": torch.full((20_000,), float(number))})

    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever()
            finally:
                os._exit(1)
        time.sleep(pick.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        header, tensors = read_file(path)
        assert tensors["a"].unique().tolist() == [header["n"]]
