"""The sections of a state whose model is not tied, and bytes of an element of each as it travels."""

from swarmnode.model import section

SECTIONS = tuple(name for name in section.SECTIONS if name != "table")
PACKED_ITEMSIZE = {name: section.PACKED_ITEMSIZE[name] for name in SECTIONS}
