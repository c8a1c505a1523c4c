"""Hydra group ``model``."""
