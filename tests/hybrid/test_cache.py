"""What a hybrid's memory gives back is what was put into it, however it came there."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.hybrid.cache import ROOM, HybridLayer


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 30, ROOM, 3 * ROOM]), min_size=1, max_size=8),
    changes=st.lists(st.sampled_from(["", "", "select", "repeat", "share", "trim", "inference", "grad"]), min_size=8, max_size=8),
)
def test_appending_equals_concatenation_whatever_happens_in_between(sizes, changes):
    memory, kept, seen = HybridLayer(), [], None
    for step, (size, change) in enumerate(zip(sizes, changes, strict=False)):
        new = torch.arange(2 * size * 3).reshape(-1, 1, size, 3).float() + 1000 * step
        if seen is not None:
            new = new[:1].expand(len(seen), -1, -1, -1)
        with torch.inference_mode(change == "inference"), torch.set_grad_enabled(change == "grad"):
            given_back = memory.append("k", new)
        seen = new if seen is None else torch.cat([seen, new], 2)
        kept.append((given_back, seen))
        if change == "select":
            memory.batch_select_indices(torch.tensor([0]))
            seen = seen[:1]
        elif change == "repeat":
            memory.batch_repeat_interleave(2)
            seen = seen.repeat_interleave(2, 0)
        elif change == "share":  # both go on, in different ways
            memory, other = memory.row(0).continued(2), memory
            with torch.no_grad():
                other.append("k", torch.full_like(seen[:, :, :1], -1.0))
            seen = seen[:1].expand(2, -1, -1, -1)
        elif change == "trim":
            memory.tensors["k"], seen = memory.tensors["k"][:, :, 1:], seen[:, :, 1:]
    for own, expected in kept:  # what was handed out is never written to
        assert torch.equal(own, expected)
    assert torch.equal(memory.tensors["k"], seen)


@torch.no_grad()
def test_growing_token_by_token_copies_what_was_there_a_few_times_only():
    memory, moved, place = HybridLayer(), 0, None
    for _ in range(20 * ROOM):
        own = memory.append("k", torch.zeros(1, 1, 1, 2)).data_ptr()
        moved, place = moved + (own != place), own
    assert memory.tensors["k"].shape[2] == 20 * ROOM
    assert moved < 20  # rooms of at least ROOM more positions each, growing by an eighth: 14


def test_under_autograd_what_was_saved_for_the_backward_stays():
    memory, past = HybridLayer(), torch.ones(1, 1, 2, 1)
    q = torch.ones(1, requires_grad=True)
    memory.append("k", past)
    first = (q * memory.append("k", past)).sum()  # keeps the joined keys for the gradient of q
    memory.append("k", 5 * past)
    first.backward()
    assert q.grad == 4
