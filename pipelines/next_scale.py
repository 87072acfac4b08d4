"""Next-scale images: a picture of a class that sharpens scale by scale (VAR).

    pipe = NextScalePipeline.from_pretrained("pocket-image")
    images = pipe(["lava, brick", "snow, stone"], seeds=[3, 4])
    others = pipe.vary(images[0], n=4)

    pipe = NextScalePipeline.from_pretrained("var_d16.pth", "vae_ch160v4096z32.pth")
    images = pipe([207, 980])

A folder holds `config.json` (kind, classes, size, sampling), `var.safetensors` and
`vae.safetensors`, both under the published names.

The K/V of a call live in a pool of its own, one open block a row and no room for the last scale
(`streamgen.cache.scales`); nothing is kept on the models, so threads may share a pipeline.

Axes: B images, R rows (images times the branches of guidance: conditions, then unconditions),
C latent channels, Y and X latent rows and columns, N tokens of a scale, V codebook entries, H and W
pixel rows and columns.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from streamgen.cache import BlockPool, KVSpec, NextScale
from streamgen.cache.scales import block_tokens
from streamgen.device import pick_device, pick_dtype
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.folder import read_config
from streamgen.models.var import CachedScales, Condition, ForkedScales, VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.sampling.tokens import Sampling, draw, guide, keep_likely, mix, ramp
from streamgen.weights import registry
from streamgen.weights import var as files
from streamgen.weights.load import load_into

WEIGHTS = "var.safetensors", "vae.safetensors"
"""Files of a model folder beside its `config.json`."""

Class = str | int | None
"""A class by name or index; None = no class in particular."""


@dataclass(frozen=True)
class ImageConfig:
    """What a model of images is, beyond its weights.

    Args:
        classes: their names by index; none where only indices are known.
        height, width: of the pictures, in pixels; 0 = as they are decoded. The model's own are
            square and are resized to this.
        sampling: how tokens are drawn unless the caller says otherwise.
    """

    classes: tuple[str, ...] = ()
    height: int = 0
    width: int = 0
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, eq=False)
class NextScaleImage:
    """A finished image.

    Args:
        pixels: uint8 `[H, W, 3]`.
        tokens: the token map of each scale, `[N]` in row order, on the CPU. With `more_smooth` the
            pixels show mixtures of entries, and these are the ones drawn beside them.
        label: index of its class; None if it has none.
        seed: what it was drawn with; None if it wasn't.
    """

    pixels: np.ndarray
    tokens: tuple[Tensor, ...]
    label: int | None
    seed: int | None


@dataclass(frozen=True, eq=False)
class ScaleStep:
    """A batch after one more scale.

    Args:
        scale: which, from 0.
        side: of its token map.
        pixels: what the images look like so far, uint8 `[B, H, W, 3]`.
        images: the finished images; empty before the last scale.
    """

    scale: int
    side: int
    pixels: np.ndarray
    images: tuple[NextScaleImage, ...] = ()


@dataclass
class _Drawing:
    """A batch in the making; all of it is the call's own."""

    labels: list[int]
    seeds: list[int]
    generators: list[torch.Generator]
    sampling: Sampling
    branches: int  # 2 with guidance, else 1
    condition: Condition
    x_RNE: Tensor  # what the next scale begins with
    f_hat_BCYX: Tensor
    tokens_BN: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Fixed:
    """Tokens that are given: for each scale which, and where `[1 or B, N]`."""

    tokens_BN: list[Tensor]
    where_BN: list[Tensor]


class NextScalePipeline:
    """A loaded model of images. Load once, share it.

    Args:
        var: transformer.
        vae: autoencoder with the codebook that the transformer's tokens index.
        config: classes, size and sampling.
        name: of its folder or file.

    Attributes:
        config: as given, with sizes filled in.
        patch_nums: side of each scale's token map.

    Raises:
        InvalidRequest: another number of class names than classes, or of codebook entries or
            another width of them than the transformer takes.
    """

    def __init__(
        self, var: VARModel, vae: VQVAE, config: ImageConfig | None = None, name: str = ""
    ) -> None:
        self.var, self.vae, self.name = var, vae, name
        config = config or ImageConfig()
        if config.classes and len(config.classes) != var.config.num_classes:
            raise InvalidRequest(
                f"{len(config.classes)} class names for a model of {var.config.num_classes} classes"
            )
        asked = var.config.vocab, var.config.latent_channels
        given = vae.config.vocab, vae.config.latent_channels
        if asked != given:
            raise InvalidRequest(
                f"the autoencoder has {given[0]} codebook entries of width {given[1]}, the "
                f"transformer takes {asked[0]} of width {asked[1]}"
            )
        self.patch_nums = var.config.patch_nums
        self._side = self.patch_nums[-1] * vae.config.factor
        self._store_last = len(self.patch_nums) == 1  # else there is nothing to store at all
        self.config = replace(
            config, height=config.height or self._side, width=config.width or self._side
        )

    # Loading

    @classmethod
    def from_pretrained(
        cls,
        var: str | Path = "pocket-image",
        vae: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        classes: Sequence[str] | str | Path | None = None,
    ) -> NextScalePipeline:
        """Load a packaged model, a local folder, a hub id, or the published files.

        Args:
            var: such as "pocket-image", or a file such as "var_d16.pth", also a checkpoint of
                VAR's training. All sizes are read off the tensors.
            vae: with a file, "vae_ch160v4096z32.pth"; None = the one in the same checkpoint, or
                the file of that name beside it.
            device: "auto", "cpu", "cuda", "cuda:1", ...
            dtype: "auto", "float32", "bfloat16" or "float16".
            classes: names of the classes by index, or a file with one name a line or a JSON list.
                None = the folder's own; the published files have none, so classes are indices.

        Raises:
            UnknownModel: nothing of that name.
            WeightsError: files missing, damaged, of another model or of other shapes.
            InvalidRequest: a value is not accepted.
        """
        where = pick_device(device)
        kind = pick_dtype(dtype, where)
        if _is_file(var):
            name, config, sides = Path(var).stem, ImageConfig(), None
            vae = vae or files.find_vqvae(var)
            if vae is None:
                raise WeightsError(
                    f"{var}: an autoencoder is needed beside it: vae=..., published as "
                    f"{files.VAE_NAME}"
                )
            paths = Path(var), Path(vae)
        else:
            if vae is not None:
                raise InvalidRequest(
                    f"vae={str(vae)!r}: model folders hold their own; vae= is for var=<a file>"
                )
            folder = registry.resolve(var, accept=_is_model)
            if (folder / registry.MANIFEST).exists():
                registry.verify(folder)
            name = folder.name
            config, sides = _read_config(folder)
            paths = folder / WEIGHTS[0], folder / WEIGHTS[1]
        if classes is not None:
            config = replace(config, classes=_class_names(classes))
        tensors, vae_tensors = files.read_var(paths[0]), files.read_vqvae(paths[1])
        files.check_pair(tensors, vae_tensors)
        with torch.device("meta"):  # no random start for weights that are read anyway
            model = VARModel(VARConfig.from_tensors(tensors, sides)).cast(kind)
            codec = VQVAE(VQConfig.from_tensors(vae_tensors)).to(kind)
        codec.quantize.float()  # tiny, and its errors add up over the scales
        for part, weights in ((model, tensors), (codec, vae_tensors)):
            load_into(part.to_empty(device=where), files.weights_only(weights))
            part.eval().requires_grad_(False)
        return cls(model, codec, config, name)

    def save_pretrained(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write what `from_pretrained` reads but the manifest, weights in `dtype`.

        `streamgen.weights.registry.write_manifest` makes the folder a model.
        """
        folder.mkdir(parents=True, exist_ok=True)
        described = {"kind": "image", **asdict(self.config), "patch_nums": list(self.patch_nums)}
        (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
        for name, part in zip(WEIGHTS, (self.var, self.vae), strict=True):
            tensors = {k: v.to(dtype).contiguous() for k, v in part.state_dict().items()}
            save_file(tensors, folder / name)

    # What there is

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes by index; none where only indices are known."""
        return self.config.classes

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.var.pos_start.device

    def label(self, cls: Class) -> int:
        """Index of a class; for None the index that stands for no class.

        Names are compared without case and spaces; a part between commas is enough if only one
        class has it.

        Raises:
            InvalidRequest: no such class; the message names close ones.
        """
        count = self.var.config.num_classes
        if cls is None:
            return self.var.config.no_class
        if isinstance(cls, str) and cls.strip().isdecimal():
            cls = int(cls)
        if isinstance(cls, (int, np.integer)) and not isinstance(cls, bool):
            if not 0 <= cls < count:
                raise InvalidRequest(f"class {cls}: accepted are 0 to {count - 1}")
            return int(cls)
        if not isinstance(cls, str):
            raise InvalidRequest(f"class {cls!r}: a name, an index or None is needed")
        if not self.classes:
            raise InvalidRequest(
                f"class {cls!r}: this model has no class names; accepted are 0 to {count - 1}, or "
                "give the names by from_pretrained(classes=...)"
            )
        return self._find(cls)

    # Drawing

    def __call__(
        self,
        classes: Class | Sequence[Class],
        seeds: int | Sequence[int] | None = None,
        cfg: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool = False,
    ) -> list[NextScaleImage]:
        """Draw images, one for each class, as one batch.

        Args:
            classes: one or several, by name or index.
            seeds: one an image, or the first of consecutive ones; None = 0, 1, ... An image depends
                on its class and seed, not on the others in its batch (to the rounding of matrix
                products, whose order of sums may depend on the batch's size).
            cfg, top_k, top_p, more_smooth: see `Sampling`; None = the model's own.

        Raises:
            InvalidRequest: an unknown class, or a value out of range.
        """
        labels = self._labels(classes)
        sampling = self._sampling(cfg, top_k, top_p, more_smooth)
        return self._finish(self._draw(labels, _seeds(seeds, len(labels)), sampling))

    def stream(
        self,
        classes: Class | Sequence[Class],
        seeds: int | Sequence[int] | None = None,
        cfg: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool = False,
    ) -> Iterator[ScaleStep]:
        """The same scale by scale: images that sharpen; the last step holds what a call gives.

        Args and errors as for a call; errors come before the first step.
        """
        labels = self._labels(classes)
        sampling = self._sampling(cfg, top_k, top_p, more_smooth)
        return self._steps(self._draw(labels, _seeds(seeds, len(labels)), sampling))

    @torch.no_grad()
    def vary(
        self,
        image: NextScaleImage,
        from_scale: int | None = None,
        n: int = 4,
        seeds: int | Sequence[int] | None = None,
        cfg: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[NextScaleImage]:
        """Other images with the same coarse scales.

        The scales before are run once, from the image's tokens; then the cache is forked.

        Args:
            image: of this model.
            from_scale: the first scale that is drawn anew; more leaves less to vary. None = the
                middle one, 5 for the published models.
            n: how many.
            seeds: one a variation, or the first of consecutive ones; None = 0, 1, ...
            cfg, top_k, top_p: as for a call.

        Raises:
            InvalidRequest: a value is not accepted, or the image is none of this model's.
        """
        known = self._known(image)
        count = len(self.patch_nums)
        from_scale = count // 2 if from_scale is None else from_scale
        if not 0 <= from_scale < count:
            raise InvalidRequest(f"from_scale={from_scale}: accepted are 0 to {count - 1}")
        if n < 1:
            raise InvalidRequest(f"n={n}: at least 1 variation")
        drawn, sampling = _seeds(seeds, n), self._sampling(cfg, top_k, top_p)
        labels = [self.label(image.label)]
        if from_scale == 0:
            return self._finish(self._draw(labels * n, drawn, sampling))
        drawing = self._begin(labels, drawn[:1], sampling)
        with ExitStack() as stack:
            pool = self._pool(n * drawing.branches)
            trunk = stack.enter_context(self._cache(pool, drawing.branches))
            for scale in range(from_scale):
                self._run(drawing, scale, [trunk], store_only=True)
                self._add(drawing, scale, known[scale])
            forks = [
                stack.enter_context(closing(trunk.fork_after(from_scale - 1))) for _ in range(n)
            ]
            trunk.close()  # so that the last fork goes on in its blocks
            drawing = self._repeat(drawing, drawn)
            for scale in range(from_scale, count):
                self._step(drawing, scale, forks)
        return self._images(drawing, self._pixels(drawing.f_hat_BCYX))

    def edit(
        self,
        image: NextScaleImage | np.ndarray,
        mask: np.ndarray,
        cls: Class = None,
        seed: int = 0,
        cfg: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        more_smooth: bool = False,
    ) -> NextScaleImage:
        """Draw a part of an image anew: in-painting, or with `cls` another class there.

        As in VAR's demo of zero-shot editing, tokens outside the mask are forced at every scale,
        and so is the coarsest, which is the whole picture. The autoencoder mixes neighbours, so
        pixels near the mask change a little, too.

        Args:
            image: of this model, or any picture, uint8 `[h, w, 3]`.
            mask: True (or 128 and more) where the picture is drawn anew, of the image's height and
                width. A token is drawn if at least half of its area is.
            cls: what is drawn; None = the image's own class, or none.
            seed, cfg, top_k, top_p, more_smooth: as for a call.

        Raises:
            InvalidRequest: a value is not accepted, or the mask is too small to hold a token.
            WeightsError: a picture needs the autoencoder's encoder, and the weights have none.
        """
        sampling = self._sampling(cfg, top_k, top_p, more_smooth)
        picture = image.pixels if isinstance(image, NextScaleImage) else np.asarray(image)
        coded = image if isinstance(image, NextScaleImage) else self.encode(picture)
        label = self.label(coded.label if cls is None else cls)
        fixed = _Fixed(self._known(coded), self._kept(mask, picture.shape[:2]))
        return self._finish(self._draw([label], _seeds([seed], 1), sampling, fixed))[0]

    @torch.no_grad()
    def encode(self, pixels: np.ndarray) -> NextScaleImage:
        """A picture as this model's tokens, resized to its size; the pixels come back as decoded.

        Args:
            pixels: uint8 `[h, w, 3]`.

        Raises:
            InvalidRequest: another form of array.
            WeightsError: the weights have no encoder.
        """
        pixels = np.asarray(pixels)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise InvalidRequest(
                f"a picture is uint8 [H, W, 3]; this is {pixels.dtype} {list(pixels.shape)}"
            )
        x = torch.tensor(pixels, device=self.device).permute(2, 0, 1)[None].float() / 127.5 - 1
        x = _resize(x, (self._side, self._side)).clamp(-1, 1)
        f = self.vae.encode(x.to(self.vae.post_quant_conv.weight.dtype)).float()
        maps = self.vae.quantize.tokens(f, self.patch_nums)
        shown = self._pixels(self.vae.quantize.latents(maps, self.patch_nums))
        return NextScaleImage(shown[0], tuple(one[0].cpu() for one in maps), None, None)

    # One drawing

    @torch.no_grad()
    def _draw(
        self, labels: list[int], seeds: list[int], sampling: Sampling, fixed: _Fixed | None = None
    ) -> Iterator[_Drawing]:
        """The same drawing after each scale."""
        drawing = self._begin(labels, seeds, sampling)
        rows = len(labels) * drawing.branches
        with self._cache(self._pool(rows), rows) as cache:
            for scale in range(len(self.patch_nums)):
                self._step(drawing, scale, [cache], fixed)
                yield drawing

    def _begin(self, labels: list[int], seeds: list[int], sampling: Sampling) -> _Drawing:
        nothing = self.var.config.no_class
        guided = sampling.cfg > 0 and any(label != nothing for label in labels)
        rows = labels + [nothing] * len(labels) if guided else labels
        condition = self.var.condition(torch.tensor(rows, device=self.device))
        config, side = self.var.config, self.patch_nums[-1]
        return _Drawing(
            labels,
            seeds,
            [torch.Generator(self.device).manual_seed(seed) for seed in seeds],
            sampling,
            2 if guided else 1,
            condition,
            self.var.start(condition),
            torch.zeros(len(labels), config.latent_channels, side, side, device=self.device),
        )

    def _step(
        self,
        drawing: _Drawing,
        scale: int,
        caches: Sequence[NextScale],
        fixed: _Fixed | None = None,
    ) -> None:
        """Draw one scale of all images."""
        sampling, way = drawing.sampling, ramp(scale, len(self.patch_nums))
        logits = self._run(drawing, scale, caches).float()
        if drawing.branches == 2:
            logits = guide(logits, sampling.cfg * way)
        logits = keep_likely(logits, sampling.top_k, sampling.top_p)
        tokens = draw(logits, drawing.generators)
        shares = mix(logits, way, drawing.generators) if sampling.more_smooth else None
        if fixed is None:
            self._add(drawing, scale, tokens, shares)
            return
        where = fixed.where_BN[scale]
        tokens = torch.where(where, fixed.tokens_BN[scale], tokens)
        if shares is not None:
            given = F.one_hot(tokens, shares.shape[-1]).to(shares.dtype)
            shares = torch.where(where[..., None], given, shares)
        self._add(drawing, scale, tokens, shares)

    def _run(
        self, drawing: _Drawing, scale: int, caches: Sequence[NextScale], store_only: bool = False
    ) -> Tensor:
        """One scale through the transformer: logits `[R, N, V]`."""
        for cache in caches:
            cache.begin(scale)
        scales = CachedScales(caches[0]) if len(caches) == 1 else ForkedScales(caches)
        logits = self.var.predict(drawing.x_RNE, drawing.condition, scales, store_only)
        for cache in caches:
            cache.commit()
        return logits

    def _add(
        self, drawing: _Drawing, scale: int, tokens_BN: Tensor, shares_BNV: Tensor | None = None
    ) -> None:
        """Add a scale's tokens (or mixtures) to the pictures, and prepare the next scale."""
        side, quantize = self.patch_nums[scale], self.vae.quantize
        if shares_BNV is None:
            h = quantize.lookup(tokens_BN, side)
        else:
            h = (shares_BNV @ quantize.embedding.weight).transpose(1, 2).unflatten(2, (side, side))
        drawing.tokens_BN.append(tokens_BN)
        drawing.f_hat_BCYX, seen = quantize.add(drawing.f_hat_BCYX, h, scale, self.patch_nums)
        if seen is not None:
            x = self.var.embed(seen.flatten(2).transpose(1, 2), scale + 1)
            drawing.x_RNE = x.repeat(drawing.branches, 1, 1)

    def _repeat(self, drawing: _Drawing, seeds: list[int]) -> _Drawing:
        """A drawing of one image as one of several, each to go on with its own seed."""
        n = len(seeds)
        old = drawing.condition
        several = [
            x.repeat_interleave(n, 0) for x in (old.class_RE, old.head, *old.blocks)
        ]  # rows stay ordered by branch
        return replace(
            drawing,
            labels=drawing.labels * n,
            seeds=seeds,
            generators=[torch.Generator(self.device).manual_seed(seed) for seed in seeds],
            condition=Condition(several[0], tuple(several[2:]), several[1]),
            x_RNE=drawing.x_RNE.repeat_interleave(n, 0),
            f_hat_BCYX=drawing.f_hat_BCYX.repeat_interleave(n, 0),
            tokens_BN=[tokens.repeat_interleave(n, 0) for tokens in drawing.tokens_BN],
        )

    def _finish(self, drawings: Iterator[_Drawing]) -> list[NextScaleImage]:
        *_, drawing = drawings
        return self._images(drawing, self._pixels(drawing.f_hat_BCYX))

    def _steps(self, drawings: Iterator[_Drawing]) -> Iterator[ScaleStep]:
        for scale, drawing in enumerate(drawings):
            pixels = self._pixels(drawing.f_hat_BCYX)
            last = scale == len(self.patch_nums) - 1
            images = tuple(self._images(drawing, pixels)) if last else ()
            yield ScaleStep(scale, self.patch_nums[scale], pixels, images)

    def _images(self, drawing: _Drawing, pixels: np.ndarray) -> list[NextScaleImage]:
        maps = [tokens.cpu() for tokens in drawing.tokens_BN]
        nothing = self.var.config.no_class
        return [
            NextScaleImage(
                pixels[i], tuple(one[i] for one in maps), None if label == nothing else label, seed
            )
            for i, (label, seed) in enumerate(zip(drawing.labels, drawing.seeds, strict=True))
        ]

    # Bytes and pixels

    def _pool(self, rows: int) -> BlockPool:
        config = self.var.config
        tokens = block_tokens(self.patch_nums, self._store_last)
        spec = KVSpec(config.depth, config.heads, config.head_dim, tokens, self.var.dtype)
        return BlockPool(spec, rows, self.device)

    def _cache(self, pool: BlockPool, rows: int) -> NextScale:
        return NextScale(pool, rows, self.patch_nums, self._store_last)

    @torch.no_grad()
    def _pixels(self, f_hat_BCYX: Tensor) -> np.ndarray:
        """Decoded latents as uint8 `[B, H, W, 3]`."""
        x = self.vae.decode(f_hat_BCYX.to(self.vae.post_quant_conv.weight.dtype)).float()
        x = _resize(x.clamp(-1, 1), (self.config.height, self.config.width))
        x = ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return x.permute(0, 2, 3, 1).cpu().numpy()

    def _kept(self, mask: np.ndarray, size: tuple[int, ...]) -> list[Tensor]:
        """For each scale where tokens are forced, `[1, N]`."""
        mask = np.asarray(mask)
        if mask.shape != size or mask.dtype not in (np.dtype(bool), np.dtype(np.uint8)):
            raise InvalidRequest(
                f"a mask is bool or uint8 {list(size)}, as the image; this is {mask.dtype} "
                f"{list(mask.shape)}"
            )
        drawn = torch.tensor(mask if mask.dtype == bool else mask >= 128, device=self.device)
        shares = [
            F.interpolate(drawn[None, None].float(), (side, side), mode="area").flatten(1)
            for side in self.patch_nums
        ]
        kept = [share < 0.5 for share in shares]
        for i, side in enumerate(self.patch_nums):
            if side * side <= 3:  # as VAR's demo
                kept[i] = torch.ones_like(kept[i])
        if all(bool(one.all()) for one in kept):
            rows, columns = (-(-n // self.patch_nums[-1]) for n in size)
            raise InvalidRequest(
                f"the mask ({int(drawn.sum())} pixels) covers no token: it must hold at least half "
                f"of one, and a token is {rows} x {columns} pixels"
            )
        return kept

    # Requests

    def _labels(self, classes: Class | Sequence[Class]) -> list[int]:
        if classes is None or isinstance(classes, (str, int, np.integer)):
            classes = [classes]
        labels = [self.label(cls) for cls in classes]
        if not labels:
            raise InvalidRequest("classes are empty: at least one is needed")
        return labels

    def _sampling(
        self,
        cfg: float | None,
        top_k: int | None,
        top_p: float | None,
        more_smooth: bool = False,
    ) -> Sampling:
        changes: dict[str, Any] = {"cfg": cfg, "top_k": top_k, "top_p": top_p}
        changes = {key: value for key, value in changes.items() if value is not None}
        smooth = more_smooth or self.config.sampling.more_smooth
        return replace(self.config.sampling, **changes, more_smooth=smooth)

    def _known(self, image: NextScaleImage) -> list[Tensor]:
        """An image's tokens, each `[1, N]` on the device."""
        lengths = [len(tokens) for tokens in image.tokens]
        if lengths != list(self.var.config.lengths):
            raise InvalidRequest(
                f"the image has token maps of {lengths}; this model's are of "
                f"{list(self.var.config.lengths)}"
            )
        return [tokens.to(self.device)[None] for tokens in image.tokens]

    def _find(self, name: str) -> int:
        wanted = _plain(name)
        whole = [i for i, one in enumerate(self.classes) if _plain(one) == wanted]
        parts = [
            i
            for i, one in enumerate(self.classes)
            if wanted in [_plain(part) for part in one.split(",")]
        ]
        found = whole or parts
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{self.classes[i]!r} ({i})" for i in found[:4])
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            raise InvalidRequest(f"class {name!r} fits several: {several}{more}; name one")
        plain = {_plain(one): one for one in self.classes}
        close = [plain[one] for one in difflib.get_close_matches(wanted, plain, 3, 0.5)]
        hint = "close are" if close else f"there are {len(self.classes)}, such as"
        shown = ", ".join(repr(one) for one in close or self.classes[:4])
        raise InvalidRequest(f"class {name!r} is unknown: {hint} {shown}")


def _plain(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return "".join(c for c in name.casefold() if c.isalnum())


def _seeds(seeds: int | Sequence[int] | None, images: int) -> list[int]:
    if seeds is None or isinstance(seeds, (int, np.integer)):
        first = 0 if seeds is None else int(seeds)
        several: Sequence[int] = range(first, first + images)
    elif len(seeds) == images:
        several = seeds
    else:
        raise InvalidRequest(f"{len(seeds)} seeds for {images} images: one each, or one number")
    for seed in several:
        if int(seed) != seed or not 0 <= seed < 2**64:
            raise InvalidRequest(f"seed {seed}: accepted are whole numbers from 0 to 2**64 - 1")
    return [int(seed) for seed in several]


def _resize(x_B3HW: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(x_B3HW.shape[2:]) == size:
        return x_B3HW
    return F.interpolate(x_B3HW, size, mode="bicubic", antialias=True)


def _is_file(var: str | Path) -> bool:
    """Whether `var=` names a weights file rather than a model folder, a packaged or a hub model."""
    path = Path(var)
    return path.is_file() or path.suffix in (".pth", ".pt", ".safetensors", ".bin")


def _is_model(folder: Path) -> bool:
    """Whether a folder without checksums is one that `save_pretrained` wrote."""
    return all((folder / name).is_file() for name in ("config.json", *WEIGHTS))


def _class_names(classes: Sequence[str] | str | Path) -> tuple[str, ...]:
    """Names as given, or those in a file: a JSON list, or one a line."""
    if not isinstance(classes, (str, Path)):
        return tuple(classes)
    try:
        text = Path(classes).read_text(encoding="utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"classes={str(classes)!r} can't be read: {error}") from error
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"classes={str(classes)!r}: a list of names is needed")
    return tuple(name.strip() for name in names if name.strip())


def _read_config(folder: Path) -> tuple[ImageConfig, list[int] | None]:
    """The config of a model folder, and the sides of its token maps if it tells them."""
    raw = read_config(folder, "image")
    try:
        known = {entry.name for entry in fields(ImageConfig)}
        values = {key: value for key, value in raw.items() if key in known}
        values["classes"] = tuple(values.get("classes", ()))
        values["sampling"] = Sampling(**values.get("sampling", {}))
        return ImageConfig(**values), raw.get("patch_nums")
    except (TypeError, ValueError) as error:
        raise WeightsError(f"config.json of {folder.name!r} does not fit: {error}") from error
