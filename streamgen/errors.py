"""One tree of errors: a caller's mistake is one of these, in one sentence.

StreamgenError
├── InvalidRequest    a value the caller passed is not accepted (also a ValueError)
├── UnknownModel      no packaged model, folder or hub id of that name
├── WeightsError      files are missing, damaged or of another shape
├── PoolFull          the KV pool has no free blocks left
├── TierError         bytes that left the pool can't be had, or can't be stored
├── SessionFileError  a saved session is unreadable, damaged or could not be written
├── SessionClosed     a session was used after close()
├── MissingExtra      an optional package is not installed
└── PortInUse         the server's port is taken
"""


class StreamgenError(Exception):
    """Base of every error that streamgen raises for its caller."""


class InvalidRequest(StreamgenError, ValueError):
    """A value is not accepted; the message names the value and what is accepted."""


class UnknownModel(StreamgenError):
    """No model of that name; the message lists the packaged ones."""


class WeightsError(StreamgenError):
    """Weights are missing, truncated, damaged or do not fit their config."""


class PoolFull(StreamgenError):
    """The KV pool has no free blocks; the message says who holds them. Every table is unchanged."""


class TierError(StreamgenError):
    """A storage tier lost, refused or can't hold bytes; the message says which tier and why."""


class SessionFileError(StreamgenError):
    """A session file can't be read or written, or is damaged; no session was made of it."""


class SessionClosed(StreamgenError):
    """The session was closed and can't be used any more."""


class MissingExtra(StreamgenError):
    """An optional package is needed; the message says which extra installs it."""


class PortInUse(StreamgenError):
    """The address to serve on is taken; the message says how to choose another."""
