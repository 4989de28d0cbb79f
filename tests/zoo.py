"""Whole networks as their libraries build them: what is fused, and that nothing else changes.

Each is small enough for a CPU, made from a configuration without weights to download, and loaded
the way that users load it.  A library that is not installed skips its networks; `pip install
'.[zoo]'` installs all but torchvision and timm, which want the torchvision of the installed torch.

    pytest tests/zoo.py
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse import reports
from fxfuse.backend import compile_graph

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and what is expected of it.

    Attributes:
        name: Of the test.
        make: Builds it; the folder is for what it saves and loads.
        inputs: The arguments of a call.
        outcomes: How many norms are fused, and how many are left for which reason.
        calls: How often a call runs the fused operator, where not once for each site.
        compiled: How many sites torch.compile's backend fuses, where not as many.
    """

    name: str
    make: Callable[[Path], nn.Module]
    inputs: Callable[[], Inputs]
    outcomes: dict[str, int]
    calls: int | None = None
    compiled: int | None = None


def image(*shape: int) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(shape),), {})


# ---- transformers ---------------------------------------------------------------------------


def transformers_model(kind: str, **settings: Any) -> Callable[[Path], nn.Module]:
    """A model from a small configuration, saved and loaded by the library's own code."""

    def make(folder: Path) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        # Some versions take entries out of the dictionaries that they are given.
        config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(settings))
        cls = getattr(transformers, f"{kind}Model")
        cls(config).save_pretrained(folder)
        return cls.from_pretrained(folder)  # type: ignore[no-any-return]

    return make


WAV2VEC2 = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,  # which draws from NumPy's generator
    "layerdrop": 0.0,
}
MASKFORMER = {
    "fpn_feature_size": 32,
    "mask_feature_size": 32,
    "backbone_config": {
        "model_type": "swin",
        "image_size": 64,
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "window_size": 2,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
        "drop_path_rate": 0.0,
    },
    "decoder_config": {
        "model_type": "detr",
        "d_model": 32,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "num_queries": 5,
    },
}
BIT = {
    "embedding_size": 32,
    "hidden_sizes": [32, 64],
    "depths": [1, 2],
    "num_groups": 8,
    "drop_path_rate": 0.0,
}

# ---- diffusers ------------------------------------------------------------------------------


def diffusers_model(kind: str, **settings: Any) -> Callable[[Path], nn.Module]:
    """A model from a small configuration, saved and loaded by the library's own code."""

    def make(folder: Path) -> nn.Module:
        diffusers = pytest.importorskip("diffusers")
        cls = getattr(diffusers, kind)
        cls(**settings).save_pretrained(folder)
        return cls.from_pretrained(folder)  # type: ignore[no-any-return]

    return make


UNET_CONDITION = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "norm_num_groups": 16,
}
UNET = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 16,
}
VAE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 16,
    "sample_size": 32,
}


def unet_condition_inputs(**kwargs: Any) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(2, 4, 16, 16), 7, torch.randn(2, 5, 16)), kwargs)


def unet_inputs(**kwargs: Any) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(2, 3, 16, 16), 7), kwargs)


# ---- timm and torchvision -------------------------------------------------------------------


def timm_model(name: str, **settings: Any) -> Callable[[Path], nn.Module]:
    def make(_: Path) -> nn.Module:
        timm = pytest.importorskip("timm", exc_type=ImportError)
        model: nn.Module = timm.create_model(name, num_classes=7, **settings)
        return model

    return make


class Heads(nn.Module):
    """A detector up to its heads: what follows sorts boxes, which rounding may reorder."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.detector.head(list(self.detector.backbone(x).values()))


def fcos(_: Path) -> nn.Module:
    detection = pytest.importorskip("torchvision.models.detection", exc_type=ImportError)
    return Heads(detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3))


# ---- our own --------------------------------------------------------------------------------


class MLP(nn.Module):
    """A policy network: Linear -> GroupNorm -> Hardtanh at several depths of the tree."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(*self.chain(10, width))
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.Sequential(*self.chain(width, width)), nn.Dropout(0.1))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    @staticmethod
    def chain(features: int, width: int) -> tuple[nn.Module, ...]:
        return nn.Linear(features, width), nn.GroupNorm(4, width), nn.Hardtanh(-2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.trunk:
            x = x + block(x)
        return self.head(x)


class Tied(nn.Module):
    """Two chains that share their weights, one of them through F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.one, self.two = nn.GroupNorm(3, 12), nn.GroupNorm(3, 12)
        self.two.weight = self.one.weight
        self.act = nn.Hardtanh(-0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.one(self.linear(x)))
        return self.act(self.two(F.linear(y, self.linear.weight)))


def weight_normed(_: Path) -> nn.Module:
    linear = nn.Linear(12, 12)
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(linear), nn.GroupNorm(3, 12), nn.Hardtanh(-0.5, 0.5)
    )


def data_parallel(_: Path) -> nn.Module:
    return nn.DataParallel(MLP())


SMALL = image(2, 3, 32, 32)
NETWORKS = [
    Network(
        "transformers Wav2Vec2",
        transformers_model("Wav2Vec2", **WAV2VEC2),
        image(2, 800),
        {"fused": 1},
    ),
    Network(
        "transformers MaskFormer",
        transformers_model("MaskFormer", **MASKFORMER),
        image(1, 3, 64, 64),
        {"fused": 4, "alone": 3},
    ),
    Network("transformers Bit", transformers_model("Bit", **BIT), SMALL, {"fused": 10}),
    Network(
        "diffusers UNet2DConditionModel",
        diffusers_model("UNet2DConditionModel", **UNET_CONDITION),
        unet_condition_inputs(),
        {"fused": 16, "untraceable": 1, "not_repeated": 4},
        compiled=17,
    ),
    Network(
        "diffusers UNet2DConditionModel, a tuple",
        diffusers_model("UNet2DConditionModel", **UNET_CONDITION),
        unet_condition_inputs(return_dict=False),
        {"fused": 16, "untraceable": 1, "not_repeated": 4},
        compiled=17,
    ),
    Network(
        "diffusers UNet2DModel",
        diffusers_model("UNet2DModel", **UNET),
        unet_inputs(),
        {"fused": 16, "untraceable": 5},
        compiled=17,
    ),
    Network(
        "diffusers UNet2DModel, a tuple",
        diffusers_model("UNet2DModel", **UNET),
        unet_inputs(return_dict=False),
        {"fused": 16, "untraceable": 5},
        compiled=17,
    ),
    Network(
        "diffusers AutoencoderKL",
        diffusers_model("AutoencoderKL", **VAE),
        image(1, 3, 32, 32),
        {"fused": 22, "untraceable": 2},
    ),
    Network("timm resnet50_gn", timm_model("resnet50_gn"), SMALL, {"fused": 49, "alone": 4}),
    Network("timm resnetv2_50x1_bit", timm_model("resnetv2_50x1_bit"), SMALL, {"fused": 49}),
    Network("timm resnetv2_50d_gn", timm_model("resnetv2_50d_gn"), SMALL, {"fused": 51}),
    Network(
        "timm efficientnet_b0_gn",
        timm_model("efficientnet_b0_gn"),
        SMALL,
        {"fused": 42, "alone": 7},
        compiled=33,
    ),
    Network(
        "timm regnety_040_sgn",
        timm_model("regnety_040_sgn"),
        SMALL,
        {"fused": 67, "alone": 4},
    ),
    Network("timm poolformer_s12", timm_model("poolformer_s12"), SMALL, {"alone": 24}),
    Network(
        "timm mobilevitv2_050",
        timm_model("mobilevitv2_050"),
        image(2, 3, 64, 64),
        {"alone": 21},
    ),
    Network("timm shvit_s1", timm_model("shvit_s1"), image(2, 3, 64, 64), {"alone": 9}),
    # Five levels of the pyramid go through the same heads.
    Network(
        "torchvision fcos_resnet50_fpn",
        fcos,
        image(1, 3, 64, 64),
        {"fused": 8},
        calls=40,
        compiled=40,
    ),
    Network("an MLP", lambda _: MLP(), image(6, 10), {"fused": 4}),
    Network("tied weights", lambda _: Tied(), image(6, 12), {"fused": 2}),
    Network("a normed weight", weight_normed, image(6, 12), {"fused": 1}),
    Network("DataParallel", data_parallel, image(6, 10), {"fused": 4}),
]


@pytest.fixture(params=NETWORKS, ids=lambda network: network.name)
def network(request: pytest.FixtureRequest) -> Network:
    return request.param  # type: ignore[no-any-return]


def build(network: Network, folder: Path, device: torch.device) -> nn.Module:
    """The network with random affine parameters, since a new norm's are ones and zeros."""
    model = network.make(folder).eval().to(device)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm) and module.affine:
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
    return model


def move(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    def of(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() else t.to(device)

    moved: Inputs = pytree.tree_map_only(Tensor, of, inputs)
    return moved


class Calls(TorchDispatchMode):
    """Counts the fused operators' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += str(func).startswith(("fxfuse.group_norm_", "fxfuse.linear_group_norm_"))
        return func(*args, **(kwargs or {}))


def expected_calls(network: Network, fused: nn.Module) -> int:
    """How often a call of a network runs the operator."""
    report = fxfuse.report(fused)
    return report.fused + report.alone if network.calls is None else network.calls


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a result."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    elif hasattr(output, "__dict__") and not isinstance(output, (Tensor, dict, list, tuple)):
        output = vars(output)
    leaves = pytree.tree_leaves(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def fused_sites(model: nn.Module) -> int:
    """How many sites of a model are fused; of a copy only modules with fused ones are known."""
    return fxfuse.explain(model).fused


def forward(model: nn.Module, inputs: Inputs) -> Any:
    torch.manual_seed(3)
    return model(*inputs[0], **inputs[1])


def gradients(model: nn.Module, outputs: list[Tensor]) -> list[Tensor]:
    """Of a random weighting of all outputs, for every parameter that has one."""
    generator = torch.Generator().manual_seed(4)
    loss = sum(
        (t * torch.randn(t.shape, generator=generator).to(t)).sum()
        for t in outputs
        if t.requires_grad
    )
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


# Where rounding moves a value across an activation's kink, a gradient jumps.  On resnet50_gn, of
# the largest value: up to 1e-2 by eager, 2e-3 by us (CPU, 2026-11-30).  In float64 nothing jumps.
GRADIENT_JUMPS = 3e-2


def close(
    ours: list[Tensor], eager: list[Tensor], exact: list[Tensor], tolerance: float = 1e-6
) -> None:
    """No further from float64 than twice as far as eager, each tensor by its largest value.

    What is 0 but for rounding, such as the gradient of the bias of attention's keys, is measured by
    what is usual for the others.
    """
    assert len(ours) == len(eager) == len(exact)
    scales = [reference.abs().max().item() if reference.numel() else 0.0 for reference in exact]
    usual = statistics.median(scales)
    for a, b, reference, scale in zip(ours, eager, exact, scales, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.numel():
            error, allowed = ((t.double() - reference).abs().max().item() for t in (a, b))
            slack = tolerance * scale if scale > 1e-9 * usual else 1e-6 * usual
            assert error <= 2 * allowed + slack + 1e-9, (error, allowed, scale)


def test_it_fuses_what_is_expected(network: Network, tmp_path: Path, device: torch.device) -> None:
    model = build(network, tmp_path, device)
    fused = fxfuse.optimize(model)
    report = fxfuse.report(fused)
    assert dict(Counter(map(reports.outcome, report.sites))) == network.outcomes, str(report)
    inputs = move(network.inputs(), device, torch.float32)
    with torch.no_grad():
        forward(fused, inputs)  # the first call of its kind traces, which no mode may watch
        with Calls() as calls:
            forward(fused, inputs)
    assert calls.count == expected_calls(network, fused)


@pytest.mark.parametrize("train", [False, True])
def test_values_gradients_and_state(
    network: Network, tmp_path: Path, device: torch.device, train: bool
) -> None:
    model = build(network, tmp_path, device)
    inputs = network.inputs()
    model.train(train)
    fused = fxfuse.optimize(model)
    assert type(fused).__name__ == type(model).__name__
    assert isinstance(fused, type(model))
    assert list(fused.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    wide = [copy.deepcopy(m).double() for m in (model, fused)]
    narrow = [copy.deepcopy(m) for m in (model, fused)]
    results: list[tuple[list[Tensor], list[Tensor]]] = []
    for m, dtype in (*((m, torch.float64) for m in wide), *((m, torch.float32) for m in narrow)):
        output = forward(m, move(inputs, device, dtype))
        values = tensors(output)
        results.append(([t.detach() for t in values], gradients(m, values)))
    exact, ours_exact, eager, ours = results
    assert len(exact[0]) > 0
    assert len(exact[1]) > 0
    torch.testing.assert_close(ours_exact, exact, rtol=1e-8, atol=1e-8)
    close(ours[0], eager[0], exact[0])
    close(ours[1], eager[1], exact[1], GRADIENT_JUMPS)
    for (name, a), (other, b) in zip(
        wide[0].state_dict().items(), wide[1].state_dict().items(), strict=True
    ):  # running statistics and counters of the training step
        assert name == other
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)


def test_through_the_backend(network: Network, tmp_path: Path, device: torch.device) -> None:
    torch._dynamo.reset()
    model = build(network, tmp_path, device).double()
    inputs = move(network.inputs(), device, torch.float64)
    compiled = torch.compile(model, backend=compile_graph, options={"inner": "eager"})
    results: list[tuple[list[Tensor], list[Tensor]]] = []
    for m in (model, compiled):
        model.zero_grad()
        values = tensors(forward(m, inputs))
        results.append(([t.detach() for t in values], gradients(model, values)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-8)
    expected = network.outcomes.get("fused", 0) if network.compiled is None else network.compiled
    assert fxfuse.report().fused == expected, str(fxfuse.report())


def test_it_lives_on(network: Network, tmp_path: Path, device: torch.device) -> None:
    """Train and eval, deepcopy, pickle, half precision, restore."""
    model = build(network, tmp_path, device)
    fused = fxfuse.optimize(model)
    inputs = move(network.inputs(), device, torch.float32)
    with torch.no_grad():
        expected = forward(model, inputs)

        def same(other: nn.Module) -> None:
            torch.testing.assert_close(
                tensors(forward(other, inputs)), tensors(expected), rtol=1e-3, atol=1e-4
            )

        assert type(forward(fused, inputs)) is type(expected)
        same(fused.train().eval())
        duplicate = copy.deepcopy(fused)
        assert fused_sites(duplicate) == fxfuse.report(fused).fused
        same(duplicate)
        if any(nn.utils.parametrize.is_parametrized(m) for m in model.modules()):
            for m in (model, fused):
                with pytest.raises(RuntimeError, match="parametrized modules"):
                    pickle.dumps(m)
        else:
            loaded = pickle.loads(pickle.dumps(fused))
            assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
            same(loaded)
            again = fxfuse.optimize(loaded)
            assert fxfuse.report(again).fused == fxfuse.report(fused).fused
        same(fxfuse.restore(duplicate))
        low = torch.bfloat16 if device.type == "cpu" else torch.float16
        halves = [copy.deepcopy(m).to(low) for m in (model, fused)]
        forward(halves[1], move(inputs, device, low))
        with Calls() as calls:
            results = [tensors(forward(m, move(inputs, device, low))) for m in halves]
        assert [(t.shape, t.dtype) for t in results[0]] == [(t.shape, t.dtype) for t in results[1]]
        assert calls.count == expected_calls(network, fused)
    for name in ("config", "generate", "from_pretrained", "encode", "forward_features", "chain"):
        assert hasattr(fused, name) == hasattr(model, name)
