"""Charts: well-formed, in the page's colours, equal bytes for equal data, and no clash between two of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from brimful.core.errors import InputError
from brimful.reports.bars import Bar, bar_chart
from brimful.reports.charts import Point, agreement, curves, histogram, overlaid_curves, scatter
from brimful.reports.svg import check_charts, width_of

BARS = [Bar("yes", 3, "3 (75.0 %)", strong=True), Bar("no", 1, "1 (25.0 %)"), Bar("never", 0, "0 (0.0 %)")]
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def both() -> list[str]:
    edges = {0: "0", 2: "16", 4: "more"}
    return [
        bar_chart("bars", BARS, alt="Bars", whole=4.0),
        histogram("lengths", (1, 5, 0, 2), edges=edges, axis="tokens", alt="Lengths"),
    ]


@pytest.mark.parametrize("svg", both(), ids=["bars", "histogram"])
def test_a_chart_takes_size_type_and_colours_from_its_page(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.attrib.keys() == {"class", "viewBox", "role", "aria-label"}
    assert not re.findall(r"#[0-9a-f]{6}", svg)
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= {"ink", "muted", "line", "bar", "strong"}
    assert "font-family" not in svg
    assert "font:" not in svg
    assert not [element.tag for element in root.iter() if element.tag.rpartition("}")[2] in {"style", "metadata"}]


def test_charts_say_what_they_show() -> None:
    bars, lengths = both()
    assert texts(bars) == ["yes", "no", "never", "3 (75.0 %)", "1 (25.0 %)", "0 (0.0 %)"]
    assert texts(lengths)[:4] == ["0", "16", "more", "tokens"]
    assert 'aria-label="Bars"' in bars


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    root = ElementTree.fromstring(bar_chart("a", BARS, alt="a"))
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path") if "fill: var(--" in path.attrib.get("style", "")]
    widths = [max(x) - min(x) for x in ([float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)] for path in paths)]
    assert widths[0] == pytest.approx(3 * widths[1])
    assert widths[2] == 0


def test_the_same_data_are_the_same_bytes_whatever_the_user_set() -> None:
    before = both()
    with matplotlib.rc_context({"font.size": 40, "axes.grid": True, "svg.fonttype": "path", "text.parse_math": True}):
        assert both() == before
        assert matplotlib.rcParams["font.size"] == 40


def test_ids_of_charts_do_not_clash() -> None:
    ids = [re.findall(r'\bid="([^"]*)"', svg) for svg in (*both(), bar_chart("others", BARS, alt="a"))]
    together = [each for found in ids for each in found]
    assert len(set(together)) == len(together)


@pytest.mark.parametrize(
    "name",
    [
        "<script>&\"'",
        "$x^$",
        "\x1b[2J\x00",
        "标签名称标签名称标签名称标签名称",
        "تسمية",
        "😀👨‍👩‍👧",
        "a" * 10_000,
        "",
        "\ud800",
        "\ufffe",
    ],
)
def test_any_name_can_stand_beside_a_bar(name: str) -> None:
    shown = texts(bar_chart("a", [Bar(name, 1, "1")], alt=name))
    assert 2 <= len(shown) <= 4
    assert all(0 < len(line) <= 20 for line in shown[:-1])
    assert shown[0][0] == (name[:1] if name[:1].isprintable() and name else shown[0][0])


def test_a_long_name_is_broken_at_spaces_and_shown_whole() -> None:
    name = "19 checkpointing, updated in backward, states offloaded"
    svg = bar_chart("a", [Bar("short", 1, "1"), Bar(name, 1, "1")], alt="a")
    assert texts(svg)[:4] == ["short", "19 checkpointing,", "updated in backward,", "states offloaded"]


def test_labels_of_points_do_not_cover_one_another() -> None:
    points = [Point(f"{number}", 5 + 0.01 * number, 10 + 0.01 * number) for number in range(4)]
    said = ("{:g}".format, "{:g}".format)
    svg = scatter("p", points, front=[0], axes_names=("x", "y"), said=said, alt="a")
    assert "x, from 4.9925 on" in texts(svg)  # close together, they are drawn apart
    labels = [e for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if "font-size: 10px" in e.get("style", "")]
    placed = {e.text: (e.get("transform"), e.get("x"), e.get("y")) for e in labels}
    assert placed.keys() == {"0", "1", "2", "3"}
    assert len({re.sub(r"[\d.]+", lambda n: str(round(float(n[0]))), str(where)) for where in placed.values()}) == 4


def test_long_numbers_and_a_name_at_the_left_stay_within_the_chart() -> None:
    points, names = [(300_000.0, 200_000.0, 5), (600_000.0, 650_000.0, 5)], ("prediction", "target")
    said = ("{:g}".format, "{:,g}".format)
    charts = [
        agreement("a", points, ends=(100_000.0, 700_000.0), axes_names=names, alt="a"),
        scatter("b", [Point("1", 2.0, 125_000.0)], front=[0], axes_names=names, said=said, alt="b"),
    ]
    for chart in charts:
        root = ElementTree.fromstring(chart)
        found = [each for each in root.iter(f"{SVG}text") if "," in (each.text or "") or each.text == "target"]
        assert len(found) >= 3
        for each in found:
            x, width = float(each.get("x") or 0), width_of(each.text or "") if each.text != "target" else 20
            left = x - (width if "end" in each.get("style", "") else width / 2)
            assert 0 < left < left + width < 400, each.text


def test_a_single_step_has_its_number_once() -> None:
    shown = texts(curves("loss", [[(7, 1.25)]], axis="step", alt="Loss"))
    assert [text for text in shown if text.isdecimal()] == ["7"]


def test_numbers_of_an_axis_are_told_apart() -> None:
    drawing = curves("loss", [[(1, 1.6091), (2, 1.6094)]], axis="step", alt="Loss", said="{:.3g}".format)
    at_left = [text for text in texts(drawing) if text.startswith("1.")]
    assert len(at_left) > 1
    assert len(set(at_left)) == len(at_left)


def test_the_axis_of_a_metric_that_stays_at_zero_has_no_negative_numbers() -> None:
    shown = texts(curves("metric", [[], [(1, 0.0), (2, 0.0)]], axis="step", alt="F1"))
    assert "0" in shown
    assert not [text for text in shown if text.startswith(("-", "\N{MINUS SIGN}"))]


def test_curves_over_one_another_are_named_and_told_apart_on_paper() -> None:
    names = [f"run-{number}" for number in range(6)]
    lines = {name: [(1, 2.0 + place), (2, 1.0 + place)] for place, name in enumerate(names)}
    svg = overlaid_curves("loss", lines, axis="step", alt="Losses")
    assert [text.strip("\u200a") for text in texts(svg) if "run-" in text] == names
    styles = [each.get("style", "") for each in ElementTree.fromstring(svg).iter(f"{SVG}path")]
    drawn = [style for style in styles if "stroke-width: 1.6" in style]
    looks = [
        ("grey" if "--bar" in style else "black", *re.findall(r"stroke-dasharray: ([^;]*)", style)) for style in drawn
    ]
    assert len(set(looks)) == 6
    assert sorted(looks) == sorted(2 * list(dict.fromkeys(looks)))  # each on the chart, and beside its name
    assert overlaid_curves("loss", {"_x": []}, axis="step", alt="Nothing").startswith("<svg")


def test_nothing_to_draw_is_no_error() -> None:
    assert texts(bar_chart("a", [Bar("a", 0, "0")], alt="a")) == ["a", "0"]
    assert "tokens" in texts(histogram("a", (0,), edges={0: "0"}, axis="tokens", alt="a"))


def test_without_matplotlib_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_charts()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="matplotlib") as raised:
        bar_chart("a", BARS, alt="a")
    assert raised.value.hint == "pip install 'brimful[report]'"


def test_a_matplotlib_that_cannot_be_imported_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise AttributeError('_ARRAY_API not found')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot be imported \(_ARRAY_API not found\)") as raised:
        bar_chart("a", BARS, alt="a")
    assert "install it again" in (raised.value.hint or "")
