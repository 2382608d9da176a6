"""Activation patching of all heads of a Qwen3-1.7B-shaped model at long contexts, beside the two unpatched forwards that no exact sweep can do without."""

import torch
from torch import Tensor

from hydralens.bench.gpu import free, median_ms, peak_gib, qwen3, random_model
from hydralens.bench.report import Report
from hydralens.models.lens import LensModel, wrap_model
from hydralens.patching.activation import activation_patch
from hydralens.patching.metric import logit_difference
from hydralens.patching.pairs import unpad
from hydralens.probes.base import Probe

N_ANSWER = 4
N_CHECKED = 512  # tokens of the pair on which effects are compared with a forward a head


def main(report: Report) -> None:
    check(report)
    free(report.device)
    model = wrap_model(random_model(qwen3(report.small), report), id="Qwen3-1.7B shape, random weights")
    for n_tokens in (64, 128) if report.small else (32768, 131072):
        probe = random_pair(n_tokens, model.hf.config.vocab_size)

        def unpatched(probe: Probe = probe) -> None:
            with torch.no_grad():
                for tokens in (probe.clean, probe.corrupt):
                    model.hf(input_ids=tokens.to(model.device), use_cache=False, logits_to_keep=1)

        two = median_ms(unpatched, report.device) / 1e3
        values = {"tokens": n_tokens, "heads": model.info.n_layers * model.info.n_heads}
        table = "all heads, z at the answer positions"
        report.row(table, **values, **{"sweep": "two forwards (limit)", "s": two, "times limit": 1.0, "peak GiB": peak_gib(unpatched, report.device)})
        for mode in ("direct", "total"):

            def patched(probe: Probe = probe, mode: str = mode) -> None:
                activation_patch(model, probe, "z", mode, min_span=0.0)

            seconds = median_ms(patched, report.device) / 1e3
            report.row(table, **values, **{"sweep": mode, "s": seconds, "times limit": seconds / two, "peak GiB": peak_gib(patched, report.device)})


def random_pair(n_tokens: int, vocabulary: int) -> Probe:
    """Random tokens that differ in three places from the middle on."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(vocabulary, (1, n_tokens), generator=generator)
    corrupt, middle = clean.clone(), n_tokens // 2
    corrupt[:, middle : middle + 3] = (clean[:, middle : middle + 3] + 1) % vocabulary
    answer = torch.randint(vocabulary, (1, N_ANSWER), generator=generator)
    read = torch.arange(n_tokens - N_ANSWER, n_tokens)[None]
    span = torch.tensor([[middle, middle + 3]])
    return Probe("random", "retrieval", "value", 0, clean, corrupt, torch.ones_like(clean), answer, (answer + 1) % vocabulary, read, span)


def check(report: Report) -> None:
    """Total effects of some heads, in float32, against one plain forward each with the head's z replaced by a hook."""
    hf = random_model(qwen3(report.small), report).float()
    model = wrap_model(hf)
    probe = random_pair(64 if report.small else N_CHECKED, hf.config.vocab_size)
    last = model.info.n_layers - 1
    heads = [(0, 0), (last // 2, 3), (last, 5)]
    found = activation_patch(model, probe, "z", "total", heads=heads, min_span=0.0)
    expected = [patched_metric(model, probe, *head) for head in heads]
    change = found.per_pair[0] * (found.clean_metric - found.corrupt_metric)
    own = [float(found.clean_metric[0] - change[head]) for head in heads]
    error = max(abs(a - b) for a, b in zip(own, expected, strict=True))
    moved = max(abs(float(change[head])) for head in heads)
    report.note(f"total effects in float32 against a forward a head, {probe.n_tokens} tokens: max abs difference {error:.1e} of effects up to {moved:.1e}")


@torch.no_grad()
def patched_metric(model: LensModel, probe: Probe, layer: int, head: int) -> float:
    """Metric of the clean run with one head's z from the corrupt run at the answer positions."""
    pair, d_head = unpad(probe, 0, model.device), model.info.head_dim
    projection, kept, own = model.hf.model.layers[layer].self_attn.o_proj, [], slice(head * d_head, (head + 1) * d_head)

    def replace(_: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        z[:, pair.read, own] = kept[0][:, pair.read, own]
        return (z,)

    reads = projection.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model.hf.model(input_ids=pair.corrupt[None], use_cache=False)
    reads.remove()
    writes = projection.register_forward_pre_hook(replace)
    residuals: list[Tensor] = []
    before = model.hf.model.norm.register_forward_pre_hook(lambda _, args: residuals.append(args[0]))
    model.hf.model(input_ids=pair.clean[None], use_cache=False)
    writes.remove()
    before.remove()
    return float(logit_difference(model.anatomy, residuals[0][:, pair.read], pair.answer, pair.foil)[0])
