"""Hydra group ``trainer``."""
