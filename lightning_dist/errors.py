"""Every error the library raises, in one tree.

::

    HierDistError
    ├── ConfigError (ValueError)          a value the user wrote cannot be used
    │   ├── UnknownOptionError            the name is none of ours; the message lists the right ones
    │   └── CombinationError              each value is fine alone, not together
    ├── TopologyError (ValueError)        the hosts, switches or ranks given do not describe a cluster
    │   └── PlacementError                the axes do not fit the hosts
    ├── LaunchError (RuntimeError)        the processes cannot be started as asked
    ├── CollectiveError (RuntimeError)    an operation between ranks failed; names rank, host and operation
    │   ├── CollectiveTimeoutError        a peer did not answer within the deadline
    │   ├── PeerLostError                 a peer died or closed its connection
    │   └── CollectiveMismatchError       ranks asked for different operations
    ├── CheckpointError (RuntimeError)    a checkpoint cannot be written, or does not hold what was asked for
    │   ├── StorageError                  storage refused an operation for good; names it, the place and the reason
    │   ├── UncommittedCheckpointError    it has no commit marker: never finished, half overwritten, or being written
    │   ├── DamagedCheckpointError        it is committed, and what is there is not what was written
    │   ├── ForeignCheckpointError        it is in a format or of a version that this library does not read
    │   ├── UntrustedObjectError          reading it would run code
    │   └── StateMismatchError            it does not fit the state that it is loaded into
    ├── DataError (RuntimeError)          training data cannot be read, or are not what is expected
    │   ├── UnreadableShardError          a shard is missing, torn or damaged, or storage refused it for good
    │   ├── DataCacheError                the cache on this host cannot hold what is read, or cannot be used
    │   ├── ForeignDataError              no format of this library, or a package that it needs is missing
    │   └── ChangedDataError              the data or their order are not those that the state was saved with
    ├── RecordError (RuntimeError)        what a run has left of its measurements is not there, or cannot be read
    ├── UnmeasurableError (RuntimeError)  a metric cannot be measured on this machine; says why
    ├── UnevenInputsError (RuntimeError)  ranks have different numbers of batches
    ├── UnusedParametersError (RuntimeError)  parameters took no part in the loss, and nobody said that this may be
    ├── UnsummedGradientError (RuntimeError)  a backward that the strategy did not start left gradients
    ├── InjectedFaultError (RuntimeError)  a plan of faults (``hierdist chaos``) asked for it
    ├── LostWeightsError (RuntimeError)   weights were spread over ranks when a fit failed
    └── LateGradientError (RuntimeError)  a gradient came after its module's had been summed: it would be lost

A message says what was given, what is allowed, and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HierDistError(Exception):
    """Base of all errors raised by lightning_dist."""


class ConfigError(HierDistError, ValueError):
    """A value the user wrote cannot be used."""


class UnknownOptionError(ConfigError):
    """A name that is none of the allowed ones."""


class CombinationError(ConfigError):
    """Options that are each valid but do not work together."""


class TopologyError(HierDistError, ValueError):
    """The hosts, switches or ranks given do not describe a cluster."""


class PlacementError(TopologyError):
    """The parallel axes do not fit the hosts they would be placed on."""


class LaunchError(HierDistError, RuntimeError):
    """The processes of a run cannot be started as asked."""


class CheckpointError(HierDistError, RuntimeError):
    """A checkpoint cannot be written, or does not hold what was asked for."""


class StorageError(CheckpointError):
    """Storage refused an operation for good."""


class UncommittedCheckpointError(CheckpointError):
    """A checkpoint has no commit marker."""


class DamagedCheckpointError(CheckpointError):
    """What is there of a committed checkpoint is not what was written."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is in a format or of a version that this library does not read."""


class UntrustedObjectError(CheckpointError):
    """Reading it would run code."""


class StateMismatchError(CheckpointError):
    """A checkpoint does not fit the state that it is loaded into."""


class CollectiveError(HierDistError, RuntimeError):
    """An operation between ranks failed.

    Attributes:
        is_named: Whether the message names this rank, its host and the operation already; the seam names each once.
    """

    is_named: bool = False


class CollectiveTimeoutError(CollectiveError):
    """A peer did not answer within the deadline."""


class PeerLostError(CollectiveError):
    """A peer died or closed its connection."""


class CollectiveMismatchError(CollectiveError):
    """Ranks that should run the same operation asked for different ones."""


class DataError(HierDistError, RuntimeError):
    """Training data cannot be read, or are not what is expected."""


class UnreadableShardError(DataError):
    """A shard is missing, torn or damaged, or storage refused it for good."""


class DataCacheError(DataError):
    """The cache of training data on this host cannot hold what is read, or cannot be used."""


class ForeignDataError(DataError):
    """The data are in no format of this library, or a package that the format needs is missing."""


class ChangedDataError(DataError):
    """The data or their order are not those that the state was saved with."""


class RecordError(HierDistError, RuntimeError):
    """What a run has left of its measurements is not there, or cannot be read."""


class UnmeasurableError(HierDistError, RuntimeError):
    """A metric cannot be measured on this machine."""


class UnevenInputsError(HierDistError, RuntimeError):
    """Ranks have different numbers of training batches."""


class UnusedParametersError(HierDistError, RuntimeError):
    """Parameters took no part in the loss, and nobody said that this may be."""


class UnsummedGradientError(HierDistError, RuntimeError):
    """A backward that the strategy did not start left gradients, which would stay those of one rank."""


class InjectedFaultError(HierDistError, RuntimeError):
    """A plan of faults asked for it."""


class LostWeightsError(HierDistError, RuntimeError):
    """Weights were spread over ranks when a fit failed, and cannot be gathered any more."""


class LateGradientError(HierDistError, RuntimeError):
    """A gradient came after those of its module had been summed, and would be lost."""


def unknown_option(what: str, given: object, allowed: Iterable[str]) -> UnknownOptionError:
    """An :class:`UnknownOptionError` that lists the allowed names and the closest one.

    Args:
        what: What the name stands for, e.g. ``"sync"``.
        given: What the user wrote.
        allowed: The names that would have worked.
    """
    names = list(allowed)
    return UnknownOptionError(f"{what}={given!r} is unknown; allowed: {', '.join(names)}{_closest(str(given), names)}")


def unknown_key(key: str, what: str, allowed: Iterable[str]) -> UnknownOptionError:
    """An :class:`UnknownOptionError` that lists the options there are and the closest one.

    Args:
        key: What the user wrote, dotted.
        what: Whose option it would be, e.g. ``"sync"``.
        allowed: The names that would have worked, without what comes before the last dot.
    """
    names = list(allowed)
    close = _closest(key.rpartition(".")[2], names)
    return UnknownOptionError(f"{key} is unknown; the options of {what} are: {', '.join(names)}{close}")


def _closest(given: str, names: list[str]) -> str:
    close = difflib.get_close_matches(given, names, n=1)
    return f". Did you mean {close[0]}?" if close else ""
