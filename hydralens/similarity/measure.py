"""``layer_similarity`` and ``head_similarity``: what is compared, and the one pass over the prompts that compares it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import Trace, trace
from hydralens.models.lens import LensModel
from hydralens.patching.activation import activation_patch
from hydralens.patching.effects import HeadEffects
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, all_probes, by_label
from hydralens.similarity.cka import MinibatchCKA
from hydralens.similarity.cosine import MeanCosine
from hydralens.similarity.effects import correlation, head_profiles, layer_profiles
from hydralens.similarity.matrix import Similarity

VALUES_AT_ONCE = 2**24  # vector entries compared at a time (64 MiB in float32)
FUNCTIONAL = "functional"
LAYER_METRICS = ("output", "update", "cka", FUNCTIONAL)
HEAD_METRICS = ("write", "z", "cka", FUNCTIONAL)

Prompts = Sequence[Probe] | Sequence[str]


def layer_similarity(
    model: LensModel, prompts: Prompts | HeadScores, metric: str = "output", *, tokens_per_prompt: int = 1024, verbose: bool = False
) -> Similarity:
    """How alike layers are, ``[layer, layer]`` (HydraHead Fig. 2b). Memory does not grow with the number of prompts.

    Args:
        prompts: probes, whose clean prompts are used, or texts; for ``functional`` probes, or scores that were measured on some.
        metric: what is compared.

            * ``output``: cosine of layers' outputs, the residual stream after a layer, at the same token, averaged over tokens. The paper's
              measure; what all layers carry on from the embedding counts as likeness.
            * ``update``: cosine of what layers add, output minus input.
            * ``cka``: debiased linear CKA of layers' outputs: do two layers tell the same tokens apart, in whatever basis (see ``similarity.cka``).
              Each token's vector has unit length, as the next norm makes it: otherwise attention sinks, one token in a hundred with a norm up to
              a hundred times that of others (Sun et al. 2024, arXiv 2402.17762), decide alone.
            * ``functional``: correlation over probes of layers' causal profiles, the summed effects of their heads on each probe's answer.
        tokens_per_prompt: longer prompts are read in full and compared at this many evenly spaced tokens.

    Raises:
        InputError: an unknown metric, no prompts, an empty text, texts for a model without tokenizer, fewer than 4 tokens (CKA) or 3 probes (functional).
    """
    check_word("metric", metric, LAYER_METRICS)
    if metric != FUNCTIONAL:
        return similarities(model, prompts, [metric], [], tokens_per_prompt=tokens_per_prompt, verbose=verbose)[0][metric]
    effects = _effects(model, prompts, verbose)
    return Similarity(correlation(layer_profiles(effects)), _layer_labels(model.anatomy), "layer", _profile_words(effects, "layers' summed effects"), 0)


def head_similarity(
    model: LensModel, prompts: Prompts | HeadScores, metric: str = "write", *, tokens_per_prompt: int = 1024, verbose: bool = False
) -> Similarity:
    """How alike heads are, ``[layer * head, layer * head]``, the head-wise counterpart of ``layer_similarity``.

    Args:
        prompts: probes, whose clean prompts are used, or texts; for ``functional`` probes, or scores that were measured on some.
        metric: what is compared.

            * ``write``: cosine of what heads add to the residual stream: z through the head's slice of the output projection, without bias and
              before any post-norm. All layers share that basis.
            * ``z``: cosine of the inputs of the output projection, in the basis of the head's values: it means something within a KV group only.
            * ``cka``: debiased linear CKA of z, for which bases do not matter: do two heads tell the same tokens apart.
            * ``functional``: correlation over probes of heads' causal profiles, their mean effects on each probe's answer.
        tokens_per_prompt: longer prompts are read in full and compared at this many evenly spaced tokens.

    Raises:
        InputError: as ``layer_similarity``.
    """
    check_word("metric", metric, HEAD_METRICS)
    if metric != FUNCTIONAL:
        return similarities(model, prompts, [], [metric], tokens_per_prompt=tokens_per_prompt, verbose=verbose)[1][metric]
    effects = _effects(model, prompts, verbose)
    return Similarity(correlation(head_profiles(effects).flatten(1)), _head_labels(model.anatomy), "head", _profile_words(effects, "heads' effects"), 0)


@torch.no_grad()
def similarities(
    model: LensModel,
    prompts: Prompts,
    layers: Sequence[str] = ("output", "update", "cka"),
    heads: Sequence[str] = ("write", "z", "cka"),
    *,
    tokens_per_prompt: int = 1024,
    verbose: bool = False,
) -> tuple[dict[str, Similarity], dict[str, Similarity]]:
    """Several metrics of ``layer_similarity`` and ``head_similarity`` (not ``functional``) from one pass over the prompts.

    Returns:
        Metric -> similarity of layers, and metric -> similarity of heads.

    Raises:
        InputError: as ``layer_similarity``.
    """
    for name, words, known in (("layers", layers, LAYER_METRICS), ("heads", heads, HEAD_METRICS)):
        for word in words:
            check_word(name, word, tuple(metric for metric in known if metric != FUNCTIONAL))
    anatomy = model.anatomy
    found = {(kind, metric): _comparison(anatomy, kind, metric) for kind, metrics in (("layer", layers), ("head", heads)) for metric in metrics}
    keep = {site for comparison in found.values() for site in comparison.keep}
    prompts = [prompts] if isinstance(prompts, str | Probe) else prompts
    n_prompts = sum(prompt.n_pairs if isinstance(prompt, Probe) else 1 for prompt in prompts)
    for ids in tqdm(_token_rows(model, prompts), desc="similarity", total=n_prompts, disable=not verbose, leave=False):
        columns = torch.linspace(0, len(ids) - 1, min(len(ids), tokens_per_prompt)).round().long()
        run = trace(anatomy, ids[None].to(model.device), columns.to(model.device), keep=keep)
        for comparison in found.values():
            block = max(1, VALUES_AT_ONCE // comparison.n_values)
            for start in range(0, len(columns), block):
                comparison.measure.add(comparison.vectors(run, slice(start, start + block)))
    results = {key: Similarity(c.measure.matrix(), c.labels, key[0], c.words, c.measure.n_tokens) for key, c in found.items()}
    return {metric: results["layer", metric] for metric in layers}, {metric: results["head", metric] for metric in heads}


class _Comparison(NamedTuple):
    """One metric on its way over the prompts."""

    measure: MeanCosine | MinibatchCKA
    keep: tuple[str, ...]  # sites of a run that it reads
    vectors: Callable[[Trace, slice], Float[Tensor, "token item width"]]
    n_values: int  # entries of one token's vectors
    labels: list[str]
    words: str


def _comparison(anatomy: Anatomy, kind: str, metric: str) -> _Comparison:
    labels = _layer_labels(anatomy) if kind == "layer" else _head_labels(anatomy)
    width = anatomy.head_dim if kind == "head" and metric != "write" else anatomy.d_model
    match kind, metric:
        case "layer", "output":
            vectors, words = _outputs, "cosine of layer outputs"
        case "layer", "update":
            vectors, words = _updates, "cosine of layer updates (output minus input)"
        case "layer", _:
            vectors, words = _directions, "debiased linear CKA of layer outputs, every token at unit length"
        case _, "write":
            vectors, words = _writes(anatomy), "cosine of heads' contributions to the residual stream"
        case _, "z":
            vectors, words = _z, "cosine of heads' outputs z"
        case _:
            vectors, words = _z, "debiased linear CKA of heads' outputs z"
    measure = MinibatchCKA(len(labels), width) if metric == "cka" else MeanCosine(len(labels))
    return _Comparison(measure, ("residual",) if kind == "layer" else ("z",), vectors, len(labels) * width, labels, words)


def _outputs(run: Trace, tokens: slice) -> Float[Tensor, "token layer d_model"]:
    return torch.stack([residual[0, tokens] for residual in (*run.residual[1:], run.final)], 1)


def _directions(run: Trace, tokens: slice) -> Float[Tensor, "token layer d_model"]:
    return F.normalize(_outputs(run, tokens).float(), dim=-1)


def _updates(run: Trace, tokens: slice) -> Float[Tensor, "token layer d_model"]:
    return _outputs(run, tokens) - torch.stack([residual[0, tokens] for residual in run.residual], 1)


def _z(run: Trace, tokens: slice) -> Float[Tensor, "token item d_head"]:
    return torch.cat([z[0, tokens] for z in run.z], 1)


def _writes(anatomy: Anatomy) -> Callable[[Trace, slice], Float[Tensor, "token item d_model"]]:
    slices = _output_slices(anatomy)

    def writes(run: Trace, tokens: slice) -> Float[Tensor, "token item d_model"]:
        z = (layer[0, tokens] for layer in run.z)
        return torch.cat(
            [einsum(own, weight, "token head d_head, head d_head d_model -> token head d_model") for own, weight in zip(z, slices, strict=True)], 1
        )

    return writes


def _output_slices(anatomy: Anatomy) -> list[Float[Tensor, "head d_head d_model"]]:
    """Each head's slice of the output projection: the module's answer to unit vectors minus its answer to zero.

    Asking the module works for every way of storing weights (Linear, transposed Conv1D, quantised, with an adapter).
    """
    slices = []
    with torch.no_grad():
        for layer in anatomy.layers:
            weight = layer.o.weight
            units = torch.eye(anatomy.n_heads * anatomy.head_dim, dtype=weight.dtype, device=weight.device)
            slices.append((layer.o(units) - layer.o(torch.zeros_like(units[:1]))).reshape(anatomy.n_heads, anatomy.head_dim, -1))
    return slices


def _layer_labels(anatomy: Anatomy) -> list[str]:
    return [f"L{layer}" for layer in range(anatomy.n_layers)]


def _head_labels(anatomy: Anatomy) -> list[str]:
    return [f"L{layer}H{head}" for layer in range(anatomy.n_layers) for head in range(anatomy.n_heads)]


def _token_rows(model: LensModel, prompts: Prompts) -> Iterator[Int[Tensor, "pos"]]:
    """The real tokens of every prompt."""
    if len(prompts) == 0:
        raise InputError("similarity needs at least one prompt; pass probes or texts")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Probe):
            yield from (ids[mask] for ids, mask in zip(prompt.clean, prompt.attention_mask.bool(), strict=True))
            continue
        if model.tokenizer is None:
            raise InputError("similarity over texts needs a tokenizer; load the model with one or pass probes")
        ids = torch.tensor(model.tokenizer(prompt)["input_ids"], dtype=torch.long)
        if len(ids) == 0:
            raise InputError(f"text {index} is empty; give every text at least one token")
        yield ids


def _effects(model: LensModel, prompts: Prompts | HeadScores, verbose: bool) -> dict[str, HeadEffects]:
    """Probe label -> the effects that scores were made from, or direct effects (Eq. 10), measured here on the pairs that the model answers."""
    if isinstance(prompts, HeadScores):
        if prompts.model != model.info:
            raise InputError(f"the scores are of {prompts.model.id} and the model is {model.info.id}; pass scores of this very model")
        return all_probes(prompts.made_from)
    probes = [prompts] if isinstance(prompts, Probe) else prompts
    if not all(isinstance(probe, Probe) for probe in probes):
        raise InputError("functional similarity compares effects on answers; pass probes or HeadScores, not texts")
    effects = {label: activation_patch(model, probe, verbose=verbose) for label, probe in by_label(probes).items()}
    effects = {label: replace(effect, kept=effect.kept & effect.answered) for label, effect in effects.items()}
    return {label: effect for label, effect in effects.items() if effect.n_pairs}


def _profile_words(effects: Mapping[str, HeadEffects], whose: str) -> str:
    return f"correlation of {whose} ({next(iter(effects.values())).mode}) over {len(effects)} probes"
