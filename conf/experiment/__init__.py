"""Hydra group ``experiment``."""
