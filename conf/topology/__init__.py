"""Hydra group ``topology``."""
