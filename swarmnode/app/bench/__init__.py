"""Repeatable measurements. A speed claim in the documentation names the command that measured it."""
