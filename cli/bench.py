"""``stager bench``."""

from __future__ import annotations

import click
import msgspec

from stager.batches.bench import BATCH_SIZE, WINDOW
from stager.batches.bench import bench as run_bench
from stager.batches.training_step import load_step
from stager.cli.output import Reporter, print_table


@click.command(short_help="Measure the loader, this machine, and a training step.")
@click.argument("pack", type=click.Path())
@click.option("--config", type=click.Path(), help="A TOML file, see configs/default.toml [every window is served].")
@click.option("--window", type=click.IntRange(min=1), help=f"Rows of a window [from the configuration, else {WINDOW}].")
@click.option(
    "--batch-size", type=click.IntRange(min=1), help=f"Samples of a batch [from the configuration, else {BATCH_SIZE}]."
)
@click.option("--device", help="auto, cpu, cuda or cuda:N [from the configuration, else auto].")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True,
    help="For all loops together.",
)  # fmt: skip
@click.option("--to", type=click.Choice(["torch", "jax", "numpy"]), help="What batches are [CuPy; on the CPU, NumPy].")
@click.option("--step", "step_name", metavar="MODULE:FUNCTION", help="A training step, or file.py:function.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def bench(
    pack: str,
    config: str | None,
    window: int | None,
    batch_size: int | None,
    device: str | None,
    seconds: float,
    to: str | None,
    step_name: str | None,
    as_json: bool,
) -> None:
    """Stage PACK, a pack or a bar file, and measure what the loader does beside a copy of as many bytes.

    With --step, a function that is called with each batch, it tells which of the two bounds the training: the step is
    measured alone on one batch, and together with the loader.
    """
    step = None if step_name is None else load_step(step_name)
    with Reporter() as progress:
        report = run_bench(
            pack, config=config, seconds=seconds, to=to, step=step, window=window,  # type: ignore[arg-type]
            batch_size=batch_size, device=device, progress=progress,
        )  # fmt: skip
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=2))
    else:
        print_table(report.lines(), title=f"bench of {pack} on {report.device}")
