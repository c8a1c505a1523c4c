"""Faults on purpose: a run is hit at given ranks and steps, and one sees what becomes of it.

- :mod:`~lightning_dist.elastic.chaos.kinds`: what can be done to a run; a literal table.
- :mod:`~lightning_dist.elastic.chaos.plan`: which faults, when; from YAML, or drawn by ``random_plans``. Pure.
- :mod:`~lightning_dist.elastic.chaos.folder`: what ranks and conductors tell each other, as files; and the record.
- :mod:`~lightning_dist.elastic.chaos.injector`: in a rank, before each step.
- :mod:`~lightning_dist.elastic.chaos.conductor`: one a host, beside the launched command: what a rank cannot do itself.
- :mod:`~lightning_dist.elastic.chaos.host`: links, processes, memory and files of a host.

Nothing of this is in a run that was not started by ``hierdist chaos``, or without the variable ``HIERDIST_CHAOS``.
"""
