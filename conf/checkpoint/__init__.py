"""Hydra group ``checkpoint``."""
