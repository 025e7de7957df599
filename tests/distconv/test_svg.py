"""SVG figures are well-formed, whatever their texts contain."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from distconv.svg import Drawing

SVG = "{http://www.w3.org/2000/svg}"


def test_shapes_are_drawn_where_they_are_given() -> None:
    drawing = Drawing(200, 100, "a < b & c")
    drawing.rectangle(1, 2, 30, 40, fill="#abc", dashed=True)
    drawing.text(5, 6, "<n & c>", size=9, anchor="end", color="#123", bold=True)
    drawing.line(0, 1, 2.5, 3, arrow=True)
    root = ET.fromstring(str(drawing))
    assert root.get("viewBox") == "0 0 200 100" and root.find(f"{SVG}title").text == "a < b & c"
    rectangle = root.findall(f"{SVG}rect")[1]
    assert [rectangle.get(n) for n in ("x", "y", "width", "height", "fill")] == ["1", "2", "30", "40", "#abc"]
    assert rectangle.get("stroke-dasharray")
    text = root.find(f"{SVG}text")
    assert (text.text, text.get("font-size"), text.get("text-anchor"), text.get("fill")) == (
        "<n & c>",
        "9",
        "end",
        "#123",
    )
    assert text.get("font-weight") == "bold"
    line = root.find(f"{SVG}line")
    assert [line.get(n) for n in ("x1", "y1", "x2", "y2")] == ["0", "1", "2.5", "3"]
    assert line.get("marker-end") == "url(#head)" and not line.get("stroke-dasharray")
