"""``casckpt import``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from casckpt.cli.completion import RUN
from casckpt.cli.describe import brief, summary
from casckpt.cli.progress import progress_bar
from casckpt.cli.session import Session, store_command
from casckpt.cli.text import name, printable, say, shortened, size

if TYPE_CHECKING:
    from casckpt.store.types import ImportArguments


@store_command("import")
@click.argument("path", metavar="FILE_OR_FOLDER")
@click.option("--run", default="default", show_default=True, type=RUN, help="The run to save it under.")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to save it under.")
@click.option("--overwrite", is_flag=True, help="Replace what is there under this run and step.")
@click.option("--compress", type=click.Choice(["off", "always"]), help="Store floats in fewer bytes, or as they are.")
@click.option("--as-is", is_flag=True, help="Keep what a file of torch.save holds as it is nested there.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle what is in it. This runs code from it.")
def command(
    session: Session, path: str, step: int, as_is: bool, allow_pickle: bool, **options: Unpack[ImportArguments]
) -> None:
    """Save what other programs wrote as a checkpoint.

    It looks at the contents to see what it is: a safetensors file or a Hugging Face folder, a file of torch.save, a
    folder of torch.distributed.checkpoint (also Megatron's torch_dist), or a folder of OLMo-core; or a URL of one.
    Small files beside the weights become attachments. The store is made if it does not exist.

    If a file of torch.save holds a model and its optimizer, the optimizer is stored by the names of parameters, so that
    a training can resume from it, and the rest as train state, unless you pass --as-is.
    """
    from casckpt.frontends.convert import import_any, looked_at

    with looked_at(path) as found, progress_bar("importing") as done:
        options["progress"] = done
        made = import_any(session.store, found, step=step, as_is=as_is, allow_pickle=allow_pickle, **options)
    sources = found.sources
    result = brief(made) | {"stats": summary(made)["stats"], "files": [str(file) for file in sources.weights]}
    result |= {"kind": found.kind, "attachments": list(session.store.attachments(made)), "skipped": [*sources.skipped]}
    result |= {"notes": [*made.notes]}
    session.give(result, _text)


def _text(result: dict[str, Any]) -> None:
    stats = result["stats"]
    say(f"saved {name(result)}: {size(stats['bytes_total'])}, {size(stats['bytes_written'])} written")
    if result["attachments"]:
        say(f"with {printable(', '.join(shortened(result['attachments'], 8)))}")
