"""Does the hybrid on a GPU, with its kernels, give what the plain-torch reference gives on the CPU?

    python analyses/hybrid_on_gpu.py [MODEL] --out analyses/results/embedded --mask head_mask.json [--prompts 50]

The 7:1 hybrid of the model, in bfloat16 and float32 on the GPU beside float32 on the CPU: logits and their order on prompts of unlike length, gradients of
the next-token loss, prompts read at once against token by token, and a copy that was saved and opened again. Written to OUT:

    hybrid_on_gpu.md    the relative errors, how often the likeliest token is the same, and what ran
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pandas as pd
import torch
from scipy.stats import spearmanr
from shared import arguments, run_script, table, write_results
from transformers import AutoModelForCausalLM

import hydralens as hl
from hydralens.doctor import report
from hydralens.hybrid import HybridCache, HydraHeadForCausalLM
from hydralens.probes.text import prose

LENGTHS = (1, 63, 64, 65, 130, 256)


def relative(own: torch.Tensor, expected: torch.Tensor) -> float:
    return float((own.float().cpu() - expected.float().cpu()).norm() / expected.float().cpu().norm())


def prompts(model: hl.LensModel, n: int, seed: int) -> list[torch.Tensor]:
    """Stretches of prose that end anywhere."""
    made = []
    for index in range(n):
        rng = Random(f"{seed}/{index}")
        sentences = prose(rng)
        text = " ".join(next(sentences) for _ in range(rng.randint(2, 20)))
        tokens = model.tokenizer(text, return_tensors="pt").input_ids
        made.append(tokens[:, : rng.randint(8, tokens.shape[1])])
    return made


@torch.no_grad()
def logits_agree(cpu: HydraHeadForCausalLM, gpu: HydraHeadForCausalLM, asked: Sequence[torch.Tensor], device: str) -> dict[str, float]:
    errors, same, order = [], [], []
    for tokens in asked:
        expected, own = cpu(tokens).logits[0, -1], gpu(tokens.to(device)).logits[0, -1].float().cpu()
        errors.append(relative(own, expected))
        same.append(bool(own.argmax() == expected.argmax()))
        best = expected.topk(100).indices
        order.append(float(spearmanr(own[best], expected[best]).statistic))
    return {"median": float(pd.Series(errors).median()), "largest": max(errors), "same": sum(same), "order": float(pd.Series(order).median())}


def gradients_agree(cpu: HydraHeadForCausalLM, gpu: HydraHeadForCausalLM, tokens: torch.Tensor, device: str) -> float:
    """Relative error of all gradients together."""
    grads = []
    for hybrid, own in ((cpu, tokens), (gpu, tokens.to(device))):
        hybrid.zero_grad()
        hybrid(own, labels=own).loss.backward()
        grads.append(torch.cat([p.grad.flatten().float().cpu() for p in hybrid.parameters()]))
        hybrid.zero_grad()
    return relative(grads[1], grads[0])


@torch.no_grad()
def decoding_agrees(gpu: HydraHeadForCausalLM, tokens: torch.Tensor) -> float:
    """The second half token by token against all at once."""
    whole, half = gpu(tokens).logits, tokens.shape[1] // 2
    cache = HybridCache(gpu.config.num_hidden_layers)
    steps = [gpu(tokens[:, :half], cache=cache).logits, *(gpu(tokens[:, t : t + 1], cache=cache).logits for t in range(half, tokens.shape[1]))]
    return relative(torch.cat(steps, 1), whole)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mask", type=Path, required=True, help="a head_mask.json of the model")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, device="cpu", dtype="float32")
    asked = prompts(model, args.prompts, args.seed)
    cpu = hl.build_hybrid(model, hl.HeadMask.load(args.mask), calibration=asked[0])
    with tempfile.TemporaryDirectory() as folder:
        cpu.save_pretrained(folder)
        half = torch.bfloat16 if args.device == "cuda" else torch.float32
        gpu, again, wide, rounded = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
            for dtype, device in ((half, args.device), (half, args.device), (torch.float32, args.device), (half, "cpu"))
        )
    found, exact, floor = logits_agree(cpu, gpu, asked, args.device), logits_agree(cpu, wide, asked, args.device), logits_agree(cpu, rounded, asked, "cpu")
    agree = "{median:.1e}, {largest:.1e}; {same} of {n}; {order:.4f}"
    tokens = torch.randint(model.anatomy.unembed.weight.shape[0], (1, max(LENGTHS)), generator=torch.Generator().manual_seed(args.seed))
    rows = [
        [f"logits after a prompt: {what}", agree.format(n=len(asked), **own)]
        for what, own in (("GPU, bfloat16", found), ("GPU, float32", exact), ("CPU, bfloat16: what rounding alone costs", floor))
    ]
    rows += [
        ["gradients of the next-token loss, relative error", f"{gradients_agree(cpu, gpu, tokens, args.device):.1e}"],
        ["token by token against at once, relative error", f"{decoding_agrees(gpu, tokens[:, :130].to(args.device)):.1e}"],
    ]
    with torch.no_grad():
        for length in LENGTHS:
            own = tokens[:, :length]
            rows.append([f"all logits of {length} random tokens, relative error", f"{relative(gpu(own.to(args.device)).logits, cpu(own).logits):.1e}"])
        equal = torch.equal(gpu(tokens.to(args.device)).logits, again(tokens.to(args.device)).logits)
    continued = [hybrid.generate(asked[0].to(hybrid.device), max_new_tokens=8, do_sample=False).cpu() for hybrid in (gpu, again)]
    rows.append(["saved and opened again: logits, generated tokens", f"{'equal' if equal else 'UNEQUAL'}, {'equal' if torch.equal(*continued) else 'UNEQUAL'}"])
    note = "Beside the CPU in float32. Of logits after a prompt: relative error, median and largest; likeliest token the same; Spearman of the 100 likeliest."
    text = [note, "", *table(["what", "found"], rows), "", "```text", *report().splitlines(), "```"]
    write_results(args.out, "hybrid_on_gpu", model, {}, {}, "The hybrid on a GPU beside the CPU reference", text)


if __name__ == "__main__":
    run_script("hybrid_on_gpu", main)
