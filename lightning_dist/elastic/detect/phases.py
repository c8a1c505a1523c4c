"""What a rank is about, and what the agent asks of it."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """What a rank is about; each has a deadline of its own, see :class:`~lightning_dist.elastic.detect.watch.Watch`."""

    STARTING = 0  # its process is there; imports, the user's script
    JOINING = 1  # meeting the other ranks
    LOADING = 2  # making model and data, reading a snapshot
    FIRST_STEP = 3  # in its first step, which may compile
    TRAINING = 4  # between the start of a step and its end, or waiting for a batch
    VALIDATION = 5
    SAVING = 6  # training is held by a save
    BETWEEN = 7  # what else runs between two steps: the end of an epoch, callbacks
    ENDING = 8  # training is over, or has failed; the last saves, teardown
    DONE = 9  # it has nothing more to do
    WAITING = 10  # its round is over; the process stays for the next one


class Order(enum.IntEnum):
    """What the agent asks of a rank."""

    NONE = 0
    SNAPSHOT_AND_STOP = 1  # commit a snapshot at the next step, then end
    RELEASE = 2  # leave every wait for other ranks, now
    SNAPSHOT_AND_DEPART = 3  # as 1; this host leaves, and what is in its memory goes with it
