"""A random Llama of 40,000 parameters in the form of Hugging Face: to try the example's steps within a minute.

python tiny.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.model.export_tokenizer import byte_tokenizer

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
(folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
