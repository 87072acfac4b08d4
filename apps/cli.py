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
    help="Run models that make video as a stream, and pictures scale by scale.",
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

EVALUATIONS = {"world": "evaluate", "video": "evaluate_video", "image": "evaluate_image"}
"""Kind of a model -> the module of `streamgen.apps.pocket` that measures it."""


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
    start_image: Annotated[
        str | None,
        typer.Option(
            help="Begin with a picture: a file, or 'generated' for one that the pocket image model "
            "paints for the prompt, another at each start. [default: a dreamt one]"
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
        Path | None, typer.Option(help="File: the same as --start-image with a file.")
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
    if image is not None and start_image is not None:
        raise InvalidRequest("--image and --start-image say the same: leave one of them out")
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
            image=start_image if image is None else image,
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
        start_image=start_image,
    )


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What the video shows; with --resume, what it shows from there on."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="A packaged name, or a folder of Wan weights (base of --checkpoint)."),
    ] = "pocket-video",
    checkpoint: Annotated[
        Path | None, typer.Option(help="A causal transformer, .pt or .safetensors, for the base.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="How it is run: self-forcing, causvid, longlive, matrix-game-2, ..."),
    ] = None,
    lora: Annotated[Path | None, typer.Option(help="A PEFT LoRA to merge into it.")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The mp4; its track lies beside it.")
    ] = Path("out.mp4"),
    frames: Annotated[
        int | None, typer.Option(help="So many (new) frames. [default: about 5 seconds]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="So many (new) seconds, up to the next whole chunk.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same prompts: same frames. [default: 0]")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="A picture to begin with.")] = None,
    video: Annotated[
        Path | None,
        typer.Option(
            help="A clip to go on from; the mp4 begins with what the model sees of its end."
        ),
    ] = None,
    switch: Annotated[
        list[str] | None,
        typer.Option(help="A new prompt at a frame, as in '40:heavy snow'; repeatable."),
    ] = None,
    recache: Annotated[
        str | None,
        typer.Option(
            help="What a switch recomputes: last_chunk, window_causal, window_bidirectional, off. "
            "[default: the model's]"
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the session to this file at the end and on Ctrl-C."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from this session file; an mp4 at --output grows."),
    ] = None,
    scale: Annotated[
        int | None, typer.Option(min=1, help="Enlarge. [default: small pictures to some 512 px]")
    ] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels. [default: preset's]")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels. [default: preset's]")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Timesteps, as in 1000,750,500,250. [default: preset's]")
    ] = None,
    shift: Annotated[float | None, typer.Option(help="Shift of the timesteps.")] = None,
    sink: Annotated[int | None, typer.Option(min=0, help="Latent frames kept for ever.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Latent frames seen at all.")] = None,
    chunk_frames: Annotated[
        int | None, typer.Option(min=1, help="Latent frames made together; 1 = frame by frame.")
    ] = None,
    positions: Annotated[str | None, typer.Option(help="absolute or sliding_sink.")] = None,
    kv: Annotated[
        str, typer.Option(help="How the past is stored: raw, fp8, fp8_e5m2, int8, nvfp4.")
    ] = "raw",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    offload: Annotated[
        str | None, typer.Option(help="Weights in main memory: text, or all. [default: none]")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="Weights in fp8. [default: none]")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Make a video of a text, a picture or a clip. Ctrl-C ends it at the next chunk and keeps what
    there is; exit code 130 says so.
    """
    if threads is not None:
        _use_threads(threads)
    loading = {
        "checkpoint": checkpoint,
        "preset": preset,
        "lora": lora,
        "height": height,
        "width": width,
        "steps": None if steps is None else _numbers("--steps", steps),
        "shift": shift,
        "sink": sink,
        "window": window,
        "chunk_frames": chunk_frames,
        "positions": positions,
        "kv": None if kv == "raw" else kv,
        "dtype": None if dtype == "auto" else dtype,
        "device": None if device == "auto" else device,
        "offload": offload,
        "quantize": quantize,
    }
    from streamgen.apps import generate as films

    film = films.generate(
        prompt,
        model=model,
        output=output,
        frames=frames,
        seconds=seconds,
        seed=seed,
        image=image,
        video=video,
        switches=switch or [],
        recache=recache,
        save=save,
        resume=resume,
        scale=scale,
        quiet=quiet,
        loading={name: value for name, value in loading.items() if value is not None},
    )
    rate = film.made / film.seconds if film.seconds else 0.0
    stopped = f"stopped after {film.made} new frames; " if film.stopped else ""
    print(f"{stopped}{film.path}: {film.frames} frames, made at {rate:.1f} frames/s; "
          f"track in {film.track}")  # fmt: skip
    if film.go_on:
        print(f"go on with: {film.go_on}")
    if film.stopped:
        raise typer.Exit(130)


@app.command()
def image(
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="What to draw, by name or number; repeatable. See --list."),
    ] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Show the classes.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first picture; each more has the next.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture: .png, .jpg or .webp.")
    ] = Path("image.png"),
    grid: Annotated[
        str | None,
        typer.Option(help="ROWSxCOLUMNS pictures, as in 4x4; without --class, of every class."),
    ] = None,
    gif: Annotated[
        Path | None, typer.Option(help="A gif of the picture that sharpens scale by scale.")
    ] = None,
    cfg: Annotated[float | None, typer.Option(help="Guidance. [default: the model's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Tokens to draw from; 0 = all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Their share of the odds; 0 = all.")] = None,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="Mix likely tokens: softer, less varied.")
    ] = False,
    vary: Annotated[
        int | None, typer.Option(help="So many others with the same coarse scales beside it.")
    ] = None,
    from_scale: Annotated[
        int | None, typer.Option(help="The scale from which --vary draws anew. [default: middle]")
    ] = None,
    edit: Annotated[
        Path | None, typer.Option(help="A picture to draw a part of anew, as --class if given.")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(help="White where --edit is drawn anew; of the same size.")
    ] = None,
    scale: Annotated[
        int | None, typer.Option(min=1, help="Enlarge. [default: small pictures to some 512 px]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A packaged name or a folder. [default: pocket-image]")
    ] = None,
    var: Annotated[
        Path | None, typer.Option(help="Published weights in place of --model: var_d16.pth, ...")
    ] = None,
    vae: Annotated[
        Path | None, typer.Option(help="vae_ch160v4096z32.pth. [default: the one beside --var]")
    ] = None,
    names: Annotated[
        Path | None, typer.Option("--classes", help="A file with the class names, one a line.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
) -> None:
    """Draw pictures of a class, scale by scale."""
    if var is not None and model is not None:
        raise InvalidRequest("--model and --var are two models: leave one of them out")
    if var is None and vae is not None:
        raise InvalidRequest("--vae is for --var: a model folder holds its own")
    if threads is not None:
        _use_threads(threads)
    from streamgen.apps import image as pictures

    chosen = str(var) if var is not None else model or pictures.DEFAULT_MODEL
    loading = {"vae": vae, "classes": names, "dtype": dtype, "device": device}
    if list_them:
        print("\n".join(pictures.list_classes(chosen, **loading)))
        return
    sampling = {"cfg": cfg, "top_k": top_k, "top_p": top_p, "more_smooth": smooth or None}
    done = pictures.paint(
        classes or [],
        model=chosen,
        output=output,
        seed=seed,
        grid=grid,
        gif=gif,
        vary=vary,
        from_scale=from_scale,
        edit=edit,
        mask=mask,
        scale=scale,
        sampling={name: value for name, value in sampling.items() if value is not None},
        loading=loading,
    )
    shown = "; ".join(dict.fromkeys(done.pictures))
    count = "1 picture" if len(done.pictures) == 1 else f"{len(done.pictures)} pictures"
    also = f", and {done.gif}" if done.gif else ""
    print(f"{done.path}{also}: {count} in {done.seconds:.1f} s ({shown})")


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
    """Measure a pocket model against what it learnt from: table, JSON and a picture."""
    from importlib import import_module

    from streamgen.weights import registry

    kind = registry.read_manifest(registry.resolve(model)).kind
    if kind not in EVALUATIONS:
        known = ", ".join(EVALUATIONS)
        raise InvalidRequest(f"model {model!r} is of kind {kind!r}; measured are: {known}")
    evaluation = import_module(f"streamgen.apps.pocket.{EVALUATIONS[kind]}")
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


@bench.command("video")
def bench_video(
    layers: Annotated[int, typer.Option(min=1, help="Layers of Wan2.1 1.3B's shape.")] = 2,
    height: Annotated[int, typer.Option(min=16, help="Pixels; 480 is the real thing.")] = 240,
    width: Annotated[int, typer.Option(min=16, help="Pixels; 832 is the real thing.")] = 416,
    repeats: Annotated[int, typer.Option(min=1, help="Chunks measured.")] = 7,
    window: Annotated[int, typer.Option(min=1, help="Latent frames seen at all.")] = 12,
    sink: Annotated[int, typer.Option(min=0, help="Latent frames kept for ever.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Watch it over 10,000 frames.")
    ] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Time a causal video pass against its floor, peers' caches and diffusers; memory over 10,000
    frames.
    """
    from streamgen.apps.bench import video as benchmark

    benchmark.run(
        layers,
        height,
        width,
        repeats,
        output,
        quick,
        window=window,
        sink=sink,
        threads=threads,
        memory=memory,
    )


@bench.command("image")
def bench_image(
    depth: Annotated[int, typer.Option(min=1, help="Blocks of VAR d16's shape.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of each figure.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: torch's own choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only see that everything runs.")] = False,
) -> None:
    """Time and weigh next-scale pictures (VAR d16's shapes) against the concatenating way."""
    from streamgen.apps.bench import image as benchmark

    benchmark.run(depth, batch, repeats, output, quick, threads=threads)


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
        typer.Option(help="A name of the table, a packaged model, or a config.json or its folder."),
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


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"{option} {text!r}: write numbers with commas, as in 1000,750,500,250"
        ) from None


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
