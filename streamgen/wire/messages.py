"""The messages of `streamgen.v1`: JSON text, one object each, told apart by `type`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from streamgen.errors import InvalidRequest

PROTOCOL = "streamgen.v1"
VERSION = 1
PATH = "/v1/stream"


class Close(IntEnum):
    """Close codes of the websocket: HTTP's numbers plus 4000, and two of RFC 6455."""

    NORMAL = 1000
    INTERNAL = 1011
    BAD_MESSAGE = 4400
    UNAUTHORIZED = 4401
    FORBIDDEN_ORIGIN = 4403
    TIMEOUT = 4408
    WRONG_VERSION = 4409
    TOO_MANY_MESSAGES = 4429
    FULL = 4503


@dataclass(frozen=True)
class Limits:
    """What one connection may ask for. Times in seconds, sizes in characters or bytes."""

    hello_timeout: float = 10.0
    start_timeout: float = 60.0
    message_chars: int = 64 * 1024
    messages_per_second: int = 200
    bad_messages: int = 8
    prompt_chars: int = 4000
    image_bytes: int = 8 * 1024 * 1024
    branches: int = 8
    recording_seconds: float = 600.0
    stall_seconds: float = 5.0


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_json(self) -> str:
        """The message as one line of JSON, as it goes over the wire."""
        return self.model_dump_json(exclude_none=True)


class Accept(_Message):
    """What a client can show: codecs in its order of preference (`jpeg`, `png`, `rgb24`)."""

    codecs: list[str] = ["jpeg"]


class Hello(_Message):
    """First message of a client. `credit`: frames that may be under way at once."""

    type: Literal["hello"] = "hello"
    version: int
    client: str = Field(default="", max_length=200)
    token: str | None = Field(default=None, max_length=200)
    accept: Accept = Accept()
    credit: int = Field(default=2, ge=1, le=8)


class Start(_Message):
    """Begin a world. `image` is the `ref` that `POST /v1/images` gave; no seed means any seed."""

    type: Literal["start"] = "start"
    prompt: str = ""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    image: str | None = Field(default=None, max_length=100)


class Action(_Message):
    """The keys that are held from now on (level-triggered). `seq` must rise."""

    type: Literal["action"] = "action"
    seq: int = Field(ge=1, lt=2**32)
    keys: list[str] = Field(default=[], max_length=16)


class Prompt(_Message):
    """Another text for the running world; the answer says at which frame it applies."""

    type: Literal["prompt"] = "prompt"
    id: int = Field(default=0, ge=0, lt=2**53)
    text: str
    recache: Literal["last_chunk", "window_causal", "window_bidirectional", "off"] | None = None


class Reset(_Message):
    """A new walk. What is left out stays as it is; every branch of the old walk ends."""

    type: Literal["reset"] = "reset"
    prompt: str | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    image: str | None = Field(default=None, max_length=100)


class Pause(_Message):
    """Stop at the frame that is on the screen (`frame`; without it, the last acknowledged)."""

    type: Literal["pause"] = "pause"
    frame: int | None = Field(default=None, ge=0)


class Resume(_Message):
    """Go on after a pause."""

    type: Literal["resume"] = "resume"


class Rewind(_Message):
    """Go back by `seconds` or `frames` from the frame shown, or to `to_frame`: one of them."""

    type: Literal["rewind"] = "rewind"
    seconds: float | None = Field(default=None, gt=0, le=3600)
    frames: int | None = Field(default=None, gt=0)
    to_frame: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if sum(x is not None for x in (self.seconds, self.frames, self.to_frame)) != 1:
            raise ValueError("give exactly one of seconds, frames, to_frame")
        return self


class Fork(_Message):
    """Branch here: the walk so far is kept and can be switched back to."""

    type: Literal["fork"] = "fork"
    name: str | None = Field(default=None, max_length=40)


class Switch(_Message):
    """Go on in another branch."""

    type: Literal["switch"] = "switch"
    branch: int = Field(ge=0)


class Record(_Message):
    """Start or finish a recording."""

    type: Literal["record"] = "record"
    on: bool


class FrameAck(_Message):
    """`frame` is on the screen: returns the credit of it and of every frame sent before it."""

    type: Literal["ack"] = "ack"
    frame: int = Field(ge=0)


class StatsRequest(_Message):
    """Send statistics so many times a second (0: never)."""

    type: Literal["stats"] = "stats"
    hz: float = Field(default=1.0, ge=0, le=10)


class Bye(_Message):
    """Either side leaves."""

    type: Literal["bye"] = "bye"
    reason: str = Field(default="", max_length=200)


ClientMessage = (
    Hello
    | Start
    | Action
    | Prompt
    | Reset
    | Pause
    | Resume
    | Rewind
    | Fork
    | Switch
    | Record
    | FrameAck
    | StatsRequest
    | Bye
)


class WorldInfo(_Message):
    """What a page needs to know of a model before it starts."""

    name: str
    width: int
    height: int
    fps: float
    chunk_frames: int
    keys: list[str]
    suggestions: list[str]
    vocabulary: list[str]
    max_words: int | None = None


class Welcome(_Message):
    """The server's hello."""

    type: Literal["hello"] = "hello"
    version: int = VERSION
    server: str = ""
    session: str
    world: WorldInfo
    codecs: list[str]
    rewind_seconds: float
    max_sessions: int
    max_branches: int
    prompt_chars: int


class Started(_Message):
    """A walk began: frames of this size follow, the first is number `frame`."""

    type: Literal["started"] = "started"
    width: int
    height: int
    fps: float
    codec: str
    chunk_frames: int
    branch: int
    frame: int
    prompt: str
    seed: int


class Ack(_Message):
    """A request was accepted. `applies_at_frame` is the first frame that contains it.

    After pause, rewind and switch it is the next frame to be made, `shown` the one to look at
    until then, and `prompt` the text in force there.
    """

    type: Literal["ack"] = "ack"
    of: str
    id: int | None = None
    applies_at_frame: int
    shown: int | None = None
    prompt: str | None = None


class Branch(_Message):
    """A kept line of the walk: `from_frame` is where it left `parent`, `frame` where it stands."""

    id: int
    parent: int | None = None
    name: str
    from_frame: int
    frame: int
    prompt: str


class Branches(_Message):
    """The live branch and all that are kept."""

    type: Literal["branch"] = "branch"
    id: int
    branches: list[Branch]


class Recording(_Message):
    """A recording began (`on`) or is ready at `url`, its track of events at `track`."""

    type: Literal["recording"] = "recording"
    id: str
    on: bool
    frames: int = 0
    seconds: float = 0.0
    url: str | None = None
    track: str | None = None


class Stats(_Message):
    """How it goes. Times in milliseconds; `gen` per chunk, `input_to_frame` from action to ack."""

    type: Literal["stats"] = "stats"
    frame: int
    fps: float
    gen_p50_ms: float
    gen_p95_ms: float
    encode_ms: float
    input_to_frame_ms: float | None = None
    in_flight: int
    sent: int
    dropped: int
    paused: bool


class Warn(_Message):
    """Something was accepted, but not quite as asked."""

    type: Literal["warn"] = "warn"
    code: str
    message: str


class Error(_Message):
    """Something was refused. `ref` names the message type it answers."""

    type: Literal["error"] = "error"
    code: str
    message: str
    retryable: bool = False
    ref: str | None = None


ServerMessage = Welcome | Started | Ack | Branches | Recording | Stats | Warn | Error | Bye

_CLIENT: TypeAdapter[Any] = TypeAdapter(Annotated[ClientMessage, Field(discriminator="type")])
_SERVER: TypeAdapter[Any] = TypeAdapter(Annotated[ServerMessage, Field(discriminator="type")])


def read_client(text: str) -> ClientMessage:
    """One message of a client. Raises InvalidRequest with one line that says what is wrong."""
    return _read(_CLIENT, text)  # type: ignore[no-any-return]


def read_server(text: str) -> ServerMessage:
    """One message of a server. Raises InvalidRequest with one line that says what is wrong."""
    return _read(_SERVER, text)  # type: ignore[no-any-return]


def _read(adapter: TypeAdapter[Any], text: str) -> Any:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(_one_line(error)) from None


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        tags = context["expected_tags"].replace("'", "")
        return f"unknown message type {context['tag']!r}; accepted: {tags}"
    if first["type"] == "json_invalid":
        return f"not JSON: {first['ctx']['error']}"
    if not first["loc"]:
        return 'a message is a JSON object with a "type"'
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"
