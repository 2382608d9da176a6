"""Does the model answer? Judged on the forced answer: a token is right where it has the highest logit after the right tokens before it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe

BATCH_TOKENS = {"cuda": 2**17, "cpu": 2**12}


@torch.no_grad()
def answered(model: LensModel, probe: Probe, *, batch_tokens: int | None = None, verbose: bool = False) -> Bool[Tensor, "pair"]:
    """Which clean prompts are answered to the last token, as greedy decoding would, in one forward a batch.

    Prompts end with their answers, so that they are aligned at the end, and logits are made of the last positions only.

    Args:
        batch_tokens: tokens run at once.
    """
    rows = [_unpadded(probe, pair) for pair in range(probe.n_pairs)]
    order = sorted(range(len(rows)), key=lambda pair: len(rows[pair][0]))  # alike lengths together: little padding
    most = batch_tokens or BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
    right = torch.zeros(len(rows), dtype=torch.bool)
    done = tqdm(total=len(rows), desc=probe.label, disable=not verbose, leave=False)
    while order:
        longest = len(rows[order[-1]][0])
        batch, order = order[-max(1, most // longest) :], order[: -max(1, most // longest)]
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
    longest, n_answer = max(len(tokens) for tokens, _ in rows), max(len(answer) for _, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    answers = torch.full((len(rows), n_answer), -1)
    for row, (tokens, answer) in enumerate(rows):
        ids[row, longest - len(tokens) :] = tokens
        mask[row, longest - len(tokens) :] = 1
        answers[row, n_answer - len(answer) :] = answer
    padded = {} if mask.all() else {"attention_mask": mask.to(model.device), "position_ids": (mask.cumsum(1) - 1).clamp(min=0).to(model.device)}
    choices = model.hf(input_ids=ids.to(model.device), logits_to_keep=n_answer, use_cache=False, **padded).logits.argmax(-1).cpu()
    return ((choices == answers) | (answers < 0)).all(1)
