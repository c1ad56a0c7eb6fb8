"""The node cases of the ``onnx`` package: every case gives its expected outputs, or :data:`FAILURES` names it with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from netcl.core.device import device as activate
from netcl.io import FileError
from netcl.ops import random

onnx = pytest.importorskip("onnx")
if tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 19):
    pytest.skip("the cases of older versions hold small floats in dtypes of their own", allow_module_level=True)

from netcl.io.onnx import import_onnx  # noqa: E402

#: Cases that do not give the expected outputs, by reason.
FAILURES = {
    "random values: shape and dtype are right": """
        test_bernoulli test_bernoulli_double test_bernoulli_seed test_training_dropout test_training_dropout_default
        test_training_dropout_default_mask test_training_dropout_mask""",
    "ImageDecoder: images are decoded by netcl.vision": """
        test_image_decoder_decode_bmp_rgb test_image_decoder_decode_jpeg2k_rgb test_image_decoder_decode_jpeg_bgr
        test_image_decoder_decode_jpeg_grayscale test_image_decoder_decode_jpeg_rgb test_image_decoder_decode_png_rgb
        test_image_decoder_decode_pnm_rgb test_image_decoder_decode_tiff_rgb test_image_decoder_decode_webp_rgb""",
    "strings: tensors hold numbers": """
        test_ai_onnx_ml_label_encoder_string_int test_ai_onnx_ml_label_encoder_string_int_no_default
        test_ai_onnx_ml_label_encoder_tensor_mapping test_ai_onnx_ml_label_encoder_tensor_value_only_mapping test_equal_string
        test_equal_string_broadcast test_regex_full_match_basic test_regex_full_match_email_domain test_regex_full_match_empty
        test_string_concat test_string_concat_broadcasting test_string_concat_empty_string test_string_concat_utf8
        test_string_concat_zero_dimensional test_string_split_basic test_string_split_consecutive_delimiters
        test_string_split_empty_string_delimiter test_string_split_empty_tensor test_string_split_maxsplit test_string_split_no_delimiter
        test_strnormalizer_export_monday_casesensintive_lower test_strnormalizer_export_monday_casesensintive_nochangecase
        test_strnormalizer_export_monday_casesensintive_upper test_strnormalizer_export_monday_empty_output
        test_strnormalizer_export_monday_insensintive_upper_twodim test_strnormalizer_nostopwords_nochangecase""",
    "ai.onnx.ml: trees and encoders of tables": """
        test_ai_onnx_ml_array_feature_extractor test_ai_onnx_ml_binarizer test_ai_onnx_ml_tree_ensemble_set_membership
        test_ai_onnx_ml_tree_ensemble_single_tree""",
    "ai.onnx.preview.training: optimizers are in netcl.optim": """
        test_adagrad test_adagrad_multiple test_adam test_adam_multiple test_momentum test_momentum_multiple
        test_nesterov_momentum""",
}
RANDOM, *_ = FAILURES
#: Node cases of onnx 1.23, without those that are the definition of another as a graph, and how many are right.
TOTAL, RIGHT = 1404, 1351


@functools.cache
def cases() -> list:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return collect_testcases(None)


def array(x):
    if isinstance(x, list):
        return [array(part) for part in x]
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x if x is None else np.asarray(x)


def difference(mine, expected) -> str:
    """What differs between a result and an expected output; empty if nothing does."""
    if expected is None or isinstance(expected, list):
        lengths = f"{len(mine)} tensors, expected {len(expected)}" if expected is not None and len(mine) != len(expected) else ""
        return lengths or next(filter(None, map(difference, mine or (), expected or ())), "")
    mine, kind = mine.to_host(), expected.dtype.name
    if mine.shape != expected.shape:
        return f"shape {mine.shape}, expected {expected.shape}"
    if expected.dtype.kind == "V" or kind == "bfloat16" or kind.startswith(("float8", "float4", "int4", "uint4", "int2", "uint2")):
        expected = expected.astype(np.float32 if "float" in kind else mine.dtype)  # held in a wider dtype
    if mine.dtype != expected.dtype:
        return f"dtype {mine.dtype}, expected {expected.dtype}"
    rough = {"float16": 2**-9, "bfloat16": 2**-6}.get(kind, 0.0)
    near = (
        np.allclose(mine, expected, max(1e-3, rough), max(1e-5, rough / 64), equal_nan=True)
        if mine.dtype.kind == "f"
        else np.array_equal(mine, expected)
    )
    return "" if near else "values"


def outcome(case) -> str:
    """Empty if a case gives the expected outputs; else how it fails, which may be an error that names its operator."""
    inputs, outputs = ([array(x) for x in side] for side in case.data_sets[0])
    try:
        random.manual_seed(1)
        made = import_onnx(case.model.SerializeToString())(*inputs)
    except (FileError, ValueError, TypeError) as error:
        assert str(error).startswith("["), (case.name, error)
        return "refused"
    made = made if isinstance(made, tuple) else (made,)
    return next(filter(None, map(difference, made, outputs)), "") if len(made) == len(outputs) else "number of outputs"


def failures(chosen: list) -> dict[str, str]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: how for case in chosen if (how := outcome(case))}


def expected_failures() -> dict[str, str]:
    return {name: "values" if reason is RANDOM else "refused" for reason, names in FAILURES.items() for name in names.split()}


def check(found: dict[str, str], chosen: list) -> None:
    names = {case.name.removesuffix("_expanded") for case in chosen}
    listed = {name: how for name, how in expected_failures().items() if name in names}
    found = {name.removesuffix("_expanded"): how for name, how in found.items()}
    if onnx.__version__.startswith("1.23."):
        assert found == listed
    else:  # other versions have other cases; what is not listed may be refused, never wrong
        assert {name: how for name, how in found.items() if name not in listed and how != "refused"} == {}


def test_node_cases_on_numpy():
    chosen = [case for case in cases() if "_expanded" not in case.name]
    with activate("cpu"):
        found = failures(chosen)
    check(found, chosen)
    if onnx.__version__.startswith("1.23."):
        assert (len(chosen), len(chosen) - len(found)) == (TOTAL, RIGHT)


@pytest.mark.slow
def test_definitions_as_graphs_on_numpy():
    """Cases whose model is the definition of an operator by others."""
    chosen = [case for case in cases() if "_expanded" in case.name and not case.name.startswith("test_bernoulli")]
    with activate("cpu"):
        check(failures(chosen), chosen)


def test_models_of_early_opsets_on_numpy():
    """The small models that PyTorch and others once exported: right from opset 7 on, right or refused before."""
    folder, right, wrong = Path(onnx.__file__).parent / "backend/test/data", 0, {}
    for path in sorted(folder.glob("*/*/model.onnx")):
        model = onnx.load(path)
        data = [sorted(path.parent.glob(f"test_data_set_0/{side}_*.pb")) for side in ("input", "output")]
        tensors = tuple([onnx.TensorProto.FromString(file.read_bytes()) for file in side] for side in data)
        strings = any(x.data_type == onnx.TensorProto.STRING for side in tensors for x in side)
        early = model.opset_import[0].version < 7
        with activate("cpu"):
            how = outcome(SimpleNamespace(name=path.parent.name, model=model, data_sets=[tensors]))
        right += not how
        if how and not (how == "refused" and (early or strings or "gradient" in path.parent.name)):
            wrong[path.parent.name] = how
    assert wrong == {} and (right >= 110 or not onnx.__version__.startswith("1.23."))


PARTS = 24


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
def test_node_cases_on_a_device(cl_device, part):
    def has_doubles(case) -> bool:
        values = [*case.model.graph.input, *case.model.graph.output]
        return any(value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for value in values)

    chosen = [case for case in cases() if "_expanded" not in case.name][part::PARTS]
    chosen = [case for case in chosen if cl_device.profile.has_fp64 or not has_doubles(case)]
    with activate(cl_device):
        check(failures(chosen), chosen)
