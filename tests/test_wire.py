"""The protocol: messages, the 32-byte header, the gate, the media clock and the credit window."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamgen import wire
from streamgen.errors import InvalidRequest


def say(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def make_gate(**limits: Any) -> wire.Gate:
    return wire.Gate("secret", 0.0, wire.Limits(**limits))


def open_gate(**limits: Any) -> wire.Gate:
    gate = make_gate(**limits)
    assert isinstance(gate.receive(say("hello", version=1, token="secret"), 0.0), wire.Hello)
    assert isinstance(gate.receive(say("start", prompt="a maze"), 0.0), wire.Start)
    return gate


def make_frames(*numbers: int, due: float = 0.0) -> list[wire.Frame]:
    header = wire.Header(wire.Codec.JPEG, wire.Flag.KEY, 0, 0, 0, 0, 1.0, 8, 8)
    return [wire.Frame(header._replace(frame=number), b"", due) for number in numbers]


# -- messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", 'a message is a JSON object with a "type"'),
        ("{}", 'a message is a JSON object with a "type"'),
        (say("jump"), "unknown message type 'jump'; accepted: hello, start, action"),
        (say("action", seq=1, keys="w"), "action.keys: Input should be a valid array"),
        (say("action", keys=["w"]), "action.seq: Field required"),
        (say("action", seq=0), "action.seq: Input should be greater than or equal to 1"),
        (say("pause", now=True), "pause.now: Extra inputs are not permitted"),
        (say("rewind"), "rewind: give exactly one of seconds, frames, to_frame"),
        (say("rewind", frames=2, seconds=1), "rewind: give exactly one of"),
    ],
)
def test_bad_message_is_one_line(text: str, complaint: str) -> None:
    """A message that can't be read is refused in one line that names the place and the rule."""
    with pytest.raises(InvalidRequest) as caught:
        wire.read_client(text)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_survive_the_wire() -> None:
    """What one side writes, the other reads back equal, optional fields left out included."""
    for message in (wire.Pause(), wire.Start(prompt="snow", seed=3), wire.Rewind(seconds=2)):
        assert wire.read_client(message.to_json()) == message
    ack = wire.Ack(of="prompt", id=1, applies_at_frame=312)
    assert wire.read_server(ack.to_json()) == ack


# -- header -----------------------------------------------------------------------------------


def test_header_layout() -> None:
    """The header's fields lie at the offsets that the protocol states, little-endian."""
    flags = wire.Flag.KEY | wire.Flag.CHUNK_END
    data = wire.Header(wire.Codec.PNG, flags, 3, 312, 77, 123_456_789_012, 1.5, 128, 96).pack()
    assert len(data) == wire.HEADER_BYTES == 32
    assert struct.unpack_from("<H", data, 0) == (0x4753,)
    assert (data[2], data[3]) == (1, 6)
    assert struct.unpack_from("<HH", data, 4) == (5, 3)
    assert struct.unpack_from("<II", data, 8) == (312, 77)
    assert struct.unpack_from("<Q", data, 16) == (123_456_789_012,)
    assert struct.unpack_from("<f", data, 24) == (1.5,)
    assert struct.unpack_from("<HH", data, 28) == (128, 96)


@given(
    st.tuples(
        st.sampled_from(list(wire.Codec)),
        *(st.integers(0, 2**bits - 1) for bits in (16, 16, 32, 32, 64)),
        st.floats(width=32, allow_nan=False),
        *(st.integers(0, 2**16 - 1) for _ in range(2)),
    ),
    st.binary(max_size=64),
)
def test_header_round_trip(fields: tuple[Any, ...], payload: bytes) -> None:
    """Any header and payload come back as they were."""
    header = wire.Header(*fields)
    assert wire.read_frame(header.pack() + payload) == (header, payload)


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 40])
def test_not_a_frame(data: bytes) -> None:
    """Bytes that are no frame are refused."""
    with pytest.raises(InvalidRequest):
        wire.read_frame(data)


# -- gate -------------------------------------------------------------------------------------


def test_hello_comes_first() -> None:
    """Anything before hello is refused and ends the connection."""
    refusal = make_gate().receive(say("start"), 0.0)
    assert isinstance(refusal, wire.Refusal)
    assert refusal.close is wire.Close.BAD_MESSAGE
    assert refusal.error.message == "the first message is hello"


@pytest.mark.parametrize(
    ("fields", "close"),
    [
        ({"version": 1, "token": "guess"}, wire.Close.UNAUTHORIZED),
        ({"version": 1}, wire.Close.UNAUTHORIZED),
        ({"version": 2, "token": "secret"}, wire.Close.WRONG_VERSION),
    ],
)
def test_hello_is_checked(fields: dict[str, Any], close: wire.Close) -> None:
    """A wrong token and another version each have their own close code."""
    refusal = make_gate().receive(say("hello", **fields), 0.0)
    assert isinstance(refusal, wire.Refusal)
    assert refusal.close is close


def test_no_token_asked() -> None:
    """A server without a token lets everyone in."""
    gate = wire.Gate(None, 0.0)
    assert isinstance(gate.receive(say("hello", version=1), 0.0), wire.Hello)


def test_order_after_hello() -> None:
    """Walking comes after start, and start comes once; neither mistake ends the connection."""
    gate = make_gate()
    gate.receive(say("hello", version=1, token="secret"), 0.0)
    early = gate.receive(say("action", seq=1), 0.0)
    assert isinstance(early, wire.Refusal)
    assert (early.error.message, early.close) == ("action comes after start", None)
    gate.receive(say("start"), 0.0)
    for kind, fields in (("start", {}), ("hello", {"version": 1, "token": "secret"})):
        again = gate.receive(say(kind, **fields), 0.0)
        assert isinstance(again, wire.Refusal)
        assert again.error.code == "out_of_order"


def test_seq_rises() -> None:
    """An action whose seq does not rise is refused."""
    gate = open_gate()
    assert isinstance(gate.receive(say("action", seq=5), 0.0), wire.Action)
    refusal = gate.receive(say("action", seq=5), 0.0)
    assert isinstance(refusal, wire.Refusal)
    assert refusal.error.code == "bad_seq"


def test_too_many_bad_messages() -> None:
    """One bad message is answered; the eighth ends the connection."""
    gate = open_gate(bad_messages=8)
    closes = []
    for _ in range(8):
        refusal = gate.receive("{", 0.0)
        assert isinstance(refusal, wire.Refusal)
        closes.append(refusal.close)
    assert closes == [None] * 7 + [wire.Close.BAD_MESSAGE]


def test_sizes_are_limited() -> None:
    """Long messages, long prompts and binary messages are refused, each with its own words."""
    gate = open_gate(message_chars=200, prompt_chars=20)
    for text, code in (
        (say("prompt", text="x" * 300), "too_large"),
        (say("prompt", text="x" * 21), "too_long"),
        (b"\x00\x01", "bad_message"),
    ):
        refusal = gate.receive(text, 0.0)
        assert isinstance(refusal, wire.Refusal)
        assert refusal.error.code == code


def test_rate_limit() -> None:
    """Beyond the rate one error is sent, then silence; time heals it; a flood ends it."""
    gate = open_gate(messages_per_second=10)
    seqs = iter(range(1, 1000))
    answers = [gate.receive(say("action", seq=next(seqs)), 0.0) for _ in range(12)]
    assert isinstance(answers[7], wire.Action)
    assert isinstance(answers[8], wire.Refusal)
    assert answers[8].error.code == "rate_limited"
    assert answers[9] is None
    assert isinstance(gate.receive(say("action", seq=next(seqs)), 1.0), wire.Action)
    flood = [gate.receive(say("action", seq=next(seqs)), 1.0) for _ in range(60)]
    last = next(a for a in flood if isinstance(a, wire.Refusal) and a.close)
    assert last.close is wire.Close.TOO_MANY_MESSAGES


def test_deadlines() -> None:
    """Hello and start are waited for, each for its own time; a live connection has no deadline."""
    gate = make_gate(hello_timeout=10, start_timeout=60)
    assert gate.deadline == 10
    gate.receive(say("hello", version=1, token="secret"), 1.0)
    assert gate.deadline == 60
    assert gate.late().close is wire.Close.TIMEOUT
    gate.receive(say("start"), 2.0)
    assert gate.deadline is None


# -- pacer ------------------------------------------------------------------------------------


def test_frames_are_due_at_media_time() -> None:
    """Frames of a fast model are due one frame time apart, without gaps between chunks."""
    pacer = wire.Pacer(fps=20, now=0.0)
    first = pacer.schedule(2, 0.01, took=0.01)
    second = pacer.schedule(2, 0.06, took=0.01)
    assert first + second == pytest.approx([0.01, 0.06, 0.11, 0.16])


def test_at_most_one_chunk_ahead() -> None:
    """A chunk never begins before the chunk before it is on the screen."""
    pacer = wire.Pacer(fps=20, now=0.0)
    due = pacer.schedule(2, 0.0, took=10.0)  # a model so slow that every lead would be too short
    assert pacer.start_at >= due[0]


def test_a_fast_model_waits_to_hear_more_keys() -> None:
    """When chunks are quick to make, the next begins late: just before it is due."""
    pacer = wire.Pacer(fps=20, now=0.0)
    for now in (0.0, 0.09, 0.19):
        pacer.schedule(2, now, took=0.02)
    assert 0.3 - 0.04 < pacer.start_at < 0.3 - 0.02


def test_slow_chunks_are_spread() -> None:
    """When a chunk of 2 takes 160 ms, its frames are 80 ms apart: no burst, then nothing."""
    pacer = wire.Pacer(fps=20, now=0.0)
    dues = pacer.schedule(2, 0.16, took=0.16)
    assert dues == pytest.approx([0.16, 0.24])


def test_no_burst_after_a_stall() -> None:
    """A chunk that is late is due at once, and the clock goes on from there."""
    pacer = wire.Pacer(fps=20, now=0.0)
    pacer.schedule(2, 0.0, took=0.01)
    assert pacer.schedule(2, 5.0, took=0.01)[0] == 5.0
    assert pacer.schedule(2, 5.01, took=0.01)[0] == pytest.approx(5.1)


# -- playout ----------------------------------------------------------------------------------


def test_nothing_goes_out_before_it_is_due() -> None:
    """A frame waits until its time."""
    playout = wire.Playout()
    playout.post(make_frames(0, due=1.0))
    assert playout.take_due(0.9) == []
    assert playout.take() is None
    assert playout.next_due == 1.0
    playout.take_due(1.0)
    assert playout.take() is not None


def test_credit_window_keeps_the_newest() -> None:
    """With no credit left, a frame that falls due replaces the one that waits."""
    playout = wire.Playout(credit=2)
    for number in range(5):
        playout.post(make_frames(number))
        playout.take_due(0.0)
        playout.take()
    assert (playout.in_flight, playout.dropped, playout.blocked) == (2, 2, True)
    playout.ack(0, 0.0)
    frame = playout.take()
    assert frame is not None
    assert frame.header.frame == 4


def test_a_late_loop_drops_nothing() -> None:
    """Frames that fell due together all go out, in order, while there is credit for them."""
    playout, sent = wire.Playout(credit=2), []
    playout.post(make_frames(0, 1, 2, 3))
    for _ in range(3):
        playout.take_due(9.0)
        if frame := playout.take():
            sent.append(frame.header.frame)
    assert (sent, playout.dropped) == ([0, 1], 1)  # 3 has replaced 2 and waits for credit


def test_ack_returns_the_credit_of_earlier_frames() -> None:
    """An ack covers the frames sent before it, because a page draws only the newest."""
    playout = wire.Playout(credit=2)
    for number in (0, 1):
        playout.post(make_frames(number))
        playout.take_due(0.0)
        playout.take()
    assert playout.in_flight == 2
    playout.ack(1, 0.0)
    assert (playout.in_flight, playout.shown) == (0, 1)


def test_cut_voids_what_is_under_way() -> None:
    """After a jump nothing old is sent, all credit is back, and the next frame says so."""
    playout = wire.Playout(credit=1)
    playout.post(make_frames(10, 11))
    playout.take_due(0.0)
    playout.take()
    playout.freeze()
    assert (playout.take_due(9.0), playout.take(), playout.next_due) == ([], None, None)
    playout.cut(shown=4)
    playout.post(make_frames(5, 6))
    playout.ack(10, 0.0)  # of before the jump: means nothing now
    assert playout.shown == 4
    playout.take_due(0.0)
    frame = playout.take()
    assert frame is not None
    assert frame.header.flags & wire.Flag.DISCONTINUITY


@given(
    credit=st.integers(1, 8),
    acts=st.lists(st.sampled_from(["post", "send", "ack"]), max_size=200),
)
def test_playout_never_goes_back(credit: int, acts: list[str]) -> None:
    """Whatever the order of frames, sends and acks: at most `credit` fly, and numbers rise."""
    playout, made, sent, acked = wire.Playout(credit=credit), 0, [], 0
    for act in acts:
        if act == "post":
            playout.post(make_frames(made))
            made += 1
        elif act == "send":
            playout.take_due(0.0)
            frame = playout.take()
            if frame is not None:
                sent.append(frame.header.frame)
        elif acked < len(sent):
            playout.ack(sent[acked], 0.0)
            acked += 1
        assert playout.in_flight == len(sent) - acked <= credit
    assert sent == sorted(set(sent))
    assert playout.sent == len(sent)
    assert len(sent) + playout.dropped <= made
