"""Who is alive, and how a run goes on when somebody is not.

- :mod:`~lightning_dist.elastic.policy`: what is to be done, as a pure state machine.
- the agents of the hosts, one of which leads; the ranks' progress; warm processes; health checks; injected faults.
"""
