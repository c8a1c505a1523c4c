"""DistributedDataParallel as the strategy needs it: buffers go through the seam, and it knows what it was made for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.config import ParallelConfig
from lightning_dist.errors import ConfigError, unknown_option

_OVERRIDES = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"}
# What the strategy itself hands to DDP, or what would let it synchronise by other ways than ours, is not the user's.
_DDP_ARGUMENTS = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {
    *("self", "module", "device_ids", "output_device", "dim", "process_group", "device_mesh"),
    *_OVERRIDES,
}


class DataParallel(DistributedDataParallel):
    """A module whose gradients are averaged over ranks; every rank makes it, and calls its collective methods, alike.

    Args:
        module: On its device already.
        operation: Opens the seam around an operation of the default process group, given the operation's name.
        **arguments: Those of :class:`~torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, operation: Callable[[str], AbstractContextManager[None]], **arguments: Any
    ) -> None:
        super().__init__(module, **arguments)
        self._operation = operation
        self._seen = tuple(module.parameters())  # listed once: walking a module tree at each step would cost
        self._trained = [parameter.requires_grad for parameter in self._seen]
        self._static_graph_flushed = False
        self._static_graph_recorded = False
        self.finish_backward: Callable[[], None] = lambda: None
        """To be called when a backward is done."""

    @property
    def is_current(self) -> bool:
        """Whether the parameters that want gradients now are those it was made for, or, if unused ones are looked for,
        among them.
        """
        trained = [parameter.requires_grad for parameter in self._seen]
        if self.find_unused_parameters:
            return not any(now and not before for now, before in zip(trained, self._trained, strict=True))
        return trained == self._trained

    def keep_buckets(self) -> None:
        """Leave buckets as they are; the reducer would deal parameters anew in the order in which gradients come."""
        self.reducer = _KeptBuckets(self.reducer)  # type: ignore[assignment]  # it does what one does

    def flush_static_graph(self) -> None:
        """Launch what a static graph's first backward held back; under manual optimization nobody else does. Once."""
        if self.static_graph and not self._static_graph_flushed:
            self.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # not in torch's stubs
            self._static_graph_flushed = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside local; not the very first of a static graph.

        The reducer records a static graph in the first backward of all, and fails (an internal assert, torch 2.13) if
        it took no part in that one. What was averaged early is averaged again at the window's end, to the same.
        """
        if self.static_graph and not self._static_graph_recorded:
            self._static_graph_recorded = True
            yield
        else:
            with super().no_sync():
                yield

    @property
    def syncs_buffers(self) -> bool:
        """Whether there are buffers, and it was made to keep them alike."""
        return bool(self.will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0, if it was made to; collective."""
        if self.syncs_buffers:
            self._sync_buffers()

    def _sync_buffers(self) -> None:  # also called by the forward
        with self._operation("broadcast of buffers"):
            super()._sync_buffers()  # type: ignore[no-untyped-call]


def keep_from_reducer(module: nn.Module, names: Iterable[str]) -> None:
    """Leave the gradients of some parameters, and their first values, to somebody else; before the module is wrapped.

    Args:
        module: To be wrapped.
        names: Of the parameters; those named before are the reducer's again.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def has_parameters_for_reducer(module: nn.Module) -> bool:
    """Whether any parameter that trains is left to the reducer."""
    kept = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return any(parameter.requires_grad and name not in kept for name, parameter in module.named_parameters())


class _KeptBuckets:
    """A reducer that is never told to make its buckets anew, which DDP does before the second forward (torch 2.13).

    Args:
        reducer: That of :class:`~torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def explain_unused_parameters(exception: BaseException) -> None:
    """Put into the reducer's error what to write, if it is the one about unused parameters."""
    said = str(exception)
    if "Expected to have finished reduction in the prior iteration" in said:
        exception.args = (
            "Some parameters took no part in producing the loss that training_step returned. If that is intended, "
            "let them be found: strategy='hierdist_find_unused_parameters_true', or "
            "HierDistStrategy(find_unused_parameters=True), or parallel.find_unused_parameters=true. "
            f"The reducer said: {said}",
        )


def split_arguments(
    config: ParallelConfig, arguments: Mapping[str, Any], *, own: Iterable[str]
) -> tuple[ParallelConfig, dict[str, Any]]:
    """DDP's arguments that are options of ours become options; the rest stays for DDP, if it has them.

    Args:
        config: The options so far.
        arguments: What the user gave besides the strategy's own arguments.
        own: Names of the strategy's own arguments, for the error.

    Raises:
        UnknownOptionError: Neither DDP nor the strategy takes it.
        ConfigError: It would put another comm hook in place of ours.
    """
    if hooks := [name for name in arguments if name.startswith("ddp_comm_")]:
        raise ConfigError(f"{hooks[0]} is not taken: the strategy has a comm hook; choose what it does with sync=")
    allowed = sorted({*own, *_OVERRIDES, *_DDP_ARGUMENTS} - {"self", "ddp_arguments"})
    for name in arguments:
        if name not in allowed:
            raise unknown_option("argument of HierDistStrategy", name, allowed)
    ours = {name: value for name, value in arguments.items() if name in _OVERRIDES}
    return dataclasses.replace(config, **ours), {name: value for name, value in arguments.items() if name not in ours}
