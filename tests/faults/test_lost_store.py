"""A store of the rendezvous whose process is killed or stopped, while a rank connects to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives
from lightning_dist.comm.signatures import SignatureCheck
from lightning_dist.comm.testimony import Testimony
from lightning_dist.events import EventStream
from tests.faults.runs import GRACE_S, HOSTS, LOAD_S, TIMEOUT_S, Ending
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(120)
"""


def connect_to_lost_store(context: RankContext, number: signal.Signals) -> Ending:
    """One rank, whose store is in another process, as if that were rank 0's."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        store = dist.TCPStore(
            "127.0.0.1", int(server.stdout.readline()), is_master=False, timeout=timedelta(seconds=20)
        )
        collectives = Collectives(
            events=EventStream(rank=1),
            timeout_s=TIMEOUT_S,
            rank=1,
            host_of_rank=["a", "b"],
            testimony=Testimony(dist.PrefixStore("said", store), rank=1, world_size=2, holder=0, grace_s=GRACE_S),
        )
        server.send_signal(number)
        start_s = time.monotonic()
        try:
            SignatureCheck(dist.PrefixStore("asked", store), collectives=collectives, ranks=[0, 1])
        except Exception as error:
            return Ending(type(error).__name__, str(error), time.monotonic() - start_s)
        finally:
            server.kill()
    return Ending()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_connecting_to_a_lost_store_ends_in_time_and_names_who_holds_it(
    ranks: RankPool, number: signal.Signals
) -> None:
    """The store itself would try for twice the 20 s of its own timeout; where its process is stopped, for ever."""
    (ending,) = ranks.run(
        connect_to_lost_store, layout={"a": HOSTS["a"][:1]}, args=(number,), init_group=False, fresh=True, deadline_s=60
    )
    assert ending.error in ("PeerLostError", "CollectiveTimeoutError"), ending
    assert "does not answer: rank 0 (host a), which holds it" in ending.text, ending
    assert ending.after_s < TIMEOUT_S + 2 * GRACE_S + LOAD_S, ending
