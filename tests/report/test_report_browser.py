"""The report in headless Chromium: it works, it fits, and it asks nobody for anything."""

import dataclasses
import itertools
import re
import shutil
import threading
from collections.abc import Generator
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import pytest

from accessibility import prepare, violations
from run_folders import comparison, config_of, shape, write_run
from thinwire import presets, report
from thinwire.cli import main
from thinwire.cli import report as command
from thinwire.outer import Delay
from thinwire.plan.compute import Compute
from thinwire.plan.link import TOPOLOGIES, Link
from thinwire.plan.simulate import Scenario, simulate
from thinwire.plan.traffic import traffic
from thinwire.report.link_replay import LinkReplay
from thinwire.runs.find import note_planned_runs

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    paths = [comparison(folder / "runs")]
    out = folder / "report.html"
    report.write_page(report.run_page(report.read_report_data(paths), paths, out), out)
    return out


@final
class Window:
    """The page in a window: what it complains of and what it asks for is kept."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1000) -> None:
        self.said: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 800})
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.said.append(request.url))
        self.page.goto(file.as_uri())
        wait_until(self.page, DRAWN)
        assert self.said == [file.as_uri()]
        self.said.clear()


@pytest.fixture
def page(browser, file) -> Generator[Any]:
    window = Window(browser, file)
    yield window.page
    window.context.close()
    assert window.said == []


@pytest.fixture(scope="module")
def seen(browser, file) -> Generator[Any]:
    """A page that is only looked at."""
    window = Window(browser, file)
    yield window.page
    window.context.close()
    assert window.said == []


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_overflows_or_is_empty_at_any_width(seen, width: int) -> None:
    seen.set_viewport_size({"width": width, "height": 800})
    settled(seen)
    for opening in ("false", "true"):
        seen.evaluate(f"document.querySelectorAll('details').forEach((d) => d.open = {opening})")
        assert seen.evaluate("document.documentElement.scrollWidth") <= width
    # Whatever is wider than the window lies in something that scrolls by itself.
    outside = seen.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((e) =>
            e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre, .plot")
        ).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    # What is drawn is as wide as its place, and there is something in it.
    wait_until(
        seen,
        """[...document.querySelectorAll(".plot")].every((plot) =>
            plot.data.some((trace) => trace.x.length) &&
            Math.abs(plot.querySelector(".drawing").getBoundingClientRect().width
                - plot.getBoundingClientRect().width) <= 1)""",
    )


def seconds_on_link(page: Any) -> list[float]:
    cells = page.query_selector_all("#on-link tbody td:nth-child(2)")
    return [float(cell.get_attribute("data-value")) for cell in cells]


def drawn(page: Any, title: str) -> list[dict[str, Any]]:
    return page.evaluate(
        """(title) => {
            const sections = [...document.querySelectorAll(".chart")];
            const found = sections.find((s) => s.querySelector("h3").textContent === title);
            return found.querySelector(".plot").data.map(({ name, x, y, meta }) =>
                ({ name, x: [...(x ?? [])], y: [...(y ?? [])], meta }));
        }""",
        title,
    )


def wait_until(page: Any, condition: str) -> None:
    """Ask from outside: what playwright asks from within is an `eval`, which the page forbids."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(condition)


DRAWN = "document.querySelector('[aria-busy]') === null"  # also what is far from the window


def settled(page: Any) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    wait_until(page, DRAWN)


def test_the_link_is_the_readers(page) -> None:
    before = seconds_on_link(page)
    curves = drawn(page, "Loss against wall-clock on this link")
    assert len({curve["meta"]["variant"] for curve in curves}) == len(before) == 7
    lines = {
        curve["meta"]["variant"]: curve["x"][-1]
        for curve in curves
        if curve["meta"]["variant"] is not None
    }
    assert [lines[index] for index in range(7)] == pytest.approx(before)
    page.fill("#bandwidth", "1")
    settled(page)
    slow = seconds_on_link(page)
    assert all(late > early for late, early in zip(slow, before, strict=True))
    page.select_option("#topology", "star")
    settled(page)
    assert sum(seconds_on_link(page)) < sum(slow)
    page.fill("#bandwidth", "0")
    settled(page)
    assert "take more than 0" in page.inner_text("#link-told")
    assert len(drawn(page, "Loss against wall-clock on this link")) == len(curves)
    page.focus("#bandwidth-range")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert page.input_value("#bandwidth") != "0"
    assert page.inner_text("#link-told") == ""


def test_shares_and_timeline_tell_of_the_same_run(page) -> None:
    page.fill("#bandwidth", "1")
    settled(page)
    idle, hidden, waiting = drawn(page, "Where the time goes on this link")
    for parts in zip(idle["x"], hidden["x"], waiting["x"], strict=True):
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= 0
    assert max(hidden["x"]) > 0  # streaming
    page.select_option("#timeline-variant", label="streaming_diloco:tau=2")
    settled(page)
    assert "streaming_diloco:tau=2, inner steps" in page.inner_text("#timeline-told")
    rows = drawn(page, "Rounds from the middle of the run")
    assert [set(row["y"]) for row in rows] == [{"link"}, {"worker"}, {"worker"}]


def test_methods_and_losses_can_be_chosen(page) -> None:
    before = drawn(page, "Loss against tokens")
    page.uncheck("input[data-variant='0']")
    settled(page)
    after = drawn(page, "Loss against tokens")
    assert {trace["meta"]["variant"] for trace in before} - {
        t["meta"]["variant"] for t in after
    } == {0}
    page.check("input[value='training']")
    settled(page)
    training = drawn(page, "Loss against tokens")
    assert [trace["y"] for trace in training] != [trace["y"] for trace in after]


def test_many_methods_are_chosen_at_once(page) -> None:
    def drawn_variants() -> set[int]:
        return {trace["meta"]["variant"] for trace in drawn(page, "Loss against tokens")}

    def ticked() -> set[int]:
        return {
            int(box.get_attribute("data-variant")) for box in boxes_of(page) if box.is_checked()
        }

    every = drawn_variants()
    page.click("button[data-tick='']")
    settled(page)
    assert drawn_variants() == ticked() == set()
    assert "None of the methods shown has this." in page.locator(".plot").first.inner_html()
    front = page.get_by_role("button", name="the Pareto front")
    front.focus()
    page.keyboard.press("Enter")
    settled(page)
    on_front = {trace["name"] for trace in front_of_chart(page)}
    labels = {int(box.get_attribute("data-variant")): label_of(box) for box in boxes_of(page)}
    assert drawn_variants() == ticked()
    assert 0 < len(drawn_variants()) < len(every)
    assert {labels[index] for index in drawn_variants()} == on_front
    page.get_by_role("button", name="all", exact=True).click()
    settled(page)
    assert drawn_variants() == ticked() == every
    assert "None of the methods" not in page.locator(".plot").first.inner_html()


def boxes_of(page: Any) -> list[Any]:
    return page.query_selector_all("input[data-variant]")


def label_of(box: Any) -> str:
    return box.evaluate("(box) => box.closest('label').textContent")


def front_of_chart(page: Any) -> list[dict[str, Any]]:
    """The dots through which the line of the front goes."""
    line, *dots = drawn(page, "Pareto front of loss and bytes")
    ends = set(zip(line["x"], line["y"], strict=True))
    return [dot for dot in dots if (dot["x"][0], dot["y"][0]) in ends]


def test_a_table_is_sorted_and_copied_by_the_keyboard(page) -> None:

    def column(number: int) -> list[str]:
        return [c.inner_text() for c in page.query_selector_all(f"#results td:nth-child({number})")]

    def first() -> list[str]:
        return [c.inner_text() for c in page.query_selector_all("#results tbody th")]

    assert first()[0] == "muloco:bits=2"
    page.focus("#results thead th:nth-child(4) button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#results thead th:nth-child(4)", "aria-sort") == "ascending"
    upward = first()
    page.keyboard.press("Enter")
    assert page.get_attribute("#results thead th:nth-child(4)", "aria-sort") == "descending"
    assert first()[0] == "ddp"
    assert first() == upward[::-1] or len(set(column(4))) < 7  # equal bytes keep their order
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.focus("#results button.copy")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#results .told').textContent !== ''")
    assert page.inner_text("#results .told") == "Copied 7 rows."
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert len(lines) == 8
    assert {line.count("\t") for line in lines} == {12}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(seen, scheme: str) -> None:
    seen.emulate_media(color_scheme=scheme)
    settled(seen)
    assert seen.evaluate("getComputedStyle(document.body).backgroundColor") == BEHIND[scheme]
    assert seen.evaluate(CONTRAST) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, file, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector(".plot .drawing")
    prepare(page)
    for width in (400, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        settled(page)
        assert violations(page) == []
    context.close()


BEHIND = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


# WCAG 2.2, 1.4.3: the ratio of relative luminances is at least 4.5. In charts text is filled.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (text) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const luminance = (text) => {
        const [r, g, b] = [...rgba(text)].slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (rgba(colour)[3] === 255) return colour;
        }
        return "white";
    };
    const own = (element) =>
        [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    return [...document.querySelectorAll("main *")].filter(own)
        .filter((e) => e.getClientRects().length && !e.closest("script")).flatMap((e) => {
            const style = getComputedStyle(e);
            const colour = e.closest("svg.drawing") ? style.fill : style.color;
            const [high, low] = [luminance(colour), luminance(behind(e))].sort((a, b) => b - a);
            const ratio = (high + 0.05) / (low + 0.05);
            return ratio < 4.5 ? [`${ratio.toFixed(2)} ${e.outerHTML.slice(0, 90)}`] : [];
        });
}"""


def test_every_control_has_a_name_and_every_chart_says_what_it_shows(seen) -> None:
    nameless = seen.evaluate(
        """() => [...document.querySelectorAll("input, select, button")].filter((e) =>
            !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    silent = seen.evaluate(
        """() => [...document.querySelectorAll(".plot")].filter((e) =>
            !e.ariaLabel || !(e.querySelector("svg[role=img]")?.ariaLabel.length > 40)
        ).map((e) => e.outerHTML)"""
    )
    assert silent == []


METHODS = (
    "ddp",
    "diloco",
    "sparseloco",
    "streaming_diloco:tau=2",
    "streaming_muloco",
    "muloco:bits=2",
)


def scenarios() -> Generator[tuple[LinkReplay, Scenario, str]]:
    for number, text in enumerate(METHODS):
        method = presets.from_text(text)
        for workers in (1 + number % 2, 7):
            steps = (1, 31, 97)[(number + workers) % 3]
            name = list(TOPOLOGIES)[(number + workers) % len(TOPOLOGIES)]
            yield played(method, workers, steps, name, rate=10 ** (5 + number % 4))
    crowded = presets.from_text("streaming_diloco")
    crowded = dataclasses.replace(crowded, overlap=dataclasses.replace(crowded.overlap, tau=29))
    yield played(crowded, 3, 151, "ring", rate=1e4)
    late = presets.from_text("diloco", sync_every=5)
    late = dataclasses.replace(late, overlap=Delay(tau=4))
    yield played(late, 3, 23, "ring", rate=1e6)


def played(method: Any, workers: int, steps: int, name: str, *, rate: float) -> Any:
    freight = traffic(method, shape(), workers=workers)
    scenario = Scenario(
        traffic=freight,
        compute=Compute(step_s=0.037),
        link=Link.of(rate, latency_s=0.011),
        topology=TOPOLOGIES[name],
    )
    return LinkReplay(traffic=freight, steps=steps), scenario, name


def test_the_page_simulates_as_the_planner_does(browser) -> None:
    page = browser.new_page()
    page.add_script_tag(content=files("thinwire.report").joinpath("link.js").read_text())
    for replay, scenario, name in scenarios():
        link = {
            "rate": scenario.link.up_bits_per_s,
            "latency": scenario.link.latency_s,
            "step": scenario.compute.step_s,
            "topology": name,
        }
        found = page.evaluate(
            """([replay, link]) => {
                const run = thinwire.simulate(replay, link);
                const busy = run.transfers.map(({ from, to }) => [from, to]);
                return { wall: run.wall, at: [...run.at], busy, shares: thinwire.shares(run) };
            }""",
            [replay.describe(), link],
        )
        outcome = simulate(scenario, steps=replay.steps)
        assert found["wall"] == pytest.approx(outcome.wall_s, rel=1e-6)
        waited, clock = 0.0, []
        for step, wait in enumerate(outcome.wait_s[:-1]):
            waited += wait
            clock.append(step * 0.037 + waited)
        assert found["at"][:-1] == pytest.approx(clock, rel=1e-6)
        assert found["shares"]["waiting"] == pytest.approx(sum(outcome.wait_s), rel=1e-6)
        assert found["shares"]["computing"] == pytest.approx(outcome.seconds.compute_s, rel=1e-6)
        busy = [
            (begun, freed)
            for begun, freed in zip(outcome.begun_s, outcome.freed_s, strict=True)
            if freed > begun
        ]
        drawn = [time for pair in found["busy"] for time in pair]
        assert drawn == pytest.approx([time for pair in busy for time in pair], rel=1e-6)
    page.close()


def test_the_page_forbids_what_it_does_not_need(file) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', file.read_text())
    assert policy is not None
    assert "default-src 'none'" in policy[1]


def test_the_page_is_read_by_the_keyboard(page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("document.querySelectorAll('main, header').length") == 2
    section = page.locator(".chart", has=page.get_by_role("heading", name="Loss against tokens"))
    section.locator(".plot").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
        told.append(section.locator(".point").inner_text())
    assert len(set(told)) == 3
    assert told[0].split(":")[0] == told[1].split(":")[0] != told[2].split(":")[0]
    assert section.locator("button.reset").is_hidden()
    page.keyboard.press("+")
    assert section.locator("button.reset").is_visible()
    page.keyboard.press("0")
    assert section.locator("button.reset").is_hidden()


def test_headings_are_in_order(seen) -> None:
    levels = seen.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(low - high <= 1 for high, low in itertools.pairwise(levels))


def test_a_page_that_loads_itself_again_keeps_what_its_reader_chose(browser, tmp_path) -> None:
    paths = [comparison(tmp_path / "runs")]
    out = tmp_path / "report.html"
    data = report.read_report_data(paths)
    report.write_page(report.run_page(data, paths, out, refresh_s=3), out)
    window = Window(browser, out)
    page = window.page
    page.evaluate("window.first = true")
    page.uncheck("input[data-variant='0']")
    page.fill("#bandwidth", "7")
    page.focus("#results thead th:nth-child(4) button")
    page.keyboard.press("Enter")
    report.write_page(report.run_page(data, paths, out), out)  # complete
    wait_until(page, "!document.getElementById('live') && document.readyState === 'complete'")
    assert page.evaluate("window.first === undefined")
    assert not page.is_checked("input[data-variant='0']")
    assert page.input_value("#bandwidth") == "7"
    assert page.get_attribute("#results thead th:nth-child(4)", "aria-sort") == "ascending"
    window.context.close()
    assert set(window.said) == {out.as_uri()}


# -- many methods, and a narrow window -------------------------------------------------------------

MANY = 41


def many(folder: Path, count: int = MANY) -> Path:
    """Methods of several families, most of which neither are on the front nor are baselines."""
    names = ["ddp", "diloco", "muloco:bits=2", "noloco", "demo", "streaming_diloco:tau=2"]
    names += [f"sparseloco:density=1/{2 + n}" for n in range(20)]
    names += [f"sparse_muloco:density=1/{2 + n}" for n in range(20)]
    for number, name in enumerate(names[:count]):
        loss = 1.6 if name == "muloco:bits=2" else 2.0 + 0.01 * number
        write_run(folder / f"run{number}", config_of(name), loss=loss)
    return folder


@pytest.fixture(scope="module")
def many_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    paths, out = [many(folder / "runs")], folder / "report.html"
    report.write_page(report.run_page(report.read_report_data(paths), paths, out), out)
    return out


def heads(page: Any, table: str) -> list[str]:
    """Those that are seen, and what a screen reader finds: both ask whether there is a box."""
    return [
        head.inner_text()
        for head in page.query_selector_all(f"{table} thead th")
        if head.is_visible()
    ]


def rows(page: Any, table: str) -> int:
    return sum(row.is_visible() for row in page.query_selector_all(f"{table} tbody tr"))


def test_a_narrow_window_shows_what_matters_first_and_the_rest_by_the_keyboard(
    browser, many_file
) -> None:
    window = Window(browser, many_file, width=400)
    page = window.page
    assert heads(page, "#results") == ["method", "loss", "sent"]
    assert heads(page, "#on-link") == ["method", "wall-clock", "computing"]
    assert len(heads(page, "#differences")) == 3
    # Nothing of these has to be scrolled to be seen.
    fits = "[...document.querySelectorAll('.sortable .scroll')].every((e) => e.scrollWidth <= 400)"
    assert page.evaluate(fits)
    few = rows(page, "#results")
    assert 3 <= few < MANY
    section = page.locator("#results")
    columns = section.get_by_role("button", name="10 more columns", expanded=False)
    columns.focus()
    page.keyboard.press("Enter")
    assert len(heads(page, "#results")) == 13
    assert section.get_by_role("button", name="10 more columns", expanded=True).count() == 1
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert rows(page, "#results") == MANY
    more = section.get_by_role("button", name=f"{MANY - few} more methods", expanded=True)
    assert more.evaluate("(button) => button === document.activeElement")
    # The names stay in view when the rest is scrolled to.
    scroll = section.locator(".scroll")
    scroll.evaluate("(e) => e.scrollTo(1000, 0)")
    name = section.locator("tbody th").first
    assert name.bounding_box()["x"] == pytest.approx(scroll.bounding_box()["x"], abs=1)
    page.keyboard.press("Space")
    assert rows(page, "#results") == few
    page.set_viewport_size({"width": 1000, "height": 800})
    settled(page)
    assert len(heads(page, "#on-link")) == 5
    assert columns.is_hidden()
    window.context.close()
    assert window.said == []


def test_without_scripts_tables_show_all(browser, many_file) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto(many_file.as_uri())
    assert page.locator("#results thead th:visible").count() == 13
    assert page.locator("#results tbody tr:visible").count() == MANY
    context.close()


def test_families_are_folded_and_the_front_and_the_baselines_are_first(browser, many_file) -> None:
    window = Window(browser, many_file)
    page = window.page
    first = [label_of(box) for box in boxes_of(page) if box.is_visible()]
    assert {"ddp", "diloco", "muloco:bits=2"} <= set(first)
    assert len(first) == rows(page, "#results") < MANY / 2
    assert {trace["name"] for trace in drawn(page, "Loss against tokens")} == set(first)
    folds = page.locator("details.family")
    assert folds.count() >= 2
    summary = folds.first.locator("summary")
    summary.focus()
    page.keyboard.press("Enter")
    box = folds.first.locator("input").first
    assert box.is_visible()
    box.focus()
    page.keyboard.press("Space")
    settled(page)
    added = {trace["name"] for trace in drawn(page, "Loss against tokens")} - set(first)
    assert added == {label_of(box.element_handle())}
    window.context.close()
    assert window.said == []


IDLE_NEVER = "window.requestIdleCallback = () => 0"


def test_what_is_in_view_is_drawn_first_and_the_rest_when_it_comes_near(browser, many_file) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.add_init_script(IDLE_NEVER)
    page.goto(many_file.as_uri())
    wait_until(page, "document.documentElement.dataset.drawn !== undefined")
    empty = "[...document.querySelectorAll('.plot')].filter((e) => !e.innerHTML).length"
    charts = page.locator(".plot").count()
    assert page.evaluate(empty) == charts > 5
    assert page.evaluate("document.querySelector('#on-link td').textContent") == ""
    page.locator(".plot").last.scroll_into_view_if_needed()
    wait_until(page, "document.querySelectorAll('.plot .drawing').length > 0")
    assert 0 < page.evaluate(empty) < charts
    # On paper there is all of it.
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(empty) == 0
    assert page.evaluate("document.querySelector('#on-link td').textContent") != ""
    context.close()


def test_a_watched_page_grows_under_its_reader(browser, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "_PERIOD_S", 2.0)
    runs, out = many(tmp_path / "runs", 20), tmp_path / "page.html"
    names = [folder.name for folder in sorted(runs.iterdir())]
    note_planned_runs(runs, [*names, "late"], is_over=False)
    watch = ["report", str(runs), "--out", str(out), "--watch"]
    thread = threading.Thread(target=lambda: main(watch))
    thread.start()
    try:
        while not out.exists():
            thread.join(0.05)
        window = Window(browser, out, width=400)
        page = window.page
        page.locator("#results").get_by_role("button", name="10 more columns").click()
        page.locator("#results").get_by_role("button", name="more methods").click()
        page.locator("details.family summary").first.click()
        page.locator("details.family input").first.check()
        page.uncheck("label:has-text('diloco') input >> nth=0")
        page.get_by_role("radio", name="training").check()
        assert page.locator("#live").is_visible()
        write_run(runs / "late", config_of("muloco:bits=1"), loss=1.5)
    finally:
        note_planned_runs(runs, [*names, "late"], is_over=True)
        thread.join(60)
    wait_until(page, "!document.getElementById('live') && document.readyState === 'complete'")
    settled(page)
    assert rows(page, "#results") == 21
    assert page.locator("#results tbody th").first.inner_text() == "muloco:bits=1"
    assert len(heads(page, "#results")) == 13
    assert page.locator("details.family").first.get_attribute("open") is not None
    assert page.locator("details.family input").first.is_checked()
    shown = {trace["name"] for trace in drawn(page, "Loss against tokens")}
    assert "muloco:bits=1" in shown
    assert "diloco" not in shown
    assert page.get_by_role("radio", name="training").is_checked()
    window.context.close()
    # It has asked for itself and complained of nothing.
    assert set(window.said) == {out.as_uri()}
