"""The three stages on a tiny model: what they lower, what they leave, and that neither kills nor ranks change the curve."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from transformers import AutoModelForCausalLM

import hydralens as hl
from hydralens.errors import InputError
from hydralens.head_mask import HeadMask
from hydralens.hybrid import branches
from hydralens.transfer import align, learn, loop
from hydralens.transfer.config import TransferConfig, read_config
from hydralens.transfer.pipeline import transfer
from tests.planted import word_tokenizer

STEPS = {"tokens": 8 * 32 * 8, "length": 32, "rows": 8, "warmup": 2, "checkpoint_every": 3}
ALIGN, DISTIL = STEPS | {"lr": 3e-3}, STEPS | {"lr": 3e-3, "final_lr": 1e-3}
FINETUNE = {"tokens": 4 * 64 * 4, "length": 64, "rows": 4, "lr": 1e-3, "kl": 0.5}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny tied base model, a mask of it and text."""
    place = tmp_path_factory.mktemp("transfer")
    tokenizer = word_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=True, initializer_range=0.2, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    full = torch.zeros(3, 4, dtype=torch.bool)
    full[0, 1] = full[1, 0] = full[2, 3] = True
    HeadMask.of(full, hl.load_model(place / "base").info, rule="by hand").save(place / "mask.json")
    (place / "text").mkdir()
    for index in range(20):
        (place / "text" / f"{index}.txt").write_text("the boat and the map went to the old clock near the window . " * (5 + index))
    return place


def settings(place, out, **stages) -> TransferConfig:
    model = {"base": str(place / "base"), "mask": place / "mask.json"}
    data = {"text": place / "text", "synthetic": 0.0, "held_out": 0.3}
    return TransferConfig.model_validate({"out": out, "model": model, "data": data, "device": "cpu"} | stages)


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_three_stages_lower_their_losses_and_leave_models(place, tmp_path):
    found = transfer(settings(place, tmp_path, align=ALIGN, distil=DISTIL, finetune=FINETUNE))
    assert found == tmp_path / "finetune" / "model"
    aligned = log(tmp_path / "align")
    assert [line["step"] for line in aligned] == list(range(8)) and aligned[-1]["loss"] < 0.6 * aligned[0]["loss"]
    assert all(last < first for first, last in zip(aligned[0]["layers"], aligned[-1]["layers"], strict=True))
    held_out = json.loads((tmp_path / "held_out.json").read_text())
    assert held_out["after distil"]["kl"] < 0.8 * held_out["before distil"]["kl"]
    assert held_out["after finetune"]["cross_entropy"] < held_out["before finetune"]["cross_entropy"]
    lines = (tmp_path / "align" / "head_errors.csv").read_text().splitlines()
    assert lines[0] == "layer,head,full,linear" and len(lines) == 1 + 12
    lens = hl.load_model(found)
    assert lens.anatomy.family == "hydrahead" and lens.tokenizer is not None and lens.hf.lm_head.weight is lens.hf.model.embed_tokens.weight
    assert lens.hf.config.kinds[0] == ["gdn", "full", "gdn", "gdn"]
    assert not [path for path in tmp_path.rglob("step-*")] and not [path for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("recipe", ["hydrahead", "duo"])
def test_picked_heads_are_the_banks(recipe, place, tmp_path):
    """Fed with the same states, a head of the picked hybrid gives what it gives in the hybrid where all heads are of its kind."""
    model = {
        "base": str(place / "base"),
        "mask": place / "mask.json",
        "recipe": recipe,
        "choices": {} if recipe == "hydrahead" else {"window_size": 4, "sinks": 1},
    }
    found = transfer(settings(place, tmp_path, align=ALIGN, model=model))
    picked, *banks = (AutoModelForCausalLM.from_pretrained(tmp_path / "align" / name, dtype=torch.float32) for name in ("model", "full", "linear"))
    assert found == tmp_path / "align" / "model"
    x = torch.randn(1, 20, 32)
    tokens = picked.model.tokens(x)
    for own, *others in zip(picked.model.layers, *(bank.model.layers for bank in banks), strict=True):
        z, full, linear = (layer.self_attn.fuse(layer.self_attn.mix(x, tokens, None), x) for layer in (own, *others))
        kept = list(own.self_attn.branches["full"].heads)
        rest = [head for head in range(4) if head not in kept]
        torch.testing.assert_close(z[:, :, kept], full[:, :, kept])
        torch.testing.assert_close(z[:, :, rest], linear[:, :, rest])
        assert (full - linear).abs().max() > 1e-2


def test_a_bank_of_another_run_is_taken_without_training(place, tmp_path):
    transfer(settings(place, tmp_path / "first", align=ALIGN))
    transfer(settings(place, tmp_path / "second", align=ALIGN | {"bank": str(tmp_path / "first" / "align")}))
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "align" / "model").state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[key], second[key]) for key in first) and not (tmp_path / "second" / "align" / "log.jsonl").exists()
    with pytest.raises(InputError, match="holds no folders full and linear"):
        transfer(settings(place, tmp_path / "third", align=ALIGN | {"bank": str(tmp_path)}))


def test_the_papers_own_alignment(place, tmp_path):
    transfer(settings(place, tmp_path, align=ALIGN | {"shared": False}))
    lines = log(tmp_path / "align")
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"] and not (tmp_path / "align" / "full").exists()


@pytest.mark.parametrize("stage", ["align", "distil"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(stage, place, tmp_path, monkeypatch):
    stages = {stage: {"align": ALIGN, "distil": DISTIL}[stage]}
    transfer(settings(place, tmp_path / "whole", **stages))
    calls, batch = [], loop.Rows.batch

    def until_killed(rows, step, *args):
        calls.append(step)
        if step == 5:
            raise KeyboardInterrupt
        return batch(rows, step, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Rows, "batch", until_killed)
        transfer(settings(place, tmp_path / "killed", **stages))
    assert [path.name for path in loop.checkpoints(tmp_path / "killed" / stage)] == ["step-3"]
    assert len(log(tmp_path / "killed" / stage)) == 5
    transfer(settings(place, tmp_path / "killed", **stages))
    whole, killed = log(tmp_path / "whole" / stage), log(tmp_path / "killed" / stage)
    assert [{**a, "tokens_per_s": 0} for a in whole] == [{**b, "tokens_per_s": 0} for b in killed]
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name / stage / "model").state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_two_processes_and_micro_batches_give_the_curve_of_one(place, tmp_path):
    # At a small learning rate, so that rounding is not blown up by Adam's first steps.
    stages = {"align": ALIGN | {"lr": 1e-4}, "distil": DISTIL | {"lr": 1e-4, "final_lr": 1e-5}}
    transfer(settings(place, tmp_path / "one", **stages))
    transfer(settings(place, tmp_path / "micro", align=stages["align"] | {"micro_rows": 2}, distil=stages["distil"] | {"micro_rows": 4}))
    two = settings(place, tmp_path / "two", **stages).model_dump(mode="json", exclude_none=True)
    (tmp_path / "two.json").write_text(json.dumps(two))
    program = (
        "import json, sys; from pathlib import Path; from hydralens.transfer.config import TransferConfig; from hydralens.transfer.pipeline import transfer;"
        f"transfer(TransferConfig.model_validate(json.loads(Path({str(tmp_path / 'two.json')!r}).read_text())))"
    )
    (tmp_path / "two.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "two.py")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("micro", "two"):
        for stage in stages:
            for one, other in zip(log(tmp_path / "one" / stage), log(tmp_path / name / stage), strict=True):
                assert other["loss"] == pytest.approx(one["loss"], rel=1e-5) and other["lr"] == one["lr"] and other["tokens"] == one["tokens"]
                # The first gradient is of equal weights; later ones are of weights that Adam has moved by rounding's signs.
                assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if one["step"] == 0 else 1e-3), (name, stage)


PROGRAM = """
import json, sys
from pathlib import Path
from hydralens.transfer import loop
from hydralens.transfer.config import TransferConfig
from hydralens.transfer.pipeline import transfer

batch, stop = loop.Rows.batch, int(sys.argv[2])

def until_stopped(rows, step, *rest):
    if step == stop:
        raise SystemExit(3)
    return batch(rows, step, *rest)

loop.Rows.batch = until_stopped
transfer(TransferConfig.model_validate(json.loads(Path(sys.argv[1]).read_text())))
"""


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_checkpoints_of_some_ranks_resume_on_others(ranks, place, tmp_path):
    stages = {"distil": DISTIL | {"lr": 1e-4, "final_lr": 1e-5}}
    transfer(settings(place, tmp_path / "whole", **stages))
    (tmp_path / "a.py").write_text(PROGRAM)
    (tmp_path / "a.json").write_text(json.dumps(settings(place, tmp_path / "moved", **stages).model_dump(mode="json", exclude_none=True)))
    for n, stop, expected in ((ranks[0], 5, False), (ranks[1], 10**9, True)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(tmp_path / "a.py"), str(tmp_path / "a.json")]
        done = subprocess.run([*command, str(stop)], env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
        assert (done.returncode == 0) == expected, done.stderr[-2000:]
        assert (tmp_path / "moved" / "distil" / "step-3").exists() != expected
    for whole, moved in zip(log(tmp_path / "whole" / "distil"), log(tmp_path / "moved" / "distil"), strict=True):
        assert moved["loss"] == pytest.approx(whole["loss"], rel=1e-5) and moved["step"] == whole["step"]


def test_gradients_of_two_halves_add_up_to_the_whole(place):
    """What a rank does with its part: sums over tokens, scaled by the weight of all."""
    from hydralens.ranks import all_ranks
    from hydralens.transfer.config import DistilPart
    from hydralens.transfer.corpus import from_files
    from hydralens.transfer.rows import Rows

    lens = hl.load_model(place / "base")
    rows = Rows(from_files(place / "text", lens.tokenizer), 32)
    gradients = []
    with all_ranks("cpu") as ranks:
        for parts in (1, 2):
            hybrid = hl.build_hybrid(lens, HeadMask.load(place / "mask.json"))
            learner = learn.Learner(hybrid, lens, DistilPart(), ranks)
            run, weigh = learn.learned(learner, ranks)
            batches = [rows.batch(0, 4, part, parts) for part in range(parts)]
            weight = sum(weigh(batch) for batch in batches)
            for batch in batches:
                run(batch, 1 / weight)
            gradients.append([parameter.grad.full_tensor() for parameter in learner.parameters()])
    for whole, halves in zip(*gradients, strict=True):
        torch.testing.assert_close(halves, whole, atol=1e-6, rtol=1e-4)


def test_decay_stays_in_float32_under_autocast(place, monkeypatch):
    seen, rule = [], branches.delta_rule
    monkeypatch.setattr(branches, "delta_rule", lambda q, k, v, log_decay, beta, **rest: seen.append(log_decay) or rule(q, k, v, log_decay, beta, **rest))
    hybrid = hl.build_hybrid(hl.load_model(place / "base"), HeadMask.load(place / "mask.json"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hybrid(torch.arange(6)[None])
    assert len(seen) == 3 and {x.dtype for x in seen} == {torch.float32}
    slowest = -hybrid.model.layers[0].self_attn.branches["gdn"].dt_bias[0].exp().log1p()
    torch.testing.assert_close(seen[0][0, 0, 0], slowest, rtol=1e-6, atol=0)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(place, tmp_path, monkeypatch):
    held = learn.distillation_loss
    monkeypatch.setattr(learn, "distillation_loss", lambda *a, **k: held(*a, **k) * (torch.nan if (tmp_path / "distil" / "step-3").exists() else 1))
    with pytest.raises(InputError, match=r"distil: loss nan and gradient nan at step 3; lower lr or clip. .*step-3 is the last good checkpoint"):
        transfer(settings(place, tmp_path, distil=DISTIL))
    assert (tmp_path / "distil" / "step-3" / "step.json").exists()


def test_a_full_disk_keeps_the_checkpoint_before(place, tmp_path, monkeypatch):
    save = dcp.save

    def full(state, checkpoint_id):
        if "step-6" in checkpoint_id.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, checkpoint_id=checkpoint_id)

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"cannot write the checkpoint .*step-6: .*No space left on device"):
        patch.setattr(dcp, "save", full)
        transfer(settings(place, tmp_path, align=ALIGN))
    assert [path.name for path in (tmp_path / "align").iterdir() if path.is_dir()] == ["step-3"]
    transfer(settings(place, tmp_path, align=ALIGN))
    assert (tmp_path / "align" / "model").exists()


def test_other_settings_need_another_folder(place, tmp_path):
    transfer(settings(place, tmp_path, align=ALIGN))
    with pytest.raises(InputError, match=r"was begun with other settings \(\[align\]\)"):
        transfer(settings(place, tmp_path, align=ALIGN | {"lr": 1e-4}))


def test_recomputing_activations_changes_nothing(place, tmp_path):
    for name, recompute in (("kept", False), ("again", True)):
        transfer(settings(place, tmp_path / name, distil=DISTIL | {"recompute": recompute, "tokens": 1024}))
    for one, other in zip(log(tmp_path / "kept" / "distil"), log(tmp_path / "again" / "distil"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("out = 1 =", "is not TOML"),
        ('out = "x"\n[data]\ntext = "t"', "no stage: give"),
        ('out = "x"\n[data]\ntext = "t"\n[align]\nsteps = 3', "align.steps: Extra inputs are not permitted"),
        ('out = "x"\n[data]\ntext = "t"\nhub = "h"\n[align]\n', "data: give one of text, hub and sampled_tokens, got text and hub"),
        ('out = "x"\n[data]\ntext = "t"\n[distil]\nlr = -1', "distil.lr: Input should be greater than 0, got -1"),
        ('out = "x"\n[data]\ntext = "t"\n[distil]\nkl = 0', "distil: kl and cross_entropy are both 0"),
        ('[data]\ntext = "t"\n[align]', "out: Field required"),
    ],
)
def test_wrong_settings_are_named(text, said, tmp_path):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        read_config(tmp_path / "a.toml")


def test_rows_that_cannot_be_shared_out(place, tmp_path):
    with pytest.raises(InputError, match="8 rows a step do not divide among 1 ranks in micro-batches of 3"):
        transfer(settings(place, tmp_path, align=ALIGN | {"micro_rows": 3}))


def test_head_energy_is_what_a_head_adds_to_the_residual_stream():
    z, weight = torch.randn(1, 5, 3, 4), torch.randn(12, 7)
    gram = torch.einsum("hdm,hem->hde", weight.unflatten(0, (3, 4)), weight.unflatten(0, (3, 4)))
    slow = torch.stack([(z[0, :, head] @ weight[4 * head : 4 * head + 4]).square().sum() for head in range(3)])
    torch.testing.assert_close(align.head_energy(z, gram), slow)


@pytest.mark.parametrize("name", ["embedded-cpu", "embedded-one-gpu", "qwen3-1.7b-8-gpus"])
def test_the_examples_are_whole(name):
    config = read_config(f"examples/{name}.toml")
    assert config.align and config.distil and config.finetune and config.align.steps > 1


@pytest.mark.parametrize(("recipe", "said"), [("liger", r"window\+gla has two"), ("hypenet", "norm_scope 'linear' mixes heads")])
def test_heads_that_cannot_be_picked_are_refused_before_training(recipe, said, place, tmp_path):
    model = {"base": str(place / "base"), "mask": place / "mask.json", "recipe": recipe}
    with pytest.raises(InputError, match=said):
        transfer(settings(place, tmp_path, align=ALIGN, model=model))
