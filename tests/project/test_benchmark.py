"""examples/benchmark.py: ratios of suites; and --against, two checkouts of the project, a process each, in one table."""

import csv
import importlib.util
import json
import shutil

import pytest
import torch
from conftest import ROOT

from adaperceiver.evaluation import benchmarks, checkouts


spec = importlib.util.spec_from_file_location("benchmark_script", ROOT / "examples" / "benchmark.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        benchmark.main(["--smoke", "--output", str(tmp_path / "output"), *map(str, arguments)])
        with open(tmp_path / "output" / "against.csv", newline="") as file:
            return list(csv.DictReader(file))

    return run


@pytest.mark.slow
def test_a_smoke_run_shows_every_suite_and_judges_nothing(tmp_path, capsys):
    benchmark.main(["--smoke", "--output", str(tmp_path)])
    printed = capsys.readouterr()
    assert "met" not in printed.out
    assert printed.err == ""  # no bars where there is no terminal
    table = json.loads((tmp_path / "results.json").read_text())
    assert {row["suite"] for row in table["rows"]} == set(benchmarks.SUITES)
    assert all(row["target"] is row["met"] is None and row["ratio"] > 0 for row in table["rows"])
    with open(tmp_path / "results.csv", newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in table["rows"]]
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("target", "met"), [("<= 1.05", True), ("<= 1.0", False), (">= 1.0", True), (">= 1.1", False)]
)
def test_ratios_are_judged_by_the_targets_of_the_papers_model(target, met):
    row = benchmarks.Benchmark(benchmarks.PAPER).row("suite", "name", 1.04, target)
    assert row.met is met
    assert f"{target:8} {'met' if met else 'NOT met'} " in str(row)


def test_live_memory_is_the_peak_of_what_a_call_makes():
    first, second = torch.nn.Linear(10, 1000, bias=False), torch.nn.Linear(1000, 10, bias=False)
    pixel_values = torch.zeros(50, 10)
    peak = benchmarks.peak_memory(
        torch.nn.Sequential(first, second), lambda: second(first(pixel_values)), pixel_values
    )
    assert peak == pytest.approx((50 * 1000 + 50 * 10) * 4 / 1e6)


@pytest.fixture
def other_checkout(tmp_path):
    for package in ("modeling", "configuration"):
        shutil.copytree(ROOT / package, tmp_path / "other" / package)
    return tmp_path / "other"


@pytest.mark.slow
def test_every_case_is_in_the_table_with_its_ratio(run, other_checkout, capsys):
    rows = run("--against", other_checkout)
    assert [(row["case"], row["batch"]) for row in rows] == [
        (f"tiny {case}", batch) for batch in ("1", "8") for case in checkouts.CASES
    ]
    for row in rows:
        this, other, low, ratio, high = (
            float(row[name]) for name in ("this_ms", "other_ms", "lower_quartile", "ratio", "upper_quartile")
        )
        assert this > 0
        assert other > 0
        assert 0 < low <= ratio <= high
    printed = capsys.readouterr().out
    assert f"this: {ROOT}\nother: {other_checkout}\n" in printed
    assert "outputs differ by at most 0.0e+00" in printed
    slower = printed.split("More than 2 % slower than the other checkout: ")[1].splitlines()[0]
    for row in rows:
        if row["ratio"] != "1.020":
            assert (f"{row['case']}, batch {row['batch']}" in slower) == (float(row["ratio"]) > 1.02)


@pytest.mark.slow
def test_the_other_checkout_is_what_runs_there(run, other_checkout):
    path = other_checkout / "modeling" / "modeling_adaperceiver.py"
    source = path.read_text()
    assert (
        source.count("return torch.stack([logits for _, _, logits in grid]).unflatten(0, (-1, len(granularities)))")
        == 1
    )
    path.write_text(
        source.replace(
            "return torch.stack([logits for _, _, logits in grid]).unflatten",
            "return 2 * torch.stack([logits for _, _, logits in grid]).unflatten",
        )
    )
    assert len(run("--against", other_checkout, "--only", "plain")) == 2  # which computes the same
    with pytest.raises(ValueError, match=r"^grid of the tiny model, batch 1: outputs differ by "):
        run("--against", other_checkout, "--only", "grid")


@pytest.mark.slow
def test_what_cannot_be_compared_is_named(run, other_checkout, tmp_path, capfd):
    with pytest.raises(ValueError, match=rf"^--against must be a checkout .*got {tmp_path}$"):
        run("--against", tmp_path)
    with pytest.raises(ValueError, match=r"^--only must be among plain, early_exit, .*, got probes$"):
        run("--against", ROOT, "--only", "probes")
    (other_checkout / "modeling" / "__init__.py").write_text("from .once_for_all_adaperceiver import Once\n")
    with pytest.raises(ChildProcessError, match=rf"^The worker of {other_checkout} has stopped"):
        run("--against", other_checkout, "--only", "plain")
    assert "ImportError: cannot import name 'Once'" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("size", checkouts.SIZES)
def test_images_exit_at_different_depths(size, monkeypatch):
    """Of `early_exit`; of `no_exit`, none."""
    model = checkouts.build({**checkouts.SIZES, **checkouts.SMOKE}[size])
    depths, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args, **kwargs: depths.append((o := forward(*args, **kwargs)).exit_depth) or o
    )
    last = model.config.num_hidden_layers
    runs = checkouts.cases(model, 8)
    runs["early_exit"]()
    runs["no_exit"]()
    assert len(set(depths[0].tolist())) >= 3
    assert depths[1].tolist() == [last] * 8
    checkouts.cases(model, 1)["early_exit"]()
    assert depths[2].item() < last


def test_the_weights_do_not_depend_on_the_seed_of_their_initialisation():
    torch.manual_seed(1)
    first = checkouts.build(checkouts.SMOKE["tiny"]).state_dict()
    torch.manual_seed(2)
    second = checkouts.build(checkouts.SMOKE["tiny"]).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
