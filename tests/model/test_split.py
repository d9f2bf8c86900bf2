import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError
from swarmnode.model.split import (
    embedding_flops,
    head_flops,
    layer_flops,
    parameter_shapes,
    partition,
    split,
    stages_of,
)
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec, parse
from swarmnode.run.manifest.spec import LAYERS_MAX


def every_cut(count: int, parts: int) -> list[list[range]]:
    return [
        [range(start, stop) for start, stop in pairwise((0, *cuts, count))]
        for cuts in combinations(range(1, count), parts - 1)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_partition_is_the_best_of_every_cut(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    sums = {tuple(cut): [sum(costs[i] for i in r) for r in cut] for cut in every_cut(len(costs), parts)}
    largest = min(max(values) for values in sums.values())
    squares = min(sum(v * v for v in values) for values in sums.values() if max(values) == largest)
    found = sums[tuple(partition([float(cost) for cost in costs], parts))]  # KeyError: not a cut at all
    assert (max(found), sum(v * v for v in found)) == (largest, squares)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    model = ModelSpec(vocabulary=8192)  # its head costs as much as 5.2 layers
    assert head_flops(model) / layer_flops(model, 0) == pytest.approx(5.22, abs=0.01)
    parts = split(model, 3)
    assert [len(part.layers) for part in parts] == [2, 3, 1]
    assert parts[0].cost == 2 * layer_flops(model, 0) + embedding_flops(model)
    assert parts[2].cost == layer_flops(model, 0) + head_flops(model)


@pytest.mark.parametrize(("stages", "before", "after"), [(8, 1397.8, 1090.6), (16, 961.6, 743.5)])
def test_memory_takes_layers_from_the_token_table(stages, before, after):
    """Llama 3 8B: stages as fast as before, the largest a fifth smaller."""
    model = ModelSpec(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, context=2048)
    by_time = split(model, stages)
    by_size = split(model, stages, 1.0)
    assert max(part.parameters for part in by_time) == pytest.approx(before * 1e6, rel=1e-3)
    assert max(part.parameters for part in by_size) == pytest.approx(after * 1e6, rel=1e-3)
    assert max(part.cost for part in by_size) == pytest.approx(max(part.cost for part in by_time), rel=1e-3)
    manifest = Manifest(model=model, pipeline=PipelineSpec(stages=stages, memory_weight=1.0))
    assert stages_of(manifest) == by_size


@given(st.integers(1, 7), st.data())
def test_parts_cover_the_model_once(layers, data):
    model = ModelSpec(layers=layers)
    parts = split(model, data.draw(st.integers(1, layers)), data.draw(st.floats(0.0, 1.0)))
    names = [name for part in parts for name in parameter_shapes(model, part)]
    whole = parameter_shapes(model, split(model, 1)[0])
    assert len(names) == len(set(names)) and set(names) == set(whole)
    assert sum(part.parameters for part in parts) == sum(math.prod(shape) for shape in whole.values())


def test_matrices_come_before_norms():
    for part in split(ModelSpec(), 3):
        dimensions = [len(shape) for shape in parameter_shapes(ModelSpec(), part).values()]
        assert dimensions == sorted(dimensions, reverse=True) and dimensions[-1] == 1


@pytest.mark.parametrize("stages", [0, 7])
def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(ManifestError, match=f"pipeline.stages = {stages} .* use 1 to 6 stages"):
        split(ModelSpec(), stages)
    with pytest.raises(ValueError, match="6 layers cannot be cut"):
        partition([1.0] * 6, stages)


def test_no_valid_manifest_takes_long_to_cut():
    """4096 layers in 1365 stages took hours."""
    most = [1.0] * LAYERS_MAX
    cut = partition(most, LAYERS_MAX // 3)
    assert {len(part) for part in cut} == {3, 4} and [i for part in cut for i in part] == list(range(LAYERS_MAX))
    with pytest.raises(ManifestError, match=r"model\.layers = 513"):
        parse("model.layers = 513", "here")
