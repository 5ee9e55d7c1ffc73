"""What is computed on tiles and in one process: models, and single functions of torch's."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.tiles.cosmoflow import CosmoFlow
from examples.tiles.unet2d import PictureUNet, group_norm
from examples.tiles.unet3d import VolumeUNet
from examples.tiles.vit import PictureViT
from tonari.trainer import ResNet, SmallCNN, ViT

Function = Callable[..., Any]


class Recomputed(nn.Module):
    """A model whose layers are computed again in the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Any:
        return checkpoint(self.model, values, use_reentrant=False)


class Excited(nn.Module):
    """Squeeze and excite (Hu et al., CVPR 2018): a mean over all tiles weighs each position."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.squeeze = nn.Conv2d(3, 8, 5, padding="same"), nn.Linear(8, 8)
        self.drop, self.drop_channels = nn.Dropout(0.3), nn.Dropout2d(0.3)
        self.after, self.norm = nn.Conv2d(10, 2, 4, 2, 1, dilation=2), nn.LayerNorm(10)
        self.places = nn.Parameter(torch.randn(1, 8, 13, 22))

    def forward(self, values: Tensor) -> Tensor:
        values = self.drop(F.relu_(self.before(values)) + self.places)
        scale = torch.sigmoid(self.squeeze(values.mean((2, 3))))
        values = self.drop_channels(values * scale[..., None, None])
        height, width = values.shape[2:]
        rows = torch.linspace(-1, 1, height).view(1, 1, -1, 1).expand(len(values), 1, -1, width)
        values = torch.cat([values, rows, rows.sin()], 1)
        return cast(Tensor, self.after(self.norm(values.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))


def signals() -> nn.Module:
    """Make the layers of one dimension that are tiled."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), nn.InstanceNorm1d(4), nn.SiLU(),
        nn.AvgPool1d(3, 1, 1), nn.Dropout1d(0.3), nn.ConvTranspose1d(4, 8, 4, 2, 1),
        nn.MaxPool1d(2), nn.Upsample(scale_factor=2, mode="linear"), nn.AdaptiveAvgPool1d(1),
    )  # fmt: skip


def fields() -> nn.Module:
    """Make the layers of three dimensions that the networks of the examples do without."""
    return nn.Sequential(
        nn.Conv3d(2, 4, 2, stride=2, padding="valid"), nn.Dropout3d(0.3), nn.AvgPool3d(2, 1),
        nn.Upsample(scale_factor=2, mode="trilinear"), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool3d(1),
    )  # fmt: skip


WEATHER = (3, 13, 22)
MODELS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "cosmoflow": (lambda: CosmoFlow(2, 16, width=4, num_levels=3), (2, 16, 16, 16)),
    "volumes": (lambda: VolumeUNet(width=4), (1, 12, 8, 8)),
    "pictures": (lambda: Recomputed(PictureUNet(width=4)), WEATHER),
    "bilinear": (lambda: PictureUNet(width=4, bilinear=True, norm=group_norm), WEATHER),
    "around": (lambda: Recomputed(PictureUNet(width=4, padding_mode="circular")), WEATHER),
    "resnet": (lambda: ResNet(5, depth=8, norm="batch"), (3, 17, 16)),
    "cnn": (lambda: SmallCNN(5, image_size=19), (3, 19, 19)),
    "excited": (Excited, WEATHER),
    "signals": (signals, (3, 37)),
    "fields": (fields, (2, 17, 16, 5)),
    # Borders of tiles lie within patches
    "vit": (
        lambda: Recomputed(ViT(5, image_size=18, patch=3, width=8, depth=2, heads=2)),
        (3, 18, 18),
    ),
    "token": (lambda: PictureViT(5, (14, 22), patch=2, width=8, depth=2, heads=2), (3, 14, 22)),
}
"""What makes it, and the shape of a sample."""


def layer(kind: Function, *args: Any, **named: Any) -> nn.Module:
    """Make a layer with weights that are the same each time."""
    torch.manual_seed(0)
    return cast(nn.Module, kind(*args, **named))


SHAPE = (2, 4, 13, 22)
LAYERS: dict[str, Function] = {
    f"{kind.__name__} {args} {named}": lambda k=kind, a=args, n=named: layer(k, *a, **n)
    for kind, args, named in [
        (nn.Conv2d, (4, 4, 1), {}),
        (nn.Conv2d, (4, 6, 1), {"stride": 2}),
        (nn.Conv2d, (4, 4, 3), {}),
        (nn.Conv2d, (4, 4, (2, 3)), {"stride": (2, 1), "padding": (0, 1)}),
        (nn.Conv2d, (4, 4, 7), {"stride": 3, "padding": 3, "groups": 2}),
        (nn.Conv2d, (4, 4, 4), {"padding": "same", "dilation": 2}),
        (nn.Conv2d, (4, 4, 5), {"padding": 2, "padding_mode": "reflect", "bias": False}),
        (nn.Conv2d, (4, 4, 3), {"padding": 3, "padding_mode": "replicate"}),
        (nn.Conv2d, (4, 4, 5), {"padding": (4, 2), "padding_mode": "circular", "stride": 2}),
        (nn.Conv2d, (4, 4, (13, 9)), {"padding": (6, 4)}),
        (nn.ConvTranspose2d, (4, 4, 2), {"stride": 2}),
        (nn.ConvTranspose2d, (4, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        (nn.ConvTranspose2d, (4, 4, 4), {"stride": 2, "padding": 1, "groups": 2, "bias": False}),
        (nn.ConvTranspose2d, (4, 4, (2, 3)), {"stride": 3, "dilation": 2, "padding": (1, 0)}),
        (nn.MaxPool2d, (2,), {}),
        (nn.MaxPool2d, (3, 2, 1), {}),
        (nn.MaxPool2d, (3, 2), {"ceil_mode": True, "dilation": (1, 2)}),
        (nn.AvgPool2d, (2,), {}),
        (nn.AvgPool2d, (3, 2, 1), {}),
        (nn.AvgPool2d, (3, 2, 1), {"count_include_pad": False, "ceil_mode": True}),
        (nn.AvgPool2d, (4, 3, 2), {"ceil_mode": True}),
        (nn.AvgPool2d, (3, 1, 1), {"divisor_override": 5}),
        (nn.AdaptiveAvgPool2d, (1,), {}),
        (nn.Upsample, (), {"scale_factor": 2}),
        (nn.Upsample, (), {"scale_factor": 1.7, "mode": "bilinear"}),
        (nn.Upsample, (), {"size": (31, 9), "mode": "bilinear", "align_corners": True}),
        (nn.Upsample, (), {"size": (20, 30), "mode": "nearest-exact"}),
        (nn.BatchNorm2d, (4,), {}),
        (nn.BatchNorm2d, (4,), {"momentum": None, "affine": False}),
        (nn.GroupNorm, (2, 4), {}),
        (nn.InstanceNorm2d, (4,), {"affine": True, "track_running_stats": True}),
        (nn.PReLU, (4,), {}),
        (nn.Dropout, (), {"inplace": True}),
        (nn.Dropout2d, (), {}),
        (nn.Softmax, (1,), {}),
        (nn.GLU, (1,), {}),
        (nn.Flatten, (), {}),
        (nn.CircularPad2d, ((3, 2, 1, 4),), {}),
        (nn.ConstantPad2d, ((3, -2, -1, 4), 1.5), {}),
        (nn.Hardtanh, (), {"inplace": True}),
    ]
}
TARGET = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
CLASSES = (TARGET[:, 0] * 4).long()
FAR = torch.arange(13 * 22)[:, None] - torch.arange(13 * 22)
WEIGHTS = TARGET[0, :, 0, :12].T
ATTEND: Function = F.scaled_dot_product_attention


def tokens(x: Tensor) -> Any:
    """Make a token of each position: [batch, positions, channels]."""
    return x.flatten(2).transpose(1, 2)


def by_hand(x: Tensor) -> Any:
    """Attend as before there was a function for it, and go back to a map."""
    heads = F.linear(tokens(x), WEIGHTS).reshape(2, -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
    query, key, value = heads
    looked = F.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.3) @ value
    return looked.transpose(2, 3).reshape(2, 4, 13, 22) + x


def with_token(x: Tensor) -> Any:
    """Put two positions before all others, and take them away again."""
    places = torch.cat([TARGET[:, 0, :2, :4], tokens(x)], 1)
    places = F.dropout(places.sin(), 0.2)
    places = places + F.scaled_dot_product_attention(places, places, places)
    rest = places[:, 2:].transpose(1, 2).unflatten(2, (13, 22))
    return rest * places[:, 1].mean(1).view(2, 1, 1, 1) + places.mean(1).sum() + places.sum()


def by_module(x: Tensor) -> Any:
    """Attend as torch's layer does, which gives the weights, too."""
    places = tokens(x).transpose(0, 1)
    looked, looks = F.multi_head_attention_forward(
        places, places, places, 4, 2, WEIGHTS, WEIGHTS[:, 0], None, None, False, 0.3,
        WEIGHTS[:4], WEIGHTS[:4, 1],
    )  # fmt: skip
    assert looks is not None
    return looked.transpose(0, 1) * looks.square().sum(-1, keepdim=True)


def of_one_channel(x: Tensor) -> Tensor:
    """Compare one channel with all of a target, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.mse_loss(x[:, :1], TARGET)


CALLS: dict[str, Function] = {
    "one for all channels": of_one_channel,
    "a leaf": lambda x: x.detach().requires_grad_() * x,
    "mean": lambda x: x.mean(),
    "sum over space": lambda x: x.sum((-2, -1), keepdim=True),
    "amax over channels": lambda x: x.amax(1) * x.std(axis=1),
    "view as rows": lambda x: x.view(len(x), -1).cos(),
    "a table beside": lambda x: torch.where(TARGET > 0.5, x, -x) / (1 + TARGET[0]),
    "other cuts": lambda x: F.pad(x, (5, 0))[..., :, :].mul(2) + F.pad(x, (0, 5)),
    "in place": lambda x: x.clone().add_(F.pad(x, (0, 0, 3, -3))).clamp_(-0.5, 0.5) * x,
    "halves of channels": lambda x: x[:, :2] * x.chunk(2, 1)[1] + x.flip(1)[:, 2:],
    "flipped": lambda x: x.flip(2, 3) * x + torch.flip(x, [-1]).cos() * x.flip(dims=(0, 2)),
    "last": lambda x: F.linear(x.movedim(1, -1), TARGET[0, 0, :3, :4]) @ TARGET[0, 0, :3, :2],
    "a channel": lambda x: x[0, 1].unsqueeze(0).transpose(1, 2) + 1,
    "reversed operands": lambda x: (1 - x) / (2 + x.abs()) + 2 / (x.square() + 1),
    "cross entropy": lambda x: F.cross_entropy(x, CLASSES, ignore_index=2, label_smoothing=0.1),
    "of probabilities": lambda x: F.cross_entropy(x, TARGET.softmax(1)),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), CLASSES, reduction="sum"),
    "along channels": lambda x: (
        x.cumsum(1) * x.roll(1, 1) + torch.cat(F.normalize(x).split(2, 1), 1)
    ),
    "one channel": lambda x: torch.narrow(x, 1, 1, 1).squeeze(1) * x.new_full((13, 1), 3.0),
    "over channels": lambda x: (
        x.amin(1) * x.argmax(1)
        + x.logsumexp(1) * x.argmin(1)
        + x.var(1) * (x > 0).all(1) * (x > 1).any(1)
    ),
    "rms": lambda x: F.rms_norm(torch.permute(x, (0, 2, 3, 1)), (4,)),
    "smooth": lambda x: F.smooth_l1_loss(x, TARGET) * x.new_tensor([1.0, 2]) + x.new_zeros(2),
    "binary": lambda x: F.binary_cross_entropy(x.sigmoid(), TARGET, TARGET),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, TARGET, pos_weight=TARGET[:1] + 1),
    "each": lambda x: F.huber_loss(x, TARGET, reduction="none").mean((1, 2, 3)),
    "two dimensions": lambda x: x.mean((1, 2, 3)) + F.mse_loss(x, TARGET) + F.l1_loss(x, TARGET),
    "deep": lambda x: F.conv2d(F.avg_pool2d(x, 6), TARGET[:, :, :2, :2], padding=1).sin(),
    "deeper and up": lambda x: F.interpolate(F.max_pool2d(x, 8), (13, 22)) * x,
    "noise": lambda x: x * torch.rand_like(x.new_empty(x.shape)) + x.new_ones(()).bernoulli_(0.5),
    "tokens": lambda x: F.dropout(tokens(x) * x.reshape(2, 4, -1).select(1, 1).unsqueeze(2)),
    "by hand": by_hand,
    "with token": with_token,
    "by module": by_module,
    "attention": lambda x: ATTEND(*[tokens(x)] * 3, FAR.cos(), scale=0.7),
    "dropped": lambda x: ATTEND(*[tokens(x)] * 3, FAR < 9, 0.4),
    "looked at": lambda x: ATTEND(TARGET[:, 0, :3, :4], *[tokens(x)] * 2),
    "rows of all": lambda x: torch.bmm(tokens(x), x.view(2, 4, -1)).flatten(1),
    "shape": lambda x: x.reshape(x.size(0), x.shape[1], *x.shape[2:]) * (x.numel() + x.dim()),
}


class Bare(torch.autograd.Function):
    """A function of autograd that torch shows no function of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Doubling(Bare):
    """One that computes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2


def assigned(x: Tensor, to: Any) -> Tensor:
    """Put a number in."""
    x[to] = 0
    return x


WHOLE = torch.zeros(SHAPE)
REFUSED: dict[str, Function] = {
    "flip of tokens": lambda x: tokens(x).flip(1),
    "roll": lambda x: x.roll(1, 3),
    "roll all": lambda x: x.roll(1),
    "softmax": lambda x: x.softmax(-1),
    "other bits": lambda x: x.view(torch.int32),
    "rows": lambda x: x[:, :, 1:],
    "a column": lambda x: x[..., 0],
    "a mask": lambda x: x[x > 0],
    "one axis": lambda x: x.mean(2),
    "largest": lambda x: x.max(),
    "deviation": lambda x: x.std(),
    "cumulated": lambda x: x.cumsum(3),
    "sorted": lambda x: x.sort(1),
    "split": lambda x: x.chunk(2, 2),
    "joined": lambda x: torch.cat([x, x], 2),
    "stacked": lambda x: torch.stack([x, x]),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "product": lambda x: x @ x.transpose(2, 3),
    "linear": lambda x: F.linear(x, torch.zeros(3, 22)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal": lambda x: ATTEND(*[tokens(x)] * 3, is_causal=True),
    "groups dropped": lambda x: ATTEND(*[tokens(x)[:, None]] * 3, None, 0.5, enable_gqa=True),
    "padded keys": lambda x: nn.MultiheadAttention(4, 2, batch_first=True)(
        *[tokens(x)] * 3, key_padding_mask=torch.zeros(2, 286, dtype=torch.bool)
    ),
    "tile on the right": lambda x: torch.ones(3, 4) @ x.flatten(2),
    "torn tokens": lambda x: x.flatten(2).view(2, 4, 22, 13),
    "axes apart": lambda x: x.transpose(1, 2).flatten(2),
    "a token": lambda x: tokens(x)[:, 5],
    "some tokens": lambda x: tokens(x)[:, 1:],
    "sorted tokens": lambda x: tokens(x).argsort(1),
    "softmax of tokens": lambda x: tokens(x).softmax(1),
    "token behind": lambda x: torch.cat([tokens(x), torch.zeros(2, 1, 4)], 1),
    "padded tokens": lambda x: F.pad(tokens(x), (0, 0, 1, 0)),
    "convolved tokens": lambda x: F.conv1d(x.flatten(2), torch.zeros(1, 4, 3)),
    "normed tokens": lambda x: F.batch_norm(x.flatten(2), None, None, training=True),
    "one position": lambda x: F.dropout(F.avg_pool2d(x, 6).transpose(1, 3)),
    "unfold": lambda x: F.unfold(x, 3),
    "patches": lambda x: x.unfold(2, 2, 2),
    "grid": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2)),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 4),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 1),
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "fft": lambda x: torch.fft.rfft2(x),
    "like": lambda x: torch.rand_like(x),
    "median": lambda x: x.median(),
    "norm": lambda x: x.norm(),
    "spread": lambda x: x.expand(2, 2, 4, 13, 22),
    "repeated": lambda x: x.repeat(1, 1, 2, 1),
    "shuffled": lambda x: F.pixel_shuffle(x, 2),
    "of one sample": lambda x: F.conv2d(x[0], torch.zeros(1, 4, 1, 1)),
    "moved": lambda x: F.conv2d(x.transpose(1, 2), torch.zeros(1, 13, 1, 1)),
    "recurrent": lambda x: nn.GRU(22, 2)(x[:, 0]),
    "number": lambda x: float(x),
    "numbers": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "data": lambda x: x.data,
    "a copy": lambda x: torch.tensor(x),
    "into a whole": lambda x: torch.zeros(SHAPE).add_(x),
    "put into a whole": lambda x: WHOLE.__setitem__(0, x[0]),
    "written": lambda x: torch.add(x, x, out=WHOLE),
    "set": lambda x: assigned(x, (0, 0, 0)),
    "set by mask": lambda x: assigned(x, x > 0),
    "own function": Bare.apply,
    "own function that computes": Doubling.apply,
    "reentrant": lambda x: checkpoint(torch.relu, x, use_reentrant=True),
    "hook": lambda x: x.register_hook(print),
    "where without values": lambda x: torch.where(x > 0.5),
    "size_average": lambda x: F.mse_loss(x, TARGET.to(x), size_average=True),
    "reduce": lambda x: F.smooth_l1_loss(x, TARGET.to(x), reduce=True),
    "operator": lambda x: torch.ops.aten.flip(x, [2]),
    "mapped": lambda x: torch.vmap(torch.relu)(x),
    "weights": lambda x: F.cross_entropy(x, CLASSES, weight=torch.ones(4)),
    "other dimensions": lambda x: x + x.transpose(2, 3),
    "part of a table": lambda x: x + torch.zeros(6, 1),
}
