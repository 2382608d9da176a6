import pytest
import torch
import transformers

from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.patching.activation import activation_patch
from hydralens.patching.path import edge_maps, path_patch
from hydralens.probes.base import Probe
from tests.patching.examples import columns_of, random_probe
from tests.patching.reference import slow_path_effects
from tests.tiny import FAMILIES, tiny_hf

RECEIVERS = {"q": [(1, 0), (3, 1), (3, 3)], "k": [(2, 1), (3, 0)], "v": [(1, 1), (3, 1)]}


def slow(hf, model, probe, pair, receivers, receiver_input, direction, positions, **settings):
    tokens = {name: getattr(probe, name)[pair] for name in ("clean", "corrupt", "answer", "foil")} | {"read": probe.read_positions[pair]}
    return slow_path_effects(hf, tokens, receivers, receiver_input, direction, columns_of(probe, pair, positions), model.anatomy.head_dim, **settings)


def same(ours, expected):
    torch.testing.assert_close(ours.per_pair[1].double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("receiver_input", ["q", "k", "v"])
def test_equals_two_forwards_a_sender(family, receiver_input):
    hf = tiny_hf(family, dtype=torch.float64)
    model, probe, receivers = wrap_model(hf), random_probe(), RECEIVERS[receiver_input]
    for second_pass, freeze_mlps, direction, positions in (
        ("total", False, "noise", "all"),
        ("total", True, "denoise", "answer"),
        ("direct", False, "denoise", "suffix"),
        ("direct", True, "noise", "needle"),
        ("total", False, "noise", "needle"),  # the later receivers feel what the earlier ones changed at other positions than the patched
    ):
        settings = {"second_pass": second_pass, "freeze_mlps": freeze_mlps}
        ours = path_patch(model, probe, receivers, receiver_input, direction=direction, positions=positions, **settings)
        same(ours, slow(hf, model, probe, 1, receivers, receiver_input, direction, positions, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_to_the_logits_is_the_direct_effect(family):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe()
    direct = activation_patch(model, probe, "z", "direct")
    torch.testing.assert_close(path_patch(model, probe, receiver_input="z->logits").per_pair, direct.per_pair, atol=1e-6, rtol=1e-6)


def test_float32_is_within_1e_5_of_float64():
    probe = random_probe(seed=3)
    for family in ("llama", "qwen3", "gemma3", "gpt2"):
        ours, exact = (path_patch(wrap_model(tiny_hf(family, dtype=dtype)), probe, RECEIVERS["q"], positions="all") for dtype in (torch.float32, torch.float64))
        span, exact_span = ((x.clean_metric - x.corrupt_metric)[:, None, None] for x in (ours, exact))
        torch.testing.assert_close(ours.per_pair * span, exact.per_pair * exact_span, atol=1e-5, rtol=0, equal_nan=True)


def ungrouped_twin(hf):
    """The same function with one KV head a query head."""
    config = type(hf.config)(**hf.config.to_dict() | {"num_key_value_heads": hf.config.num_attention_heads})
    twin = type(hf)._from_config(config, attn_implementation="eager", dtype=hf.dtype).eval()
    weights, group, d_head = hf.state_dict(), hf.config.num_attention_heads // hf.config.num_key_value_heads, hf.config.head_dim
    for name in weights:
        if ".k_proj." in name or ".v_proj." in name:
            weights[name] = weights[name].unflatten(0, (-1, d_head)).repeat_interleave(group, 0).flatten(0, 1)
    twin.load_state_dict(weights)
    return twin


@pytest.mark.parametrize("second_pass", ["total", "direct"])
@pytest.mark.parametrize("site", ["k", "v"])
def test_an_ungrouped_twin_gives_the_grouped_models_numbers(site, second_pass):
    hf = tiny_hf("qwen3", dtype=torch.float64)  # 8 query heads, 2 KV heads, head_dim 12 where hidden / heads is 4
    grouped, twin, probe = wrap_model(hf), wrap_model(ungrouped_twin(hf)), random_probe()
    whole = path_patch(grouped, probe, [(2, 1), (3, 0)], site, second_pass=second_pass)
    in_twin = path_patch(twin, probe, [(2, 4), (2, 5), (2, 6), (2, 7), (3, 0), (3, 1), (3, 2), (3, 3)], site, second_pass=second_pass)
    torch.testing.assert_close(whole.per_pair, in_twin.per_pair, atol=1e-6, rtol=1e-6, equal_nan=True)
    one = path_patch(grouped, probe, [(2, 5), (3, 1)], f"{site}_ungrouped", second_pass=second_pass)
    in_twin = path_patch(twin, probe, [(2, 5), (3, 1)], site, second_pass=second_pass)
    torch.testing.assert_close(one.per_pair, in_twin.per_pair, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert not torch.allclose(one.per_pair.nan_to_num(), path_patch(grouped, probe, [(2, 1), (3, 0)], site, second_pass=second_pass).per_pair.nan_to_num())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("receiver_input", ["q", "k", "v"])
def test_an_edge_map_is_a_path_patch_to_each_receiver(family, receiver_input):
    model, probe, receivers = wrap_model(tiny_hf(family)), random_probe(), RECEIVERS[receiver_input]
    maps = edge_maps(model, probe, receivers, receiver_input, batch_tokens=60)
    for receiver in receivers:
        alone = path_patch(model, probe, [receiver], receiver_input)
        torch.testing.assert_close(maps[receiver].per_pair, alone.per_pair, atol=2e-5, rtol=1e-4, equal_nan=True)
        assert maps[receiver].per_pair[:, receiver[0] :].isnan().all() and maps[receiver].per_pair[:, : receiver[0]].isfinite().all()
        assert maps[receiver].through == f"{receiver_input} of L{receiver[0]}H{receiver[1]}"


def linear_toy():
    """Two layers of two heads without norms and MLPs, whose attention is uniform whatever is asked: the model is linear in every z."""
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=2,
        max_position_embeddings=8,
    )
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().double()
    identity = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        for block in hf.model.layers:
            block.input_layernorm, block.post_attention_layernorm = torch.nn.Identity(), torch.nn.Identity()
            block.self_attn.q_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
            block.self_attn.v_proj.weight.copy_(identity)
            block.self_attn.o_proj.weight.copy_(identity)
        hf.model.norm = torch.nn.Identity()
        hf.model.layers[0].self_attn.o_proj.weight.copy_(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]))
        hf.model.embed_tokens.weight.zero_()
        hf.model.embed_tokens.weight[1] = torch.tensor([4.0, 0, 0, 0])
        hf.model.embed_tokens.weight[2] = torch.tensor([0, 0, 8.0, 0])
        hf.lm_head.weight.zero_()
        hf.lm_head.weight[5] = torch.tensor([1.0, 2, 4, 8])
    return wrap_model(hf)


def toy_probe():
    """Clean: token 1 then token 0; corrupt: token 2 then token 0. The answer is token 5, whose logit is (1, 2, 4, 8) . residual."""
    clean, corrupt = torch.tensor([[1, 0]]), torch.tensor([[2, 0]])
    answer, foil, read, span = torch.tensor([[5]]), torch.tensor([[6]]), torch.tensor([[1]]), torch.tensor([[0, 1]])
    return Probe("toy", "retrieval", "value", 0, clean, corrupt, torch.ones_like(clean), answer, foil, read, span)


def test_direct_paths_of_a_linear_toy_are_those_on_paper_and_sum_to_the_total():
    """Worked out on paper, positions (first, last).

    Clean embedding (4,0,0,0), (0,0,0,0). Layer 0: z = v averaged: first (4,0,0,0), last (2,0,0,0); o writes (z0, z1, z0, z2): (4,0,4,0), (2,0,2,0).
    Residual after layer 0: (8,0,4,0), (2,0,2,0). Layer 1: z last = average = (5,0,3,0), written as it is: residual (7,0,5,0), logit 7 + 20 = 27.
    Corrupt: (0,0,8,0), 0: z first (0,0,8,0), last (0,0,4,0); o writes (0,0,0,8), (0,0,0,4); residual (0,0,8,8), (0,0,0,4);
    z last = (0,0,4,6); residual (0,0,4,10), logit 16 + 80 = 96. Clean minus corrupt: -69.
    Head L0H0 noised (its z becomes 0 at both positions): direct: last writes (-2,0,-2,0): logit -2 - 8 = -10. Through v of L1H0 (dims 0, 1):
    the average of (-4, -2) = -3 in dim 0: -3. Through v of L1H1 (dims 2, 3): -3 in dim 2: -12. Total -25.
    Head L0H1 noised (its z becomes (8,0) and (4,0)): it writes 8 and 4 in dim 3: direct 32; through L1H1: 6 x 8 = 48; through L1H0: 0. Total 80.
    """
    model, probe = linear_toy(), toy_probe()
    to_logits = path_patch(model, probe, receiver_input="z->logits")
    through = edge_maps(model, probe, [(1, 0), (1, 1)], "v", second_pass="direct")
    total = activation_patch(model, probe, "z", "total", "noise", "all")
    assert float(total.clean_metric) == 27 and float(total.corrupt_metric) == 96
    for head, (direct, first, second) in enumerate([(-10, -3, -12), (32, 0, 48)]):
        found = [float(effects.per_pair[0, 0, head]) for effects in (to_logits, through[1, 0], through[1, 1], total)]
        # IE = (clean - patched) / (clean - corrupt) = change / 69
        assert [69 * x for x in found] == pytest.approx([direct, first, second, direct + first + second], abs=1e-4)


def test_what_cannot_be_is_nan_and_a_receiver_behind_the_sender_does_nothing():
    model, probe = wrap_model(tiny_hf("llama")), random_probe()
    effects = path_patch(model, probe, [(1, 2), (3, 0)])
    assert effects.per_pair[:, 3].isnan().all() and effects.per_pair[:, :3].isfinite().all()
    late = path_patch(model, probe, [(3, 0)])
    torch.testing.assert_close(effects.per_pair[:, 1:3], late.per_pair[:, 1:3], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("receiver_input", ["q", "k", "z->logits"])
def test_some_senders_are_those_of_the_whole_map(receiver_input):
    model, probe, senders = wrap_model(tiny_hf("llama", dtype=torch.float64)), random_probe(), [(2, 3), (0, 1), (2, 0), (3, 2)]
    receivers = None if receiver_input == "z->logits" else [(1, 1), (3, 0)]
    some, everything = (path_patch(model, probe, receivers, receiver_input, senders=x).per_pair for x in (senders, None))
    others = torch.ones_like(some, dtype=torch.bool)
    for sender in senders:
        others[:, *sender] = False
    torch.testing.assert_close(some, everything.masked_fill(others, torch.nan), atol=1e-6, rtol=1e-6, equal_nan=True)


def test_nothing_changes_where_clean_and_corrupt_are_one_prompt():
    model, probe = wrap_model(tiny_hf("gemma3")), random_probe()
    same_prompt = Probe(**{**vars(probe), "corrupt": probe.clean})
    seen = []

    def metric(logits, answer, foil):
        seen.append(logits[:, 0, int(answer[0])])
        return seen[-1] + (torch.tensor([1.0, 0.0]) if len(seen) % 2 else 0)

    for receiver_input in ("q", "k", "v", "k_ungrouped"):
        seen.clear()
        path_patch(model, same_prompt.select([0]), [(2, 1), (3, 0)], receiver_input, metric=metric, positions="all", batch_tokens=10**6)
        baseline, patched = seen
        torch.testing.assert_close(patched, baseline[:1].expand_as(patched), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pad", [(5, 0), (0, 4), (3, 2)])
def test_padding_and_batch_size_change_nothing(pad):
    model = wrap_model(tiny_hf("qwen3", dtype=torch.float64))
    plain = path_patch(model, random_probe(), RECEIVERS["k"], "k")
    padded = path_patch(model, random_probe(pad=pad), RECEIVERS["k"], "k", batch_tokens=50)
    torch.testing.assert_close(padded.per_pair, plain.per_pair, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"receivers": [(3, 0)], "receiver_input": "z"}, "receiver_input 'z' is not one of q, k, v, k_ungrouped, v_ungrouped, z->logits"),
        ({"receivers": [(3, 0)], "receiver_input": "z->logits"}, "has no receivers; leave receivers out"),
        ({"receiver_input": "q"}, "receiver_input q needs receivers: give .layer, head. pairs"),
        ({"receivers": [(3, 3)], "receiver_input": "k"}, "receivers of k are KV heads 0..1; model.kv_heads.heads. gives those of query heads"),
        ({"receivers": [(4, 0)]}, "L4H0 does not exist"),
        ({"receivers": [(0, 1)]}, "every receiver is in layer 0"),
        ({"receivers": [(1, 0), (2, 1)], "senders": [(2, 0), (3, 3)]}, "no sender lies before layer 2, that of the last receiver"),
        ({"receivers": [(3, 0)], "senders": [(0, 4)]}, "L0H4 does not exist"),
        ({"receivers": [(3, 0)], "senders": []}, "heads is empty"),
        ({"receivers": [(3, 0)], "second_pass": "both"}, "second_pass 'both' is not one of total, direct"),
        ({"receivers": [(3, 0)], "positions": "end"}, "positions 'end' is not one of"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        path_patch(wrap_model(tiny_hf("llama")), random_probe(), **arguments)
    assert "\n" not in str(caught.value)


def test_kv_heads_of_query_heads():
    model = wrap_model(tiny_hf("qwen3"))
    assert model.kv_heads([(3, 5), (1, 0), (3, 4), (1, 4)]) == [(1, 0), (1, 1), (3, 1)]
