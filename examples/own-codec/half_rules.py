"""The row of the codec, in a module without torch: a manifest is checked with it."""

from __future__ import annotations

from swarmnode.run.gossip_rules import CodecRules

CODECS = (CodecRules("half", "half_codec:Half", nbytes=2.0),)
