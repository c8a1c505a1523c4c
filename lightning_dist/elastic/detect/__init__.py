"""Who makes progress: ranks write it into shared memory, and the agent of their host judges it.

- :mod:`~lightning_dist.elastic.detect.phases`: what a rank is about.
- :mod:`~lightning_dist.elastic.detect.board`: the shared memory, one cell a rank.
- :mod:`~lightning_dist.elastic.detect.records`: how a value is written into it without a lock.
- :mod:`~lightning_dist.elastic.detect.watch`, :mod:`~lightning_dist.elastic.detect.sights`: who hangs.
- :mod:`~lightning_dist.elastic.detect.slow`: whom the others wait for.

Nothing here imports torch: an agent is to be small, and to see clearly while its ranks do not.
"""
