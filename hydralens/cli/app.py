"""The verbs. Each parses its arguments, makes one call and prints what came of it; heavy modules are imported when a verb runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hydralens.cli import mask
from hydralens.errors import InputError, check_word

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Finds the attention heads a pretrained model needs, by causal experiment.",
    epilog="Example: hydralens run --out runs/demo",
)
app.add_typer(mask.app, name="mask")

Model = Annotated[str, typer.Argument(help="'embedded' (SmolLM2-135M-Instruct), a hub id, a directory with config.json, or a .gguf file.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.", show_default=False)]
RULE_HELP = (
    "How heads are chosen: global, global-constrained, global-spread, per-layer, kv-group, layers-top, layers-even, fixed, "
    "global-random, random-constrained or layer-random."
)
Ratio = Annotated[str, typer.Option("--ratio", help="Linear heads : full heads.")]
Rule = Annotated[str, typer.Option("--rule", help=RULE_HELP)]
METHOD_HELP = (
    "What scores a head: restriction (what limiting it to sinks and a recent window costs), paper (direct effects and senders, HydraHead Eq. 11-12), "
    "direct (the same without senders) or a detector: "
    "copy_paste, headkv, attention_mass, locos, logit_attribution, ablation_drop, zero_shot_kl, induction, echo or duo_attention."
)
Method = Annotated[str, typer.Option("--method", help=METHOD_HELP)]
RECIPE_HELP = (
    "What the other heads become: hydrahead (Gated DeltaNet), duo (a window) or hypenet (lightning attention) by the mask; qwen3-next, kimi-linear, "
    "minimax-m1, nemotron-3, jet-nemotron, moba, liger or hymba-like by whole layers, where no mask is given."
)
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Counterfactual pairs per probe.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens per retrieval prompt.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of probes and random draws.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: cuda where there is one.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or float64; default: bfloat16 on cuda, else float32.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no summary.")]


@app.command(epilog="Example: hydralens doctor")
def doctor() -> None:
    """Versions, devices, and what each operation will run on and why."""
    from hydralens.doctor import report

    typer.echo(report())


@app.command(epilog="Example: hydralens run embedded --out runs/demo --ratio 7:1")
def run(
    out: Out,
    model: Model = "embedded",
    ratio: Ratio = "7:1",
    rule: Rule = "global",
    method: Method = "restriction",
    pairs: Pairs = 4,
    tokens: Tokens = 256,
    check_prompts: Annotated[int, typer.Option("--check-prompts", min=1, help="Prompts per task in the knock-out curve and the mask preview.")] = 10,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """The main job: score every head, select the mask, check it beside random heads, and write DIR/report.html.

    A killed run goes on where it stopped when it is started again with the same arguments.
    """
    from hydralens.models.loading import load_model
    from hydralens.report.answer import in_short
    from hydralens.run import check_writable
    from hydralens.run import run as main_job
    from hydralens.scoring import METHODS
    from hydralens.selection import RULES, heads_for_ratio

    # What is wrong whatever the model is, is refused before the model is opened.
    heads_for_ratio(ratio, 10**6)
    check_word("rule", rule, RULES)
    check_word("method", method, METHODS)
    check_writable(out)
    opened = load_model(model, device=device, dtype=dtype)
    sizes = {"n_pairs": pairs, "n_tokens": tokens, "n_check": check_prompts}
    result = main_job(opened, out, ratio=ratio, rule=rule, method=method, **sizes, seed=seed, verbose=not quiet)
    if not quiet:
        typer.echo("\n".join(in_short(result)))
        typer.echo(f"{out / 'report.html'}")


@app.command(epilog="Example: hydralens score embedded --out runs/scores --pairs 8 --resume")
def score(
    out: Out,
    model: Model = "embedded",
    method: Method = "restriction",
    pairs: Pairs = 8,
    tokens: Tokens = 256,
    capability: Annotated[str, typer.Option("--capability", help="retrieval, reasoning, or both joined by a comma.")] = "retrieval,reasoning",
    linear: Annotated[
        Path | None, typer.Option("--linear", help="align/linear of a shared alignment: restriction is then to its linear heads.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the finished probes of a run that was stopped.")] = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Measure every head's effect on the probes and write head_scores.csv. On many GPUs: torchrun --nproc-per-node N -m hydralens.score ..."""
    from shutil import rmtree

    from hydralens import probes as p
    from hydralens.models.loading import load_model
    from hydralens.ranks import launched, wait_for_all
    from hydralens.run import check_writable
    from hydralens.scoring import METHODS, score_heads

    makers = {"retrieval": lambda m: p.retrieval(m, pairs, tokens, seed), "reasoning": lambda m: p.reasoning(m, pairs, seed)}
    wanted = capability.split(",")
    for name in wanted:
        check_word("capability", name, tuple(makers))
    check_word("method", method, METHODS)
    check_writable(out)
    with launched(device) as (first, own_device):
        opened = load_model(model, device=own_device, dtype=dtype)
        if first and not resume:
            rmtree(out / "shards", ignore_errors=True)
        wait_for_all()
        probes = [probe for name in wanted for probe in makers[name](opened)]
        aligned = None if linear is None else load_model(linear, device=own_device, dtype=dtype)
        scores = score_heads(opened, probes, method=method, required=wanted[:1], linear=aligned, shards=out / "shards", verbose=not quiet)
    if not first:
        return
    scores.save(out)
    rmtree(out / "shards", ignore_errors=True)
    if not quiet:
        best = ", ".join(f"L{layer}H{head}" for layer, head in scores.top(8))
        typer.echo(f"{scores.n_with_signal} of {scores.composite.numel()} heads carry signal; best: {best}\n{out / 'head_scores.csv'}")


@app.command(epilog="Example: hydralens select runs/demo --ratio 7:1 --rule global-spread --out head_mask.json")
def select(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that holds head scores (of hydralens run or score).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("head_mask.json"),
    ratio: Ratio = "7:1",
    rule: Rule = "global",
    seed: Seed = 0,
) -> None:
    """Choose the heads that keep full attention and write head_mask.json; says what the choice costs."""
    from hydralens.scores import HeadScores
    from hydralens.selection import select_heads, selection_report

    scores = HeadScores.load(folder)
    chosen = select_heads(scores, ratio, rule=rule, seed=seed)
    chosen.save(out)
    for name, value in selection_report(scores, chosen).items():
        typer.echo(f"{name}: {value}")
    typer.echo(out)


@app.command(epilog="Example: hydralens similarity embedded --out runs/similarity")
def similarity(
    out: Out,
    model: Model = "embedded",
    pairs: Pairs = 8,
    tokens: Tokens = 256,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """How alike layers and heads are on the retrieval probes, and whether that comes in blocks: matrices, tests and figures."""
    from hydralens.comparison import compare
    from hydralens.models.loading import load_model
    from hydralens.probes import retrieval
    from hydralens.run import check_writable

    check_writable(out)
    opened = load_model(model, device=device, dtype=dtype)
    found = compare(opened, retrieval(opened, pairs, tokens, seed, corruptions=("value",)), seed=seed, verbose=not quiet)
    written = found.save(out)
    if not quiet:
        typer.echo(found.structure.finding)
        for path in written:
            typer.echo(path)


@app.command(epilog="Example: hydralens build embedded --mask runs/demo/head_mask.json --out runs/hybrid")
def build(
    out: Out,
    model: Model = "embedded",
    mask_file: Annotated[Path | None, typer.Option("--mask", help="The head_mask.json of the model.", show_default=False)] = None,
    recipe: Annotated[str, typer.Option("--recipe", help=RECIPE_HELP)] = "hydrahead",
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Build the head-wise hybrid: full attention for the heads of the mask, Gated DeltaNet for the others, saved as a transformers model."""
    from hydralens.head_mask import HeadMask
    from hydralens.hybrid import build_hybrid
    from hydralens.hybrid.recipes import recipe_named
    from hydralens.models.loading import load_model
    from hydralens.probes import niah
    from hydralens.run import check_writable

    recipe_named(recipe)
    kept = None if mask_file is None else HeadMask.load(mask_file)
    check_writable(out)
    opened = load_model(model, device=device, dtype=dtype)
    hybrid = build_hybrid(opened, kept, recipe=recipe, calibration=niah(opened, n_pairs=4, n_tokens=256).clean)
    hybrid.save_pretrained(out)
    opened.tokenizer.save_pretrained(out)
    if not quiet:
        kinds = [kind for row in hybrid.config.kinds for kind in row]
        held = hybrid.cache_bytes(4096)
        share = held["hybrid"] / held["base"]
        typer.echo(f"{kinds.count('full')} of {len(kinds)} heads keep full attention; a cache of 4096 tokens takes {share:.0%} of the base model's bytes.")
        typer.echo("It has not been trained: every head starts from the base model's weights, and a linear one needs training before it speaks.")
        typer.echo(out)


@app.command(epilog="Example: hydralens transfer examples/embedded-cpu.toml; on 8 GPUs: torchrun --nproc-per-node 8 -m hydralens.transfer CONFIG.toml")
def transfer(
    config: Annotated[Path, typer.Argument(help="The TOML of the transfer; examples/ has three.", show_default=False)],
    quiet: Quiet = False,
) -> None:
    """Train a hybrid in three stages: attention alone, all weights by the base model's logits, long text. Called again, it goes on where it stopped."""
    from hydralens.transfer.config import read_config
    from hydralens.transfer.pipeline import transfer as run_transfer

    folder = run_transfer(read_config(config), verbose=not quiet)
    if not quiet:
        typer.echo(folder)


TASKS_HELP = (
    "Comma-separated: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery; a reasoning task (variable_tracking, ioi, ...); "
    "perplexity; speed."
)


@app.command(epilog="Example: hydralens evaluate runs/transfer/finetune/model --against embedded --tasks niah_single_2,niah_multikey_1 --out runs/evaluation")
def evaluate(
    out: Out,
    model: Annotated[str, typer.Argument(help="A model as `hydralens score` takes it, or the folder of a hybrid.", show_default=False)],
    against: Annotated[str | None, typer.Option("--against", help="The model to compare with, such as the base model.", show_default=False)] = None,
    tasks: Annotated[str, typer.Option("--tasks", help=TASKS_HELP)] = "niah_single_1,niah_single_2,niah_multikey_1",
    lengths: Annotated[str, typer.Option("--lengths", help="Comma-separated: tokens of the prompts.")] = "512,1024",
    depths: Annotated[str, typer.Option("--depths", help="Comma-separated: where the needle lies, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of a task and length, spread over the depths.")] = 50,
    text: Annotated[Path | None, typer.Option("--text", help="File or folder for perplexity; made prose without.", show_default=False)] = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Ask a model, and the one to compare with, the same; called again, it goes on where it stopped."""
    from hydralens.evaluate import evaluate as run_evaluation
    from hydralens.models.loading import load_model
    from hydralens.report.evaluation import side_by_side
    from hydralens.run import check_writable

    tokens, shares = _numbers("--lengths", lengths, int, "512,1024"), _numbers("--depths", depths, float, "0,0.5,1")
    check_writable(out)
    opened = [load_model(source, device=device, dtype=dtype) for source in (against, model) if source is not None]
    models = {own.info.id: own for own in opened}
    asked = {"tasks": [task.strip() for task in tasks.split(",")], "lengths": tokens, "depths": shares, "n_prompts": prompts, "text": text, "seed": seed}
    tables = run_evaluation(models, out, **asked, verbose=not quiet)
    if not quiet:
        for name, values in side_by_side(tables, list(models)):
            typer.echo(f"{name:45s} {'   '.join(values)}")
        typer.echo(out / "evaluation.html")


@app.command(epilog="Example: hydralens bench kernels --out runs/bench")
def bench(
    name: Annotated[str | None, typer.Argument(help="Which; without one they are listed.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for NAME.md and NAME.json.", show_default=False)] = None,
    small: Annotated[bool, typer.Option("--small", help="Small shapes, on a CPU too: to see that it runs.")] = False,
) -> None:
    """Measure this machine's GPU: ours, a peer's and the limit from one run, values compared before times."""
    from hydralens.bench import BENCHMARKS
    from hydralens.bench import run as run_benchmark

    if name is None:
        typer.echo("\n".join(f"{known:9s} {what}" for known, what in BENCHMARKS.items()))
    else:
        run_benchmark(name, out, small=small)


def _numbers(option: str, given: str, kind: Callable[[str], float], example: str) -> list[float]:
    try:
        return [kind(number) for number in given.split(",")]
    except ValueError:
        raise InputError(f"{option} {given!r} are not numbers with commas between them, such as {example}") from None
