"""streamgen: a runtime for models that make or watch video as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgen.pipelines.causal_video import CausalVideoPipeline
    from streamgen.pipelines.next_scale import NextScalePipeline
    from streamgen.pipelines.world import WorldPipeline

__version__ = "0.1.0"
__all__ = ["CausalVideoPipeline", "NextScalePipeline", "WorldPipeline", "__version__"]

_HOME = {
    "CausalVideoPipeline": "streamgen.pipelines.causal_video",
    "NextScalePipeline": "streamgen.pipelines.next_scale",
    "WorldPipeline": "streamgen.pipelines.world",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import streamgen` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'streamgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
