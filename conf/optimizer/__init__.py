"""Hydra group ``optimizer``."""
