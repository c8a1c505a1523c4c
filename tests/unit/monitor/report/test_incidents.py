"""How a report shows what went wrong in a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lightning_dist.monitor.report.incident_marks import marks_of_incidents
from lightning_dist.monitor.report.incidents_section import incidents_section
from lightning_dist.monitor.report.page import html_of
from lightning_dist.monitor.rounds import WholeRun
from tests.support import reported
from tests.support.browser import Browser
from tests.support.rounds import KILLED, made_round
from tests.unit.monitor.report.test_page import HOSTILE, Elements, data_of

RUN = WholeRun((made_round(1, range(10), at_s=0), made_round(2, range(7, 12), at_s=13, ranks=1)), (KILLED,))


def test_a_run_without_incidents_has_no_section() -> None:
    one = WholeRun(RUN.rounds[:1])
    assert incidents_section(one) is None
    said = Elements(html_of(one.main, reported.NONE, whole=one)).text()
    assert "Incidents" not in said
    assert "Goodput" not in said


def test_an_incident_is_a_line_with_a_bar_of_its_phases() -> None:
    page = html_of(RUN.main, reported.NONE, whole=RUN)
    said = Elements(page).text()
    for text in (
        "goodput", "67 %", "a rank was killed", "went on smaller", "2 to 1", "rank 1 on host-b: killed by SIGKILL <b>",
        "4.00 s", "Goodput is useful time over wall time: of 18.0 s in 2 rounds, 12.0 s went into steps that stand",
    ):  # fmt: skip
        assert text in said, text
    bars = [attributes for tag, attributes in Elements(page).elements if attributes.get("class") == "bar"]
    labels = [str(attributes["aria-label"]) for attributes in bars]
    assert "useful 12.0 s, done again 3.00 s, in no step 3.00 s" in labels
    phases = "Notice 100 ms, Stop 400 ms, Regroup 500 ms, Start 1.00 s, Load 500 ms, First step 1.50 s"
    assert phases in labels


def test_rounds_without_an_agent_have_a_goodput_and_say_that_nobody_knows_why() -> None:
    said = Elements(str(incidents_section(WholeRun(RUN.rounds)))).text()
    assert "goodput" in said
    assert "No agent has written down why." in said


def test_what_this_release_does_not_know_keeps_its_name() -> None:
    odd = dataclasses.replace(
        KILLED, what="solar_flare", action="sat_out", seconds={"detect": 1.0, "cool_down": 2.0}, step_before=None
    )
    said = Elements(str(incidents_section(WholeRun(RUN.rounds, (odd,))))).text()
    for text in ("solar flare", "sat out", "cool down", "unknown", "3.00 s"):
        assert text in said, text


def test_what_an_incident_says_is_text() -> None:
    odd = dataclasses.replace(KILLED, what=HOSTILE, who=HOSTILE, detail=HOSTILE, action=HOSTILE, seconds={HOSTILE: 1.0})
    whole = WholeRun(RUN.rounds, (odd,))
    known = {tag for tag, _ in Elements(html_of(RUN.main, reported.NONE, whole=RUN)).elements}
    assert {tag for tag, _ in Elements(html_of(whole.main, reported.NONE, whole=whole)).elements} <= known
    assert "<img src=x onerror=alert(2)>" in Elements(str(incidents_section(whole))).text()


def test_incidents_are_marked_on_the_axes() -> None:
    (mark,) = marks_of_incidents(RUN.incidents, RUN.joined)
    assert mark == (9, 10.0, "incident 1: a rank was killed")
    data = data_of(html_of(RUN.main, reported.NONE, whole=RUN))
    assert data["incidents"] == [[9, 10, mark.title]]
    assert data["course"]["steps"] == list(range(12)), "the curves are of all rounds"
    unknown = dataclasses.replace(KILLED, step_before=None, step_after=None, time=float("inf"))
    assert marks_of_incidents((unknown,), RUN.joined) == []
    assert data_of(html_of(reported.run(steps=5), reported.FOUND))["incidents"] == []


@pytest.mark.browser
def test_a_browser_draws_the_marks_and_fits_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html_of(RUN.main, reported.NONE, whole=RUN), encoding="utf-8")
    with Browser() as browser:
        for width in (1280, 360):
            with browser.page(width=width) as page:
                page.open(path)
                assert page.errors == []
                assert page.evaluate("document.documentElement.scrollWidth") == width
                marks = "document.querySelectorAll('.plot .incident').length"
                assert page.evaluate(marks) == page.evaluate("document.querySelectorAll('.plot svg').length") > 0
                assert page.evaluate("document.querySelector('.plot .incident title').textContent") == (
                    "incident 1: a rank was killed"
                )
