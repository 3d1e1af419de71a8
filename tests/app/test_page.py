"""The page in a real browser: what a visitor sees and does."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT


pytest.importorskip("gradio", reason="the page needs gradio: `make test-app`")
pytest.importorskip("selenium", reason="the browser is driven by selenium: `make test-app`")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no browser: install Debian's chromium and chromium-driver", allow_module_level=True)

from browser import answered, browser, served, text, wait
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForSemanticSegmentation,
)


CLASSIFIER = ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"
SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_latent_tokens": 16,
    "feature_size": 24,
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page with the shipped classifier, and random models for masks and depth."""
    torch.manual_seed(0)
    folder, arguments = tmp_path_factory.mktemp("checkpoints"), [str(CLASSIFIER)]
    for name, model_class in (
        ("masks", AdaPerceiverForSemanticSegmentation),
        ("depth", AdaPerceiverForDepthEstimation),
    ):
        model = model_class(AdaPerceiverConfig(**SIZES, id2label={0: "pet", 1: "background", 2: "border"}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)
        arguments += [f"--{name}", str(folder / name)]
    with served(*arguments) as address:
        yield address


@pytest.fixture(scope="module")
def driver():
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver, address):
    driver.get(address)
    wait(driver, answered)
    return driver


def set_slider(page, name, value):
    """As a visitor who types the number beside it."""
    number = page.find_element(By.CSS_SELECTOR, f"#{name} input[type=number]")
    number.send_keys(Keys.CONTROL, "a")
    number.send_keys(str(value), Keys.TAB)


def upload(page, path):
    for clear in page.find_elements(By.CSS_SELECTOR, "#photograph button[aria-label*=lear]"):
        clear.click()
    wait(page, lambda page: page.find_element(By.CSS_SELECTOR, "#photograph input[type=file]")).send_keys(str(path))


def gflops(page, side):
    return float(re.search(r"GFLOPs\s+([\d.e-]+)", text(page, f"{side}-cost"))[1])


def test_the_page_shows_prediction_cost_and_pictures_of_both_sides(page):
    for side in "AB":
        assert "%" in text(page, f"{side}-label")
        assert re.search(r"of 32 tokens, width \d+ of 128, \d of 6 blocks", text(page, f"{side}-cost"))
        for picture in ("blocks", "mask", "depth_map", "features"):
            assert page.find_elements(By.CSS_SELECTOR, f"#{side}-{picture} img"), picture
    assert gflops(page, "A") < gflops(page, "B")
    assert text(page, "B-cost").count("(100%)") == 2


def test_a_slider_changes_cost_and_prediction_of_its_side_alone(page):
    before, other = text(page, "B-label"), text(page, "A-cost")
    knob = page.find_element(By.CSS_SELECTOR, "#B-depth input[type=range]")
    knob.send_keys(Keys.ARROW_LEFT)
    wait(page, lambda page: "5 of 6 blocks" in text(page, "B-cost"))
    set_slider(page, "B-depth", 1)
    set_slider(page, "B-tokens", 1)
    set_slider(page, "B-width", 8)
    wait(page, lambda page: "1 of 32 tokens, width 8 of 128, 1 of 6 blocks" in text(page, "B-cost"))
    assert text(page, "B-label") != before
    assert text(page, "A-cost") == other


def test_the_exit_threshold_stops_a_confident_photograph_early(page):
    assert "early exit" not in text(page, "B-cost")
    full = gflops(page, "B")
    set_slider(page, "B-threshold", 0.3)
    wait(page, lambda page: "early exit" in text(page, "B-cost"))
    assert gflops(page, "B") < full


@pytest.mark.parametrize(("unit", "index"), [("gflops", 1), ("ms", 2)])
def test_a_budget_chooses_the_operating_point(page, unit, index):
    full = text(page, "B-cost")
    page.find_elements(By.CSS_SELECTOR, "#B-by label")[index].click()
    number = wait(page, lambda page: page.find_element(By.CSS_SELECTOR, f"#B-{unit} input[type=number]"))
    wait(page, lambda page: number.is_displayed() and not page.find_elements(By.CSS_SELECTOR, "#B-tokens input"))
    lowest = float(number.get_attribute("min"))
    set_slider(page, f"B-{unit}", lowest)
    wait(page, lambda page: text(page, "B-cost").splitlines()[0] != full.splitlines()[0])
    if unit == "gflops":
        assert gflops(page, "B") <= lowest


def test_an_upload_is_classified(page, tmp_path):
    Image.effect_mandelbrot((320, 240), (-2.0, -1.2, 1.0, 1.2), 100).save(tmp_path / "mine.png")
    before = text(page, "B-label")
    upload(page, tmp_path / "mine.png")
    wait(page, lambda page: "%" in text(page, "B-label") and text(page, "B-label") != before)


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_is_no_photograph_gets_a_message_and_the_page_goes_on(page, tmp_path, cut):
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    Image.effect_mandelbrot((320, 240), (-2.0, -1.2, 1.0, 1.2), 100).save(good)
    bad.write_bytes(good.read_bytes()[:1000] if cut else b"this is text")
    upload(page, bad)
    said = "return [...document.querySelectorAll('[data-testid=toast-body]')].map(one => one.textContent).join()"
    wait(page, lambda page: "No answer for this photograph" in page.execute_script(said))
    assert "Traceback" not in page.page_source
    upload(page, good)
    wait(page, lambda page: "%" in text(page, "B-label"))


def test_nothing_is_fetched_from_elsewhere(page, address):
    page.get_log("performance")  # those of other tests
    page.get(address)
    wait(page, answered)
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if url.startswith(address)]
    assert not [url for url in urls if not url.startswith((address, "data:", "blob:"))]


def test_bad_arguments_are_one_line():
    script = [sys.executable, str(ROOT / "examples" / "app.py")]
    result = subprocess.run([*script, "--images", "nowhere"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "app.py: error: --images nowhere does not exist."
