"""Put the trained parts of the pocket image model together into the folder that ships.

    python -m streamgen.apps.pocket.image_export --data pocket-image --out weights/pocket-image

Takes the averaged transformer of `var.pt`, the averaged autoencoder of `vq.pt` (with the decoder of
`vq-decoder.pt` if that was trained on) and the judge of walls, and writes them under VAR's own
names in bfloat16, with the model's config and the manifest of checksums. A card (README.md) that is
in the folder stays there and is sealed with the rest.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import cv2
import torch

from streamgen import __version__
from streamgen.apps.pocket.image_data import CLASSES
from streamgen.apps.pocket.image_train import CONFIG
from streamgen.apps.pocket.image_vq import load_vae
from streamgen.apps.pocket.maze import HEIGHT, WIDTH
from streamgen.models.var import VARModel
from streamgen.pipelines.next_scale import ImageConfig, NextScalePipeline
from streamgen.sampling.tokens import Sampling
from streamgen.weights import registry

NAME = "pocket-image"
SAMPLING = Sampling(cfg=2.0, top_k=0, top_p=0.9)


def assemble(data: Path, sampling: Sampling = SAMPLING) -> NextScalePipeline:
    """The model of the newest checkpoints in `data`, in float32."""
    model = VARModel(CONFIG)
    model.load_state_dict(torch.load(data / "var.pt", weights_only=True)["average"])
    decoder = data / "vq-decoder.pt"
    vae = load_vae(decoder if decoder.exists() else data / "vq.pt")
    config = ImageConfig(CLASSES, HEIGHT, WIDTH, sampling)
    return NextScalePipeline(model.eval().requires_grad_(False), vae, config, NAME)


def seal(folder: Path) -> None:
    """Write the manifest of a finished folder."""
    registry.write_manifest(
        folder, name=NAME, kind="image", version=__version__, licence="Apache-2.0"
    )


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"))
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-image"))
    parser.add_argument("--sheet", type=Path, help="the evaluation's classes.png, for the card")
    parser.add_argument("--seal-only", action="store_true", help="only write the manifest anew")
    args = parser.parse_args()
    if not args.seal_only:
        assemble(args.data).save_pretrained(args.out)
        if (args.data / "judges").is_dir():
            shutil.copytree(args.data / "judges", args.out / "judges", dirs_exist_ok=True)
    if args.sheet:
        sheet = cv2.imread(str(args.sheet))
        assert sheet is not None, f"{args.sheet} is no picture"
        cv2.imwrite(str(args.out / "classes.jpg"), sheet, (cv2.IMWRITE_JPEG_QUALITY, 88))
    for path in args.out.rglob("*.*"):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    seal(args.out)


if __name__ == "__main__":
    main()
