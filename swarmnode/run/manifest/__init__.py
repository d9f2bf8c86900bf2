"""The manifest: one training job, frozen, hashed and signed. The hash is the run's id.

`parse` and `template` are for people (TOML), `canonical`, `sign` and `verify` for nodes. A run's folder (folder.py) and
presets (recipe.py) are for organisers: nodes do not import them.
"""

from swarmnode.run.manifest.amend import amended as amended
from swarmnode.run.manifest.cross_field import BOUNDARY_BLOCK as BOUNDARY_BLOCK
from swarmnode.run.manifest.cross_field import LOW_BITS as LOW_BITS
from swarmnode.run.manifest.cross_field import boundary_codes as boundary_codes
from swarmnode.run.manifest.cross_field import boundary_nbytes as boundary_nbytes
from swarmnode.run.manifest.cross_field import boundary_width as boundary_width
from swarmnode.run.manifest.gossip_compat import OuterConstants as OuterConstants
from swarmnode.run.manifest.gossip_compat import constants as constants
from swarmnode.run.manifest.kind_compat import from_base as from_base
from swarmnode.run.manifest.signed import canonical as canonical
from swarmnode.run.manifest.signed import parse_signed as parse_signed
from swarmnode.run.manifest.signed import read_signed as read_signed
from swarmnode.run.manifest.signed import run_id_of as run_id_of
from swarmnode.run.manifest.signed import sign as sign
from swarmnode.run.manifest.signed import verify as verify
from swarmnode.run.manifest.spec import BYTES_END as BYTES_END
from swarmnode.run.manifest.spec import AboutSpec as AboutSpec
from swarmnode.run.manifest.spec import AccessSpec as AccessSpec
from swarmnode.run.manifest.spec import BaseSpec as BaseSpec
from swarmnode.run.manifest.spec import CheckpointSpec as CheckpointSpec
from swarmnode.run.manifest.spec import DataSpec as DataSpec
from swarmnode.run.manifest.spec import EvaluationSpec as EvaluationSpec
from swarmnode.run.manifest.spec import GossipSpec as GossipSpec
from swarmnode.run.manifest.spec import InnerSpec as InnerSpec
from swarmnode.run.manifest.spec import LimitsSpec as LimitsSpec
from swarmnode.run.manifest.spec import Manifest as Manifest
from swarmnode.run.manifest.spec import ModelSpec as ModelSpec
from swarmnode.run.manifest.spec import PipelineSpec as PipelineSpec
from swarmnode.run.manifest.spec import RecoverySpec as RecoverySpec
from swarmnode.run.manifest.spec import TrainingSpec as TrainingSpec
from swarmnode.run.manifest.spec import TransportSpec as TransportSpec
from swarmnode.run.manifest.text import MANIFEST_BYTES_MAX as MANIFEST_BYTES_MAX
from swarmnode.run.manifest.text import parse as parse
from swarmnode.run.manifest.text import template as template
