"""Servers of rows as processes of their own: they hold the rows of the ranks of their host, and step them.

``homes`` says which process holds which ranks' rows; ``watch`` starts the processes of a host, also again;
``__main__`` is the process, ``kept`` what it holds and ``answers`` what it is asked; ``remote`` is a rank's shard whose
rows are there, and ``handover`` takes to it what the user's optimizer would do here.
"""
