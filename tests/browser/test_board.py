"""The page of `mobius board` in a real browser: every control, live runs from start to end, long ones, killed ones.

Without Chromium and its driver (Debian: chromium, chromium-driver) all are skipped, with one line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.run_feeds import BEGUN, evaluated, feed, line, started, step, write_run

from mobius.reporting.events import Evaluated

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not (BROWSER and DRIVER):
    pytest.skip("no Chromium with its chromedriver here", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS, NUM_STEPS = 50, 10_000
SELECTED = "return getSelection().toString()"
CONFIG = """{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 4096}"""


class Page:
    """The board in one tab, driven by what is seen on it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, place: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.url + place)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)  # type: ignore[no-any-return]

    def one(self, selector: str) -> Any:
        self.until(lambda: bool(self.all(selector)), selector)
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """All text of the first element, also hidden text; empty without one."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(self.driver.execute_script(script, selector))

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"{what}: never within {seconds} s; the page says {self.text('body')[:500]}"
            time.sleep(0.05)

    def until_text(self, selector: str, text: str, seconds: float = 60.0) -> None:
        self.until(lambda: text in self.text(selector), f"{text!r} in {selector}", seconds)

    def choose(self, selector: str, value: str) -> None:
        Select(self.one(selector)).select_by_value(value)

    def texts(self, selector: str) -> list[str]:
        """All text of each element, read at once: the page may make them anew at any time."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.driver.execute_script(script, selector))

    def series(self, chart: int = 0) -> Any:
        """Label of the chart of this number, which has the numbers for a screen reader."""
        return self.all(".chart")[chart].get_attribute("aria-label")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs; one of 10,000 steps is there under fifty names, as one file."""
    folder = tmp_path_factory.mktemp("runs")
    path = write_run(folder / "long-00", NUM_STEPS)
    os.utime(path, (BEGUN, BEGUN))
    for number in range(1, NUM_RUNS):
        (folder / f"long-{number:02}").mkdir()
        os.link(path, folder / f"long-{number:02}" / "events.jsonl")
    return folder


@pytest.fixture(scope="module")
def board(root: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "mobius", "board", str(root), "--port", "0", "--no_browser"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
        assert log == ""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    words = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en", "--window-size=1280,1000")
    for word in (*words, *(["--no-sandbox"] if os.getuid() == 0 else [])):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    own = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield own
    own.quit()


@pytest.fixture(scope="module")
def url(board: subprocess.Popen[str]) -> str:
    """Address of the board, whose planner has begun to start: the last test needs it."""
    assert board.stdout is not None
    address = board.stdout.readline().split()[-1]
    urllib.request.urlopen(f"{address}api/plan", b"{}").read()
    return address


@pytest.fixture
def page(driver: Any, url: str) -> Iterator[Page]:
    driver.set_window_size(1280, 1000)
    yield Page(driver, url)
    assert driver.get_log("browser") == []  # no error of a script, nothing that the policy has blocked


def test_fifty_runs_of_ten_thousand_steps_are_there_at_once(page: Page, board: subprocess.Popen[str]) -> None:
    page.open("#runs/long-07")
    page.until(lambda: len(page.all("#list li")) == NUM_RUNS, "list")
    page.until_text(".latest", "2.0")
    script = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert page.driver.execute_script(script) < 5000  # a machine that is at other work, too
    assert page.text("#run h2").startswith("long-07")
    assert f"at step {NUM_STEPS:,}" in page.series()
    assert len(page.all(".chart canvas")) == 8
    status = Path(f"/proc/{board.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 50 * 1024
    page.driver.get("about:blank")
    time.sleep(1.5)
    ticks = cpu_ticks(board.pid)
    time.sleep(1.0)
    assert cpu_ticks(board.pid) == ticks  # nobody looks


def cpu_ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_every_control_does_what_it_says(page: Page) -> None:
    page.open("#runs/long-01")
    page.until_text(".latest", "2.0")
    page.one("#filter").send_keys("LONG-4")
    page.until(lambda: len(page.all("#list li")) == 10, "filter")
    page.one("#filter").clear()
    page.one("#filter").send_keys("killed")
    page.until(lambda: not page.all("#list li"), "filter by state")
    page.choose("#compare", "long-02")
    page.until(lambda: [each.split()[0] for each in page.texts("#run h2")] == ["long-01", "long-02"], "two runs")
    page.until(lambda: page.text(".u-legend").count("evaluation loss") == 2, "two runs in a chart")
    page.choose("#compare", "")
    page.until(lambda: len(page.all("#run h2")) == 1, "one run")
    page.choose("#axis", "time")
    page.until(lambda: "at hours 1.38889," in page.series(), "hours")
    page.choose("#axis", "step")
    page.driver.execute_script(
        "const e = document.getElementById('smoothing'); e.value = 0; e.dispatchEvent(new Event('input'))"
    )
    page.until(lambda: "smoothed" not in page.text(".u-legend"), "no smoothing")
    page.one("#logarithmic").click()
    page.until(lambda: page.one("#logarithmic").is_selected(), "logarithmic loss")
    assert not page.one("#whole").is_enabled()
    area = page.all(".u-over")[0]
    ActionChains(page.driver).move_to_element_with_offset(area, -20, 0).click_and_hold().move_by_offset(
        16, 0
    ).release().perform()
    page.until(lambda: page.one("#whole").is_enabled(), "zoom")
    page.one("figure summary").click()
    page.until(lambda: shows_each_step(page.texts("figure details[open] tbody tr td:first-child")), "each step")
    page.one("#whole").click()
    page.until(lambda: f"at step {NUM_STEPS:,}" in page.series(), "whole run")
    for name, fold in (("Warnings (1)", "attention is slow <b>here</b>"), ("Evaluations (20)", "perplexity")):
        (summary,) = [each for each in page.all("#run summary") if each.text == name]
        summary.click()
        assert fold in summary.find_element(By.XPATH, "..").text  # as text, not as HTML
    page.choose("#theme", "dark")
    dark = page.one("body").value_of_css_property("background-color")
    page.choose("#theme", "light")
    assert page.one("body").value_of_css_property("background-color") != dark
    page.choose("#language", "zh")
    page.until_text("#to-runs", "训练")
    assert page.one("html").get_attribute("lang") == "zh"
    page.open("#runs/long-01")
    page.until_text("#to-runs", "训练")  # it is remembered
    page.choose("#language", "en")
    page.until_text("#to-runs", "Runs")


def shows_each_step(cells: list[str]) -> bool:
    steps = [float(cell.replace(",", "")) for cell in cells]
    return len(steps) == 20 and all(later - earlier == 1 for later, earlier in pairwise(steps))


def test_it_is_used_by_keyboard_and_screen_reader(page: Page) -> None:
    page.open("#runs/long-01")
    page.until_text(".latest", "2.0")
    nameless = page.driver.execute_script("""
        return [...document.querySelectorAll("a, button, input, select, meter, progress, [tabindex]")].filter((one) =>
          one.offsetParent && one.id !== "main"
            && !(one.labels?.length || one.textContent.trim() || one.getAttribute("aria-label")))
          .map((one) => one.outerHTML)""")
    assert nameless == []
    body = page.one("body")
    body.send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("id") == "skip"
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.driver.switch_to.active_element.get_attribute("id") == "main"
    chart = page.all(".chart")[0]
    page.driver.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.END)
    page.until_text("#announcement", f"{NUM_STEPS:,}: loss 2.0")
    chart.send_keys(Keys.HOME)
    page.until_text("#announcement", "10: loss 7.8")
    page.driver.execute_script("document.querySelectorAll('#list a')[3].focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    chosen = "return document.activeElement.matches('#list li:nth-child(4) a[aria-current=true]')"
    page.until(lambda: page.driver.execute_script(chosen) is True, "a run by Enter, which keeps the focus")


def test_a_run_is_followed_from_its_start_to_its_end(page: Page, root: Path) -> None:
    page.open("#runs/long-01")
    page.until_text("#run h2", "long-01")
    folder = root / "live"
    folder.mkdir()
    with (folder / "events.jsonl").open("w") as file:

        def write(*lines: str) -> None:
            file.write("".join(lines))
            file.flush()

        begun = time.time() - BEGUN
        write(line(started(40), 0, begun))
        page.until_text("#list", "live")
        page.driver.execute_script("location.hash = '#runs/live'")
        page.until_text("#run h2", "live running")
        write(*(line(step(number), number, begun + number) for number in range(1, 21)))
        page.until_text(".place", "step 20 of 40, about 20s left (20s to 20s)")
        torn = line(step(21), 21, begun + 21)
        write(line(evaluated(20), 20, begun + 20.5), torn[:30])
        page.until_text(".tiles", "evaluation loss")
        assert "step 20 of 40" in page.text(".place")
        write(torn[30:])
        page.until_text(".place", "step 21 of 40")
        assert "at step 21," in page.series()
        write([*feed(1)][-1].replace('"step": 1', '"step": 40'))
    page.until_text("#run h2", "live done")
    page.until_text("#announcement", "live is done")


def test_a_run_of_one_step_has_its_charts(page: Page, root: Path) -> None:
    """The first and the last number of its axes are one."""
    write_run(root / "begun", 1, total=10, ends=None)
    page.open("#runs/begun")
    page.until(lambda: len(page.all(".chart canvas")) == 8, "charts")
    assert "at step 1, from" in page.series()
    page.choose("#axis", "time")
    page.until(lambda: "at hours" in page.series(), "hours")
    page.choose("#axis", "step")
    shutil.rmtree(root / "begun")


def test_numbers_of_an_objective_have_charts_beside_the_loss(page: Page, root: Path) -> None:
    numbers = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/margins": 1.0, "rewards/accuracies": 0.75}
    steps = [line(step(number, numbers=numbers), number, number) for number in (1, 2)]
    after = Evaluated(step=2, numbers={"loss": 0.5, "rewards/accuracies": 0.625}, num_samples=8)
    (root / "pairs").mkdir()
    (root / "pairs" / "events.jsonl").write_text("".join([line(started(2), 0), *steps, line(after, 2, 2.5)]))
    page.open("#runs/pairs")
    page.until(lambda: len(page.all(".chart canvas")) == 10, "charts")
    titles = [text.split("  ")[0] for text in page.texts("figcaption")]
    assert titles[1].startswith("rewards of answers")
    assert titles[2].startswith("share of pairs in the right order")
    legends = page.texts(".u-legend")
    assert all(word in legends[1] for word in ("chosen", "rejected", "margin"))
    assert "evaluation: share of pairs in the right order" in legends[2]
    page.until_text("#run", "Evaluations (1)")
    page.until_text("#run", "0.625")
    page.open("#runs/long-01")
    page.until(lambda: len(page.all(".chart canvas")) == 8, "charts of supervised fine-tuning")
    shutil.rmtree(root / "pairs")


def test_bad_numbers_cost_their_run_what_they_stand_for(page: Page, root: Path) -> None:
    folder = root / "bad"
    lines = [*feed(5, total=10, ends=None)]
    odd = [json.loads(lines[-2]) | {"step": number} for number in (6, 9 * 10**14, 9 * 10**14 + 1, 7)]
    odd[0] |= {"loss": "text", "step_seconds": "HUGE", "wait_seconds": {"constructor": 1.0}}
    odd[1] |= {"time": -1e300, "grad_norm": 1e300}
    start = json.loads(lines[1]) | {"time": "noon", "num_parameters": "text", "startup_seconds": {"a": {}, "b": "x"}}
    numbers = {"event": "evaluation", "step": 3, "time": 0, "num_samples": "x", "numbers": {"loss": 1e300}}
    folder.mkdir()
    events = "".join(json.dumps(each) + "\n" for each in (*map(json.loads, lines), start, *odd, numbers))
    (folder / "events.jsonl").write_text(events.replace('"HUGE"', "9" * 400))
    (folder / "plan.json").write_text('{"cuts": [null, 3], "resident": 5}')
    (folder / "trace.json").write_text('{"traceEvents": [{"ph": "X", "ts": "x", "cat": "step", "args": {}}]}')
    page.open("#runs/bad")
    page.until(lambda: len(page.all("#list li")) >= NUM_RUNS + 1, "list")
    page.until_text("#run h2", "bad")
    page.until(lambda: len(page.all(".chart canvas")) == 8, "charts")
    page.choose("#axis", "time")
    page.one("#logarithmic").click()
    page.until_text("#run", "Evaluations (1)")
    page.open("#runs/long-01")
    page.until_text(".latest", "2.0")
    shutil.rmtree(folder)


@pytest.mark.parametrize("place", ["#runs/%", "#runs/%E0%A4%A", "#constructor", "#runs//"])
def test_a_malformed_address_shows_the_list(page: Page, place: str) -> None:
    page.open(place)
    page.until(lambda: len(page.all("#list li")) >= NUM_RUNS, "list")
    assert page.one("#runs").is_displayed()


@pytest.fixture(scope="module")
def real_run(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A small run on this CPU, whose imports take as long as the test before its own waits."""
    options = ["--config", "configs/quickstart.yaml", "--num_iterations", "6", "--num_stages", "2", "--trace"]
    results = ["--save_dir", str(root / "real"), "--save_params", "none", "--save_results", str(root / "real.txt")]
    words = [sys.executable, "-m", "mobius", *options, *results, "--device", "cpu"]
    with (root / "real.log").open("w") as log, subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log) as process:
        yield process


@pytest.mark.usefixtures("real_run")
def test_a_killed_run_is_shown_as_one(page: Page, root: Path) -> None:
    folder = root / "victim"
    write_run(folder, 30, total=100, ends=None)
    words = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", words, str(folder)]) as victim:
        page.open("#runs/victim")
        page.until_text("#run h2", "victim running")
        time.sleep(1.5)  # it has been seen at work
        victim.kill()
    page.until_text("#run h2", "victim killed")
    page.until_text("#announcement", "victim is killed")


def test_a_real_run_is_followed_to_its_end(page: Page, real_run: subprocess.Popen[bytes]) -> None:
    page.open("#runs/real")
    page.until_text("#run h2", "real done")
    assert real_run.wait(60) == 0
    page.until_text(".place", "step 6 of 6")
    page.until(lambda: bool(page.all(".timeline canvas")), "timeline of a measured step")
    page.until_text("#run", "rank 0")


def test_a_phone_shows_everything_without_scrolling_sideways(page: Page, root: Path) -> None:
    page.driver.set_window_size(500, 900)  # Chromium's least; the page itself is made narrower below
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    write_run(root / ("a-name-without-a-break-" * 6), 5)
    for place in ("#runs/long-01", "#runs/long-01/long-02", "#plan"):
        page.open(place)
        page.until(lambda: bool(page.all(".latest, #form")), "page")
        if place != "#plan":
            page.until_text("#compare", "a-name")
        time.sleep(0.5)
        widths = page.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert widths == [390, 390], place
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    shutil.rmtree(root / ("a-name-without-a-break-" * 6))


def test_a_plan_follows_each_change(page: Page, root: Path) -> None:
    page.open("#plan")
    page.until_text("#verdict", "It fits", 180)  # the planner imports torch first
    named = "mobius train --model_path meta-llama/Llama-2-7b-hf --seq_length 2048 --batch_size 32 --num_stages auto"
    page.until_text("#command", named)
    assert page.texts("mark") == ["DATASET"]
    shown = "return [...document.querySelectorAll('#form label')].filter((one) => one.checkVisibility()).length"
    assert page.driver.execute_script(shown) == 7  # the rest is folded
    page.one("#rest summary").click()
    model = page.one("input[name=model]")
    model.clear()
    model.send_keys("0.5b")
    page.until_text("#command", "--model_path Qwen/Qwen2.5-0.5B")
    page.until_text("#answer", "494,032,768")
    page.choose("select[name=method]", "lora")
    page.until_text("#command", "--finetuning_type lora")
    page.one("input[name=price]").send_keys("2.5")
    page.until_text("#answer", "cost of an epoch")
    page.choose("select[name=method]", "full")
    page.one("input[name=memory]").send_keys("4")
    page.until_text("#verdict", "does not fit")
    page.until(lambda: bool(page.all(".remedies button")), "remedies", 30)
    button = page.all(".remedies button")[0]
    options = button.text
    button.click()
    page.until_text("#verdict", "It fits")
    page.until_text("#command", options.split()[0])
    assert len(page.all(".memory .row")) == 3
    page.driver.execute_script("document.querySelector('.command button').click()")
    page.until(lambda: "Copied" in page.text(".command") or page.driver.execute_script(SELECTED) != "", "copy")
    for name, number in (("rows", "4"), ("sequence", "512")):  # fewer numbers of microbatches are tried
        page.one(f"input[name={name}]").clear()
        page.one(f"input[name={name}]").send_keys(number)
    page.until_text("#command", "--seq_length 512 --batch_size 4")
    page.driver.execute_script("arguments[0].click()", page.one("#faster"))
    page.until_text("#answer", "changes were tried")
    (root / "config.json").write_text(CONFIG)
    page.one("#config").send_keys(str(root / "config.json"))
    page.until_text("#command", "--model_path MODEL")
    page.one("input[name=more]").send_keys(" --batchsize 3")
    page.until_text("#answer", "did you mean `--batch_size`?")


def test_three_cards_get_a_plan_and_a_refusal_its_buttons(page: Page) -> None:
    page.open("#plan")
    count = page.one("input[name=count]")
    count.clear()
    count.send_keys("3")
    page.until_text("#verdict", "It fits", 120)
    page.one("#rest summary").click()
    stages = page.one("input[name=stages]")
    stages.clear()
    stages.send_keys("8")
    page.until_text("#verdict", "This cannot be planned")
    assert "looked for" not in page.text("#verdict")
    assert page.texts("#answer button") == ["--num_stages 6", "--num_stages 9"]
    page.choose("#language", "zh")
    page.until_text("#answer", "流水线阶段数 8 不是显卡数 3 的整数倍")
    page.all("#answer button")[1].click()
    page.until_text("#verdict", "可以运行", 120)
    assert page.one("input[name=stages]").get_attribute("value") == "9"
    page.until_text("#answer", "工作区")
    page.choose("#language", "en")


def test_the_planner_tells_what_a_run_should_take(page: Page, root: Path) -> None:
    write_run(root / "asked", 30)
    (root / "asked" / "training_args.yaml").write_text("model_path: 0.5b\nseq_length: 1024\nbatch_size: 16\n")
    page.open("#runs/asked")
    page.one("button.ask").click()
    page.until_text("h4", "Predicted timeline of a step")
    page.until_text("#run", "limits the step")


def test_without_the_secret_there_is_no_page(page: Page) -> None:
    page.driver.get(page.url.rsplit("/", 2)[0] + "/guess/")
    page.until_text("body", "whole address")
    page.driver.get("about:blank")
    page.until(lambda: page.driver.get_log("browser") != [], "word of the refusal")
    time.sleep(0.5)
    page.driver.get_log("browser")  # and of its icon
