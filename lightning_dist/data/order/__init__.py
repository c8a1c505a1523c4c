"""Which sample stands where and who takes it; pure. In the order in which they build on each other: ``shuffling``,
``sample_order``, ``mixture``, ``dealing``, ``steps``, ``shares`` (one replica's part), ``identity`` and ``position``
(what is saved), ``replicas``.
"""
