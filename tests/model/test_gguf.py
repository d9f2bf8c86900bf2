"""Exports as GGUF files: their header and tokenizer, what is refused, and the probabilities that llama.cpp computes."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from click.testing import CliRunner
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from swarmnode.app.cli.export import command
from swarmnode.base.errors import UsageError
from swarmnode.model.export import write_model
from swarmnode.model.export_tokenizer import byte_tokenizer
from swarmnode.model.gguf_file import check_gguf, write_gguf
from swarmnode.model.gguf_tokenizer import LLAMA3, QWEN2, gguf_tokenizer
from swarmnode.model.split import parameter_shapes, split
from swarmnode.run.manifest import Manifest, ModelSpec
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.llama_cpp import llama_cpp

pytestmark = pytest.mark.node  # seconds to import transformers
gguf = pytest.importorskip("gguf")

TINY = PRESETS["tiny"]
BASE = replace(TINY.model, layers=4, width=64, heads=4, kv_heads=2, ffn=96, context=128)
LLAMA3_ROPE = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 16}
APART_MAX = 1e-4  # measured: 8e-6 at most
TEXTS = [
    "It was dark, and the river ran: 123 boats!",
    "\tdef f(x):\n\n    return x['a']  # I'm, you'LL\r\n",
    "café éß Ā 中文字符 \U0001f680\u200d\U0001f32b️ наука ١٢٣ 12345 3.14",
    "a  b   c\n \n  \n<|endoftext|>x",
    "",
]


def own_bpe(path: Path, *before: Any, by_regex: bool = True, vocabulary: int = 400, **parts: Any) -> Path:
    """A byte-level BPE of TEXTS, whose texts are divided by `before` first."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=parts.get("ignore_merges", False)))
    level = pre_tokenizers.ByteLevel(add_prefix_space=parts.get("space", False), use_regex=by_regex)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS * 40, trainer)
    if parts.get("bos"):
        inner.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 1)]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    inner.save(str(path))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|bos|>"}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def weights(model: ModelSpec) -> dict[str, Tensor]:
    shapes = parameter_shapes(model, split(model, 1)[0])
    chance = torch.Generator().manual_seed(3)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=chance)
        return 1.0 + 0.2 * noise if len(shape) == 1 and "bias" not in name else 0.15 * noise

    return {name: drawn(name, shape) for name, shape in shapes.items()}


def run_of(model: ModelSpec, tokenizer: Path | None) -> Manifest:
    data = replace(TINY.data, tokenizer="bytes" if tokenizer is None else "tokenizer.json", end_token=-1)
    return replace(TINY, model=model, data=data, pipeline=replace(TINY.pipeline, stages=1))


def made(folder: Path, model: ModelSpec, tokenizer: Path | None = None) -> Path:
    """A model in `folder` as Hugging Face's and, whose path is returned, as one GGUF file."""
    if tokenizer is not None:
        inner = tokenizers.Tokenizer.from_file(str(tokenizer))
        model = replace(model, vocabulary=inner.get_vocab_size())
    run = run_of(model, tokenizer)
    beside = (
        {} if tokenizer is None else {each.name: each.read_bytes() for each in tokenizer.parent.glob("*_config.json")}
    )
    write_model(weights(model), run, folder, tokenizer, None, beside)
    files = {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix != ".safetensors"}
    path = folder.with_suffix(".gguf")
    write_gguf(weights(model), run, path, files)
    return path


def field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def test_a_byte_models_file_has_its_tokens_and_says_which_one_ends_a_text(tmp_path: Path) -> None:
    path = made(tmp_path / "bytes", replace(BASE, tied=True))
    reader = gguf.GGUFReader(path)
    assert field(reader, "general.architecture") == "llama" and field(reader, "llama.context_length") == 128
    assert len(field(reader, "tokenizer.ggml.tokens")) == 256 and field(reader, "tokenizer.ggml.pre") == "gpt-2"
    assert [field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "padding")] == [0, 0]
    assert field(reader, "tokenizer.ggml.add_bos_token") is False
    names = {tensor.name for tensor in reader.tensors}
    assert "token_embd.weight" in names and "output.weight" not in names and "blk.3.ffn_down.weight" in names
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("before", "how", "pre"),
    [
        ((), {}, "gpt-2"),
        ((pre_tokenizers.Digits(individual_digits=True),), {}, "smollm"),
        ((split_by(QWEN2),), {"by_regex": False}, "qwen2"),
        ((split_by(LLAMA3),), {"by_regex": False, "ignore_merges": True}, "llama-bpe"),
        ((split_by(LLAMA3),), {"by_regex": False}, "dbrx"),
    ],
)
def test_the_pre_tokenizer_has_llama_cpps_name(tmp_path: Path, before: tuple[Any, ...], how: Any, pre: str) -> None:
    path = made(tmp_path / "out", BASE, own_bpe(tmp_path / "own" / "tokenizer.json", *before, bos=True, **how))
    reader = gguf.GGUFReader(path)
    assert field(reader, "tokenizer.ggml.pre") == pre
    assert field(reader, "tokenizer.ggml.add_bos_token") is True and field(reader, "tokenizer.ggml.bos_token_id") == 1
    kinds = field(reader, "tokenizer.ggml.token_type")
    assert kinds[:3] == [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]


def test_a_templates_own_end_of_an_answer_ends_what_llama_cpp_generates(tmp_path: Path) -> None:
    """xllamacpp 2026.10.11549 stops at <|im_end|> by its name. At <|over|> it goes on unless the file names it."""
    path = own_bpe(tmp_path / "own" / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<|over|>", "<|called|>"])
    inner.save(str(path))
    over = inner.get_vocab()["<|over|>"]
    (path.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, over, over + 1]}))
    reader = gguf.GGUFReader(made(tmp_path / "out", BASE, path))
    assert [field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")] == [0, over, over + 1]


REFUSED_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "not byte-level BPE": lambda tree: tree["model"].update(type="Unigram"),
    "SentencePiece": lambda tree: tree["model"].update(byte_fallback=True),
    "byte-level BPE alone": lambda tree: tree.update(normalizer={"type": "Lowercase"}),
    "end_of_word_suffix": lambda tree: tree["model"].update(end_of_word_suffix="</w>"),
    "puts a space before": lambda tree: tree["pre_tokenizer"].update(add_prefix_space=True),
    "divides texts": lambda tree: tree["model"].update(merges=["a b"], vocab={**tree["model"]["vocab"], "ab": 256}),
    "bytes have no token": lambda tree: tree["model"].update(vocab={"a": 97, "b": 98}),
    "has rstrip, which": lambda tree: tree["added_tokens"][0].update(rstrip=True),
    "has single_word, which": lambda tree: tree["added_tokens"][0].update(single_word=True),
    "it has 300 tokens": lambda tree: tree["added_tokens"].append(
        {**tree["added_tokens"][0], "id": 299, "content": "x"}
    ),
}


@pytest.mark.parametrize("why", REFUSED_TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_refused_in_one_line(why: str) -> None:
    tree: dict[str, Any] = json.loads(json.dumps(byte_tokenizer()))
    REFUSED_TOKENIZERS[why](tree)
    with pytest.raises(UsageError, match=why) as refusal:
        gguf_tokenizer(tree, {}, {}, 257)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sliding_window": 16}, "sliding_window"),
        ({"qkv_bias": True, "head_width": 24}, "head_width"),
        ({"qk_norm": "head", "qkv_bias": True, "output_bias": True}, "qkv_bias"),
        ({"qk_norm": "whole", "norm_placement": "post", "head_width": 24}, "head_width"),
        ({"tied": True, "unrotated_layers": (1, 3)}, "every fourth"),
        ({"experts": 4, "experts_active": 2, "expert_ffn": 24, "qk_norm": "whole"}, "kv_heads"),
        (
            {"experts": 4, "experts_active": 2, "expert_ffn": 24, "qk_norm": "head", "dense_layers": (0,)},
            "dense_layers|router_normalised",
        ),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_gguf(run_of(replace(BASE, **changed), None))


def test_export_writes_a_gguf_file_beside_a_folder_or_alone(tmp_path: Path) -> None:
    write_model(weights(BASE), run_of(BASE, None), tmp_path / "model")
    alone = CliRunner().invoke(command, [str(tmp_path / "model"), "--gguf", str(tmp_path / "one.gguf")])
    assert alone.exit_code == 0 and alone.stdout.strip() == str(tmp_path / "one.gguf"), alone.output
    given = ["--out", str(tmp_path / "again"), "--gguf", str(tmp_path / "two.gguf"), "--json"]
    both = CliRunner().invoke(command, [str(tmp_path / "model"), *given])
    told = json.loads(both.stdout)
    assert (told["model"], told["gguf"]) == (str(tmp_path / "again"), str(tmp_path / "two.gguf"))
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    neither = CliRunner().invoke(command, [str(tmp_path / "model")])
    assert neither.exit_code == 2 and "--out or --gguf" in neither.output


def moe(**more: Any) -> dict[str, Any]:
    return {"experts": 4, "experts_active": 2, "expert_ffn": 24, **more}


OWN = "own BPE"
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama, bytes": ({}, "bytes"),
    "llama, own BPE, tied": ({"tied": True}, OWN),
    "llama, biases, wide heads": ({"qkv_bias": True, "output_bias": True, "head_width": 24}, OWN),
    "llama 3.1": ({**LLAMA3_ROPE, "rope_theta": 500000.0}, "llama3"),
    "llama, yarn": ({"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 32, "rope_high": 32.0}, OWN),
    "llama, linear rope": ({"rope_scaling": "linear", "rope_factor": 4.0}, OWN),
    "mistral": ({"sliding_window": 128}, OWN),
    "qwen2": ({"qkv_bias": True}, "qwen2"),
    "qwen3, wide heads": ({"qk_norm": "head", "head_width": 24}, "qwen2"),
    "smollm3": ({"tied": True, "unrotated_layers": (3,)}, "smollm"),
    "olmo2, tied": ({"qk_norm": "whole", "norm_placement": "post", "tied": True}, OWN),
    "mixtral": (moe(router_normalised=True, router_balance=0.02), OWN),
    "qwen3_moe": (moe(qk_norm="head", router_normalised=True), "bytes"),
    "qwen2_moe": (moe(qkv_bias=True, shared_expert_ffn=40), OWN),
    "olmoe": (moe(qk_norm="whole", kv_heads=4, router_balance=0.01), OWN),
}


def tokenizer_of(kind: str, folder: Path) -> Path | None:
    path = folder / kind / "tokenizer.json"
    match kind:
        case "bytes":
            return None
        case "smollm":
            return own_bpe(path, pre_tokenizers.Digits(individual_digits=True))
        case "qwen2":
            found = own_bpe(path, split_by(QWEN2), by_regex=False)
            inner = tokenizers.Tokenizer.from_file(str(found))
            inner.normalizer = normalizers.NFC()
            inner.save(str(found))
            return found
        case "llama3":
            return own_bpe(path, split_by(LLAMA3), by_regex=False, ignore_merges=True, bos=True)
    return own_bpe(path)


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp, llama.cpp in Python, is missing")
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_transformers_ids_and_probabilities(tmp_path: Path, name: str) -> None:
    changed, kind = MODELS[name]
    path = made(tmp_path / "out", replace(BASE, **changed), tokenizer_of(kind, tmp_path))
    equal_in_llama_cpp(tmp_path / "out", path)


def equal_in_llama_cpp(folder: Path, path: Path) -> None:
    """Assert that llama.cpp with `path` gives the ids and probabilities of transformers with `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    prompts = [each[:60] for each in ids if each]
    made_ids, told = llama_cpp(path, TEXTS, prompts)
    assert made_ids == ids
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert sum(map(bool, told)) >= 2, "the end of the text is seldom the most likely"
    for prompt, top in zip(prompts, told, strict=True):
        if not top:
            continue
        with torch.no_grad():
            wanted = net(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert len(top) == 40
        apart = max(abs(found - float(wanted[index])) for index, found in top.items())
        assert apart < APART_MAX, f"{apart} nats apart"
