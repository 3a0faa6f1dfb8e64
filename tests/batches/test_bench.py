"""What is measured of loader and step: rates, counts, which of the two bounds a training, and errors by name."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bars_fixtures import bar_table
from hypothesis import given
from hypothesis import strategies as st

from stager import Stager
from stager.batches import bench as benching
from stager.batches.bench import bench, measure
from stager.batches.bench_report import Rate
from stager.batches.training_step import StepError, load_step
from stager.errors import ConfigError, SampleError
from stager.packs.packing import pack

STEPS = {"B": [*range(400), *range(403, 750)], "A": range(300), "C": [*range(5), *range(7, 600)]}
CONFIG = """
[batches]
window = 16
batch_size = 50
{batches}
[[target]]
horizon = 1
[[target]]
horizon = 5
[staging]
device = "cpu"
"""


def benched(**options):
    return bench(bar_table(STEPS), **{"seconds": 0.2, "device": "cpu", "window": 16, "batch_size": 50} | options)


# -------------------------------------------------------------------------------- rates


class Clock:
    """A loop whose time is made up."""

    def __init__(self, monkeypatch, per_time, once=0.0):
        self.now, self._per_time, self._once, self.n_done = 0.0, per_time, once, 0
        monkeypatch.setattr(benching.time, "perf_counter", lambda: self.now)

    def run(self, n):
        self.now += n * self._per_time + self._once
        self._once = 0.0
        self.n_done += n
        return 7 * n


@pytest.mark.parametrize("per_time", [1e-7, 3e-5, 1e-3, 0.1])
def test_a_rate_is_of_rounds_that_last(monkeypatch, per_time):
    clock = Clock(monkeypatch, per_time, once=30.0)
    rate = measure(clock.run, 2.0)
    assert rate.median == pytest.approx(7 / per_time)
    assert rate.least <= rate.median <= rate.most
    assert 3 <= rate.n_rounds <= 5
    # What was done once took its time, and does not count.
    assert clock.now - 30 < 2.5


def test_a_slow_loop_goes_round_once_after_the_first_time(monkeypatch):
    clock = Clock(monkeypatch, 100.0)
    rate = measure(clock.run, 2.0)
    assert (rate.median, rate.n_rounds, clock.n_done) == (0.07, 1, 2)


@given(per_time=st.floats(1e-8, 10.0), seconds=st.floats(1e-3, 100.0))
def test_a_measurement_ends(per_time, seconds):
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch, per_time)
        rate = measure(clock.run, seconds)
        assert rate.median == pytest.approx(7 / per_time, rel=1e-3)
        assert clock.now <= 2.5 * seconds + 3 * per_time


@pytest.mark.parametrize("options", [{"last": "keep"}, {"last": "drop"}, {"last": "pad"}, {"shuffle": "time"}])
def test_a_loop_tells_how_many_samples_it_served(options):
    with Stager(bar_table(STEPS), window=16, batch_size=50, device="cpu", **options) as served:
        epoch = [len(batch) for batch in served.batches(0)]
        seen = []
        loop = benching._Loop(
            served, None, lambda result: None, step=lambda batch: seen.append((batch.epoch, len(batch)))
        )
        for n in (1, 5, 2 * len(epoch) + 3, len(epoch) - 9):
            seen.clear()
            told = loop.run(n)
            assert len(seen) == n
            if "shuffle" not in options:
                assert told == sum(size for _, size in seen)
        # The rounds above are three epochs together, of whatever batches.
        assert seen[-1][0] == 2
        assert loop.run(len(epoch)) == pytest.approx(sum(epoch))


# -------------------------------------------------------------------------------- the report


def test_staging_batches_and_ceilings_are_told():
    report = benched()
    with Stager(bar_table(STEPS), window=16, batch_size=50, device="cpu") as served:
        assert (report.n_samples, report.n_batches, report.batch_size) == (served.n_samples, len(served), 50)
        assert report.rows_nbytes == served.resident.nbytes
    assert report.sample_nbytes == 16 * 5 * 4
    assert (report.device, report.placement, report.to, report.bus_gbps) == ("cpu", "host", "numpy", 0)
    assert min(report.open_seconds, report.stage_seconds, report.find_seconds, report.first_batch_seconds) > 0
    assert report.copy_gbps > 0
    assert 0 < report.loader.least <= report.loader.median <= report.loader.most
    assert report.stats.n_samples >= 50 * report.loader.n_rounds
    assert report.stats.nbytes == report.stats.n_samples * report.sample_nbytes
    assert (report.loader_reusing, report.step, report.training, report.bound, report.loader_share) == (None,) * 5
    lines = dict(report.lines())
    assert {"staged", "samples", "first batch", "loader", "copy", "served", "consumer waited"} <= set(lines)
    assert not {"loader, reuse", "pinned copy", "step", "training", "bound"} & set(lines)


def test_without_a_configuration_windows_are_those_of_the_readme():
    report = bench(bar_table(STEPS), seconds=0.1, device="cpu")
    with Stager(bar_table(STEPS), window=64, batch_size=256, device="cpu") as served:
        assert (report.n_samples, report.batch_size) == (served.n_samples, 256)


@pytest.mark.parametrize("batches", ["", 'normalize = "last"', 'shuffle = "time"', 'shuffle = "block"\nlast = "pad"'])
def test_a_configuration_is_served_as_it_says(tmp_path, batches):
    config = tmp_path / "x.toml"
    config.write_text(CONFIG.format(batches=batches))
    packed = pack(bar_table(STEPS), tmp_path / "bars.pack")
    with Stager.from_config(config, source=packed) as served:
        for source in (packed, tmp_path / "bars.pack"):
            report = bench(source, config=config, seconds=0.1)
            assert (report.n_samples, report.n_batches) == (served.n_samples, len(served))
            assert report.sample_nbytes == 16 * 5 * 4 + 8
    # An argument wins.
    assert bench(packed, config=config, seconds=0.1, batch_size=20, window=8).sample_nbytes == 8 * 5 * 4 + 8


def test_a_panel_is_measured_with_its_mask(tmp_path):
    config = tmp_path / "x.toml"
    config.write_text("[panel]\n[batches]\nwindow = 4\nbatch_size = 8\n")
    report = bench(bar_table(STEPS), config=config, seconds=0.1, device="cpu")
    with Stager.from_config(config, source=bar_table(STEPS), device="cpu") as served:
        batch = next(served.batches(0))
        assert report.n_samples == served.n_samples
        assert report.sample_nbytes >= (batch.x.nbytes + batch.mask.nbytes) / len(batch)


# -------------------------------------------------------------------------------- a step


def test_a_slow_step_bounds_the_training():
    sizes = []

    def slow(batch):
        sizes.append(len(batch))
        time.sleep(0.01)

    report = benched(step=slow, seconds=0.6)
    assert report.bound == "step"
    assert report.step.median <= 50 / 0.01
    assert report.training.median <= 50 / 0.01
    assert report.step.median < report.loader.median
    assert set(sizes) <= {50, report.n_samples % 50}
    assert "slow" in report.step_name
    verdict = dict(report.lines())["bound"]
    assert verdict.startswith("by the step: the loader takes ")
    # What is told of the serving is that of the training.
    assert report.stats.n_batches < 100


def test_a_step_that_does_nothing_is_bound_by_the_loader():
    report = benched(step=lambda batch: None)
    assert report.bound == "loader"
    assert report.loader_share > 0.5
    assert report.loader_share == pytest.approx(1 - report.training.median / report.step.median)
    assert dict(report.lines())["bound"].startswith("by the loader: ")


@pytest.mark.parametrize(
    ("loader", "step", "training", "bound", "share", "words"),
    [
        (
            1000.0,
            100.0,
            95.0,
            "step",
            0.05,
            "by the step: the loader takes 5% of the time; the loader alone does 10.5 ",
        ),
        (
            100.0,
            1000.0,
            100.0,
            "loader",
            0.9,
            "by the loader: the loader takes 90% of the time; the step alone does 10.0 ",
        ),
        # Measured a little faster than the step alone.
        (1000.0, 100.0, 101.0, "step", 0.0, "the loader takes 0% of the time"),
        # Both on the same cores.
        (
            150.0,
            100.0,
            40.0,
            "loader",
            0.6,
            "by the loader: the loader takes 60% of the time; the step alone does 2.5 ",
        ),
    ],
)
def test_which_of_the_two_bounds_a_training(loader, step, training, bound, share, words):
    rates = {"loader": loader, "step": step, "training": training}
    made = {name: Rate(value, value, value, 5) for name, value in rates.items()}
    report = replace(benched(seconds=0.05), step_name="step", **made)
    assert (report.bound, report.loader_share) == (bound, pytest.approx(share))
    assert words in dict(report.lines())["bound"]


def test_everything_is_plain_values_too():
    report = benched(step=lambda batch: None)
    told = json.loads(msgspec.json.encode(report.as_dict()))
    assert told["loader"]["median"] == report.loader.median
    assert told["loader_gbps"] == pytest.approx(report.loader.median * 320 / 1e9)
    assert told["stats"]["n_samples"] == report.stats.n_samples
    assert (told["bound"], told["loader_reusing_gbps"]) == ("loader", None)


def test_batches_come_as_arrays_of_the_framework():
    torch = pytest.importorskip("torch")
    kinds = set()
    report = benched(to="torch", step=lambda batch: kinds.add(type(batch.x)))
    assert (kinds, report.to) == ({torch.Tensor}, "torch")


def test_a_step_that_raises_is_named_with_its_line():
    def wrong(batch):
        raise KeyError("volume")

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(StepError, match=rf"wrong raised KeyError: 'volume' \(.*test_bench.py, line {line}\)$"):
        benched(step=wrong)
    with pytest.raises(StepError, match=r"raised TypeError: .*takes 0 positional arguments but 1 was given$"):
        benched(step=lambda: None)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "5"])
def test_seconds_must_be_some(seconds):
    with pytest.raises(ConfigError, match="seconds is"):
        bench("nowhere.pack", seconds=seconds)


def test_sizes_that_are_none_are_refused():
    for name in ("window", "batch_size"):
        with pytest.raises(SampleError, match=f"{name} is 0"):
            benched(**{name: 0})


def test_a_framework_that_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="pip install torch"):
        benched(to="torch")


def test_a_framework_that_is_none_is_refused():
    with pytest.raises(SampleError, match="to is 'keras'"):
        benched(to="keras")


# -------------------------------------------------------------------------------- naming a step


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    Path("told_helper.py").write_text("ANSWER = 42\n")
    Path("told_train.py").write_text(
        "class Trainer:\n"
        "    def step(self, batch):\n"
        "        from told_helper import ANSWER\n"
        "        return ANSWER + batch\n"
        "trainer = Trainer()\n"
        "def step(batch):\n"
        "    return batch\n"
        "number = 5\n"
    )
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("told_", "stager_step_")):
            del sys.modules[name]


@pytest.mark.parametrize("place", ["told_train", "told_train.py", "./told_train.py"])
def test_a_step_is_found_and_what_it_imports_later(folder, place):
    assert load_step(f"{place}:step")(3) == 3
    assert load_step(f"{place}:trainer.step")(3) == 45


def test_a_file_elsewhere_finds_its_neighbours(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_step(f"{folder / 'told_train.py'}:trainer.step")(1) == 43


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("told_train", ["'told_train'", "module:function or file.py:function"]),
        (":step", ["':step'", "module:function"]),
        ("told_train:", ["'told_train:'", "module:function"]),
        ("told_train:stop", ["told_train has no 'stop'", "Trainer, step"]),
        ("told_helper:step", ["told_helper has no 'step'", "no function at all"]),
        ("told_train:number", ["told_train:number is 5", "can't be called"]),
        ("told_nowhere:step", ["importing told_nowhere raised ModuleNotFoundError", "file.py"]),
        ("told_nowhere.py:step", ["there is no file told_nowhere.py"]),
    ],
)
def test_a_step_that_is_not_there_is_told(folder, name, words):
    with pytest.raises(ConfigError) as raised:
        load_step(name)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("place", ["told_broken", "told_broken.py"])
@pytest.mark.parametrize(
    ("text", "told"),
    [("\nimport told_absent\n", "No module named 'told_absent'"), ("\nraise SystemExit(3)\n", "SystemExit: 3")],
)
def test_a_module_that_raises_is_told_with_its_line(folder, place, text, told):
    Path("told_broken.py").write_text(text)
    with pytest.raises(ConfigError, match=f"importing {place} raised") as raised:
        load_step(f"{place}:step")
    assert told in str(raised.value)
    assert "told_broken.py, line 2)" in str(raised.value)


def test_a_file_that_is_no_python_is_told(folder):
    Path("told_broken.py").write_text("def step(batch:\n")
    with pytest.raises(ConfigError, match=r"raised SyntaxError: .*told_broken\.py, line 1"):
        load_step("told_broken.py:step")


def test_the_ceiling_is_a_copy_of_as_many_bytes():
    assert benching._host_copy_gbps(1000, 10, 0.05) > 0
    assert np.isfinite(benching._host_copy_gbps(1 << 20, 1 << 22, 0.05))
