"""The methods and codecs of this package, found by the entry points `swarmnode.methods` and `swarmnode.codecs`."""

from __future__ import annotations

from functools import partial

from swarmnode.run.gossip_rules import CodecRules, MethodRules

WEIGHTS = ("fp32", "bf16", "int8")
MODULAR = ("modular6", "modular4", "modular3")
UNBIASED = ("e3m0", "ternary")
NEAREST = ("lloyd4", "lloyd3", "lloyd2", "huffman", "whitened")
SPARSE = ("topk", "topk512", "topk64")
DELTA = (*UNBIASED, *SPARSE, "powersgd")

CODECS = (
    CodecRules("fp32", "swarmnode_methods.dense:Fp32"),
    CodecRules("bf16", "swarmnode_methods.dense:Bf16", nbytes=2.0),
    CodecRules("int8", "swarmnode_methods.int8:Int8", nbytes=1.03),
    CodecRules("modular6", "swarmnode_methods.modular:Modular6", relative=True, nbytes=0.8),
    CodecRules("modular4", "swarmnode_methods.modular:Modular4", relative=True, nbytes=0.56, planned=True),
    # nats: docs/measurements/gossip.md; of other codecs of weights nothing is measurable
    CodecRules("modular3", "swarmnode_methods.modular:Modular3", relative=True, nbytes=0.43, nats=0.003, planned=True),
    CodecRules("e3m0", "swarmnode_methods.low_bit:E3M0", of_delta=True),
    CodecRules("ternary", "swarmnode_methods.low_bit:Ternary", of_delta=True),
    CodecRules("lloyd4", "swarmnode_methods.lloyd:Lloyd4", of_delta=True, nbytes=0.54, coding_ns=8.3),
    CodecRules("lloyd3", "swarmnode_methods.lloyd:Lloyd3", of_delta=True, nbytes=0.41, coding_ns=12.2),
    CodecRules("lloyd2", "swarmnode_methods.lloyd:Lloyd2", of_delta=True, nbytes=0.29),
    CodecRules("huffman", "swarmnode_methods.huffman:Huffman", of_delta=True, nbytes=0.52, coding_ns=19.0),
    CodecRules("whitened", "swarmnode_methods.huffman:WhitenedHuffman", of_delta=True, nbytes=0.52, coding_ns=19.0),
    CodecRules("topk", "swarmnode_methods.topk:TopKWarm", of_delta=True),
    CodecRules("topk512", "swarmnode_methods.topk:TopK512", of_delta=True),
    CodecRules("topk64", "swarmnode_methods.topk:TopK64", of_delta=True),
    CodecRules("powersgd", "swarmnode_methods.powersgd:PowerSGD", of_delta=True),
)

_in_parts = partial(MethodRules, in_groups=True, in_fragments=True, in_subspace=True, slow_on_host=True)

METHODS = (
    _in_parts(
        "noloco",
        "swarmnode_methods.noloco:NoLoCo",
        alpha=0.5,  # the code published with NoLoCo
        beta=0.7,  # the code published with NoLoCo
        pull=True,
        of_whole_weights=True,
        takes_fallback=True,
    ),
    _in_parts("average", "swarmnode_methods.noloco:Average", of_whole_weights=True, takes_fallback=True),
    # Replicas never meet. The slow weights are kept all the same, so that snapshots have one format.
    _in_parts("none", "swarmnode_methods.noloco:NoLoCo", meets=False),
    MethodRules(
        "diloco",
        "swarmnode_methods.diloco:DiLoCo",
        (*WEIGHTS, *MODULAR, *DELTA),
        alpha=0.9,  # DiLoCo, arXiv 2311.08105 (Nesterov)
        beta=0.7,  # DiLoCo, arXiv 2311.08105
        of_whole_weights=True,
    ),
    MethodRules(
        "sparseloco",
        "swarmnode_methods.sparseloco:SparseLoCo",
        (*WEIGHTS, *DELTA),
        beta=1.0,  # SparseLoCo, arXiv 2508.15706: the residual replaces momentum
        of_progress=True,
        of_whole_weights=True,
    ),
    MethodRules("partial_average", "swarmnode_methods.partial_average:PartialAverage", SPARSE, of_progress=True),
    MethodRules(
        "streaming",
        "swarmnode_methods.streaming:Streaming",
        (*WEIGHTS, *UNBIASED),  # a residual belongs to one fragment, but the next message is of another
        alpha=0.9,  # Streaming DiLoCo, arXiv 2501.18512 (Nesterov)
        beta=0.4,  # Streaming DiLoCo, arXiv 2501.18512
        of_progress=True,
    ),
    MethodRules(
        "eager",
        "swarmnode_methods.eager:Eager",
        (*WEIGHTS, *DELTA),
        alpha=0.9,  # Eager updates, arXiv 2502.12996: as Streaming DiLoCo, of the same authors (Nesterov)
        beta=0.4,  # as Streaming DiLoCo
        of_progress=True,
        of_whole_weights=True,
    ),
    MethodRules(
        "delayed",
        "swarmnode_methods.delayed:DelayedNesterov",
        (*WEIGHTS, *DELTA),
        alpha=0.9,  # Async Local-SGD, arXiv 2401.09135: as DiLoCo (Nesterov)
        beta=0.7,  # as DiLoCo
        of_progress=True,
        of_whole_weights=True,
    ),
    MethodRules(
        "edit",
        "swarmnode_methods.edit:EDiT",
        (*WEIGHTS, *DELTA),
        alpha=0.85,  # EDiT, arXiv 2412.07210 (Nesterov)
        beta=0.8,  # EDiT, arXiv 2412.07210
        of_progress=True,
        of_whole_weights=True,
    ),
    MethodRules(
        "gradient",
        "swarmnode_methods.gradient:Gradient",
        (*WEIGHTS, *UNBIASED, *NEAREST),  # what others drop is fed back once
        in_fragments=True,
        of_progress=True,
        averages_gradients=True,
    ),
    MethodRules("desloc", "swarmnode_methods.desloc:DesLoc", WEIGHTS, in_groups=True, slow_on_host=True),
)
