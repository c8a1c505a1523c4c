"""Rank 1 does not end when its work is done; rank 0 has no reason to wait for it for ever."""

from __future__ import annotations

import time

from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_dist.launch import RankLauncher

environment = LightningEnvironment()
RankLauncher(environment, num_processes=2, num_nodes=1, exit_grace_s=1.0).launch(lambda: None)
if environment.local_rank() == 1:
    print("rank 1 sleeps", flush=True)
    time.sleep(120)
