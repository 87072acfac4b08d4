"""Make the pocket image model, from nothing to the folder that ships.

    python -m streamgen.apps.pocket.image --data pocket-image --out weights/pocket-image

Six stages, each a module with a command line of its own, seeded, logged and resumable: a stage that
is done is skipped or ends at once, so after an interruption the same line goes on. On one core the
whole takes about two hours with the minutes given here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"), help="working folder")
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-image"))
    parser.add_argument("--batches", type=int, default=16, help="x 1536 pictures")
    parser.add_argument("--vq-minutes", type=float, default=40, help="of training the autoencoder")
    parser.add_argument("--minutes", type=float, default=60, help="of training the transformer")
    parser.add_argument("--decoder-minutes", type=float, default=15)
    args = parser.parse_args()
    if not (args.data / "pictures.npy").exists():
        _run("data", args.data, "--batches", args.batches)
    if not (args.data / "latents.npy").exists():  # these are encoded by the finished autoencoder
        _run("vq", args.data, "--minutes", args.vq_minutes)
    _run("train", args.data, "--minutes", args.minutes)
    # The tokens are fixed from here on; what draws them may still learn to draw sharper.
    _run("vq", args.data, "--decoder-only", "--minutes", args.decoder_minutes)
    if not (args.data / "judges").exists():
        _run("judge", args.data)
    _run("export", args.data, "--out", args.out)


def _run(stage: str, data: Path, *options: object) -> None:
    command = [
        sys.executable, "-m", f"streamgen.apps.pocket.image_{stage}", "--data", data, *options
    ]  # fmt: skip
    print(f"== {stage}", flush=True)
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
