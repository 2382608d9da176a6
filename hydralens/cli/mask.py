"""``hydralens mask``: look at a head mask, check it, and exchange it with other projects."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from hydralens.errors import InputError

if TYPE_CHECKING:  # these import torch, which --help can do without
    from hydralens.head_mask import HeadMask
    from hydralens.models.info import ModelInfo

app = typer.Typer(
    no_args_is_help=True,
    help="Look at a head mask, check it, and exchange it with other projects.",
    epilog="Example: hydralens mask show runs/demo/head_mask.json",
)

File = Annotated[Path, typer.Argument(help="A head_mask.json.", show_default=False)]
Model = Annotated[str | None, typer.Option("--model", help="A model as `hydralens score` takes it.", show_default=False)]
FORMATS_HELP = "hydralens, duo, retrieval_head, qrhead, head_mask, prune_heads"


@app.command(epilog="Example: hydralens mask show runs/demo/head_mask.json")
def show(file: File) -> None:
    """Print the map: layers down, heads across, one block per KV head; ■ full attention, · linear."""
    from hydralens.head_mask import HeadMask

    Console().print(render(HeadMask.load(file)), soft_wrap=True, highlight=False)


@app.command(epilog="Example: hydralens mask validate head_mask.json --model embedded")
def validate(file: File, model: Model = None) -> None:
    """Check a file, and with --model also that it was made for that model. Exit code 2 names the field that is wrong."""
    from hydralens.head_mask import HeadMask

    typer.echo(f"{file}: valid, {HeadMask.load(file, _info(model))}")


@app.command(epilog="Example: hydralens mask convert full_attention_heads.tsv head_mask.json --to hydralens --model embedded")
def convert(
    source: Annotated[Path, typer.Argument(help="The file to read.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help=f"Format of the target: {FORMATS_HELP}.")] = "hydralens",
    from_: Annotated[str | None, typer.Option("--from", help=f"Format of the source: {FORMATS_HELP}; guessed when left out.", show_default=False)] = None,
    model: Model = None,
    like: Annotated[Path | None, typer.Option("--like", help="A head_mask.json of the same model, instead of --model.", show_default=False)] = None,
    threshold: Annotated[float | None, typer.Option(help="Scores at or above it are full (duo: 0.5; retrieval_head).", show_default=False)] = None,
    k: Annotated[int | None, typer.Option("--k", help="How many heads are full, instead of --threshold.", show_default=False)] = None,
    space: Annotated[str | None, typer.Option(help="Change the mask to query or kv heads before writing.", show_default=False)] = None,
    group_reduce: Annotated[
        str, typer.Option(help="With --space kv: a group is full if any of its heads is (any), if half are (mean), by best score (max).")
    ] = "any",
) -> None:
    """Convert between head_mask.json and other projects' head lists."""
    from hydralens.head_mask import HeadMask
    from hydralens.mask_formats import export_mask, import_mask

    if model is not None and like is not None:
        raise InputError("--model and --like both say whose heads these are; give one of them")
    mask = import_mask(source, HeadMask.load(like).model if like is not None else _info(model), from_, threshold=threshold, k=k)
    match space:
        case None:
            pass
        case "query":
            mask = mask.to_query()
        case "kv":
            mask = mask.to_kv(group_reduce)
        case _:
            raise InputError(f"--space {space!r} is unknown; use query or kv")
    typer.echo(f"{export_mask(mask, target, to)}: {mask}")


def render(mask: "HeadMask") -> Text:
    """The map as coloured text: last digits of the head numbers, one line a layer, what it costs."""
    group = mask.model.group if mask.space == "query" else 1
    width = len(str(mask.model.n_layers - 1))
    digits = "".join(("" if head % group else " ") + str(head % 10) for head in range(len(mask.mask[0])))
    text = Text(f"{mask}\n{' ' * (width + 1)} {digits}\n")
    for layer, (row, kept) in enumerate(zip(mask.array.tolist(), mask.kept_kv_heads.sum(-1).tolist(), strict=True)):
        text.append(f"L{layer:>{width}} ")
        for head, full in enumerate(row):
            text.append(("" if head % group else " ") + ("■" if full else "·"), style="bold cyan" if full else "dim")
        text.append(f"  {sum(row):>2} full, {kept} of {mask.model.n_kv_heads} KV\n")
    text.append(f"{mask.n_full / mask.array.numel():.1%} of the {mask.space} heads and {mask.kv_share:.1%} of the KV cache survive ")
    text.append(f"({mask.kv_bytes(1024) / 2**20:.1f} MiB per 1,024 tokens at 16 bits). ■ full attention, · linear")
    return text


def _info(model: str | None) -> "ModelInfo | None":
    if model is None:
        return None
    from hydralens.models.loading import load_model

    return load_model(model).info
