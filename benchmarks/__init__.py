"""Benchmarks of whole swarms and of methods: run from a checkout by `swarmnode bench`; not in the wheel."""
