"""The manifest: one training job, frozen, hashed and signed; the hash is the run's id (design section 2).

`parse` and `template` are for people (TOML), `canonical`, `sign` and `verify` for nodes, `init` for organisers.
"""

from swarmnode.manifest.across import BOUNDARY_BLOCK, boundary_nbytes, boundary_width
from swarmnode.manifest.fitted import Fitted, fit
from swarmnode.manifest.folder import (
    MANIFEST_FILE,
    SIGNED_FILE,
    init,
    read_manifest,
    sign_folder,
    write_signed,
)
from swarmnode.manifest.preset import PRESETS
from swarmnode.manifest.signed import canonical, parse_signed, read_signed, run_id_of, sign, verify
from swarmnode.manifest.spec import (
    AccessSpec,
    CheckpointSpec,
    DataSpec,
    GossipSpec,
    InnerSpec,
    LimitsSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    RecoverySpec,
)
from swarmnode.manifest.text import MANIFEST_BYTES_MAX, parse, template

__all__ = [
    "BOUNDARY_BLOCK",
    "MANIFEST_BYTES_MAX",
    "MANIFEST_FILE",
    "PRESETS",
    "SIGNED_FILE",
    "CheckpointSpec",
    "AccessSpec",
    "DataSpec",
    "Fitted",
    "GossipSpec",
    "InnerSpec",
    "LimitsSpec",
    "Manifest",
    "ModelSpec",
    "PipelineSpec",
    "RecoverySpec",
    "boundary_nbytes",
    "boundary_width",
    "canonical",
    "fit",
    "init",
    "parse",
    "parse_signed",
    "read_manifest",
    "read_signed",
    "run_id_of",
    "sign",
    "sign_folder",
    "template",
    "verify",
    "write_signed",
]
