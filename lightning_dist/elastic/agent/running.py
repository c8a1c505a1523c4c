"""From what was asked for to the exit code: makes an agent's parts, runs it, and takes everything down again."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from lightning_dist.elastic.agent.environment import template_environment
from lightning_dist.elastic.agent.fitness import prove_fit
from lightning_dist.elastic.agent.folder import AgentFolder, remove_abandoned
from lightning_dist.elastic.agent.host_agent import HostAgent
from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.agent.looking import Lookout
from lightning_dist.elastic.agent.options import LaunchOptions
from lightning_dist.elastic.agent.orders import TURN_S, Orders
from lightning_dist.elastic.agent.output import Output
from lightning_dist.elastic.agent.signals import Signals
from lightning_dist.elastic.agent.warm import WarmProcess
from lightning_dist.elastic.session import End, Session

_LOOKUPS = "RES_OPTIONS"


def run_host(
    options: LaunchOptions,
    *,
    open_session: Callable[[Callable[[str], None]], Session],
    environ: Mapping[str, str],
    check: Callable[[], str | None] | None = None,
    may_fork: bool = False,
) -> int:
    """Run this host's ranks until the run is over. To be called in the main thread: signals are handled meanwhile.

    Args:
        options: What was asked for.
        open_session: Makes the connection to whoever leads, given how to tell people something.
        environ: Variables that ranks inherit.
        check: Says what is wrong with this host, or ``None``: it is well.
        may_fork: This process is the agent's alone; see :class:`~lightning_dist.elastic.agent.warm.WarmProcess`.

    Returns:
        The exit code: 0 when training is over, else the failing rank's, or 128 and the signal that ended this agent.

    Raises:
        LaunchError: Ranks cannot be started.
    """
    with ExitStack() as stack:
        stack.enter_context(_short_lookups())
        remove_abandoned()
        parts = _make_parts(options, stack, open_session, environ, may_fork=may_fork)
        end = _prepare(parts, check)
        if end is None:
            agent = HostAgent(parts)
            agent.run()
            end = agent.end
        assert end is not None
        code = end.exit_code if end.exit_code >= 0 else 128 - end.exit_code  # as a shell tells a signal
        if code:
            parts.say(f"ends with exit code {code}: {end.reason}")
        return code


def _make_parts(
    options: LaunchOptions,
    stack: ExitStack,
    open_session: Callable[[Callable[[str], None]], Session],
    environ: Mapping[str, str],
    *,
    may_fork: bool,
) -> HostParts:
    """What the agent works with, in the order in which it begins; the stack takes it down."""
    host, num_ranks = options.host, options.num_ranks
    say = functools.partial(_say, host)
    folder = stack.enter_context(AgentFolder(num_ranks))
    output = stack.enter_context(Output(with_prefix=options.with_prefix, logs=options.logs))
    warm = WarmProcess(
        folder.path,
        import_folder=options.program.import_folder,
        preload=options.preload,
        environment=template_environment(environ),
        may_fork=may_fork,
    )
    template = stack.enter_context(warm)
    signals = stack.enter_context(Signals())
    output.open()
    session = open_session(say)
    stack.callback(session.leave, "its agent ends")
    return HostParts(
        host=host,
        address=options.address,
        program=options.program,
        num_ranks=num_ranks,
        environ=dict(environ),
        session=session,
        orders=Orders(session, signals, host=host, say=say),
        folder=folder,
        template=template,
        output=output,
        lookout=Lookout(host=host, folder=folder.path, options=options.elastic(), mode=options.mode, say=say),
        record=options.record,
        say=say,
    )


def _say(host: str, text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads any more
        sys.stderr.write(f"hierdist [{host}] {text}\n")
        sys.stderr.flush()


@contextmanager
def _short_lookups() -> Iterator[None]:
    """Names are looked up with patience of a second, unless the user says otherwise.

    A store's only thread asks for the name of each client: without an answering DNS, 5 s a time.
    """
    if _LOOKUPS in os.environ:
        yield
        return
    os.environ[_LOOKUPS] = "timeout:1 attempts:1"
    try:
        yield
    finally:
        os.environ.pop(_LOOKUPS, None)


def _prepare(parts: HostParts, check: Callable[[], str | None] | None) -> End | None:
    """Check the host while the template imports; how the run ends if it does so already."""
    unfit = None if check is None else prove_fit(parts, check)
    if unfit is not None:
        return unfit
    orders, template = parts.orders, parts.template
    while not template.is_ready:
        order = orders.next(TURN_S, template)
        if isinstance(order, End) or orders.leaving is not None:
            return order if isinstance(order, End) else orders.leaving
        template.collect()
    return None
