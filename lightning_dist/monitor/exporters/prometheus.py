"""A Prometheus endpoint of one rank.

Each rank knows its own figures only, and serves these: the ranks of a host listen on the port and the ones after it,
``port + local_rank``, and every figure says its rank and host. Sums over ranks are Prometheus's business.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_dist.errors import ConfigError
from lightning_dist.monitor.record import METRICS, RankHeader, Sample, StepRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

_UNITS = {"s": "seconds", "bytes": "bytes", "1": "", "1/s": "per_second", "bytes/s": "bytes_per_second"}
_UNITS |= {"W": "watts", "C": "celsius"}
_PREFIX = "hierdist"


def require_package(port: int) -> None:
    """Refuse a port where nothing can serve it.

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"monitor.prometheus_port={port} needs the package prometheus-client: pip install 'lightning-dist[monitor]'"
        )


class PrometheusEndpoint:
    """Serves a rank's newest figures at ``http://HOST:PORT/metrics``. Any thread may hand it some.

    Sequence: made, :meth:`open`, :meth:`step` and :meth:`sample`, :meth:`close`.

    Args:
        port: Of the host's first rank; 0 takes a free one.
        host: Address to listen on; the default is reached from this machine only.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        require_package(port)
        self.port = port
        self.host = host
        self.problem: str | None = None  # why nothing is served
        self._server: _Server | None = None
        self._figures = _Figures()

    def open(self, header: RankHeader) -> None:
        """Listen; a port that is taken leaves :attr:`problem`, not an error."""
        port = self.port + header.local_rank if self.port else 0
        try:
            self._server = _Server(self._figures.of(header), self.host, port)
        except OSError as error:
            self.problem = f"no Prometheus endpoint on {self.host}:{port}: {error}"
            return
        except Exception as error:  # a port beyond the last, another prometheus-client: training goes on without it
            self.problem = f"no Prometheus endpoint on {self.host}:{port}: {type(error).__name__}: {error}"
            return
        self.port = self._server.port

    def step(self, record: StepRecord) -> None:
        """Count a step."""
        self._figures.step(record)

    def sample(self, sample: Sample) -> None:
        """Keep the newest value of a metric."""
        self._figures.sample(sample)

    def close(self) -> None:
        """End the server and its thread. Safe twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _Server:
    def __init__(self, figures: _Figures, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # an optional package

        registry = CollectorRegistry(auto_describe=False)
        registry.register(figures)
        self._http, self._thread = start_http_server(port, host, registry)
        self.port: int = self._http.server_port

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Figures:
    """What is served: sums of steps, newest samples. Collected when Prometheus asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._labels: dict[str, str] = {}
        self._round: float | None = None
        self._sums: dict[tuple[str, str, str], float] = defaultdict(float)  # name, label, label's value
        self._newest: dict[str, float] = {}
        self._step: StepRecord | None = None

    def of(self, header: RankHeader) -> _Figures:
        self._labels = {"rank": str(header.rank), "host": header.host}
        self._round = header.facts.get("round")
        return self

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._step = record
            self._sums["steps", "", ""] += 1
            self._sums["step_seconds", "", ""] += record.duration_s
            for phase, seconds in record.phases.items():
                if seconds is not None:
                    self._sums["phase_seconds", "phase", phase.value] += seconds
            if record.communication is not None:
                self._sums["communication_seconds", "part", "exposed"] += record.communication.exposed_s
                self._sums["communication_seconds", "part", "overlapped"] += record.communication.overlapped_s
                self._sums["communication_bytes", "", ""] += record.communication.size_bytes or 0
            self._sums["samples", "", ""] += record.samples or 0
            self._sums["tokens", "", ""] += record.tokens or 0

    def sample(self, sample: Sample) -> None:
        with self._lock:
            self._newest[sample.metric] = sample.value

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, in the server's threads."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            sums, newest, step = dict(self._sums), dict(self._newest), self._step
        families: dict[str, CounterMetricFamily] = {}
        for (name, label, value), total in sums.items():
            labels = [*self._labels, label] if label else [*self._labels]
            family = families.setdefault(name, CounterMetricFamily(f"{_PREFIX}_{name}", _SUMS[name], labels=labels))
            family.add_metric([*self._labels.values(), value] if label else [*self._labels.values()], total)
        yield from families.values()
        gauges = {name: (_unit_name(name), METRICS[name].title, value) for name, value in newest.items()}
        if step is not None:
            gauges["last_step"] = ("last_step_seconds", "The newest step", step.duration_s)
            gauges["global_step"] = ("global_step", "Optimizer steps before the newest one", float(step.step))
        if self._round is not None:
            gauges["round"] = ("round", "How often the run's ranks were started by now", float(self._round))
        for name, title, newest_value in gauges.values():
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", title, labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], newest_value)
            yield gauge


_SUMS = {
    "steps": "Optimizer steps",
    "step_seconds": "Time in steps",
    "phase_seconds": "Time in a phase of the steps",
    "communication_seconds": "Time in which this rank communicated",
    "communication_bytes": "Payload of this rank's communication",
    "samples": "Samples trained on by this rank",
    "tokens": "Tokens trained on by this rank",
}


def _unit_name(metric: str) -> str:
    """The metric's name with its unit, as Prometheus wants it."""
    unit = _UNITS.get(METRICS[metric].unit, "")
    stem = metric.removesuffix(f"_{unit.partition('_')[0]}")
    return f"{stem}_{unit}" if unit else metric
