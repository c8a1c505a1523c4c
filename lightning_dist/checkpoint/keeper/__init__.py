"""A process that keeps files in memory, so that they outlive the ranks that made them: one a host and job.

``server`` is the process and ``__main__`` its start; ``memory`` what it holds, bounded; ``messages`` what is said to it
and how both sides prove who they are; ``client`` the ranks' side; ``folder`` its files as a
:class:`~lightning_dist.checkpoint.storage.Folder`. The process imports Python's own library and this folder's first
three, no torch.
"""
