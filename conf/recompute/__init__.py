"""Hydra group ``recompute``."""
