"""lm-evaluation-harness on a model that is already open, base or hybrid."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hydralens.errors import InputError
from hydralens.models.lens import LensModel


def harness(model: LensModel, tasks: Sequence[str], **options: Any) -> dict[str, dict[str, Any]]:
    """Results of lm-evaluation-harness, task -> metric -> value; its tasks are downloaded.

    Args:
        tasks: its own names, such as ``"arc_easy"`` or ``"ruler"``.
        options: of its ``simple_evaluate``, such as ``limit`` or ``num_fewshot``.

    Raises:
        InputError: it is not installed, or a task is unknown to it.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise InputError("this needs lm-evaluation-harness: pip install 'hydralens[eval]'") from None
    # A copy, because it is given a padding token.
    wrapped = HFLM(pretrained=model.hf, tokenizer=deepcopy(model.tokenizer), batch_size=options.pop("batch_size", 1))
    try:
        return simple_evaluate(model=wrapped, tasks=list(tasks), **options)["results"]
    except (KeyError, ValueError) as error:
        raise InputError(f"lm-evaluation-harness refuses tasks {', '.join(tasks)}: {str(error).strip().splitlines()[0]}") from None
