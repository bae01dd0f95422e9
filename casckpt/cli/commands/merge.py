"""``casckpt merge``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, say, size
from casckpt.cli.types import REF, RUN

if TYPE_CHECKING:
    from casckpt.store.exports import MergeOptions


@store_command("merge", loads=True)
@click.argument("refs", nargs=-1, required=True, type=REF, metavar="REF...")
@click.option("--run", required=True, type=RUN, help="The run to save the result under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save the result under.")
@click.option(
    "--weights",
    metavar="W,W,...",
    callback=lambda ctx, param, given: given and given.split(","),
    help="The weight of each checkpoint, such as 0.5,1/3,-1.  [default: the mean]",
)
@click.option("--ema", metavar="DECAY", help="Compute the exponential moving average, with this decay per checkpoint.")
@click.option("--half-life", metavar="STEPS", help="The same, with a decay of 0.5 in this number of steps.")
@click.option(
    "--keys", multiple=True, metavar="PATTERN",
    help="Merge only what matches. May be repeated.  [default: all except optimizers and other training state]",
)  # fmt: skip
@click.option("--keep", multiple=True, metavar="PATTERN", help="Take what matches from the last REF. May be repeated.")
@click.option("--dtype", metavar="DTYPE", help="The dtype of the combined tensors.  [default: that in the last REF]")
@click.option(
    "--accumulate", type=click.Choice(["float32", "float64"]), default="float32", show_default=True,
    help="The dtype to compute in, unless a tensor has a wider one.",
)  # fmt: skip
@click.option("--no-strict", "strict", flag_value=False, default=True, help="Leave out keys that a REF lacks.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint with this run and step.")
def command(session: Session, refs: tuple[str, ...], run: str, step: int, **options: Unpack[MergeOptions]) -> None:
    """Save the mean or a weighted sum of checkpoints.

    Adds weight times value in the order of the checkpoints. Other tensors and values are those of the last REF, as are
    metadata and attachments. RUN@100..500 names several checkpoints, in the order of their steps. A warning lists what
    was left out, and what differs and was taken from the last REF.
    """
    options["keys"] = options["keys"] or None
    with progress_bar("merging") as done:
        options["progress"] = done
        made = session.store.merge(*refs, run=run, step=step, **options)
    session.give(brief(made) | {"stats": summary(made)["stats"], "notes": [*made.notes]}, _text)


def _text(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, {size(stats['bytes_written'])} written")
