"""The manifest: one training job, frozen, hashed and signed. The hash is the run's id.

`parse` and `template` are for people (TOML), `canonical`, `sign` and `verify` for nodes, `init` for organisers.
"""

from swarmnode.manifest.amend import amended as amended
from swarmnode.manifest.cross_field import BOUNDARY_BLOCK as BOUNDARY_BLOCK
from swarmnode.manifest.cross_field import LOW_BITS as LOW_BITS
from swarmnode.manifest.cross_field import boundary_codes as boundary_codes
from swarmnode.manifest.cross_field import boundary_nbytes as boundary_nbytes
from swarmnode.manifest.cross_field import boundary_width as boundary_width
from swarmnode.manifest.folder import MANIFEST_FILE as MANIFEST_FILE
from swarmnode.manifest.folder import SIGNED_FILE as SIGNED_FILE
from swarmnode.manifest.folder import init as init
from swarmnode.manifest.folder import manifest_at as manifest_at
from swarmnode.manifest.folder import read_manifest as read_manifest
from swarmnode.manifest.folder import sign_folder as sign_folder
from swarmnode.manifest.folder import write_signed as write_signed
from swarmnode.manifest.gossip_compat import OuterConstants as OuterConstants
from swarmnode.manifest.gossip_compat import constants as constants
from swarmnode.manifest.kind_compat import from_base as from_base
from swarmnode.manifest.recipe import PRESETS as PRESETS
from swarmnode.manifest.recipe import Recipe as Recipe
from swarmnode.manifest.recipe import fit as fit
from swarmnode.manifest.recipe import of_kind as of_kind
from swarmnode.manifest.signed import canonical as canonical
from swarmnode.manifest.signed import parse_signed as parse_signed
from swarmnode.manifest.signed import read_signed as read_signed
from swarmnode.manifest.signed import run_id_of as run_id_of
from swarmnode.manifest.signed import sign as sign
from swarmnode.manifest.signed import verify as verify
from swarmnode.manifest.spec import BYTES_END as BYTES_END
from swarmnode.manifest.spec import AboutSpec as AboutSpec
from swarmnode.manifest.spec import AccessSpec as AccessSpec
from swarmnode.manifest.spec import BaseSpec as BaseSpec
from swarmnode.manifest.spec import CheckpointSpec as CheckpointSpec
from swarmnode.manifest.spec import DataSpec as DataSpec
from swarmnode.manifest.spec import EvaluationSpec as EvaluationSpec
from swarmnode.manifest.spec import GossipSpec as GossipSpec
from swarmnode.manifest.spec import InnerSpec as InnerSpec
from swarmnode.manifest.spec import LimitsSpec as LimitsSpec
from swarmnode.manifest.spec import Manifest as Manifest
from swarmnode.manifest.spec import ModelSpec as ModelSpec
from swarmnode.manifest.spec import PipelineSpec as PipelineSpec
from swarmnode.manifest.spec import RecoverySpec as RecoverySpec
from swarmnode.manifest.spec import TrainingSpec as TrainingSpec
from swarmnode.manifest.spec import TransportSpec as TransportSpec
from swarmnode.manifest.text import MANIFEST_BYTES_MAX as MANIFEST_BYTES_MAX
from swarmnode.manifest.text import parse as parse
from swarmnode.manifest.text import template as template
