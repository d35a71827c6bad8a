"""The report as one HTML file. The only module that needs jinja2, which is optional."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

_TEMPLATE = "report.html.jinja"


def render(*, pictures: dict[str, str], **content: Any) -> str:  # noqa: ANN401
    """Fills the template in. Everything but the pictures is escaped.

    Args:
        pictures: SVG elements by name, made by this package.
        content: what the template names.

    Returns:
        A whole HTML document that refers to nothing outside of itself.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": lambda share: f"{share:.1%}", "count": lambda number: f"{number:,}"}
    template = environment.from_string((files("datamask_pl.evidence") / _TEMPLATE).read_text(encoding="utf-8"))
    marked = {name: Markup(picture) for name, picture in pictures.items()}  # our own
    return template.render(pictures=marked, **content)
