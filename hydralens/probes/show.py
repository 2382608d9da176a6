"""A probe for a person: the prompt with its needle, what the corruption changes and the answer marked, as text or as HTML."""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from hydralens.probes.base import Probe

ELIDE_OVER, KEPT = 80, 30  # an unmarked stretch of more tokens is shown by its first and last 30


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that are marked alike; ``corrupt`` is their counterpart where the two prompts differ."""

    clean: str
    corrupt: str | None
    in_needle: bool
    elided: int = 0


def headline(probe: "Probe") -> str:
    return f"{probe.label} ({probe.capability}): {probe.n_pairs} pairs of {probe.n_tokens} tokens, seed {probe.seed}"


def as_text(probe: "Probe", pair: int, color: bool, elide: bool) -> str:
    """``«needle»``, ``[clean|corrupt]`` and the answer after an arrow; colours are ANSI escapes."""
    bold, red, green, end = ("\033[1m", "\033[31m", "\033[32m", "\033[0m") if color else ("", "", "", "")
    out, inside = [], False
    for piece in _pieces(probe, pair, elide):
        if inside and not piece.in_needle:
            out.append("»")
        space, text = _split_space(piece.clean)
        out.append(space)
        if piece.in_needle and not inside:
            out.append("«")
        inside = piece.in_needle
        if piece.elided:
            out.append(f" … {piece.elided} tokens … ")
        elif piece.corrupt is not None:
            out.append(f"[{green}{text}{end}|{red}{_split_space(piece.corrupt)[1]}{end}]")
        else:
            out.append(f"{bold}{text}{end}" if piece.in_needle else text)
    answer, foil = _answers(probe, pair)
    return "".join(out) + ("»" if inside else "") + f" → {green}{answer}{end} (counterfactual: {red}{foil}{end})"


def as_html(probe: "Probe", pair: int) -> str:
    """The same for a notebook; colours are translucent, so that they read on light and on dark."""
    tint = {"needle": "rgba(240,180,0,.25)", "clean": "rgba(0,160,80,.35)", "corrupt": "rgba(220,50,50,.35)"}

    def mark(kind: str, text: str) -> str:
        return f'<mark title="{kind}" style="background:{tint[kind]};color:inherit">{escape(text)}</mark>'

    out = []
    for piece in _pieces(probe, pair, elide=True):
        if piece.elided:
            out.append(f" <i>… {piece.elided} tokens …</i> ")
        elif piece.corrupt is not None:
            out.append(mark("clean", piece.clean) + mark("corrupt", piece.corrupt))
        else:
            out.append(mark("needle", piece.clean) if piece.in_needle else escape(piece.clean))
    answer, foil = _answers(probe, pair)
    legend = f"{mark('needle', 'needle')} {mark('clean', 'clean')}{mark('corrupt', 'corrupt')}"
    out.append(f" → {mark('clean', answer)} (counterfactual: {mark('corrupt', foil)})")
    prompt = f'<pre style="white-space:pre-wrap;background:none;color:inherit">{"".join(out)}</pre>'
    return f"<div><b>{escape(headline(probe))}</b>, pair {pair}: {legend}{prompt}</div>"


def _pieces(probe: "Probe", pair: int, elide: bool) -> list[Piece]:
    real = probe.attention_mask[pair].bool()
    clean, corrupt = probe.clean[pair][real], probe.corrupt[pair][real]
    padding = int(real.int().argmax())
    end = int(probe.read_positions[pair, 0]) - padding + 1
    start, stop = (probe.needle_span[pair] - padding).tolist()
    needle = [start <= column < stop for column in range(end)]
    differs = (clean != corrupt)[:end].tolist()

    edges = [0] + [column for column in range(1, end) if (needle[column], differs[column]) != (needle[column - 1], differs[column - 1])] + [end]
    pieces = []
    for a, b in zip(edges, edges[1:], strict=False):
        if elide and not needle[a] and not differs[a] and b - a > ELIDE_OVER:
            pieces += [
                Piece(_between(probe, clean, a, a + KEPT), None, False),
                Piece("", None, False, elided=b - a - 2 * KEPT),
                Piece(_between(probe, clean, b - KEPT, b), None, False),
            ]
        else:
            pieces.append(Piece(_between(probe, clean, a, b), _between(probe, corrupt, a, b) if differs[a] else None, needle[a]))
    return pieces


def _answers(probe: "Probe", pair: int) -> tuple[str, str]:
    """Answer and foil, read in place: some tokenizers drop the space in front of a text's first word."""
    real = probe.attention_mask[pair].bool()
    prompt = probe.clean[pair][real][: int(probe.read_positions[pair, 0]) - int(real.int().argmax()) + 1]
    scored = probe.scored[pair]
    return tuple(_between(probe, torch.cat([prompt, row[pair][scored]]), len(prompt), None).strip() for row in (probe.answer, probe.foil))


def _between(probe: "Probe", ids: Int[Tensor, "pos"], start: int, stop: int | None) -> str:
    """Text of ``ids[start:stop]`` as it stands after the tokens before it."""
    if probe.tokenizer is None:
        return "".join(f" {token}" for token in ids[start:stop].tolist())
    before, through = (probe.tokenizer.decode(ids[:end].tolist(), clean_up_tokenization_spaces=False) for end in (start, stop))
    return through[len(before) :]


def _split_space(text: str) -> tuple[str, str]:
    stripped = text.lstrip()
    return text[: len(text) - len(stripped)], stripped
