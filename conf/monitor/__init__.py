"""Hydra group ``monitor``."""
