"""A report in a real browser: it is drawn without an error, says what is under the pointer and the keys,
keeps hostile texts as texts, fits the window, and is legible in light and dark.

Role: run by `.ci/run browser`; skipped where there is no browser.
Owns: what only a browser can tell. Refuses: what the page holds (tests/test_report.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import colibri
import made_traces
from colibri.analysis import page
from colibri.analysis.findings import findings
from colibri.analysis.measures import measure
from colibri.analysis.recording import Text, record
from colibri.analysis.trace import Trace
from colibri.cache import resolve
from colibri.format import read_container

BAD = "</script><script>document.title='broken'</script><b>&amp;<!--"
COLOURS = """
const canvas = document.querySelector('#load-map canvas');
const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
return new Set(new Uint32Array(data.buffer)).size
"""
PAIRS = """  // colour and ground of every kind of text
const seen = new Set();
for (const one of document.querySelectorAll('h1, p, a, strong, span, td, th, .says, button, select')) {
  if (!one.textContent.trim()) continue;
  let at = one, ground = 'rgba(0, 0, 0, 0)';
  while (at && ground === 'rgba(0, 0, 0, 0)') {
    ground = getComputedStyle(at).backgroundColor;
    at = at.parentElement;
  }
  seen.add(JSON.stringify([getComputedStyle(one).color, ground]));
}
return [...seen]
"""
UP, DOWN, LEFT, RIGHT = "\ue013", "\ue015", "\ue012", "\ue014"


def opened(browser: Any, file: Path) -> Any:
    """The page, drawn; an error of its script, or of its policy, fails the test."""
    browser.get_log("browser")
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.drawn") == "yes"
    assert not [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    return browser


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo model, with hostile texts and labels."""
    path = tmp_path_factory.mktemp("small")
    texts = [Text("Once upon a time " + BAD, BAD), Text("Tom has 12 cups.\n def f(x):", "verse")] * 3
    file = resolve("demo", None)
    with colibri.load(file, context=128) as model:
        record(model, texts, path / "run.trace", generate=4)
    measures = measure(Trace(path / "run.trace"), read_container(file))
    page.write(measures, findings(measures), path / "small.html")
    return path / "small.html"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 layers of 256 experts."""
    path = tmp_path_factory.mktemp("large")
    trace = made_traces.write(path / "run.trace", 64, 256, 8, tokens=160, texts=4)
    measures = measure(Trace(trace))
    page.write(measures, findings(measures), path / "large.html")
    return path / "large.html"


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def said(browser: Any, place: str) -> str:
    return str(find(browser, f"#{place} .says").text)


def test_hostile_texts_stay_texts(browser: Any, small: Path) -> None:
    opened(browser, small)
    assert browser.title == "Routing report"
    body = find(browser, "#text-body").text
    assert "Once upon a time" in body and BAD in body
    assert not browser.find_elements("css selector", "main b, main script")
    assert BAD in find(browser, "#text-which").text


def test_the_keyboard_reads_every_map_and_the_text(browser: Any, small: Path) -> None:
    opened(browser, small)
    for place in ("load-map", "layer-load", "layer-pairs", "layer-about", "text-map"):
        canvas = find(browser, f"#{place} canvas")
        assert canvas.get_attribute("tabindex") == "0" and canvas.get_attribute("aria-label")
        canvas.send_keys(RIGHT)
        first = said(browser, place)
        canvas.send_keys(RIGHT, DOWN)
        assert re.search(r"expert|token", first) and said(browser, place) != first, place
    assert said(browser, "load-map").startswith("layer 1, expert 1: ")
    text = find(browser, "#text-body")
    text.send_keys(RIGHT, RIGHT, RIGHT, LEFT)
    told = find(browser, "#text-says").text
    assert "position 1" in told and "expert" in told and "weight 0." in told
    assert len(browser.find_elements("css selector", "#text-body .here")) == 1


def test_everything_that_can_be_used_is_reached_by_tab(browser: Any, small: Path) -> None:
    opened(browser, small)
    reached = browser.execute_script(
        "return [...document.querySelectorAll('a[href], button, select, canvas, #text-body, .scroll')]"
        ".filter(one => one.tabIndex < 0 && !one.hasAttribute('aria-hidden') && !one.closest('.legend'))"
        ".map(one => one.id || one.outerHTML.slice(0, 80))"
    )
    assert reached == []


def test_the_pointer_reads_the_cell_that_it_is_on(browser: Any, small: Path) -> None:
    from selenium.webdriver import ActionChains

    opened(browser, small)
    canvas = find(browser, "#load-map canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    across, down = canvas.size["width"] / 2, canvas.size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, int(across - 25), int(down - 10)).perform()
    assert said(browser, "load-map").startswith("layer 4, expert 7: ")
    canvas.click()
    assert find(browser, "#layer-which").get_attribute("value") == "2"  # the row in its middle
    first = browser.find_elements("css selector", "#text-body span")[0]
    ActionChains(browser).move_to_element(first).perform()
    assert "layer 2: expert" in find(browser, "#text-says").text


def test_links_of_findings_choose_the_layer(browser: Any, large: Path) -> None:
    opened(browser, large)
    find(browser, ".findings a[data-layer='1']").click()
    assert find(browser, "#layer-which").get_attribute("value") == "1"
    assert browser.current_url.endswith("#layer")
    canvas = find(browser, "#layer-load canvas")
    canvas.send_keys(RIGHT, RIGHT, RIGHT)
    assert said(browser, "layer-load").startswith("layer 1, expert 2: 160 of 160 tokens (100 %")


def test_it_fits_the_window(browser: Any, small: Path, large: Path) -> None:
    for file in (small, large):
        for width in (1280, 420):
            browser.set_window_size(width, 900)
            opened(browser, file)
            wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert browser.execute_script(wide) <= 0, (file.name, width)
    browser.set_window_size(1280, 900)


def test_256_experts_have_cells_that_can_be_told_apart(browser: Any, large: Path) -> None:
    opened(browser, large)
    for place, rows in (("load-map", 64), ("layer-pairs", 256), ("text-map", 256)):
        size = find(browser, f"#{place} canvas").size
        assert size["width"] >= 3 * 40 and size["height"] >= 3 * rows, place
    assert find(browser, "#load-map canvas").size["width"] >= 3 * 256
    picture = browser.execute_script(COLOURS)
    assert picture > 50  # many colours: it is drawn


def contrast(colours: list[str]) -> float:
    """As WCAG 2.2 has it, of two "rgb(...)"."""
    light = []
    for colour in colours:
        parts = [int(float(part)) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    high, low = max(light), min(light)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("file", ["small", "large"])
def test_texts_are_legible_in_light_and_dark(
    browser: Any, file: str, theme: str, request: pytest.FixtureRequest
) -> None:
    opened(browser, request.getfixturevalue(file))
    for _ in range(2):
        if browser.execute_script("return document.documentElement.dataset.theme") != theme:
            find(browser, "#theme").click()
    assert browser.execute_script("return document.documentElement.dataset.theme") == theme
    pairs = browser.execute_script(PAIRS)
    assert len(pairs) > 8
    for pair in pairs:
        assert contrast(json.loads(pair)) >= 4.5, pair


def test_the_theme_of_the_system_comes_first(browser: Any, small: Path) -> None:
    grounds = []
    for theme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        opened(browser, small)
        grounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds[0] == "rgb(255, 255, 255)" and grounds[1] != grounds[0]
