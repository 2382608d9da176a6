"""``LensModel``: a pretrained model with its tokenizer and its anatomy."""

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from hydralens.errors import InputError, UnsupportedModelError
from hydralens.models import adapters
from hydralens.models.anatomy import Anatomy, read_anatomy
from hydralens.models.forward import Attention, trace
from hydralens.models.info import ModelInfo

if TYPE_CHECKING:
    from nnsight.intervention.envoy import Envoy
    from transformer_lens import TransformerBridge


@dataclass(frozen=True, eq=False)
class LensModel:
    """What ``load_model`` returns.

    Attributes:
        hf: the transformers model, in eval mode, unchanged.
        tokenizer: its tokenizer; ``None`` if the model was given without one (probes must then be built by hand).
        anatomy: where every site is.
        info: identity and shape, as written into files.
    """

    hf: PreTrainedModel
    tokenizer: Any
    anatomy: Anatomy
    info: ModelInfo

    @property
    def device(self) -> torch.device:
        return self.hf.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.get_input_embeddings().weight.dtype

    def __repr__(self) -> str:
        i = self.info
        shape = f"{i.n_layers} layers x {i.n_heads} heads ({i.n_kv_heads} KV, head_dim {i.head_dim})"
        return f"LensModel({i.id}, {self.anatomy.family}, {shape}, {self.dtype}, {self.device})"

    def kv_heads(self, heads: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The KV heads ``(layer, kv_head)`` that the given query heads read, each once."""
        return sorted({(layer, head // self.info.group) for layer, head in heads})

    @torch.no_grad()
    def read_logits(
        self,
        tokens: Int[Tensor, "pair pos"],
        attention_mask: Int[Tensor, "pair pos"],
        read_positions: Int[Tensor, "pair n"],
        attention: Attention | None = None,
    ) -> Float[Tensor, "pair n vocab"]:
        """Logits at chosen columns, float32 on the CPU; padding on either side never changes a number.

        Padded entries of ``read_positions`` (negative) give NaN; ``attention`` replaces the model's own, as in ``trace``.
        """
        rows = []
        for ids, mask, read in zip(tokens, attention_mask.bool(), read_positions, strict=True):
            wanted = read >= 0
            column = (mask.cumsum(0) - 1)[read[wanted]]
            run = trace(self.anatomy, ids[mask][None].to(self.device), column.to(self.device), attention=attention)
            logits = self.anatomy.logits(run.final[0]).float().cpu()
            rows.append(torch.full((len(read), logits.shape[-1]), torch.nan).masked_scatter_(wanted[:, None], logits))
        return torch.stack(rows)

    def to_transformer_lens(self) -> "TransformerBridge":
        """A TransformerLens ``TransformerBridge`` on the same weights (not copied), raw, with eager attention; this model stays as it is.

        Raises:
            InputError: TransformerLens is not installed.
        """
        return adapters.to_transformer_lens(self)

    def to_nnsight(self) -> "Envoy":
        """An nnsight ``TransformersModel`` on the same weights (not copied), or a plain ``NNsight`` without tokenizer; this model stays as it is.

        Raises:
            InputError: nnsight is not installed.
        """
        return adapters.to_nnsight(self)

    def warn_of_bypassed_hooks(self) -> None:
        """Warn of forward hooks on modules whose forward the engine replaces: their effect would silently be missing."""
        hooked = [type(module).__name__ for module in self.anatomy.bypassed if module._forward_hooks or module._forward_pre_hooks]
        if hooked:
            names = ", ".join(sorted(set(hooked)))
            warnings.warn(f"hooks on {names} are not seen by the engine; put them on q_proj, k_proj, v_proj, o_proj, norms or MLPs", stacklevel=3)


def wrap_model(hf: PreTrainedModel, tokenizer: Any = None, *, id: str | None = None, revision: str | None = None) -> LensModel:
    """Read the anatomy of a live model, check that the engine's forward gives the model's own logits, and wrap it.

    Raises:
        UnsupportedModelError: the family is not supported, a shape is unexpected, or the logits disagree.
    """
    devices = set(map(str, (getattr(hf, "hf_device_map", None) or {}).values()))
    if len(devices) > 1:
        raise InputError(f"the model is spread over {', '.join(sorted(devices))}; load it on one device")
    hf.eval()
    anatomy = read_anatomy(hf)
    info = ModelInfo(
        id=id or hf.config._name_or_path or type(hf).__name__,
        revision=revision,
        fingerprint=fingerprint(hf),
        n_layers=anatomy.n_layers,
        n_heads=anatomy.n_heads,
        n_kv_heads=anatomy.n_kv_heads,
        head_dim=anatomy.head_dim,
    )
    _check_forward(hf, anatomy)
    return LensModel(hf, tokenizer, anatomy, info)


@torch.no_grad()
def _check_forward(hf: PreTrainedModel, anatomy: Anatomy) -> None:
    """One short run through transformers and through the engine; all later work trusts that they agree."""
    device = hf.get_input_embeddings().weight.device
    tokens = torch.randint(hf.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    theirs = hf(input_ids=tokens, use_cache=False).logits.float()
    ours = anatomy.logits(trace(anatomy, tokens, torch.arange(16, device=device)).final).float()
    error = float((ours - theirs).norm() / theirs.norm())
    tolerance = 0.05 if hf.dtype in (torch.float16, torch.bfloat16) else 1e-4
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{anatomy.family}: the engine's logits differ from the model's by {error:.1e} (relative); this variant of the family is not supported"
        )


def fingerprint(hf: PreTrainedModel) -> str:
    """Digest of the weights: every parameter's name and shape and up to 4,096 evenly spaced values, rounded to bfloat16.

    The rounding makes a checkpoint opened in float32 and in bfloat16 the same model. Of a hybrid its choices belong to it: window, positions, scale.
    """
    digest = hashlib.sha256(getattr(hf, "lens_choices", "").encode())
    for name, parameter in sorted(hf.named_parameters()):
        values = parameter.detach().flatten()
        sample = values[:: max(1, values.numel() // 4096)][:4096].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
