"""Whether a host is fit to train: a check of about a second before it joins a run, in a process of its own.

- :mod:`~lightning_dist.elastic.health.limits`: every threshold.
- :mod:`~lightning_dist.elastic.health.findings`: what is measured and found, as values; hosts compared.
- ``compute``, ``memory``, ``disk``, ``link``, ``accelerators``: a check each; ``checks`` lists them.
- :mod:`~lightning_dist.elastic.health.checkup`: runs them within a deadline.
"""
