"""The commands as a user runs them: exit codes, one clear line, JSON and nothing else."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from bars_fixtures import bar_table, csv_text
from click.testing import CliRunner, Result
from killed_packs import leave_unfinished

from stager.cli import main
from stager.packs.layout import open_pack
from stager.packs.packing import pack

COMMANDS = [
    "arena-report",
    "bench",
    "check",
    "compact",
    "formats",
    "info",
    "leaktest",
    "pack",
    "plan",
    "release",
    "serve",
    "smoke",
    "stage",
    "top",
    "verify",
]
STAGER = [sys.executable, "-m", "stager.cli"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with bars.csv in it."""
    monkeypatch.chdir(tmp_path)
    text = csv_text(bar_table({"AAPL": range(50), "MSFT": [*range(20), *range(30, 50)]}))
    (tmp_path / "bars.csv").write_text(text)
    return tmp_path


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(result: Result, *words: str) -> None:
    """Exit 1, nothing on standard output, and one line with these words."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    for word in words:
        assert word in result.stderr


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def table(result: Result) -> dict[str, str]:
    """The names and values of a printed table; of a repeated name the last."""
    assert result.exit_code == 0, result.output
    title, *lines = result.stdout.splitlines()
    return {"title": title, **{name: value for name, _, value in (line.partition("  ") for line in lines)}}


class TestHelp:
    @pytest.mark.parametrize("flag", ["--help", "-h"])
    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_every_command(self, command: str, flag: str) -> None:
        result = run(command, flag)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"Usage: main {command} [OPTIONS]")
        assert command in ("arena-report", "serve") or "--json" in result.stdout

    def test_every_command_and_option_is_explained(self) -> None:
        context = click.Context(main)
        assert main.list_commands(context) == COMMANDS
        for command in (main.get_command(context, name) for name in COMMANDS):
            assert command.help
            for parameter in command.params:
                if isinstance(parameter, click.Option):
                    assert parameter.help, f"{command.name} {parameter.name}"

    def test_the_list_of_commands_is_not_cut(self) -> None:
        result = run("--help")
        assert result.exit_code == 0
        assert "..." not in result.stdout.split("Commands:")[1]

    def test_version(self) -> None:
        assert run("--version").stdout.startswith("main, version 0.") or "version" in run("--version").stdout

    def test_nothing_given_prints_help(self) -> None:
        assert run().exit_code == 2
        assert "Commands:" in run().output


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["pack"],
            ["pack", "bars.csv", "--label", "middle"],
            ["pack", "bars.csv", "--column", "foo=bar"],
            ["pack", "bars.csv", "--column", "close"],
            ["pack", "bars.csv", "--column", "close="],
            ["pack", "bars.csv", "--column", "close=a", "--column", "close=b"],
            ["pack", "bars.csv", "--allow-years", "1990"],
            ["pack", "bars.csv", "--allow-years", "early", "late"],
            ["pack", "bars.csv", "--adjustment", "some"],
            ["pack", "bars.csv", "--nan", "zero"],
            ["pack", "bars.csv", "--frobnicate"],
            ["pack", "bars.csv", "--workers", "0"],
            ["pack", "bars.csv", "--resume", "--discard"],
            ["pack", "--discard"],
            ["pack", "--resume"],
            ["pack", "bars.csv", "--append", "bars.pack", "--memory", "1GiB"],
            ["info"],
            ["info", "a", "b"],
            ["verify"],
            ["smoke", "--rows", "many"],
            ["smoke", "--rows", "0"],
            ["smoke", "there"],
            ["frobnicate"],
        ],
        ids=" ".join,
    )
    def test_wrong_usage_ends_with_2(self, folder: Path, arguments: list[str]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Error: " in result.stderr
        assert os.listdir(folder) == ["bars.csv"]


class TestPack:
    def test_prints_what_was_packed(self, folder: Path) -> None:
        shown = table(run("pack", "bars.csv"))
        assert shown["title"] == "bars.pack"
        assert shown["symbols"].strip() == "2"
        assert shown["rows"].strip() == "90 of open, high, low, close, volume"
        assert shown["span"].strip() == "2024-01-01 00:00:00Z to 2024-01-01 00:49:00Z (UTC, bar opens)"
        assert shown["interval"].strip() == "1min"
        assert shown["gaps"].strip() == "1, 10 bars missing, at most 10 at a place"
        assert shown["input"].strip().startswith("bars.csv: 90 rows, ")
        assert shown["fingerprint"].strip() == open_pack("bars.pack").fingerprint

    def test_prints_json_and_nothing_else(self, folder: Path) -> None:
        found = as_json(run("pack", "bars.csv", "--json"))
        assert (found["path"], found["n_gaps"], found["n_missing"]) == ("bars.pack", 1, 10)
        assert found["manifest"]["n_rows"] == 90
        assert found["manifest"]["decisions"]
        usage = found.pop("usage")
        assert found == as_json(run("info", "bars.pack", "--json"))
        assert 0 < usage["anonymous_nbytes"] < usage["memory_nbytes"]
        assert (usage["scratch_nbytes"], usage["n_kept"], usage["read_again"]) == (0, 0, [])
        assert usage["n_workers"] >= 1

    def test_memory_and_workers(self, folder: Path) -> None:
        shown = table(run("pack", "bars.csv", "--memory", "1GiB", "--workers", "1"))
        took = r"[\d.]+ MiB of memory at most, of 1\.00 GiB, no scratch(; its container .*)?"
        assert re.fullmatch(took, shown["took"].strip())
        refused(run("pack", "bars.csv", "--force", "--memory", "10MiB"), "memory is 10.00 MiB", "give at least")
        refused(run("pack", "bars.csv", "--force", "--memory", "900TiB"), "900.00 TiB", "available")
        refused(run("pack", "bars.csv", "--force", "--memory", "much"), "'much'", "512MiB")
        assert sorted(os.listdir(folder)) == ["bars.csv", "bars.pack"]

    def test_resume_and_discard(self, folder: Path) -> None:
        refused(run("pack", "bars.csv", "--resume"), "bars.pack.partial: there is no unfinished pack")
        refused(run("pack", "bars.csv", "--discard"), "bars.pack.partial: there is no unfinished pack")
        leave_unfinished("bars.csv")
        refused(run("pack", "bars.csv"), "bars.pack.partial", "1 input;", "--resume", "--discard")
        refused(run("pack", "bars.csv", "--resume", "--interval", "1min"), "with other options")
        assert run("pack", "--discard", "-o", "bars.pack").stdout == "removed bars.pack.partial\n"
        assert os.listdir(folder) == ["bars.csv"]
        leave_unfinished("bars.csv")
        assert as_json(run("pack", "bars.csv", "--discard", "--json")) == {"removed": "bars.pack.partial"}
        leave_unfinished("bars.csv")
        assert table(run("pack", "bars.csv", "--resume"))["resumed"].strip() == "1 file had been read before"
        assert sorted(os.listdir(folder)) == ["bars.csv", "bars.pack"]

    def test_out_and_force(self, folder: Path) -> None:
        assert run("pack", "bars.csv", "-o", "here/x.pack").exit_code == 0
        before = open_pack("here/x.pack").manifest
        refused(run("pack", "bars.csv", "--out", "here/x.pack"), "here/x.pack", "exists", "--force", "-o DIR")
        assert open_pack("here/x.pack").manifest == before
        assert run("pack", "bars.csv", "--force", "-o", "here/x.pack").exit_code == 0
        (folder / "dir").mkdir()
        refused(run("pack", "bars.csv", "--force", "-o", "dir"), "dir: exists and is no pack")
        assert os.listdir("here") == ["x.pack"]

    def test_several_files_a_glob_and_a_directory(self, folder: Path) -> None:
        (folder / "d").mkdir()
        whole = bar_table({"A": range(9), "B": range(9)})
        (folder / "d" / "1.csv").write_text(csv_text(whole.slice(0, 7)))
        (folder / "d" / "2.csv").write_text(csv_text(whole.slice(7)))
        prints = {
            as_json(run("pack", *source, "-o", f"{n}.pack", "--json"))["manifest"]["fingerprint"]
            for n, source in enumerate([["d/1.csv", "d/2.csv"], ["d/*.csv"], ["d"]])
        }
        assert len(prints) == 1
        refused(run("pack", "d/1.csv", "d/2.csv"), "-o DIR")
        assert run("pack", "d").exit_code == 0
        assert open_pack("d.pack").fingerprint in prints

    def test_columns_symbol_zone_label_and_interval(self, folder: Path) -> None:
        rows = [f"{minute:02},{minute}.5,{minute}.9,{minute}.1,{minute}.7" for minute in range(1, 4)]
        lines = ["2024-01-02 09:" + row for row in rows]
        (folder / "odd.csv").write_text("\n".join(["when,o1,h1,l1,c1", *lines]) + "\n")
        columns = [f"--column={role}={name}" for role, name in
                   [("time", "when"), ("open", "o1"), ("high", "h1"), ("low", "l1"), ("close", "c1")]]  # fmt: skip
        refused(run("pack", "odd.csv", "--symbol", "ES", "--zone", "UTC"), "odd.csv")
        refused(run("pack", "odd.csv", *columns, "--symbol", "ES"), "odd.csv", "zone")
        options = ["--symbol", "ES", "--zone", "America/New_York", "--label", "close", "--interval", "1min"]
        found = as_json(run("pack", "odd.csv", *columns, *options, "--adjustment", "split", "--json"))
        assert found["manifest"]["span"] == ["2024-01-02T14:00:00.000000000Z", "2024-01-02T14:02:00.000000000Z"]
        assert found["manifest"]["adjustment"] == "split"
        packed = open_pack("odd.pack")
        assert packed.symbols == ("ES",)
        assert packed.column("close").tolist() == [1.7, 2.7, 3.7]

    def test_years(self, folder: Path) -> None:
        old = bar_table({"A": range(3)}, start=-(10**18))  # 1938
        (folder / "old.csv").write_text(csv_text(old))
        refused(run("pack", "old.csv"), "old.csv", "1938", "--allow-years FIRST LAST")
        assert run("pack", "old.csv", "--allow-years", "1900", "2000").exit_code == 0
        refused(run("pack", "old.csv", "--allow-years", "2000", "1900"), "2000 to 1900")

    def test_duplicates(self, folder: Path) -> None:
        for name, close in (("1.csv", 2.0), ("2.csv", 3.0)):
            (folder / name).write_text(csv_text(bar_table({"A": range(3)}, close=[close] * 3, high=[9.0] * 3)))
        refused(run("pack", "1.csv", "2.csv", "-o", "x.pack"), "'A'", "3 pairs", "--duplicates first")
        shown = table(run("pack", "1.csv", "2.csv", "-o", "x.pack", "--duplicates", "last"))
        assert shown["dropped"].strip() == "3 rows: conflicting duplicate"
        assert open_pack("x.pack").column("close").tolist() == [3.0] * 3

    def test_delimiter_and_nan(self, folder: Path) -> None:
        (folder / "x.csv").write_text(
            "time|open|high|low|close\n2024-01-01T00:00Z|1|2|1|2\n2024-01-01T00:01Z|1|nan|1|2\n2024-01-01T00:02Z|1|2|1|2\n"
        )
        refused(run("pack", "x.csv", "--symbol", "A", "--delimiter", "|"), "x.csv:3", "'high'", "--nan null")
        found = run("pack", "x.csv", "--symbol", "A", "--delimiter", "|", "--nan", "null", "--interval", "1min")
        assert table(found)["dropped"].strip() == "1 rows: null price"

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("empty.csv", b"", ["empty.csv"]),
            ("header.csv", b"time,symbol,open,high,low,close\n", ["no bar", "nothing was packed"]),
            ("page.csv", b"<!DOCTYPE html>\n<html><body>404</body></html>\n", ["page.csv"]),
            ("error.csv", b'{"error": "rate limit"}\n', ["error.csv"]),
            ("cut.csv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x4b", ["cut.csv.gz"]),
            ("noise.parquet", bytes(range(256)), ["noise.parquet"]),
            ("text.csv", b"time,symbol,open,high,low,close\n2024-01-01T00:00Z,A,1,2,x,1\n", ["text.csv:2", "'low'"]),
            ("less.csv", b"time,symbol,open,high,low\n2024-01-01T00:00Z,A,1,2,1\n", ["less.csv", "close"]),
        ],
    )
    def test_bad_files_are_one_line(self, folder: Path, name: str, content: bytes, words: list[str]) -> None:
        (folder / name).write_bytes(content)
        refused(run("pack", name), *words)
        assert sorted(os.listdir(folder)) == sorted(["bars.csv", name])

    def test_what_is_wrong_is_one_line(self, folder: Path) -> None:
        refused(run("pack", "nothing.csv"), "nothing.csv")
        refused(run("pack", "*.parquet", "-o", "x"), "*.parquet")
        refused(run("pack", "bars.csv", "--zone", "Mars"), "'Mars'")
        refused(run("pack", "bars.csv", "--interval", "soon"), "'soon'", "1min")
        refused(run("pack", "bars.csv", "--column", "close=last"), "'last'", "'close'")
        refused(run("pack", "bars.csv", "--symbol", "X"), "'X'", "--symbol")
        refused(run("pack", "bars.csv", "--delimiter", "ab"), "'ab'")
        refused(run("pack", "bars.csv", "-o", "bars.csv/x"), "bars.csv/x")
        assert os.listdir(folder) == ["bars.csv"]

    def test_names_can_not_command_the_terminal(self, folder: Path) -> None:
        name = "a\x1b[31m\nb.csv"
        refused(run("pack", f"no{name}", "-o", "x"), r"noa\x1b[31m\nb.csv")
        shutil.copy("bars.csv", name)
        result = run("pack", name)
        assert result.exit_code == 0
        assert "\x1b" not in result.output
        assert r"a\x1b[31m\nb.csv: 90 rows" in result.stdout
        assert (folder / "a\x1b[31m\nb.pack").is_dir()

    def test_packs_may_have_any_name(self, folder: Path) -> None:
        name = os.fsdecode(b"caf\xe9.pack")
        assert run("pack", "bars.csv", "-o", name).exit_code == 0
        assert as_json(run("info", name, "--json"))["manifest"]["n_rows"] == 90
        assert run("verify", name).exit_code == 0

    def test_a_file_whose_name_looks_like_a_glob(self, folder: Path) -> None:
        shutil.copy("bars.csv", "bars[1].csv")
        assert run("pack", "bars[1].csv").exit_code == 0
        assert (folder / "bars[1].pack").is_dir()


class TestInfo:
    def test_of_what_is_no_pack(self, folder: Path) -> None:
        refused(run("info", "nothing"), "nothing: there is no such pack", "`stager pack`")
        refused(run("info", "bars.csv"), "bars.csv: no pack")
        refused(run("info", folder), "no pack", "manifest.json")

    def test_of_daily_bars(self, folder: Path) -> None:
        lines = [f"2024-01-{day:02},{day},{day},{day},{day},100" for day in (2, 3, 4, 5, 8, 9)]
        (folder / "daily.csv").write_text("\n".join(["Date,Open,High,Low,Close,Volume", *lines]) + "\n")
        shown = table(run("pack", "daily.csv", "--symbol", "A"))
        assert shown["span"].strip() == "2024-01-02 to 2024-01-09 (session dates)"
        assert shown["interval"].strip() == "1d"
        assert shown["gaps"].strip() == "none"

    def test_of_missing_values_and_many_inputs(self, folder: Path) -> None:
        for number in range(7):
            vwap = [1.0, None, 2.0]
            (folder / f"{number}.csv").write_text(csv_text(bar_table({f"S{number}": range(3)}, vwap=vwap)))
        result = run("pack", *(f"{n}.csv" for n in range(7)), "-o", "x")
        assert table(result)["missing"].strip() == "7 values of vwap"
        assert "and 2 more files" in result.stdout


class TestVerify:
    def test_of_a_whole_pack(self, folder: Path) -> None:
        run("pack", "bars.csv")
        result = run("verify", "bars.pack")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "bars.pack: whole\n", "")
        assert as_json(run("verify", "bars.pack", "--json")) == {"pack": "bars.pack", "ok": True, "findings": []}

    def test_of_a_damaged_pack(self, folder: Path) -> None:
        run("pack", "bars.csv")
        for name in ("rows.npy", "bars.arrow"):
            file = folder / "bars.pack" / "segment-0" / name
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
        result = run("verify", "bars.pack")
        assert result.exit_code == 1
        assert result.stdout == ""
        first, second = result.stderr.splitlines()
        assert first.startswith("Error: bars.pack/segment-0/bars.arrow: ")
        assert second.startswith("Error: bars.pack/segment-0/rows.npy: ")
        result = run("verify", "bars.pack", "--json")
        assert result.exit_code == 1
        assert result.stderr == ""
        found = json.loads(result.stdout)
        assert found["ok"] is False
        assert len(found["findings"]) == 2

    def test_of_what_is_no_pack(self, folder: Path) -> None:
        refused(run("verify", "nothing"), "nothing: there is no such pack")
        refused(run("verify", "bars.csv"), "bars.csv: no pack")


class TestSmoke:
    def test_on_the_cpu(self) -> None:
        result = run("smoke", "--device", "cpu", "--rows", "20000")
        assert table(result)["title"] == "smoke on cpu: all right"
        assert "106,652" in result.stdout
        assert "each once" in result.stdout

    def test_as_json(self) -> None:
        found = as_json(run("smoke", "--device", "cpu", "--rows", "3000", "--json"))
        assert (found["device"], found["n_arrays"]) == ("cpu", 106_652)
        assert found["n_rows"] >= 2000

    def test_an_unknown_device(self) -> None:
        refused(run("smoke", "--device", "tpu"), "'tpu'", "cpu")


def process(*arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STAGER, *arguments], text=True, capture_output=True, timeout=100, check=False, **keywords)


class TestProcess:
    """In a process of its own: pipes, terminals, signals' absence and all."""

    def test_the_module_runs(self, folder: Path) -> None:
        done = process("pack", "bars.csv")
        assert done.returncode == 0
        assert done.stderr == ""
        assert all(text.isprintable() for text in done.stdout.splitlines())
        # The longest line is longer than any terminal and whole.
        assert "volume='volume' (the names in the file)\n" in done.stdout
        again = process("pack", "bars.csv")
        assert again.returncode == 1
        assert again.stdout == ""
        assert again.stderr.startswith("Error: bars.pack: the pack exists")
        assert again.stderr.count("\n") == 1
        usage = process("pack")
        assert usage.returncode == 2
        assert "Usage: stager pack" in usage.stderr

    def test_no_gpu_is_one_line(self) -> None:
        # An empty list of devices hides the GPU of a machine that has one.
        done = process("smoke", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1

    def test_json_in_a_pipe(self, folder: Path) -> None:
        done = process("pack", "bars.csv", "--json")
        assert done.stderr == ""
        assert json.loads(done.stdout)["manifest"]["n_symbols"] == 2

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    @pytest.mark.parametrize("flags", [[], ["--json"]])
    def test_a_full_disk_is_one_line(self, folder: Path, flags: list[str]) -> None:
        pack(folder / "bars.csv")
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*STAGER, "info", "bars.pack", *flags], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1
        assert done.stderr == "Error: output: No space left on device\n"

    def test_a_reader_that_leaves_early_hears_nothing(self, folder: Path) -> None:
        pack(folder / "bars.csv")
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as gone:
            done = subprocess.run([*STAGER, "info", "bars.pack"], stdout=gone, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1
        assert done.stderr == b""

    @pytest.mark.parametrize("columns", ["40", "120"])
    def test_on_a_terminal(self, folder: Path, columns: str) -> None:
        master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": columns, "LINES": "40"}
        child = subprocess.Popen([*STAGER, "pack", "bars.csv"], stdin=slave, stdout=slave, stderr=slave, env=environ)
        os.close(slave)
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # how Linux tells the end of a terminal
                break
            if not part:
                break
            parts.append(part)
        os.close(master)
        assert child.wait() == 0
        text = b"".join(parts).decode()
        assert "\x1b[?25l" in text
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
        assert "checksum" in text
        shown = text[text.rindex("\x1b[?25h") :]
        assert "fingerprint" in shown
        lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip("\r") for line in shown.split("\n")]
        assert max(map(len, lines)) <= int(columns)


def test_progress_in_a_pipe_is_a_plain_line_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stager.cli import output

    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Reporter() as report:
        for second in range(10):
            now = 100.0 + second
            report("parse", second << 20, 10 << 20)
        now += 5
        report("sort", 5, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "parse: 3.00 MiB of 10.00 MiB (30%)",
        "parse: 6.00 MiB of 10.00 MiB (60%)",
        "parse: 9.00 MiB of 10.00 MiB (90%)",
        "sort: 5 B",
    ]


class TestAppending:
    @pytest.fixture
    def packed(self, folder: Path) -> Path:
        assert run("pack", "bars.csv").exit_code == 0
        (folder / "new.csv").write_text(csv_text(bar_table({"AAPL": range(50, 60), "NVDA": range(3)})))
        return folder

    def test_bars_are_added(self, packed: Path) -> None:
        told = table(run("pack", "--append", "bars.pack", "new.csv"))
        assert (told["rows"].split()[0], told["symbols"].strip(), told["segments"].strip()) == ("103", "3", "2")
        assert "the pack did not have: NVDA" in told["warning"]
        assert run("verify", "bars.pack").exit_code == 0
        assert sorted(os.listdir(packed)) == ["bars.csv", "bars.pack", "new.csv"]

    def test_bars_that_differ_are_refused(self, packed: Path) -> None:
        text = (packed / "bars.csv").read_text().replace("1000049.5", "1000050.5")
        (packed / "new.csv").write_text(text)
        refused(run("pack", "--append", "bars.pack", "new.csv"), "AAPL", "high 1000049.5 in the pack, 1000050.5")
        assert open_pack(packed / "bars.pack").n_rows == 90

    @pytest.mark.parametrize("options", [("-o", "y.pack"), ("--force",)])
    def test_it_goes_to_the_pack_it_names(self, packed: Path, options: tuple[str, ...]) -> None:
        result = run("pack", "--append", "bars.pack", *options, "new.csv")
        assert result.exit_code == 2
        assert "--append adds to the pack it names; leave out --out and --force" in result.stderr

    def test_compacting_merges_and_is_suggested_for_many(self, packed: Path) -> None:
        for number in range(16):
            (packed / "new.csv").write_text(csv_text(bar_table({f"S{number:02}": range(3)})))
            assert "compact" not in table(run("info", "bars.pack")).get("segments", "")
            assert run("pack", "--append", "bars.pack", "new.csv").exit_code == 0
        assert table(run("info", "bars.pack"))["segments"].strip() == "17; merge them with `stager compact`"
        told = as_json(run("compact", "bars.pack", "--json"))
        assert len(told["manifest"]["segments"]) == 1
        assert told["manifest"]["n_rows"] == 90 + 48
        assert run("verify", "bars.pack").exit_code == 0

    def test_compacting_what_is_no_pack(self, folder: Path) -> None:
        refused(run("compact", "bars.csv"), "bars.csv: no pack")
