"""From samples to batches: ``source``, ``roles``, ``batches``, ``ahead``, ``nodes``, ``running``, ``loader``,
``open_loaders``; ``agreed`` for loaders of others.
"""
