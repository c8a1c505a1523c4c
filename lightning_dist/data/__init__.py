"""What is read: streamed data, in an order that no number of ranks changes, from storage once a host.

Each package builds on those before it: ``index`` (what a data set consists of), ``order`` (which sample stands where;
pure), ``storage`` (folders), ``cache`` (chunks on this host), ``formats`` (from a chunk to samples), ``loading`` (from
samples to batches) and ``writing``. All agree on the contracts in ``reading``; ``decoded`` bounds what open chunks take
in memory, ``placed_bytes`` maps them, ``packing`` puts documents into rows.
"""
