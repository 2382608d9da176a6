from dataclasses import replace

import pytest
import torch

from hydralens.errors import InputError
from hydralens.probes import Example, make_probe, niah
from tests.probes.tokenizers import KINDS, model_with


def small(kind: str = "digits"):
    question = " The number for Paris is"
    clean, corrupt = (f"It <b>was</b> & is. The number for Paris is {value}.{question}" for value in (4821, 7305))
    return make_probe(model_with(kind), "own", "retrieval", "value", [Example(clean, corrupt, " 4821", " 7305", "Paris is 4821.")])


@pytest.mark.parametrize("kind", KINDS)
def test_needle_difference_and_answer_are_marked(kind):
    text = small(kind).text().removeprefix("<s>").replace("  ", " ")
    assert text == "It <b>was</b> & is. The number for «Paris is [4821|7305].» The number for Paris is → 4821 (counterfactual: 7305)"


def test_unmarked_text_is_elided_in_print_only():
    probe = niah(model_with("digits"), "niah_single_2", "value", 2, 300, depth=0.5)
    full, printed = probe.text(1), str(probe)
    assert "tokens …" not in full and printed.count("tokens …") in (1, 2)
    headline = f"niah_single_2/value (retrieval): 2 pairs of {probe.n_tokens} tokens, seed 0"
    assert printed.startswith(f"{headline}\n") and len(printed) < len(full) and repr(probe) == f"Probe({headline})"
    elided = int(printed.split(" … ")[1].split()[0])
    assert printed.split(" … ")[0].split("\n", 1)[1] in probe.text(0) and 30 < elided < 300


def test_colours_only_when_asked():
    assert "\033[" not in small().text()
    assert small().text(color=True).count("\033[32m") == 2  # the clean value and the answer


def test_html_escapes_the_prompt_and_brings_no_background_of_its_own():
    page = small()._repr_html_()
    assert "&lt;b&gt;was&lt;/b&gt; &amp; is" in page and "<b>was" not in page
    assert page.count("<mark") == page.count("</mark>") == 3 + 2 + 2 + 2  # legend, two parts of the needle, the difference, answer and foil
    assert "white;" not in page and "#fff" not in page and "color:inherit" in page


def test_padding_on_the_right_and_no_tokenizer():
    probe = small()
    right = replace(probe, **{row: torch.nn.functional.pad(getattr(probe, row), (0, 3)) for row in ("clean", "corrupt", "attention_mask")})
    assert right.text() == probe.text()
    bare = replace(probe, tokenizer=None).text()
    assert bare.count("«") == 1 and bare.endswith(
        f"→ {' '.join(map(str, probe.answer[0].tolist()))} (counterfactual: {' '.join(map(str, probe.foil[0].tolist()))})"
    )


def test_no_such_pair():
    with pytest.raises(InputError, match=r"probe own has pairs 0\.\.0, not 1"):
        small().text(1)
