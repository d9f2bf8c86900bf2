"""Research: outer methods, codecs (`rules.py` lists them) and a transport that runs may choose beside swarmnode's."""
