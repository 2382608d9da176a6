"""The training loop that all stages share: optimiser, schedule, checkpoints, log."""

import json
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm.auto import tqdm

from hydralens.errors import InputError
from hydralens.files import read_json, write_json, write_text
from hydralens.ranks import Ranks
from hydralens.transfer.config import Stage
from hydralens.transfer.rows import Batch, Rows

KEPT = 2  # checkpoints
FRESH = ("gate", "gamma")  # parameters that no pretrained model has; their learning rate has a factor of its own
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16 operations a second, dense

# Runs forward and backward of this rank's part of a step. ``scale`` is what every sum over tokens is multiplied by before its backward pass. Returns
# named sums over this part's tokens, which are added over parts and ranks and divided by the step's weight.
Part = Callable[[Batch, Tensor], dict[str, Tensor]]


def train(
    name: str,
    stage: Stage,
    module: nn.Module,
    rows: Rows,
    run: Part,
    weigh: Callable[[Batch], Tensor],
    folder: Path,
    ranks: Ranks,
    *,
    flops_per_token: float,
    tensorboard: bool = False,
    verbose: bool = False,
) -> None:
    """Train ``module``'s trainable parameters for ``stage.steps`` steps, going on from the newest checkpoint in ``folder``.

    The loss is a sum over tokens divided by the weight of the whole step, so that it and its gradient do not depend on how the step is shared out.

    Args:
        run, weigh: forward and backward of a part, and its weight.
        flops_per_token: of forward and backward, for MFU.

    Raises:
        InputError: rows do not divide among ranks and micro-batches, or the loss is not finite; the last checkpoint stays.
    """
    parts = _parts(stage, ranks)
    fresh = [p for n, p in module.named_parameters() if p.requires_grad and any(word in n.split(".") for word in FRESH)]
    others = [p for n, p in module.named_parameters() if p.requires_grad and not any(word in n.split(".") for word in FRESH)]
    groups = [{"params": others, "factor": 1.0}, {"params": fresh, "factor": stage.fresh_lr}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=stage.lr, betas=stage.betas, weight_decay=stage.weight_decay)
    first = _resume(folder, module, optimizer, ranks)
    log = _Log(name, folder, first, stage, ranks, flops_per_token, tensorboard)
    progress = tqdm(range(first, stage.steps), desc=name, initial=first, total=stage.steps, disable=not (verbose and ranks.first))

    def parts_of(step: int) -> list[Batch]:
        return [rows.batch(step, stage.rows, ranks.rank * parts + part, ranks.world * parts) for part in range(parts)]

    # The rows of the next step are made while this one is computed.
    ahead = ThreadPoolExecutor(1)
    coming = ahead.submit(parts_of, first)
    for step in progress:
        batches = [batch.to(ranks.device) for batch in coming.result()]
        coming = ahead.submit(parts_of, step + 1)
        lr = learning_rate(stage, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        weight = ranks.total(torch.stack([weigh(batch) for batch in batches]).sum())
        sums: dict[str, Tensor] = {}
        for batch in batches:
            # FSDP takes the mean of the ranks' gradients; the factor makes it their sum.
            for key, value in run(batch, ranks.world / weight).items():
                sums[key] = sums[key] + value if key in sums else value
        means = {key: ranks.total(value) / weight for key, value in sums.items()}
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), stage.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not (means["loss"].isfinite() and norm.isfinite()):
            kept = checkpoints(folder)
            where = f"{kept[-1]} is the last good checkpoint, where the run goes on" if kept else "there is no checkpoint yet"
            raise InputError(f"{name}: loss {float(means['loss'])} and gradient {float(norm)} at step {step}; lower lr or clip. {where}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{float(means['loss']):.4f}")
        log.write(step, lr, means, norm)
        if (step + 1) % stage.checkpoint_every == 0 or step + 1 == stage.steps:
            _save(folder, step + 1, module, optimizer, ranks)
    ahead.shutdown()


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up to ``lr``, then a cosine to ``final_lr`` at the last step."""
    if step < stage.warmup:
        return stage.lr * (step + 1) / (stage.warmup + 1)
    done = (step - stage.warmup) / max(1, stage.steps - 1 - stage.warmup)
    return stage.final_lr + (stage.lr - stage.final_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def _parts(stage: Stage, ranks: Ranks) -> int:
    """Micro-batches of each rank."""
    each = stage.rows / ranks.world
    micro = stage.micro_rows or max(1, int(each))
    if each % micro:
        raise InputError(f"{stage.rows} rows a step do not divide among {ranks.world} ranks in micro-batches of {micro}; change rows or micro_rows")
    return int(each) // micro


# --- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def drop_checkpoints(folder: Path, ranks: Ranks) -> None:
    """Of a stage whose model is written."""
    if ranks.first:
        for path in checkpoints(folder):
            shutil.rmtree(path)


def _save(folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Under another name first, so that a checkpoint is whole or not there."""
    temporary, target = folder / f".step-{step}", folder / f"step-{step}"
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.wait()
    model, optim = get_state_dict(module, optimizer)
    try:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=temporary)
        if ranks.first:
            write_json(temporary / "step.json", {"step": step})
            temporary.rename(target)
            for old in checkpoints(folder)[:-KEPT]:
                shutil.rmtree(old)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"cannot write the checkpoint {target}: {first_line}; make room and start again, the one before is kept") from None
    ranks.wait()


def _resume(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> int:
    """The step to go on with."""
    found = checkpoints(folder)
    if not found:
        return 0
    model, optim = get_state_dict(module, optimizer)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=found[-1])
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return read_json(found[-1] / "step.json")["step"]


# --- log -----------------------------------------------------------------------------------------------------------


class _Log:
    """``log.jsonl``: a line a step, written by the first rank; lines after the checkpoint that a run goes on from are dropped."""

    def __init__(self, name: str, folder: Path, first: int, stage: Stage, ranks: Ranks, flops_per_token: float, tensorboard: bool):
        self.name, self.stage, self.ranks, self.flops_per_token = name, stage, ranks, flops_per_token
        self.path, self.board = folder / "log.jsonl", None
        self.peak = next((peak for card, peak in PEAK.items() if ranks.device.type == "cuda" and card in torch.cuda.get_device_name(ranks.device)), None)
        self.then = time.perf_counter()
        if not ranks.first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] < first] if self.path.exists() else []
        write_text(self.path, "".join(line + "\n" for line in kept))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=first)

    def write(self, step: int, lr: float, means: dict[str, Tensor], norm: Tensor) -> None:
        if not self.ranks.first:
            return
        values = {key: value.tolist() for key, value in means.items()}  # waits for the GPU, so that the time is the step's
        now = time.perf_counter()
        speed = self.stage.rows * self.stage.length / (now - self.then)
        self.then = now
        line = {"stage": self.name, "step": step, "tokens": (step + 1) * self.stage.rows * self.stage.length, "lr": lr, "grad_norm": float(norm)}
        line |= values | {"tokens_per_s": round(speed, 1)}
        if self.peak is not None:
            line["mfu"] = round(speed * self.flops_per_token / self.peak / self.ranks.world, 4)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for key in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu"):
                if isinstance(line.get(key), float):
                    self.board.add_scalar(f"{self.name}/{key}", line[key], step)
