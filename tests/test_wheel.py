"""The wheel holds what git tracks, and works in an empty environment. Run by ``make check``."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]

BARS = "symbol,time,open,high,low,close,volume\n" + "".join(
    f"AAA,2024-01-02T09:{minute:02d}:00Z,{10 + minute},{11 + minute},{9 + minute},{10.5 + minute},{100 * minute}\n"
    for minute in range(30)
)


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a clean export of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in tracked:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_git_tracks(wheel: Path) -> None:
    tracked = run("git", "ls-files", "stager", "cli", "configs", cwd=ROOT).splitlines()
    files = {name for name in tracked if not (ROOT / name).is_symlink()}
    expected = {name if name.startswith("stager/") else f"stager/{name}" for name in files}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert held == expected
    assert licences


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    (tmp_path / "bars.csv").write_text(BARS)
    out = run(tmp_path / "empty" / "bin" / "stager", "pack", "bars.csv", cwd=tmp_path)
    assert "kibot" in run(tmp_path / "empty" / "bin" / "stager", "formats", cwd=tmp_path)
    assert "30 of open, high, low, close, volume" in out
    assert "whole" in run(tmp_path / "empty" / "bin" / "stager", "verify", "bars.pack", cwd=tmp_path)
    run(
        python,
        "-W",
        "error",
        "-c",
        "from stager import Stager; st = Stager('bars.pack', window=4, batch_size=8, device='cpu'); "
        "assert sum(len(batch) for batch in st.batches(0)) == 27",
        cwd=tmp_path,
    )
