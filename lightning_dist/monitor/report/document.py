"""One HTML file: no network, no script but its own, held to that by a policy in its head."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from lightning_dist.monitor.report.markup import Markup, element


def document(title: str, *body: Markup, style: str, script: str | None = None) -> str:
    """The whole file.

    Args:
        title: Its name in the browser.
        body: What it shows, its scripts too.
        style: All of its CSS.
        script: The JavaScript that may run; ``None``: none may.
    """
    runs = "" if script is None else f"script-src '{_hash(script)}'; "
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; {runs}base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(style)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", *body), lang="en") + "\n"


def section(name: str, title: str, *children: Markup | None) -> Markup:
    """A part with a heading, which links may name."""
    return element("section", element("h2", title, id=name), *children, aria_labelledby=name)


def asset(name: str) -> str:
    """The text of a file in ``assets``."""
    return resources.files("lightning_dist.monitor.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
