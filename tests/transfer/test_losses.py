import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hydralens.transfer.losses import alignment_loss, distillation_loss, next_token_loss


def example(n=37, d=6, vocab=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(n, width, generator=generator) for width in (d, d + 2))
    heads = [torch.randn(vocab, width, generator=generator) for width in (d, d + 2)]
    labels = torch.randint(0, vocab, (n,), generator=generator)
    weight = torch.randint(0, 3, (n,), generator=generator).float()
    return student, heads[0], teacher, heads[1], weight, labels


@settings(max_examples=40, deadline=None)
@given(
    chunk=st.sampled_from([1, 7, 36, 37, 1000]), temperature=st.sampled_from([0.5, 1.0, 2.0]), cross_entropy=st.sampled_from([0.0, 0.7]), seed=st.integers(0, 9)
)
def test_chunked_distillation_equals_the_plain_one(chunk, temperature, cross_entropy, seed):
    student, head, teacher, teacher_head, weight, labels = example(seed=seed)
    leaves = student.requires_grad_(), head.requires_grad_()
    own = distillation_loss(student, head, teacher, teacher_head, weight, labels=labels, cross_entropy=cross_entropy, temperature=temperature, chunk=chunk)
    logits, target = student @ head.T, teacher @ teacher_head.T
    kl = F.kl_div((logits / temperature).log_softmax(-1), (target / temperature).softmax(-1), reduction="none").sum(-1) * temperature**2
    plain = ((kl + cross_entropy * F.cross_entropy(logits, labels, reduction="none")) * weight).sum()
    torch.testing.assert_close(own, plain, atol=1e-4, rtol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(own, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [5, 37, 100])
def test_chunked_next_token_loss_equals_the_plain_one(chunk):
    hidden, head, _, _, weight, labels = example()
    leaves = hidden.requires_grad_(), head.requires_grad_()
    own = next_token_loss(hidden, head, labels, weight, chunk=chunk)
    plain = (F.cross_entropy(hidden @ head.T, labels, reduction="none") * weight).sum()
    torch.testing.assert_close(own, plain)
    for ours, theirs in zip(torch.autograd.grad(own, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tokens_of_weight_zero_change_nothing_and_the_teacher_gets_no_gradient():
    student, head, teacher, teacher_head, weight, _ = example()
    teacher.requires_grad_()
    whole = distillation_loss(student.requires_grad_(), head, teacher, teacher_head, weight, chunk=8)
    learned = weight > 0
    part = distillation_loss(student[learned], head, teacher[learned], teacher_head, weight[learned], chunk=8)
    torch.testing.assert_close(whole, part)
    (gradient,) = torch.autograd.grad(whole, student, retain_graph=True)
    assert not gradient[~learned].any() and gradient[learned].any()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(whole, teacher)


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    _, _, teacher, teacher_head, weight, _ = example()
    loss = distillation_loss(teacher.clone().requires_grad_(), teacher_head, teacher, teacher_head, weight)
    assert abs(float(loss.detach())) < 1e-5


def test_logits_are_never_held_whole():
    """What the backward pass keeps grows with the hidden states, not with tokens times vocabulary."""
    student, head, teacher, teacher_head, weight, labels = example(n=256, vocab=4000)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        loss = distillation_loss(student.requires_grad_(), head.requires_grad_(), teacher, teacher_head, weight, labels=labels, cross_entropy=1.0, chunk=16)
    assert max(kept, default=0) <= head.numel() and float(loss.detach()) > 0


def test_alignment_is_relative_and_over_real_tokens():
    teacher, real = torch.full((1, 3, 2), 2.0), torch.tensor([[True, True, False]])
    student = teacher.clone()
    student[0, 0] = 1.0  # two of four real numbers off by one: 2 / 16
    student[0, 2] = 99.0  # padding
    assert float(alignment_loss(student, teacher, real)) == 2 / 16
    assert float(alignment_loss(torch.zeros_like(teacher), teacher, real)) == 1
