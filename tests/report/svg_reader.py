"""Reading a picture back: its elements by class, its texts, its map's cells, and what every picture has to keep to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from detdiff.report.svg import style, text_width

SVG = "{http://www.w3.org/2000/svg}"
_WORDS_ONLY = {"dd-plot", "dd-map", "dd-timeline", "dd-margins", "dd-lens", "dd-t", "dd-prefill", "dd-verify"}


@dataclass(frozen=True)
class Picture:
    """A parsed picture."""

    root: ElementTree.Element

    @classmethod
    def of(cls, svg: str) -> Picture:
        return cls(ElementTree.fromstring(svg))

    @property
    def title(self) -> str:
        return self.root.findtext(f"{SVG}title") or ""

    @property
    def sentence(self) -> str:
        return self.root.findtext(f"{SVG}desc") or ""

    @property
    def size(self) -> tuple[float, float]:
        left, top, width, height = map(float, self.root.get("viewBox", "").split())
        assert (left, top) == (0, 0)
        return width, height

    def of_class(self, *classes: str) -> list[ElementTree.Element]:
        return [each for each in self.root.iter() if {*classes} <= {*(each.get("class") or "").split()}]

    def words(self) -> list[str]:
        texts = [each for each in self.root.iter(f"{SVG}text") if each.get("class") != "dd-halo"]
        return [(each.text or "") + "".join(child.tail or "" for child in each) for each in texts]

    def data(self, *classes: str) -> str:
        """Path data of the first element of these classes; what the legend shows comes after it."""
        found = self.of_class(*classes)
        return "" if not found else found[0].get("d") or ""

    def cells(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of a map's cells."""
        place = self.of_class("dd-cells")[0].get("transform") or ""
        found = re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\) scale\(([\d.]+) ([\d.]+)\)", place)
        assert found is not None
        left, top, width, height = map(float, found.groups())
        return left, top, width, height

    def origins(self) -> list[tuple[int, int]]:
        """Row and column of each diamond over a map's cells."""
        marks = re.findall(r"M([\d.]+) ([\d.]+)l([\d.]+)-", self.data("dd-origin"))
        if not self.of_class("dd-cells") or not marks:
            return []
        left, top, width, height = self.cells()
        return sorted(
            (int((float(y) - top) // height), int((float(x) + float(r) - left) // width)) for x, y, r in marks
        )

    def painted(self, *classes: str) -> set[tuple[int, int]]:
        """Row and column of each of a map's cells of some colours, none of which is painted twice."""
        found: list[tuple[int, int]] = []
        for cls in classes:
            row = column = 0
            for kind, x, y, length in re.findall(r"([Mm])(\d+) ([\d.]+)h(\d+)", self.data("dd-cells", cls)):
                row, column = (int(float(y)), int(x)) if kind == "M" else (row, column + int(x))
                found += [(row, column + n) for n in range(int(length))]
                column += int(length)
        assert len(found) == len({*found})
        return {*found}


DIFFERS = (*(f"dd-s{n}" for n in range(8)), "dd-unsized")


def check(svg: str) -> Picture:
    """What holds for every picture: it parses, it is an image with words, its numbers are numbers, and its text fits in."""
    picture = Picture.of(svg)
    root = picture.root
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert picture.title and len(picture.sentence) > 20
    width, height = picture.size
    assert (float(root.get("width", "0")), float(root.get("height", "0"))) == (width, height)
    rules = style()
    for each in root.iter():
        for name, value in each.attrib.items():
            assert not re.search(r"nan|inf\b|None", value), (name, value[:80])
        assert each.tag in {
            f"{SVG}{tag}" for tag in ("svg", "title", "desc", "style", "rect", "path", "text")
        }
        for cls in (each.get("class") or "").split():
            assert cls in _WORDS_ONLY or re.search(rf"\.{cls}\b", rules), cls
        if each.tag == f"{SVG}text":
            _inside(each, width, height)
    return picture


def _inside(text: ElementTree.Element, width: float, height: float) -> None:
    words = (text.text or "") + "".join(child.tail or "" for child in text)
    x, y, wide = float(text.get("x", "0")), float(text.get("y", "0")), text_width(words, 11)
    if "dd-h" in (text.get("class") or "").split():
        wide = text_width(words, 15)
    start = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.get("text-anchor", "start")]
    assert start >= -2 and start + wide <= width + 2, (words, start, wide, width)
    assert 8 <= y <= height
