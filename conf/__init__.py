"""The Hydra groups of lightning_dist, reached as ``pkg://lightning_dist.conf``.

Importing this package, which Hydra does when it first looks into it, makes the schemas known that the YAML files
compose against; an application needs nothing but the search path.
"""

from lightning_dist.config_store import register

register()
