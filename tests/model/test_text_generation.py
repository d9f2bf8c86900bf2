"""Text from a model: the cache changes nothing, chance is the seed's, the shares are kept."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.base.errors import UsageError
from swarmnode.data.sample import SampleBatch
from swarmnode.model.text_generation import Sampling, choose, generate, loss_of, whole_model
from tests.support.tiny_model import FAMILIES, TINY, manifest, randomised, stages_of, token_batch, train_on

pytestmark = pytest.mark.node  # some seconds

GREEDY = Sampling(temperature=0.0)


def tensors() -> dict[str, torch.Tensor]:
    chain = stages_of(manifest())
    for step in range(3):
        train_on(chain, token_batch(seed=step))
        for stage in chain:
            stage.step(8 * (step + 1))
    return {name: view for stage in chain for name, view in stage.named(stage.theta).items()}


@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3", "qwen2", "qwen3", "olmo2", "qwen2_moe", "yarn"])
def test_the_cache_changes_nothing(family: str) -> None:
    model = FAMILIES[family]
    net = whole_model(model, randomised(model))
    ids = [3, 1, 4, 1, 5, 9, 2]
    with torch.no_grad():
        for token in list(generate(net, model, ids, 9, GREEDY)):
            assert token == int(net(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_it_goes_on_past_the_context_and_ends_at_the_stop() -> None:
    net = whole_model(TINY, tensors())
    long = list(generate(net, TINY, list(range(40)), 3 * TINY.context, Sampling(seed=5)))
    assert len(long) == 3 * TINY.context and all(0 <= token < TINY.vocabulary for token in long)
    made = list(generate(net, TINY, [3], 50, Sampling(seed=1)))
    stop = made[7]
    assert list(generate(net, TINY, [3], 50, Sampling(seed=1), {stop})) == made[: made.index(stop)]


def test_the_seed_decides() -> None:
    net = whole_model(TINY, tensors())
    lives = [tuple(generate(net, TINY, [3], 20, Sampling(1.0, seed=seed))) for seed in (1, 1, 2)]
    assert lives[0] == lives[1] != lives[2]


def test_shares_follow_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    chance = torch.Generator().manual_seed(0)

    def drawn(sampling: Sampling) -> Counter[int]:
        return Counter(choose(logits, sampling, chance) for _ in range(4000))

    everything = drawn(Sampling(1.0, top_p=1.0))
    assert abs(everything[0] / 4000 - 0.5) < 0.04 and abs(everything[3] / 4000 - 0.05) < 0.02
    assert drawn(Sampling(1.0, top_k=2, top_p=1.0)).keys() == {0, 1}
    assert drawn(Sampling(1.0, top_p=0.75)).keys() == {0, 1}
    assert drawn(Sampling(1.0, top_p=0.85)).keys() == {0, 1, 2}
    assert drawn(Sampling(1.0, top_p=1e-6)).keys() == {0}
    assert drawn(Sampling(0.01, top_p=1.0)).keys() == {0} == drawn(GREEDY).keys()


def test_the_loss_is_that_of_the_stages() -> None:
    chain = stages_of(manifest())
    whole = whole_model(TINY, {name: view for stage in chain for name, view in stage.named(stage.theta).items()})
    tokens = token_batch(samples=6)
    loss, count = loss_of(whole, SampleBatch(tokens.numpy().astype(np.uint16)))
    assert count == 6 * TINY.context
    torch.testing.assert_close(loss, train_on(chain, tokens), rtol=1e-5, atol=1e-3)


def test_prompts_it_cannot_read_are_refused() -> None:
    net = whole_model(TINY, tensors())
    with pytest.raises(UsageError, match="the prompt is empty"):
        next(generate(net, TINY, [], 5, GREEDY))
    with pytest.raises(UsageError, match="token ids up to 50; the model knows 50"):
        next(generate(net, replace(TINY), [50], 5, GREEDY))
