"""Manifests as people write them: every mistake at once, and a template that reads back as what it shows."""

import dataclasses
import json
import math
import tomllib

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError
from swarmnode.run.manifest import (
    MANIFEST_BYTES_MAX,
    DataSpec,
    GossipSpec,
    InnerSpec,
    Manifest,
    ModelSpec,
    OuterConstants,
    constants,
    parse,
    template,
)
from swarmnode.run.manifest.check import is_below
from swarmnode.run.manifest.cross_field import ACROSS
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.run.manifest.spec import BY_NAME, CONSTANTS, FIELDS
from swarmnode.run.manifest.text import brief, build, schema, value_of, with_value
from tests.support.method_tables import METHODS


def mistakes(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse(text, "run.toml")
    assert str(caught.value).startswith("run.toml: ")
    return str(caught.value).removeprefix("run.toml: ")


def test_every_field_has_its_metadata() -> None:
    names = {
        f"{table}.{key}" if isinstance(values, dict) else table
        for table, values in dataclasses.asdict(Manifest()).items()
        for key in (values if isinstance(values, dict) else [table])
    }
    assert {field.name for field in FIELDS} == names - CONSTANTS.keys()
    assert all(name in BY_NAME for across in ACROSS for name in across.names)


def test_every_default_is_signed() -> None:
    assert all(field.origin and field.meaning.endswith(".") for field in FIELDS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid_and_survive_the_template(name: str) -> None:
    assert parse(template(PRESETS[name]), name) == PRESETS[name]
    text = brief(PRESETS[name], {})
    assert parse(text, name) == PRESETS[name] and text.count("\n") <= 40 and max(map(len, text.splitlines())) <= 110


def test_a_value_is_set_where_it_stands_and_where_it_does_not() -> None:
    text = with_value(with_value(brief(Manifest(), {}), "inner.learning_rate", "0.5"), "limits.tape_bytes_max", "7")
    text = with_value(with_value(text, "access.mode", '"invited"'), "seed", "3")
    wanted = build({"inner.learning_rate": 0.5, "limits.tape_bytes_max": 7, "access.mode": "invited", "seed": 3})
    assert parse(text, "set") == wanted and "# Peak learning rate" in text


def test_the_schema_knows_every_field_and_accepts_what_is_written() -> None:
    found = json.loads(schema())
    jsonschema.validate(tomllib.loads(template()), found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads('[access]\nmode = "closed"'), found)


def test_template_is_the_defaults_and_explains_every_field() -> None:
    text = template()
    assert parse(text, "template") == Manifest() == parse("", "empty")
    assert max(map(len, text.splitlines())) <= 120
    for field in FIELDS:
        before = text.split(f"\n{field.key} = ")[0].rsplit("\n\n", 1)[-1]
        assert before.startswith("#"), field.name


MANIFESTS = st.builds(
    Manifest,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    seed=st.integers(0, 2**63 - 1),
    model=st.builds(
        lambda heads, each, ratio: ModelSpec(width=heads * ratio * each * 2, heads=heads * ratio, kv_heads=heads),
        st.integers(1, 8),
        st.integers(1, 8),
        st.integers(1, 4),
    ),
    data=st.builds(
        DataSpec,
        tokenizer=st.just("bytes") | st.text(min_size=1, max_size=50).filter(is_below),
    ),
    inner=st.builds(
        InnerSpec,
        learning_rate=st.floats(0, 10, exclude_min=True),
        beta1=st.floats(0, 1, exclude_max=True),
        eps=st.floats(0, 1, exclude_min=True),
    ),
)


@given(MANIFESTS)
@settings(max_examples=60, deadline=None)
def test_any_manifest_survives_the_template(manifest: Manifest) -> None:
    assert parse(template(manifest), "template") == manifest


def test_all_mistakes_at_once_with_field_value_and_what_is_allowed() -> None:
    said = mistakes(
        """
        nam = "x"
        seed = -1
        [model]
        heads = 5
        width = "wide"
        layer = 3
        [pipelin]
        stages = 2
        [pipeline]
        stages = 9
        boundary = "int2"
        [inner]
        beta1 = 1.0
        microbatch = 5
        eps = true
        [gossip]
        alpha = nan
        layers = 1
        """
    ).splitlines()
    assert said[0] == "14 mistakes"
    assert set(map(str.strip, said[1:])) == {
        'nam = "x": unknown field; did you mean name?',
        "seed = -1: allowed is a whole number from 0 to 9_223_372_036_854_775_807",
        'model.width = "wide": allowed is a whole number from 2 to 1_048_576',
        "model.kv_heads = 2: allowed is a divisor of model.heads = 5",
        "model.layer = 3: unknown field; did you mean model.layers?",
        "[pipelin]: unknown table; did you mean [pipeline]?",
        "pipeline.stages = 9: allowed is at most model.layers = 6",
        'pipeline.boundary = "int2": allowed is "bf16" or "fp32" or "int8" or "int4" or "int4_int2" or "subspace"',
        "inner.beta1 = 1.0: allowed is a number at least 0 and below 1",
        "inner.microbatch = 5: allowed is a divisor of inner.inner_batch = 8",
        "data.block_samples = 64: allowed is a multiple of inner.microbatch = 5",
        "inner.eps = true: allowed is a number above 0 and at most 1",
        'gossip.alpha = nan: allowed is "own" or a number at least 0 and below 1',
        "gossip.layers = 1: unknown field; did you mean model.layers?",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = {heads = 3, kv_heads = 1}", "model.heads = 3: allowed is a divisor of model.width = 128"),
        ("model.kv_heads = 3", "model.kv_heads = 3: allowed is a divisor of model.heads = 4"),
        ("model.heads = 128", "model.width = 128: allowed is an even multiple of model.heads = 128"),
        ("model.head_width = 7", "model.head_width = 7: allowed is an even number"),
        ('model.tied = true\ngossip.method = "none"', "model.tied = true: allowed is false with pipeline.stages = 3,"),
        ("model.tied = 1", "model.tied = 1: allowed is true or false"),
        ("model.rope_factor = 2.0", 'model.rope_factor = 2.0: allowed is 1 with model.rope_scaling = "none"'),
        ('model.rope_scaling = "yarn"', "model.rope_original_context = 0: allowed is above 0 with"),
        ("model.rope_low = 5", "model.rope_high = 4.0: allowed is above model.rope_low = 5"),
        ("model.rope_attention_factor = 2.0", "model.rope_attention_factor = 2.0: allowed is 0 with"),
        ("model.unrotated_layers = [6]", "model.unrotated_layers = [6]: allowed is numbers below model.layers = 6"),
        ("model.unrotated_layers = [2, 1]", "model.unrotated_layers = [2, 1]: allowed is a list of different whole"),
        ("model.sliding_layers = [2]", "model.sliding_layers = [2]: allowed is an empty list with model.sliding"),
        ("model.dense_layers = [0]", "model.dense_layers = [0]: allowed is an empty list with model.experts = 0"),
        (
            "model = {experts = 4, experts_active = 1, expert_ffn = 8, dense_layers = [0, 1, 2, 3, 4, 5]}",
            "model.dense_layers = [0, 1, 2, 3, 4, 5]: allowed is not every layer",
        ),
        ("model = {experts = 4, expert_ffn = 8}", "model.experts_active = 0: allowed is 1 to model.experts = 4"),
        ("model = {experts = 4, experts_active = 5, expert_ffn = 8}", "model.experts_active = 5: allowed is 1 to"),
        ("model.expert_ffn = 8", "model.expert_ffn = 8: allowed is 0 with model.experts = 0"),
        ("model.router_normalised = true", "model.router_normalised = true: allowed is false with model.experts = 0"),
        (
            'model.tied = true\npipeline = {stages = 1, boundary = "subspace", boundary_rank = 8}',
            'pipeline.boundary = "subspace": allowed is not "subspace" with model.norm_placement = "post"',
        ),
        ("model.vocabulary = 300", 'model.vocabulary = 300: allowed is 256 with data.tokenizer = "bytes"'),
        ('data = {source = "text", paths = ["a"]}', 'data.source = "text": a run reads no folder of text by itself'),
        ('data.paths = ["a"]', 'data.paths = ["a"]: it is [] in every run: delete the line'),
        ('data.documents = "packed"', 'data.documents = "packed": allowed is "joined" or "masked"'),
        ("data.end_token = 1", 'data.end_token = 1: allowed is -1 or 0 with data.tokenizer = "bytes"'),
        ('data = {documents = "masked", tokenizer = "t.json"}', 'data.documents = "masked": allowed is "joined"'),
        (
            f'data = {{documents = "masked", source = "index", index = "{"0" * 64}"}}',
            'data.documents = "masked": allowed is "joined" unless data.end_token',
        ),
        ('data.tokenizer = "a\\u0000b"', 'data.tokenizer = "a\\u0000b": allowed is a path'),
        ('name = "../x"', 'name = "../x": allowed is 1 to 64 letters'),
        ('pipeline.boundary = "subspace"', "pipeline.boundary_rank = 0: allowed is 1 to model.width = 128 with"),
        ('pipeline = {boundary = "subspace", boundary_rank = 129}', "pipeline.boundary_rank = 129: allowed is 1 to"),
        (
            'pipeline = {boundary = "subspace", boundary_rank = 8}\ngossip = {method = "desloc", codec = "int8"}',
            'gossip.method = "desloc": allowed is noloco or average or none with pipeline.boundary = "subspace"',
        ),
        ("pipeline.boundary_rank = 8", 'pipeline.boundary_rank = 8: allowed is 0 with pipeline.boundary = "bf16", or'),
        ("inner.decay_samples = 5", "inner.decay_samples = 5: allowed is more than inner.warmup_samples = 512"),
        (
            'inner = {decay = "wsd", warmup_samples = 500, decay_samples = 5000, cooldown_samples = 4501}',
            "inner.cooldown_samples = 4501: allowed is at most 4500, what inner.decay_samples leaves",
        ),
        ('gossip.codec = "topk64"', 'gossip.codec = "topk64": allowed is fp32 or bf16 or int8 or modular6 or modular4'),
        ('gossip = {method = "partial_average", codec = "topk"}', "gossip.group = 4: allowed is 0 with gossip.method"),
        ("gossip.round_samples = 5", "gossip.round_samples = 5: allowed is at least inner.inner_batch = 8"),
        ("gossip.alpha = 1.0", 'gossip.alpha = 1.0: allowed is "own" or a number at least 0 and below 1'),
        ('gossip.beta = "paper"', 'gossip.beta = "paper": allowed is "own" or a number at least 0 and at most 2'),
        ('gossip = {method = "average", alpha = 0.5}', 'gossip.alpha = 0.5: allowed is "own" with gossip.method ='),
        ('gossip = {method = "desloc", codec = "int8", beta = 1}', 'gossip.beta = 1.0: allowed is "own" with'),
        ('gossip = {method = "diloco", codec = "e3m0", group = 0, gamma = 0.7}', "gossip.gamma = 0.7: allowed is"),
        ('gossip = {method = "noloco", codec = "modular4", gamma = 0.6}', 'gossip.gamma = 0.6: allowed is "own", or'),
        ('training.kind = "lora"', 'training.kind = "lora": allowed is "pretrain" or "finetune" or "adapters"'),
        ('training.targets = ["q_proj", "gate"]', 'training.targets = ["q_proj", "gate"]: allowed is a list of'),
        ("training.targets = []", "training.targets = []: allowed is a list of different names among"),
        ('training.targets = ["q_proj", "q_proj"]', 'training.targets = ["q_proj", "q_proj"]: allowed is a list of'),
        ("training.rank = 0", "training.rank = 0: allowed is a whole number from 1"),
        ('inner.optimizer = "adamw"\ntraining = {kind = "adapters", rank = 65}', "training.rank = 65: allowed is at"),
        (
            'inner.optimizer = "adamw"\ntraining = {kind = "adapters", rank = 129, targets = ["q_proj", "up_proj"]}',
            "training.rank = 129: allowed is at most 128, the shortest side of a matrix in training.targets",
        ),
        ('training.kind = "adapters"', 'inner.optimizer = "muon": allowed is "adamw" with training.kind = "adapters"'),
        (
            (
                'inner.optimizer = "adamw"\n[training]\nkind = "adapters"\ntargets = ["up_proj"]\n'
                "[model]\nexperts = 4\nexperts_active = 2\nexpert_ffn = 32"
            ),
            'training.targets = ["up_proj"]: allowed is a list with one of q_proj, k_proj, v_proj, o_proj',
        ),
        ('training.kind = "finetune"', 'data.documents = "joined": allowed is "masked" with training.kind ='),
        (
            (
                'training.kind = "adapters"\ninner.optimizer = "adamw"\n'
                'pipeline = {boundary = "subspace", boundary_rank = 4}'
            ),
            'training.kind = "adapters": allowed is "pretrain" with pipeline.boundary = "subspace"',
        ),
        ("gossip.alpha = inf", "gossip.alpha = inf: allowed"),
        ('evaluation.sets = ["/etc/passwd"]', "evaluation.sets"),
        ('evaluation.sets = ["a.txt", "a.txt"]', 'evaluation.sets = ["a.txt", "a.txt"]: allowed'),
        ('evaluation.prompts = [""]', "evaluation.prompts"),
        ("evaluation.prompts = [3]", "evaluation.prompts"),
        ("evaluation.prompt_tokens = 0", "evaluation.prompt_tokens"),
        ("limits.hop_timeout_min_s = 121", "limits.hop_timeout_min_s = 121.0: allowed is at most"),
        ("limits.record_ttl_s = 3", "limits.record_ttl_s = 3.0: allowed is at least twice"),
        ("limits.in_flight_max = 0", "limits.in_flight_max = 0: allowed is a whole number from 1"),
        ("limits.in_flight_max = 1.5", "limits.in_flight_max = 1.5: allowed is a whole number"),
        ("limits.frame_bytes_max = 1024", "limits.frame_bytes_max = 1024: allowed is at least 268_320"),
        ("limits = 3", "limits = 3: allowed is a table, written [limits]"),
        ("seed = 1979-05-27", "seed = 1979-05-27: allowed is a whole number"),
        ("x = [[[1]]]", "x = [[[1]]]: unknown field"),
        ("[[model]]", "model = [{}]: allowed is a table"),
        ("name = 'a", "not TOML: Expected"),
        ('name = "' + "a" * MANIFEST_BYTES_MAX + '"', "longer than 65536 bytes"),
        ("x = " + "[" * 10_000, "not a manifest: nested too deeply"),
        ('name = "' + "b" * 500 + '"', 'name = "' + "b" * 56 + "...: allowed"),
    ],
)
def test_one_mistake_is_one_line(text: str, says: str) -> None:
    said = mistakes(text)
    assert said.startswith(says)
    assert "\n" not in said


def test_very_many_mistakes_are_cut() -> None:
    said = mistakes("\n".join(f"x{i} = 1" for i in range(1000))).splitlines()
    assert said[0] == "1000 mistakes" and len(said) == 52 and said[-1].strip() == "and 950 more"


@given(
    name=st.sampled_from([field.name for field in FIELDS]),
    raw=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.text()),
    ),
)
@settings(max_examples=200, deadline=None)
def test_checks_accept_only_what_reads_back(name: str, raw: object) -> None:
    value = BY_NAME[name].check.accept(raw)
    if value is None:
        return
    assert not (isinstance(value, float) and not math.isfinite(value))
    assert isinstance(value, float) or type(value) is type(value_of(Manifest(), name))  # "own", or a number
    manifest = build({name: value})
    try:
        assert value_of(parse(template(manifest), "template"), name) == value
    except ManifestError as error:
        assert any(across.names[0] in str(error) for across in ACROSS)


def test_values_that_json_does_not_have_are_shown() -> None:
    """Found by `python -m tests.fuzz`: a date in a list."""
    assert "2024-05-27" in mistakes("[data]\npaths = [2024-05-27]")
    assert "07:32" in mistakes("[data]\npaths = [[07:32:00]]")


def test_own_constants_are_the_methods() -> None:
    found = {method: constants(GossipSpec(method=method)) for method in METHODS}
    assert found["noloco"] == OuterConstants(0.5, 0.7, 0.7) and found["average"] == OuterConstants(0.0, 1.0, 1.0)
    assert found["diloco"] == OuterConstants(0.9, 0.7, 0.7) and found["streaming"] == OuterConstants(0.9, 0.4, 0.4)
    assert found["sparseloco"] == OuterConstants(0.0, 1.0, 1.0)
    assert constants(GossipSpec(method="noloco", beta=1)) == OuterConstants(0.5, 1.0, 1.0), "gamma's own is beta"
    told = parse('[gossip]\nmethod = "noloco"\ncodec = "fp32"\nalpha = 0\ngamma = 0.3', "here").gossip
    assert constants(told) == OuterConstants(0.0, 0.7, 0.3)
