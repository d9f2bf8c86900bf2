"""The real ports of this machine: compute, storage, text, sensors."""
