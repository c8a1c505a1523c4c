"""Hydra group ``elastic``."""
