"""What a head writes towards the answer: LOCOS and direct logit attribution."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hydralens.detectors.base import effects_of, over_probes
from hydralens.detectors.rows import score_rows
from hydralens.errors import check_word
from hydralens.models.anatomy import Layer
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import DECAY, READOUTS, logit_difference
from hydralens.patching.pairs import Pair
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores


def locos(model: LensModel, probes: Sequence[Probe], *, verbose: bool = False) -> HeadScores:
    """Logit-Contribution Scoring (Gema et al. 2026, arXiv 2607.01002): what a head writes from the needle towards the answer token.

    A head writes phi_j = a_j u[y] . W_O v_j from position j towards the answer token y; u is the unembedding, a the attention of the step
    that predicts y. The score is the sum of phi over the needle n minus |n| / |off| times the sum over all other visible
    positions, mean over the answer's tokens; in units of the unembedding times the residual stream.

    As in the authors' code no norm is applied to what is written, neither the final one nor, in Gemma, the one after attention. They
    write the answer freely and keep its steps; here it is forced.

    Raises:
        InputError: no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    return over_probes(model, probes, "locos", partial(locos_effects, model, verbose=verbose))


def locos_effects(model: LensModel, probe: Probe, *, verbose: bool = False) -> HeadEffects:
    """``locos`` of one probe, pair by pair."""
    anatomy = model.anatomy

    def of_pair(pair: Pair):
        answer, needle = _wide(anatomy.unembed.weight[pair.answer]), slice(*pair.needle)

        def contrast(rows, v, index, which):
            direction = torch.einsum("rm,hdm->rhd", answer[which], output_weight(anatomy.layers[index]))
            written = torch.einsum("rkgd,kpd->rkgp", direction.unflatten(1, (len(v), -1)), _wide(v)).flatten(1, 2)
            phi = rows * written
            inside, n = phi[..., needle].sum(-1), pair.needle[1] - pair.needle[0]
            others = pair.read[which] + 1 - n
            return inside - (phi.sum(-1) - inside) * (n / others)[:, None]

        scores, final = score_rows(anatomy, pair.clean, pair.read, contrast)
        return scores.mean(1), final

    return effects_of(model, probe, "locos", of_pair, component="z", verbose=verbose)


def logit_attribution(model: LensModel, probes: Sequence[Probe], *, readout: str = "span", verbose: bool = False) -> HeadScores:
    """Direct logit attribution: what a head's output adds to the logit difference of answer and counterfactual answer, in logits.

    z of the head at the read position, through the output projection, the norm after attention where a model has one, and the final norm,
    each norm with the scale it has in the run itself, onto the difference of the two unembedding vectors. Everything is linear
    then: heads, MLPs, embedding and biases sum to the logit difference before any final soft cap.

    Args:
        readout: ``span`` weighs the answer's tokens as HydraHead Eq. 9 does; ``first`` takes the first alone.

    Raises:
        InputError: unknown readout, no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    return over_probes(model, probes, "logit_attribution", partial(logit_attribution_effects, model, readout=readout, verbose=verbose))


def logit_attribution_effects(model: LensModel, probe: Probe, *, readout: str = "span", verbose: bool = False) -> HeadEffects:
    """``logit_attribution`` of one probe, pair by pair; ``clean_metric`` is the logit difference itself."""
    check_word("readout", readout, READOUTS)
    anatomy = model.anatomy

    def of_pair(pair: Pair):
        run = trace(anatomy, pair.clean[None], pair.read, ("z",))
        weights = DECAY ** torch.arange(len(pair.read), device=model.device)
        if readout == "first":
            weights = (torch.arange(len(pair.read), device=model.device) == 0).float()
        answer, foil = (_wide(anatomy.unembed.weight[tokens]) for tokens in (pair.answer, pair.foil))
        before_norm = pull_back(anatomy.final_norm, run.final[0], answer - foil)
        heads = []
        for layer, z in zip(anatomy.layers, run.z, strict=True):
            direction = before_norm
            if layer.post_attention_norm is not None:
                direction = pull_back(layer.post_attention_norm, layer.o(z[0].flatten(-2)), direction)
            added = torch.einsum("rhd,hdm,rm->rh", _wide(z[0]), output_weight(layer), direction)
            heads.append(weights.to(added) @ added / weights.sum())
        return torch.stack(heads), run.final[0]

    def difference(final: Tensor, pair: Pair) -> Tensor:
        return logit_difference(anatomy, final[None], pair.answer, pair.foil, readout)[0]

    return effects_of(model, probe, "logit_attribution", of_pair, component="z", readout=readout, metric=difference, verbose=verbose)


def output_weight(layer: Layer) -> Float[Tensor, "head d_head d_model"]:
    """The output projection of each head, in at least float32."""
    weight = layer.o.weight if isinstance(layer.o, Conv1D) else layer.o.weight.T
    return _wide(weight).unflatten(0, (layer.n_heads, layer.head_dim))


def pull_back(norm: nn.Module, x: Float[Tensor, "row d_model"], direction: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
    """``direction`` carried from behind a norm to before it, the norm's scale held at what it is for ``x``.

    For parts that sum to x: direction . norm(x) is the sum over parts of the result . part, plus direction . bias.
    """
    x = _wide(x)
    if isinstance(norm, nn.LayerNorm):
        scaled = direction * _wide(norm.weight)
        return (scaled - scaled.mean(-1, keepdim=True)) * (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    # An RMS norm is x * gain / rms(x). A long vector of equal entries shows its gain, whatever the family adds to its weight, and hides its epsilon.
    gain = norm(torch.full_like(x[:1], 1e3))
    at_x = x * gain
    scale = (norm(x) * at_x).sum(-1, keepdim=True) / at_x.square().sum(-1, keepdim=True)
    return direction * gain * scale


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
