"""Put the trained parts together into the folder that ships.

    python -m streamgen.apps.pocket.export --data pocket-data --out weights/pocket-world

Takes the averaged transformer and word encoder of `train.pt`, the autoencoder of `vae/` and the
judges, and writes them with the world's config and the manifest of checksums; weights in bfloat16.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from streamgen import __version__
from streamgen.apps.pocket.maze import HEIGHT, KEYS, WIDTH
from streamgen.apps.pocket.prompts import MAX_WORDS, VOCABULARY
from streamgen.apps.pocket.train import CONFIG, LATENT_HW, PocketWorld, Recipe
from streamgen.engine import Engine, WorldConfig
from streamgen.models.vae import FrameCodec
from streamgen.pipelines.world import WorldPipeline
from streamgen.sampling.schedule import FewStep
from streamgen.weights import registry

WORLD = WorldConfig(
    height=HEIGHT,
    width=WIDTH,
    fps=20,
    latent_hw=LATENT_HW,
    chunk_frames=Recipe.chunk,
    sink=1,
    window=Recipe.frames,
    positions="sliding_sink",
    schedule=FewStep((1000, 600, 350, 180), shift=1.0, noise=1.25),
    first_schedule=FewStep(tuple(range(1000, 0, -60)), shift=1.0),
    context_noise=100.0,
    keys=KEYS,
    opposites=(("w", "s"), ("a", "d"), ("q", "e")),
    suggestions=(
        "a brick maze at night",
        "a sunny hedge labyrinth",
        "heavy snow",
        "walls of stone in molten lava",
        "a wooden maze under a starry sky",
    ),
    vocabulary=VOCABULARY,
    max_words=MAX_WORDS,
)


def assemble(data: Path) -> WorldPipeline:
    """The world of the newest checkpoint in `data`, in float32."""
    weights = torch.load(data / "train.pt", weights_only=True)["average"]
    world = PocketWorld()
    world.load_state_dict(weights)
    world.eval().requires_grad_(False)
    codec = FrameCodec.from_folder(data / "vae")
    return WorldPipeline(Engine(world.dit, world.text, codec, WORLD, 4, 640), "pocket-world")


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-data"))
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-world"))
    args = parser.parse_args()
    assert CONFIG.action_dim == len(KEYS)
    assemble(args.data).save_pretrained(args.out)
    if (args.data / "judges").is_dir():
        shutil.copytree(args.data / "judges", args.out / "judges", dirs_exist_ok=True)
    registry.write_manifest(
        args.out,
        name="pocket-world",
        kind="world",
        version=__version__,
        licence="Apache-2.0",
        card="README.md",
    )


if __name__ == "__main__":
    main()
