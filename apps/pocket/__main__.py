"""Make the pocket world, from nothing to the folder that ships.

    python -m streamgen.apps.pocket --data pocket-data --out weights/pocket-world

Five stages, each a module with a command line of its own, seeded, logged and resumable: a stage
that is done is skipped or ends at once, so after an interruption the same line goes on. On two
cores the whole takes about four hours with the minutes given here.

With `--begin-from weights/pocket-world` a world that ships is improved: its autoencoder stays, and
the transformer goes on from its weights.
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
    parser.add_argument("--data", type=Path, default=Path("pocket-data"), help="working folder")
    parser.add_argument("--out", type=Path, default=Path("weights/pocket-world"))
    parser.add_argument("--autoencoder-minutes", type=float, default=30)
    parser.add_argument("--decoder-minutes", type=float, default=20)
    parser.add_argument("--minutes", type=float, default=150, help="of training the transformer")
    parser.add_argument("--begin-from", type=Path, help="a packaged world to improve further")
    args = parser.parse_args()
    begin = ("--begin-from", args.begin_from) if args.begin_from else ()
    if begin and not (args.data / "vae").exists():
        shutil.copytree(args.begin_from / "vae", args.data / "vae")
    if not (args.data / "latents" / "latents.npy").exists():
        if not begin:
            _run("autoencoder", args.data, "--minutes", args.autoencoder_minutes)
        _run("data", args.data)
    _run("train", args.data, "--minutes", args.minutes, *begin)
    # The encoder is fixed from here on; the decoder may still learn to draw sharper.
    if not begin:
        _run("autoencoder", args.data, "--decoder-only", "--minutes", args.decoder_minutes)
    if not (args.data / "judges").exists():
        _run("judges", args.data)
    _run("export", args.data, "--out", args.out)


def _run(stage: str, data: Path, *options: object) -> None:
    command = [sys.executable, "-m", f"streamgen.apps.pocket.{stage}", "--data", data, *options]
    print(f"== {stage}", flush=True)
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
