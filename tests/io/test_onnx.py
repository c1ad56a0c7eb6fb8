"""ONNX: what is exported gives onnxruntime's outputs, what is imported gives netcl's, and what cannot be said is named at once."""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.amp import autocast
from netcl.core.device import device as activate
from netcl.core.errors import AutogradError
from netcl.core.tensor import Tensor
from netcl.engine import registry
from netcl.io import FileError, load_params, save_model, save_params
from netcl.ops import random

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from netcl.io.onnx import export_onnx, import_onnx  # noqa: E402
from netcl.io.onnx.table import NEWER, entries_by_operator  # noqa: E402


@pytest.fixture(autouse=True)
def on_numpy():
    with activate("cpu"):
        random.manual_seed(1)
        yield


def ran(path, *inputs: np.ndarray) -> list[np.ndarray]:
    """What onnxruntime makes of a file."""
    alone = runtime.SessionOptions()
    alone.intra_op_num_threads = 1  # its threads wait by spinning
    session = runtime.InferenceSession(str(path), alone, providers=["CPUExecutionProvider"])
    return session.run(None, {entry.name: x for entry, x in zip(session.get_inputs(), inputs, strict=True)})


def results(value) -> list[np.ndarray]:
    return [t.to_host() for t in (value if isinstance(value, tuple | list) else (value,))]


# ---- models

IMAGES = np.random.default_rng(0).standard_normal((3, 3, 16, 16)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 17, (3, 8))
MODELS = {
    "mlp": (lambda: nn.MLP(12, [16, 9], 5, activation="gelu"), IMAGES.reshape(3, -1)[:, :12]),
    "lenet": (lambda: nn.LeNet(10, 3, 16), IMAGES),
    "resnet18": (lambda: nn.resnet18(num_classes=10), IMAGES),
    "bottleneck": (lambda: nn.ResNet(nn.Bottleneck, [1, 1, 1, 1], num_classes=4), IMAGES),
    "vit": (lambda: nn.ViT(image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=7), IMAGES),
    "gpt": (lambda: nn.GPT(17, block_size=8, n_layer=2, n_head=2, n_embd=16), TOKENS),
    "lstm": (lambda: nn.Sequential(nn.LSTM(16, 5, batch_first=True), First(), nn.Linear(5, 2)), IMAGES[:, 0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), IMAGES[:, 0]),
}


class First(nn.Module):
    def forward(self, both):
        return both[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_go_out_and_come_back(tmp_path, name, dynamic):
    make, x = MODELS[name]
    model = make()
    model.train()(x)  # moves running statistics away from where they start
    export_onnx(model, tmp_path / "m.onnx", x, dynamic_batch=dynamic)
    assert model.training, "the export gives the mode back"
    again = import_onnx(tmp_path / "m.onnx")
    for batch in [x, x[:1], np.concatenate([x, x])] if dynamic else [x]:
        expected = model.eval()(batch).to_host()
        (got,) = ran(tmp_path / "m.onnx", batch)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(again(batch).to_host(), expected, rtol=1e-4, atol=1e-4)
    own = {key: t for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert {key: t.shape for key, t in again.state_dict().items()}.items() <= {key: t.shape for key, t in own.items()}.items()


def test_what_changes_in_place_is_exported_with_its_new_values(tmp_path):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(4, 4), nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 4))

        def forward(self, x):
            y = self.first(x)
            return ag.cat([y, self.rest(y)], 1)

    model, x = Joined(), IMAGES.reshape(-1, 4)[:3]
    export_onnx(model, tmp_path / "m.onnx", x)
    np.testing.assert_allclose(ran(tmp_path / "m.onnx", x)[0], model(x).to_host(), rtol=1e-4, atol=1e-5)


def test_an_imported_model_can_be_trained(tmp_path):
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
    x = IMAGES.reshape(3, -1)[:, :12]
    export_onnx(model, tmp_path / "m.onnx", x)
    again = import_onnx(tmp_path / "m.onnx")
    for net in (model, again):
        net(x).sum().backward()
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        np.testing.assert_allclose(other.grad.to_host(), mine.grad.to_host(), rtol=1e-5, atol=1e-6)


def test_what_onnxruntime_cannot_run_is_written_with_a_warning(tmp_path, caplog):
    model, x = nn.Linear(4, 3).to("bfloat16"), Tensor.from_host(np.ones((2, 4), np.float32), dtype="bfloat16")
    export_onnx(model, tmp_path / "m.onnx", x)
    assert "[export_onnx] the file could not be compared: onnxruntime cannot run it" in caplog.text
    again = import_onnx(tmp_path / "m.onnx")(x)
    assert again.dtype == "bfloat16"
    np.testing.assert_allclose(again.to_host(), model(x).to_host(), rtol=2e-2, atol=1e-2)


def test_weights_and_inputs_of_one_name_are_kept_apart(tmp_path):
    """A weight that has the name of an input would be what the input is when nothing is given."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.input, self.output, self.constant_0 = (nn.Parameter(np.full(3, value, np.float32)) for value in (2, 5, 3))

        def forward(self, x):
            return (x + 10.0) * self.input * self.constant_0 + self.output

    x = np.ones(3, np.float32)
    export_onnx(Scale(), tmp_path / "m.onnx", x, check=False)
    model = import_onnx(tmp_path / "m.onnx")
    assert model(x).tolist() == [71, 71, 71] and {"input", "output", "constant_0"} <= set(model.state_dict())
    for names in ({"input_names": ["output"]}, {"input_names": ["x"], "output_names": ["x"]}):
        with pytest.raises(FileError, match=r"\[export_onnx\] the name of an (input|output) must not be that of a weight"):
            export_onnx(Scale(), tmp_path / "m.onnx", x, **names)


def test_an_imported_model_goes_out_again(tmp_path):
    """``save_model`` cannot build a graph of a file again and says what can; its weights are a module's."""
    model, x = nn.Sequential(nn.Linear(12, 8), nn.ReLU()), IMAGES.reshape(3, -1)[:, :12]
    export_onnx(model, tmp_path / "m.onnx", x)
    again = import_onnx(tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"OnnxModel is not registered; write it with export_onnx\(model, path, x\), or its weights with"):
        save_model(again, tmp_path / "m.netcl")
    assert "nodes=" in repr(again) and "array(" not in repr(again)
    save_params(again, tmp_path / "w.npz")
    again.load_state_dict(load_params(tmp_path / "w.npz"))
    export_onnx(again, tmp_path / "n.onnx", x)
    np.testing.assert_array_equal(import_onnx(tmp_path / "n.onnx")(x).to_host(), model(x).to_host())


def test_models_on_a_device(device, tmp_path):
    model = nn.Sequential(
        nn.Conv2d(device.queue, 3, 4, 3), nn.BatchNorm2d(device.queue, 4), nn.SiLU(), nn.Flatten(), nn.Linear(device.queue, 784, 3)
    )
    export_onnx(model, tmp_path / "m.onnx", IMAGES)
    again = import_onnx(tmp_path / "m.onnx", device.queue)
    assert again.queue is device.queue
    expected = model.eval()(IMAGES).to_host()
    np.testing.assert_allclose(again(IMAGES).to_host(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ran(tmp_path / "m.onnx", IMAGES)[0], expected, rtol=1e-4, atol=1e-4)


def test_arguments_may_be_tuples(tmp_path):
    model = nn.LSTM(3, 4)
    x, state = np.ones((5, 2, 3), np.float32), tuple(np.full((1, 2, 4), value, np.float32) for value in (0.5, -1.0))
    export_onnx(model, tmp_path / "f.onnx", x, state)
    assert [entry.name for entry in onnx.load(tmp_path / "f.onnx").graph.input] == ["input", "input_1", "input_2"]
    y, (h, c) = model(x, tuple(map(Tensor.from_host, state)))
    for got, wanted in zip(import_onnx(tmp_path / "f.onnx")(x, *state), (y, h, c), strict=True):
        np.testing.assert_allclose(got.to_host(), wanted.to_host(), rtol=1e-5, atol=1e-6)


def test_several_inputs_and_outputs_are_named(tmp_path):
    def function(a, b):
        return ag.matmul(a, b), {"sum": ag.add(a, 1.5)}

    a, b = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    export_onnx(function, tmp_path / "f.onnx", a, b, input_names=["left", "right"], output_names=["product", "more"])
    made = onnx.load(tmp_path / "f.onnx")
    assert [entry.name for entry in made.graph.input] == ["left", "right"] and [entry.name for entry in made.graph.output] == [
        "product",
        "more",
    ]
    product, more = import_onnx(tmp_path / "f.onnx")(a, b)
    assert np.array_equal(product.to_host(), a @ b) and np.array_equal(more.to_host(), a + 1.5)
    with pytest.raises(FileError, match=r"\[export_onnx\] there must be one name per input, each different; names=\['x'\], count=2"):
        export_onnx(function, tmp_path / "f.onnx", a, b, input_names=["x"])
    with pytest.raises(FileError, match=r"\[export_onnx\] a sample of every input must be given"):
        export_onnx(function, tmp_path / "f.onnx")


# ---- every op

#: Ops whose samples ONNX (or its opset 18, or a trace) cannot express, at least not all of them.
NOT_EXPORTED = set(
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d as_strided_scatter attention
    avg_pool2d batch_norm batch_norm_train bernoulli col2im cross_entropy cross_entropy_forward dropout index_add
    info_nce isin log_softmax masked_scale max_pool2d nll nonzero norm resample2d roll rope row_norm
    softmax strided_unslice take top_indices triplet bincount diag diag_embed erfc index_copy index_fill index_put
    diagflat diagonal_scatter select_scatter slice_scatter unique_consecutive
    masked_select unique bitwise_left_shift bitwise_right_shift finite_argmax
    bucketize cholesky cholesky_solve erfinv fft_from_real fft_pairs fft_to_real histc interpolate
    istft_pairs lgamma linalg_cholesky linalg_cofactors linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_lstsq
    linalg_matrix_norm linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd
    decode_linear integer_columns integer_dot linalg_svdvals linalg_vector_norm logdet matrix_exp matrix_power mode mode_indices qr
    decode_block decode_layers
    quantized_linear quantized_rows cached_attention scatter_reduce scatter_reduced searchsorted
    stft_pairs svd""".split()
)


def calls(row) -> list[tuple[list, dict]]:
    rng = np.random.default_rng(0)
    if isinstance(row, registry.Pointwise | registry.Choice):
        options = {name: 0.3 + 0.2 * (name == "max") for name in row.params if row.name in ("clamp", "clamp_min", "clamp_max")}
        return [([rng.uniform(0.2, 0.9, (3, 4)).astype(np.float32) for _ in row.inputs], options)]
    if isinstance(row, registry.Reduction):
        x = rng.standard_normal((3, 4, 5)).astype(np.float32)
        return [([x], {}), ([x], {"axis": 1}), ([x], {"axis": (0, 2), "keepdims": True})]
    return [(sample.arrays(0), dict(sample.kwargs)) for sample in row.samples]


def function_of(name: str, arrays: list, options: dict):
    """A call as a function of its tensors alone, and those tensors."""
    flat: list[np.ndarray] = []

    def place(value):
        if isinstance(value, list):
            return [place(part) for part in value]
        if not isinstance(value, np.ndarray):
            return lambda tensors: value
        flat.append(value)
        at = len(flat) - 1
        return lambda tensors: tensors[at]

    places = [place(value) for value in arrays]

    def function(*tensors):
        given = [[part(tensors) for part in get] if isinstance(get, list) else get(tensors) for get in places]
        return getattr(ag, name)(*given, **options)

    return function, flat


def rows() -> list[str]:
    private = ("_grad", "_input_grad", "_weight_grad")
    return sorted(name for name, row in registry.REGISTRY.items() if not name.endswith(private) and "grad" not in name and calls(row))


@pytest.mark.parametrize("name", rows())
def test_every_op_goes_out_and_comes_back_or_is_named(tmp_path, name):
    refused = 0
    for arrays, options in calls(registry.REGISTRY[name]):
        function, flat = function_of(name, arrays, options)
        if not flat or any(x.size == 0 for x in flat):
            continue
        try:
            export_onnx(function, tmp_path / "f.onnx", *flat)
        except (FileError, AutogradError) as refusal:
            assert str(refusal).startswith(("[export_onnx] ", "[setitem_] cannot write in place while a model is traced"))
            refused += 1
            continue
        expected = results(function(*[Tensor.from_host(x) for x in flat]))
        for got in (ran(tmp_path / "f.onnx", *flat), results(import_onnx(tmp_path / "f.onnx")(*[Tensor.from_host(x) for x in flat]))):
            for mine, other in zip(expected, got, strict=True):
                assert mine.dtype == other.dtype
                np.testing.assert_allclose(other, mine, rtol=1e-4, atol=1e-5)
    assert bool(refused) == (name in NOT_EXPORTED), "give it an entry in netcl/io/onnx/table.py, or list it here"


def test_what_cannot_be_exported_is_named_at_once(tmp_path):
    def function(x):
        return ag.mul(ag.isin(x, [1.0]), ag.atan2(ag.norm(x, p=3), 2.0)) + Tensor.randn(2, 3)

    with pytest.raises(
        FileError, match=r"\[export_onnx\] the model has ops that cannot be exported: isin, randn; count=2; write them with"
    ):
        export_onnx(function, tmp_path / "f.onnx", np.ones((2, 3), np.float32))
    with pytest.raises(FileError, match=r"cannot be exported: erfc, norm\(p=3\); count=2"):
        export_onnx(lambda x: ag.erfc(ag.norm(x, p=3, axis=1)), tmp_path / "f.onnx", np.ones((2, 3), np.float32))
    assert list(tmp_path.iterdir()) == []


def test_a_branch_of_python_is_refused(tmp_path):
    def function(x):
        return ag.relu(x) if x.sum().item() > 0 else ag.exp(x)

    with pytest.raises(
        FileError,
        match=r"\[export_onnx\] the model must call the same ops .* for all input values; call=1, first=\['exp'\], second=\['relu'\]",
    ):
        export_onnx(function, tmp_path / "f.onnx", np.full((2, 3), -0.1, np.float32))


def test_a_value_from_outside_of_the_ops_is_refused(tmp_path):
    def function(x):
        return ag.add(x, Tensor.from_host(x.to_host() * 2))

    with pytest.raises(FileError, match=r"\[export_onnx\] a tensor that no op computes must have the same values"):
        export_onnx(function, tmp_path / "f.onnx", np.ones((2, 3), np.float32))
    mask = Tensor.from_host(np.tril(np.ones((3, 3), np.float32)))
    export_onnx(lambda x: ag.matmul(x.detach(), mask), tmp_path / "f.onnx", np.ones((2, 3), np.float32))
    assert ran(tmp_path / "f.onnx", np.ones((2, 3), np.float32))[0].tolist() == [[3, 2, 1]] * 2


@pytest.mark.parametrize("sample", [np.zeros((2, 3), int), np.array([1, 2, 1]), np.array(2), np.ones(3, bool), np.full(3, 0.5, np.float32)])
def test_values_read_on_the_host_are_refused_for_any_sample(tmp_path, sample):
    """The second run has other values, also if the sample reads the same backwards."""
    with pytest.raises(FileError, match=r"\[export_onnx\] a tensor that no op computes must have the same values"):
        export_onnx(lambda x: ag.add(Tensor.from_host(x.to_host()), 1), tmp_path / "f.onnx", sample)


def test_a_tensor_may_be_given_for_several_inputs(tmp_path):
    x = Tensor.ones((2, 3))
    export_onnx(lambda a, b: a - 2.0 * b, tmp_path / "f.onnx", x, x)
    assert ran(tmp_path / "f.onnx", np.full((2, 3), 5, np.float32), np.ones((2, 3), np.float32))[0].tolist() == [[3] * 3] * 2


def test_the_batch_is_that_of_the_first_input_with_dimensions(tmp_path):
    scale, x = np.array(2, np.float32), np.ones((2, 3), np.float32)
    export_onnx(lambda s, x: ag.cat([x, Tensor.zeros((len(x), 1))], 1) * s, tmp_path / "f.onnx", scale, x, dynamic_batch=True)
    assert ran(tmp_path / "f.onnx", scale, np.ones((4, 3), np.float32))[0].tolist() == [[2, 2, 2, 0]] * 4


def test_a_batch_that_is_not_free_is_refused(tmp_path):
    for function in (lambda x: ag.split(x, 1, axis=0)[0], lambda x: ag.narrow(x, 0, x.shape[0] - 1, 1), lambda x: ag.var(x, axis=0),
                     lambda x: ag.diagonal(x, 0, 0, 1)):  # fmt: skip
        with pytest.raises(FileError, match=r"\[export_onnx\] .*(dynamic_batch=False|something else)"):
            export_onnx(function, tmp_path / "f.onnx", IMAGES, dynamic_batch=True)
        export_onnx(function, tmp_path / "f.onnx", IMAGES)


def test_diagonals_and_windows_of_a_free_batch(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for function, batch in ((lambda x: ag.diagonal(x, 1, -2, -1) * 2.0, "batch"), (lambda x: ag.unfold(x, 2, 3, 1) + 1.0, "batch"),
                            (lambda x: ag.repeat(x, (2, 1, 1, 1)), 2), (lambda x: ag.cat([x, x], 0), "")):  # fmt: skip
        export_onnx(function, tmp_path / "f.onnx", x[:2], dynamic_batch=True)
        first = onnx.load(tmp_path / "f.onnx").graph.output[0].type.tensor_type.shape.dim[0]
        assert (first.dim_value or first.dim_param) == batch
        np.testing.assert_array_equal(import_onnx(tmp_path / "f.onnx")(x).to_host(), function(Tensor.from_host(x)).to_host())


def test_a_new_pointwise_row_needs_its_own_column_only(tmp_path):
    """The row of an op is all that export and import know of it: the operator, and which attribute is which parameter."""
    formula, operator = "WHERE(v0 > 0, v0, slope * v0)", "LeakyRelu(alpha=slope)"
    row = registry.register(registry.Pointwise("test_leaky", formula, (None,), np.abs, params={"slope": 0.5}, onnx=operator))
    try:
        x = np.array([-2.0, 3.0], np.float32)
        export_onnx(lambda x: ag.test_leaky(x, slope=0.25), tmp_path / "f.onnx", x)
        (node,) = (node for node in onnx.load(tmp_path / "f.onnx").graph.node if node.op_type != "Identity")
        assert node.op_type == "LeakyRelu" and node.attribute[0].f == 0.25
        assert row.name in [entry.op for entry in entries_by_operator()["LeakyRelu"]]
        assert import_onnx(tmp_path / "f.onnx")(x).tolist() == [-0.5, 3.0]
    finally:
        registry.unregister("test_leaky")


def test_every_entry_fits_the_op_and_the_operator():
    """Arguments are those of the op; inputs, attributes and their fixed values those of ONNX."""
    for kind, entries in entries_by_operator().items():
        if not onnx.defs.has(kind) and entries[0].op in NEWER:
            continue  # the package is older than the operator
        form = onnx.defs.get_schema(kind)
        for entry in entries:
            named = {slot.name for slot in (*entry.inputs, *entry.attributes.values()) if slot.name}
            assert {*named, *entry.fixed} <= set(inspect.signature(getattr(ag, entry.op)).parameters), entry
            assert set(entry.attributes) <= set(form.attributes) and len(entry.inputs) <= form.max_input, entry


@pytest.mark.parametrize(
    "name, options, kind",
    [("elu", {"alpha": 0.5}, "Elu"), ("softplus", {}, "Softplus"), ("softplus", {"beta": 2.0}, None), ("hard_swish", {}, "HardSwish"),
     ("logical_xor", {}, "Xor"), ("norm", {"p": 1}, "ReduceL1"), ("clamp", {"min": 0.5}, None), ("atan", {}, "Atan")],
)  # fmt: skip
def test_ops_become_their_operator_if_it_says_all(tmp_path, name, options, kind):
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    arrays = [x] * len(registry.lookup_op(name).inputs)
    export_onnx(lambda *xs: getattr(ag, name)(*xs, **options), tmp_path / "f.onnx", *arrays)
    kinds = [node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node]
    assert (kind in kinds) if kind else name.capitalize() not in kinds
    expected = getattr(ag, name)(*map(Tensor.from_host, arrays), **options)
    np.testing.assert_allclose(import_onnx(tmp_path / "f.onnx")(*arrays).to_host(), expected.to_host(), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", [ag.floor_divide, ag.remainder])
def test_floored_quotients_of_floats(tmp_path, function, dtype):
    """Where a quotient is rounded up to an integer, its floor is not the floored quotient."""
    a, b = (Tensor.from_host(np.array(x), dtype=dtype) for x in ([1, -1, 6, 5, -5, -0.5, 3], [0.1, 0.1, 0.2, -3, 3, np.inf, 0]))
    export_onnx(function, tmp_path / "f.onnx", a, b)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(ran(tmp_path / "f.onnx", a.to_host(), b.to_host())[0], function(a, b).to_host())


@pytest.mark.parametrize("function", [ag.atan2, ag.copysign, ag.hypot])
def test_formulas_of_two_floats_keep_signs_and_infinities(tmp_path, function):
    a, b = (part.reshape(-1) for part in np.meshgrid(*[np.array([0.0, -0.0, 1, -2, 1e30, np.inf, -np.inf], np.float32)] * 2))
    export_onnx(function, tmp_path / "f.onnx", a, b)
    wanted = function(Tensor.from_host(a), Tensor.from_host(b)).to_host()
    (got,) = ran(tmp_path / "f.onnx", a, b)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ag.interpolate(x, scale_factor=0.37, mode="bilinear", recompute_scale_factor=True),
        lambda x: ag.interpolate(x, size=(5, 11), mode="bicubic"),
        lambda x: ag.interpolate(x, scale_factor=(1.3, 0.6), mode="nearest-exact"),
        lambda x: ag.pad(x, [1, 2, 0, 3], mode="circular"),
        lambda x: ag.im2col(x, kernel=(2, 3), stride=(3, 2), padding=(1, 2), dilation=(2, 1)),
        lambda x: ag.grid_sample(x, ag.permute(x[:, :2], (0, 2, 3, 1)), mode="bilinear", padding_mode="reflection"),
        lambda x: x[:, :, ag.sub(ag.argmax(x, 1, keepdims=False)[0, 0], 3), [[1], [4]]],
    ],
    ids=["recomputed factor", "bicubic", "nearest-exact", "circular", "im2col", "grid", "index"],
)
def test_functions_of_images(tmp_path, rng, function):
    x, other = (rng.standard_normal((n, 3, 7, 9)).astype(np.float32) for n in (2, 5))
    export_onnx(function, tmp_path / "f.onnx", x, dynamic_batch=True)
    np.testing.assert_allclose(ran(tmp_path / "f.onnx", other)[0], function(Tensor.from_host(other)).to_host(), rtol=1e-4, atol=1e-5)


def test_a_correction_beyond_the_elements_divides_by_zero(tmp_path):
    export_onnx(lambda x: ag.var(x, 1, correction=2), tmp_path / "f.onnx", np.ones((2, 1), np.float32), check=False)
    assert np.isnan(ran(tmp_path / "f.onnx", np.ones((2, 1), np.float32))[0]).all()


def test_clamp_by_tensors_goes_out_and_comes_back(tmp_path):
    x, low, high = (np.array(values, np.float32) for values in ([-3, 0.5, 3], [-1, -1, -1], [1, 2, 2]))
    export_onnx(lambda x, low, high: ag.clamp(x, low, high), tmp_path / "f.onnx", x, low, high)
    assert import_onnx(tmp_path / "f.onnx")(x, low, high).tolist() == [-1, 0.5, 2]


@pytest.mark.parametrize(
    "function, op, outer",
    [(lambda x: ag.div(x, float(x.shape[0])), "div", ""), (lambda x: ag.var(x, axis=0), "div", " in var"),
     (lambda x: ag.sort(x, 0)[0], "topk", " in sort")],
)  # fmt: skip
def test_a_number_that_follows_the_batch_is_refused(tmp_path, function, op, outer):
    """The error names the op of the model as well as the op it is exported as."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    export_onnx(function, tmp_path / "f.onnx", x)
    what = rf"cannot be exported: {op} with a number that depends on the batch \(pass dynamic_batch=False\){outer}; count=1"
    with pytest.raises(FileError, match=what):
        export_onnx(function, tmp_path / "f.onnx", x, dynamic_batch=True, check=False)


# ---- import


def test_an_attribute_that_is_not_supported_is_named(tmp_path):
    nodes = [onnx.helper.make_node("Add", ["x", "x"], ["y"], axis=0, broadcast=1)]
    onnx.save(model_of(nodes, {"x": [2]}, {"y": [2]}, opset=6), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"\[Add\] attributes must have supported values; axis=0, broadcast=1, node=y"):
        import_onnx(tmp_path / "m.onnx")(np.ones(2, np.float32))


@pytest.mark.parametrize(
    "kind, options",
    [("Celu", {"alpha": 0.5}), ("Shrink", {"lambd": 0.7, "bias": 0.2}), ("ThresholdedRelu", {"alpha": 0.4}),
     ("HardSigmoid", {"alpha": 0.3}), ("Selu", {"alpha": 1.5, "gamma": 1.1}), ("Selu", {})],
)  # fmt: skip
def test_operators_that_are_formulas(tmp_path, kind, options):
    onnx.save(model_of([onnx.helper.make_node(kind, ["x"], ["y"], **options)], {"x": [9]}, {"y": [9]}), tmp_path / "m.onnx")
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    np.testing.assert_allclose(import_onnx(tmp_path / "m.onnx")(x).to_host(), ran(tmp_path / "m.onnx", x)[0], rtol=1e-5, atol=1e-6)


def model_of(nodes: list, inputs: dict[str, list], outputs: dict[str, list], weights: dict[str, np.ndarray] | None = None, opset: int = 18):
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=9)


@pytest.mark.fault("unknown ONNX operators", "a model that has them", "all named at once")
def test_unknown_operators_are_named_at_once(tmp_path):
    make = onnx.helper.make_node
    nodes = [make("StringConcat", ["x", "x"], ["a"]), make("Relu", ["x"], ["b"]), make("ImageDecoder", ["b"], ["c"]),
             make("StringConcat", ["x", "x"], ["d"]), make("FusedGelu", ["b"], ["y"], domain="com.microsoft")]  # fmt: skip
    onnx.save(model_of(nodes, {"x": [2, 2]}, {"y": [2, 2]}, opset=20), tmp_path / "m.onnx")
    unknown = r"ImageDecoder \(1\), StringConcat \(2\), com\.microsoft::FusedGelu \(1\)"
    with pytest.raises(
        FileError,
        match=rf"\[import_onnx\] the model has operators that are not known: {unknown}; file=.*; replace them before the export",
    ):
        import_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["cnn", "encoder"])
def test_models_that_torch_exported(device, name):
    golden = Path(__file__).parents[1] / "golden" / "torch_onnx"
    model = import_onnx(golden / f"{name}.onnx", device.queue)
    with np.load(golden / f"{name}.npz") as file:
        x, expected = file["x"], file["y"]
    for rows in (2, 1):  # the batch is free
        np.testing.assert_allclose(model(Tensor.from_host(device.queue, x[:rows])).to_host(), expected[:rows], rtol=1e-4, atol=1e-5)


def test_nodes_in_any_order():
    helper, made = onnx.helper, onnx.helper.make_node
    body = helper.make_graph([made("Neg", ["t"], ["u"])], "body", [], [helper.make_tensor_value_info("u", 1, [2])])
    nodes = [made("If", ["c"], ["y"], then_branch=body, else_branch=body), made("Exp", ["x"], ["t"])]
    graph = helper.make_graph(nodes, "test", [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("c", 9, [])],
                              [helper.make_tensor_value_info("y", 1, [2])])  # fmt: skip
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    assert import_onnx(data)(np.zeros(2, np.float32), np.array(True)).tolist() == [-1, -1]
    nodes[1].input[0] = "y"
    circle = helper.make_graph(nodes, "test", graph.input, graph.output)
    with pytest.raises(FileError, match="must be a complete ONNX model"):
        import_onnx(helper.make_model(circle).SerializeToString())


def test_older_opsets(tmp_path):
    make = onnx.helper.make_node
    nodes = [
        make("Unsqueeze", ["x"], ["a"], axes=[0]),
        make("Softmax", ["a"], ["b"], axis=1),
        make("Squeeze", ["b"], ["c"], axes=[0]),
        make("ReduceSum", ["c"], ["d"], axes=[1], keepdims=1),
        make("Mul", ["d", "w"], ["e"]),
        make("Clip", ["e"], ["f"], min=0.0, max=0.4),
        make("Dropout", ["f"], ["g"], ratio=0.5),
        make("Slice", ["g"], ["y"], starts=[0], ends=[1], axes=[0]),
    ]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    onnx.save(model_of(nodes, {"x": [2, 3]}, {"y": [1, 3]}, {"w": np.arange(3, dtype=np.float32)}, opset=9), tmp_path / "m.onnx")
    np.testing.assert_allclose(import_onnx(tmp_path / "m.onnx")(x).to_host(), ran(tmp_path / "m.onnx", x)[0], rtol=1e-5)


def test_shapes_computed_in_the_graph(tmp_path):
    make, ints = onnx.helper.make_node, lambda *values: np.array(values, np.int64)
    nodes = [make("Shape", ["x"], ["s"]), make("Gather", ["s", "zero"], ["n"], axis=0), make("Unsqueeze", ["n", "axis"], ["n1"]),
             make("Concat", ["n1", "rest"], ["sizes"], axis=0), make("Reshape", ["x", "sizes"], ["y"])]  # fmt: skip
    weights = {"zero": np.array(0), "axis": ints(0), "rest": ints(-1)}
    onnx.save(model_of(nodes, {"x": ["n", 2, 3]}, {"y": ["n", "m"]}, weights), tmp_path / "m.onnx")
    assert import_onnx(tmp_path / "m.onnx")(np.ones((4, 2, 3), np.float32)).shape == (4, 6)


def test_names_that_are_attributes_of_modules_are_kept_apart(tmp_path):
    nodes = [onnx.helper.make_node("Add", ["x", "forward"], ["a"]), onnx.helper.make_node("Add", ["a", "train.weight"], ["b"]),
             onnx.helper.make_node("Add", ["b", "a.b"], ["c"]), onnx.helper.make_node("Add", ["c", "a..b"], ["y"])]  # fmt: skip
    weights = dict.fromkeys(("forward", "train.weight", "a.b", "a..b"), np.ones(2, np.float32))
    onnx.save(model_of(nodes, {"x": [2]}, {"y": [2]}, weights), tmp_path / "m.onnx")
    model = import_onnx(tmp_path / "m.onnx")
    assert len(model.parameters()) == 4 and model(np.zeros(2, np.float32)).tolist() == [4, 4]


@pytest.mark.fault("damaged ONNX file", "cut, and bits flipped", "`FileError`, or read; never a crash")
def test_damaged_files_are_refused(tmp_path, rng):
    export_onnx(nn.MLP(4, [5], 2), tmp_path / "m.onnx", np.ones((1, 4), np.float32))
    data = (tmp_path / "m.onnx").read_bytes()
    for damaged in [b"", b"text, not a model", data[: len(data) // 2], data[:-1]]:
        (tmp_path / "d.onnx").write_bytes(damaged)
        with pytest.raises(FileError, match=r"\[import_onnx\] .*file="):
            import_onnx(tmp_path / "d.onnx")
    for position in rng.integers(0, len(data), 60):
        changed = bytearray(data)
        changed[position] ^= 1 << int(rng.integers(8))
        (tmp_path / "d.onnx").write_bytes(changed)
        with contextlib.suppress(FileError):
            import_onnx(tmp_path / "d.onnx")
    with pytest.raises(FileNotFoundError):
        import_onnx(tmp_path / "nothing.onnx")


def test_a_type_of_elements_that_there_is_not_is_refused(tmp_path):
    model = model_of([onnx.helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2]}, {"y": [2]}, {"w": np.ones(2, np.float32)})
    model.graph.initializer[0].data_type = 92
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=r"\[import_onnx\] "):
        import_onnx(tmp_path / "m.onnx")


@pytest.mark.fault("ONNX weights outside of the file", "external data above the folder, behind a link, and of another size", "`FileError`")
@pytest.mark.parametrize("where", ["weight", "constant"])
@pytest.mark.parametrize("location", ["../w.bin", "link.bin", "short.bin", "nothing.bin", "folder"])
def test_weights_outside_of_the_folder_are_refused(tmp_path, where, location):
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "w.bin").write_bytes(bytes(8))
    (folder / "short.bin").write_bytes(bytes(7))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    model = with_weight_and_constant()
    outside(model.graph.initializer[0] if where == "weight" else model.graph.node[0].attribute[0].t, location)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=r"\[import_onnx\] (external data|the file must be a complete ONNX model)"):
        import_onnx(folder / "m.onnx")
    with pytest.raises(FileError, match=r"\[import_onnx\] "):
        import_onnx(model.SerializeToString())


def test_weights_beside_the_file_are_read(tmp_path):
    model, values = with_weight_and_constant(), np.array([7, 2, 3, 4, 5], np.float32)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    outside(model.graph.initializer[0], "w.bin", offset=4, length=8)
    outside(model.graph.node[0].attribute[0].t, "w.bin", offset=12)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    again = import_onnx(tmp_path / "m.onnx")
    assert again(np.zeros(2, np.float32)).tolist() == [2 + 4, 3 + 5]
    (parameter,) = again.parameters()
    with ag.no_grad():
        parameter.mul_(2.0)  # of a copy: the file stays
    assert (tmp_path / "w.bin").read_bytes() == values.tobytes()


def test_weights_of_a_branch_beside_the_file_are_read(tmp_path):
    make, value = onnx.helper, onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [2])
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")
    outside(weight, "w.bin")
    branch = make.make_graph([make.make_node("Add", ["x", "w"], ["b"])], "then", [], [value], [weight])
    other = make.make_graph([make.make_node("Identity", ["x"], ["b"])], "else", [], [value])
    nodes = [make.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)]
    model = model_of(nodes, {"x": [2]}, {"y": [2]}, {"c": np.array(True)})
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=r"\[import_onnx\] .*m.onnx"):
        import_onnx(tmp_path / "m.onnx")
    (tmp_path / "w.bin").write_bytes(np.array([3, 4], np.float32).tobytes())
    assert import_onnx(tmp_path / "m.onnx")(np.zeros(2, np.float32)).tolist() == [3, 4]


@pytest.mark.parametrize(("location", "place"), [("w.bin", [("offset", "4")] * 2), ("w" * 5000, [])], ids=["twice", "long"])
def test_places_of_weights_that_cannot_be_are_refused(tmp_path, location, place):
    model = with_weight_and_constant()
    outside(model.graph.initializer[0], location)
    for key, value in place:
        model.graph.initializer[0].external_data.add(key=key, value=value)
    (tmp_path / "w.bin").write_bytes(bytes(16))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=r"\[import_onnx\] .*m.onnx"):
        import_onnx(tmp_path / "m.onnx")


def test_packed_weights_beside_the_file_are_read(tmp_path):
    nodes = [onnx.helper.make_node("Cast", ["w"], ["v"], to=onnx.TensorProto.FLOAT), onnx.helper.make_node("Add", ["x", "v"], ["y"])]
    model = model_of(nodes, {"x": [3]}, {"y": [3]}, opset=21)
    model.graph.initializer.append(onnx.TensorProto(name="w", dims=[3], data_type=onnx.TensorProto.INT4))
    outside(model.graph.initializer[0], "w.bin", offset=1)
    (tmp_path / "w.bin").write_bytes(bytes([255, 0x2F, 0x03]))  # -1, 2 and 3: the low half comes first
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert import_onnx(tmp_path / "m.onnx")(np.zeros(3, np.float32)).tolist() == [-1, 2, 3]


def with_weight_and_constant() -> onnx.ModelProto:
    constant = onnx.helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.ones(2, np.float32)))
    nodes = [constant, onnx.helper.make_node("Sum", ["x", "w", "c"], ["y"])]
    return model_of(nodes, {"x": [2]}, {"y": [2]}, {"w": np.ones(2, np.float32)})


def outside(weight: onnx.TensorProto, location: str, **place: int) -> None:
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **place}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, str(value)


@pytest.mark.filterwarnings("ignore:.autocast. the device has no half arithmetic")
def test_casts_of_autocast_are_exported(tmp_path):
    """Operators of ONNX have inputs of one dtype: the bias of a product is cast with the others, and a softmax gets float32."""
    weight, bias = (Tensor.from_host(np.full(shape, 0.3, np.float32)) for shape in ((5, 4), (5,)))

    @autocast()
    def function(x):
        return ag.sum(ag.softmax(ag.linear(x, weight, bias)), axis=0)

    export_onnx(function, tmp_path / "m.onnx", np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4))  # which compares the results
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert kinds.count("Cast") >= 2 and "Softmax" in kinds


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"\[onnx\] the package onnx is required; pip install onnx"):
        export_onnx(nn.ReLU(), tmp_path / "m.onnx", np.ones(3, np.float32))
    with pytest.raises(ImportError, match="pip install onnx"):
        import_onnx(tmp_path / "m.onnx")
