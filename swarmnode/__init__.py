"""swarmnode: train large language models over the internet on machines nobody controls."""

__version__ = "0.1.0"
