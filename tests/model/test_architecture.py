"""Layers of one's own: an installed package brings them by an entry point, and a pipeline trains them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarmnode.base.errors import ManifestError
from swarmnode.model import architecture
from swarmnode.model.decoder import Decoder
from swarmnode.model.documents import Documents
from swarmnode.model.export import write_model
from swarmnode.model.gather import merged, of_export
from swarmnode.model.split import parameter_shapes, split
from swarmnode.model.text_generation import Sampling, generate, whole_model
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec, parse, template
from tests.model.test_stage import check_tape
from tests.support.tiny_model import TINY, manifest, mean_loss, plain_model, stages_of, token_batch, train_on

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-architecture"
OWN = replace(TINY, architecture="decaying_mean")


def install(folder: Path, names: list[str]) -> None:
    """A package with these architectures, as pip would leave it in `folder`."""
    info = folder / f"{'_'.join(names)}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {'-'.join(names)}\nVersion: 0.1\n")
    lines = [f"{name} = decaying_mean:DecayingMeanArchitecture" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[swarmnode.architectures]", *lines]) + "\n")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = tmp_path / "site"
    site.mkdir()
    install(site, ["decaying_mean"])
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    known = dict(architecture._known)
    yield site
    architecture._known.clear()
    architecture._known.update(known)
    split.cache_clear()
    sys.modules.pop("decaying_mean", None)


def test_it_trains_in_stages_as_in_one_piece() -> None:
    assert parse(template(Manifest(model=replace(OWN, vocabulary=256))), "own").model.architecture == "decaying_mean"
    for stages in (1, 3):
        for part in split(OWN, stages):
            found = {name: tuple(value.shape) for name, value in Decoder(OWN, part).named_parameters()}
            assert found == parameter_shapes(OWN, part)
    chain = stages_of(manifest(OWN), torch.float64)
    net = plain_model(chain, torch.float64)
    tokens = token_batch(OWN)
    loss = mean_loss(net, tokens)
    loss.backward()
    first = train_on(chain, tokens) / tokens[:, 1:].numel()
    assert first == pytest.approx(loss.item(), rel=1e-12)
    for stage in chain:
        for name, gradient in stage.named(stage.grad).items():
            wanted = net.get_parameter(name).grad
            assert wanted is not None
            torch.testing.assert_close(gradient / len(tokens), wanted, rtol=1e-9, atol=1e-12)
    for step in range(20):
        for stage in chain:
            stage.step(8 * step + 8)
        last = train_on(chain, tokens) / tokens[:, 1:].numel()
    assert last < first - 0.3


def test_documents_are_read_apart() -> None:
    net = plain_model(stages_of(manifest(OWN)), torch.float64)
    tokens = token_batch(OWN)[:1, :-1].clamp(min=1)
    tokens[0, 4] = 0
    both = net(tokens, Documents.of(tokens, 0))
    torch.testing.assert_close(both[:, :5], net(tokens[:, :5]))
    torch.testing.assert_close(both[:, 5:], net(tokens[:, 5:]))


def test_it_is_exported_and_generates(tmp_path: Path) -> None:
    model = replace(OWN, vocabulary=256)
    run = manifest(model)
    weights = {name: view for stage in stages_of(run) for name, view in stage.named(stage.theta).items()}
    write_model(weights, run, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    found = merged(of_export(tmp_path / "out", run, {}))
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)
    net = whole_model(model, found)
    ids = [3, 1]
    with torch.no_grad():
        for token in list(generate(net, model, ids, 5, Sampling(temperature=0.0))):
            assert token == int(net(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_a_tape_says_what_memory_its_layers_take() -> None:
    check_tape(Manifest(model=ModelSpec(architecture="decaying_mean"), pipeline=PipelineSpec(stages=3)), 1, False)


def test_a_machine_without_the_package_says_so(installed: Path) -> None:
    unknown = replace(OWN, architecture="nowhere")
    with pytest.raises(ManifestError, match="model.architecture = 'nowhere': no installed package has it; install"):
        split(unknown, 1)
    install(installed, ["twice", "other"])
    install(installed, ["twice"])
    with pytest.raises(ManifestError, match="'twice': 2 installed packages have it"):
        split(replace(OWN, architecture="twice"), 1)
    (installed / "broken-0.1.dist-info").mkdir()
    (installed / "broken-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (installed / "broken-0.1.dist-info" / "entry_points.txt").write_text(
        "[swarmnode.architectures]\nbroken = decaying_mean:Nothing\n"
    )
    with pytest.raises(ManifestError, match="'broken': decaying_mean:Nothing cannot be loaded: module"):
        split(replace(OWN, architecture="broken"), 1)


def test_shapes_that_no_flat_buffer_holds_are_refused() -> None:
    class Cube:
        def layer_shapes(self, model: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
            return {"cube": (2, 2, 2)}

        def layer_flops(self, model: ModelSpec, layer: int) -> float:
            return 1.0

    architecture.register("cube", Cube())  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match=r"layer 0: cube has shape \(2, 2, 2\); allowed are matrices and vectors"):
        split(replace(OWN, architecture="cube"), 1)
