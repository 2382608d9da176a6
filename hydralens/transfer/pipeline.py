"""``transfer``: three stages in order, each reading a hybrid and leaving one. What is finished is not done again."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hydralens.environment import environment
from hydralens.errors import InputError
from hydralens.files import read_json, write_atomically, write_json
from hydralens.head_mask import HeadMask
from hydralens.hybrid import HydraHeadForCausalLM, build_hybrid
from hydralens.models.lens import LensModel
from hydralens.models.loading import load_model
from hydralens.ranks import Ranks, all_ranks
from hydralens.transfer import corpus as corpora
from hydralens.transfer.align import Aligners, aligned, every_head, head_errors, pick
from hydralens.transfer.config import AlignPart, LearnPart, Stage, TransferConfig
from hydralens.transfer.learn import Learner, held_out_losses, learned
from hydralens.transfer.loop import drop_checkpoints, train
from hydralens.transfer.rows import Rows

HELD_OUT_ROWS = 16  # at most
BANKS = ("full", "linear")  # every head of the base model as one, and as the other


def transfer(config: TransferConfig, *, verbose: bool = False) -> Path:
    """Run the stages of ``config`` and return the folder of the last one's hybrid, which ``load_model`` and transformers open.

    Under ``torchrun`` all ranks call this; the result does not depend on how many there are, but for rounding. A killed run goes on at its last
    checkpoint when it is called again with the same settings.

    ``config.out`` holds for each stage ``STAGE/log.jsonl`` (a line a step), ``STAGE/model/``, checkpoints while it runs; ``held_out.json`` (losses
    on held-out text before and after each stage), and of a shared alignment ``align/full/``, ``align/linear/`` and ``align/head_errors.csv``.

    Raises:
        InputError: wrong settings or data, settings other than those ``config.out`` was begun with, a loss that is not finite, a full disk.
    """
    with all_ranks(config.device) as ranks:
        torch.manual_seed(config.seed)
        teacher = load_model(config.model.base, device=str(ranks.device), dtype=config.dtype)
        if ranks.first:
            _begin(config, teacher)
        ranks.wait()
        mask = None if config.model.mask is None else HeadMask.load(config.model.mask)
        text, held_out = _corpus(config, teacher, ranks, verbose).held_out(config.data.held_out)

        def build(array: torch.Tensor | HeadMask | None) -> HydraHeadForCausalLM:
            rows = Rows(held_out, _shortest(config), config.seed)
            calibration = rows.batch(0, min(4, rows.per_epoch)).tokens.reshape(-1, rows.length)
            return build_hybrid(teacher, array, recipe=config.model.recipe, calibration=calibration, **config.model.choices).float()

        hybrid = build(mask)
        last = None
        if config.align is not None:
            last = _align(config, config.align, teacher, hybrid, build, text, held_out, ranks, verbose)
        for name in ("distil", "finetune"):
            part = getattr(config, name)
            if part is not None:
                last = _learn(config, name, part, teacher, hybrid, text, held_out, ranks, verbose)
        return last


def _begin(config: TransferConfig, teacher: LensModel) -> None:
    """Note the settings, or check that they are those the folder was begun with."""
    path, settings = config.out / "transfer.json", config.model_dump(mode="json", exclude={"out", "device"})
    if path.exists():
        before = read_json(path)["settings"]
        if before != settings:
            changed = next(key for key in settings if before.get(key) != settings[key])
            raise InputError(f"{config.out} was begun with other settings ([{changed}]); use another out, or the settings in {path}")
        return
    write_json(path, {"settings": settings, "model": teacher.info.model_dump(mode="json")} | environment(teacher))


def _shortest(config: TransferConfig) -> int:
    return min(part.length for part in (config.align, config.distil, config.finetune) if part is not None)


def _corpus(config: TransferConfig, teacher: LensModel, ranks: Ranks, verbose: bool) -> corpora.Corpus:
    """Made by the first rank and found by the others."""
    data = config.data

    def make() -> corpora.Corpus:
        if data.text is not None:
            return corpora.from_files(data.text, teacher.tokenizer, column=data.column, verbose=verbose and ranks.first)
        if data.hub is not None:
            about = {"subset": data.subset, "revision": data.revision, "column": data.column}
            return corpora.from_hub(data.hub, teacher.tokenizer, data.max_tokens, **about, verbose=verbose and ranks.first)
        return corpora.sampled(teacher, data.sampled_tokens, config.seed, verbose=verbose and ranks.first)

    corpus = make() if ranks.first else None
    ranks.wait()
    return corpus or make()


def _rows(config: TransferConfig, text: corpora.Corpus, part: Stage) -> Rows:
    return Rows(text, part.length, config.seed, config.data.synthetic, config.data.answer_weight)


def _align(
    config: TransferConfig,
    part: AlignPart,
    teacher: LensModel,
    hybrid: HydraHeadForCausalLM,
    build: Callable[..., HydraHeadForCausalLM],
    text: corpora.Corpus,
    held_out: corpora.Corpus,
    ranks: Ranks,
    verbose: bool,
) -> Path:
    """The hybrid after stage 1."""
    folder = config.out / "align"
    if (folder / "model").exists():
        return _load(folder / "model", hybrid)
    full, kinds = every_head(hybrid)
    if part.shared and len(kinds) > 1:
        raise InputError(
            f"a shared alignment trains every head as a full and as one other kind, this hybrid has {', '.join(sorted(kinds))}; set align.shared = false"
        )
    if part.shared and any("+" in kind for kind in kinds):
        raise InputError(f"a shared alignment picks heads of one mixer, and {', '.join(sorted(kinds))} has two; set align.shared = false")
    if part.shared and hybrid.config.fusion_norm and hybrid.config.norm_scope != "head":
        raise InputError("a shared alignment needs a norm a head: norm_scope 'linear' mixes heads; set align.shared = false")
    if not part.shared:
        _run_alignment(config, part, teacher, [hybrid], False, folder, text, ranks, verbose)
        _export(folder / "model", hybrid, teacher, ranks)
        drop_checkpoints(folder, ranks)
        return folder / "model"
    source = part.bank or folder
    found = all((source / name).exists() for name in BANKS)
    if part.bank is not None and not found:
        raise InputError(f"align.bank: {part.bank} holds no folders {' and '.join(BANKS)}; give the folder align of an earlier shared run")
    if not found:
        trained = [build(torch.full_like(full, name == "full")) for name in BANKS]
        aligners = _run_alignment(config, part, teacher, trained, True, folder, text, ranks, verbose)
        errors = head_errors(aligners, teacher, Rows(held_out, part.length, config.seed), BANKS, ranks)
        if ranks.first:
            write_atomically(folder / "head_errors.csv", lambda path: errors.to_csv(path, index=False, float_format="%.5g"))
        for name, bank in zip(BANKS, trained, strict=True):
            _export(folder / name, bank, teacher, ranks)
    banks = {name: build(torch.full_like(full, name == "full")) for name in BANKS}
    for name, bank in banks.items():
        _load(source / name, bank)
    pick(hybrid, {"full": banks["full"]} | {kind: banks["linear"] for kind in kinds})
    _export(folder / "model", hybrid, teacher, ranks)
    drop_checkpoints(folder, ranks)
    return folder / "model"


def _run_alignment(
    config: TransferConfig,
    part: AlignPart,
    teacher: LensModel,
    hybrids: list[HydraHeadForCausalLM],
    per_head: bool,
    folder: Path,
    text: corpora.Corpus,
    ranks: Ranks,
    verbose: bool,
) -> Aligners:
    aligners = Aligners(hybrids, per_head, ranks)
    rows = _rows(config, text, part)
    run, weigh = aligned(aligners, teacher, rows, part, ranks)
    n_trained = sum(p.numel() for p in aligners.parameters() if p.requires_grad)
    flops = 6.0 * n_trained + 2.0 * _size(teacher.hf)
    train("align", part, aligners, rows, run, weigh, folder, ranks, flops_per_token=flops, tensorboard=config.tensorboard, verbose=verbose)
    return aligners


def _learn(
    config: TransferConfig,
    name: str,
    part: LearnPart,
    teacher: LensModel,
    hybrid: HydraHeadForCausalLM,
    text: corpora.Corpus,
    held_out: corpora.Corpus,
    ranks: Ranks,
    verbose: bool,
) -> Path:
    """The hybrid after stage 2 or 3; ``hybrid`` itself is trained."""
    folder = config.out / name
    if (folder / "model").exists():
        return _load(folder / "model", hybrid)
    rows, unseen = _rows(config, text, part), Rows(held_out, part.length, config.seed)
    batch = unseen.batch(0, min(HELD_OUT_ROWS, unseen.per_epoch)).to(ranks.device)
    trained = HydraHeadForCausalLM(hybrid.config).to(ranks.device)
    trained.load_state_dict(hybrid.state_dict())
    learner = Learner(trained, teacher, part, ranks)
    if not (folder / "log.jsonl").exists():
        _note(config, ranks, f"before {name}", held_out_losses(learner, batch))
    run, weigh = learned(learner, ranks)
    flops = 6.0 * _size(trained) * (4 / 3 if part.recompute else 1) + (2.0 * _size(teacher.hf) if part.kl else 0.0)
    train(name, part, learner, rows, run, weigh, folder, ranks, flops_per_token=flops, tensorboard=config.tensorboard, verbose=verbose)
    _note(config, ranks, f"after {name}", held_out_losses(learner, batch))
    _export(folder / "model", trained, teacher, ranks)
    drop_checkpoints(folder, ranks)
    return _load(folder / "model", hybrid)


def _size(module: nn.Module) -> int:
    """Parameters that a token is multiplied with; an embedding that is not also the output head is only looked up."""
    return sum(p.numel() for p in module.parameters()) - (0 if module.config.tie_word_embeddings else module.get_input_embeddings().weight.numel())


def _note(config: TransferConfig, ranks: Ranks, when: str, losses: dict[str, float]) -> None:
    if ranks.first:
        path = config.out / "held_out.json"
        write_json(path, (read_json(path) if path.exists() else {}) | {when: losses})


def _export(folder: Path, hybrid: HydraHeadForCausalLM, teacher: LensModel, ranks: Ranks) -> None:
    """Save the whole hybrid, pieced together from all ranks, as a transformers model; whole or not at all."""
    state: dict[str, Any] = get_model_state_dict(hybrid, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ranks.first:
        whole = HydraHeadForCausalLM(hybrid.config)
        whole.load_state_dict(state)
        temporary = folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            whole.save_pretrained(temporary)
            if teacher.tokenizer is not None:
                teacher.tokenizer.save_pretrained(temporary)
            temporary.rename(folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise InputError(f"cannot write {folder}: {error.strerror or error}; make room and start again, the checkpoint is kept") from None
    ranks.wait()


def _load(folder: Path, hybrid: HydraHeadForCausalLM) -> Path:
    """Put a saved hybrid's weights into ``hybrid``."""
    try:
        hybrid.load_state_dict(HydraHeadForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    except (RuntimeError, OSError) as error:
        raise InputError(f"{folder} does not fit this hybrid: {str(error).strip().splitlines()[0]}; it was made with other choices, base or mask") from None
    return folder
