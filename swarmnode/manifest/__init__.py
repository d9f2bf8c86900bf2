"""The manifest: one training job, frozen, hashed and signed. The hash is the run's id.

`parse` and `template` are for people (TOML), `canonical`, `sign` and `verify` for nodes, `init` for organisers.
"""

from swarmnode.manifest.amend import amended
from swarmnode.manifest.cross_field import BOUNDARY_BLOCK, boundary_nbytes, boundary_width
from swarmnode.manifest.folder import (
    MANIFEST_FILE,
    SIGNED_FILE,
    init,
    manifest_at,
    read_manifest,
    sign_folder,
    write_signed,
)
from swarmnode.manifest.gossip_compat import OuterConstants, constants
from swarmnode.manifest.kind_compat import by_forward_passes, from_base
from swarmnode.manifest.recipe import PRESETS, Recipe, fit, of_kind
from swarmnode.manifest.signed import canonical, parse_signed, read_signed, run_id_of, sign, verify
from swarmnode.manifest.spec import (
    BYTES_END,
    AboutSpec,
    AccessSpec,
    BaseSpec,
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    GossipSpec,
    InnerSpec,
    LimitsSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    RecoverySpec,
    TrainingSpec,
    TransportSpec,
)
from swarmnode.manifest.text import MANIFEST_BYTES_MAX, parse, template

__all__ = [
    "BOUNDARY_BLOCK",
    "BYTES_END",
    "MANIFEST_BYTES_MAX",
    "MANIFEST_FILE",
    "PRESETS",
    "SIGNED_FILE",
    "CheckpointSpec",
    "OuterConstants",
    "AboutSpec",
    "AccessSpec",
    "BaseSpec",
    "DataSpec",
    "EvaluationSpec",
    "Recipe",
    "GossipSpec",
    "InnerSpec",
    "LimitsSpec",
    "Manifest",
    "ModelSpec",
    "PipelineSpec",
    "RecoverySpec",
    "TrainingSpec",
    "TransportSpec",
    "boundary_nbytes",
    "amended",
    "boundary_width",
    "canonical",
    "constants",
    "fit",
    "by_forward_passes",
    "from_base",
    "init",
    "of_kind",
    "parse",
    "parse_signed",
    "manifest_at",
    "read_manifest",
    "read_signed",
    "run_id_of",
    "sign",
    "sign_folder",
    "template",
    "verify",
    "write_signed",
]
