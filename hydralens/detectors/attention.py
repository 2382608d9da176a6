"""Where a head looks while the answer is written: copy-paste retrieval score, HeadKV, attention mass on the needle."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor

from hydralens.detectors.base import effects_of, over_probes
from hydralens.detectors.rows import score_rows
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import Pair
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores


def copy_paste(model: LensModel, probes: Sequence[Probe], *, verbose: bool = False) -> HeadScores:
    """Retrieval score of Wu et al. 2024 (arXiv 2404.15574): the share of answer tokens that a head copies from the needle.

    A token is copied when the head's most attended position, at the step that predicts it, lies in the needle and holds that very token. Scores lie in 0..1.

    The source decodes freely, counts the tokens the model generates and divides by the needle's length, its needle being the answer. Here
    the answer is forced, so a step counts only if the model would have generated the right token, and the sum is divided by the
    answer's length; successful runs (there ROUGE-1 recall over 50) are the answered pairs.

    Raises:
        InputError: no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    return over_probes(model, probes, "copy_paste", partial(copy_paste_effects, model, verbose=verbose))


def copy_paste_effects(model: LensModel, probe: Probe, *, verbose: bool = False) -> HeadEffects:
    """``copy_paste`` of one probe, pair by pair."""
    anatomy = model.anatomy

    def of_pair(pair: Pair):
        start, stop = pair.needle

        def copied(rows, v, index, which):
            best = rows.argmax(-1)
            return (best >= start) & (best < stop) & (pair.clean[best] == pair.answer[which, None])

        found, final = score_rows(anatomy, pair.clean, pair.read, copied)
        predicted = anatomy.logits(final).argmax(-1) == pair.answer
        return (found & predicted[:, None]).float().mean(1), final

    return effects_of(model, probe, "copy_paste", of_pair, component="pattern", verbose=verbose)


def headkv(model: LensModel, probes: Sequence[Probe], *, verbose: bool = False) -> HeadScores:
    """HeadKV-R2 (Fu et al. 2024, arXiv 2410.19258): attention that a head's strongest picks place on the needle.

    With n the needle: the weights of the head's |n| most attended positions that lie in n, summed and divided by |n|, mean over the
    answer's tokens. No token needs to match. As in the authors' code, but without its constant factor of 10; they write the
    answer freely, here it is forced.

    Raises:
        InputError: no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    return over_probes(model, probes, "headkv", partial(headkv_effects, model, verbose=verbose))


def headkv_effects(model: LensModel, probe: Probe, *, verbose: bool = False) -> HeadEffects:
    """``headkv`` of one probe, pair by pair."""

    def of_pair(pair: Pair):
        start, stop = pair.needle

        def on_needle(rows, v, index, which):
            weights, picks = rows.topk(stop - start)
            return (weights * ((picks >= start) & (picks < stop))).sum(-1) / (stop - start)

        scores, final = score_rows(model.anatomy, pair.clean, pair.read, on_needle)
        return scores.mean(1), final

    return effects_of(model, probe, "headkv", of_pair, component="pattern", verbose=verbose)


def attention_mass(model: LensModel, probes: Sequence[Probe], *, verbose: bool = False) -> HeadScores:
    """Attention that a head places on the needle when the first answer token is read, 0..1; the plainest of the attention scores.

    Raises:
        InputError: no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    return over_probes(model, probes, "attention_mass", partial(attention_mass_effects, model, verbose=verbose))


def attention_mass_effects(model: LensModel, probe: Probe, *, verbose: bool = False) -> HeadEffects:
    """``attention_mass`` of one probe, pair by pair."""

    def of_pair(pair: Pair) -> tuple[Float[Tensor, "layer head"], Tensor]:
        scores, final = score_rows(model.anatomy, pair.clean, pair.read[:1], lambda rows, v, index, which: rows[..., slice(*pair.needle)].sum(-1))
        return scores[:, 0], final

    return effects_of(model, probe, "attention_mass", of_pair, component="pattern", verbose=verbose)
