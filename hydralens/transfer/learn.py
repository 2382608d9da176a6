"""Stages 2 and 3: all weights of the hybrid learn from the base model's logits (Eq. 16) and from the text itself."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hydralens.hybrid.modeling import HydraHeadForCausalLM
from hydralens.models.lens import LensModel
from hydralens.ranks import Ranks
from hydralens.transfer.config import LearnPart
from hydralens.transfer.losses import distillation_loss, next_token_loss
from hydralens.transfer.rows import Batch
from hydralens.transfer.teacher import teach


class Learner(nn.Module):
    """A hybrid and its losses in one forward, so that the output head is whole (not a rank's piece) where they are computed."""

    def __init__(self, hybrid: HydraHeadForCausalLM, teacher: LensModel, part: LearnPart, ranks: Ranks):
        super().__init__()
        self.hybrid, self.part = hybrid.train().requires_grad_(True), part
        self.teacher = [teacher]  # in a list: not a part of this module
        if part.recompute:  # under its name before transformers 5.24, or its new one
            getattr(hybrid, "activation_checkpointing_enable", hybrid.gradient_checkpointing_enable)({"use_reentrant": False})
        for block in hybrid.model.layers:
            fully_shard(block, mesh=ranks.mesh)
        # Embedding, last norm and output head in one group: where embedding and head are tied they are one parameter.
        fully_shard(self, mesh=ranks.mesh, reshard_after_forward=False)

    def forward(self, batch: Batch, taught: Float[Tensor, "pos d_model"] | None, kl: float, cross_entropy: float) -> Float[Tensor, ""]:
        """The sum over tokens of the weighted losses of predicting each token from those before it."""
        hybrid, tokens = self.hybrid, batch.tokens
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            hidden = hybrid.model(hybrid.model.embed_tokens(tokens), None, None, None, batch.cu_seqlens)[-1][0, :-1]
            labels, weight, head = tokens[0, 1:], batch.weights[0, 1:], hybrid.lm_head.weight
            if not kl:
                return cross_entropy * next_token_loss(hidden, head, labels, weight)
            teacher_head = self.teacher[0].hf.lm_head.weight
            given = {"labels": labels, "cross_entropy": cross_entropy / kl, "temperature": self.part.temperature}
            return kl * distillation_loss(hidden, head, taught[:-1], teacher_head, weight, **given)

    def taught(self, batch: Batch) -> Float[Tensor, "pos d_model"]:
        return teach(self.teacher[0], batch)


def learned(learner: Learner, ranks: Ranks):
    """The stage's ``run`` and ``weigh`` for ``loop.train``."""
    part = learner.part

    def run(batch: Batch, scale: Tensor) -> dict[str, Tensor]:
        loss = learner(batch, learner.taught(batch) if part.kl else None, part.kl, part.cross_entropy)
        (loss * scale).backward()
        return {"loss": loss.detach()}

    return run, weight_of


def weight_of(batch: Batch) -> Float[Tensor, ""]:
    """The weight of all predictions of a packed row; of its first token there is none."""
    return batch.weights[0, 1:].sum()


@torch.no_grad()
def held_out_losses(learner: Learner, batch: Batch) -> dict[str, float]:
    """KL to the base model and cross-entropy, per token, without synthetic rows."""
    learner.eval()
    taught, weight = learner.taught(batch), float(weight_of(batch))
    found = {"kl": float(learner(batch, taught, 1.0, 0.0)) / weight, "cross_entropy": float(learner(batch, None, 0.0, 1.0)) / weight}
    learner.train()
    learner.reshard()  # no backward pass did
    return found
