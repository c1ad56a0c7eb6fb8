"""Models of timm (PyPI), run by ``netcl.torch`` and by torch with the same weights: outputs and gradients compared.

    python benchmarks/timm_models.py reference FOLDER [MODEL ...]                     with torch and torchvision: writes FOLDER/MODEL.pt
    python -m netcl.torch --device cuda benchmarks/timm_models.py compare FOLDER [--out FILE]      with netcl: prints and writes differences

Both need ``pip install --no-deps timm`` and ``huggingface_hub``. Weights are random, batch norm uses its running statistics. A gradient's
difference is relative to its largest element, or to 1e-5 of the largest of all gradients if that is more: the gradient of a bias before a
normalization is 0 but for rounding. Of the largest differences, 3e-3 to 2e-2,
five were checked in float64: netcl agrees there to 3e-6 (darknet53), and torch's own float32 is as far from its float64 (hiera_tiny_224
2.1e-2, ese_vovnet19b_dw 1.6e-2, pnasnet5large 6.9e-3, dla46_c 3.3e-3).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import timm
import torch

#: Of many families, as small as each has them.
MODELS = """resnet18 resnet26d seresnet18 resnext26ts efficientnet_b0 efficientnetv2_rw_t mobilenetv3_small_075 mobilenetv4_conv_small
    mobilenetv2_035 vit_tiny_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 convnext_atto convnextv2_atto regnetx_002
    regnety_002 densenet121 vgg11 inception_v3 xcit_nano_12_p16_224 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 ghostnet_050 hardcorenas_a
    levit_128s poolformer_s12 edgenext_xx_small mobilevit_xxs mobileone_s0 repvgg_a0 tinynet_e lcnet_035 hrnet_w18_small dla46_c dpn48b
    nfnet_f0 cait_xxs24_224 crossvit_tiny_240 coat_tiny pvt_v2_b0 twins_svt_small maxvit_pico_rw_256 coatnet_nano_rw_224
    beit_base_patch16_224 eva02_tiny_patch14_224 fastvit_t8 repvit_m0_9 efficientformer_l1 tresnet_m volo_d1_224 visformer_tiny
    focalnet_tiny_srf davit_tiny inception_next_atto starnet_s1 rdnet_tiny mambaout_femto hiera_tiny_224 vit_tiny_r_s16_p8_224 selecsls42
    rexnet_100 skresnet18 cspresnet50 darknet53 eca_nfnet_l0 gcresnet33ts halonet26t lambda_resnet26t botnet26t_256 bat_resnext26ts
    sehalonet33ts tf_efficientnet_b0 res2net50_14w_8s resnest14d nasnetalarge pnasnet5large vovnet39a ese_vovnet19b_dw xception41 hgnet_tiny
    gernet_s swinv2_tiny_window8_256 tiny_vit_5m_224 nextvit_small vit_base_patch16_siglip_224 naflexvit_base_patch16_gap
    samvit_base_patch16_224 vitamin_small_224 shvit_s1 swiftformer_xs efficientvit_b0 efficientvit_m0 mvitv2_tiny""".split()
FIXED = {"halonet26t": 256, "lambda_resnet26t": 256, "bat_resnext26ts": 256, "sehalonet33ts": 256, "visformer_tiny": 224, "davit_tiny": 224,
         "coat_tiny": 224, "twins_svt_small": 224, "efficientformer_l1": 224, "efficientvit_m0": 224, "mvitv2_tiny": 224,
         "inception_v3": 96, "nasnetalarge": 96, "pnasnet5large": 96}  # fmt: skip


def image_size(name: str) -> int:
    """The size in the name of a model that has a fixed one, else small."""
    last = name.rpartition("_")[2]
    return FIXED.get(name) or (int(last) if last.isdecimal() and int(last) >= 224 else 224 if "224" in name or "naflex" in name else 64)


def reference(folder: Path, names: list[str]) -> None:
    """Write the weights, an input, its output and all gradients of each model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        torch.manual_seed(0)
        model, size = timm.create_model(name, num_classes=10).eval(), image_size(name)
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.05 + key.endswith(("norm.weight", "bn.weight", "running_var")))
            if key.endswith("running_var"):
                value.abs_()
        x = torch.randn(2, 3, size, size)
        y = model(x)
        gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)
        torch.save({"state": model.state_dict(), "x": x, "y": y.detach(), "gradients": list(gradients)}, folder / f"{name}.pt")
        print(name, size, flush=True)


def far(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    return float((got - want).abs().max()) / max(least, float(want.abs().max()), 1e-30)


def compare(folder: Path, out: str, commit: str) -> None:
    """Compute what the files of a folder hold, and print and write the largest relative differences."""
    rows = {}
    for path in sorted(folder.glob("*.pt")):
        kept = torch.load(path, map_location=torch.empty(0).device)
        model = timm.create_model(path.stem, num_classes=10).eval()
        model.load_state_dict(kept["state"])
        y = model(kept["x"])
        gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)
        pairs = [(got, want) for got, want in zip(gradients, kept["gradients"], strict=True) if got is not None or want is not None]
        if any(got is None or want is None for got, want in pairs):
            raise SystemExit(f"{path.stem}: a parameter has a gradient in one of the two alone")
        least = 1e-5 * max(float(want.abs().max()) for _, want in pairs)
        rows[path.stem] = {"output": far(y, kept["y"]), "gradients": max(far(got, want, least) for got, want in pairs)}
        print(path.stem, " ".join(f"{name} {value:.1e}" for name, value in rows[path.stem].items()), flush=True)
        if out:  # after each model: compilers take minutes
            Path(out).write_text(
                json.dumps({"commit": commit, "timm": timm.__version__, "models": rows}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", default="")
    parser.add_argument("--commit", default="")
    given = parser.parse_args(sys.argv[1:])
    reference(given.folder, given.names) if given.what == "reference" else compare(given.folder, given.out, given.commit)
