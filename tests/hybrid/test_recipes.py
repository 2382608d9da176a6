"""Every recipe as a model, and every kind of head against its recurrence written from the paper, one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hydralens.errors import InputError
from hydralens.hybrid import RECIPES, HybridCache, build_hybrid, published_mask, rivals
from hydralens.hybrid.branches import GatedDeltaHeads, Tokens
from hydralens.hybrid.config import KINDS
from hydralens.hybrid.modeling import BRANCHES
from hydralens.hybrid.recipes import NOT_BUILT, PUBLISHED, every, kinds_of
from hydralens.models.lens import wrap_model
from tests.hybrid.examples import mixed, random_tokens, tiny_hybrid
from tests.hybrid.test_hybrid import close
from tests.tiny import tiny_hf

SMALL = {"window_size": 5, "sinks": 2, "moba_block": 4, "moba_top": 2}


def of_recipe(name: str, family: str = "qwen3"):
    lens = wrap_model(tiny_hf(family))
    return shaken(build_hybrid(lens, mixed(lens.info.n_layers, lens.info.n_heads), recipe=name, **SMALL))


def shaken(hybrid):
    """Its new parameters random, so that they matter."""
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
    cache = HybridCache(4)
    hybrid(tokens, cache=cache)
    assert cache.n_bytes == hybrid.cache_bytes(20, batch=2)["hybrid"]


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
    assert RECIPES["moba"].full_layers(32) == [29, 30, 31] and RECIPES["moba"].full_layers(4) == [3]
    assert RECIPES["hymba-like"].full_layers(32) == [0, 15, 31] and RECIPES["hymba-like"].full_layers(30) == [0, 14, 29]
    jet = kinds_of("jet-nemotron", 28, 12, None)
    assert [layer for layer, row in enumerate(jet) if row == ["full"] * 12] == [14, 19]
    assert [layer for layer, row in enumerate(jet) if row == ["window"] * 12] == [20, 21] and sum(row == ["jet"] * 12 for row in jet) == 24
    assert kinds_of("liger", 2, 3, None) == [["window+gla"] * 3] * 2
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


@torch.no_grad()
def test_kinds_can_be_said_head_by_head():
    """Also the same kind alone and as half of another in one layer, whose memories are two."""
    lens = wrap_model(tiny_hf("llama"))
    kinds = [["window", "window+gla", "gla", "full"], ["jet", "moba", "gdn", "jet"], ["window+mamba2", "mamba2", "kda", "lightning"], ["full"] * 4]
    hybrid = shaken(build_hybrid(lens, kinds=kinds, linear_conv=3, **SMALL)).double()
    assert hybrid.config.kinds == kinds and hybrid.config.recipe is None
    assert build_hybrid(lens, recipe="liger").config.kinds == [["window+gla"] * 4] * 4
    tokens, cache = random_tokens(2, 24), HybridCache(4)
    parts = [hybrid(tokens[:, start:stop], cache=cache).logits for start, stop in ((0, 7), (7, 8), (8, 24))]
    close(torch.cat(parts, 1), hybrid(tokens).logits, 1e-4)
    for asked, other in (({"mask": torch.ones(4, 4, dtype=torch.bool)}, "a mask"), ({"recipe": "duo"}, "recipe 'duo'")):
        with pytest.raises(InputError, match=f"kinds says what every head is, and so does {other}; give one of them"):
            build_hybrid(lens, kinds=kinds, **asked)
    with pytest.raises(InputError, match=r"kinds has 3 layers of \[4\] heads, the base has 4 layers of 4"):
        build_hybrid(lens, kinds=kinds[:3])
    with pytest.raises(InputError, match="kind 'softmax' is unknown"):
        build_hybrid(lens, kinds=[["softmax"] * 4] * 4)
    with pytest.raises(InputError, match="moba_block is 4 and moba_top 0"):
        build_hybrid(lens, kinds=kinds, moba_block=4, moba_top=0)


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


def run(branch, x, angle=0.0):
    positions = torch.arange(x.shape[1])[None]
    turned = (angle * positions[..., None] * torch.ones(8)).double()
    return branch(x, Tokens(positions, (turned.cos(), turned.sin()), None, None, None), None)[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_which_kinds_have_rope_where_linear_heads_may(kind):
    branch, x, config = branch_of(kind, **SMALL)
    config.linear_rope = True
    turned = not torch.allclose(run(branch, x, 0.5), run(branch, x))
    assert turned == (kind in ("gdn", "kda", "window", "moba", "window+gla", "window+mamba2"))


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


def gla(branch, x):
    q, k, v = (heads_of(p, x) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    out = torch.zeros(9, 3, 8, dtype=torch.float64)
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(9):
            gate = torch.sigmoid(k[t, head]) ** (1 / 16)
            state = gate[:, None] * state + torch.outer(k[t, head].softmax(-1), v[t, head])
            out[t, head] = q[t, head].softmax(-1) @ state
    return out


def mamba2(branch, x):
    c, b, u = (
        silu(convolved(p(x)[0], branch.conv[name])).unflatten(-1, (3, 8)) for name, p in (("q", branch.q_proj), ("k", branch.k_proj), ("v", branch.v_proj))
    )
    dt = torch.log1p((x[0] @ branch.dt_proj.weight.T + branch.dt_bias).exp())
    out = torch.zeros(9, 3, 8, dtype=torch.float64)
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)  # [channel of x, state]
        for t in range(9):
            state = torch.exp(-dt[t, head] * branch.A_log[head].exp()) * state + dt[t, head] * torch.outer(u[t, head], b[t, head])
            out[t, head] = state @ c[t, head] + branch.D[head] * u[t, head]
    return out


def attention(branch, x, seen):
    """Softmax attention of one query at a time; ``seen(q, k, t)``: the positions that it sees."""
    q, k, v = (p(x)[0].unflatten(-1, (-1, 8)) for p in (branch.q_proj, branch.k_proj, branch.v_proj))
    out = torch.zeros(len(q), 3, 8, dtype=torch.float64)
    for place, head in enumerate((1, 2, 3)):
        for t in range(len(q)):
            keys = seen(q[t, place], k[:, head // 2], t)
            weights = torch.stack([q[t, place] @ k[j, head // 2] / 8**0.5 for j in keys]).softmax(0)
            out[t, place] = sum(weight * v[j, head // 2] for weight, j in zip(weights, keys, strict=True))
    return out


def window(branch, x):
    return attention(branch, x, lambda q, k, t: [j for j in range(t + 1) if t - j < 5 or j < 2])


@pytest.mark.parametrize(("kind", "by_hand"), [("gla", gla), ("mamba2", mamba2), ("window", window)])
@torch.no_grad()
def test_gla_of_liger_mamba2_and_windows(kind, by_hand):
    branch, x, _ = branch_of(kind, linear_conv=4 if kind == "mamba2" else None, **SMALL)
    torch.testing.assert_close(run(branch, x), by_hand(branch, x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_two_mixers_on_every_head():
    """Liger: half and half (its Eq. of Liger attention). Hymba: the mean of both behind an RMSNorm over all heads, the Mamba branch gated."""
    branch, x, _ = branch_of("window+gla", **SMALL)
    torch.testing.assert_close(run(branch, x), (window(branch.parts[0], x) + gla(branch.parts[1], x)) / 2, atol=1e-5, rtol=1e-5)
    branch, x, config = branch_of("window+mamba2", linear_conv=3, linear_gate="channel", **SMALL)
    near, far = window(branch.parts[0], x).flatten(1), mamba2(branch.parts[1], x).flatten(1) * 2 * torch.sigmoid(x[0] @ branch.parts[1].gate.weight.T)
    eps = config.base_config.rms_norm_eps
    normed = [own / (own.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight for own, norm in zip((near, far), branch.norms, strict=True)]
    torch.testing.assert_close(run(branch, x).flatten(1), sum(normed) / 2, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top", [1, 2, 3])
@torch.no_grad()
def test_moba(top):
    branch, _, _ = branch_of("moba", moba_block=4, moba_top=top)
    x = torch.randn(1, 22, 32, dtype=torch.float64)

    def seen(q, k, t):
        scores = {block: float(q @ k[4 * block : 4 * block + 4].mean(0)) for block in range(t // 4)}
        chosen = sorted(scores, key=scores.get)[len(scores) - min(top - 1, len(scores)) :]
        return [j for j in range(t + 1) if j // 4 in chosen or j // 4 == t // 4]

    torch.testing.assert_close(run(branch, x), attention(branch, x, seen), atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(n_pos=st.integers(1, 40), block=st.integers(1, 50), at_once=st.sampled_from([1, 200, 2**25]))
@torch.no_grad()
def test_moba_with_blocks_enough_is_full_attention_however_many_queries_at_a_time(n_pos, block, at_once):
    branch, _, _ = branch_of("moba", moba_block=block, moba_top=-(-n_pos // block))
    x = torch.randn(1, n_pos, 32, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rivals, "SCORES_AT_ONCE", at_once)
        torch.testing.assert_close(run(branch, x), attention(branch, x, lambda q, k, t: range(t + 1)), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_jet():
    branch, x, _ = branch_of("jet", linear_conv=4)
    q, k = (silu(heads_of(p, x)) for p in (branch.q_proj, branch.k_proj))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    raw, v = branch.v_proj(x)[0], torch.zeros(9, 24, dtype=torch.float64)
    for t in range(9):
        taps = branch.conv["v"] + (branch.up_proj.weight @ silu(branch.down_proj.weight @ x[0, t])).reshape(24, 4)
        v[t] = silu(sum(taps[:, 3 - back] * raw[t - back] for back in range(min(t + 1, 4))))
    v = v.unflatten(-1, (3, 8))
    alpha = torch.exp(-branch.A_log.exp() * torch.log1p((x[0] @ branch.a_proj.weight.T + branch.dt_bias).exp()))
    beta = torch.sigmoid(x[0] @ branch.b_proj.weight.T)
    out = run(branch, x)
    for head in range(3):
        state = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(9):
            state = alpha[t, head] * (state - beta[t, head] * torch.outer(k[t, head], k[t, head] @ state)) + beta[t, head] * torch.outer(k[t, head], v[t, head])
            torch.testing.assert_close(out[t, head], q[t, head] @ state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_jet_convolution_that_no_token_computes_is_a_plain_one():
    branch, x, config = branch_of("jet", linear_conv=4)
    tokens = Tokens(torch.arange(9)[None], None, None, None, None)
    branch.up_proj.weight.zero_()
    y = branch.v_proj(x)
    torch.testing.assert_close(branch.convolve("v", y, x, tokens, None), GatedDeltaHeads.convolve(branch, "v", y, x, tokens, None))
    fresh = BRANCHES["jet"](config, 1, [1, 2, 3], None, False).double()
    torch.testing.assert_close(fresh.convolve("v", y, x, tokens, None), y)


@torch.no_grad()
def test_kda_whose_channels_decay_alike_is_gated_deltanet():
    gdn, x, config = branch_of("gdn")
    kda = BRANCHES["kda"](config, 1, [1, 2, 3], None, False).double().eval()
    kda.load_state_dict({name: value for name, value in gdn.state_dict().items() if name not in ("a_proj.weight", "dt_bias")}, strict=False)
    kda.dt_bias.copy_(gdn.dt_bias.repeat_interleave(8))
    kda.down_proj.weight.zero_()[:3] = gdn.a_proj.weight
    kda.up_proj.weight.copy_(torch.eye(3, 8).repeat_interleave(8, 0))
    torch.testing.assert_close(run(kda, x), run(gdn, x), atol=1e-12, rtol=1e-12)
