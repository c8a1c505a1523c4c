"""The HTML file: whole, without a network, with nothing of a record as markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from lightning_dist.monitor.record import RankRecord, RunRecord, Sample
from lightning_dist.monitor.report.page import Picture, html_of
from lightning_dist.monitor.verdict import Verdict
from tests.support import reported

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\x00"
VOID = {"br", "col", "input", "link", "meta"}


class Elements(HTMLParser):
    """Elements and texts of a page; fails if they are not nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def text(self) -> str:
        return " ".join(text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def hostile_run() -> RunRecord:
    record = reported.run(
        ranks=2,
        steps=60,
        hosts=[HOSTILE],
        options={HOSTILE: HOSTILE},
        unavailable={HOSTILE: HOSTILE},
        strategy=HOSTILE,
    )
    ranks = {
        number: dataclasses.replace(
            rank,
            header=dataclasses.replace(rank.header, device=HOSTILE),
            spans=tuple(span._replace(name=HOSTILE, lane=HOSTILE) for span in rank.spans),
        )
        for number, rank in record.ranks.items()
    }
    facts = dataclasses.replace(
        record.facts, run_id=HOSTILE, started=HOSTILE, commit=HOSTILE, config_hash=HOSTILE, versions={HOSTILE: HOSTILE}
    )
    return RunRecord(facts, ranks, problems=(HOSTILE,))


def hostile_verdict() -> Verdict:
    finding = dataclasses.replace(
        reported.DATA, summary=HOSTILE, evidence=(HOSTILE,), advice=(HOSTILE,), speedup_at_most=math.inf
    )
    return Verdict(finding, (finding,), missing=(HOSTILE,))


def test_nothing_outside_is_asked_for() -> None:
    page = html_of(reported.run(), reported.FOUND)
    for tag, attributes in Elements(page).elements:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            address = attributes.get(name)
            assert address is None or address == "data:,", (tag, name)
    style = "".join(Elements(page).texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert "fetch(" not in page
    # The namespace of SVG is a name, not an address.
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) <= {"http://www.w3.org/2000/svg"}


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    page = html_of(reported.run(steps=5), reported.FOUND)
    found = Elements(page)
    (policy,) = (
        attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv") is not None
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(content) == 1
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # An attribute would need the policy to allow any.
    assert not [tag for tag, attributes in found.elements if "style" in attributes]
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]


def test_what_a_record_says_is_text() -> None:
    ordinary = Elements(html_of(reported.run(ranks=2, steps=60), reported.FOUND))
    found = Elements(html_of(hostile_run(), hostile_verdict(), pictures=[Picture(HOSTILE, "<svg></svg>", HOSTILE)]))
    known = {tag for tag, _ in ordinary.elements}
    assert {tag for tag, _ in found.elements} <= known
    assert "img" not in known
    assert sum(tag == "script" for tag, _ in found.elements) == 2
    assert "<img src=x onerror=alert(2)>" in found.text()
    names = [name for name, _ in data_of(html_of(hostile_run(), hostile_verdict()))["names"]]
    assert HOSTILE in names


def test_the_verdict_is_said_in_words() -> None:
    said = Elements(html_of(reported.run(), reported.FOUND)).text()
    for words in (
        "Ranks wait for data",
        "41 %",
        "1.69",
        "high",
        "Raise data.workers.",
        "No rank waits less than 5.2 ms.",
        "Communication is exposed: nothing is sent while backward computes",
        "Rank 1 holds the others up",
        "Since step 20.",
        "GPU utilisation: no GPU.",
    ):
        assert words in said


def test_no_verdict_is_said_with_the_reason() -> None:
    said = Elements(html_of(reported.run(steps=3), reported.NONE)).text()
    assert "No verdict" in said
    assert "Only 3 steps were recorded; at least 20 are needed." in said


def test_what_could_not_be_measured_is_unavailable_never_0() -> None:
    said = Elements(html_of(reported.run(samples=False), reported.FOUND)).text()
    assert "unavailable: no GPU" in said
    assert "unavailable: not sampled; ClusterMonitor() among the callbacks samples it" in said
    assert "unavailable: not told apart from the others" in said


def test_stragglers_are_marked() -> None:
    page = html_of(reported.run(), reported.FOUND)
    assert data_of(page)["ranks"][1] == [1, "host-0", "slower than the others since step 20"]
    assert page.count('class="marked"') == 1


def test_a_chosen_step_is_opened() -> None:
    data = data_of(html_of(reported.run(), reported.FOUND, step=50))
    assert data["steps"][data["first"]]["step"] == 50
    data = data_of(html_of(reported.run(), reported.FOUND))
    assert data["steps"][data["first"]]["step"] is None


def test_a_picture_of_another_part_is_shown() -> None:
    drawn = '<svg viewBox="0 0 1 1"><rect width="1" height="1"/></svg>'
    page = html_of(reported.run(steps=5), reported.FOUND, pictures=[Picture("The pipeline", drawn, "1f1b")])
    assert drawn in page
    assert '<h2 id="the-pipeline">The pipeline</h2>' in page


def test_an_ordinary_run_is_small() -> None:
    assert len(html_of(reported.run(ranks=8, steps=500), reported.FOUND).encode()) < 1_000_000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_left_out(value: float) -> None:
    record = reported.run(ranks=1, steps=30)
    rank = record.ranks[0]
    steps = (
        dataclasses.replace(rank.steps[0], duration_s=value, phases=dict.fromkeys(rank.steps[0].phases, value)),
        *rank.steps[1:],
    )
    samples = (Sample("memory", 0, reported.START_NS, value), Sample("unheard_of", 0, reported.START_NS, 1.0))
    odd = RankRecord(rank.header, steps, samples, rank.spans)
    page = html_of(dataclasses.replace(record, ranks={0: odd}), reported.FOUND)
    assert "NaN" not in json.dumps(data_of(page))
    assert "Infinity" not in json.dumps(data_of(page))


def test_a_run_without_any_step_has_a_page() -> None:
    record = reported.run(ranks=1, steps=1)
    empty = dataclasses.replace(record, ranks={0: RankRecord(record.ranks[0].header)})
    said = Elements(html_of(empty, reported.NONE)).text()
    assert "No step was recorded; StepTimeline() among the callbacks records them." in said


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    brighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page(theme: int) -> None:
    style = resources.files("lightning_dist.monitor.report").joinpath("assets/style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style.split(":root")[1 + theme]))
    phases = [name for name in colours if name.startswith("p-")]
    assert len(phases) == 12
    for name in phases:
        assert contrast(colours[name], colours["page"]) >= 3, name  # WCAG 1.4.11, graphics
    for name in ("ink", "soft", "accent", "mark", "good"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name  # WCAG 1.4.3, text
        assert contrast(colours[name], colours["card"]) >= 4.5, name
    assert len(set(colours.values())) >= 20
