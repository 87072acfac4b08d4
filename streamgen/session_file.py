"""A walk in one file: `session.save("walk.sgs")`, `world.load_session("walk.sgs")`.

What is state is in it: the K/V blocks as the pool stores them, the decoder's state, the generator,
clean latents and actions of the window, the prompt and the keys in force, what was asked and not
yet applied, the track, and the counters. What `rewind` could go back to is not: with eight seconds
of it the file would be many times as large. A resumed session begins with nothing remembered.

What is not state is not in it either: the weights. The file names them by a digest, with the
world's settings and the geometry of the cache, and only a world that has the same ones takes it.
There, on the same kind of machine and with the same libraries, the session goes on bitwise as if it
had never stopped: where a block lies in its lane follows from its ordinal alone.

Format 1, three parts:

    streamgen-session 1 <blake2b-256, hex, of all that follows the line>\\n
    <one JSON object: world, counters, texts, track>\\n
    <safetensors: blocks, rng, latents, actions, decoder ..., image>

Nothing in it is ever executed. The digest finds damage; it is no signature and says nothing about
who made the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from streamgen.cache import Block, BlockTable, Snapshot
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest, SessionFileError, StreamgenError
from streamgen.frames import Event, Timing
from streamgen.session import Session, _Ahead, _Asked, _State, _Track

FORMAT = 1
_MAGIC = b"streamgen-session"
_LONGEST_LINE = 128  # bytes in which the first line of a session file ends


def save(session: Session, path: str | Path) -> None:
    """Write a session's state; see `Session.save`."""
    tensors: dict[str, Tensor] = {}
    state = session._state
    session._model = session._model or digest_of_weights(session.engine)
    with session._queue_lock:
        asked = [
            [ask.id, ask.kind, sorted(ask.value) if ask.kind == "act" else ask.value, ask.at]
            for ask in session._queue
        ]
        pressed, receipts = sorted(session._pressed), session._receipts
    header = {
        "made in": identity(session.engine, session._model),
        "seed": session.seed,
        "history_seconds": session._history_seconds,
        "frame": state.frame,
        "chunk": state.chunk,
        "text": state.text,
        "keys": sorted(state.keys),
        "track": [event.to_json() for event in session.track],
        "asked": asked,
        "pressed": pressed,
        "receipts": receipts,
        "decoder": _flatten(state.decoder, tensors),
        "ahead": [
            {
                "index": chunk.index,
                "first_frame": chunk.first_frame,
                "applied": [event.to_json() for event in chunk.applied],
                "latents": _flatten(chunk.latents, tensors),
            }
            for chunk in state.ahead
        ],
        "end": session._table.end,
        "ordinals": [ordinal for ordinal, _ in session._table.entries],
    }
    tensors["rng"] = state.rng
    if state.latents:
        tensors["latents"], tensors["actions"] = map(torch.stack, (state.latents, state.actions))
    if session._image is not None:
        tensors["image"] = session._image
    if header["ordinals"]:
        tensors["blocks"] = _read_blocks(session._table)
    write_file(path, header, tensors)


def load(engine: Engine, path: str | Path, history_seconds: float | None = None) -> Session:
    """A session of `engine` that goes on where the saved one stood.

    Args:
        engine: of the same weights, settings and cache as the one that it was saved from.
        path: of the file.
        history_seconds: how far back `rewind` will be able to go; None = as far as before.

    Raises:
        SessionFileError: the file can't be read, or is damaged.
        InvalidRequest: it is no session file, has another format, or is of another world.
        PoolFull: there is no room for its K/V. In every case nothing has changed.
    """
    header, tensors = read_file(path)
    try:
        model = digest_of_weights(engine)
        _expect_same(path, header["made in"], identity(engine, model))
        seconds = header["history_seconds"] if history_seconds is None else history_seconds
        state = _state_of(engine, header, tensors)
        session = Session(engine, state.text, header["seed"], history_seconds=seconds)
        try:
            _fill(session, state, header, tensors)
        except BaseException:
            session.close()
            raise
        session._model = model
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # of a forged header
        if isinstance(error, StreamgenError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return session


def _state_of(engine: Engine, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _State:
    config, device = engine.config, engine.device
    keys = frozenset(header["keys"])
    config.action(keys)
    shape = (engine.dit.config.in_channels, *config.latent_hw)
    latents = actions = torch.empty(0)
    if "latents" in tensors:
        latents, actions = tensors["latents"], tensors["actions"]
        _expect_shape(latents, (len(latents), *shape))
        _expect_shape(actions, (len(latents), engine.dit.config.action_dim))
    _expect_shape(tensors["rng"], torch.Generator().get_state().shape)
    track = None
    for event in header["track"]:
        track = _Track((Event(**event),), track)
    return _State(
        text=header["text"],
        prompt=engine.prompt(header["text"]),
        keys=keys,
        rng=tensors["rng"],
        frame=header["frame"],
        chunk=header["chunk"],
        decoder=_unflatten(header["decoder"], tensors, engine.codec_device),
        latents=latents.to(device).unbind(),
        actions=actions.unbind(),
        track=track,
        ahead=tuple(
            _Ahead(
                chunk["index"],
                chunk["first_frame"],
                _unflatten(chunk["latents"], tensors, device),
                tuple(Event(**event) for event in chunk["applied"]),
                Timing(),
            )
            for chunk in header["ahead"]
        ),
    )


def _fill(
    session: Session, state: _State, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Give a new session its past; what can fail for want of room comes last."""
    engine = session.engine
    for id, kind, value, at in header["asked"]:
        asked = frozenset(value) if kind == "act" else tuple(value)
        session._queue.append(_Asked(id, kind, asked, at))
    session._pressed, session._receipts = set(header["pressed"]), header["receipts"]
    if "image" in tensors:
        shape = (engine.dit.config.in_channels, *engine.config.latent_hw)
        session._image = _expect_shape(tensors["image"], shape).to(engine.device)
    session._set(state)
    ordinals = header["ordinals"]
    if ordinals:
        _write_blocks(session._table, ordinals, header["end"], tensors["blocks"])


def _expect_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape != shape:
        raise ValueError(f"a tensor is {tuple(tensor.shape)} instead of {tuple(shape)}")
    return tensor


# The world that a file belongs to


def digest_of_weights(engine: Engine) -> str:
    """Names the weights of an engine as they are loaded: blake2b-256 of every tensor of it."""
    digest = hashlib.blake2b(engine.text.identity.encode(), digest_size=32)
    for part in (engine.dit, engine.codec):
        for name, tensor in part.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def identity(engine: Engine, model: str) -> dict[str, Any]:
    """What must be the same where a file is made and where it is loaded, as plain JSON values.

    Args:
        engine: of the session.
        model: its `digest_of_weights`.
    """
    world = asdict(engine.config)
    del world["suggestions"]  # what is offered to a user shapes no frame
    sections = {
        "world": world,
        "transformer": asdict(engine.dit.config),
        "cache": asdict(engine.pool.spec) | {"block bytes": engine.pool.payload_bytes},
        "model": {"weights": model},
    }
    plain: dict[str, Any] = json.loads(json.dumps(sections, default=str))
    return plain


def _expect_same(path: str | Path, theirs: Any, ours: Any) -> None:
    found = _difference(theirs, ours)
    if found:
        raise InvalidRequest(
            f"{path}: the session was made in another world:{found}; accepted are sessions of the "
            "same model, loaded with the same settings"
        )


def _difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first thing that differs, by its path, with both values."""
    if there == here:
        return None
    pairs: dict[Any, tuple[Any, Any]] = {}
    if isinstance(there, dict) and isinstance(here, dict):
        pairs = {key: (there.get(key), here.get(key)) for key in here | there}
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = dict(enumerate(zip(there, here, strict=True)))
    for key, pair in pairs.items():
        if found := _difference(*pair, f"{name} {key}"):
            return found
    return f"{name} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = str(value)
    if isinstance(value, list) and len(text) > 24:
        return f"a list of {len(value)}"
    return text if len(text) <= 24 else text[:16] + "..."


# Blocks


def _read_blocks(table: BlockTable) -> Tensor:
    """The bytes of every frame that the table holds, uint8 `[frames, payload bytes]`."""
    pool = table.pool
    payload = torch.empty((len(table.entries), pool.payload_bytes), dtype=torch.uint8)
    with pool.lock:
        for row, (_, block) in zip(payload, table.entries, strict=True):
            out = row.numpy().data
            block.away.read(out) if block.away else pool.read(block, out)
    return payload


class _Payload:
    """A block's bytes in memory: to the pool, one that is on its way back (`Away`)."""

    def __init__(self, row: Tensor) -> None:
        self._row = row

    def read(self, out: memoryview) -> None:
        """Copy the bytes."""
        out[:] = self._row.numpy().data

    def forget(self) -> None:
        """Nothing to do: the file's tensors go with the load."""


def _write_blocks(table: BlockTable, ordinals: Sequence[int], end: int, rows: Tensor) -> None:
    """Make the table hold these frames, each at its place in a lane of its own.

    Raises:
        PoolFull: there is no room; nothing has changed.
    """
    pool, policy = table.pool, table.policy
    _expect_shape(rows.view(torch.uint8), (len(ordinals), pool.payload_bytes))
    if list(ordinals) != sorted(set(ordinals) & set(policy.visible(end))):
        raise ValueError(f"frames {list(ordinals)} are not those of a table that ends at {end}")
    with pool.lock:
        outside = [ordinal for ordinal in ordinals if ordinal < policy.shadow]
        table.reserve()
        lane = table.lane
        assert lane is not None
        slots = dict(zip(outside, pool.spare(len(outside)), strict=True))
        blocks: dict[int, Block] = {}
        try:
            for ordinal, row in zip(ordinals, rows, strict=True):
                blocks[ordinal] = block = Block(-1, sealed=True)
                block.away = _Payload(row)
                pool.load(block, slots.get(ordinal, lane.base + policy.place(ordinal)))
            moment = Snapshot(pool, policy, blocks, end)
            table.rewind(moment)
            moment.release()
        finally:
            for block in blocks.values():
                pool.release(block)  # the table alone holds them, or nobody


# Nested values with tensors in them


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A decoder's state as plain JSON values; its tensors go to `tensors`, contiguous.

    Raises:
        InvalidRequest: it holds something else than tensors, lists, tuples, dicts and plain values.
    """
    if isinstance(value, Tensor):
        name = f"decoder {len(tensors)}"
        tensors[name] = value.clone(memory_format=torch.contiguous_format)  # may be a shared view
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(x, tensors) for x in value]}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {"dict": [[key, _flatten(x, tensors)] for key, x in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise InvalidRequest(
        f"the decoder's state holds a {type(value).__name__}: accepted are tensors, numbers, "
        "texts, None, and lists, tuples and dicts (by text or number) of these"
    )


def _unflatten(tree: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value].to(device)
    if kind == "dict":
        return {key: _unflatten(x, tensors, device) for key, x in value}
    if kind in ("list", "tuple"):
        make: Callable[[Any], Any] = list if kind == "list" else tuple
        return make(_unflatten(x, tensors, device) for x in value)
    return value


# The file


def write_file(path: str | Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a session file; it appears at `path` whole or not at all.

    Raises:
        InvalidRequest: there is no such folder, or `path` is one.
        SessionFileError: the disk refuses.
    """
    target = Path(os.path.realpath(path))  # a link goes on pointing to the file
    if target.is_dir() or not target.parent.is_dir():
        raise InvalidRequest(f"{path}: accepted is the name of a file in a folder that exists")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = safetensors.torch.save(plain)
    text = json.dumps(header).encode() + b"\n"
    digest = hashlib.blake2b(digest_size=32)
    digest.update(text)
    digest.update(body)
    line = b"%s %d %s\n" % (_MAGIC, FORMAT, digest.hexdigest().encode())
    try:
        _replace(target, (line, text, body))
    except OSError as error:
        raise SessionFileError(f"{path}: can't be written ({error.strerror or error})") from error


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a session file that is whole.

    Raises:
        InvalidRequest: it is no session file, or has another format.
        SessionFileError: it can't be read, or is damaged.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SessionFileError(f"{path}: can't be read ({error.strerror or error})") from error
    line, _, _ = data[:_LONGEST_LINE].partition(b"\n")
    magic, *words = line.split(b" ")
    if magic != _MAGIC or len(words) != 2:
        raise InvalidRequest(
            f"{path}: no session file ({len(data):,} bytes); accepted are files that "
            "Session.save wrote"
        )
    if words[0] != b"%d" % FORMAT:
        raise InvalidRequest(
            f"{path}: written in format {words[0].decode(errors='replace')}; accepted is format "
            f"{FORMAT}"
        )
    sealed = memoryview(data)[len(line) + 1 :]
    if hashlib.blake2b(sealed, digest_size=32).hexdigest().encode() != words[1]:
        raise _damaged(path, f"its digest is not that of its {len(data):,} bytes")
    try:
        end = data.index(b"\n", len(line) + 1)
        return json.loads(data[len(line) + 1 : end]), safetensors.torch.load(data[end + 1 :])
    except (ValueError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str | Path, why: str) -> SessionFileError:
    why = " ".join(why.split())
    return SessionFileError(f"{path}: damaged or cut short ({why}); no session was made of it")


def _replace(target: Path, parts: Sequence[bytes]) -> None:
    """Put a file in place of another: on the disk as a whole before it takes the name.

    A process that dies on the way leaves the old file and at most a hidden `.part` beside it.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        try:
            for piece in parts:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder can't be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
