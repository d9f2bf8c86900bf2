"""The outer methods and codecs (`rules.py` lists them) that runs choose from, and a transport beside swarmnode's."""
