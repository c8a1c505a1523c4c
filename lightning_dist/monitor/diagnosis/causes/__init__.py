"""One cause a file: what it claims of a run. ``data_wait`` and ``exposed`` hold what two of them share."""
