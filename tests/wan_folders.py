"""A tiny Wan2.1 folder in diffusers' layout: real files of every part, random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from videos import tiny_dit, tiny_vae
from worlds import randomise

from streamgen.models.wan import WanConfig, WanModel
from streamgen.weights.keymaps import to_diffusers

SHAPE = WanConfig(
    dim=48,
    ffn_dim=64,
    num_heads=2,
    num_layers=2,
    text_dim=16,
    text_len=512,
    freq_dim=32,
)
WORDS = "a red brick maze in heavy snow at night over the lake with birds".split()


def wan_folder(folder: Path, channels: int = 16, text_dim: int = 16) -> Path:
    """Write it; the transformer takes 16 channels, the autoencoder and the text as told."""
    _json(folder / "model_index.json", {"_class_name": "WanPipeline"})
    _json(
        folder / "transformer" / "config.json",
        {
            "_class_name": "WanTransformer3DModel",
            "num_attention_heads": SHAPE.num_heads,
            "attention_head_dim": SHAPE.head_dim,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 16,
            "freq_dim": SHAPE.freq_dim,
            "ffn_dim": SHAPE.ffn_dim,
            "num_layers": SHAPE.num_layers,
            "patch_size": [1, 2, 2],
            "eps": 1e-6,
        },
    )
    tensors = {to_diffusers(k): v.clone() for k, v in tiny_dit(SHAPE).state_dict().items()}
    save_file(tensors, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    tiny_vae(channels).save_pretrained(folder / "vae")
    _text_encoder(folder, text_dim)
    return folder


def self_forcing(path: Path, seed: int) -> WanModel:
    """A causal checkpoint as Self-Forcing publishes it, with other weights, and the model."""
    torch.manual_seed(seed)
    dit = WanModel(SHAPE)
    randomise(dit)
    state = {f"model._fsdp_wrapped_module.{k}": v for k, v in dit.state_dict().items()}
    plain = {k: v + 1 for k, v in state.items()}
    torch.save({"generator": plain, "generator_ema": state, "critic": {}}, path)
    return dit.eval().requires_grad_(False)


def _text_encoder(folder: Path, dim: int) -> None:
    transformers = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    config = transformers.UMT5Config(
        vocab_size=40, d_model=dim, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    torch.manual_seed(4)
    encoder: nn.Module = transformers.UMT5EncoderModel(config)
    for parameter in encoder.parameters():
        parameter.data.normal_(std=0.5)
    encoder.save_pretrained(folder / "text_encoder")
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    (folder / "tokenizer").mkdir()
    made.save(str(folder / "tokenizer" / "tokenizer.json"))


def _json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
