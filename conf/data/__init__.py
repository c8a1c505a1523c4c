"""Hydra group ``data``."""
