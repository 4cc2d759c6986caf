"""ops.message_sum against its formula, written with PyG's own scatter."""

import pytest
import torch
import torch._dynamo
from graphs import ALL, BIPARTITE, SQUARE, random_edges
from oracles import DTYPES, compare, compare_gradient_layouts
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import scatter

import gnnaccel.graph
from gnnaccel import Graph, ops
from gnnaccel.kernels import native, reference
from gnnaccel.kernels.message import Parts
from gnnaccel.ops.adj import Adj
from gnnaccel.ops.message import sum_messages

#: What the edge brings: its row, or that through a map, with and without a bias; and
#: where the destination brings something, too.
FORMS = ("plain", "mapped", "biased", "to", "to plain", "to biased")
KINDS = [("add", "plain"), ("add", "mapped"), ("add", "biased"), ("mul", "plain")]
KINDS += [("add_relu", form) for form in FORMS] + [("mul", "biased")]


def _tensors(case, form, width=5, depth=3, learnt=True):
    """Named float64 leaves for one call; without ``learnt``, edges' are constant."""
    plain, biased = form.endswith("plain"), form.endswith("biased")
    shapes = {"x": (case.num_src, width)}
    if form != "to":
        shapes["edge"] = (case.num_edges, width if plain else depth)
        if not plain:
            shapes["map"] = (depth + biased, width)
    if form.startswith("to"):
        shapes["x_dst"] = (case.num_dst, width)
    found = {
        name: torch.randn(shape, dtype=torch.float64).requires_grad_(
            learnt or name != "edge"
        )
        for name, shape in shapes.items()
    }
    return found | {"weight": torch.rand(case.num_edges, dtype=torch.float64) + 0.5}


def _oracle(case, kind, reduce, x, weight, edge=0, map=None, x_dst=None):
    src, dst = case.edge_index.long()
    if map is not None:
        rows = edge.size(1)
        edge = edge @ map[:rows] + (map[rows] if map.size(0) > rows else 0)
    messages = x[src] * edge if kind == "mul" else x[src] + edge
    messages = messages if x_dst is None else messages + x_dst[dst]
    messages = messages.relu() if kind == "add_relu" else messages
    messages = messages * weight.unsqueeze(-1)
    return scatter(messages, dst, 0, case.num_dst, reduce)


def _functions(case, kind, tensors, graph=None, reduce="sum"):
    graph = Graph.of(case.edge_index, size=case.size) if graph is None else graph
    names = list(tensors)

    def named(values):
        return dict(zip(names, values, strict=True))

    return (
        lambda *values: ops.message_sum(
            graph, message=kind, reduce=reduce, **named(values)
        ),
        lambda *values: _oracle(case, kind, reduce, **named(values)),
    )


def _compare(
    case,
    kind,
    form,
    dtype=torch.float64,
    graph=None,
    reduce="sum",
    slack=None,
    **sizes,
):
    tensors = _tensors(case, form, **sizes)
    ours, oracle = _functions(case, kind, tensors, graph, reduce)
    slack = slack or {torch.float64: 10, torch.float32: 5}.get(dtype, 8)
    values = tuple(tensors.values())
    if dtype in (torch.bfloat16, torch.float16):
        # A sum near 0 that is rounded first may be on the other side of the ReLU: by
        # numbers of few bits, none is rounded.
        values = tuple(
            ((v.detach() * 8).round() / 8).requires_grad_(v.requires_grad)
            for v in values
        )
    return compare(ours, oracle, values, dtype, absolute=False, slack=slack)


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize(("kind", "form"), KINDS)
@pytest.mark.parametrize("name", ALL)
def test_every_graph(backend, name, kind, form, learnt):
    if "hub" in name and backend != "native":
        pytest.skip("its slices are the compiled kernels'")
    _compare(ALL[name], kind, form, learnt=learnt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_every_dtype(backend, kind, form, dtype):
    for learnt in (True, False):
        _compare(BIPARTITE["wide"], kind, form, dtype, learnt=learnt)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_the_mean(backend, kind, form):
    for name in ("isolated", "wide"):
        _compare(ALL[name], kind, form, reduce="mean", learnt=False)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 9, 16, 17, 65, 129, 300])
def test_every_form_of_the_kernels(isa, monkeypatch, width, dtype, index):
    """Each instruction set, register tile and index width."""
    if index == "int64":
        for module in (gnnaccel.graph, native, reference):
            monkeypatch.setattr(module, "index_dtype", lambda *sizes: torch.int64)
    case = BIPARTITE["wide"]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    assert graph.index_dtype == getattr(torch, index)
    for form in FORMS:
        _compare(case, "add_relu", form, dtype, graph, width=width, learnt=False)
    for kind, form in (
        ("add_relu", "plain"),
        ("add_relu", "to plain"),
        ("mul", "plain"),
    ):
        _compare(case, kind, form, dtype, graph, width=width)


@pytest.mark.parametrize("name", ["hub", "hub_source"])
@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_a_hub_is_cut_into_slices(isa, kind, form, name, learnt):
    _compare(ALL[name], kind, form, width=17, learnt=learnt)
    # Twenty thousand roundings in one sum of either sign.
    more = {"width": 17, "learnt": learnt, "slack": 100}
    _compare(ALL[name], kind, form, torch.float32, **more)


@pytest.mark.parametrize(("kind", "form"), KINDS)
@pytest.mark.parametrize("name", ["double_loops", "isolated"])
def test_derivatives(backend, name, kind, form):
    for learnt in (True, False):
        tensors = _tensors(ALL[name], form, 2, 2, learnt)
        ours, _ = _functions(ALL[name], kind, tensors)
        assert gradcheck(ours, tuple(tensors.values()))
        assert gradgradcheck(ours, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_layouts(backend, kind, form):
    case = SQUARE["unsorted"]
    tensors = _tensors(case, form)
    ours, oracle = _functions(case, kind, tensors)
    compare_gradient_layouts(ours, oracle, tuple(tensors.values()))
    strided = tuple(
        x.detach().repeat_interleave(2, 0)[::2].requires_grad_(x.requires_grad)
        for x in tensors.values()
    )
    compare(ours, oracle, strided, absolute=False, slack=10)
    turned = tuple(
        x.detach().t().contiguous().t().requires_grad_(x.requires_grad)
        for x in _tensors(case, form, learnt=False).values()
    )
    compare(ours, oracle, turned, absolute=False, slack=10)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_any_input_may_be_the_only_one_to_learn(backend, kind, form):
    case = BIPARTITE["padded"]
    for name in _tensors(case, form):
        if name == "weight":
            continue
        tensors = {
            k: v.detach().requires_grad_(k == name)
            for k, v in _tensors(case, form).items()
        }
        ours, oracle = _functions(case, kind, tensors)
        values = tuple(tensors.values())
        assert len(compare(ours, oracle, values, absolute=False, slack=10)) == 2


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_poisoned_memory(backend, poisoned, kind, form):
    for name, case in ALL.items():
        if "hub" not in name:
            fresh = case._replace(edge_index=case.edge_index.clone())
            _compare(fresh, kind, form)
            _compare(fresh, kind, form, learnt=False)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        edges = random_edges(300, 300, 9000)
        case = SQUARE["hub"]._replace(edge_index=edges, num_src=300, num_dst=300)
        for kind, form in KINDS:
            for graph in (case, SQUARE["hub"]):
                _compare(graph, kind, form, width=16, learnt=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_special_values_stay_where_they_are_reached(backend, kind, form, special):
    case = SQUARE["unsorted"]
    tensors = _tensors(case, form, learnt=False)
    for name in ("map", "edge"):
        if name in tensors:
            tensors[name].requires_grad_(False)
            break
    with torch.no_grad():
        tensors["x"][4] = special
    ours, oracle = _functions(case, kind, tensors)
    compare(ours, oracle, tuple(tensors.values()), absolute=False, slack=10)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_own_rows(backend, kind, form):
    case = SQUARE["hub" if backend == "native" else "unsorted"]
    graph = Graph.of(case.edge_index, case.size)
    adj = Adj(graph, None, *case.size)
    tensors = _tensors(case, form, learnt=False)
    del tensors["weight"]
    names = list(tensors)

    def ours(*values):
        given = dict(zip(names, values, strict=True))
        return sum_messages(adj, kind, Parts(**given), 1.25)

    def oracle(*values):
        given = dict(zip(names, values, strict=True))
        ones = torch.ones(case.num_edges, dtype=torch.float64)
        return _oracle(case, kind, "sum", weight=ones, **given) + 1.25 * given["x"]

    values = tuple(tensors.values())
    compare(ours, oracle, values, absolute=False, slack=10)
    if backend != "native":
        assert gradgradcheck(ours, values, fast_mode=True)


@pytest.mark.parametrize("own", [0.0, 1.25])
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_gradients_that_are_differentiated(backend, kind, form, own):
    """Torch's own check only says that they agree with their own derivatives."""
    case = SQUARE["unsorted"]
    tensors = _tensors(case, form)
    names = list(tensors)[:-1]
    weight = tensors.pop("weight")
    adj = Adj(Graph.of(case.edge_index, case.size), None, *case.size)

    def ours(*values):
        given = dict(zip(names, values, strict=True))
        return sum_messages(adj, kind, Parts(**given, weight=weight), own)

    def oracle(*values):
        given = dict(zip(names, values, strict=True))
        return _oracle(case, kind, "sum", weight=weight, **given) + own * given["x"]

    found = []
    leaves = tuple(tensors.values())
    for function in (ours, oracle):
        generator = torch.Generator().manual_seed(5)

        def noise(x, generator=generator):
            return torch.randn(x.shape, generator=generator, dtype=x.dtype)

        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, noise(out), create_graph=True)
        total = sum((g * noise(g)).sum() for g in grads if g.requires_grad)
        second = torch.autograd.grad(total, leaves, allow_unused=True) if total else ()
        found.append([*grads, *(g for g in second if g is not None)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_compiles_whole(kind, form):
    torch._dynamo.reset()  # it counts how often one function is compiled
    case = SQUARE["double_loops"]
    tensors = _tensors(case, form)
    names = list(tensors)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(edge_index, *values):
        x = dict(zip(names, values, strict=True))
        return ops.message_sum(edge_index, message=kind, **x)

    _, oracle = _functions(case, kind, tensors)
    compare(
        lambda *values: function(case.edge_index, *values),
        oracle,
        tuple(tensors.values()),
        absolute=False,
        slack=10,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"message": "cosine"}, "cosine"),
        ({"reduce": "max"}, "max"),
        ({"x": torch.randn(8, 5)}, r"\[8, 5\]"),
        ({"edge": torch.randn(30, 4)}, r"\[30, 4\]"),
        ({"edge": torch.randn(29, 5)}, r"\[29, 5\]"),
        ({"edge": torch.randn(30, 5).double()}, "float64"),
        ({"map": torch.randn(4, 5)}, r"\[30, 4\]"),
        ({"map": torch.randn(7, 5)}, r"\[30, 6\]"),
        ({"map": torch.randn(5, 4)}, r"\[5, 4\]"),
        ({"weight": torch.randn(29)}, r"\[29\]"),
        ({"x_dst": torch.randn(6, 5)}, r"\[6, 5\]"),
        ({"x_dst": torch.randn(7, 5), "message": "mul"}, "'mul'"),
        ({"edge": None, "message": "mul"}, "'mul'"),
        ({"edge": None, "map": torch.randn(4, 5)}, "'map'"),
        ({"weight": torch.randn(30, requires_grad=True)}, "gradient"),
        ({"edge": torch.randn(30, 5).to("meta")}, "meta"),
    ],
)
def test_bad_arguments_name_the_value(change, message):
    case = BIPARTITE["wide"]
    graph = Graph.of(case.edge_index, case.size)
    given = {"x": torch.randn(9, 5), "edge": torch.randn(30, 5)} | change
    with pytest.raises(ValueError, match=message):
        ops.message_sum(graph, **given)
    with pytest.raises(TypeError, match="'edge'"):
        ops.message_sum(graph, given["x"], [1.0])
