"""Research: outer methods and codecs that runs may choose beside those of swarmnode. `rules.py` lists them."""
