"""Does the model answer? Judged on the forced answer: a token is right where it has the highest logit after the right tokens before it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe

BATCH_TOKENS = {"cuda": 2**17, "cpu": 2**12}
ROWS = 64  # at most in a batch: short prompts would make more logits than long ones


@torch.no_grad()
def answered(model: LensModel, probe: Probe, *, batch_tokens: int | None = None, verbose: bool = False) -> Bool[Tensor, "pair"]:
    """Which clean prompts are answered to the last token, as greedy decoding would, in one forward a batch.

    Prompts of a batch are alike in length and padded behind their end, where a causal model does not look: that needs no mask, which would be of
    tokens x tokens, and moves no position. Logits are made of the last positions only.

    Args:
        batch_tokens: tokens run at once.
    """
    rows = [_unpadded(probe, pair) for pair in range(probe.n_pairs)]
    order = sorted(range(len(rows)), key=lambda pair: len(rows[pair][0]))  # alike lengths together: little padding
    most = batch_tokens or BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
    right = torch.zeros(len(rows), dtype=torch.bool)
    done = tqdm(total=len(rows), desc=probe.label, disable=not verbose, leave=False)
    while order:
        n_rows = min(ROWS, max(1, most // len(rows[order[-1]][0])))
        batch, order = order[-n_rows:], order[:-n_rows]
        right[batch] = _judged(model, [rows[pair] for pair in batch])
        done.update(len(batch))
    done.close()
    return right


def _unpadded(probe: Probe, pair: int) -> tuple[Int[Tensor, "pos"], Int[Tensor, "n"]]:
    """The prompt with all of its answer but the last token, and the answer."""
    mask, scored = probe.attention_mask[pair].bool(), probe.scored[pair]
    stop = int((mask.cumsum(0) - 1)[probe.read_positions[pair][scored]].max()) + 1
    return probe.clean[pair][mask][:stop], probe.answer[pair][scored]


def _judged(model: LensModel, rows: list[tuple[Tensor, Tensor]]) -> Bool[Tensor, "row"]:
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.stack([torch.nn.functional.pad(tokens, (0, longest - len(tokens))) for tokens, _ in rows])
    first_read = min(len(tokens) - len(answer) for tokens, answer in rows)
    choices = model.hf(input_ids=ids.to(model.device), logits_to_keep=longest - first_read, use_cache=False).logits.argmax(-1).cpu()
    ends = [len(tokens) - first_read for tokens, _ in rows]
    return torch.tensor([torch.equal(own[end - len(answer) : end], answer) for own, end, (_, answer) in zip(choices, ends, rows, strict=True)])
