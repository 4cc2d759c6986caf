"""ops.attention against its formula, written with PyG's own softmax and scatter."""

import pytest
import torch
from graphs import ALL, BIPARTITE, SQUARE, random_edges
from oracles import DTYPES, compare, compare_gradient_layouts
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import leaky_relu
from torch_geometric.utils import scatter
from torch_geometric.utils import softmax as pyg_softmax

import gnnaccel.graph
from gnnaccel import Graph, ops
from gnnaccel.kernels import memory, native, reference

SCORES = ("sum", "mlp", "dot")
# With and without what may be left out.
FULL, BARE = True, False


def _tensors(case, score, heads=2, width=5, full=FULL, depth=None):
    """Named float64 leaves for one call; with a depth, a map makes the edges' rows."""
    of_node = (heads,) if score == "sum" else (heads, width)
    shapes = {
        "query": (case.num_dst, *of_node),
        "key": (case.num_src, *of_node),
        "value": (case.num_src, heads, width),
    }
    if score == "mlp":
        shapes["att"] = (heads, width)
    if full:
        if score == "sum":
            shapes["bias"] = (case.num_edges, heads)
        else:
            shapes["edge"] = (case.num_edges, heads, width)
        if depth is not None:
            shapes |= {"edge": (case.num_edges, depth), "map": (depth, heads, width)}
    elif score == "sum":
        del shapes["query"]
    elif score == "mlp":
        del shapes["value"]
    found = {
        name: torch.randn(shape, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    if full:
        keep = torch.rand(case.num_edges, heads) < 0.7
        found["keep"] = keep.double() / 0.7
    return found


def _oracle(case, score, slope, x):
    src, dst = case.edge_index.long()
    query, key = x.get("query"), x["key"][src]
    value = x["value"][src] if "value" in x else key
    edge = x.get("edge", 0)
    if "map" in x:
        edge = torch.einsum("ed,dhc->ehc", edge, x["map"])
    if score == "dot":
        logits = (query[dst] * (key + edge)).sum(-1) / key.size(-1) ** 0.5
        value = value + edge
    elif score == "mlp":
        inner = leaky_relu(query[dst] + key + edge, slope)
        logits = (x["att"] * inner).sum(-1)
    else:
        inner = key if query is None else key + query[dst]
        logits = leaky_relu(inner + x.get("bias", 0), slope)
    shares = pyg_softmax(logits, dst, num_nodes=case.num_dst) * x.get("keep", 1)
    return scatter(shares.unsqueeze(-1) * value, dst, 0, case.num_dst)


def _ours(graph, score, slope, x):
    rest = {k: v for k, v in x.items() if k not in ("query", "key", "value")}
    return ops.attention(
        graph,
        x.get("query"),
        x["key"],
        x.get("value"),
        score=score,
        slope=slope,
        **rest,
    )


def _functions(case, score, tensors, graph=None, slope=0.2):
    graph = Graph.of(case.edge_index, size=case.size) if graph is None else graph
    names = list(tensors)

    def named(values):
        return dict(zip(names, values, strict=True))

    return (
        lambda *values: _ours(graph, score, slope, named(values)),
        lambda *values: _oracle(case, score, slope, named(values)),
    )


def _compare(
    case,
    score,
    dtype=torch.float64,
    full=FULL,
    graph=None,
    slope=0.2,
    slack=None,
    **sizes,
):
    tensors = _tensors(case, score, full=full, **sizes)
    ours, oracle = _functions(case, score, tensors, graph, slope)
    slack = slack or {torch.float64: 20, torch.float32: 10}.get(dtype, 4)
    compare(
        ours,
        oracle,
        tuple(tensors.values()),
        dtype,
        absolute=False,
        floor=1 / 64,
        slack=slack,
    )


@pytest.mark.parametrize("full", [FULL, BARE])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ALL)
def test_every_graph(backend, name, score, full):
    if "hub" in name and backend != "native":
        pytest.skip("its slices are the compiled kernels'")
    _compare(ALL[name], score, full=full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_every_dtype(backend, score, dtype):
    _compare(BIPARTITE["wide"], score, dtype)


@pytest.mark.parametrize("slope", [0.0, 1.0, -0.5, 3.0])
@pytest.mark.parametrize("score", ["sum", "mlp"])
def test_every_slope(backend, score, slope):
    _compare(SQUARE["double_loops"], score, slope=slope)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 9, 16, 17, 65])
@pytest.mark.parametrize("score", SCORES)
def test_every_form_of_the_kernels(isa, monkeypatch, score, width, dtype, index):
    """Each instruction set, register width and index width; 1, 3 and 5 heads."""
    if index == "int64":
        for module in (gnnaccel.graph, native, reference):
            monkeypatch.setattr(module, "index_dtype", lambda *sizes: torch.int64)
    case = BIPARTITE["wide"]
    graph = Graph.from_edge_index(case.edge_index, size=case.size)
    assert graph.index_dtype == getattr(torch, index)
    for heads in (1, 3, 5):
        _compare(case, score, dtype, graph=graph, heads=heads, width=width)
        _compare(case, score, dtype, full=BARE, graph=graph, heads=heads, width=width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 5, 8, 16, 17])
@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_edges_that_a_map_makes(isa, score, width, dtype):
    for depth, heads in ((1, 3), (3, 4), (32, 1), (33, 2)):
        sizes = {"depth": depth, "heads": heads, "width": width}
        _compare(BIPARTITE["wide"], score, dtype, **sizes)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_edges_that_a_map_makes_on_every_graph(backend, score, name):
    if "hub" in name and backend != "native":
        pytest.skip("its slices are the compiled kernels'")
    _compare(ALL[name], score, depth=3)


@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_any_gradient_of_mapped_edges_alone(backend, score):
    case = BIPARTITE["padded"]
    for name in ("edge", "map"):
        tensors = {
            k: v.detach().requires_grad_(k == name)
            for k, v in _tensors(case, score, depth=3).items()
        }
        ours, oracle = _functions(case, score, tensors)
        compare(
            ours,
            oracle,
            tuple(tensors.values()),
            absolute=False,
            floor=1 / 64,
            slack=20,
        )


@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_derivatives_of_mapped_edges(score):
    tensors = _tensors(SQUARE["double_loops"], score, 2, 2, depth=2)
    ours, _ = _functions(SQUARE["double_loops"], score, tensors)
    assert gradcheck(ours, tuple(tensors.values()))
    assert gradgradcheck(ours, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_no_row_per_edge_where_a_map_makes_them(monkeypatch, score):
    if not native.available():
        pytest.skip(str(native.reason()))
    # torch's profiler does not see the pool.
    monkeypatch.setattr(memory, "THRESHOLD", 1 << 60)
    edges, nodes, heads, columns = 40_000, 50, 2, 64
    case = SQUARE["hub"]._replace(
        edge_index=torch.randint(nodes, (2, edges)), num_src=nodes, num_dst=nodes
    )
    tensors = _tensors(case, score, heads, columns, depth=4)
    graph = Graph.of(case.edge_index, case.size)
    _ours(graph, score, 0.2, tensors).sum().backward()
    with torch.profiler.profile(profile_memory=True) as record:
        _ours(graph, score, 0.2, tensors).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in record.events())
    assert largest < edges * heads * columns


@pytest.mark.parametrize("masked", [100, 150])
def test_masked_edges_take_no_share(isa, masked):
    """Logits of -inf, more of them than are worked on at once; or all of a row's."""
    edge_index = torch.stack([torch.arange(150) % 7, torch.zeros(150).long()])
    case = SQUARE["hub"]._replace(edge_index=edge_index, num_src=7, num_dst=7)
    tensors = {k: v.detach() for k, v in _tensors(case, "sum", width=16).items()}
    tensors["bias"][:masked] = -torch.inf
    ours, oracle = _functions(case, "sum", tensors)
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype) for x in tensors.values()]
        actual, expected = ours(*given), oracle(*given)
        assert bool(expected[0].isnan().all()) == (masked == 150)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("score", SCORES)
def test_logits_that_rise_along_a_row(isa, score):
    """What was summed before a larger logit is brought to its scale."""
    edge_index = torch.stack([torch.arange(300), torch.zeros(300).long()])
    case = BIPARTITE["wide"]._replace(edge_index=edge_index, num_src=300, num_dst=1)
    tensors = _tensors(case, score, heads=3, width=7, full=BARE)
    rising = torch.linspace(-40, 40, 300, dtype=torch.float64)
    with torch.no_grad():
        tensors["key"] += rising.view(-1, *[1] * (tensors["key"].dim() - 1))
    ours, oracle = _functions(case, score, tensors)
    compare(ours, oracle, tuple(tensors.values()), absolute=False, floor=1, slack=40)


@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_those_of_the_backend_that_ran(score):
    if not native.available():
        pytest.skip(str(native.reason()))
    case = BIPARTITE["wide"]
    graph = Graph.of(case.edge_index, case.size)
    found = []
    for first, second in (("native", "reference"), ("reference", "native")):
        torch.manual_seed(3)
        tensors = _tensors(case, score)
        with ops.backend(first):
            out = _ours(graph, score, 0.2, tensors)
        with ops.backend(second):
            out.square().sum().backward()
        found.append([x.grad for k, x in tensors.items() if k != "keep"])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 5, 8, 16, 17, 40])
def test_products_of_heads(isa, width, dtype):
    for rows, heads in ((1100, 1), (1100, 3), (1100, 4), (1100, 6), (0, 2)):
        x, of_x = torch.randn(2, rows, heads, width, dtype=dtype)
        atts = list(torch.randn(2, heads, width, dtype=dtype))
        grads = list(torch.randn(2, rows, heads, dtype=dtype))
        for count in (1, 2):
            given = (x, atts[:count])
            torch.testing.assert_close(
                native.head_dots(*given), reference.head_dots(*given)
            )
            sums = [of_x.clone(), of_x.clone()]
            found = [
                kernel.head_dots_backward(*given, grads[:count], own)
                for kernel, own in zip((native, reference), sums, strict=True)
            ]
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(*sums)


@pytest.mark.parametrize("name", ["hub", "hub_source"])
@pytest.mark.parametrize("score", SCORES)
def test_a_hub_is_cut_into_slices(isa, score, name):
    for full in (FULL, BARE):
        _compare(ALL[name], score, full=full, heads=3, width=17)
        # Twenty thousand roundings in one sum of either sign.
        _compare(ALL[name], score, torch.float32, full, heads=3, width=17, slack=100)
    if score != "sum":
        _compare(ALL[name], score, heads=3, width=17, depth=3)


@pytest.mark.parametrize("full", [FULL, BARE])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["double_loops", "wide", "isolated"])
def test_derivatives(backend, name, score, full):
    tensors = _tensors(ALL[name], score, 2, 2, full)
    ours, _ = _functions(ALL[name], score, tensors)
    assert gradcheck(ours, tuple(tensors.values()))
    assert gradgradcheck(ours, tuple(tensors.values()), fast_mode=True)


def _first_and_second(function, leaves):
    """All gradients as those see them who go on to differentiate them; and of those."""
    generator = torch.Generator().manual_seed(5)

    def noise(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    out = function(*leaves)
    first = torch.autograd.grad(out, leaves, noise(out), create_graph=True)
    total = sum((g * noise(g)).sum() for g in first)
    return [*first, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("full", [FULL, BARE])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_that_are_differentiated(backend, score, full):
    """Torch's own check only says that they agree with their own derivatives."""
    case = BIPARTITE["wide"]
    tensors = _tensors(case, score, full=full)
    keep = tensors.pop("keep", None)
    more = {} if keep is None else {"keep": keep}
    names = list(tensors)
    graph = Graph.of(case.edge_index, size=case.size)

    def given(values):
        return dict(zip(names, values, strict=True)) | more

    leaves = tuple(tensors.values())
    actual = _first_and_second(lambda *v: _ours(graph, score, 0.2, given(v)), leaves)
    expected = _first_and_second(lambda *v: _oracle(case, score, 0.2, given(v)), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", ["mlp", "dot"])
def test_one_tensor_may_be_query_and_key(score):
    """Its gradient, and the gradient of that, add up those of both parts."""
    case = SQUARE["loops"]
    graph = Graph.of(case.edge_index, size=5)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    more = {"att": torch.randn(2, 3, dtype=torch.float64)} if score == "mlp" else {}
    same = ("query", "key") if score == "mlp" else ("query", "key", "value")

    def given(x):
        return dict.fromkeys(same, x) | more

    actual = _first_and_second(lambda x: _ours(graph, score, 0.2, given(x)), (x,))
    expected = _first_and_second(lambda x: _oracle(case, score, 0.2, given(x)), (x,))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert gradcheck(lambda x: _ours(graph, score, 0.2, given(x)), (x,))


@pytest.mark.parametrize("score", SCORES)
def test_layouts_of_the_incoming_gradient(backend, score):
    case = SQUARE["unsorted"]
    tensors = _tensors(case, score)
    ours, oracle = _functions(case, score, tensors)
    compare_gradient_layouts(ours, oracle, tuple(tensors.values()))


@pytest.mark.parametrize("score", SCORES)
def test_layouts_of_the_inputs(backend, score):
    case = SQUARE["unsorted"]
    tensors = _tensors(case, score)
    strided = tuple(
        x.detach().repeat_interleave(2, 0)[::2].requires_grad_(x.requires_grad)
        for x in tensors.values()
    )
    ours, oracle = _functions(case, score, tensors)
    compare(ours, oracle, strided, absolute=False, floor=1 / 64, slack=20)


@pytest.mark.parametrize("score", SCORES)
def test_any_input_may_be_the_only_one_to_learn(backend, score):
    case = BIPARTITE["padded"]
    for name in _tensors(case, score):
        if name == "keep":
            continue
        tensors = {
            k: v.detach().requires_grad_(k == name)
            for k, v in _tensors(case, score).items()
        }
        ours, oracle = _functions(case, score, tensors)
        found = compare(
            ours,
            oracle,
            tuple(tensors.values()),
            absolute=False,
            floor=1 / 64,
            slack=20,
        )
        assert len(found) == 2


@pytest.mark.parametrize("score", SCORES)
def test_poisoned_memory(backend, poisoned, score):
    for name, case in ALL.items():
        if "hub" not in name:
            fresh = case._replace(edge_index=case.edge_index.clone())
            _compare(fresh, score)
            _compare(fresh, score, full=BARE)


@pytest.mark.parametrize("score", SCORES)
def test_two_runs_are_bit_equal(score):
    case = SQUARE["hub"]
    tensors = {
        k: v.detach().float() for k, v in _tensors(case, score, width=17).items()
    }
    runs = []
    for _ in range(2):
        leaves = {k: v.clone().requires_grad_(k != "keep") for k, v in tensors.items()}
        out = _ours(Graph.of(case.edge_index, case.size), score, 0.2, leaves)
        out.square().sum().backward()
        runs.append([out, *(v.grad for k, v in leaves.items() if k != "keep")])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        edges = random_edges(300, 300, 9000)
        case = SQUARE["hub"]._replace(edge_index=edges, num_src=300, num_dst=300)
        for score in SCORES:
            _compare(case, score, width=16)
            _compare(SQUARE["hub"], score, width=16)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("score", SCORES)
def test_special_values_stay_where_they_are_reached(backend, score, special):
    case = SQUARE["unsorted"]
    tensors = {k: v.detach() for k, v in _tensors(case, score, full=BARE).items()}
    tensors["key"][4] = special
    ours, oracle = _functions(case, score, tensors)
    compare(
        ours, oracle, tuple(tensors.values()), absolute=False, floor=1 / 64, slack=20
    )


@pytest.mark.parametrize("score", SCORES)
def test_compiles_whole(score):
    case = SQUARE["double_loops"]
    tensors = _tensors(case, score)
    names = list(tensors)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(edge_index, *values):
        x = dict(zip(names, values, strict=True))
        return _ours(edge_index, score, 0.2, x | {"keep": x["keep"]})

    _, oracle = _functions(case, score, tensors)
    compare(
        lambda *values: function(case.edge_index, *values),
        oracle,
        tuple(tensors.values()),
        absolute=False,
        floor=1 / 64,
        slack=20,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "cosine"}, "cosine"),
        ({"query": None}, "needs 'query'"),
        ({"value": torch.randn(9, 2)}, r"\[9, 2\]"),
        ({"value": torch.randn(8, 2, 3)}, r"\[8, 2, 3\]"),
        ({"query": torch.randn(4, 2, 4)}, r"\[4, 2, 4\]"),
        ({"query": torch.randn(4, 2, 3).double()}, "float64"),
        ({"keep": torch.randn(29, 2)}, r"\[29, 2\]"),
        ({"bias": torch.randn(30, 2)}, "takes no 'bias'"),
        ({"score": "mlp"}, "needs 'att'"),
        ({"map": torch.randn(5, 2, 3)}, "takes no 'map'"),
        (
            {"edge": torch.randn(30, 4), "map": torch.randn(5, 2, 3)},
            r"\[30, 4\]",
        ),
        (
            {"edge": torch.randn(30, 5), "map": torch.randn(5, 6)},
            r"\[5, 6\]",
        ),
        ({"query": torch.randn(4, 2, 3).to("meta")}, "meta"),
    ],
)
def test_bad_arguments_name_the_value(change, message):
    case = BIPARTITE["wide"]
    graph = Graph.of(case.edge_index, case.size)
    given = {"query": torch.randn(4, 2, 3), "key": torch.randn(9, 2, 3)} | change
    with pytest.raises(ValueError, match=message):
        ops.attention(graph, **given)
    with pytest.raises(TypeError, match="'value'"):
        ops.attention(graph, given["query"], given["key"], [1.0])
