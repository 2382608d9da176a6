"""Training: tokens a second and MFU of each stage of the transfer, hybrid beside full attention in the same loop; and what the chunked KL saves."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hydralens.bench.gpu import AS_BASE, Run, free, median_ms, peak_gib, qwen3, random_model, relative, smollm2, spread_mask
from hydralens.bench.report import Report
from hydralens.hybrid import build_hybrid
from hydralens.models.lens import LensModel, wrap_model
from hydralens.ranks import Ranks, all_ranks
from hydralens.transfer.align import Aligners, aligned
from hydralens.transfer.config import AlignPart, DistilPart, FinetunePart
from hydralens.transfer.learn import Learner, learned
from hydralens.transfer.loop import PEAK
from hydralens.transfer.losses import distillation_loss
from hydralens.transfer.rows import Batch

STAGES = {"align": AlignPart, "distil": DistilPart, "finetune": FinetunePart}
RECOMPUTED = 16384  # tokens a row from which on a stage that learns all weights keeps no activations within layers


def main(report: Report) -> None:
    chunked_kl(report)
    lengths = (64,) if report.small else (4096, 32768)
    with all_ranks(report.device.type) as ranks:
        for name, config in (("SmolLM2-135M", smollm2(report.small)), ("Qwen3-1.7B", qwen3(report.small))):
            teacher = wrap_model(random_model(config, report), id=name)
            for length in lengths:
                for stage in STAGES:
                    measure(report, teacher, stage, length, ranks)
            del teacher
            free(report.device)


# The stages


def measure(report: Report, teacher: LensModel, stage: str, length: int, ranks: Ranks) -> None:
    """A row each for full attention and for the hybrid: one row of ``length`` random tokens a step."""
    full_speed = None
    for kind in ("full", "7:1"):
        values: dict[str, Any] = {"model": teacher.info.id, "tokens": length, "stage": stage, "attention": kind}
        try:
            speed, flops, peak = timed(report, teacher, kind, stage, length, ranks)
        except torch.OutOfMemoryError:
            report.note(f"{teacher.info.id}, {length} tokens, {stage}, {kind}: out of memory")
            continue
        finally:
            free(report.device)
        rate = next((rate for card, rate in PEAK.items() if card in report.result["machine"]["device"]), None)
        full_speed = speed if kind == "full" else full_speed
        times = None if full_speed is None else speed / full_speed
        mfu = None if rate is None else speed * flops / rate
        report.row("stages", **values, **{"tokens/s": speed, "MFU": mfu, "times full": times, "peak GiB": peak})


def timed(report: Report, teacher: LensModel, kind: str, stage: str, length: int, ranks: Ranks) -> tuple[float, float, float | None]:
    """Tokens a second, operations a token and peak memory. What is trained is gone afterwards."""
    step, flops = training(teacher, kind, stage, length, ranks)
    speed = 1e3 * length / median_ms(step, report.device, budget_ms=2000)
    return speed, flops, peak_gib(step, report.device)


def training(teacher: LensModel, kind: str, stage: str, length: int, ranks: Ranks) -> tuple[Run, float]:
    """One step of a stage (forward, backward, clipping, AdamW), and its operations a token: products with weights, without those of attention."""
    mask = spread_mask(teacher.info.n_layers, teacher.info.n_heads)
    hybrid = (build_hybrid(teacher, mask) if kind != "full" else build_hybrid(teacher, torch.ones_like(mask), **AS_BASE)).float()
    n_teacher = n_parameters(teacher.hf)
    long = {"recompute": length >= RECOMPUTED} if stage != "align" else {"shared": False}
    part = STAGES[stage](rows=1, length=length, **long)
    batches = RandomRows(teacher.hf.config.vocab_size, length)
    if stage == "align":
        module: nn.Module = Aligners([hybrid], False, ranks)
        run, weigh = aligned(module, teacher, batches, part, ranks)
        flops = 6.0 * n_parameters(module, trained=True) + 2.0 * n_teacher
    else:
        module = Learner(hybrid, teacher, part, ranks)
        run, weigh = learned(module, ranks)
        flops = 6.0 * n_parameters(hybrid) * (4 / 3 if part.recompute else 1) + (2.0 * n_teacher if part.kl else 0.0)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=part.lr, betas=part.betas, weight_decay=part.weight_decay)
    batch = batches.batch(0, 1).to(ranks.device)

    def step() -> None:
        run(batch, 1 / weigh(batch))
        torch.nn.utils.clip_grad_norm_(module.parameters(), part.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, flops


def n_parameters(module: nn.Module, trained: bool = False) -> int:
    """What a token is multiplied with: everything, as embedding and output head are one in both models."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


class RandomRows:
    """Stands for ``Rows``: each row one document of random tokens."""

    def __init__(self, vocabulary: int, length: int):
        self.vocabulary, self.length = vocabulary, length

    def batch(self, step: int, n_rows: int) -> Batch:
        n_tokens = n_rows * self.length
        tokens = torch.randint(self.vocabulary, (1, n_tokens), generator=torch.Generator().manual_seed(step))
        starts = torch.arange(0, n_tokens + 1, self.length)
        return Batch(tokens, torch.ones(1, n_tokens), starts, (torch.arange(n_tokens) % self.length)[None])


# The KL to the base model's logits


def chunked_kl(report: Report) -> None:
    """Memory and time of the loss beside logits held whole; where those would not fit, their peak is scaled up from a quarter of the tokens."""
    d_model, vocabulary = (64, 512) if report.small else (2048, 151936)
    to = {"device": report.device, "dtype": report.dtype}
    torch.manual_seed(0)
    heads = [torch.randn(vocabulary, d_model, **to) * d_model**-0.5 for _ in range(2)]
    before = None
    for n_tokens in (1024, 4096) if report.small else (2048, 8192, 32768):
        student, teacher = (torch.randn(n_tokens, d_model, **to) for _ in range(2))
        student.requires_grad_()
        given = student, heads[0].requires_grad_(), teacher, heads[1], torch.ones(n_tokens, device=report.device)

        def back(loss: Callable[..., Tensor], given: tuple[Tensor, ...] = given) -> tuple[Tensor, ...]:
            found = loss(*given)
            return found.detach(), *torch.autograd.grad(found, given[:2])

        values: dict[str, Any] = {"tokens": n_tokens, "vocabulary": vocabulary}
        ours, ours_peak = median_ms(lambda: back(distillation_loss), report.device), peak_gib(lambda: back(distillation_loss), report.device)
        values |= {"ours ms": ours, "ours peak GiB": ours_peak, "plain ms": None, "plain peak GiB": None, "plain peak, scaled GiB": None, "error": None}
        if before is not None and 4 * before > 0.9 * torch.cuda.get_device_properties(report.device).total_memory / 2**30:
            values["plain peak, scaled GiB"] = 4 * before
        else:
            values["error"] = relative(back(distillation_loss), back(plain_kl))
            values["plain ms"] = median_ms(lambda: back(plain_kl), report.device)
            before = values["plain peak GiB"] = peak_gib(lambda: back(plain_kl), report.device)
        report.row("KL, forward and backward", **values)
        free(report.device)


def plain_kl(
    student: Float[Tensor, "token d_model"], student_head: Float[Tensor, "vocab d_model"], teacher: Tensor, teacher_head: Tensor, weight: Float[Tensor, "token"]
) -> Float[Tensor, ""]:
    """``distillation_loss`` as it is written down, all logits at once."""
    with torch.no_grad():
        wanted = (teacher @ teacher_head.T).float().log_softmax(-1)
    found = (student @ student_head.T).float().log_softmax(-1)
    return (nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1) * weight).sum()
