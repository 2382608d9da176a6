"""Random probes for random models."""

import torch

from hydralens.probes.base import Probe


def random_probe(n_pairs=2, n_pos=23, n_answer=2, seed=0, first=9, pad=None, vocab=97) -> Probe:
    """Random prompts that differ in three tokens from ``first`` on; the last ``n_answer`` positions are read."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, vocab, (n_pairs, n_pos), generator=generator)
    corrupt = clean.clone()
    corrupt[:, first : first + 3] = (clean[:, first : first + 3] + 1) % vocab
    answer = torch.randint(3, vocab, (n_pairs, n_answer), generator=generator)
    mask = torch.ones_like(clean)
    read = torch.arange(n_pos - n_answer, n_pos).expand(n_pairs, -1).contiguous()
    span = torch.tensor([[first, first + 3]] * n_pairs)
    if pad is not None:
        before, after = pad
        clean, corrupt = (torch.nn.functional.pad(x, pad, value=1) for x in (clean, corrupt))
        mask, read, span = torch.nn.functional.pad(mask, pad), read + before, span + before
    return Probe("random", "retrieval", "value", seed, clean, corrupt, mask, answer, (answer + 5) % vocab, read, span)


def columns_of(probe, pair, positions):
    clean, corrupt = probe.clean[pair], probe.corrupt[pair]
    match positions:
        case "answer":
            return probe.read_positions[pair]
        case "needle":
            return torch.arange(*probe.needle_span[pair].tolist())
        case "suffix":
            return torch.arange(int((clean != corrupt).nonzero()[0]), len(clean))
        case _:
            return torch.arange(len(clean))
