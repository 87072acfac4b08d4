"""A world by name or as an object: what `play` and `walk` take."""

from __future__ import annotations

from typing import Any


def as_world(world: Any) -> Any:
    """A world. A name, folder or hub id is loaded; anything else is one already.

    Raises:
        UnknownModel, WeightsError: from loading.
        InvalidRequest: it is a model for another command.
    """
    if not isinstance(world, str):
        return world
    from streamgen.pipelines.world import WorldPipeline

    return WorldPipeline.from_pretrained(world)
