"""Attackers against a run, in one table; `swarmnode bench attack`."""
