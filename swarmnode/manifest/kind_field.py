"""The fields of a manifest that say which part of the model is trained."""

from __future__ import annotations

from swarmnode.manifest.check import Field, one_of, real, some_of, whole
from swarmnode.manifest.kind_compat import BASE_FORMATS, KINDS, METHODS
from swarmnode.manifest.spec import TARGETS

EXPERTS_MAX = 1 << 12  # guess: model.experts has its own bound
RANK_MAX = 1 << 14  # guess: the width of the largest models

KIND_FIELDS: tuple[Field, ...] = (
    Field(
        "training",
        "kind",
        one_of(*KINDS),
        "pretrain: all weights, on running text; finetune: all weights of a trained model, on conversations or other"
        ' separate documents (data.documents = "masked"; only answers count in the loss if the data set says so);'
        " adapters: small matrices beside the frozen weights of a trained model; only these are sent and saved;"
        " one_byte: all weights by forward passes alone, each machine with the whole model; a microbatch sends one byte"
        " (arXiv 2306.10015).",
        "no model to start from is needed",
    ),
    Field(
        "training",
        "method",
        one_of(*METHODS),
        "adapters: lora: W + alpha / rank · B A (arXiv 2106.09685); dora: also the length of each row of that sum"
        " (arXiv 2402.09353).",
        "the simpler one",
    ),
    Field(
        "training",
        "rank",
        whole(1, RANK_MAX),
        "adapters: rows of A and columns of B.",
        "guess: LoRA, table 6, finds 4 to 64 alike; QLoRA, arXiv 2305.14314, uses 64",
    ),
    Field(
        "training",
        "alpha",
        real(0.0, 1e6, above=True),
        "adapters: the change B A is multiplied by alpha / rank.",
        "guess: twice the rank",
    ),
    Field(
        "training",
        "targets",
        some_of(*TARGETS),
        "adapters: the matrices of each layer that have one.",
        "all of them: QLoRA, arXiv 2305.14314, figure 2",
    ),
    Field(
        "training",
        "base_format",
        one_of(*BASE_FORMATS),
        "adapters: number format of the frozen weights in memory; int8: matrices of layers with a step for each row"
        " (arXiv 2208.07339); nf4: these in 4 bits with a scale for each 64 (arXiv 2305.14314); all else bf16.",
        "the format most models are published in",
    ),
    Field(
        "training",
        "perturbation",
        real(0.0, 1.0, above=True),
        "one_byte: the loss is measured with every weight this much higher or lower.",
        "MeZO, arXiv 2305.17333, appendix E",
    ),
    Field(
        "training",
        "experts_trained",
        whole(0, EXPERTS_MAX),
        "Experts of each sparse layer that one replica trains, a part of model.experts; it takes the others as replicas"
        " that train them send them, and has no gradients and moments for them (arXiv 2602.11543); 0: all.",
        "every replica trains everything",
    ),
)
