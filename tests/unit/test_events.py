"""The event stream: what is recorded, what is forgotten, who hears it."""

from __future__ import annotations

import itertools
import threading

import pytest

from lightning_dist.events import Event, EventKind, EventStream


def make(**arguments: int) -> EventStream:
    ticks = itertools.count(1000, 10)
    return EventStream(clock_ns=lambda: next(ticks), **arguments)


def test_spans_are_stamped_with_step_rank_and_lane() -> None:
    events = make(rank=3)
    events.step = 7
    start_ns = events.clock_ns()
    events.span("comm.cross", start_ns, lane="cross", bucket=2)
    (event,) = events.snapshot()
    assert event == Event(
        EventKind.SPAN, "comm.cross", 7, 3, "cross", 1000, 1010, 0.0, {"bucket": 2}, threading.get_ident()
    )
    assert event.duration_s == pytest.approx(10e-9)


def test_an_end_may_be_given() -> None:
    events = make()
    events.span("x", 5, end_ns=2_000_000_005)
    assert events.snapshot()[0].duration_s == 2.0


def test_a_measured_body_is_a_span_also_when_it_raises() -> None:
    events = make()
    with pytest.raises(KeyError), events.measure("load", lane="data", shard=1):
        raise KeyError
    (event,) = events.snapshot()
    assert (event.name, event.lane, event.attributes) == ("load", "data", {"shard": 1})
    assert event.end_ns > event.start_ns


def test_counters_and_instants_have_no_length() -> None:
    events = make()
    events.count("bytes", 12.5)
    events.instant("stopped", reason="SIGTERM")
    counter, instant = events.snapshot()
    assert (counter.kind, counter.value, counter.duration_s) == (EventKind.COUNTER, 12.5, 0.0)
    assert (instant.kind, instant.attributes, instant.duration_s) == (EventKind.INSTANT, {"reason": "SIGTERM"}, 0.0)


def test_the_oldest_are_forgotten() -> None:
    events = make(capacity=3)
    for number in range(5):
        events.instant(str(number))
    assert [event.name for event in events.snapshot()] == ["2", "3", "4"]
    events.clear()
    assert events.snapshot() == []


def test_sinks_hear_what_comes_after_them_and_until_they_are_removed() -> None:
    events = make()
    heard: list[Event] = []
    also: list[Event] = []
    events.instant("before")
    events.add_sink(heard.append)  # bound methods: each access makes another object
    events.add_sink(also.append)
    events.instant("during")
    events.remove_sink(heard.append)
    events.remove_sink(print)
    events.instant("after")
    assert [event.name for event in heard] == ["during"]
    assert [event.name for event in also] == ["during", "after"]


def test_threads_lose_nothing() -> None:
    events = EventStream(capacity=100_000)

    def emit() -> None:
        for _ in range(1000):
            events.count("n")

    threads = [threading.Thread(target=emit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(event.value for event in events.snapshot()) == 8000
