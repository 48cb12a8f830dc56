"""Models of torchvision in small: their own classes with few and narrow layers, and detectors over a batch of padded boxes.

torchvision's wheel is built beside torch's for CUDA. Where its operators do not load, the two that training needs are given here
in torch operators, before it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 3


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    order = scores.argsort(descending=True)
    kept: list[Tensor] = []
    while len(order):
        kept.append(order[0])
        ours, others = boxes[order[0]], boxes[order[1:]]
        edges = torch.minimum(ours[2:], others[:, 2:]) - torch.maximum(ours[:2], others[:, :2])
        inside = edges.clamp(min=0).prod(1)
        areas = (others[:, 2:] - others[:, :2]).prod(1) + (ours[2:] - ours[:2]).prod()
        order = order[1:][inside / (areas - inside) <= threshold]
    return torch.stack(kept) if kept else order


def _roi_align(*arguments: Any) -> Tensor:
    return importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__(*arguments)


_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "nms": ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor", _nms),
    "roi_align": (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
        _roi_align,
    ),
}
_library: Any = None


def load() -> Any:
    """Return `torchvision.models`, with operators that take the place of those that its wheel could not load."""
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        _library.define(
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )  # for which torchvision has a shape
        for name, (schema, function) in _OPERATORS.items():
            _library.define(schema)
            _library.impl(name, function, "CPU" if name == "nms" else "CompositeImplicitAutograd")
        importlib.import_module("torchvision")
        for name in ("boxes", "roi_align"):
            module = importlib.import_module(f"torchvision.ops.{name}")
            vars(module).update(_assert_has_ops=lambda: None, _has_ops=lambda: True)
    return importlib.import_module("torchvision.models")


def load_if_there() -> None:
    """Load torchvision before other libraries look for it: they would meet what its wheel lacks."""
    if importlib.util.find_spec("torchvision") is not None:
        load()


def build(name: str, fields: dict[str, Any]) -> nn.Module:
    """Return a model by its name: one of the small ones here, else torchvision's own of that name."""
    models = load()
    if name in _SMALL:
        return _SMALL[name](models, **fields)
    for place in (models, models.segmentation, models.video):
        if hasattr(place, name):
            return getattr(place, name)(num_classes=CLASSES, **fields)
    raise AttributeError(name)


class Detector(nn.Module):
    """A detector that gives the terms of its loss for a batch of images, each with as many boxes.

    Masks are the boxes' own areas, and the keypoints of each are its corner and its middle.

    Args:
        model: Of torchvision: takes lists of images and of targets.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the terms of the loss.

        Args:
            images: Of shape [samples, 3, height, width].
            boxes: Of shape [samples, boxes, 4], in pixels.
            labels: Of shape [samples, boxes].
        """
        targets = [_target(images, box.to(images.dtype), label) for box, label in zip(boxes, labels, strict=True)]
        return self.model(list(images), targets)


def _target(images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
    ys, xs = (torch.arange(size, device=boxes.device) for size in images.shape[-2:])
    x1, y1, x2, y2 = (edge[:, None] for edge in boxes.unbind(1))
    masks = ((ys >= y1) & (ys < y2))[:, :, None] & ((xs >= x1) & (xs < x2))[:, None, :]
    points = torch.stack([boxes[:, :2] + 0.5, (boxes[:, :2] + boxes[:, 2:]) / 2], 1)
    keypoints = torch.cat([points, torch.ones_like(points[..., :1])], -1)
    return {"boxes": boxes, "labels": labels, "masks": masks.to(torch.uint8), "keypoints": keypoints}


def _resnet(models: Any, **fields: Any) -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, **fields)


def _resnext(models: Any, **fields: Any) -> nn.Module:
    return models.ResNet(
        models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4, **fields
    )


def _densenet(models: Any, **fields: Any) -> nn.Module:
    return models.DenseNet(8, (2, 2), 16, num_classes=CLASSES, **fields)


def _convnext(models: Any, **fields: Any) -> nn.Module:
    setting = [models.convnext.CNBlockConfig(*sizes) for sizes in ((16, 32, 1), (32, 64, 2), (64, None, 1))]
    return models.ConvNeXt(setting, num_classes=CLASSES, **fields)


def _swin(models: Any, **fields: Any) -> nn.Module:
    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    if fields.pop("version", 1) == 2:
        module = models.swin_transformer
        fields |= {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return models.SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=CLASSES, **fields)


def _vit(models: Any, **fields: Any) -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    return models.VisionTransformer(**sizes, num_classes=CLASSES, **fields)


def _maxvit(models: Any, **fields: Any) -> nn.Module:
    sizes = {
        "input_size": (32, 32),
        "stem_channels": 16,
        "partition_size": 2,
        "block_channels": [16, 32],
        "block_layers": [1, 1],
    }
    return models.MaxVit(**sizes, head_dim=8, stochastic_depth_prob=0.0, num_classes=CLASSES, **fields)


def _mvit(models: Any, **fields: Any) -> nn.Module:
    config = models.video.mvit.MSBlockConfig
    first = config(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])
    second = config(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1])
    setting = {"spatial_size": (32, 32), "temporal_size": 4, "block_setting": [first, second]}
    return models.video.MViT(
        **setting,
        residual_pool=False,
        residual_with_cls_embed=False,
        rel_pos_embed=False,
        proj_after_attn=False,
        num_classes=CLASSES,
        **fields,
    )


def _r3d(models: Any, **fields: Any) -> nn.Module:
    module = models.video.resnet
    convolutions = [getattr(module, fields.pop("conv", "Conv3DSimple"))] * 2
    layers = [module.BasicBlock, [*convolutions, module.Conv3DSimple, module.Conv3DSimple], [1, 1, 1, 1]]
    return module.VideoResNet(*layers, module.BasicStem, num_classes=CLASSES, **fields)


def _s3d(models: Any, **fields: Any) -> nn.Module:
    model = models.video.S3D(num_classes=CLASSES, **fields)
    model.avgpool = nn.AdaptiveAvgPool3d(1)  # its own takes images of 224
    return model


def _swin3d(models: Any, **fields: Any) -> nn.Module:
    sizes = {"patch_size": [2, 4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, 4, 4]}
    module = models.video.swin_transformer
    return module.SwinTransformer3d(**sizes, stochastic_depth_prob=0.0, num_classes=CLASSES, **fields)


def _fcn(models: Any, **fields: Any) -> nn.Module:
    body = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    module = models.segmentation.fcn
    features = models._utils.IntermediateLayerGetter(body, {"layer4": "out", "layer3": "aux"})
    return module.FCN(features, module.FCNHead(512, CLASSES), module.FCNHead(256, CLASSES), **fields)


def _backbone(channels: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, channels), (channels, channels)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(2, after), nn.ReLU()]
    body = nn.Sequential(*layers)
    vars(body)["out_channels"] = channels
    return body


def _detector(models: Any, kind: str) -> nn.Module:
    detection, anchors = models.detection, models.detection.anchor_utils.AnchorGenerator
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 64}
    if kind.endswith("RCNN"):
        pool = importlib.import_module("torchvision.ops").MultiScaleRoIAlign
        head: dict[str, Any] = {
            "box_head": detection.faster_rcnn.TwoMLPHead(16 * 9, 32),
            "box_predictor": detection.faster_rcnn.FastRCNNPredictor(32, CLASSES),
        }
        if kind == "MaskRCNN":
            head["mask_roi_pool"] = pool(["0"], 4, 2)
            head["mask_head"] = detection.mask_rcnn.MaskRCNNHeads(16, (16,), 1)
            head["mask_predictor"] = detection.mask_rcnn.MaskRCNNPredictor(16, 16, CLASSES)
        if kind == "KeypointRCNN":
            head["keypoint_roi_pool"] = pool(["0"], 4, 2)
            head["keypoint_head"] = detection.keypoint_rcnn.KeypointRCNNHeads(16, (16,))
            head["keypoint_predictor"] = detection.keypoint_rcnn.KeypointRCNNPredictor(16, 2)
        rpn = {"rpn_anchor_generator": anchors(((8, 16, 32),), ((0.5, 1.0, 2.0),)), "box_roi_pool": pool(["0"], 3, 2)}
        few = {"rpn_pre_nms_top_n_train": 60, "rpn_post_nms_top_n_train": 30}
        return Detector(getattr(detection, kind)(_backbone(), **sizes, **rpn, **head, **few))
    if kind == "SSD":
        boxes = detection.anchor_utils.DefaultBoxGenerator([[2]])
        return Detector(detection.ssd.SSD(_OneLevel(_backbone()), boxes, (64, 64), CLASSES))
    generator = anchors(((8, 16, 32),), ((0.5, 1.0, 2.0),)) if kind == "RetinaNet" else anchors(((8,),), ((1.0,),))
    return Detector(getattr(detection, kind)(_backbone(32), CLASSES, anchor_generator=generator, **sizes))


class _OneLevel(nn.Module):
    """Gives features by name, as detectors of several levels want them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.out_channels = [16]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"0": self.body(images)}


_SMALL: dict[str, Callable[..., nn.Module]] = {
    "resnet": _resnet,
    "resnext": _resnext,
    "densenet": _densenet,
    "convnext": _convnext,
    "swin": _swin,
    "vit": _vit,
    "maxvit": _maxvit,
    "mvit": _mvit,
    "r3d": _r3d,
    "s3d": _s3d,
    "swin3d": _swin3d,
    "fcn": _fcn,
    "detector": _detector,
}
