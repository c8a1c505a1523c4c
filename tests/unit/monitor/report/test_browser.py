"""The report in a browser: it opens without errors, fits the screen, shows what it should, and can be used by hand."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report.page import Picture, html_of
from lightning_dist.monitor.verdict import Verdict
from tests.support import reported
from tests.support.browser import Browser, Page
from tests.unit.monitor.report.test_page import hostile_run, hostile_verdict

pytestmark = pytest.mark.browser

STYLE = resources.files("lightning_dist.monitor.report").joinpath("assets/style.css").read_text(encoding="utf-8")
WORK = ("data_wait", "forward", "backward", "communication", "optimizer", "checkpoint")
DRAWN = '<svg viewBox="0 0 1100 100" width="100%"><text x="0" y="20">rank 0</text></svg>'


def colours(*, dark: bool) -> dict[str, str]:
    """The colours of a theme, as the style names them."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", STYLE.split(":root")[2 if dark else 1]))


def written(folder: Path, record: RunRecord, verdict: Verdict, **options: Any) -> Path:
    path = folder / "report.html"
    path.write_text(html_of(record, verdict, **options), encoding="utf-8")
    return path


def check(browser: Browser, page: Page, path: Path, *, width: int, dark: bool = False) -> None:
    """What holds for any report at any size: no error, no request but itself, nothing wider than the screen."""
    page.open(path)
    assert page.errors == []
    assert page.requests == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = browser.colours(page.screenshot(whole=True))
    theme = colours(dark=dark)
    assert found[theme["page"]] > 0.3 * found.total(), "the page's own colour is most of it"
    for phase in WORK:
        assert found[theme[f"p-{phase}"]] > 30, phase
    assert found[theme["curve"]] > 100, "curves are drawn"


def test_a_report_opens_on_a_desk_and_on_a_phone_in_light_and_dark(tmp_path: Path) -> None:
    path = written(tmp_path, reported.run(), reported.FOUND, pictures=[Picture("The pipeline", DRAWN)])
    with Browser() as browser:
        with browser.page(width=1280) as page:
            check(browser, page, path, width=1280)
        with browser.page(width=360, height=740, dark=True, touch=True) as page:
            check(browser, page, path, width=360, dark=True)


def test_what_a_hostile_record_says_does_not_run(tmp_path: Path) -> None:
    with Browser() as browser, browser.page(width=360, touch=True) as page:
        page.open(written(tmp_path, hostile_run(), hostile_verdict()))
        assert page.errors == []
        assert len(page.requests) == 1
        assert page.evaluate("[document.scripts.length, document.images.length]") == [2, 0]
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_timeline_is_walked_by_keys_and_zoomed_by_fingers(tmp_path: Path) -> None:
    path = written(tmp_path, reported.run(), reported.FOUND, step=50)
    said = "document.getElementById('said').textContent"
    with Browser() as browser, browser.page(width=400, height=800, touch=True) as page:
        page.open(path)
        assert page.evaluate("document.getElementById('which').selectedOptions[0].textContent").startswith("50 (chosen")
        page.evaluate("document.getElementById('timeline').focus()")
        page.press("ArrowRight")
        assert page.evaluate(said).startswith("Rank 0: Data wait, ")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert page.evaluate(said).startswith("Rank 0: Forward, ")
        page.press("ArrowDown")
        assert page.evaluate(said).startswith("Rank 0, comm.cross: comm.cross, ")
        backward = colours(dark=False)["p-backward"]
        page.press("0")
        page.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        before = browser.colours(page.screenshot())[backward]
        box = page.evaluate(
            "(({x, y, width}) => [x, y, width])(document.getElementById('timeline').getBoundingClientRect())"
        )
        x, y = box[0] + box[2] / 2, box[1] + 60
        page.touch("touchStart", (x - 20, y), (x + 20, y))
        page.touch("touchMove", (x - 80, y), (x + 80, y))
        page.touch("touchEnd")
        after = browser.colours(page.screenshot())[backward]
        assert after > 1.5 * before, "zoomed into backward"
        page.evaluate("document.getElementById('after').click()")
        assert page.evaluate("document.getElementById('which').selectedOptions[0].textContent") == "51"
        assert page.errors == []


def test_curves_follow_the_axis_the_cursor_and_the_chosen_rank(tmp_path: Path) -> None:
    path = written(tmp_path, reported.run(ranks=12, steps=100), reported.FOUND)
    caption = "document.querySelector('[data-metric=step_time]').parentElement.querySelector('.at').textContent"
    curves = "document.querySelectorAll('[data-metric=step_time] path.%s').length"

    def choose(page: Page, name: str, value: str) -> None:
        page.evaluate(
            f"{{const e = document.getElementById('{name}'); e.value = '{value}'; "
            "e.dispatchEvent(new Event('change'))}"
        )

    with Browser() as browser, browser.page() as page:
        page.open(path)
        assert page.evaluate(curves % "band") == 1
        assert page.evaluate(curves % "marked") == 1, "the straggler"
        assert page.evaluate(curves % "chosen") == 0
        choose(page, "highlight", "5")
        assert page.evaluate(curves % "chosen") == 1
        assert page.evaluate(caption).startswith("median ")
        page.evaluate("document.querySelector('[data-metric=step_time] svg').focus()")
        page.press("ArrowRight")
        assert page.evaluate(caption).startswith("step 0, ")
        page.press("ArrowRight")
        assert page.evaluate(caption).startswith("step 1, ")
        choose(page, "axis", "time")
        labels = page.evaluate(
            "[...document.querySelectorAll('[data-metric=step_time] text')].map((t) => t.textContent)"
        )
        assert "2 s" in labels
        assert page.errors == []


@pytest.mark.parametrize("first", [2**53 - 60, 2**62])
def test_huge_numbers_of_steps_open(tmp_path: Path, first: int) -> None:
    """A browser's numbers cannot count them one by one: of the larger ones, all are the same to it."""
    usual = reported.run(steps=120)
    ranks = {
        number: dataclasses.replace(
            rank,
            steps=tuple(dataclasses.replace(step, step=first + step.step) for step in rank.steps),
            samples=tuple(sample._replace(step=first + sample.step) for sample in rank.samples),
            spans=tuple(span._replace(step=first + span.step) for span in rank.spans),
        )
        for number, rank in usual.ranks.items()
    }
    path = written(tmp_path, dataclasses.replace(usual, ranks=ranks), reported.FOUND)
    labels = "document.querySelectorAll('[data-metric=step_time] text').length"
    with Browser() as browser, browser.page() as page:
        page.open(path)
        assert page.errors == []
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
        assert 2 < page.evaluate(labels) < 20


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_long_run_of_many_ranks_opens(tmp_path: Path) -> None:
    few = reported.run(ranks=4, steps=5000)
    ranks = {
        number: dataclasses.replace(
            few.ranks[number % 4],
            header=dataclasses.replace(few.ranks[number % 4].header, rank=number, host=f"host-{number // 8}"),
        )
        for number in range(64)
    }
    many = dataclasses.replace(few, ranks=ranks, facts=dataclasses.replace(few.facts, world_size=64))
    path = written(tmp_path, many, reported.FOUND)
    assert path.stat().st_size < 4_000_000
    with Browser() as browser, browser.page() as page:
        check(browser, page, path, width=1280)
