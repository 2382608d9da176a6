"""Patching of hybrids: z of full and linear heads against one forward a head, with hooks at the fusion's input."""

from contextlib import ExitStack

import pytest
import torch

import hydralens as hl
from hydralens.errors import InputError
from hydralens.hybrid.rivals import RIVALS
from hydralens.models.lens import wrap_model
from hydralens.patching.pairs import unpad
from tests.hybrid.examples import random_tokens, tiny_hybrid
from tests.patching.examples import random_probe

CHOICES = ({}, {"linear_conv": 4, "full_gate": "channel", "linear_gate": "head"}, {"norm_scope": "linear"}, {"fusion_norm": False, "full_gate": None})


@torch.no_grad()
def recorded(hybrid, tokens) -> tuple[list, list, torch.Tensor]:
    """z, what attention writes, and logits of a run."""
    z, written = [], []
    with ExitStack() as stack:
        for block in hybrid.model.layers:
            stack.callback(block.self_attn.z.register_forward_hook(lambda _, args, out: z.append(out)).remove)
            stack.callback(block.self_attn.register_forward_hook(lambda _, args, out: written.append(out)).remove)
        logits = hybrid(tokens[None]).logits[0]
    return z, written, logits


@torch.no_grad()
def slow(lens, probe, mode: str, direction: str, positions: str) -> torch.Tensor:
    """One full forward a pair and head."""
    hybrid, shape = lens.hf, (lens.info.n_layers, lens.info.n_heads)
    effects = torch.full((probe.n_pairs, *shape), torch.nan)
    for index in range(probe.n_pairs):
        pair = unpad(probe, index, lens.device)
        prompts = (pair.clean, pair.corrupt) if direction == "noise" else (pair.corrupt, pair.clean)
        (_, written, base), (source, _, other) = (recorded(hybrid, tokens) for tokens in prompts)
        where = pair.patched(positions)

        def metric(logits, pair=pair):
            answer, foil = (logits[pair.read].gather(-1, tokens[:, None])[:, 0] for tokens in (pair.answer, pair.foil))
            weights = 0.9 ** torch.arange(len(pair.read))
            return float((weights * (answer - foil)).sum())

        for layer, head in torch.cartesian_prod(*map(torch.arange, shape)).tolist():

            def patch(_, args, out, layer=layer, head=head, source=source, where=where):
                new = out.clone()
                new[:, where, head] = source[layer][:, where, head]
                return new

            with ExitStack() as stack:
                stack.callback(hybrid.model.layers[layer].self_attn.z.register_forward_hook(patch).remove)
                if mode == "direct":
                    for later in range(layer + 1, shape[0]):
                        stack.callback(hybrid.model.layers[later].self_attn.register_forward_hook(lambda _, args, out, w=written[later]: w).remove)
                patched = hybrid(prompts[0][None]).logits[0]
            span = (metric(base) - metric(other)) if direction == "noise" else (metric(other) - metric(base))
            change = metric(base) - metric(patched) if direction == "noise" else metric(patched) - metric(base)
            effects[index, layer, head] = change / span
    return effects


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("mode", "direction", "positions"), [("direct", "noise", "answer"), ("total", "denoise", "answer"), ("total", "noise", "suffix")])
def test_patching_equals_one_forward_a_head(choices, mode, direction, positions):
    hybrid, _ = tiny_hybrid("qwen3", **choices)
    lens = wrap_model(hybrid)
    probe = random_probe(n_pairs=2)
    found = hl.activation_patch(lens, probe, "z", mode, direction, positions)
    expected = slow(lens, probe, mode, direction, positions)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found.per_pair, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("kind", RIVALS)
def test_every_kind_of_head_can_be_patched(kind):
    hybrid, _ = tiny_hybrid("llama")
    kinds = [[kind if own == "gdn" else own for own in row] for row in hybrid.config.kinds]
    config = type(hybrid.config)(base=hybrid.config.base, kinds=kinds)
    lens = wrap_model(type(hybrid)(config))
    probe = random_probe(n_pairs=1)
    found = hl.activation_patch(lens, probe, "z", "total")
    torch.testing.assert_close(found.per_pair, slow(lens, probe, "total", "noise", "answer"), atol=1e-3, rtol=1e-3)


def test_ablating_a_head_takes_its_output_away():
    hybrid, _ = tiny_hybrid()
    lens = wrap_model(hybrid)
    tokens = random_tokens(1, 20)
    with hl.ablate(lens, [(1, 3)], how="zero"):
        z, _, ablated = recorded(hybrid, tokens[0])
    assert not z[1][:, :, 3].any() and z[1][:, :, 2].any()
    assert not torch.allclose(ablated, hybrid(tokens).logits[0])
    drop = hl.detectors.ablation_drop_effects(lens, random_probe(n_pairs=1), metric="log-probability")
    assert drop.per_pair.isfinite().all()


def test_similarity_and_what_a_hybrid_cannot_be_asked():
    hybrid, _ = tiny_hybrid()
    lens = wrap_model(hybrid)
    probe = random_probe(n_pairs=1)
    assert hl.head_similarity(lens, [probe], metric="z").matrix.shape == (16, 16)
    for ask in (
        lambda: hl.activation_patch(lens, probe, "q"),
        lambda: hl.path_patch(lens, probe, [(2, 1)]),
        lambda: hl.attribution_patch(lens, probe, "z"),
        lambda: hl.detectors.attention_mass(lens, [probe]),
        lambda: hl.head_similarity(lens, [probe], metric="write"),
    ):
        with pytest.raises(InputError, match="of a hybrid, z can be patched"):
            ask()


def test_hybrids_of_the_same_weights_that_differ_in_a_choice_are_two_models(tmp_path):
    hybrid, lens = tiny_hybrid()
    own, other = (wrap_model(tiny_hybrid(full_rope=rope)[0]) for rope in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(own.hf.parameters(), other.hf.parameters(), strict=True))
    hybrid.save_pretrained(tmp_path)
    assert own.info.fingerprint != other.info.fingerprint and own.info.fingerprint == hl.load_model(tmp_path).info.fingerprint
    assert own.info.fingerprint == wrap_model(hybrid).info.fingerprint != lens.info.fingerprint


@pytest.mark.parametrize("backend", ["transformer_lens", "nnsight"])
def test_other_libraries_would_patch_another_site(backend):
    hybrid, _ = tiny_hybrid()
    with pytest.raises(InputError, match="does not know where z of a hybrid is"):
        hl.activation_patch(wrap_model(hybrid), random_probe(n_pairs=1), backend=backend)


def test_a_saved_hybrid_is_opened_and_scored_like_any_model(tmp_path):
    hybrid, _ = tiny_hybrid()
    hybrid.save_pretrained(tmp_path)
    lens = hl.load_model(tmp_path)
    assert lens.anatomy.family == "hydrahead" and lens.info.n_heads == 4
    torch.testing.assert_close(lens.hf(random_tokens(1, 9)).logits, hybrid(random_tokens(1, 9)).logits)
