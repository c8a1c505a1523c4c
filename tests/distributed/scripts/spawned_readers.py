"""Reads token shards by processes that are started anew. Usage: python spawned_readers.py METHOD FOLDER."""

import multiprocessing
import sys

import torch

from lightning_dist import DataConfig, ShardedLoader


def doubled(sample):
    return 2 * sample


if __name__ == "__main__":
    torch.multiprocessing.set_start_method(sys.argv[1])
    options = {"batch_size": 4, "lanes": 2, "workers": 1, "readers": "processes", "persistent": True}
    loader = ShardedLoader(sys.argv[2], config=DataConfig(**options), transform=doubled)
    for _ in range(2):
        print("read", sorted(int(sample[0]) for batch in loader for sample in batch), flush=True)
    loader.close()
    print("left", multiprocessing.active_children(), flush=True)
