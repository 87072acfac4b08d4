"""Make the pocket video, from nothing to the folder that ships.

    python -m streamgen.apps.pocket.video --data pocket-video-data --out weights/pocket-video

It grows out of a pocket world (`--begin-from`, the one that ships unless told otherwise): the
world's autoencoder is taken as it is, and the transformer begins from the world's, without the
action embedding. Four stages follow, each a module with a command line of its own, seeded, logged
and resumable: flights are rendered and encoded, the transformer is trained on them, a judge of
walls is trained, and all is exported. After an interruption the same line goes on. On one core the
whole takes about two hours with the minutes given here.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-video-data"))
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-video"))
    parser.add_argument("--begin-from", type=Path, default=Path("weights/pocket-world"))
    parser.add_argument("--flights", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=96, help="of training the transformer")
    parser.add_argument("--workers", type=int, default=1, help="processes that work at once")
    args = parser.parse_args()
    if not (args.data / "vae").exists():
        shutil.copytree(args.begin_from / "vae", args.data / "vae")
    workers = ("--workers", args.workers)
    if not (args.data / "latents" / "latents.npy").exists():
        _run("flights", args.data, "--flights", args.flights, *workers)
    begin = ("--begin-from", args.begin_from, "--minutes", args.minutes)
    _run("train", args.data, "--kind", "video", *begin, *workers)
    if not (args.data / "judges").exists():
        _run("video_judge", args.data)
    _run("video_export", args.data, "--out", args.out)


def _run(stage: str, data: Path, *options: object) -> None:
    command = [sys.executable, "-m", f"streamgen.apps.pocket.{stage}", "--data", data, *options]
    print(f"== {stage}", flush=True)
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
