"""The frame-stream protocol `streamgen.v1`: what goes over the wire and when, without a socket.

Control is JSON text (`messages`), media is a 32-byte header and one encoded frame (`header`).
Three small machines hold every rule, so that a test needs no port and no sleep:

    Gate      what a client may say, and when: order, token, rate, limits      (`gate`)
    Pacer     when to make the next chunk, and when each of its frames is due  (`flow`)
    Playout   which frame goes out next: a credit window, the newest wins      (`flow`)

What happens when the reader is slow: at most `credit` frames are under way. A frame that falls due
while none may be sent waits in one slot, and the next one replaces it there. So a slow reader
sees fewer frames, never older ones, and memory stays bounded.
"""

from streamgen.wire.flow import Frame, Pacer, Playout
from streamgen.wire.gate import Gate, Refusal
from streamgen.wire.header import HEADER_BYTES, Codec, Flag, Header, read_frame
from streamgen.wire.messages import (
    PATH,
    PROTOCOL,
    VERSION,
    Accept,
    Ack,
    Action,
    Branch,
    Branches,
    Bye,
    ClientMessage,
    Close,
    Error,
    Fork,
    FrameAck,
    Hello,
    Limits,
    Pause,
    Prompt,
    Record,
    Recording,
    Reset,
    Resume,
    Rewind,
    ServerMessage,
    Start,
    Started,
    Stats,
    StatsRequest,
    Switch,
    Warn,
    Welcome,
    WorldInfo,
    read_client,
    read_server,
)

__all__ = [
    "HEADER_BYTES",
    "PATH",
    "PROTOCOL",
    "VERSION",
    "Accept",
    "Ack",
    "Action",
    "Branch",
    "Branches",
    "Bye",
    "ClientMessage",
    "Close",
    "Codec",
    "Error",
    "Flag",
    "Fork",
    "Frame",
    "FrameAck",
    "Gate",
    "Header",
    "Hello",
    "Limits",
    "Pacer",
    "Pause",
    "Playout",
    "Prompt",
    "Record",
    "Recording",
    "Refusal",
    "Reset",
    "Resume",
    "Rewind",
    "ServerMessage",
    "Start",
    "Started",
    "Stats",
    "StatsRequest",
    "Switch",
    "Warn",
    "Welcome",
    "WorldInfo",
    "read_client",
    "read_frame",
    "read_server",
]
