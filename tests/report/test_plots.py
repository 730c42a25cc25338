"""Pictures: they show what is in the arrays, lose no origin, parse whatever the names are, and can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_samples import HOSTILE, hostile, large, small
from svg_reader import DIFFERS, Picture, check
from tiers import examples

from detdiff.compare.grids import Grid
from detdiff.compare.series import Series
from detdiff.report.document import View
from detdiff.report.svg import DARK, LIGHT, style
from detdiff.report.views import map_picture, plot
from detdiff.report.views.lens import turn
from detdiff.report.views.map_cells import Bins, binned, rectangles, scale_of, stretches
from detdiff.report.views.map_picture import Frame, grid_svg, map_svg

VIEWS = ("map", "timeline", "margins", "lens")
SAMPLES = {"small": small, "large": large, "hostile": hostile}


def view_of(series: Series, name: str) -> View:
    return View(name, "", None if name == "timeline" else series.requests[0].id)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def samples() -> dict[str, Series]:
    return {name: made() for name, made in SAMPLES.items()}


@pytest.mark.parametrize("standalone", [False, True], ids=["page", "file"])
@pytest.mark.parametrize("columns", [240, 72], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_picture_is_well_formed_and_fits(
    samples: dict[str, Series], sample: str, name: str, columns: int, standalone: bool
) -> None:
    series = samples[sample]
    svg = plot(series, view_of(series, name), columns=columns, standalone=standalone)
    picture = check(svg)
    assert picture.size[0] <= (950 if columns == 240 else 345)
    assert len(svg.encode()) < 60_000
    assert svg.startswith("<?xml") == standalone
    assert ("<style>" in svg) == standalone and "var(" not in svg
    assert "<script" not in svg and "\x1b" not in svg and "\u202e" not in svg


def test_a_request_that_is_not_there_is_no_view(samples: dict[str, Series]) -> None:
    with pytest.raises(KeyError, match="nobody"):
        plot(samples["small"], View("map", "", "nobody"))


def test_a_name_is_shown_as_text(samples: dict[str, Series]) -> None:
    request = samples["hostile"].requests[0]
    picture = Picture.of(map_svg(request, columns=2000))
    row = next(words for words in picture.words() if words.endswith("0"))
    assert "</svg><script>alert(1)</script>" in row and r"\x00\x1b[31m\u202e" in row and HOSTILE not in row


# The map.

states = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=5)


def grid_of(rows: list[list[int]], ulp: bool = False, seed: int = 0) -> Grid:
    width = max(map(len, rows))
    state = np.array([row + [0] * (width - len(row)) for row in rows], np.uint8)
    draw = np.random.default_rng(seed)
    share = np.where(state > 1, draw.integers(0, 256, state.shape), 0).astype(np.uint8)
    sizes = np.where(state > 1, np.exp2(draw.integers(0, 40, state.shape)), np.nan).astype(np.float32)
    sizes[draw.random(state.shape) < 0.2] = np.nan
    names = tuple(f"row {n}" for n in range(len(rows)))
    return Grid("layers", names, state, share, sizes if ulp else None, None)


def origins_by_hand(grid: Grid, columns: int) -> list[tuple[int, int]]:
    width = -(-grid.state.shape[1] // columns)
    found = set()
    for row, states_ in enumerate(grid.state.tolist()):
        for position, state in enumerate(states_):
            if state == 3:
                found.add((row, position // width))
    return sorted(found)


def shows_every_origin(grid: Grid, columns: int) -> None:
    picture = check(grid_svg(grid, Frame("r", 3, None), columns=columns))
    assert picture.origins() == origins_by_hand(grid, columns)


@settings(max_examples=examples(60), deadline=None)
@given(states, st.integers(1, 70), st.booleans())
def test_no_origin_is_lost_by_binning(rows: list[list[int]], columns: int, ulp: bool) -> None:
    shows_every_origin(grid_of(rows, ulp), columns)


def test_a_picture_that_samples_positions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(grid: Grid, first: int, last: int, columns: int, scale: str) -> Bins:
        bins = binned(grid, first, last, columns, scale)  # type: ignore[arg-type]
        state = np.array(grid.state[:, first : last + 1 : bins.width])
        return replace(bins, state=state)

    rows = [[1] * 30 for _ in range(3)]
    rows[1][7] = 3
    shows_every_origin(grid_of(rows), 10)
    monkeypatch.setattr(map_picture, "binned", sampled)
    with pytest.raises(AssertionError):
        shows_every_origin(grid_of(rows), 10)


@settings(max_examples=examples(60), deadline=None)
@given(states, st.integers(1, 70), st.booleans(), st.integers(0, 1000))
def test_a_column_shows_the_strongest_state_and_the_largest_size(
    rows: list[list[int]], columns: int, ulp: bool, seed: int
) -> None:
    grid = grid_of(rows, ulp, seed)
    positions = grid.state.shape[1]
    scale = scale_of(grid)
    bins, fine = (binned(grid, 0, positions - 1, limit, scale) for limit in (columns, positions))
    assert fine.width == 1 and (fine.state == grid.state).all()
    assert ((fine.step >= 0) == (grid.state > 1)).all()
    for column in range(bins.columns):
        here = slice(column * bins.width, (column + 1) * bins.width)
        assert (bins.state[:, column] == grid.state[:, here].max(axis=1)).all()
        known = np.where(fine.step[:, here] < 8, fine.step[:, here], -1).max(axis=1)
        differs = (grid.state[:, here] > 1).any(axis=1)
        assert (bins.step[:, column] == np.where(differs & (known < 0), 8, known)).all()


@pytest.mark.parametrize(
    ("ulp", "step"),
    [(1, 0), (2, 1), (3, 1), (4, 2), (63, 3), (64, 4), (65535, 6), (65536, 7), (2.0**31, 7), (np.inf, 7)],
)
def test_a_size_in_ulp_has_its_step(ulp: float, step: int) -> None:
    grid = grid_of([[2]])
    grid = replace(grid, ulp=np.array([[ulp]], np.float32))
    assert binned(grid, 0, 0, 10, "ulp").step.tolist() == [[step]]
    assert f"dd-s{step}" in grid_svg(grid, Frame("r", 0, None), scale="ulp")


def test_sizes_are_shares_unless_half_are_known_in_ulp() -> None:
    grid = grid_of([[2, 2, 2, 1]])
    sizes = np.array([[5.0, np.nan, np.nan, np.nan]], np.float32)
    assert scale_of(replace(grid, ulp=sizes)) == "share"
    sizes[0, 1] = 7
    known = replace(grid, ulp=sizes)
    assert scale_of(known) == "ulp"
    # Of three differing cells one has no size, and is said to have none.
    assert binned(known, 0, 3, 10, "ulp").step.tolist() == [[2, 2, 8, -1]]
    assert "differs, size not recorded" in Picture.of(grid_svg(known, Frame("r", 0, None))).words()
    # A thousandth of the digests is a difference as well.
    assert binned(
        replace(grid, share=np.array([[1, 128, 255, 0]], np.uint8)), 0, 3, 10, "share"
    ).step.tolist() == [[0, 3, 7, -1]]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=6))
def test_cells_are_covered_once(rows: list[list[bool]]) -> None:
    mask = np.array(rows)
    covered = np.zeros(mask.shape, int)
    for x, y, w, h in rectangles(mask):
        covered[y : y + h, x : x + w] += 1
    assert (covered == mask).all()
    lines = np.zeros(mask.shape, int)
    for row, column, columns in stretches(mask):
        lines[row, column : column + columns] += 1
    assert (lines == mask).all()


@settings(max_examples=examples(40), deadline=None)
@given(states)
def test_the_path_of_a_step_is_its_cells(rows: list[list[int]]) -> None:
    grid = grid_of(rows)
    picture = Picture.of(grid_svg(grid, Frame("r", 0, None), columns=100))
    cells = {(int(row), int(column)) for row, column in np.argwhere(grid.state > 0)}
    assert picture.painted("dd-equal", *DIFFERS) == cells
    assert picture.painted("dd-equal") == {cell for cell in cells if grid.state[cell] == 1}
    assert bool(picture.data("dd-none")) == bool((grid.state == 0).any())


@pytest.mark.parametrize(("rows", "positions"), [(0, 0), (0, 4), (3, 0)], ids=str)
def test_nothing_compared_is_a_picture_too(rows: int, positions: int) -> None:
    cells = np.zeros((rows, positions), np.uint8)
    grid = Grid("layers", tuple(f"row {n}" for n in range(rows)), cells, cells, None, None)
    picture = check(grid_svg(grid, Frame("r", 2, 3)))
    assert "0 propagated, 0 origins" in picture.sentence and not picture.of_class("dd-cells")


def test_a_zoom_shows_the_positions_asked_for(samples: dict[str, Series]) -> None:
    request = samples["small"].requests[0]
    frame = Frame("anchor", request.prompt, request.flip_position)
    zoom = check(grid_svg(request.sites[1], frame, 8, 10))
    assert zoom.origins() == [(1, 1), (2, 1)]
    assert "over positions 8-10" in zoom.sentence and "layers.1.attn.q_proj at position 9" in zoom.sentence
    assert not any("prompt" == words for words in zoom.words()) and not zoom.of_class("dd-flip")
    # Ends outside the grid are its own ends.
    assert grid_svg(request.layers, frame, -5, 10_000) == grid_svg(request.layers, frame)


def test_the_map_marks_the_flip_and_the_prompt(samples: dict[str, Series]) -> None:
    picture = check(map_svg(samples["small"].requests[0]))
    left, _, width, _ = picture.cells()
    strip = picture.of_class("dd-prompt")[0]
    assert float(strip.get("width", "0")) == pytest.approx(8 * width)
    line = re.match(r"M([\d.]+) ", picture.data("dd-flip"))
    assert line is not None and float(line[1]) == pytest.approx(left + 11.5 * width, abs=0.01)
    assert "flip, 11" in picture.words()
    assert "1 origins" in picture.sentence and "layer 1 at position 9" in picture.sentence
    calm = check(map_svg(samples["small"].requests[1]))
    assert not calm.of_class("dd-flip") and not calm.of_class("dd-origin")
    assert "No difference arose here." in calm.sentence


def test_a_long_request_is_binned(samples: dict[str, Series]) -> None:
    request = samples["large"].requests[0]
    svg = map_svg(request)
    picture = check(svg)
    assert len(svg) < 40_000
    assert picture.origins() == [(3, 1250 // 21)]
    assert any(words.startswith("A column is 21 positions") for words in picture.words())


# The timeline.


def lanes(picture: Picture, cls: str) -> list[str]:
    """Path data by lane; the legend's is dropped where it has one."""
    return [each.get("d") or "" for each in picture.of_class(cls)]


def test_the_timeline_shows_both_runs(samples: dict[str, Series]) -> None:
    series = samples["small"]
    picture = check(plot(series, View("timeline", "")))
    words = picture.words()
    assert words.count("origin, forward 2 (anchor)") == 2 and words.count("flip, forward 4 (anchor)") == 2
    assert words.count("1 row: mv, 2 and more: mm") == 2
    assert {"anchor", "follower", "prefill", "decode", "mv", "mm", "writes", "trims"} <= {*words}
    # One bar for each member of each forward: anchor's prompt in both runs, follower's prompt in both.
    bars = [len(re.findall("M", data)) for data in lanes(picture, "dd-prefill")]
    assert bars[:4] == [1, 1, 1, 1]
    assert "Run b: 6 forwards, at most 8 rows" in picture.sentence and "1 trim" in picture.sentence
    assert "origin of anchor in forward 2" in picture.sentence


def test_what_one_forward_of_many_does_is_not_lost(samples: dict[str, Series]) -> None:
    """4,000 forwards, of which one is trimmed in and one takes the other path."""
    series = samples["large"]
    view = View("timeline", "")
    picture = check(plot(series, view))
    trims = [data for data in lanes(picture, "dd-trim")]
    assert [len(re.findall("M", data)) for data in trims] == [1, 1]  # run b, and the legend
    mm = lanes(picture, "dd-p1")[:2]
    assert [len(re.findall("M", data)) for data in mm] == [1, 2]  # the prompt, and where the follower joined
    arising = [data for data in lanes(picture, "dd-origin")]
    assert len(arising) == 2 and len({re.match(r"M([\d.]+)", data)[1] for data in arising}) == 1  # type: ignore[index]
    quiet = replace(series, b=tuple(replace(point, events=()) for point in series.b))
    assert not Picture.of(plot(quiet, view)).of_class("dd-trim")
    one_path = replace(series, b=series.a)
    assert len(re.findall("M", lanes(Picture.of(plot(one_path, view)), "dd-p1")[1])) == 1


def test_paths_with_one_ending_keep_their_beginning(samples: dict[str, Series]) -> None:
    series = samples["small"]
    path = "reference/mlx-metal/mm"
    other = replace(series, a=tuple(replace(point, linear_path=path) for point in series.a))
    words = Picture.of(plot(other, View("timeline", ""))).words()
    assert "mlx-metal/mm" in words and "candle-metal/mm" in words and "mv" in words


def test_many_paths_and_requests_share_what_is_left(samples: dict[str, Series]) -> None:
    series = samples["small"]
    a = tuple(replace(point, linear_path=f"reference/x/p{n}") for n, point in enumerate(series.a))
    picture = check(plot(replace(series, a=a, b=()), View("timeline", "")))
    assert "other paths" in picture.words()
    covered = sum(
        float(width)
        for cls in range(4)
        for width in re.findall(r"h(\d[\d.]*)v9", lanes(picture, f"dd-p{cls}")[0])
    )
    assert covered == pytest.approx(8 * 30)  # every forward of run a is on one of the lines
    members = tuple(replace(series.a[0].members[0], request=f"r{n}", rows=1) for n in range(9))
    many = replace(series, a=(replace(series.a[0], members=members, rows=12), *series.a[1:]))
    picture = check(plot(many, View("timeline", "")))
    assert "6 more" in picture.words() and "padding" in picture.words()


def test_no_forwards_is_a_picture_too(samples: dict[str, Series]) -> None:
    check(plot(replace(samples["small"], a=(), b=(), thresholds=()), View("timeline", "")))


# Margins and the lens.


def test_margins_mark_what_a_movement_can_turn(samples: dict[str, Series]) -> None:
    series = samples["small"]
    picture = check(plot(series, View("margins", "", "anchor")))
    assert len(re.findall("M", picture.data("dd-near"))) == 1  # 0.004 below 0.011
    assert len(re.findall("M", picture.data("dd-margin"))) == 6
    assert len(re.findall("M", picture.data("dd-delta"))) == 5
    assert (
        "the smallest margin is 0.004, at token 4" in picture.sentence and "at most 0.011" in picture.sentence
    )
    assert "0.011" in " ".join(picture.words())
    # A tie that nothing moved is not fragile, and is drawn on the line of zero.
    calm = check(plot(series, View("margins", "", "follower")))
    assert not calm.of_class("dd-near") and not calm.of_class("dd-level")
    floor = re.match(r"M[\d.]+ ([\d.]+)", calm.data("dd-axis"))
    assert floor is not None and f" {floor[1]}h.01" in calm.data("dd-margin")


def test_a_flip_where_run_a_had_stopped_is_behind_its_last_token(samples: dict[str, Series]) -> None:
    series = samples["small"]
    request = series.requests[0]
    stopped = replace(request, tokens_a=request.tokens_a[:4], flip_index=4)
    picture = check(plot(replace(series, requests=(stopped,)), View("margins", "", "anchor")))
    flip = re.match(r"M([\d.]+) ", picture.data("dd-flip"))
    points = [float(x) for x in re.findall(r"M([\d.]+) ", picture.data("dd-margin"))]
    assert flip is not None and len(points) == 4
    assert float(flip[1]) - points[3] == pytest.approx(points[3] - points[2])


def test_fragile_tokens_are_not_lost_in_a_long_request(samples: dict[str, Series]) -> None:
    request = samples["large"].requests[0]
    moved = max(abs(token.delta or 0) for token in request.tokens_a)
    fragile = sum(token.margin is not None and token.margin <= moved for token in request.tokens_a)
    picture = check(plot(samples["large"], View("margins", "", "anchor")))
    assert fragile > 1 and len(re.findall("M", picture.data("dd-near"))) == fragile


@pytest.mark.parametrize(
    ("run", "values", "layer"),
    [
        ("a", [-1, 1], 1),
        ("a", [-1, 1, -1, 1, 2], 3),
        ("a", [1, 2, 3], 0),
        ("a", [-1, 1, 0], 1),  # a tie does not take back what was preferred
        ("a", [1, -2], None),
        ("b", [1, -1], 1),
        ("b", [-1, 1, 0], 2),
        ("b", [-1, 1], None),
        ("b", [], None),
    ],
    ids=str,
)
def test_where_a_preference_turns(run: str, values: list[float], layer: int | None) -> None:
    assert turn(run, list(enumerate(map(float, values)))) == layer  # type: ignore[arg-type]


def test_the_lens_names_both_tokens_and_both_turns(samples: dict[str, Series]) -> None:
    series = samples["small"]
    picture = check(plot(series, View("lens", "", "anchor")))
    words = picture.words()
    assert 'above 0: run a\'s token " t34"' in words and 'below 0: run b\'s token " t35"' in words
    assert "a turns in layer 2" in words and not any(each.startswith("b turns") for each in words)
    assert "run a ends at 0.004 and prefers its own token from layer 2 on" in picture.sentence
    assert "run b ends at -0.005 and prefers its own token from layer 0 on" in picture.sentence
    lens = tuple(replace(point, b=None) for point in series.requests[0].lens)
    half = replace(series, requests=(replace(series.requests[0], lens=lens),))
    assert "run b recorded none" in check(plot(half, View("lens", "", "anchor"))).sentence


# Colours.


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def simulated(colour: str, kind: str) -> tuple[float, float, float]:
    """How a dichromat sees a colour, linear RGB (Viénot, Brettel and Mollon 1999; tritan: Machado and others 2009)."""
    matrix = {
        "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
        "tritan": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
    }[kind]
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    red, green, blue = (sum(f * c for f, c in zip(row, linear, strict=True)) for row in matrix)
    return red, green, blue


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_stand_out(colours: dict[str, str]) -> None:
    for text in ("ink", "soft", "a", "b"):
        assert contrast(colours[text], colours["bg"]) >= 4.5, text
    marks = [name for name in colours if name not in ("bg", "grid", "equal")]
    for name in marks:
        assert contrast(colours[name], colours["bg"]) >= 3, name
    # A cell that differs beside one that does not.
    for step in range(8):
        assert contrast(colours[f"s{step}"], colours["equal"]) >= 3, step


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_sizes_go_away_from_the_ground_step_by_step(colours: dict[str, str]) -> None:
    steps = [contrast(colours[f"s{step}"], colours["bg"]) for step in range(8)]
    assert all(later > 1.1 * earlier for earlier, later in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize("kind", ["protan", "deutan", "tritan"])
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_sizes_keep_their_order_for_the_colour_blind(colours: dict[str, str], kind: str) -> None:
    seen = [simulated(colours[f"s{step}"], kind) for step in range(8)]
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in seen]
    assert light == sorted(light, reverse=colours is LIGHT)
    for one, other in combinations(range(8), 2):
        assert abs(light[one] - light[other]) > 0.004, (one, other)


def test_no_text_is_small_and_both_themes_have_every_colour() -> None:
    sizes = [float(size) for size in re.findall(r"font-size:([\d.]+)px", style())]
    assert sizes and min(sizes) >= 11
    assert LIGHT.keys() == DARK.keys()
    assert {*re.findall(r"var\(--dd-([a-z0-9-]+)\)", style())} <= LIGHT.keys()
    assert LIGHT["s0"] in style(False) and DARK["s0"] not in style(False)
    assert DARK["s0"] in style(True) and LIGHT["s0"] not in style(True)
    both = style()
    assert LIGHT["s0"] in both and DARK["s0"] in both and "prefers-color-scheme:dark" in both


def test_values_that_are_not_there_or_not_finite_are_left_out(samples: dict[str, Series]) -> None:
    series = samples["small"]
    request = series.requests[0]
    odd = (float("nan"), float("inf"), None, 0.5)
    tokens = tuple(replace(request.tokens_a[n], margin=x, delta=x) for n, x in enumerate(odd))
    lens = tuple(replace(point, a=x, b=None) for point, x in zip(request.lens, odd, strict=True))
    some = replace(series, requests=(replace(request, tokens_a=tokens, lens=lens),))
    margins = check(plot(some, View("margins", "", "anchor")))
    assert len(re.findall("M", margins.data("dd-margin"))) == 1
    assert "the smallest margin is 0.5, at token 3" in margins.sentence
    assert "run a ends at 0.5" in check(plot(some, View("lens", "", "anchor"))).sentence
    none = replace(series, requests=(replace(request, tokens_a=(), tokens_b=(), lens=()),))
    assert check(plot(none, View("margins", "", "anchor"))).sentence.startswith("0 generated tokens")
    check(plot(none, View("lens", "", "anchor")))
