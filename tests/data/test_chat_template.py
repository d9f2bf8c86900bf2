"""Conversations give the ids and masks that transformers gives them, whatever template and tokenizer they meet."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from swarmnode.base.errors import DataError
from swarmnode.data.chat_template import (
    ChatTemplate,
    Conversation,
    conversation,
    tokenizer_and_template,
)
from swarmnode.data.root import DataRoot
from swarmnode.data.tokenizer_file import files_beside, stops_of
from swarmnode.data.tokens import ByteTokenizer, Tokenizer, huggingface_tokenizer, open_tokenizer

pytestmark = pytest.mark.node  # some seconds

TEXT = 'a small boat went down the river, and the rain fell: 1 2 3? <b> {it\'s} "so" & on; user assistant system\n' * 30
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[INST]", "[/INST]"]

# Templates in the forms that families of models publish, written here with marks around what the model generates, up to
# the end of its turn: transformers' own mask is then what the same template without marks must give.
G = "{% generation %}"
E = "{% endgeneration %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def family_of(head: str, answer: str, other: str, begin: str = "", prompt: str = PROMPT, mid: str = "") -> str:
    """A template that writes `begin`, and for each message `head` and `answer` or `other`."""
    each = f"{head}{{% if m.role == 'assistant' %}}{G}{answer}{E}{mid}{{% else %}}{other}{{% endif %}}"
    return f"{begin}{{% for m in messages %}}{each}{{% endfor %}}{prompt}"


BOS = "{{ bos_token }}"
PIPED = "{{ '<|' + m.role + '|>\n' }}"
ASKED = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
FAMILIES = {
    "chatml": family_of(TURN, "{{ m.content + '<|im_end|>\n' }}", "{{ m.content + '<|im_end|>\n' }}"),
    "llama2": family_of(
        "",
        "{{ ' ' + m.content | trim + ' ' + eos_token }}",
        "{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}",
        prompt="",
    ),
    "llama3": family_of(
        "{{ '<|im_start|>' + m.role + '<|im_end|>\n\n' }}",
        "{{ m.content | trim + '<|eot|>' }}",
        "{{ m.content | trim + '<|eot|>' }}",
        BOS,
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\n\n' }}{% endif %}",
    ),
    "mistral": family_of(
        "", "{{ ' ' + m.content + eos_token }}", "{{ '[INST] ' + m.content + '[/INST]' }}", BOS, prompt=""
    ),
    "zephyr": family_of(
        PIPED, "{{ m.content + eos_token + '\n' }}", "{{ m.content + eos_token + '\n' }}", prompt=ASKED
    ),
    "gemma": family_of(
        "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}",
        "{{ m.content | trim + '<|im_end|>\n' }}",
        "{{ m.content | trim + '<|im_end|>\n' }}",
        BOS,
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
    ),
    # Thoughts of earlier turns are dropped, so that each further question changes what came before it.
    "qwen, thinking": family_of(
        TURN,
        "{% if m.reasoning_content and loop.index0 > ns.last %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}",
        "{{ m.content + '<|im_end|>\n' }}",
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
    ),
    "olmo2": family_of(
        PIPED,
        "{{ m.content + eos_token }}",
        "{{ m.content + '\n' }}",
        BOS,
        ASKED,
        "{% if not loop.last %}{{ '\n' }}{% endif %}",
    ),
    "smollm3": family_of(
        TURN,
        "{{ (m.content if m.content is string else '') }}{% for call in m.tool_calls or [] %}"
        "{{ '<tool>' + call.function | tojson + '</tool>' }}{% endfor %}{{ '<|im_end|>\n' }}",
        "{{ m.content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>system\nmode: ' + ('tools' if tools else 'plain') + '<|im_end|>\n' }}",
    ),
    "deepseek": family_of(
        "{% if m.role == 'assistant' %}{{ 'Assistant:' }}{% endif %}",
        "{{ ' ' + (m.content.split('</think>') | last) + eos_token }}",
        "{{ 'User: ' + m.content + '\n\n' }}",
        BOS,
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    ),
}


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], train)
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def sentence_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXT.split(" "), trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    return made


def word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    train = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([TEXT], train)
    return made


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    train = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(TEXT.split("\n"), train)
    return made


def added() -> tokenizers.Tokenizer:
    """One with tokens that were added later, and are not special."""
    made = byte_level()
    made.add_tokens(["<think>", "</think>", "river"])
    return made


def ignore_merges() -> tokenizers.Tokenizer:
    """Byte-level BPE that looks whole words up before it merges, as Llama 3 does."""
    tree = json.loads(byte_level().to_str())
    tree["model"]["ignore_merges"] = True
    tree["pre_tokenizer"]["use_regex"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def word_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    train = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([TEXT], train)
    return made


KINDS = {
    "byte-level": byte_level,
    "SentencePiece": sentence_piece,
    "WordPiece": word_piece,
    "Unigram": unigram,
    "added": added,
}
PLAIN_KINDS = {"ignore_merges": ignore_merges, "WordLevel": word_level}


@functools.cache
def trained(kind: str) -> str:
    """A tokenizer.json; some trainings are by lot."""
    return str((KINDS | PLAIN_KINDS)[kind]().to_str())


def save(folder: Path, kind: str, template: Any = None, **config: Any) -> Path:
    """A model's folder with a tokenizer of `kind`; returns its tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(trained(kind))
    tree = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tree |= {"clean_up_tokenization_spaces": False} | config
    if template is not None:
        tree["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))
    return folder / "tokenizer.json"


def opened(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer, _, template = tokenizer_and_template(path, open_tokenizer(path.name, DataRoot(path.parent)))
    return tokenizer, template


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def unmarked(template: str) -> str:
    return template.replace(G, "").replace(E, "")


def spoken(messages: list[dict[str, Any]], tools: Any = None) -> Conversation:
    made = conversation(messages, tools)
    assert made is not None
    return made


@functools.cache
def family(root: Path, kind: str, name: str) -> tuple[Tokenizer, ChatTemplate, ChatTemplate, Any]:
    """(tokenizer, template without marks, with marks, transformers' tokenizer with marks)."""
    marked = save(root / f"{kind} {name}", kind, FAMILIES[name])
    plain = save(root / f"{kind} {name} plain", kind, unmarked(FAMILIES[name]))
    tokenizer, template = opened(plain)
    return tokenizer, template, opened(marked)[1], theirs(marked.parent)


# Words of the tokenizers' alphabet and beyond, without space at their ends: of that transformers keeps no account.
WORD = st.text(st.sampled_from("abehinorstuw ,.?<>{}'\"&12\nßé日🚣"), min_size=1, max_size=24).map(str.strip)
SAID = WORD.filter(bool) | st.sampled_from(["river", "</s>", "<|im_end|>", "user\nassistant", "a </think> b"])
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": {"where": "Zürich & Genève's"}}}


CALLING = ("smollm3",)
"""Families whose templates write calls of tools."""


@st.composite
def conversations(draw: st.DrawFn, calls: bool = False) -> list[dict[str, Any]]:
    """Turns of user and assistant, the assistant last; a system message, thoughts and `calls` of tools at times."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(SAID)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(SAID)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(SAID)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(SAID)
        if calls and draw(st.integers(0, 3)) == 0:
            answer["tool_calls"] = [CALL]
        messages.append(answer)
    return messages


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ids_and_masks_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp()
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    messages = data.draw(conversations(name in CALLING))
    tokenizer, plain, marked, hub = family(root, kind, name)
    wanted = hub.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    _, ids, mask = marked.encode(spoken(messages), tokenizer)
    assert (ids.tolist(), mask.tolist()) == (wanted["input_ids"], wanted["assistant_masks"]), "with marks"
    text, ids, mask = plain.encode(spoken(messages), tokenizer)
    assert ids.tolist() == wanted["input_ids"] and text == hub.apply_chat_template(messages, tokenize=False)
    same = overlapping(hub, messages, text) if kind == "WordPiece" else wanted["assistant_masks"]
    assert mask.tolist() == same, f"without marks: {text!r}"


def overlapping(hub: Any, messages: list[dict[str, Any]], text: str) -> list[int]:
    """The mask of the tokens that have a character of what the template marks as generated. transformers' own counts
    all that follows where a mark ends with a character that no token has, as WordPiece's newlines."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _, (spans,) = render_jinja_template(
        [messages], chat_template=hub.chat_template, return_assistant_tokens_mask=True, **hub.special_tokens_map
    )
    offsets = hub(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [int(any(first < end and start < last for start, end in spans)) for first, last in offsets]


def asked(call: Any, **more: Any) -> list[dict[str, Any]]:
    """A conversation in which the assistant calls a tool and then answers."""
    return [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", **call},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "so", **more},
    ]


@pytest.mark.parametrize("parts", [False, True])
def test_arguments_in_json_are_rendered_as_the_object_that_they_say(tmp_path: Path, parts: bool) -> None:
    """OpenAI's form has a JSON text there, transformers' an object (its page on tool use); vLLM turns one into the
    other before it renders a prompt."""
    tokenizer, template = opened(save(tmp_path / "model", "byte-level", unmarked(FAMILIES["smollm3"])))
    messages = [asked({"tool_calls": [{"function": {"name": "rain", "arguments": each}}]})
                for each in ({"where": "Genève", "at": [1, 2]}, '{"where":"Genève",  "at": [1,2]}')]  # fmt: skip
    for talk in messages if parts else ():
        talk[0]["content"] = [{"type": "text", "text": "rain?"}]
    text, ids, mask = template.encode(spoken(messages[0]), tokenizer)
    assert '{"name": "rain", "arguments": {"where": "Genève", "at": [1, 2]}}' in text
    theirs, their_ids, their_mask = template.encode(spoken(messages[1]), tokenizer)
    assert (theirs, their_ids.tolist(), their_mask.tolist()) == (text, ids.tolist(), mask.tolist())


@pytest.mark.parametrize("write", ["'<tool>' + call.function.arguments", "'<tool>' ~ call.function.arguments"])
def test_a_template_that_takes_arguments_as_text_gets_them_so(tmp_path: Path, write: str) -> None:
    """DeepSeek V3's template adds them to a text, which fails for an object; others print it as Python does."""
    source = unmarked(FAMILIES["smollm3"]).replace("'<tool>' + call.function | tojson", f"call.function.name + {write}")
    tokenizer, template = opened(save(tmp_path / "model", "byte-level", source))
    given = asked({"tool_calls": [{"function": {"name": "rain", "arguments": '{"where":"Ulm"}'}}]})
    assert 'rain<tool>{"where":"Ulm"}' in template.encode(spoken(given), tokenizer)[0]


@pytest.mark.parametrize("call", [
    {"tool_calls": [CALL]},
    {"function_call": {"name": "rain", "arguments": "{}"}},
])  # fmt: skip
def test_a_call_that_the_template_does_not_write_is_refused(tmp_path: Path, call: dict[str, Any]) -> None:
    """It would leave an answer without text, and train on that."""
    tokenizer, template = opened(save(tmp_path / "model", "byte-level", unmarked(FAMILIES["llama3"])))
    for renders, tokens in ((template, tokenizer), (ChatTemplate(), ByteTokenizer())):
        with pytest.raises(DataError, match="writes no calls of tools, and message 2 has one"):
            renders.encode(spoken(asked(call)), tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_weight_0_does_not_count(tmp_path: Path, name: str) -> None:
    """OpenAI's and Mistral's files for tuning say so of single answers."""
    plain: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the boat"},
             {"role": "user", "content": "b"}, {"role": "assistant", "content": "the river"}]  # fmt: skip
    weighed = [*plain[:1], plain[1] | {"weight": 0}, *plain[2:3], plain[3] | {"weight": 1}]
    for source in (FAMILIES[name], unmarked(FAMILIES[name])):
        tokenizer, template = opened(save(tmp_path / "model", "byte-level", source))
        text, ids, mask = template.encode(spoken(plain), tokenizer)
        same, same_ids, less = template.encode(spoken(weighed), tokenizer)
        assert (same, same_ids.tolist()) == (text, ids.tolist())
        counted, left = (tokenizer.decode(ids[each.astype(bool)]) for each in (mask, less))
        assert "boat" in counted and "river" in counted
        assert "boat" not in left and counted.endswith(left) and "river" in left
        with pytest.raises(DataError, match="the weight 0.5; known are 0"):
            template.encode(spoken([*plain[:3], {**plain[3], "weight": 0.5}]), tokenizer)


@settings(max_examples=100, deadline=None)
@given(conversations(), st.text(max_size=20))
def test_bytes_are_rendered_as_chatml(messages: list[dict[str, Any]], more: str) -> None:
    messages[-1]["content"] += more.encode(errors="replace").decode().replace("\0", "")
    text, ids, mask = ChatTemplate().encode(spoken(messages), ByteTokenizer())
    raw = bytes(ids.tolist())
    assert raw.decode() == text
    said = bytes(byte for byte, counts in zip(raw, mask, strict=True) if counts).decode()
    assert said == "".join(m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


BLANK = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is string else '' }}</s>{% endfor %}"


@pytest.mark.parametrize("name", [*FAMILIES, "blank"])
def test_a_template_that_knows_texts_alone_gets_the_texts_of_parts(tmp_path: Path, name: str) -> None:
    """jinja2 3.1.6 prints a list of parts as Python does where a template trims it, and Qwen3's has "" for them."""
    tokenizer, template = opened(save(tmp_path, "byte-level", unmarked(FAMILIES.get(name, BLANK))))
    said: list[dict[str, Any]] = [{"role": "user", "content": "Is it wet?"}, {"role": "assistant", "content": "Y"}]
    given: list[dict[str, Any]] = [
        {**said[0], "content": parts("Is it", " wet?")},
        {**said[1], "content": parts("Y")},
    ]
    made, wanted = (template.encode(each, tokenizer) for each in (spoken(given), spoken(said)))
    assert made[0] == wanted[0] and made[1].tolist() == wanted[1].tolist() and made[2].tolist() == wanted[2].tolist()


def test_parts_that_a_template_writes_as_python_does_are_refused(tmp_path: Path) -> None:
    tokenizer, template = opened(save(tmp_path, "byte-level", unmarked(FAMILIES["llama3"])))
    talk = spoken([{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "A"}])
    with pytest.raises(DataError, match="takes texts alone"):
        template.encode(talk, tokenizer)


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    own = unmarked(FAMILIES["zephyr"])
    talk = spoken([{"role": "user", "content": "a boat"}, {"role": "assistant", "content": "the river"}])
    for how in ("config", "jinja", "list", "none"):
        path = save(tmp_path / how, "byte-level", own if how == "config" else None)
        config = json.loads((tmp_path / how / "tokenizer_config.json").read_text())
        if how == "jinja":
            (tmp_path / how / "chat_template.jinja").write_text(own)
        if how == "list":
            config["chat_template"] = [
                {"name": "default", "template": own},
                {"name": "tool_use", "template": "T" + own},
            ]
            (tmp_path / how / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer, template = opened(path)
        text, _, _ = template.encode(talk, tokenizer)
        assert text.startswith("<|user|>\n" if how != "none" else "<|im_start|>user\n")
        if how == "list":
            with_tools = spoken([dict(one) for one in talk], tools=[{"type": "function", "function": {"name": "rain"}}])
            assert template.encode(with_tools, tokenizer)[0].startswith("T<|user|>")


def test_classes_of_transformers_read_a_tokenizer_their_own_way(tmp_path: Path) -> None:
    """LlamaTokenizer builds its tokenizer anew, whatever tokenizer.json says of spaces."""
    path = save(tmp_path / "llama", "SentencePiece", FAMILIES["chatml"], tokenizer_class="LlamaTokenizerFast")
    raw = path.read_bytes()
    tokenizer, kept, template = tokenizer_and_template(path, huggingface_tokenizer(raw, "x", "</s>"))
    for text in ("hello </s> river", " a  b", "<s>x"):
        assert tokenizer.encode(text).tolist() == theirs(path.parent)(text, add_special_tokens=False)["input_ids"]
    assert kept is not None and kept != raw, "the data set keeps what transformers reads"
    out = tmp_path / "set"
    out.mkdir()
    for name, data in files_beside(path, kept, template, tokenizer, rendered=True).items():
        (out / name).write_bytes(data)
    again, more, _ = tokenizer_and_template(out / "tokenizer.json", open_tokenizer("tokenizer.json", DataRoot(out)))
    assert again.digest == tokenizer.digest and more == kept, "and reads it again alike"


def test_ends_go_along(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "byte-level", unmarked(FAMILIES["llama3"]))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 3, "top_p": 0.9}')
    tokenizer, raw, template = tokenizer_and_template(path, open_tokenizer(path.name, DataRoot(path.parent)))
    assert raw is not None
    files = files_beside(path, raw, template, tokenizer, rendered=False)
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [3, 2, 6], "top_p": 0.9}
    (tmp_path / "model" / "generation_config.json").write_bytes(files["generation_config.json"])
    assert stops_of(tokenizer, path) == {2, 3, 6}
    assert tokenizer_and_template(path, tokenizer)[2].ends(tokenizer) == [2, 6], "the end of text, and of an answer"


def test_ends_are_the_models_own(tmp_path: Path) -> None:
    """Where the tokenizer's configuration names none, that of the model does, by one id or several."""
    for name, ids, first in (("generation_config.json", [6, 2], 6), ("config.json", 5, 5)):
        path = save(tmp_path / name, "byte-level", eos_token=None)
        (tmp_path / name / name).write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}))
        tokenizer, _ = opened(path)
        assert (tokenizer.separator, stops_of(tokenizer, path)) == (first, set(ids if isinstance(ids, list) else [ids]))


def test_a_processors_template_is_the_models(tmp_path: Path) -> None:
    path = save(tmp_path / "model", "byte-level")
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": unmarked(FAMILIES["zephyr"])}))
    tokenizer, raw, template = tokenizer_and_template(path, open_tokenizer(path.name, DataRoot(path.parent)))
    assert raw is not None
    for name, data in files_beside(path, raw, template, tokenizer, rendered=True).items():
        (tmp_path / name).write_bytes(data)
    assert theirs(tmp_path).chat_template == unmarked(FAMILIES["zephyr"]), "an export has it where all find it"


def test_without_a_template_a_set_of_conversations_shows_chatml(tmp_path: Path) -> None:
    path = save(tmp_path, "byte-level")
    tokenizer, raw, template = tokenizer_and_template(path, open_tokenizer(path.name, DataRoot(path.parent)))
    assert raw is not None
    for rendered in (False, True):
        config = json.loads(files_beside(path, raw, template, tokenizer, rendered=rendered)["tokenizer_config.json"])
        assert ("chat_template" in config) is rendered


@pytest.mark.parametrize("kind", [*KINDS, *PLAIN_KINDS])
def test_written_special_tokens_are_text(tmp_path: Path, kind: str) -> None:
    """As sentencepiece 0.2.2 has it: the text `</s>` becomes pieces of text, never the token 2."""
    path = save(tmp_path, kind)
    tokenizer = open_tokenizer(path.name, DataRoot(tmp_path))
    for name in SPECIAL[2:6]:
        number = SPECIAL.index(name)
        (plain,) = tokenizer.encode_all([f"a {name} rain"])
        (special,) = tokenizer.encode_all([f"a {name} rain"], special=True)
        assert number not in plain.tolist() and number in special.tolist()
        assert number not in tokenizer.encode_all([name])[0].tolist()
        if kind in ("byte-level", "SentencePiece", "added", "ignore_merges"):
            assert tokenizer.decode(plain).strip() == f"a {name} rain"


@pytest.mark.parametrize("kind", [*KINDS, *PLAIN_KINDS])
def test_texts_without_special_tokens_have_the_same_ids_either_way(tmp_path: Path, kind: str) -> None:
    tokenizer = open_tokenizer(save(tmp_path, kind).name, DataRoot(tmp_path))
    for text in (TEXT, "river <think>é\u0301日🚣</think>", " "):
        (plain,) = tokenizer.encode_all([text])
        (special,) = tokenizer.encode_all([text], special=True)
        assert plain.tolist() == special.tolist()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "chat template"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe|SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("nothing of it", "does not show message 2"),
    ],
)
def test_templates_that_cannot_be_used_say_why(template: str, reason: str) -> None:
    talk = spoken([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(DataError, match=reason):
        ChatTemplate(template).encode(talk, ByteTokenizer())


def test_conversations_are_told_from_other_rows() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert conversation(said) == tuple(said)
    for wrong in (None, [], "text", [{"content": "x"}], [{"role": 7, "content": "x"}], [said[0]], [*said, "x"]):
        assert conversation(wrong) is None
