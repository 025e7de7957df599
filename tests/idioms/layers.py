"""Fourier transforms, sampling, normalizations, as modern networks have them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def trained(b: Bench, make: Callable[[], nn.Module], channels: int = 8) -> Found:
    """Two steps of a layer between two convolutions: its results, weights and buffers."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), make(), nn.AdaptiveAvgPool2d(2)))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(4)
    for seed in range(2):
        y = net(b.images(seed))
        optimizer.zero_grad()
        (y * y).mean().backward()
        optimizer.step()
    return b.state(net) | {"y": y}


class Layer(nn.Module):
    """A layer made of weights by name and a function of them and the features."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


# -- Fourier transforms and recurrences -------------------------------------------------------------------------------


@idiom(quick=True)
def spectral_convolutions_of_operators(b: Bench) -> Found:
    """Fourier neural operators: low modes times complex weights."""

    def spectral(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft2(x)
        weights = torch.view_as_complex(m.weight)
        out = torch.zeros(x.size(0), 8, 7, 5, dtype=torch.cdouble, device=x.device)
        out[:, :, :2, :3] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :2, :3], weights)
        out[:, :, -2:, :3] = torch.einsum("bixy,ioxy->boxy", modes[:, :, -2:, :3], weights)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + m.skip(x))

    return trained(b, lambda: Layer(spectral, weight=0.1 * normal(8, 8, 2, 3, 2), skip=nn.Conv2d(8, 8, 1)))


@idiom()
def tokens_are_mixed_by_transforms(b: Bench) -> Found:
    """FNet and GFNet: real parts, and a learned filter."""

    def mix(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft2(
            torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(m.filter), s=(7, 9), norm="ortho"
        )
        return filtered + torch.fft.fft2(x.double()).real * 0.01

    return trained(b, lambda: Layer(mix, filter=normal(8, 7, 5, 2)))


@idiom()
def amplitudes_are_swapped_between_samples(b: Bench) -> Found:
    """Fourier domain adaptation."""
    x, other = b.images(0), b.images(1)
    spectrum, theirs = torch.fft.fftshift(torch.fft.fft2(x)), torch.fft.fftshift(torch.fft.fft2(other))
    amplitude, phase = spectrum.abs(), spectrum.angle()
    amplitude[..., 2:5, 3:6] = theirs.abs()[..., 2:5, 3:6]
    y = torch.fft.ifft2(torch.fft.ifftshift(amplitude * torch.exp(1j * phase))).real
    F.cross_entropy(b.model(y), b.labels()).backward()
    return b.gradients() | {"y": y}


@idiom()
def rows_are_read_by_a_recurrence(b: Bench) -> Found:
    def read(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, (_, cell) = m.lstm(x.mean(2).transpose(1, 2))
        return x + m.out(y).transpose(1, 2).unsqueeze(2) + cell[-1, :, :8, None, None]

    return trained(
        b, lambda: Layer(read, lstm=nn.LSTM(8, 9, batch_first=True, bidirectional=True), out=nn.Linear(18, 8))
    )


@idiom()
def a_convolutional_gru_updates_its_state(b: Bench) -> Found:
    """RAFT's update block."""

    def update(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(x.new_zeros(x.shape))
        for _ in range(3):
            both = torch.cat([state, x], dim=1)
            keep, reset = torch.sigmoid(m.gates(both)).chunk(2, 1)
            fresh = torch.tanh(m.fresh(torch.cat([reset * state, x], dim=1)))
            state = (1 - keep) * state + keep * fresh
        return state

    return trained(
        b, lambda: Layer(update, gates=nn.Conv2d(16, 16, 3, padding=1), fresh=nn.Conv2d(16, 8, 3, padding=1))
    )


# -- sampling and sizes -----------------------------------------------------------------------------------------------


@idiom()
def a_spatial_transformer_warps_its_input(b: Bench) -> Found:
    def warp(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        theta = (m.localization(x.mean((2, 3))) * 0.1 + torch.tensor([1.0, 0, 0, 0, 1, 0]).double()).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.size()), align_corners=False), align_corners=False)

    return trained(b, lambda: Layer(warp, localization=nn.Linear(8, 6)))


@idiom()
def a_flow_warps_the_other_image(b: Bench) -> Found:
    """VoxelMorph, PWC-Net: a grid of places plus a displacement, normalized."""

    def warp(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.meshgrid(torch.arange(7), torch.arange(9), indexing="ij")
        place = torch.stack((columns, rows), 0).double().unsqueeze(0) + m.flow(x)
        scaled = 2 * place / torch.tensor([8, 6]).view(1, 2, 1, 1) - 1
        y = F.grid_sample(x, scaled.permute(0, 2, 3, 1), mode="bilinear", padding_mode="border", align_corners=True)
        return y * (place.abs().amax(1, keepdim=True) < 6)

    return trained(b, lambda: Layer(warp, flow=nn.Conv2d(8, 2, 3, padding=1)))


@idiom()
def features_are_correlated_over_displacements(b: Bench) -> Found:
    """A cost volume."""

    def correlate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.flip(0), (1, 1, 1, 1))
        costs = [(x * padded[:, :, i : i + 7, j : j + 9]).mean(1, keepdim=True) for i in range(3) for j in range(3)]
        return F.leaky_relu(torch.cat(costs, 1), 0.1)

    return trained(b, lambda: Layer(correlate))


@idiom()
def a_pyramid_is_added_from_the_top_down(b: Bench) -> Found:
    """FPN: nearest interpolation to the size of the level below."""

    def pyramid(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        low = F.relu(m.down(x))
        lower = F.relu(m.down(low))
        merged = m.lateral(low) + F.interpolate(m.lateral(lower), size=low.shape[-2:], mode="nearest")
        return x + F.interpolate(merged, size=x.shape[-2:], mode="bilinear", align_corners=False)

    return trained(b, lambda: Layer(pyramid, down=nn.Conv2d(8, 8, 3, 2, 1), lateral=nn.Conv2d(8, 8, 1)))


@idiom()
def a_pyramid_is_pooled_and_joined(b: Bench) -> Found:
    """PSPNet and SPPF."""

    def pool(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[2:]
        levels = [
            F.interpolate(F.adaptive_avg_pool2d(x, s), size, mode="bilinear", align_corners=True) for s in (1, 2, 3)
        ]
        once = F.max_pool2d(x, 5, 1, 2)
        return m.out(torch.cat([x, *levels, once, F.max_pool2d(once, 5, 1, 2)], 1))

    return trained(b, lambda: Layer(pool, out=nn.Conv2d(48, 8, 1)))


@idiom()
def a_skip_is_cropped_or_padded_to_fit(b: Bench) -> Found:
    def join(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        up = m.up(F.max_pool2d(x, 2))
        rows, columns = x.size(2) - up.size(2), x.size(3) - up.size(3)
        up = F.pad(up, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        top = (x.size(2) - 5) // 2
        return torch.cat([x, up], 1)[:, :, top : top + 5, 2:-2]

    return trained(b, lambda: Layer(join, up=nn.ConvTranspose2d(8, 8, 2, 2)))


@idiom()
def pixels_are_shuffled_up_and_down(b: Bench) -> Found:
    def shuffle(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        big = F.pixel_shuffle(m.up(x), 2)
        return F.pixel_unshuffle(F.interpolate(big, scale_factor=(1.0, 2.0), mode="nearest"), 2)

    return trained(b, lambda: Layer(shuffle, up=nn.Conv2d(8, 12, 3, padding=1)))


@idiom()
def low_pass_filters_come_before_strides(b: Bench) -> Found:
    """BlurPool, and a Sobel filter for edges."""

    def blur(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype)
        kernel = (line[:, None] * line[None] / 16)[None, None].repeat(x.size(1), 1, 1, 1)
        low = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=x.size(1))
        edge = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]).double().expand(x.size(1), 1, 3, 3)
        return low + F.conv2d(low, edge, padding=1, groups=x.size(1)).abs()

    return trained(b, lambda: Layer(blur))


# -- gates, experts and norms -----------------------------------------------------------------------------------------


@idiom()
def channels_are_squeezed_and_excited(b: Bench) -> Found:
    def excite(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        n, c, _, _ = x.size()
        gate = m.gate(F.adaptive_avg_pool2d(x, 1).view(n, c)).view(n, c, 1, 1)
        places = torch.sigmoid(m.places(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))
        return x * gate.expand_as(x) * places

    gate = lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8), nn.Hardsigmoid())  # noqa: E731
    return trained(b, lambda: Layer(excite, gate=gate(), places=nn.Conv2d(2, 1, 7, padding=3)))


@idiom()
def channels_are_convolved_as_a_line(b: Bench) -> Found:
    """ECA-Net."""

    def gate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.line(x.mean((2, 3), keepdim=True).squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * y.sigmoid()

    return trained(b, lambda: Layer(gate, line=nn.Conv1d(1, 1, 3, padding=1, bias=False)))


@idiom()
def kernels_are_chosen_by_attention(b: Bench) -> Found:
    """CondConv, dynamic convolution: a kernel for each sample, as groups."""

    def convolve(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        shares = m.router(x.mean((2, 3))).softmax(-1)
        kernels = torch.mm(shares, m.kernels.view(3, -1)).view(n * 8, c, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), kernels, padding=1, groups=n).view(n, 8, h, w)

    return trained(b, lambda: Layer(convolve, router=nn.Linear(8, 3), kernels=0.1 * normal(3, 8, 8, 3, 3)))


@idiom()
def branches_are_chosen_softly(b: Bench) -> Found:
    """Selective kernels."""

    def select(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        branches = torch.stack([m.small(x), m.wide(x)], 1)
        shares = m.gate(branches.sum(1).mean((2, 3))).view(-1, 2, 8).softmax(1)
        return (branches * shares[..., None, None]).sum(1)

    return trained(
        b,
        lambda: Layer(
            select, small=nn.Conv2d(8, 8, 3, padding=1, groups=2), wide=nn.Conv2d(8, 8, 3, padding=2, dilation=2),
            gate=nn.Linear(8, 16),
        ),
    )  # fmt: skip


@idiom()
def experts_are_routed_by_their_scores(b: Bench) -> Found:
    def route(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = x.permute(0, 2, 3, 1).reshape(-1, 8)
        weights, chosen = m.router(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(m.experts):
            rows, slot = torch.where(chosen == index)
            out[rows] += weights[rows, slot, None] * expert(tokens[rows])
        return out.view(x.size(0), *x.shape[2:], 8).permute(0, 3, 1, 2)

    return trained(
        b, lambda: Layer(route, router=nn.Linear(8, 3), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    )


@idiom()
def a_layer_norm_over_channels_by_hand(b: Bench) -> Found:
    """ConvNeXt's, with global response normalization and a layer scale."""

    def norm(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        y = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)
        y = m.weight[:, None, None] * y
        size = torch.norm(y, p=2, dim=(2, 3), keepdim=True)
        return x + m.scale.view(1, -1, 1, 1) * (y * (size / (size.mean(dim=1, keepdim=True) + 1e-6)))

    return trained(b, lambda: Layer(norm, weight=normal(8), scale=0.1 * torch.ones(8)))


@idiom()
def statistics_of_styles_are_swapped(b: Bench) -> Found:
    """AdaIN, and modulated convolutions with demodulation."""

    def style(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        std, mean = torch.std_mean(x, dim=(2, 3), keepdim=True)
        y = (x - mean) / (std + 1e-5) * std.roll(1, 0) + mean.roll(1, 0)
        scales = m.affine(x.mean((2, 3)))
        weight = m.weight.unsqueeze(0) * scales.view(-1, 1, 8, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        return F.conv2d(y.view(1, -1, 7, 9), weight.flatten(0, 1), padding=1, groups=5).view(5, 8, 7, 9)

    return trained(b, lambda: Layer(style, affine=nn.Linear(8, 8), weight=normal(8, 8, 3, 3)))


@idiom()
def features_are_modulated_by_an_embedding(b: Bench) -> Found:
    """FiLM and time embeddings: plain constants meet distributed weights."""

    def modulate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        times = torch.tensor([1, 5, 2, 8, 3])
        steps = torch.exp(-math.log(100) * torch.arange(4).double() / 4)
        turned = times[:, None].double() * steps[None]
        embedded = m.time(torch.cat([turned.sin(), turned.cos()], dim=-1)) + m.classes(torch.tensor([0, 2, 2, 1, 0]))
        shift, scale = embedded[:, :, None, None].chunk(2, dim=1)
        return F.group_norm(x, 2) * (1 + scale) + shift

    return trained(b, lambda: Layer(modulate, time=nn.Linear(8, 16), classes=nn.Embedding(3, 16)))


@idiom()
def a_block_is_reparameterized_for_evaluation(b: Bench) -> Found:
    """RepVGG: batch norm folded into one convolution."""
    found = {}
    b.step()
    conv, norm = b.model.first, b.model.norm
    with torch.no_grad():
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        fused = nn.Conv2d(3, 7, 3, padding=1).double()
        fused.weight.copy_(conv.weight * scale.reshape(-1, 1, 1, 1))
        fused.bias.copy_(norm.bias - norm.running_mean * scale)
        found["fused"] = fused(b.images())
        found["apart"] = norm.eval()(conv(b.images()))
    return found


@idiom()
def torch_fuses_a_convolution_with_its_norm(b: Bench) -> Found:
    b.step()
    b.model.eval()
    fused = nn.utils.fuse_conv_bn_eval(b.model.first, b.model.norm)
    return {"y": fused(b.images())}


@idiom()
def paths_are_dropped_by_sample(b: Bench) -> Found:
    def drop(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not m.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        keep.div_(0.7)
        return x + m.conv(x) * keep

    return trained(b, lambda: Layer(drop, conv=nn.Conv2d(8, 8, 3, padding=1)))


@idiom()
def layers_made_by_torch_in_one_row(b: Bench) -> Found:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect", groups=4), nn.GroupNorm(2, 8), nn.PReLU(8),
        nn.ReplicationPad2d(1), nn.LPPool2d(2, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.GELU("tanh"),
        nn.Dropout2d(0.2), nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=2), nn.RMSNorm([16, 20]), nn.Hardswish(),
        nn.Upsample(scale_factor=0.5), nn.Softmax2d(), nn.LocalResponseNorm(3), nn.FractionalMaxPool2d(2, (5, 5)),
    )  # fmt: skip
    return trained(b, make)
