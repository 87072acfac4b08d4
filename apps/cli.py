"""`streamgen`: the command line. Each command imports what it needs when it runs.

So `streamgen --help` loads neither torch nor anything else that is slow to start. A caller's
mistake is one line on the error stream and exit code 2, a warning is one line too; `--debug` or
STREAMGEN_DEBUG=1 shows where they came from.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamgen import __version__
from streamgen.errors import InvalidRequest, StreamgenError

app = typer.Typer(
    name="streamgen",
    help="Run models that make video as a stream.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help needs no rich, which is most of the start-up time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure speed: tables and JSON, all ratios from one run.")
app.add_typer(bench, name="bench", no_args_is_help=True)

HEADLESS = ("frames", "actions", "switch", "image", "output", "scale")
"""Options of `play` that ask for a walk into a file; any of them means no browser."""

BROWSER = ("host", "port", "plain", "no_browser")
"""Options of `play` that only the served demo uses."""


def main() -> None:
    """Entry point of the `streamgen` program."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line. Exit code: 0 done, 1 a check failed, 2 a mistake in the line."""
    debug = "--debug" in args or os.environ.get("STREAMGEN_DEBUG", "0") not in ("", "0")
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _warn
            app(args=[arg for arg in args if arg != "--debug"], prog_name="streamgen")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except StreamgenError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the place in the code that it came from."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _version(asked: bool) -> None:
    if asked:
        print(f"streamgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error (any place in the line)."),
    ] = False,
) -> None:
    """Options before the command. `run` has taken out `--debug` already: here it is for help."""


@app.command()
def play(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A packaged name, a folder, or a hub id.")
    ] = "pocket-world",
    prompt: Annotated[
        str | None, typer.Option(help="Words to start with. [default: a suggestion of the world's]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same actions: same frames. [default: any in the browser, 0 in a file]"
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to serve on; 0 is any free one.")
    ] = 7860,
    plain: Annotated[
        bool, typer.Option("--plain", help="The page without Gradio, which starts sooner.")
    ] = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open no page.")
    ] = False,
    frames: Annotated[
        int | None,
        typer.Option(min=1, help="File: so many frames. [default: as many as the actions, or 64]"),
    ] = None,
    actions: Annotated[
        str, typer.Option(help="File: keys, each with its frames, as in 'w*16 a*8 w+d*40 .*8'.")
    ] = "",
    switch: Annotated[
        list[str] | None,
        typer.Option(help="File: a new prompt at a frame, as in '32:heavy snow'; repeatable."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="File: a picture to begin with, instead of a dreamt one.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File: the mp4; its track lies beside it.")
    ] = Path("walk.mp4"),
    scale: Annotated[int, typer.Option(min=1, help="File: enlarge the picture.")] = 4,
) -> None:
    """Walk through a world: live in the browser or, with any of the options marked File, without
    one and into an mp4.
    """
    given = [name for name in context.params if _was_given(context, name)]
    headless = [name for name in HEADLESS if name in given]
    clash = [name for name in BROWSER if name in given]
    if headless and clash:
        raise InvalidRequest(
            f"{_option(clash[0])} is for the browser and {_option(headless[0])} for a walk into a "
            "file: leave one of them out"
        )
    if threads is not None:
        _use_threads(threads)
    if headless:
        _walk(
            model,
            output=output,
            frames=frames,
            actions=actions,
            switches=switch or [],
            prompt=prompt,
            seed=seed or 0,
            image=image,
            scale=scale,
        )
        return
    from streamgen.apps import play as demo

    demo.play(
        model,
        host=host,
        port=port,
        plain=plain,
        open_browser=not no_browser,
        prompt=prompt,
        seed=seed,
    )


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A packaged name, a folder, or a hub id.")
    ] = "pocket-world",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report and the picture.")
    ] = Path("out/eval"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Measure a world of mazes against the renderer it learnt from: table, JSON and a picture."""
    from streamgen.apps.pocket import evaluate as evaluation

    evaluation.run_eval(model, output, as_json, quick)


@bench.command()
def world(
    model: Annotated[
        str, typer.Argument(help="A packaged name, a folder, or a hub id.")
    ] = "pocket-world",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of each figure.")] = 5,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in each of them.")] = 60,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Time a world: frames a second by stage, against peers' caches, and far into a walk."""
    from streamgen.apps.bench import world as benchmark

    benchmark.run(model, repeats, chunks, output, threads, quick=quick)


@bench.command()
def cache(
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of each figure.")] = 7,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Count and time the cache core alone: updates against peers' ways, handles, memory, tiers."""
    from streamgen.apps.bench import cache as benchmark

    benchmark.run(repeats, output, quick=quick)


@bench.command()
def blend(
    model: Annotated[
        str, typer.Argument(help="A packaged name, a folder, or a hub id.")
    ] = "pocket-world",
    walks: Annotated[int, typer.Option(min=1, help="Walks to reuse chunks in.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Reuse cached chunks at another place: quality against the share that is recomputed."""
    from streamgen.apps.bench import blend as benchmark

    benchmark.run_blend(model, output, as_json, walks=walks)


@bench.command()
def needle(
    folder: Annotated[
        Path, typer.Option(help="Where the little decoder lies, or is trained to (7 minutes).")
    ] = Path("out/needle"),
    streams: Annotated[int, typer.Option(min=1, help="Streams that every policy reads.")] = 200,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Find needles in a stream under a budget: HERMES and other evictions, on a toy."""
    from streamgen.apps.bench.needle.run import run_needle

    run_needle(folder, streams=streams, json_path=output, quick=quick)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(help="A name of the table, a packaged world, or a config.json or its folder."),
    ],
    gpu: Annotated[
        str, typer.Option(help="A name such as h200, cpu, or a size such as 96GB.")
    ] = "h200",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions to hold at once.")] = 1,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a session: 59000, 59k (59,000), 59Ki (60,416), 21f (latent frames), or "
            "a mix as in '50:16Ki,30:64Ki,20:160Ki'. [default: what a window keeps]"
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option(help="raw, usual (as the model is mostly served), fp8, int8, nvfp4, ...")
    ] = "raw",
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a machine.")] = 1,
    gpus_per_copy: Annotated[
        int,
        typer.Option(
            min=0, help="GPUs that share a copy of the weights; 0 = as few nodes as it fits into."
        ),
    ] = 0,
    reserve: Annotated[
        float, typer.Option(min=0, max=99, help="Per cent of GPU memory left to activations.")
    ] = 10.0,
    dram: Annotated[str, typer.Option(help="Host memory of a node for what does not fit.")] = "0",
    nvme: Annotated[str, typer.Option(help="Disk of a node for what does not fit there.")] = "0",
    pooled: Annotated[
        str, typer.Option(help="A store that all nodes reach: a size, or 'unlimited'.")
    ] = "0",
    share_prefix: Annotated[str, typer.Option(help="Tokens that all sessions begin with.")] = "0",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Different texts. [default: one a session]")
    ] = None,
    past: Annotated[
        str, typer.Option(help="Tokens or frames behind the window that can be gone back to.")
    ] = "0",
    snapshot_every: Annotated[
        str | None, typer.Option(help="Tokens or frames between two copies of the state.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Bytes of the weights. [default: as the table says]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """How much memory sessions need, how many fit, and in which tier the others land."""
    from streamgen.apps.plan import run_plan

    run_plan(
        model,
        gpu,
        sessions,
        context=context,
        kv=kv,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpus_per_copy=gpus_per_copy,
        reserve=reserve,
        dram=dram,
        nvme=nvme,
        pooled=pooled,
        share_prefix=share_prefix,
        prompts=prompts,
        past=past,
        snapshot_every=snapshot_every,
        weights=weights,
        as_json=as_json,
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what this machine has, and what to do about what it lacks. Exit code 1: it can't run."""
    from streamgen.apps import doctor as report

    raise typer.Exit(report.doctor(as_json))


def _walk(model: str, **options: Any) -> None:
    from streamgen.apps import walk

    done = walk.walk(model, **options)
    rate = done.frames / done.seconds if done.seconds else 0.0
    print(f"{done.path}: {done.frames} frames, made at {rate:.1f} frames/s; track in {done.track}")


def _was_given(context: typer.Context, name: str) -> bool:
    """Was this parameter on the command line? By name: the enum's home differs between versions."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
