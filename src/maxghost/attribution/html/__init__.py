"""The report as one self-contained HTML page: no network, no fonts to load, drawings as inline SVG."""

from maxghost.attribution.html.page import notice, render

__all__ = ["notice", "render"]
