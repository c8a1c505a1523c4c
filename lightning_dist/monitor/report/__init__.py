"""A run's record as something to read: one HTML file, a terminal's page, a trace for Perfetto.

Pure from the record to the numbers (``breakdown``, ``throughput``, ``series``, ``shown``); ``page``, ``terminal`` and
``trace`` set them. The verdict and pictures of others come as arguments. Everything that a record says is text to be
escaped, never markup: hosts, options and names of events are not ours.
"""
