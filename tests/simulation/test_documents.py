"""A swarm whose documents are read apart lives like any other: the laws hold, and samples count as samples."""

import dataclasses

from swarmsim.life import simulate
from swarmsim.scenario import find, read_scenario, shorter


def test_a_life_with_documents_apart_keeps_the_laws() -> None:
    scenario = shorter(read_scenario(find("calm")), 60.0)
    manifest = scenario.manifest
    manifest = dataclasses.replace(manifest, data=dataclasses.replace(manifest.data, documents="masked"))
    bounds = dataclasses.replace(scenario.bounds, throughput=0.0, window_s=10.0)
    outcome = simulate(dataclasses.replace(scenario, manifest=manifest, bounds=bounds), 1)
    assert not outcome.failures, outcome.failures
    assert outcome.total.samples > 0
