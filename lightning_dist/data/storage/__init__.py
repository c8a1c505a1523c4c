"""Folders on disk or at a URL: ``shards`` to read from, ``output`` to write to."""
