"""Tiny models as transformers publishes them: config.json, tokenizer.json, safetensors in one file or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swarmnode.app.local.pretrained import FolderFiles, Pretrained, pretrained
from swarmnode.model.export_tokenizer import byte_tokenizer
from swarmnode.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCABULARY = 256


def llama(
    folder: Path,
    *,
    tied: bool = True,
    layers: int = 3,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> LlamaForCausalLM:
    """A random Llama in `folder`, whose larger files are cut at `shard`."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which those who only collect tests need not pay

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, **more}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **sizes,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return model


def start_from(folder: Path, start: Manifest, *, context: int = 16, **more: Any) -> Pretrained:
    """The run that `init --from` makes of the model in `folder`."""
    given = {"name": folder.name, "locations": (), "data": None, "samples": None, **more}
    return pretrained(FolderFiles(folder), start, context=context, report=lambda done, of: None, **given)
