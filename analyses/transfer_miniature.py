"""Do heads chosen by causal effect make a better hybrid than layers, random heads or fixed heads, at the same training? The paper's claim in miniature.

    python analyses/transfer_miniature.py [MODEL] --out analyses/results/embedded --scores FOLDER --text FOLDER [--arms NAME ...] [--seeds 3]

Every arm is the same model, text, order of rows, optimiser and number of tokens; only the mask, or one choice of the hybrid, differs. Heads are aligned
once for all masks of the same choices (shared stage 1), then every arm is distilled and fine-tuned. The seed moves the order of rows and random masks;
stage 1 is trained once. Questions are in wordings that were never trained, each a haystack of its own, the same for all arms. FOLDER of ``--scores`` holds
scores by method, as ``detector_agreement.py`` leaves them; missing ones are measured. Work goes to OUT/transfer/ (not to be checked in) and is taken up
again arm by arm, so that several processes may be given different ``--arms``. Written to OUT from the arms that are done:

    transfer_miniature.csv     arm, seed, task, length, n, accuracy; and the base model's
    transfer_losses.csv        arm, seed, KL and cross-entropy on held-out text, seconds
    transfer_miniature.md      all seeds of an arm together, with intervals and paired tests against the default
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest
from shared import arguments, run_script, table, write_results

import hydralens as hl
from hydralens.evaluation import answered
from hydralens.evaluation.asking import share
from hydralens.files import read_json, write_json
from hydralens.head_mask import HeadMask
from hydralens.models.lens import LensModel
from hydralens.probes import niah, reasoning, retrieval
from hydralens.scores import HeadScores
from hydralens.scoring import score_heads
from hydralens.selection import select_heads
from hydralens.transfer.config import TransferConfig
from hydralens.transfer.errors import conversion_gap
from hydralens.transfer.pipeline import transfer

DEFAULT, BASE, ASKED = "restriction", "base model", 999_000  # the last is added to the seed: no question was used for scoring
TASKS = ("niah_single_2", "niah_multikey_1")  # one needle, and one of four
METHODS = ("restriction", "paper", "attention_mass")


@dataclass(frozen=True)
class Arm:
    """One way to build the hybrid.

    Attributes:
        heads: whose scores: one of ``METHODS``, ``"gap"`` (the error as a linear head minus that as a full one) or ``"restriction x gap"``; None: no full head.
        rule, ratio: of ``select_heads``.
        choices: fields of ``HydraHeadConfig`` that differ.
        claim: whether it is run with every seed; others are run once.
    """

    heads: str | None = DEFAULT
    rule: str = "global"
    ratio: str = "7:1"
    choices: dict[str, Any] = field(default_factory=dict)
    claim: bool = False


ARMS = {
    DEFAULT: Arm(claim=True),
    "paper": Arm("paper", claim=True),
    "attention mass": Arm("attention_mass", claim=True),
    "conversion gap": Arm("gap"),
    "restriction x gap": Arm("restriction x gap"),
    "restriction, one a layer": Arm(rule="global-constrained", claim=True),
    "restriction, spread": Arm(rule="global-spread"),
    "random": Arm(rule="global-random", claim=True),
    "random, one a layer": Arm(rule="random-constrained", claim=True),
    "fixed": Arm(rule="fixed", claim=True),
    "layers": Arm(rule="layers-even", claim=True),
    "best layers": Arm(rule="layers-top"),
    "layers, 3:1": Arm(rule="layers-even", ratio="3:1", claim=True),
    "restriction, 3:1": Arm(ratio="3:1", claim=True),
    "KV groups": Arm(rule="kv-group"),
    "all linear": Arm(None, claim=True),
    "no norm": Arm(choices={"fusion_norm": False}),
    "RoPE on full heads": Arm(choices={"full_rope": True}),
    "no RoPE on linear heads": Arm(choices={"linear_rope": False}),
    "no gate": Arm(choices={"full_gate": None}),
}


def all_scores(model: LensModel, folder: Path, args) -> dict[str, HeadScores]:
    """The scores of ``METHODS``."""
    found = {}
    for method in METHODS:
        if not (folder / method / "scores.json").exists():
            probes = retrieval(model, args.pairs, args.tokens, args.seed) + reasoning(model, args.pairs, args.seed)
            score_heads(model, probes, method=method, required=("retrieval",), shards=folder / "shards", verbose=True).save(folder / method)
        found[method] = HeadScores.load(folder / method)
    return found


def config_of(args, out: Path, seed: int, **parts: Any) -> TransferConfig:
    data = {"text": args.text, "synthetic": args.synthetic, "held_out": args.held_out}
    return TransferConfig.model_validate({"out": out, "data": data, "seed": seed, "device": args.device, "dtype": args.dtype} | parts)


def bank_of(args, model_id: str, choices: dict[str, Any], mask: Path) -> Path:
    """The folder ``align`` of the shared stage 1 for these choices, trained if it is not there."""
    name = "-".join(f"{key}={value}" for key, value in sorted(choices.items())) or "default"
    work = args.out / "transfer" / "banks" / name
    align = {"tokens": args.align_tokens, "length": args.length, "rows": args.align_rows, "lr": 3e-3, "final_lr": 6e-5, "warmup": args.warmup}
    transfer(config_of(args, work, args.seed, model={"base": model_id, "mask": str(mask), "choices": choices}, align=align), verbose=True)
    return work / "align"


def mask_of(arm: Arm, model: LensModel, scores: dict[str, HeadScores], seed: int) -> HeadMask:
    if arm.heads is None:
        return HeadMask.of(torch.zeros(model.info.n_layers, model.info.n_heads, dtype=torch.bool), model.info, rule="no full head")
    return select_heads(scores[arm.heads], arm.ratio, rule=arm.rule, seed=seed)


def run_arm(name: str, arm: Arm, seed: int, model: LensModel, scores: dict[str, HeadScores], bank: Path, args) -> None:
    """Train the arm and ask it; what it answered is left in its folder."""
    work = args.out / "transfer" / "arms" / f"{name.replace(' ', '_')}-{seed}"
    if (work / "answers.json").exists():
        return
    begun = time.perf_counter()
    mask = mask_of(arm, model, scores, seed).save(work / "head_mask.json")
    common = {"length": args.length, "warmup": args.warmup, "fresh_lr": 5.0}
    found = transfer(
        config_of(
            args, work, seed,
            model={"base": args.model, "mask": str(mask), "choices": arm.choices},
            align={"bank": str(bank)},
            distil=common | {"tokens": args.distil_tokens, "rows": args.distil_rows, "lr": 5e-4, "final_lr": 5e-5},
            finetune=common | {"tokens": args.finetune_tokens, "length": args.long, "rows": args.finetune_rows, "lr": 2e-4, "final_lr": 2e-5}
            | {"kl": 1.0, "cross_entropy": 0.5, "recompute": False},
        ),
        verbose=True,
    )  # fmt: skip
    answers = ask(hl.load_model(found, device=args.device, dtype=args.dtype), args)
    write_json(work / "answers.json", {"arm": name, "seed": seed, "seconds": round(time.perf_counter() - begun, 1), "answers": answers})


def ask(model: LensModel, args) -> dict[str, list[bool]]:
    """``task, length`` -> right or not, question by question."""
    found = {}
    for length in args.lengths:
        for task in TASKS:
            found[f"{task}, {length}"] = answered(model, niah(model, task, "value", args.prompts, length, args.seed + ASKED)).tolist()
    for probe in reasoning(model, args.prompts, args.seed + ASKED):
        found[f"{probe.name}, {probe.n_tokens}"] = answered(model, probe).tolist()
    return found


def collect(work: Path) -> tuple[dict[tuple[str, int], dict[str, list[bool]]], pd.DataFrame]:
    """What the arms that are done answered, and their held-out losses."""
    answers, losses = {}, []
    for path in sorted(work.glob("arms/*/answers.json")):
        own = read_json(path)
        answers[own["arm"], own["seed"]] = own["answers"]
        held_out = read_json(path.parent / "held_out.json")
        row = {"arm": own["arm"], "seed": own["seed"], "seconds": own["seconds"]}
        losses.append(row | {f"{stage} {name}": value for stage in ("after distil", "after finetune") for name, value in held_out[stage].items()})
    return answers, pd.DataFrame(losses)


def pooled(answers: dict[tuple[str, int], dict[str, list[bool]]], arm: str, tasks: Sequence[str]) -> np.ndarray:
    """Answers ``[seed, question]`` of an arm to all questions of some tasks."""
    own = [given for (name, _), given in sorted(answers.items()) if name == arm]
    return np.array([[right for key, values in given.items() if key.split(",")[0] in tasks for right in values] for given in own])


def paired(default: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Difference of accuracies, and the two-sided sign test over questions (each by its mean over seeds) that the two answer differently often."""
    a, b = default.mean(0), other.mean(0)
    wins, losses = int((a > b).sum()), int((a < b).sum())
    return float((a - b).mean()), float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def lines(answers: dict[tuple[str, int], dict[str, list[bool]]], losses: pd.DataFrame, args) -> list[str]:
    groups = {
        "one needle": TASKS[:1],
        "one of four": TASKS[1:],
        "reasoning": sorted({key.split(",")[0] for given in answers.values() for key in given} - set(TASKS)),
    }
    by_arm = losses.groupby("arm")[["after distil kl", "after finetune cross_entropy"]].mean()
    rows = []
    for arm in [BASE, *ARMS]:
        if not any(name == arm for name, _ in answers):
            continue
        row = [f"**{arm}**" if arm == DEFAULT else arm, str(len(pooled(answers, arm, TASKS)))]
        for tasks in groups.values():
            own = pooled(answers, arm, tasks)
            known = share(int(own.mean(0).round(6).sum().round()), own.shape[1])
            cell = f"{own.mean():.2f} [{known['ci_low']:.2f} {known['ci_high']:.2f}]"
            default = pooled(answers, DEFAULT, tasks)
            if arm not in (DEFAULT, BASE) and len(default):
                gap, p = paired(default, own)
                cell += f" ({gap:+.2f}, p = {p:.2g})"
            row.append(cell)
        row += [f"{by_arm.loc[arm, name]:.3f}" if arm in by_arm.index else "" for name in by_arm]
        rows.append(row)
    return [
        f"Shared alignment on {args.align_tokens:,} tokens of {args.length}, distillation on {args.distil_tokens:,} of {args.length}, fine-tuning (KL and half "
        f"the cross-entropy) on {args.finetune_tokens:,} of {args.long}; {args.synthetic:.0%} of the rows are synthetic retrieval, in other wordings than the "
        "questions.",
        f"{args.prompts} questions for each of {len(TASKS)} needle tasks at {', '.join(map(str, args.lengths))} tokens, and of each reasoning task. Accuracy "
        "is the mean over seeds; the interval is Wilson's over questions; behind it the default's lead on the same questions and a two-sided sign test.",
        "",
        *table(["arm", "seeds", *groups, "KL after distillation", "cross-entropy at the end"], rows),
        "",
        "KL and cross-entropy are nats a token on held-out text, means over seeds.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scores", type=Path, required=True, help="a folder with a folder of scores for each method; missing ones are measured there")
    parser.add_argument("--text", type=Path, required=True, help="a file or folder of text")
    parser.add_argument("--pairs", type=int, default=6, help="pairs per probe, where scores have to be measured")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="of the arms that carry a claim; the others are run once")
    parser.add_argument("--align-tokens", type=int, default=4_300_000)
    parser.add_argument("--distil-tokens", type=int, default=4_900_000)
    parser.add_argument("--finetune-tokens", type=int, default=1_300_000)
    parser.add_argument("--length", type=int, default=512, help="tokens a row of the first two stages")
    parser.add_argument("--long", type=int, default=2048, help="tokens a row of the last stage")
    parser.add_argument("--align-rows", type=int, default=64)
    parser.add_argument("--distil-rows", type=int, default=32)
    parser.add_argument("--finetune-rows", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--synthetic", type=float, default=0.2)
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="tokens of the questions")
    parser.add_argument("--prompts", type=int, default=64, help="questions of a task and length")
    parser.add_argument("--device")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, device=args.device, dtype=args.dtype)
    scores, work = all_scores(model, args.scores, args), args.out / "transfer"
    any_mask = select_heads(scores[DEFAULT], "7:1").save(work / "any_mask.json")
    gap = conversion_gap(bank_of(args, args.model, {}, any_mask) / "head_errors.csv", model)
    causal = scores[DEFAULT]
    scores |= {"gap": gap, "restriction x gap": replace(gap, composite=causal.composite.clamp(min=0) * gap.composite.clamp(min=0))}
    for name in args.arms:
        arm = ARMS[name]
        bank = bank_of(args, args.model, arm.choices, any_mask)
        for seed in range(args.seeds if arm.claim else 1):
            run_arm(name, arm, args.seed + seed, model, scores, bank, args)
    answers, losses = collect(work)
    if not (work / "base.json").exists():
        write_json(work / "base.json", ask(model, args))
    answers[BASE, args.seed] = json.loads((work / "base.json").read_text())
    rows = [
        {"arm": arm, "seed": seed, "task": key.split(", ")[0], "length": int(key.split(", ")[1]), "n": len(right), "accuracy": float(np.mean(right))}
        for (arm, seed), given in answers.items()
        for key, right in given.items()
    ]
    frames = {"transfer_miniature": pd.DataFrame(rows), "transfer_losses": losses}
    write_results(args.out, "transfer_miniature", model, frames, {}, "Transfer in miniature", lines(answers, losses, args))


if __name__ == "__main__":
    run_script("transfer_miniature", main)
