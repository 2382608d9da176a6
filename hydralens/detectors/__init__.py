"""Head scores that others use, under one interface: ``NAME(model, probes, **options) -> HeadScores``.

===================== ================================================================== =============================== ==================
name                  what a high score says                                             source                          cost
===================== ================================================================== =============================== ==================
``copy_paste``        the head looks at the very token that the model says next          Retrieval_Head, 2404.15574      a forward a pair
``headkv``            its strongest picks lie on the needle                              HeadKV-R2, 2410.19258           a forward a pair
``attention_mass``    it looks at the needle                                                                             a forward a pair
``locos``             what it reads from the needle it writes towards the answer         LOCOS, 2607.01002               a forward a pair
``logit_attribution`` it writes towards the answer, away from the counterfactual answer                                  a forward a pair
``ablation_drop``     without it answers go wrong                                        2602.11374                      half a forward a head and pair
``zero_shot_kl``      limited to sinks and a window it changes the model's distribution  after 2512.20569                half a forward a head and pair
``induction``         it looks at what followed this token before                        RazorAttention, 2407.15891      a forward a sequence
``echo``              it looks at this token's earlier occurrences                       RazorAttention, 2407.15891      a forward a sequence
``duo_attention``     a trained gate keeps it from sinks and a window                    DuoAttention, 2410.10819        four forwards a step
===================== ================================================================== =============================== ==================

Sources are arXiv numbers. All but the last three rows are measured probe by probe (``PER_PROBE``), so that a long job can be resumed between probes.
"""

from collections.abc import Callable

from hydralens.detectors.attention import attention_mass, attention_mass_effects, copy_paste, copy_paste_effects, headkv, headkv_effects
from hydralens.detectors.duo import duo_attention, read_duo_attention
from hydralens.detectors.knockouts import ablation_drop, ablation_drop_effects, zero_shot_kl, zero_shot_kl_effects
from hydralens.detectors.repeats import echo, induction
from hydralens.detectors.writes import locos, locos_effects, logit_attribution, logit_attribution_effects
from hydralens.patching.effects import HeadEffects
from hydralens.scores import HeadScores

# method -> (model, probe) -> effects, and method -> (model, probes) -> scores
PER_PROBE: dict[str, Callable[..., HeadEffects]] = {
    "copy_paste": copy_paste_effects,
    "headkv": headkv_effects,
    "attention_mass": attention_mass_effects,
    "locos": locos_effects,
    "logit_attribution": logit_attribution_effects,
    "ablation_drop": ablation_drop_effects,
    "zero_shot_kl": zero_shot_kl_effects,
}
WHOLE: dict[str, Callable[..., HeadScores]] = {"induction": induction, "echo": echo, "duo_attention": duo_attention}

__all__ = [
    "PER_PROBE",
    "WHOLE",
    "ablation_drop",
    "attention_mass",
    "copy_paste",
    "duo_attention",
    "echo",
    "headkv",
    "induction",
    "locos",
    "logit_attribution",
    "read_duo_attention",
    "zero_shot_kl",
]
