import pytest

from hydralens.errors import InputError
from hydralens.figures import circuit as draw
from hydralens.patching.circuit import Circuit, trace_circuit
from hydralens.patching.path import edge_maps, path_patch
from hydralens.probes import niah
from tests.planted import RETRIEVER, planted_model

TWO_BACK = (0, 1)


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture(scope="module")
def found(model) -> Circuit:
    """Keys exchanged between two needles: a key stands two words before its value, so it reaches the retriever through the head that looks two back."""
    return trace_circuit(model, niah(model, "niah_multikey_1", "swap", 2, 160), receiver_inputs=("q", "k"))


def test_the_planted_circuit_is_found(found):
    assert found.rounds == [[RETRIEVER], [TWO_BACK]]
    assert found.exhausted and found.n_pairs == 2 and found.heads == [RETRIEVER, TWO_BACK]
    paths = {(edge.sender, edge.receiver, edge.input) for edge in found.edges.itertuples()}
    assert paths == {("L1H2", "logits", "z"), ("L0H1", "L1H2", "k")}
    assert (found.edges["effect"] >= found.threshold).all() and list(found.edges["round"]) == [0, 1]


def test_edges_are_the_effects_of_path_patching(model, found):
    probe = niah(model, "niah_multikey_1", "swap", 2, 160)
    alone = edge_maps(model, probe, [RETRIEVER], "k_ungrouped")[RETRIEVER].values
    for edge in found.edges[found.edges["round"] == 1].itertuples():
        layer, head = map(int, edge.sender[1:].split("H"))
        assert edge.effect == pytest.approx(float(alone[layer, head])) and found.effects[layer, head] == pytest.approx(edge.effect)
    assert path_patch(model, probe, [RETRIEVER], "k_ungrouped").values[TWO_BACK] == pytest.approx(float(alone[TWO_BACK]))


def test_it_stops_when_it_is_told_to(model):
    probe = niah(model, "niah_multikey_1", "swap", 2, 160)
    early = trace_circuit(model, probe, receiver_inputs=("k",), max_rounds=1)
    assert len(early.rounds) == 2 and not early.exhausted
    through_q = trace_circuit(model, probe, receiver_inputs=("q",))
    assert through_q.rounds == [[RETRIEVER]] and through_q.exhausted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 2.0}, "no head of niah_multikey_1/swap has a direct effect of 2 or more; lower the threshold"),
        ({"threshold": 0.0}, "threshold is 0.0; it must be positive"),
        ({"receiver_inputs": ("z",)}, "receiver_inputs 'z' is not one of q, k, v"),
    ],
)
def test_wrong_arguments_are_refused(model, arguments, message):
    with pytest.raises(InputError, match=message):
        trace_circuit(model, niah(model, "niah_multikey_1", "swap", 2, 160), **arguments)


def test_the_figure_draws_every_head_and_path(found):
    fig = draw(found)
    (nodes,) = [trace for trace in fig.data if trace.mode == "markers+text"]
    assert list(nodes.text) == ["L1H2", "L0H1", "logits"]
    assert list(nodes.y[:2]) == [1.0, 0.0] and nodes.y[2] > 1
    lines = [trace for trace in fig.data if trace.mode == "lines"]
    assert len(lines) == 2 and {trace.name for trace in lines if trace.showlegend} == {"writes the answer", "through k"}
    assert fig.layout.meta["finding"] == "1 head writes the answer and 1 more head feeds it over 1 step back"
    assert "nothing new" in fig.layout.meta["caption"]
