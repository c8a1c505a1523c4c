"""The agent of a host: it runs the host's ranks, and knows nothing of other hosts.

- :mod:`~lightning_dist.elastic.agent.host_agent`: the loop, on torch's agent.
- :mod:`~lightning_dist.elastic.agent.template`: a process with its imports done, of which ranks are forked.
- :mod:`~lightning_dist.elastic.agent.rank_group`: the ranks of a round, from their start to their end.
"""
