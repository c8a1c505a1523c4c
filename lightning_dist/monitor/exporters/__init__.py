"""Where a run's figures go besides its files: one way a file.

While a run goes, an exporter is handed each step and sample of its rank, from any thread, and must be quick and not
raise. ``prometheus`` serves them over HTTP; ``means`` gathers what a logger gets, an interval at a time. ``parquet``
writes a finished run as tables.
"""
