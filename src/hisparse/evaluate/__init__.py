"""Measurements of a cache against the dense one: retrieval (`needles`, `retrieval`), `fidelity` and `speed`."""
