"""Every recipe as a model, and every kind of head against its recurrence written from the paper, one token at a time."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hydralens.errors import InputError
from hydralens.hybrid import RECIPES, HybridCache, build_hybrid, published_mask
from hydralens.hybrid.config import KINDS
from hydralens.hybrid.modeling import BRANCHES
from hydralens.hybrid.recipes import NOT_BUILT, PUBLISHED, every
from hydralens.models.lens import wrap_model
from tests.hybrid.examples import mixed, random_tokens, tiny_hybrid
from tests.hybrid.test_hybrid import close
from tests.tiny import tiny_hf

SMALL = {"window_size": 5, "sinks": 2}


def of_recipe(name: str, family: str = "qwen3"):
    lens = wrap_model(tiny_hf(family))
    needs = RECIPES[name].full_layers is None or not RECIPES[name].full_layers(4)
    hybrid = build_hybrid(lens, mixed(lens.info.n_layers, lens.info.n_heads) if needs else None, recipe=name, **(SMALL if name == "duo" else {}))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in hybrid.named_parameters():
            if not any(part in parameter_name for part in ("embed", "mlp", "norm", "o_proj", "q_proj", "k_proj", "v_proj", "lm_head")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return hybrid


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_backward_generates_saves_and_reloads(name, tmp_path):
    hybrid, tokens = of_recipe(name), random_tokens(2, 20)
    hybrid(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in hybrid.parameters())
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(hybrid.generate(tokens, **greedy), hybrid.generate(tokens, **greedy, use_cache=False))
    hybrid.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.recipe == name and torch.equal(again(tokens).logits, hybrid(tokens).logits)


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_every_recipe_is_the_same_in_pieces_padded_and_packed(name):
    """In float64 (but for the base family's norms): the fusion norm magnifies rounding where a head's output is nearly zero."""
    hybrid, tokens = of_recipe(name).double(), random_tokens(2, 24)
    whole = hybrid(tokens).logits
    for split in (1, 4, 23):
        cache = HybridCache(4)
        close(hybrid(tokens[:, :split], cache=cache).logits, whole[:, :split], 1e-4)
        close(hybrid(tokens[:, split:], cache=cache).logits, whole[:, split:], 1e-4)
    left = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = (torch.arange(27) >= 3).long().expand(2, -1)
    close(hybrid(left, attention_mask=mask).logits[:, 3:], whole, 1e-4)
    packed = hybrid(tokens.reshape(1, -1), cu_seqlens=torch.tensor([0, 24, 48])).logits
    close(packed.reshape(2, 24, -1), whole, 1e-4)


def test_layers_of_the_published_models():
    assert every(4)(48) == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    assert every(8)(80) == [7, 15, 23, 31, 39, 47, 55, 63, 71, 79]
    assert RECIPES["nemotron-3"].full_layers(29) == [3, 7, 11, 15, 19, 24]
    assert set(BRANCHES) == set(KINDS) and {recipe.others for recipe in RECIPES.values()} <= set(KINDS)


def test_published_masks_fit_their_models_only():
    for name, known in PUBLISHED.items():
        full = published_mask(name, known.n_layers, known.n_heads)
        assert int(full.sum()) == len(known.layers) * known.n_heads + len(known.heads)
    with pytest.raises(InputError, match=r"is for Qwen3-1.7B, 28 layers of 16 heads; this model has 4 of 4"):
        published_mask("qwen3-1.7b-kl", 4, 4)
    with pytest.raises(InputError, match="published mask 'gpt5' is unknown"):
        published_mask("gpt5", 4, 4)


def test_what_cannot_be_built_is_refused_with_the_reason():
    lens = wrap_model(tiny_hf("llama"))
    for name, reason in NOT_BUILT.items():
        with pytest.raises(InputError, match="cannot be built"):
            build_hybrid(lens, recipe=name)
        assert len(reason) > 20
    with pytest.raises(InputError, match="recipe 'mamba' is unknown"):
        build_hybrid(lens, recipe="mamba")
    with pytest.raises(InputError, match="recipe 'duo' needs a mask"):
        build_hybrid(lens, recipe="duo")
    with pytest.raises(InputError, match="leaves no full layer of 4"):
        build_hybrid(lens, recipe="minimax-m1")
    with pytest.raises(InputError, match=r"mask is torch.bool \[2, 2\], expected bool \[4, 4\]"):
        build_hybrid(lens, torch.ones(2, 2, dtype=torch.bool))


# --- every kind, written from its paper ----------------------------------------------------------------------------


def branch_of(kind: str, **choices):
    """A branch of heads 1, 2 and 3 of a llama's second layer whose own parameters are random, and hidden states for it."""
    hybrid, _ = tiny_hybrid("llama", torch.zeros(4, 4, dtype=torch.bool), linear_rope=False, **choices)
    branch = BRANCHES[kind](hybrid.config, 1, [1, 2, 3], None, False).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return branch, torch.randn(1, 9, 32, dtype=torch.float64), hybrid.config


def heads_of(projection, x):
    return projection(x)[0].unflatten(-1, (3, 8))  # [pos head d_head]


def silu(x):
    return x * torch.sigmoid(x)


def convolved(x, taps):
    """Direct causal convolution, tap by tap."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for tap in range(taps.shape[1]):
            if (source := t - (taps.shape[1] - 1) + tap) >= 0:
                out[t] += taps[:, tap] * x[source]
    return out


def run(branch, x):
    from hydralens.hybrid.branches import Tokens

    positions = torch.arange(x.shape[1])[None]
    cos = torch.ones(1, x.shape[1], 8, dtype=torch.float64)
    return branch(x, Tokens(positions, (cos, cos * 0), None, None, None), None)[0]


@torch.no_grad()
def test_kda():
    branch, x, _ = branch_of("kda")
    q, k, v = (heads_of(p, x) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    raw = (branch.up_proj.weight @ branch.down_proj.weight @ x[0].T).T + branch.dt_bias
    alpha = torch.exp(-branch.A_log.exp()[:, None] * torch.log1p(raw.exp()).unflatten(-1, (3, 8)))
    beta = torch.sigmoid(x[0] @ branch.b_proj.weight.T)
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(9):
            state = torch.diag(alpha[t, head]) @ state
            state = (torch.eye(8) - beta[t, head] * torch.outer(k[t, head], k[t, head])) @ state + beta[t, head] * torch.outer(k[t, head], v[t, head])
            torch.testing.assert_close(run(branch, x)[t, head], state.T @ q[t, head], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whose", ["minimax", "hypenet"])
@torch.no_grad()
def test_lightning(whose):
    branch, x, _ = branch_of("lightning", lightning=whose)
    q, k, v = (heads_of(p, x) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    for place, head in enumerate((1, 2, 3)):
        slope = 2 ** (-8 * (head + 1) / 4)
        if whose == "minimax":
            slope *= 1 - 1 / (3 + 1e-5) + 1e-5
        for t in range(9):
            out = torch.zeros(8, dtype=torch.float64)
            for j in range(t + 1):
                a, b, c = (q[t, place], k[j, place], v[j, place]) if whose == "hypenet" else (silu(q[t, place]), silu(k[j, place]), silu(v[j, place]))
                out += math.exp(-slope * (t - j)) * (a @ b) * (8**-0.5 if whose == "hypenet" else 1) * c
            torch.testing.assert_close(run(branch, x)[t, place], out, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_gla_of_liger():
    branch, x, _ = branch_of("gla")
    q, k, v = (heads_of(p, x) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(9):
            gate = torch.sigmoid(k[t, head]) ** (1 / 16)
            state = gate[:, None] * state + torch.outer(k[t, head].softmax(-1), v[t, head])
            torch.testing.assert_close(run(branch, x)[t, head], q[t, head].softmax(-1) @ state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mamba2():
    branch, x, _ = branch_of("mamba2", linear_conv=4)
    c, b, u = (
        silu(convolved(p(x)[0], branch.conv[name])).unflatten(-1, (3, 8)) for name, p in (("q", branch.q_proj), ("k", branch.k_proj), ("v", branch.v_proj))
    )
    dt = torch.log1p((x[0] @ branch.dt_proj.weight.T + branch.dt_bias).exp())
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)  # [channel of x, state]
        for t in range(9):
            state = torch.exp(-dt[t, head] * branch.A_log[head].exp()) * state + dt[t, head] * torch.outer(u[t, head], b[t, head])
            torch.testing.assert_close(run(branch, x)[t, head], state @ c[t, head] + branch.D[head] * u[t, head], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_window_heads_see_sinks_and_the_recent_tokens():
    branch, x, _ = branch_of("window", **SMALL)
    q, k, v = (p(x)[0].unflatten(-1, (-1, 8)) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    for place, head in enumerate((1, 2, 3)):
        for t in range(9):
            seen = [j for j in range(t + 1) if t - j < 5 or j < 2]
            weights = torch.stack([q[t, place] @ k[j, head // 2] / 8**0.5 for j in seen]).softmax(0)
            expected = sum(weight * v[j, head // 2] for weight, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(run(branch, x)[t, place], expected, atol=1e-5, rtol=1e-5)
