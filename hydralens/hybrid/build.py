"""From a pretrained decoder and a head mask to the hybrid: every head starts from the rows it had."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydralens.errors import InputError
from hydralens.head_mask import HeadMask
from hydralens.hybrid.branches import Branch
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.hybrid.modeling import HydraHeadForCausalLM
from hydralens.hybrid.recipes import kinds_of, recipe_named
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel, wrap_model


def build_hybrid(
    model: LensModel | PreTrainedModel,
    mask: HeadMask | Bool[Tensor, "layer head"] | None = None,
    *,
    recipe: str = "hydrahead",
    kinds: Sequence[Sequence[str]] | None = None,
    calibration: Int[Tensor, "batch pos"] | None = None,
    **choices: Any,
) -> HydraHeadForCausalLM:
    """The head-wise hybrid of ``model``: heads in ``mask`` keep full attention, every other head becomes Gated DeltaNet (HydraHead).

    All weights come from the model: both kinds of heads start from their own rows of q, k and v (K and V of a group repeated by head for the linear
    ones), the output projection, MLPs, norms and embeddings are taken as they are. A hybrid needs training before it speaks.

    Args:
        mask: a ``HeadMask`` of this model, or True where a head stays full. A recipe of whole layers needs none.
        recipe: what the other heads become, and the choices that go with it: ``hydralens.hybrid.RECIPES``.
        kinds: ``[layer][head]``, the kind of every head (``HydraHeadConfig``), instead of a mask and a recipe.
        calibration: unpadded token ids on which the model's mean RMS of each head's output is measured; ``gamma`` starts there, so that the heads
            keep their relative strength behind the fusion norm. Without it gamma starts at 1.
        choices: fields of ``HydraHeadConfig``; they win over the recipe's.

    Returns:
        In the model's dtype and on its device, in evaluation mode; decay parameters and gamma in float32.

    Raises:
        InputError: the mask is another model's, the base family is not supported, a choice is unknown, or kinds are given beside a mask or a recipe.
    """
    lens = model if isinstance(model, LensModel) else wrap_model(model)
    if isinstance(mask, HeadMask):
        mask.check_model(lens.info)
        full = mask.to_query().array
    else:
        full = mask
        if full is not None and (full.shape != (lens.info.n_layers, lens.info.n_heads) or full.dtype != torch.bool):
            shape = [lens.info.n_layers, lens.info.n_heads]
            raise InputError(f"mask is {full.dtype} {list(full.shape)}, expected bool {shape}, True where a head stays full")
    if kinds is None:
        kinds = kinds_of(recipe, lens.info.n_layers, lens.info.n_heads, full)
    elif full is not None or recipe != "hydrahead":
        raise InputError(f"kinds says what every head is, and so does {'a mask' if full is not None else f'recipe {recipe!r}'}; give one of them")
    else:
        recipe = None
    base = lens.hf.config.to_dict()
    fields = set(HydraHeadConfig.__init__.__kwdefaults__)
    if unknown := sorted(set(choices) - fields):
        raise InputError(f"choice {unknown[0]!r} is unknown; a hybrid has {', '.join(sorted(fields))}")
    config = HydraHeadConfig(base=base, kinds=kinds, **(({} if recipe is None else recipe_named(recipe).choices) | choices))
    config.recipe = recipe
    config.mask = mask.model_dump(mode="json") if isinstance(mask, HeadMask) else None
    with torch.device(lens.device):
        hybrid = HydraHeadForCausalLM(config)
    _copy_weights(hybrid, lens.hf)
    strict = HydraHeadForCausalLM._keep_in_fp32_modules_strict
    for name, parameter in hybrid.named_parameters():
        if name.split(".")[-1] not in strict:
            parameter.data = parameter.data.to(lens.dtype)
    if calibration is not None and config.fusion_norm and config.norm_scope == "head":
        _start_gamma(hybrid, _head_rms(lens, calibration))
    hybrid.generation_config = lens.hf.generation_config
    return hybrid.eval()


@torch.no_grad()
def _copy_weights(hybrid: HydraHeadForCausalLM, teacher: PreTrainedModel) -> None:
    hybrid.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    hybrid.model.norm.load_state_dict(teacher.model.norm.state_dict())
    if not hybrid.config.tie_word_embeddings:
        hybrid.lm_head.load_state_dict(teacher.lm_head.state_dict())
    for own, source in zip(hybrid.model.layers, teacher.model.layers, strict=True):
        for part in ("input_layernorm", "post_attention_layernorm", "mlp"):
            getattr(own, part).load_state_dict(getattr(source, part).state_dict())
        own.self_attn.o_proj.load_state_dict(source.self_attn.o_proj.state_dict())
        for branch in own.self_attn.modules():
            if isinstance(branch, Branch):
                _copy_branch(branch, source.self_attn)


def _copy_branch(branch: Branch, teacher: nn.Module) -> None:
    for name, heads in (("q_proj", branch.heads), ("k_proj", branch.kv_heads), ("v_proj", branch.kv_heads)):
        own, source = getattr(branch, name), getattr(teacher, name)
        own.weight.copy_(_rows(source.weight, heads, branch.head_dim))
        if own.bias is not None:
            own.bias.copy_(_rows(source.bias, heads, branch.head_dim))
    for name in ("q_norm", "k_norm"):
        if getattr(branch, name) is not None:
            getattr(branch, name).load_state_dict(getattr(teacher, name).state_dict())


def _rows(weight: Float[Tensor, "head*d_head ..."], heads: Sequence[int], head_dim: int) -> Float[Tensor, "own*d_head ..."]:
    """Whole heads, one after the other: repeated by head, never by row, which would scramble keys."""
    return weight.unflatten(0, (-1, head_dim))[list(heads)].flatten(0, 1)


@torch.no_grad()
def _head_rms(model: LensModel, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "layer head"]:
    """Root mean square of every head's output z, averaged over tokens."""
    total = []
    for row in tokens.to(model.device):
        run = trace(model.anatomy, row[None], torch.arange(len(row), device=model.device), keep=("z",))
        total.append(torch.stack([z[0].float().square().mean(-1).sqrt().mean(0) for z in run.z]))
    return torch.stack(total).mean(0)


@torch.no_grad()
def _start_gamma(hybrid: HydraHeadForCausalLM, rms: Float[Tensor, "layer head"]) -> None:
    for layer, own in zip(hybrid.model.layers, rms, strict=True):
        layer.self_attn.fusion.gamma.copy_(own[:, None].expand_as(layer.self_attn.fusion.gamma))
