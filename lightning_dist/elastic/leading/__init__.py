"""Who leads the agents, and how they talk to whom; :func:`open_session` is what an agent needs of it.

- :mod:`~lightning_dist.elastic.leading.leader` hears all agents and does what the policy says;
  :mod:`~lightning_dist.elastic.leading.node` is an agent's thread, in which a leader may live;
  :mod:`~lightning_dist.elastic.leading.succession` says who leads, as a pure function.
- :mod:`~lightning_dist.elastic.leading.channel` is a connection with signs of life.
"""

from lightning_dist.elastic.leading.channel import Pace
from lightning_dist.elastic.leading.endpoints import Endpoint, parse
from lightning_dist.elastic.leading.opening import open_session
from lightning_dist.elastic.leading.secret import read_secret

__all__ = ["Endpoint", "Pace", "open_session", "parse", "read_secret"]
