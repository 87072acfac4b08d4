"""Put the trained parts of the pocket video together into the folder that ships.

    python -m streamgen.apps.pocket.video_export --data pocket-video-data --out weights/pocket-video

Takes the averaged transformer and word encoder of `train.pt`, the autoencoder of `vae/` and the
wall judge, and writes them with the config and the manifest of checksums; weights in bfloat16. A
card and a picture that lie in the folder already stay, and are sealed with the rest.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from streamgen import __version__
from streamgen.apps.pocket.flights import FPS
from streamgen.apps.pocket.maze import HEIGHT, WIDTH
from streamgen.apps.pocket.prompts import MAX_WORDS, VOCABULARY
from streamgen.apps.pocket.train import LATENT_HW, VIDEO_CONFIG, VIDEO_RECIPE, PocketWorld
from streamgen.engine import Engine, VideoConfig
from streamgen.models.vae import FrameCodec
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.sampling.schedule import FewStep
from streamgen.weights import registry

VIDEO = VideoConfig(
    height=HEIGHT,
    width=WIDTH,
    fps=FPS,
    latent_hw=LATENT_HW,
    chunk_frames=VIDEO_RECIPE.chunk,
    sink=1,
    window=VIDEO_RECIPE.frames,
    positions="sliding_sink",
    schedule=FewStep(tuple(round(1000 * i / 12) for i in range(12, 0, -1)), shift=1.0, noise=1.25),
    first_schedule=FewStep(tuple(range(1000, 0, -60)), shift=1.0, noise=1.15),
    context_noise=50.0,
    suggestions=(
        "a red brick maze in heavy snow",
        "a wooden labyrinth under a starry sky",
        "a sunny hedge maze",
        "stone walls in molten lava",
    ),
    vocabulary=VOCABULARY,
    max_words=MAX_WORDS,
)


def assemble(data: Path, config: VideoConfig = VIDEO, max_sessions: int = 4) -> CausalVideoPipeline:
    """The video of the newest checkpoint in `data`, in float32."""
    weights = torch.load(data / "train.pt", weights_only=True)["average"]
    model = PocketWorld(VIDEO_CONFIG)
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    codec = FrameCodec.from_folder(data / "vae")
    engine = Engine(model.dit, model.text, codec, config, max_sessions)
    return CausalVideoPipeline(engine, "pocket-video")


def seal(folder: Path) -> None:
    """Write the manifest anew: after the card or the picture changed, say."""
    registry.write_manifest(
        folder,
        name="pocket-video",
        kind="video",
        version=__version__,
        licence="Apache-2.0",
        card="README.md",
    )


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-video-data"))
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-video"))
    parser.add_argument("--seal-only", action="store_true", help="write the manifest and no more")
    args = parser.parse_args()
    if not args.seal_only:
        assemble(args.data).save_pretrained(args.out)
        if (args.data / "judges").is_dir():
            shutil.copytree(args.data / "judges", args.out / "judges", dirs_exist_ok=True)
    seal(args.out)


if __name__ == "__main__":
    main()
