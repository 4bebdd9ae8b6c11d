"""The report in headless Chromium: it works, it fits, and it asks nobody for anything."""

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Generator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from accessibility import prepare, violations
from run_folders import comparison, config_of, shape, write_run
from thinwire import presets, report
from thinwire.outer import Delay
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link
from thinwire.plan.simulate import Scenario, simulate
from thinwire.plan.traffic import traffic
from thinwire.report.link_replay import replay_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
FRONT = "Pareto front of loss and bytes"
TOKENS = "Validation loss against tokens of all workers"
MANY = 21
ON_LINK = "Validation loss against wall-clock on the chosen link"


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def page_of(runs: Path, out: Path, **given: Any) -> Path:
    data = report.read_report_data([runs], may_be_empty=True)
    report.write_page(report.run_page(data, **given), out)
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return page_of(comparison(folder / "runs"), folder / "report.html")


@pytest.fixture(scope="module")
def many_file(tmp_path_factory) -> Path:
    """Methods most of which neither are on the front nor are baselines."""
    folder = tmp_path_factory.mktemp("many")
    names = ["ddp", "diloco", "muloco:bits=2", "noloco", "demo", "streaming_diloco:tau=2"]
    names += [f"sparseloco:density=1/{2 + n}" for n in range(MANY - len(names))]
    for number, name in enumerate(names):
        loss = 1.6 if name == "muloco:bits=2" else 2.0 + 0.01 * number
        write_run(folder / "runs" / f"run{number}", config_of(name), loss=loss)
    return page_of(folder / "runs", folder / "report.html")


@contextlib.contextmanager
def window(browser: Any, file: Path, *, width: int = 1000, most: int = 1) -> Generator[Any]:
    """The page in a window: it complains of nothing, and asks for itself only."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(file.as_uri())
    settled(page)
    assert said == [file.as_uri()]
    yield page
    context.close()
    assert said == [file.as_uri()] * min(len(said), most)


@pytest.fixture
def page(browser, file) -> Generator[Any]:
    with window(browser, file) as page:
        yield page


def wait_until(page: Any, condition: str) -> None:
    """Ask from outside: what playwright asks from within is an `eval`, which the page forbids."""
    for _ in range(100):
        with contextlib.suppress(sync_api.Error):  # while it loads itself again
            if page.evaluate(condition):
                return
        page.wait_for_timeout(100)
    raise AssertionError(condition)


def settled(page: Any) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def section(page: Any, title: str) -> Any:
    settled(page)
    return page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))


def plot(page: Any, title: str, script: str, *given: Any) -> Any:
    return section(page, title).locator(".plot").evaluate(script, *given)


def drawn(page: Any, title: str) -> list[dict[str, Any]]:
    return plot(page, title, "(plot) => plot.data")


def scale(page: Any, title: str) -> list[float]:
    ask = "({ uplot: { scales } }) => [scales.x.min, scales.x.max, scales.y.min, scales.y.max]"
    return plot(page, title, ask)


def visible(page: Any, selector: str) -> list[str]:
    return [its.inner_text() for its in page.query_selector_all(selector) if its.is_visible()]


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_overflows_or_is_empty_or_without_a_label_at_any_width(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    settled(page)
    for opening in ("false", "true"):
        page.evaluate(f"document.querySelectorAll('details').forEach((d) => d.open = {opening})")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Whatever is wider than the window lies in something that scrolls by itself.
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((e) =>
            e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll")
        ).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    # What is drawn is as wide as its place, and there is something in it.
    wait_until(
        page,
        """[...document.querySelectorAll(".plot")].every((plot) =>
            plot.data.length && Math.abs(plot.uplot.width - plot.clientWidth) <= 1)""",
    )
    labels = page.evaluate("[...document.querySelectorAll('.plot')].map((e) => e.ariaLabel)")
    assert all(len(label) > 80 and label.count(".") > 1 for label in labels)
    assert len(set(labels)) == len(labels) == 7


PIXELS = """(plot, name) => {
    const canvas = plot.querySelector("canvas");
    const copy = new OffscreenCanvas(canvas.width, canvas.height)
        .getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const style = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const wanted = [1, 3, 5].map((i) => parseInt(style.slice(i, i + 2), 16));
    const found = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let i = 0; i < found.length; i += 4) count += wanted.every((c, n) => found[i + n] === c);
    return count;
}"""


@pytest.mark.parametrize(
    ("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")]
)
def test_colours_follow_the_scheme(page, scheme: str, ground: str) -> None:
    page.emulate_media(color_scheme=scheme)
    settled(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    for name in ("--series-0", "--series-1", "--line", "--text"):
        assert plot(page, TOKENS, PIXELS, name) > 50


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, file, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(file.as_uri())
    prepare(page)
    page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
    for width in (400, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        settled(page)
        assert violations(page) == []
    context.close()


def test_the_link_is_the_readers_and_its_timeline_shows_where_the_time_goes(page) -> None:
    def seconds() -> list[float]:
        settled(page)
        cells = page.query_selector_all("#on-link tbody td:nth-child(2)")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    before, curves = seconds(), drawn(page, ON_LINK)
    ends = {curve["meta"]["variant"]: curve["x"][-1] for curve in curves}
    assert [ends[variant] for variant in range(7)] == pytest.approx(before)
    page.fill("#bandwidth", "1")
    slow = seconds()
    assert all(late > early for late, early in zip(slow, before, strict=True))
    widths = page.evaluate(
        """[...document.querySelectorAll("#on-link .lane")].map((lane) =>
            [...lane.children].map((bar) => parseFloat(bar.style.width)))"""
    )
    assert all(sum(parts) == pytest.approx(100) and min(parts) >= 0 for parts in widths)
    assert [parts[1] > 0 for parts in widths].count(True) == 1  # streaming
    page.select_option("#timeline-variant", label="streaming_diloco:tau=2")
    settled(page)
    assert "streaming_diloco:tau=2, inner steps" in page.inner_text("#timeline-told")
    assert page.locator("#lane-link i").count() > 1
    assert page.locator("#lane-worker .waiting").count() > 0
    page.select_option("#topology", list(TOPOLOGIES)[-1])
    assert seconds() != slow
    page.fill("#bandwidth", "0")
    assert len(drawn(page, ON_LINK)) == len(curves)
    assert "take more than 0" in page.inner_text("#link-told")
    page.focus("#bandwidth-range")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert page.input_value("#bandwidth") != "0"
    assert page.locator("#link-told").is_hidden()


def test_methods_and_axes_can_be_chosen(page) -> None:
    before, place = drawn(page, TOKENS), section(page, TOKENS).get_attribute("id")
    every = [trace["name"] for trace in before]
    page.uncheck("input[data-variant='0']")
    after = drawn(page, TOKENS)
    variants = [{trace["meta"]["variant"] for trace in its} for its in (before, after)]
    assert variants[0] - variants[1] == {0}
    # Many are chosen at once.
    page.click("button[data-tick='']")
    assert drawn(page, TOKENS) == []
    empty = "getComputedStyle(document.querySelector('.plot'), '::before').content"
    assert "None of the methods shown has this." in page.evaluate(empty)
    front = page.get_by_role("button", name="the Pareto front")
    front.focus()
    page.keyboard.press("Enter")
    line, *dots = drawn(page, FRONT)
    assert {dot["name"] for dot in dots} == {trace["name"] for trace in drawn(page, TOKENS)}
    points = {(dot["x"][0], dot["y"][0]) for dot in dots}
    assert points == set(zip(line["x"], line["y"], strict=True))
    page.get_by_role("button", name="all", exact=True).click()
    assert [trace["name"] for trace in drawn(page, TOKENS)] == every
    page.uncheck("input[data-variant='0']")
    page.select_option(f"#{place} select.y", "training")
    page.select_option(f"#{place} select.x", "seconds")
    page.check(f"#{place} .log-x")
    training = drawn(page, "Training loss against wall-clock of the run itself")
    assert [trace["x"] for trace in training] == [[3.5, 10, 11.5]] * len(training)
    assert all(a["y"] != b["y"] for a, b in zip(training, after, strict=True))
    assert page.evaluate(f"document.querySelector('#{place} .plot').uplot.scales.x.distr") == 3
    # Over several seeds there is a band.
    assert [len(trace.get("error") or []) for trace in training].count(3) == 2


def test_a_chart_is_read_and_zoomed(page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    chart = section(page, TOKENS)
    chart.locator(".plot").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        settled(page)
        told.append(chart.locator(".u-legend").inner_text())
    assert told[0] == told[2] != told[1]
    # A name in the legend is a button that hides its line.
    name = chart.locator(".u-legend button").first
    name.press("Enter")
    ask = "(plot) => plot.uplot.series.filter(({ show }) => !show).length"
    assert plot(page, TOKENS, ask) == 1
    assert name.get_attribute("aria-pressed") == "false"
    whole = scale(page, TOKENS)
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 250, steps=4)
    page.mouse.up()
    zoomed = scale(page, TOKENS)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    assert whole[2] < zoomed[2] < zoomed[3] < whole[3]
    page.mouse.dblclick(box["x"] + 300, box["y"] + 150)
    assert scale(page, TOKENS) == whole


def test_a_table_is_sorted_and_copied_by_the_keyboard(page) -> None:
    def first() -> list[str]:
        return [c.inner_text() for c in page.query_selector_all("#results tbody th")]

    assert first()[0] == "muloco:bits=2"
    orders = []
    for direction in ("ascending", "descending"):
        page.focus("#results thead th:nth-child(4) button")
        page.keyboard.press("Enter")
        assert page.get_attribute("#results thead th:nth-child(4)", "aria-sort") == direction
        orders.append(first())
    assert (orders[0][0], orders[1][0]) == ("muloco:bits=2", "ddp")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.focus("#results button.copy")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#results .told').textContent !== ''")
    assert page.inner_text("#results .told") == "Copied 7 rows."
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert len(lines) == 8
    assert {line.count("\t") for line in lines} == {13}


STREAMED = ("streaming_diloco:tau=2", "streaming_muloco")
METHODS = ("ddp", "diloco", "sparseloco", "muloco:bits=2", *STREAMED)


def scenarios() -> Generator[tuple[int, Scenario]]:
    crowded, late = presets.from_text("streaming_diloco"), presets.from_text("diloco", sync_every=5)
    crowded = dataclasses.replace(crowded, overlap=dataclasses.replace(crowded.overlap, tau=29))
    late = dataclasses.replace(late, overlap=Delay(tau=4))
    ring, *_ = TOPOLOGIES.values()
    played = [(crowded, ring, (3, 151), 4), (late, ring, (3, 23), 6)]
    teams = [(1, 31), (2, 1), (7, 97)]
    mixed = itertools.product(map(presets.from_text, METHODS), TOPOLOGIES.values(), teams)
    played += [(*each, 5 + number % 4) for number, each in enumerate(mixed)]
    for method, topology, (workers, steps), power in played:
        freight = traffic(method, shape(), workers=workers)
        over = {"link": Link.of(10**power, latency_s=0.011), "topology": topology}
        yield steps, Scenario(traffic=freight, compute=Compute(step_s=0.037), **over)


def test_the_page_simulates_as_the_planner_does(browser) -> None:
    page = browser.new_page()
    page.add_script_tag(content=files("thinwire.report").joinpath("link.js").read_text())
    for steps, scenario in scenarios():
        link = {"latency": scenario.link.latency_s, "step": scenario.compute.step_s}
        link |= {"rate": scenario.link.up_bits_per_s, "topology": scenario.topology.name}
        found = page.evaluate(
            """([replay, link]) => {
                const run = thinwire.simulate(replay, link);
                const busy = run.transfers.map(({ from, to }) => [from, to]);
                return { wall: run.wall, at: [...run.at], busy, shares: thinwire.shares(run) };
            }""",
            [replay_of(scenario.traffic, steps), link],
        )
        outcome = simulate(scenario, steps=steps)
        assert found["wall"] == pytest.approx(outcome.wall_s, rel=1e-6)
        waited = itertools.accumulate(outcome.wait_s[:-1])
        clock = [step * 0.037 + waited_s for step, waited_s in enumerate(waited)]
        assert found["at"][:-1] == pytest.approx(clock, rel=1e-6)
        assert found["shares"]["waiting"] == pytest.approx(sum(outcome.wait_s), rel=1e-6)
        assert found["shares"]["computing"] == pytest.approx(outcome.compute_s, rel=1e-6)
        pairs = zip(outcome.begun_s, outcome.freed_s, strict=True)
        busy = [time for begun, freed in pairs if freed > begun for time in (begun, freed)]
        assert list(itertools.chain(*found["busy"])) == pytest.approx(busy, rel=1e-6)
    page.close()


def test_a_narrow_window_shows_what_matters_first_and_the_rest_by_the_keyboard(
    browser, many_file
) -> None:
    with window(browser, many_file, width=400) as page:
        assert visible(page, "#results thead th") == ["method", "loss", "times fewer, store"]
        assert visible(page, "#on-link thead th") == ["method", "wall-clock", "computing"]
        assert len(visible(page, "#differences thead th")) == 3
        # Nothing of these has to be scrolled to be seen.
        fits = "[...document.querySelectorAll('.few .scroll')].every((e) => e.scrollWidth <= 400)"
        assert page.evaluate(fits)
        first = visible(page, "#results tbody th")
        assert {"ddp", "diloco", "muloco:bits=2"} <= set(first)
        assert len(first) < MANY / 2
        assert {trace["name"] for trace in drawn(page, TOKENS)} == set(first)
        results = page.locator("#results")
        results.get_by_role("button", name="Show all of it", expanded=False).focus()
        page.keyboard.press("Enter")
        assert results.get_by_role("button", name="Show all of it", expanded=True).count() == 1
        assert len(visible(page, "#results thead th")) == 14
        assert len(visible(page, "#results tbody th")) == MANY
        # The names stay in view when the rest is scrolled to.
        scroll = results.locator(".scroll")
        scroll.evaluate("(e) => e.scrollTo(1000, 0)")
        name = results.locator("tbody th").first
        assert name.bounding_box()["x"] == pytest.approx(scroll.bounding_box()["x"], abs=1)
        page.set_viewport_size({"width": 1000, "height": 800})
        assert len(visible(page, "#on-link thead th")) == 6
        page.locator("#methods summary").click()
        page.locator("#methods details input").first.check()
        settled(page)
        assert len(drawn(page, TOKENS)) == len(first) + 1
    # Without scripts, tables show all.
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto(many_file.as_uri())
    assert page.locator("#results thead th:visible").count() == 14
    assert page.locator("#results tbody tr:visible").count() == MANY
    context.close()


def test_a_page_that_loads_itself_again_keeps_what_its_reader_chose(browser, tmp_path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "page.html"
    runs.mkdir()
    with window(browser, page_of(runs, out, refresh_s=2), most=99) as page:
        assert page.inner_text("h1") == "No run is finished yet"
        write_run(runs / "first", config_of("diloco"))
        page_of(runs, out, refresh_s=3)
        wait_until(page, "document.querySelectorAll('#results tbody tr').length === 1")
        assert page.locator("#live").is_visible()
        page.evaluate("window.first = true")
        page.uncheck("input[data-variant='0']")
        page.fill("#bandwidth", "7")
        page.select_option("#by-tokens select.x", "seconds")
        page.evaluate("scrollTo(0, 1234)")
        write_run(runs / "late", config_of("muloco:bits=1"), loss=1.5)
        page_of(runs, out)  # complete
        wait_until(page, "!document.getElementById('live') && document.readyState === 'complete'")
        settled(page)
        assert page.evaluate("window.first === undefined")
        # What was not shown is not, though another one comes before it now.
        assert visible(page, "#results tbody th") == ["muloco:bits=1", "diloco"]
        shown = drawn(page, "Validation loss against wall-clock of the run itself")
        assert [trace["name"] for trace in shown] == ["muloco:bits=1"]
        assert page.input_value("#bandwidth") == "7"
        assert page.evaluate("scrollY") == pytest.approx(1234, abs=2)
