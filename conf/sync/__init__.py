"""Hydra group ``sync``."""
