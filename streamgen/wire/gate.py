"""The gate of a connection: what a client may say, and when. No socket, no clock of its own."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from streamgen.errors import InvalidRequest
from streamgen.wire.messages import (
    VERSION,
    Action,
    ClientMessage,
    Close,
    Error,
    Hello,
    Limits,
    Start,
    read_client,
)


@dataclass(frozen=True)
class Refusal:
    """A message that was not let through: the error to send, and the close code if this ends it."""

    error: Error
    close: Close | None = None


@dataclass
class Gate:
    """Lets a client's messages through in order, and answers every bad one with one clear error.

    Args:
        token: what `hello.token` must be; None lets everyone in.
        now: the moment the connection opened, in seconds on any steady clock.
    """

    token: str | None
    now: float
    limits: Limits = Limits()
    phase: Literal["hello", "start", "live"] = "hello"
    _seq: int = 0
    _bad: int = 0
    _tokens: float = field(init=False)
    _refill: float = field(init=False)
    _denied: int = 0

    _FREE: ClassVar[frozenset[str]] = frozenset({"bye", "stats", "ack"})

    def __post_init__(self) -> None:
        self._tokens, self._refill = float(self.limits.messages_per_second), self.now
        self._opened = self.now

    @property
    def deadline(self) -> float | None:
        """When the message that is waited for must have come; None while live."""
        if self.phase == "live":
            return None
        limits = self.limits
        wait = limits.hello_timeout if self.phase == "hello" else limits.start_timeout
        return self._opened + wait

    def late(self) -> Refusal:
        """What to say when the deadline has passed."""
        message = f"no {self.phase} message within the time allowed"
        return Refusal(Error(code="timeout", message=message, retryable=True), Close.TIMEOUT)

    def receive(self, text: str | bytes, now: float) -> ClientMessage | Refusal | None:
        """Let one message through, or refuse it; None means: drop it without a word."""
        if not self._spend(now):
            return self._too_many()
        if isinstance(text, bytes):
            return self._refuse("bad_message", "clients send JSON text, not binary messages")
        if len(text) > self.limits.message_chars:
            chars = self.limits.message_chars
            return self._refuse("too_large", f"a message has at most {chars} characters")
        try:
            message = read_client(text)
        except InvalidRequest as error:
            return self._refuse("bad_message", str(error))
        return self._check(message) or message

    def _spend(self, now: float) -> bool:
        rate = self.limits.messages_per_second
        self._tokens = min(rate, self._tokens + (now - self._refill) * rate)
        self._refill = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        if self._tokens > rate / 2:
            self._denied = 0
        return True

    def _too_many(self) -> Refusal | None:
        rate = self.limits.messages_per_second
        self._denied += 1
        error = Error(
            code="rate_limited", message=f"at most {rate} messages a second", retryable=True
        )
        if self._denied > 2 * rate:
            return Refusal(error, Close.TOO_MANY_MESSAGES)
        return Refusal(error) if self._denied == 1 else None

    def _refuse(self, code: str, message: str, ref: str | None = None) -> Refusal:
        self._bad += 1
        fatal = self.phase == "hello" or self._bad >= self.limits.bad_messages
        return Refusal(
            Error(code=code, message=message, ref=ref), Close.BAD_MESSAGE if fatal else None
        )

    def _check(self, message: ClientMessage) -> Refusal | None:
        if self.phase == "hello":
            return self._check_hello(message)
        kind = message.type
        if isinstance(message, Hello):
            return self._refuse("out_of_order", "hello was already said", kind)
        if self.phase == "start" and not isinstance(message, Start) and kind not in self._FREE:
            return self._refuse("out_of_order", f"{kind} comes after start", kind)
        if isinstance(message, Start):
            if self.phase == "live":
                return self._refuse("out_of_order", "already started; use reset", kind)
        if isinstance(message, Action):
            if message.seq <= self._seq:
                return self._refuse(
                    "bad_seq", f"seq {message.seq} does not rise above {self._seq}", kind
                )
            self._seq = message.seq
        if refusal := self._check_text(message):
            return refusal
        if isinstance(message, Start):
            self.phase = "live"
        return None

    def _check_hello(self, message: ClientMessage) -> Refusal | None:
        if not isinstance(message, Hello):
            return self._refuse("out_of_order", "the first message is hello", message.type)
        if message.version != VERSION:
            text = f"this server speaks version {VERSION}, not {message.version}"
            return Refusal(
                Error(code="wrong_version", message=text, ref="hello"), Close.WRONG_VERSION
            )
        given = (message.token or "").encode()
        if self.token is not None and not hmac.compare_digest(given, self.token.encode()):
            text = "the token is wrong or missing; the server printed it at its start"
            return Refusal(
                Error(code="unauthorized", message=text, ref="hello"), Close.UNAUTHORIZED
            )
        self.phase = "start"
        return None

    def _check_text(self, message: ClientMessage) -> Refusal | None:
        text = getattr(message, "text", None) or getattr(message, "prompt", None) or ""
        if len(text) > self.limits.prompt_chars:
            return self._refuse(
                "too_long",
                f"a prompt has at most {self.limits.prompt_chars} "
                f"characters, this one has {len(text)}",
                message.type,
            )
        return None
