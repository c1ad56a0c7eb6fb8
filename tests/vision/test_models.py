"""The model zoo against torchvision: names and shapes of every state dict, results of the smallest of each family (of all with --full)."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import netcl
import netcl.io
from netcl import nn
from netcl.core.errors import ShapeError
from netcl.nn import init
from netcl.trainer import recipe
from netcl.vision import models, ops

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED = json.loads((GOLDEN / "vision_models.json").read_text(encoding="utf-8"))
_spec = importlib.util.spec_from_file_location("vision_model_cases", GOLDEN / "vision_model_cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

SMALL = ("convnext_tiny", "deeplabv3_mobilenet_v3_large", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
         "inception_v3", "lraspp_mobilenet_v3_large", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d",
         "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t")  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compared" in metafunc.fixturenames:
        metafunc.parametrize("compared", sorted(EXPECTED) if metafunc.config.getoption("--full") else SMALL)


def filled(name: str):
    """The model with the weights that torchvision's had."""
    with init.skipped():
        model = models.get_model(name, **cases.options(name)).eval()
    own = model.state_dict()
    for key, value in cases.weights(name, {key: tensor.shape for key, tensor in own.items()}, EXPECTED[name]["gain"]):
        own[key].write(value)
    return model


def check(name: str, result) -> None:
    found = cases.summary(result)
    assert set(found) == set(EXPECTED[name]) - {"keys", "parameters", "gain"}
    for key, value in found.items():
        np.testing.assert_allclose(value.to_host(), EXPECTED[name][key], rtol=1e-4, atol=1e-4, err_msg=key)


def test_the_names_are_torchvisions():
    assert models.list_models() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_state_dicts_have_torchvisions_names_and_shapes(name):
    with netcl.device("cpu"), init.skipped():
        model = models.get_model(name)
    assert cases.keys_and_shapes(model.state_dict()) == EXPECTED[name]["keys"]
    assert sum(p.size for p in model.parameters()) == EXPECTED[name]["parameters"]


def test_results_are_torchvisions(compared):
    with netcl.device("cpu"), netcl.no_grad():
        model = filled(compared)
        if compared.startswith("ssd"):
            check_detections(compared, model)
        else:
            check(compared, model(netcl.tensor(cases.images(compared))))


def check_detections(name: str, model) -> None:
    """The best detections of torchvision are among ours, and the losses agree."""
    x = list(netcl.tensor(cases.images(name)))
    for found, expected in zip(model(x), EXPECTED[name]["detections"], strict=True):
        boxes, scores, labels = (found[key].to_host() for key in ("boxes", "scores", "labels"))
        for box, score, label in zip(expected["boxes"], expected["scores"], expected["labels"], strict=True):
            near = (np.abs(boxes - box).max(1) < 1e-2) & (np.abs(scores - score) < 1e-4) & (labels == label)
            assert near.any(), (box, score, label)
    losses = model.train()(x, cases.targets())
    for key, value in EXPECTED[name]["losses"].items():
        np.testing.assert_allclose(float(losses[key].item()), value, rtol=1e-4)


def test_on_devices(device):
    with netcl.device(device), netcl.no_grad():
        check("squeezenet1_1", filled("squeezenet1_1")(netcl.tensor(cases.images("squeezenet1_1"))))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf", "swin_t"])
def test_families_on_devices(device, name, full):
    if not full:
        pytest.skip("only with --full: NumPy has compared it already")
    with netcl.device(device), netcl.no_grad():
        check(name, filled(name)(netcl.tensor(cases.images(name))))


# ---- files


def test_weights_come_from_a_file(tmp_path):
    with netcl.device("cpu"), netcl.no_grad():
        model, x = filled("squeezenet1_1"), netcl.tensor(cases.images("squeezenet1_1"))
        netcl.io.save_safetensors(model.state_dict(), tmp_path / "weights.safetensors")
        same = models.get_model("squeezenet1_1", weights=tmp_path / "weights.safetensors", num_classes=10).eval()
        assert same(x).tolist() == model(x).tolist()


def test_old_names_of_published_densenets_are_read(tmp_path):
    with netcl.device("cpu"):
        with init.skipped():
            model = models.densenet121(num_classes=3)
        first = init.constant_(model.features.denseblock4.denselayer16.conv2.weight, 0.5)
        old = {key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): value for key, value in model.state_dict().items()}
        assert "features.denseblock1.denselayer1.norm.1.weight" in old
        netcl.io.save_safetensors(old, tmp_path / "old.safetensors")
        same = models.densenet121(weights=tmp_path / "old.safetensors", num_classes=3)
        assert same.features.denseblock4.denselayer16.conv2.weight.tolist() == first.tolist()


def test_models_are_saved_and_loaded(tmp_path):
    x = np.random.default_rng(0).standard_normal((1, 1, 32, 32), np.float32)
    with netcl.device("cpu"), netcl.no_grad():
        for name in ("shufflenet_v2_x0_5", "squeezenet1_0"):
            model = models.get_model(name, num_classes=3, in_channels=1).eval()
            netcl.io.save_model(model, tmp_path / "model.netcl")
            assert netcl.io.load_model(tmp_path / "model.netcl")(x).tolist() == model(x).tolist()


@pytest.mark.parametrize("weights", ["DEFAULT", "IMAGENET1K_V1", "missing.pth", 1])
def test_weights_are_not_downloaded(weights):
    with pytest.raises(
        ValueError, match=r"\[resnet18\] weights must be an existing file or None, .*: netcl downloads nothing; .*pass weights="
    ):
        models.resnet18(weights=weights)
    with pytest.raises(ValueError, match=r"\[fcn_resnet50\] .*weights_backbone None.*weights_backbone="):
        models.segmentation.fcn_resnet50(weights_backbone=weights)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"\[get_model\] unknown model; name='resnet5O'; did you mean resnet50"):
        models.get_model("resnet5O")


# ---- training


def test_training_also_gives_the_logits_of_inner_layers():
    with netcl.device("cpu"):
        model, x = models.googlenet(num_classes=3, init_weights=False), netcl.ones((2, 3, 32, 32))
        out = model(x)
        assert type(out).__name__ == "GoogLeNetOutputs" and [tuple(part.shape) for part in out] == [(2, 3)] * 3
        assert out._fields == ("logits", "aux_logits2", "aux_logits1")
        assert model.eval()(x).shape == (2, 3)
        assert models.googlenet(num_classes=3, aux_logits=False, init_weights=False)(x).shape == (2, 3)
        with init.skipped():
            assert models.inception_v3(num_classes=3).eval().AuxLogits(netcl.ones((1, 768, 17, 17))).shape == (1, 3)


def test_images_come_into_the_range_of_the_published_weights():
    mean, std = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    pixels = np.random.default_rng(0).random((1, 3, 32, 32), np.float32)
    with netcl.device("cpu"), netcl.no_grad():
        model = models.googlenet(num_classes=3, aux_logits=False, transform_input=True).eval()
        given = model((pixels - mean[:, None, None]) / std[:, None, None]).to_host()
        model.transform_input = False
        np.testing.assert_allclose(given, model((pixels - 0.5) / 0.5).to_host(), atol=1e-5)


def test_gradients_reach_every_parameter():
    with netcl.device("cpu"):
        for make in (lambda: models.SwinTransformer((4, 4), 8, (1, 2), (1, 2), (2, 2), num_classes=3, version=2),
                     lambda: models.RegNet(3, 8, 8.0, 2.0, 8, 0.25, num_classes=3, stem_width=8),
                     lambda: models.ConvNeXt([(4, 8, 1), (8, None, 1)], 0.0, 1.0, num_classes=3)):  # fmt: skip
            model = make()
            model(netcl.tensor(np.random.default_rng(1).standard_normal((2, 3, 16, 16), np.float32))).sum().backward()
            assert [name for name, p in model.named_parameters() if p.grad is None or not np.isfinite(p.grad.to_host()).all()] == []


def test_stochastic_depth():
    x = netcl.ones((64, 2, 3))
    layer = ops.StochasticDepth(0.5, "row")
    kept = {tuple(np.unique(row)) for row in layer(x).to_host()}
    assert kept == {(0.0,), (2.0,)} and layer.eval()(x).tolist() == x.tolist()
    with pytest.raises(ValueError, match=r"\[StochasticDepth\] mode must be \"batch\" or \"row\"; mode='rows'"):
        ops.StochasticDepth(0.5, "rows")


def test_parameters_have_torchvisions_order():
    """A state of torch's optimizers names parameters by their numbers."""
    with netcl.device("cpu"), init.skipped():
        made = {name: [key.split(".") for key, _ in models.get_model(name).named_parameters()] for name in ("googlenet", "inception_v3")}
        swin = models.SwinTransformer((4, 4), 8, (2,), (2,), (2, 2), num_classes=2)
    branches = [key[1] for key in made["googlenet"] if key[0] == "inception3a"]
    assert branches == sorted(branches)
    assert list(dict.fromkeys(key[0] for key in made["inception_v3"] if key[0] in ("Mixed_6e", "AuxLogits", "Mixed_7a"))) == [
        "Mixed_6e", "AuxLogits", "Mixed_7a"]  # fmt: skip
    assert list(dict(swin.features[1][0].named_children())) == ["norm1", "attn", "norm2", "mlp", "stochastic_depth"]


def test_dilation_keeps_the_size_of_the_maps():
    with netcl.device("cpu"), init.skipped():
        model = models.resnet50(replace_stride_with_dilation=(False, True, True))
    assert [layer.conv2.dilation for layer in (model.layer3[0], model.layer3[1], model.layer4[0], model.layer4[1])] == [
        (1, 1), (2, 2), (2, 2), (4, 4)]  # fmt: skip
    with pytest.raises(ValueError, match=r"\[BasicBlock\] groups must be 1, base_width 64 and dilation 1; .*use Bottleneck"):
        nn.BasicBlock(4, 4, dilation=2)


# ---- boxes


def naive_nms(boxes: np.ndarray, scores: np.ndarray, limit: float) -> list[int]:
    def iou(a, b):
        w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        common = max(w, 0) * max(h, 0)
        return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)

    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(iou(boxes[i], boxes[j]) <= limit for j in kept):
            kept.append(i)
    return kept


def some_boxes(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    corner = rng.uniform(0, 20, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(1, 12, (count, 2))], 1).astype(np.float32), rng.random(count, np.float32)


def test_boxes_that_overlap_better_ones_are_suppressed(device):
    boxes, scores = some_boxes()
    classes = np.arange(60) % 3
    with netcl.device(device):
        x, s = netcl.tensor(boxes), netcl.tensor(scores)
        assert ops.nms(x, s, 0.4).tolist() == naive_nms(boxes, scores, 0.4)
        apart = boxes + 1000.0 * classes[:, None].astype(np.float32)
        assert ops.batched_nms(x, s, netcl.tensor(classes), 0.4).tolist() == naive_nms(apart, scores, 0.4)
        assert ops.nms(netcl.zeros((0, 4)), netcl.zeros((0,)), 0.5).tolist() == []
        assert ops.batched_nms(netcl.zeros((0, 4)), netcl.zeros((0,)), netcl.zeros((0,)), 0.5).tolist() == []


def test_functions_of_boxes(device):
    with netcl.device(device):
        boxes = netcl.tensor([[1.0, 2.0, 5.0, 8.0], [0.0, 0.0, 2.0, 4.0]])
        for form, value in {"xywh": [1.0, 2.0, 4.0, 6.0], "cxcywh": [3.0, 5.0, 4.0, 6.0]}.items():
            other = ops.box_convert(boxes, "xyxy", form)
            assert other.tolist()[0] == value and ops.box_convert(other, form, "xyxy").tolist() == boxes.tolist()
        assert ops.box_area(boxes).tolist() == [24.0, 8.0]
        assert ops.box_area(netcl.tensor([[0.0, 0.0, 500.0, 500.0]], dtype="float16")).tolist() == [250000.0]
        assert ops.box_convert(netcl.tensor([[1.0, 0.0, netcl.inf, 3.0]]), "xyxy", "xyxy").tolist() == [[1.0, 0.0, math.inf, 3.0]]
        np.testing.assert_allclose(ops.box_iou(boxes, boxes).to_host(), [[1, 2 / 30], [2 / 30, 1]], rtol=1e-6)
        assert ops.clip_boxes_to_image(boxes, (5, 3)).tolist() == [[1.0, 2.0, 3.0, 5.0], [0.0, 0.0, 2.0, 4.0]]
        with pytest.raises(ValueError, match=r"\[box_convert\] in_fmt and out_fmt must be one of xyxy, xywh, cxcywh"):
            ops.box_convert(boxes, "xyxy", "yxyx")
        with pytest.raises(ShapeError, match=r"\[nms\] boxes must be \(N, 4\) and scores \(N,\)"):
            ops.nms(boxes, netcl.zeros((3,)), 0.5)


def test_a_detector_in_training_needs_targets():
    with netcl.device("cpu"), init.skipped():
        model = models.ssd300_vgg16(num_classes=2)
    with pytest.raises(ValueError, match=r"\[SSD\] targets are required in training; call model\(images, targets\)"):
        model([netcl.ones((3, 8, 8))])
    with pytest.raises(ShapeError, match=r"\[SSD\] there must be at least one image, each of shape \(channels, height, width\)"):
        model([netcl.ones((8, 8))])
    for boxes, labels in (([[0.0, 0.0, 2.0, 2.0]], [1, 1]), ([[2.0, 0.0, 1.0, 2.0]], [1])):
        with pytest.raises(ShapeError, match=r"\[SSD\] boxes must have shape \(N, 4\) and positive sizes.*with one label for each"):
            model._losses(netcl.zeros((1, 2, 2)), netcl.zeros((1, 2, 4)), np.ones((2, 4), np.float32), [(8, 8)],
                          [{"boxes": np.array(boxes), "labels": np.array(labels)}])  # fmt: skip


# ---- preprocessing, and other ways to the models


def test_models_are_trained_by_name():
    data = SimpleNamespace(shape=(1, 64, 64), outputs=3, is_text=False)
    for name in ("squeezenet1_1", "googlenet", "vit_b_32"):
        with init.skipped():
            model = recipe.make_model(recipe.Recipe(model=name), data, "cpu")
        assert next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels == 1
    assert model.image_size == 64 and model.heads[0].out_features == 3
    assert "ssd300_vgg16" not in recipe.MODELS and "resnet152" in recipe.MODELS


def test_presets_are_torchvisions():
    preset = models.get_transforms("efficientnet_v2_l")
    assert (preset.crop_size, preset.resize_size, preset.interpolation.value, preset.mean) == (480, 480, "bicubic", (0.5, 0.5, 0.5))
    assert models.get_transforms("resnet50").crop_size == 224 and models.get_transforms("fcn_resnet50").crop_size is None
    image = netcl.tensor(np.random.default_rng(0).integers(0, 256, (3, 300, 400)).astype(np.uint8))
    made = models.get_transforms("resnet50")(image)
    assert made.shape == (3, 224, 224) and made.dtype == "float32" and abs(float(made.to_host().mean())) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"])
def test_onnxruntime_gives_the_same_for_small_models(name, tmp_path):
    check_export(name, tmp_path / "model.onnx")


@pytest.mark.slow
def test_onnxruntime_gives_the_same(compared, tmp_path, full):
    if not full or compared.startswith("ssd"):
        pytest.skip("with --full only; detections have no fixed number")
    check_export(compared, tmp_path / "model.onnx")


def check_export(name: str, path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    with netcl.device("cpu"), netcl.no_grad():
        netcl.io.export_onnx(filled(name), path, netcl.tensor(cases.images(name)))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: cases.images(name)})
    for key, value in zip([key for key in ("out", "aux") if key in EXPECTED[name]], found, strict=True):
        np.testing.assert_allclose(cases.summary(value)["out"], EXPECTED[name][key], rtol=1e-4, atol=1e-4)
