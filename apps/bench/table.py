"""The report of `streamgen bench world` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    return "\n".join(
        [
            *_about_lines(report["about"]),
            *_speed_lines(report["speed"], report["share"]),
            *_cache_lines(report["caches"]),
            *_length_lines(report["length"]),
        ]
    )


def _about_lines(about: dict[str, Any]) -> Iterator[str]:
    machine = about["machine"]
    yield (
        f"{about['model']}: {about['parameters'] / 1e6:.1f} M parameters, {about['dtype']}, "
        f"{about['width']}x{about['height']}, {about['tokens']} tokens a frame"
    )
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}; {about['repeats']} x {about['chunks']} chunks"
    )
    if (about["load_before"] or 0) > 0.5:
        yield (
            f"the machine was busy (load {about['load_before']:.1f}): times are too long, and "
            "ratios are rough"
        )


def _speed_lines(speed: dict[str, Any], share: dict[str, Any] | None) -> Iterator[str]:
    yield ""
    yield (
        f"(a) {speed['frames_per_second']:.1f} frames/s (meant for {speed['meant_for']}); "
        f"milliseconds for a chunk of {speed['chunk_frames']} frames"
    )
    yield f"    {'':24}{'p50':>8}{'p95':>8}{'p99':>8}"
    for stage, ms in speed["ms"].items():
        yield f"    {stage:24}{ms['p50']:8.2f}{ms['p95']:8.2f}{ms['p99']:8.2f}"
    if share:
        yield "    shares of a chunk without encoding"
        for name, text in (
            ("matmul_attention_convolution", "matmul, attention, convolution"),
            ("elementwise", "other tensor operations (at most)"),
            ("python", "Python and dispatch (at least)"),
            ("cache", "cache, by the session's clock"),
            ("python_and_cache", "Python and cache (target: at most 15 %)"),
            ("strict", "all but matmul, attention, convolution"),
        ):
            yield f"    {text:42}{100 * share[name]:6.1f} %"


def _cache_lines(caches: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "(b) the same frames with other caches; ratios to ours"
    yield f"    {'':24}{'chunk ms':>10}{'ratio':>8}{'cache ms':>10}{'ratio':>8}"
    for name, row in caches.items():
        yield (
            f"    {name:24}{row['chunk_ms']:10.2f}{row['chunk_ratio']:8.3f}"
            f"{row['cache_ms']:10.3f}{row['cache_ratio']:8.2f}"
        )


def _length_lines(length: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"(c) a chunk at frame {length['near_frame']:,}: {length['near_ms']:.2f} ms, at frame "
        f"{length['far_frame']:,}: {length['far_ms']:.2f} ms, ratio {length['ratio']:.3f} "
        "(target: within 5 %)"
    )
    if length["memory_ratio"] is not None:
        near, far = (length[f"{at}_memory_bytes"] / 2**20 for at in ("near", "far"))
        yield (
            f"    resident memory {near:.1f} and {far:.1f} MiB, ratio "
            f"{length['memory_ratio']:.4f} (target: within 2 %)"
        )
