"""Which tokens should a video model forget? A toy that can be asked: `streamgen bench needle`.

world   streams with events in them, and questions about the events
model   a small decoder that reads a stream and answers; `train` teaches it from a seed
reader  the same decoder over token tables, chunk by chunk, under an eviction policy
run     how often each policy still knows the answer: table and JSON
"""

from __future__ import annotations

from streamgen.apps.bench.needle.run import run_needle

__all__ = ["run_needle"]
