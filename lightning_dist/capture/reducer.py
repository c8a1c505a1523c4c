"""When the buckets of DistributedDataParallel's own reducer travel, without touching how they do.

Note [Why no comm hook]
    The reducer averages and sends in C++. A hook in Python would see each bucket's end, but the reducer then leaves the
    division to it: one more pass over all gradients, which on CPU made a step of 80 MB a quarter longer. So what is
    seen is when each bucket is complete (one hook on the parameter whose gradient completes it) and when backward ends,
    which is when the last sum has arrived.

Note [One rate]
    Buckets are taken to travel one after another, at one rate: the greatest at which the last one arrives at the end of
    backward. What is exposed, from the last gradient to that end, is measured and not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_dist.events import EventStream, Mark
from lightning_dist.monitor.intervals import Interval

_LOOKS = 4  # at how many backward passes it is asked whether the buckets are final


def transfers(launched_ns: Sequence[int], sizes_bytes: Sequence[int], end_ns: int) -> list[Interval]:
    """When buckets travelled; pure. See Note [One rate].

    Args:
        launched_ns: When each was complete, in order.
        sizes_bytes: Of each.
        end_ns: When the last one had arrived.
    """
    left_bytes, ns_per_byte = 0, float("inf")
    for launched, size in zip(reversed(launched_ns), reversed(sizes_bytes), strict=True):
        left_bytes += size
        ns_per_byte = min(ns_per_byte, max(0, end_ns - launched) / max(1, left_bytes))
    found: list[Interval] = []
    free_ns = 0
    for launched, size in zip(launched_ns, sizes_bytes, strict=True):
        start = max(launched, free_ns)
        free_ns = min(end_ns, start + round(size * ns_per_byte))
        found.append((min(start, free_ns), free_ns))
    return found


class ReducerWatch:
    """The buckets of one wrapped module.

    Args:
        model: Wrapped; its reducer's path is the built-in one or any hook's.
        events: Where spans go.
        tier: The slowest that its sums cross.
    """

    def __init__(self, model: DistributedDataParallel, events: EventStream, *, tier: str) -> None:
        self.model = model
        self._events = events
        self._tier = tier
        self._looks = _LOOKS
        self._sizes: list[int] = []
        self._launched: dict[int, Mark] = {}
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """A backward comes."""
        self._launched = {}

    def end(self, computed: Mark, end: Mark) -> None:
        """It is over: say when buckets travelled.

        Args:
            computed: When its last gradient was there.
            end: When it was over.
        """
        launched, count = self._launched, len(self._sizes)
        if count and len(launched) == count:
            self._when_known((*(launched[bucket] for bucket in range(count)), end), self._say)
        else:  # the buckets are not final yet, or some parameter was not used
            self._when_known((computed, end), self._say_all)
        if not count and self._looks:
            self._looks -= 1
            self._look()

    def release(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _when_known(self, marks: tuple[Mark, ...], call: Callable[..., None]) -> None:
        clock = self._events.device_clock
        if clock is None:
            call(*marks)
        else:
            clock.when_known(marks, call)

    def _say(self, *moments_ns: int) -> None:
        for (start, end), size in zip(
            transfers(moments_ns[:-1], self._sizes, moments_ns[-1]), self._sizes, strict=True
        ):
            self._span(start, end, size)

    def _say_all(self, computed_ns: int, end_ns: int) -> None:
        self._span(computed_ns, end_ns, self._all_bytes())

    def _span(self, start_ns: int, end_ns: int, size_bytes: int) -> None:
        self._events.span(
            "comm.reducer",
            start_ns,
            end_ns=end_ns,
            lane="reducer",
            thread=0,
            operation="all_reduce",
            tier=self._tier,
            size_bytes=size_bytes,
        )

    def _look(self) -> None:
        """Whether the reducer has dealt parameters to buckets in the order of their gradients; it does so once."""
        known = self.model._get_ddp_logging_data()
        dealt, order = (
            known.get("rebuilt_per_bucket_param_indices"),
            known.get("prev_iteration_grad_ready_order_indices"),
        )
        if not (known.get("has_rebuilt_buckets") and dealt and order):
            return
        place = {int(index): n for n, index in enumerate(str(order).split(","))}
        parameters = self._parameters()
        buckets = [[int(index) for index in bucket.split()] for bucket in str(dealt).split(",")]
        if sorted(index for bucket in buckets for index in bucket) != list(range(len(parameters))):
            return
        self._sizes = [int(size) for size in str(known["rebuilt_bucket_sizes"]).split(",")]
        for number, bucket in enumerate(buckets):
            last = max(bucket, key=lambda index: place.get(index, -1))
            note = partial(self._note, number)
            self._handles.append(parameters[last].register_post_accumulate_grad_hook(note))

    def _parameters(self) -> list[Tensor]:
        """In the reducer's numbering."""
        ignored = self.model.parameters_to_ignore
        named = self.model.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]

    def _all_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._parameters())

    def _note(self, bucket: int, parameter: Tensor) -> None:
        self._launched[bucket] = self._events.mark()
