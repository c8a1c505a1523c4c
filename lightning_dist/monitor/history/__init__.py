"""What outlives a run: a small record of its figures, comparisons of two, and drifts over many.

``series`` takes a run's values by metric, ``blocks`` makes them independent, ``summary`` is the record, ``folder``
keeps it; ``comparison`` and ``drift`` are the tests. All but ``folder`` are pure.
"""
